"""Repair: which of manifest and backup is right, strays, and what can be put right."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cache
from cache.errors import CacheError
from cache.filling import reopened
from cache.format import BACKUP, MANIFEST, WORK, receipt_key
from cache.manifest import Extent, Manifest, ReceiptEntry
from cache.receipt import Receipt
from cache.repair import find_manifest, stray_objects, sums_agree
from cache.shards import finished_shards
from cache.statistics import combine
from cache.storage import Store
from cache.verify import verify
from tests.cache.builder import Built, make_cache, shard_file


def _objects(store: Store) -> dict[str, bytes | None]:
    return {key: store.read(key) for key in store.list()}


def _edited(manifest: Manifest) -> dict[str, Manifest]:
    """Manifests that are whole and not this one, by what the rest of the cache says of them."""
    entries = manifest.receipts
    statistics = manifest.statistics
    assert statistics is not None
    return {
        "contradicted: identity": replace(manifest, capture={**manifest.capture, "seed": 5}),
        "contradicted: corpus": manifest.with_corpus(digest="0" * 64),
        "contradicted: receipt": replace(
            manifest, receipts=(ReceiptEntry("0" * 64, (0, 1)), *entries[1:])
        ),
        "contradicted: sums": replace(manifest, statistics=replace(statistics, entropy=1.0)),
        "contradicted: bytes": replace(manifest, bytes={**manifest.bytes, "tokens": 1}),
        "disputed: teacher": replace(manifest, teacher={**manifest.teacher, "source": "x"}),
        "disputed: software": replace(manifest, software={}),
        "disputed: accounting": replace(manifest, accounting={}),
    }


EDITS = (
    "contradicted: identity",
    "contradicted: corpus",
    "contradicted: receipt",
    "contradicted: sums",
    "contradicted: bytes",
    "disputed: teacher",
    "disputed: software",
    "disputed: accounting",
)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("key", [MANIFEST, BACKUP])
def test_the_one_that_the_receipts_fit_is_right(
    edit: str, key: str, exact_cache: Built, copy: Any
) -> None:
    built = copy(exact_cache)
    before = _objects(built.store)
    built.store.write(key, _edited(built.manifest)[edit].to_bytes())
    found = find_manifest(built.store)
    assert len(found.damage) == 1
    if edit.startswith("contradicted"):
        assert found.manifest == built.manifest
        assert found.restored == (key == MANIFEST)
        report = verify(built.path, repair=True)
        assert report.mended == (key,)
        assert report.repaired == ()
        assert _objects(built.store) == before
        assert verify(built.path, full=True).sound
        return
    # Nothing tells: it is found, named, and nothing is lost.
    assert found.disputed
    assert f"do not say the same of {edit.split()[1]}, and" in str(found.damage[0])
    edited = _objects(built.store)
    report = verify(built.path, full=True, repair=True)
    assert (report.repaired, report.mended) == ((), ())
    assert _objects(built.store) == edited
    built.store.delete(key)
    assert verify(built.path, repair=True).mended[0] == key
    assert _objects(built.store) == before


def test_a_rolled_back_manifest_loses_no_shards(exact_cache: Built, copy: Any) -> None:
    """An older manifest put in the place of a newer one: the backup lists more that is there."""
    built = copy(exact_cache)
    before = _objects(built.store)
    assert built.manifest.statistics is not None
    fewer = replace(
        built.manifest,
        extents=(Extent(0, 2, 8),),
        receipts=built.manifest.receipts[:2],
        statistics=replace(built.manifest.statistics, rows=8),
    )
    built.store.write(MANIFEST, fewer.to_bytes())
    assert find_manifest(built.store).restored
    assert verify(built.path, full=True, repair=True).mended == (MANIFEST,)
    assert _objects(built.store) == before
    # The other way round, the backup is only old.
    built.store.write(BACKUP, fewer.to_bytes())
    assert not find_manifest(built.store).restored
    assert verify(built.path, full=True, repair=True).mended == (BACKUP,)
    assert _objects(built.store) == before


def test_an_open_manifest_in_the_place_of_a_complete_one(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    before = _objects(built.store)
    built.store.write(MANIFEST, reopened(built.manifest).to_bytes())
    assert find_manifest(built.store).manifest == built.manifest
    report = verify(built.path, repair=True)
    assert (report.state, report.mended) == ("complete", (MANIFEST,))
    assert _objects(built.store) == before


@pytest.mark.parametrize("state", ["missing", "cut", "edited", "newer"])
def test_a_manifest_from_its_backup(state: str, exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    before = _objects(built.store)
    path = built.path / MANIFEST
    data = path.read_bytes()
    changes: dict[str, Callable[[], Any]] = {
        "missing": path.unlink,
        "cut": lambda: path.write_bytes(data[:99]),
        "edited": lambda: path.write_bytes(data.replace(b"teacher", b"preacher")),
        "newer": lambda: path.write_bytes(data.replace(b"  1,\n  1\n", b"  9,\n  1\n")),
    }
    changes[state]()
    with pytest.raises(CacheError):
        cache.open(built.path)
    found = find_manifest(built.store)
    assert (found.manifest, found.restored) == (built.manifest, True)
    shown = "is missing" if state == "missing" else "cannot be used: "
    assert str(found.damage[0]).startswith(f"cache: {MANIFEST} {shown}")
    assert verify(built.path, repair=True).mended == (MANIFEST,)
    assert _objects(built.store) == before


def test_an_unfinished_cache_from_its_backup(tmp_path: Path) -> None:
    """It gets a run of its own: a leftover of the run before cannot commit."""
    built = make_cache(tmp_path / "c", complete=False)
    built.store.write(BACKUP, built.manifest.to_bytes())
    built.store.delete(MANIFEST)
    report = verify(built.path, repair=True)
    assert (report.state, report.mended) == ("open", (MANIFEST,))
    found = Manifest.from_bytes(built.store.read(MANIFEST) or b"", "it")
    assert found.run != built.manifest.run
    assert replace(found, run=built.manifest.run) == built.manifest
    assert finished_shards(built.store) == {0, 1}


def test_no_manifest_and_no_backup(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    for key in (MANIFEST, BACKUP):
        built.store.delete(key)
    with pytest.raises(CacheError, match="a cache that lost it"):
        find_manifest(built.store)


STRAYS = (
    "receipts/000003.json",
    "receipts/1234567.json",
    "receipts/notes.txt",
    "arrays/tokens/c.3.0",
    "arrays/seals/c.7.0",
    "arrays/tokens/c.0",
    "arrays/tokens/sub/c.0.0",
    "arrays/tokens/c.0.0.__lock",
    "arrays/zarr.json.__lock",
    "receipts/000001.json.__lock",
    "tokenizer/tokenizer.json.__lock",
    "manifest.json.__lock",
    "runs/a/b.jsonl.__lock",
)
OTHERS = ("arrays/hidden_states/c.0.0", "runs/a/b.jsonl", "parts/000000.json", "notes.txt")


def _place(built: Built, keys: tuple[str, ...]) -> None:
    for key in keys:
        (built.path / key).parent.mkdir(parents=True, exist_ok=True)
        (built.path / key).write_bytes(b"half")


def test_strays_are_found_and_removed_and_nothing_else(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    _place(built, STRAYS + OTHERS)
    assert stray_objects(built.store, built.manifest) == sorted(STRAYS)
    quick = verify(built.path)
    assert quick.sound
    report = verify(built.path, full=True, repair=True)
    assert report.mended == tuple(sorted(STRAYS))
    assert {str(item) for item in report.damage} == {
        f"cache: {key} does not belong to the cache: a write was killed" for key in STRAYS
    }
    assert verify(built.path, full=True).sound
    for key in OTHERS:
        assert (built.path / key).exists()
    for key in STRAYS:
        assert not (built.path / key).exists()


def test_what_work_under_way_writes_is_no_stray(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    _place(built, STRAYS)
    assert stray_objects(built.store, reopened(built.manifest)) == []
    built.store.write(WORK, reopened(built.manifest).to_bytes())
    assert stray_objects(built.store, built.manifest) == []
    assert verify(built.path, full=True, repair=True).mended == ()
    for key in STRAYS:
        assert (built.path / key).exists()


@pytest.mark.parametrize("data", [b"", b"{", b"{}", None])
def test_work_that_nobody_can_go_on_with_is_removed(
    data: bytes | None, exact_cache: Built, copy: Any
) -> None:
    built = copy(exact_cache)
    before = _objects(built.store)
    built.store.write(WORK, built.manifest.to_bytes() if data is None else data)
    (found,) = verify(built.path).damage
    assert str(found) == "cache: work.json is not what work under way is described by"
    assert verify(built.path, repair=True).mended == (WORK,)
    assert _objects(built.store) == before


def test_metadata_is_written_anew(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    before = _objects(built.store)
    (built.path / "arrays" / "zarr.json").unlink()
    (built.path / "arrays" / "entropy" / "zarr.json").write_text("{}")
    assert verify(built.path, repair=True).mended == (
        "arrays/entropy/zarr.json",
        "arrays/zarr.json",
    )
    assert _objects(built.store) == before


def test_sums_that_no_backup_knows_are_added_up_again(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    before = _objects(built.store)
    wrong = replace(built.manifest, bytes={**built.manifest.bytes, "tokens": 1})
    for key in (MANIFEST, BACKUP):
        built.store.write(key, wrong.to_bytes())
    assert verify(built.path, repair=True).mended == (MANIFEST, BACKUP)
    assert _objects(built.store) == before


def test_what_a_later_version_says_survives_a_repair(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    later = replace(built.manifest, bytes={**built.manifest.bytes, "hidden_states": 3})
    for key in (MANIFEST, BACKUP):
        built.store.write(key, later.to_bytes())
    shard_file(built, "tokens", 1).unlink()
    (built.path / "arrays" / "zarr.json").unlink()
    report = verify(built.path, repair=True)
    assert (report.repaired, report.mended) == ((1,), ("arrays/zarr.json",))
    assert built.store.read(MANIFEST) == later.to_bytes()


def test_sums(exact_cache: Built) -> None:
    receipts = [
        Receipt.from_bytes(exact_cache.store.read(receipt_key(shard)) or b"", "it")
        for shard in range(3)
    ]
    manifest = exact_cache.manifest
    assert sums_agree(manifest, receipts)
    assert manifest.statistics == combine([each.statistics for each in receipts], 3)
    assert not sums_agree(manifest, receipts[:2])
    assert not sums_agree(replace(manifest, bytes={}), receipts)
