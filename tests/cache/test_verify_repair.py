"""Verify: forged values, unfinished caches, and repair."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cache
from cache import finishing
from cache.errors import CacheError, DamageError
from cache.filling import begin_work, missing_shards, reopened
from cache.format import BACKUP, MANIFEST, receipt_key
from cache.manifest import Extent, Manifest
from cache.receipt import Receipt, StoredArray, data_digest
from cache.seals import seal_rows
from cache.shards import array_chunk_key, finished_shards, write_shard
from cache.statistics import statistics_of
from cache.storage import encode_chunk
from cache.verify import read_shard, verify
from tests.cache.builder import (
    Built,
    finish,
    make_cache,
    one_shards_damage,
    same,
    shard_file,
)

# Values that make no sense, whoever wrote them.


def _rewrite(built: Built, shard: int, change: Callable[[dict[str, np.ndarray]], None]) -> Built:
    """Stores changed arrays of a shard with seals, receipts and a manifest that agree."""
    encoding, store = built.encoding, built.store
    place = slice(*built.manifest.shard_rows(shard))
    arrays = {name: value[place].copy() for name, value in built.arrays.items()}
    change(arrays)
    old = Receipt.from_bytes(store.read(receipt_key(shard)) or b"", "it")
    seals = seal_rows(arrays, encoding, [built.manifest.identity], np.arange(*old.rows))
    stored = {}
    for name, values in {**arrays, "seals": seals}.items():
        data = encode_chunk(encoding.stored_arrays()[name].zarr(10, 4), shard, values)
        store.write(array_chunk_key(name, values.ndim, shard), data)
        stored[name] = StoredArray(data_digest(values), len(data))
    receipt = replace(old, arrays=stored, statistics=statistics_of(arrays, encoding))
    store.write(receipt_key(shard), receipt.to_bytes())
    manifest = finish(store, replace(built.manifest, state="open", run="x"), (Extent(0, 3, 10),))
    return replace(built, manifest=manifest)


def test_a_consistent_forgery_of_nonsense_is_found(exact_cache: Built, copy: Any) -> None:
    """All digests are right; what is stored cannot be a teacher's prediction."""

    def swap(arrays: dict[str, np.ndarray]) -> None:
        row, position = np.argwhere(arrays["label_mask"] == 1)[0].tolist()
        arrays["target_logprobs"][row, position] = arrays["target_logprobs"][row, position, ::-1]

    built = _rewrite(copy(exact_cache), 1, swap)
    assert verify(built.path).sound
    found = one_shards_damage(verify(built.path, full=True), built, 1)
    assert any("exact entries out of order" in item.reason for item in found)


def test_a_document_that_is_not_in_the_corpus_is_found(exact_cache: Built, copy: Any) -> None:
    def renumber(arrays: dict[str, np.ndarray]) -> None:
        numbers = arrays["documents"]
        numbers[numbers != 2**32 - 1] += 5000

    built = _rewrite(copy(exact_cache), 0, renumber)
    (found,) = one_shards_damage(verify(built.path, full=True), built, 0, "documents")
    assert found.reason.startswith("no such document at ")


