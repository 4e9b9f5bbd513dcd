"""Reading: any rows, one read an array, and damage that is named and never filled in."""

import os
import pickle
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cache
from cache.errors import CacheError, DamageError
from cache.format import MANIFEST, WORK, receipt_key
from cache.manifest import Extent, ReceiptEntry
from cache.receipt import Receipt
from cache.shards import write_shard
from cache.statistics import combine
from cache.storage import StorageError
from tests.cache import builder
from tests.cache.builder import Built, make_cache, same


@pytest.mark.parametrize(
    "indices",
    [
        [0],
        [9],
        [0, 5, 3],
        [7, 7, 0, 7],
        list(range(9, -1, -1)),
        [],
        range(2, 9, 3),
        np.array([1, 8], np.uint8),
        np.array([4, 4, 9], np.int64),
        slice(None),
        slice(3, 8),
        slice(-2, None),
        slice(None, None, -1),
        slice(5, 2),
    ],
    ids=str,
)
def test_rows_in_any_order(exact_cache: Built, indices: Any) -> None:
    read = cache.open(exact_cache.path).rows(indices)
    wanted = np.arange(10)[indices] if len(np.arange(10)[indices]) else np.zeros(0, np.int64)
    assert tuple(read) == tuple(exact_cache.encoding.arrays())
    for name, values in read.items():
        assert same(values, exact_cache.arrays[name][wanted])


def test_what_is_read_may_be_written_to(exact_cache: Built) -> None:
    opened = cache.open(exact_cache.path)
    first = opened.rows([0])
    first["tokens"][:] = 1
    assert same(opened.rows([0])["tokens"], exact_cache.arrays["tokens"][:1])


def test_some_fields(exact_cache: Built) -> None:
    opened = cache.open(exact_cache.path)
    assert opened.fields == tuple(exact_cache.encoding.arrays())
    assert list(opened.rows([1], fields=["entropy", "tokens"])) == ["entropy", "tokens"]
    assert list(opened.rows([1], fields=(name for name in ("tokens",)))) == ["tokens"]
    assert list(opened.rows([1], fields="tokens")) == ["tokens"]
    assert opened.rows([1], fields=[]) == {}
    with pytest.raises(CacheError, match="no field 'logits'; the cache has tokens, segments"):
        opened.rows([1], fields=["tokens", "logits"])


@pytest.mark.parametrize("wrong", [-1, 10, 11, 2**40])
def test_a_row_that_does_not_exist_is_refused(exact_cache: Built, wrong: int) -> None:
    with pytest.raises(CacheError, match=f"the cache has rows 0 to 9, not {wrong}"):
        cache.open(exact_cache.path).rows([0, wrong])


def test_what_is_no_row_number_is_refused(exact_cache: Built) -> None:
    """In a process without the type checks that this suite runs under."""
    code = """
import sys, numpy as np, cache
opened = cache.open(sys.argv[1])
for wrong in ([0.0], [True], np.array([0.5]), np.array([[0]]), 3, "0", None, [None], [[0]],
              np.array([2**64 - 1], np.uint64), np.ma.array([0.1])):
    try:
        opened.rows(wrong)
    except cache.CacheError as error:
        print(type(wrong).__name__, error)
    else:
        sys.exit(f"{wrong!r} was read")
print(cache.Encoding(8, 60, 6, "none", (1, 2)).to_json()["temperatures"])
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(exact_cache.path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 12
    assert sum("row numbers should be a list of integers" in line for line in lines) == 10
    assert lines[-1] == "[1.0, 2.0]"


def test_length_and_repr(exact_cache: Built, sampled_cache: Built) -> None:
    opened = cache.open(str(exact_cache.path))
    assert len(opened) == 10
    labels = int((exact_cache.arrays["label_mask"] == 1).sum())
    assert repr(opened) == (
        f"<Cache {exact_cache.path}: 10 rows of 8, {labels} labels, k = 6 (exact), "
        "temperature 1, 2, 4, 60 tokens, teacher made-up/teacher>"
    )
    assert "k = 6 (sampled tail), temperature 1," in repr(cache.open(sampled_cache.path))
    assert opened.location == str(exact_cache.path)


def test_pickling(exact_cache: Built) -> None:
    opened = cache.open(exact_cache.path)
    before = opened.rows([3])
    again = pickle.loads(pickle.dumps(opened))
    assert repr(again) == repr(opened)
    for name, values in again.rows([3]).items():
        assert same(values, before[name])


def test_changing_folder_and_moving_the_cache(
    exact_cache: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C33: moving the directory -> still valid."""
    monkeypatch.chdir(exact_cache.path.parent)
    opened = cache.open("cache")
    os.chdir(tmp_path)
    assert len(opened.rows([0])["tokens"]) == 1
    shutil.copytree(exact_cache.path, tmp_path / "moved" / "to")
    assert cache.verify(tmp_path / "moved" / "to", full=True).sound
    moved = cache.open(tmp_path / "moved" / "to").rows(slice(None))
    for name, values in moved.items():
        assert same(values, exact_cache.arrays[name])