def test_a_receipt_whose_statistics_are_made_up_is_found(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    path = built.path / receipt_key(0)
    receipt = Receipt.from_bytes(path.read_bytes(), "it")
    changed = replace(receipt, statistics=replace(receipt.statistics, entropy=1.0))
    path.write_bytes(changed.to_bytes())
    opened = replace(built.manifest, state="open", run="x")
    manifest = finish(built.store, opened, (Extent(0, 3, 10),))
    built = replace(built, manifest=manifest)
    assert verify(built.path).sound
    (found,) = one_shards_damage(verify(built.path, full=True), built, 0)
    assert found.reason == "the receipt's statistics are not those of the data"


def test_a_receipt_of_another_shape_does_not_fit(exact_cache: Built, copy: Any) -> None:
    for number, change in enumerate(
        (
            {"rows": (0, 10**12)},
            {"rows": (1, 4)},
            {"rows": (0, 0)},
            {"arrays": {}},
            {"statistics": {"exact_mass": (1.0,), "exact_mass_histogram": ((0,) * 100,)}},
            {"identity": "0"},
            {"shard": 1},
        )
    ):
        built = copy(exact_cache, f"c{number}")
        path = built.path / receipt_key(0)
        receipt = Receipt.from_bytes(path.read_bytes(), "it")
        if "statistics" in change:
            change = {"statistics": replace(receipt.statistics, **change["statistics"])}
        path.write_bytes(replace(receipt, **change).to_bytes())
        listed = replace(
            built.manifest.receipts[0], sha256=hashlib.sha256(path.read_bytes()).hexdigest()
        )
        manifest = replace(built.manifest, receipts=(listed, *built.manifest.receipts[1:]))
        for key in (MANIFEST, BACKUP):
            built.store.write(key, manifest.to_bytes())
        for full in (False, True):
            (found,) = one_shards_damage(verify(built.path, full=full), built, 0)
            assert "does not fit" in found.reason or "something else" in found.reason


# Unfinished caches.


def test_an_unfinished_cache_is_unsound_and_its_shards_are_checked(tmp_path: Path) -> None:
    built = make_cache(tmp_path / "c", complete=False)
    for full in (False, True):
        report = verify(built.path, full=full)
        assert (report.state, report.shards) == ("open", 2)
        (found,) = report.damage
        assert found.shard is None
        assert "not finished: 2 shards have receipts" in found.reason
    path = shard_file(built, "tokens", 1)
    data = bytearray(path.read_bytes())
    data[5] ^= 4
    path.write_bytes(data)
    assert len(verify(built.path).damage) == 1
    damage = verify(built.path, full=True).damage
    assert [(item.shard, item.array) for item in damage] == [(None, None), (1, "tokens")]
    assert damage[1].rows == (4, 8)
    report = verify(built.path, full=True, repair=True)
    assert report.repaired == (1,)
    assert finished_shards(built.store) == {0}
    manifest = Manifest.from_bytes((built.path / MANIFEST).read_bytes(), "it")
    assert manifest == built.manifest


# Repair.


def test_repair_removes_the_receipts_of_broken_shards_alone(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    shard_file(built, "entropy", 2).unlink()
    flipped = bytearray(shard_file(built, "tokens", 0).read_bytes())
    flipped[7] ^= 1
    shard_file(built, "tokens", 0).write_bytes(flipped)
    before = {key: built.store.read(key) for key in built.store.list()}
    report = verify(built.path, full=True, repair=True)
    assert report.repaired == (0, 2)
    after = {key: built.store.read(key) for key in built.store.list()}
    gone = {key for key in before if after.get(key) != before[key]}
    assert gone == {receipt_key(0), receipt_key(2)}
    assert set(after) <= set(before)
    # Who reads what is whole goes on.
    opened = cache.open(built.path)
    for name, values in opened.rows(slice(4, 8)).items():
        assert same(values, built.arrays[name][4:8])
    with pytest.raises(DamageError, match=r"shard 0, .* array tokens"):
        opened.rows([0, 4])
    again = verify(built.path, full=True)
    assert not again.sound
    assert [item.reason for item in again.damage] == [
        "receipts/000000.json is missing",
        "receipts/000002.json is missing",
    ]


def test_a_repaired_cache_is_completed_to_the_same_bytes(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    before = {key: built.store.read(key) for key in built.store.list()}
    shard_file(built, "target_ids", 1).write_bytes(b"broken")
    (built.path / "tokenizer" / "tokenizer.json").write_bytes(b"broken")
    assert verify(built.path, repair=True).repaired == (1,)
    store = built.store
    assert missing_shards(store, built.manifest) == [1]
    opened = begin_work(store, reopened(built.manifest), lambda found: [])
    arrays = {name: value[4:8] for name, value in built.arrays.items()}
    write_shard(store, opened, 1, 10, arrays)
    store.write("tokenizer/tokenizer.json", before["tokenizer/tokenizer.json"] or b"")
    complete, changed, _ = finishing.finish(store, opened, 10, built.manifest.accounting)
    assert (complete, changed) == (built.manifest, False)
    assert {key: store.read(key) for key in store.list()} == before
    assert verify(built.path, full=True).sound


def test_repair_of_what_no_shard_is_to_blame_for_mends_it(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    before = {key: built.store.read(key) for key in built.store.list()}
    (built.path / "arrays" / "zarr.json").unlink()
    report = verify(built.path, repair=True)
    assert (report.repaired, report.mended) == ((), ("arrays/zarr.json",))
    assert {key: built.store.read(key) for key in built.store.list()} == before
    assert verify(built.path, full=True).sound


def test_repair_of_a_cache_that_changes_meanwhile_is_refused(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    shard_file(built, "entropy", 2).unlink()

    def meddle(done: int, total: int) -> None:
        built.store.write(MANIFEST, built.manifest.to_bytes())

    with pytest.raises(CacheError, match="changed while it was verified"):
        verify(built.path, repair=True, progress=meddle)
    assert finished_shards(built.store) == {0, 1, 2}


# Reading one shard.


def test_read_shard(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    receipt = Receipt.from_bytes((built.path / receipt_key(2)).read_bytes(), "it")
    last = {name: values[8:10] for name, values in built.arrays.items()}
    last["seals"] = seal_rows(last, built.encoding, [receipt.identity], np.array([8, 9]))
    read = read_shard(built.store, built.manifest, receipt)
    assert set(read) == set(last)
    for name, values in read.items():
        assert same(values, last[name])
    shard_file(built, "entropy", 2).unlink()
    values = read_shard(built.store, built.manifest, receipt)
    assert isinstance(values.pop("entropy"), ValueError)
    assert all(isinstance(value, np.ndarray) for value in values.values())