def test_from_threads(exact_cache: Built) -> None:
    opened = cache.open(exact_cache.path)
    random = np.random.default_rng(0)
    batches = [random.integers(0, 10, 5) for _ in range(64)]
    with ThreadPoolExecutor(8) as pool:
        for batch, read in zip(batches, pool.map(opened.rows, batches), strict=True):
            for name, values in read.items():
                assert same(values, exact_cache.arrays[name][batch])


class _Counted:
    """An array that counts its reads."""

    def __init__(self, array: Any, counts: Counter[str], name: str):
        self._array, self._counts, self._name = array, counts, name

    def __getitem__(self, key: Any) -> Any:
        return _Counted(self._array[key], self._counts, self._name)

    def read(self) -> Any:
        self._counts[self._name] += 1
        return self._array.read()


def test_one_read_of_each_array_for_a_batch(
    exact_cache: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = cache.open(exact_cache.path)
    counts: Counter[str] = Counter()
    array = opened._array
    monkeypatch.setattr(
        opened, "_array", lambda store, name: _Counted(array(store, name), counts, name)
    )
    read = opened.rows([9, 0, 4, 4, 1])
    assert counts == dict.fromkeys((*opened.fields, "seals"), 1)
    assert same(read["tokens"], exact_cache.arrays["tokens"][[9, 0, 4, 4, 1]])
    counts.clear()
    opened.rows([1, 2], fields=["tokens", "entropy"])
    assert counts == {"tokens": 1, "entropy": 1, "seals": 1}
    counts.clear()
    assert opened.rows([1, 2], fields=[]) == {}
    assert counts == {}


def test_opening_reads_the_manifest_alone(
    exact_cache: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[str] = []
    read = cache.Store.read_versioned
    monkeypatch.setattr(
        cache.Store, "read_versioned", lambda self, key: (keys.append(key), read(self, key))[1]
    )
    monkeypatch.setattr(cache.Store, "list", lambda *_: pytest.fail("listed"))
    monkeypatch.setattr(cache.Store, "read_many", lambda *_: pytest.fail("read many"))
    assert len(cache.open(exact_cache.path)) == 10
    assert keys == [MANIFEST]


def test_weights(exact_cache: Built, sampled_cache: Built) -> None:
    opened = cache.open(exact_cache.path)
    batch = opened.rows([0, 3])
    assert same(opened.weights(batch), cache.weights(batch, opened.encoding, 1.0))
    assert same(opened.weights(batch, 4.0), cache.weights(batch, opened.encoding, 4.0))
    with pytest.raises(CacheError, match="at temperature 1, 2, 4, not at 3"):
        opened.weights(batch, 3.0)
    some = opened.rows(
        [0, 3],
        ["target_ids", "target_logprobs", "exact_counts", "tail_logprobs", "label_mask"],
    )
    assert same(opened.weights(some), opened.weights(batch))


# What cannot be opened.


def test_an_unfinished_cache_is_refused(tmp_path: Path) -> None:
    make_cache(tmp_path / "c", complete=False)
    with pytest.raises(CacheError, match=r"c is not finished \(2 shards done\). Run the same"):
        cache.open(tmp_path / "c")


def test_no_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="is not a cache"):
        cache.open(tmp_path / "none")


# Damage.


def _file(built: Built, name: str, shard: int) -> Path:
    (path,) = (built.path / "arrays" / name).glob(f"c.{shard}.*")
    return path


def _names_the_shard(error: DamageError, name: str, shard: int, built: Built) -> None:
    rows = built.manifest.shard_rows(shard)
    documents = built.manifest.receipts[shard].documents
    assert documents is not None
    assert [(d.shard, d.array, d.rows, d.documents) for d in error.damage] == [
        (shard, name, rows, documents)
    ]
    text = str(error)
    assert f"shard {shard}, rows {rows[0]}-{rows[1] - 1}, documents {documents[0]}-" in text
    assert f"array {name}: " in text
    assert f"`stillroom verify {built.path} --full --repair`, then" in text


NAMES = ("tokens", "documents", "label_mask", "target_logprobs", "entropy")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", ["deleted", "emptied", "halved", "a byte short", "flipped"])
def test_damage_is_an_error_that_names_it(
    exact_cache: Built, copy: Any, name: str, fault: str
) -> None:
    """C26, C27: never a fill value."""
    built = copy(exact_cache)
    path = _file(built, name, 1)
    data = bytearray(path.read_bytes())
    if fault == "deleted":
        path.unlink()
    elif fault == "flipped":
        data[3] ^= 1
        path.write_bytes(data)
    else:
        kept = {"emptied": 0, "halved": len(data) // 2, "a byte short": len(data) - 1}[fault]
        path.write_bytes(data[:kept])
    opened = cache.open(built.path)
    with pytest.raises(DamageError) as caught:
        opened.rows([0, 4, 9])
    _names_the_shard(caught.value, name, 1, built)
    with pytest.raises(DamageError):
        opened.rows(slice(None), fields=[name])
    # What is whole is still read.
    for other, values in opened.rows([0, 3, 8, 9]).items():
        assert same(values, built.arrays[other][[0, 3, 8, 9]])


@pytest.mark.parametrize("name", ["tokens", "target_ids"])
def test_no_flipped_bit_reads_as_data(exact_cache: Built, copy: Any, name: str) -> None:
    built = copy(exact_cache)
    path = _file(built, name, 0)
    good = path.read_bytes()
    for offset in range(0, len(good), 7):
        data = bytearray(good)
        data[offset] ^= 1 << (offset % 8)
        path.write_bytes(data)
        with pytest.raises(DamageError):
            cache.open(built.path).rows([0, 1, 2, 3], fields=[name])


def test_several_shards_are_named_at_once(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    for shard in (0, 2):
        _file(built, "tokens", shard).unlink()
    with pytest.raises(DamageError) as caught:
        cache.open(built.path).rows([0, 5, 9, 0])
    assert [item.shard for item in caught.value.damage] == [0, 2]
    with pytest.raises(DamageError) as caught:
        cache.open(built.path).rows([5, 9])
    assert [item.shard for item in caught.value.damage] == [2]


def test_a_file_that_goes_while_the_cache_is_open(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    opened = cache.open(built.path)
    opened.rows(slice(None))
    _file(built, "tokens", 1).unlink()
    # What was read before may still be in memory; a fill value may not be.
    with suppress(DamageError):
        assert same(opened.rows([5])["tokens"], built.arrays["tokens"][5:6])
    with pytest.raises(DamageError, match="shard 1"):
        cache.open(built.path).rows([5])


def test_a_read_that_failed_once_is_no_damage(
    exact_cache: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = cache.open(exact_cache.path)
    array = opened._array
    failed: list[str] = []

    class Flaky(_Counted):
        def __getitem__(self, key: Any) -> Any:
            return Flaky(self._array[key], self._counts, self._name)

        def read(self) -> Any:
            if not failed:
                failed.append(self._name)
                return self
            return self._array.read()

        def result(self) -> Any:
            raise ValueError("UNAVAILABLE: connection lost")

    monkeypatch.setattr(
        opened, "_array", lambda store, name: Flaky(array(store, name), Counter(), name)
    )
    with pytest.raises(StorageError, match=r"reading tokens .* failed once: UNAVAILABLE"):
        opened.rows([0])


def test_the_arrays_metadata_is_the_manifests(exact_cache: Built, copy: Any) -> None:
    """An edited or lost zarr.json misleads nobody who opens the cache."""
    built = copy(exact_cache)
    for path in (built.path / "arrays").rglob("zarr.json"):
        path.unlink()
    for name, values in cache.open(built.path).rows(slice(None)).items():
        assert same(values, built.arrays[name])


# The tokenizer.


def test_the_tokenizer_comes_with_the_cache(exact_cache: Built) -> None:
    tokenizer = cache.open(exact_cache.path).tokenizer()
    assert tokenizer.decode(tokenizer.encode("the teacher").ids) == "the teacher"


@pytest.mark.parametrize("fault", ["is missing", "was changed", "was cut", "is not JSON"])
def test_a_damaged_tokenizer_is_damage(exact_cache: Built, copy: Any, fault: str) -> None:
    built = copy(exact_cache)
    path = built.path / "tokenizer" / "tokenizer.json"
    data = path.read_bytes()
    if fault == "is missing":
        path.unlink()
    else:
        path.write_bytes(
            {"was changed": data + b" ", "was cut": data[:100], "is not JSON": b"\xff"}[fault]
        )
    shown = "is missing" if fault == "is missing" else "was changed"
    with pytest.raises(DamageError, match=f"tokenizer/tokenizer.json {shown}"):
        cache.open(built.path).tokenizer()


def test_the_files_of_the_tokenizer(exact_cache: Built, copy: Any) -> None:
    place = exact_cache.path / "tokenizer"
    expected = {path.name: path.read_bytes() for path in place.iterdir()}
    assert len(expected) == 2
    assert cache.open(exact_cache.path).tokenizer_files() == expected
    built = copy(exact_cache)
    (built.path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    (built.path / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(DamageError, match=r"tokenizer\.json is missing") as raised:
        cache.open(built.path).tokenizer_files()
    assert "tokenizer_config.json was changed" in str(raised.value)


# Extents.


def test_rows_of_a_second_extent(tmp_path: Path, exact_cache: Built) -> None:
    """Two captures of 6 rows, each with a partly filled last shard, as one cache of 12."""
    one = make_cache(tmp_path / "one", rows=6, seed=1)
    two = make_cache(tmp_path / "two", rows=6, seed=2)
    folder = tmp_path / "both"
    shutil.copytree(one.path, folder)
    corpus = {"digest": "c" * 64, "documents": 50}
    later = replace(
        one.manifest,
        state="open",
        run="r",
        corpus=corpus,
        first_shard=2,
        first_document=one.manifest.corpus["documents"],
        extents=(),
        receipts=(),
        statistics=None,
    )
    store = cache.Store(folder)
    store.write(WORK, later.to_bytes())
    receipts = [
        Receipt.from_bytes((folder / receipt_key(shard)).read_bytes(), "it") for shard in range(2)
    ]
    for shard in range(2):
        place = slice(*two.manifest.shard_rows(shard))
        arrays = {name: values[place] for name, values in two.arrays.items()}
        receipts.append(write_shard(store, later, shard + 2, 8 + 6, arrays))
    manifest = replace(
        one.manifest,
        extents=(Extent(0, 2, 6), Extent(2, 2, 6, corpus)),
        receipts=tuple(ReceiptEntry(r.digest, r.documents) for r in receipts),
        statistics=combine([r.statistics for r in receipts], 3),
    )
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    assert manifest.identities() == [one.manifest.identity, later.identity]
    opened = cache.open(folder)
    assert len(opened) == 12
    np.testing.assert_array_equal(
        opened.stored_rows(range(12)), [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13]
    )
    np.testing.assert_array_equal(opened.stored_rows([11, 0, 6, 5]), [13, 0, 8, 5])
    everything = opened.rows(slice(None))
    for name, values in everything.items():
        assert same(values, np.concatenate([one.arrays[name], two.arrays[name]]))
    mixed = opened.rows([7, 5, 6, 0], ["tokens"])["tokens"]
    joined = np.concatenate([one.arrays["tokens"], two.arrays["tokens"]])
    assert same(mixed, joined[[7, 5, 6, 0]])
    (folder / "arrays" / "tokens" / "c.3.0").unlink()
    first, last = receipts[3].documents or (0, 0)
    with pytest.raises(DamageError, match=f"shard 3, rows 12-13, documents {first}-{last}"):
        cache.open(folder).rows([10])
    # A seal is of the extent's own corpus: the same rows of another one are not those.
    other = replace(later, corpus={**corpus, "digest": "b" * 64})
    store.write(WORK, other.to_bytes())
    store.delete(receipt_key(2))
    write_shard(store, other, 2, 8 + 6, {name: value[:4] for name, value in two.arrays.items()})
    reader = cache.open(folder)
    for name in reader.fields:
        with pytest.raises(DamageError, match=r"shard 2, rows 8-11, .*of another cache"):
            reader.rows([0, 6], [name])
        assert same(reader.rows([0, 5], [name])[name], one.arrays[name][[0, 5]])
    with pytest.raises(CacheError, match="rows 0 to 11, not 12"):
        opened.rows([12])


def test_a_cache_that_has_grown_as_it_was(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    former = (built.path / "manifest.json").read_bytes()
    once = builder.grow(built)
    between = (built.path / "manifest.json").read_bytes()
    builder.grow(once)
    opened = cache.open(built.path)
    assert len(opened.manifest.extents) == 3
    for extents, data in ((1, former), (2, between)):
        earlier = opened.before(extents)
        assert earlier.manifest.to_bytes() == data
        rows = earlier.rows(slice(None))
        for name, values in opened.rows(slice(0, len(earlier))).items():
            assert same(rows[name], values)
        with pytest.raises(CacheError, match=f"rows 0 to {len(earlier) - 1}, not"):
            earlier.rows([len(earlier)])
    (built.path / "receipts" / "000001.json").unlink()
    with pytest.raises(CacheError, match="shard 1 has no receipt"):
        opened.before(1)
