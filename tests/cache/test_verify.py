"""Verify: a sound cache passes, and every kind of damage is found and named."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cache
from cache.encoding import encode_shard
from cache.errors import CacheError
from cache.format import BACKUP, MANIFEST, receipt_key
from cache.jsonfields import digest
from cache.manifest import Extent
from cache.receipt import Receipt, StoredArray
from cache.shards import create_arrays, finished_shards, write_shard
from cache.storage import Store
from cache.verify import Report, verify
from tests.cache.builder import (
    Built,
    finish,
    make_cache,
    make_encoding,
    make_rows,
    make_targets,
    one_shards_damage,
    open_manifest,
    shard_file,
)

NAMES = tuple(make_encoding().stored_arrays())


@pytest.mark.parametrize("full", [False, True])
def test_sound_caches_are_sound(full: bool, exact_cache: Built, sampled_cache: Built) -> None:
    for built in (exact_cache, sampled_cache):
        before = {key: built.store.read(key) for key in built.store.list()}
        report = verify(built.path, full=full)
        assert report == Report(
            location=str(built.path),
            state="complete",
            full=full,
            shards=3,
            bytes=sum(built.manifest.bytes.values()),
            damage=(),
        )
        assert report.sound
        assert {key: built.store.read(key) for key in built.store.list()} == before
        assert verify(built.path, full=full, repair=True).repaired == ()
        assert {key: built.store.read(key) for key in built.store.list()} == before


@pytest.mark.parametrize(
    "settings",
    [
        {"logprobs": "float32"},
        {"logprobs": "float16", "tail": "sampled"},
        {"mantissa_bits": 1},
        {"k": 60},
        {"k": 1, "temperatures": (0.5,)},
        {"rows_per_shard": 1},
        {"rows_per_shard": 100},
        {"rows": 4},
        {"rows": 1},
        {"tail": "sampled", "temperatures": (2.0,), "k": 2, "exact": 1},
        {"scale": 0.0},
        {"scale": 300.0},
        {"vocabulary": 300, "k": 255},
    ],
)
def test_other_settings_are_sound(tmp_path: Path, settings: dict[str, Any]) -> None:
    built = make_cache(tmp_path / "c", **settings)
    report = verify(built.path, full=True)
    assert report.sound, report.damage


def test_progress_is_told(exact_cache: Built) -> None:
    told: list[tuple[int, int]] = []
    verify(exact_cache.path, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]


# Files of arrays.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("full", [False, True])
def test_a_missing_file_is_found(name: str, full: bool, exact_cache: Built, copy: Any) -> None:
    """C26."""
    built = copy(exact_cache)
    shard_file(built, name, 1).unlink()
    (found,) = one_shards_damage(verify(built.path, full=full), built, 1, name)
    assert found.reason.endswith("is missing")


@pytest.mark.parametrize("full", [False, True])
def test_a_cut_or_longer_file_is_found_at_any_length(
    full: bool, exact_cache: Built, copy: Any
) -> None:
    built = copy(exact_cache)
    for name in ("tokens", "target_logprobs"):
        path = shard_file(built, name, 2)
        good = path.read_bytes()
        for kept in (0, 1, len(good) // 2, len(good) - 1):
            path.write_bytes(good[:kept])
            (found,) = one_shards_damage(verify(built.path, full=full), built, 2, name)
            assert found.reason.endswith(f"should be {len(good)} bytes long, is shorter")
        for more in (b"\0", good):
            path.write_bytes(good + more)
            (found,) = one_shards_damage(verify(built.path, full=full), built, 2, name)
            assert found.reason.endswith(f"should be {len(good)} bytes long, is longer")
        path.write_bytes(good)
    assert verify(built.path, full=full).sound


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_found_wherever_it_is(name: str, exact_cache: Built, copy: Any) -> None:
    """C27."""
    built = copy(exact_cache)
    path = shard_file(built, name, 0)
    good = path.read_bytes()
    offsets = np.linspace(0, len(good) - 1, 9).astype(int).tolist()
    for offset in offsets:
        data = bytearray(good)
        data[offset] ^= 1 << (offset % 8)
        path.write_bytes(data)
        one_shards_damage(verify(built.path, full=True), built, 0, name)
    path.write_bytes(good)
    assert verify(built.path, full=True).sound


@pytest.mark.parametrize("name", NAMES)
def test_swapped_shard_files_are_found(name: str, tmp_path: Path) -> None:
    """Every checksum inside is right: the receipt's digest is what finds them."""
    built = make_cache(tmp_path / "c", rows=8)
    one, other = shard_file(built, name, 0), shard_file(built, name, 1)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    report = verify(built.path, full=True)
    assert {item.shard for item in report.damage} == {0, 1}
    assert {item.array for item in report.damage} == {name}
    assert all("digest" in item.reason or "long" in item.reason for item in report.damage)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("segments", "documents")])
def test_a_file_of_another_cache_is_found(name: str, tmp_path: Path, exact_cache: Built) -> None:
    """The same settings, another teacher and other tokens; perhaps of the same size."""
    built = make_cache(tmp_path / "c", seed=0)
    other = make_cache(tmp_path / "other", seed=5)
    shutil.copy(shard_file(other, name, 1), shard_file(built, name, 1))
    (found,) = one_shards_damage(verify(built.path, full=True), built, 1, name)
    assert "digest" in found.reason or "bytes long" in found.reason


def test_a_whole_shard_of_another_cache_is_found(tmp_path: Path) -> None:
    """Arrays and receipt agree with each other; the manifest knows better."""
    built = make_cache(tmp_path / "c", seed=0)
    other = make_cache(tmp_path / "other", seed=5)
    for name in NAMES:
        shutil.copy(shard_file(other, name, 1), shard_file(built, name, 1))
    shutil.copy(other.path / receipt_key(1), built.path / receipt_key(1))
    for full in (False, True):
        (found,) = one_shards_damage(verify(built.path, full=full), built, 1)
        assert found.reason == "receipts/000001.json is not the one the manifest lists"


def test_an_unfinished_write_disturbs_nobody(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    path = shard_file(built, "tokens", 1)
    (path.parent / f"{path.name}.__lock").write_bytes(path.read_bytes()[:20])
    (built.path / f"{receipt_key(1)}.__lock").write_bytes(b'{"sha')
    (built.path / f"{MANIFEST}.__lock").write_bytes(b"{")
    assert verify(built.path).sound
    locks = [f"arrays/tokens/{path.name}", MANIFEST, receipt_key(1)]
    assert [str(item) for item in verify(built.path, full=True).damage] == [
        f"cache: {key}.__lock does not belong to the cache: a write was killed" for key in locks
    ]
    assert len(cache.open(built.path).rows(slice(None))["tokens"]) == 10
    assert finished_shards(built.store) == {0, 1, 2}


def test_a_shard_of_nothing_but_fill_values_is_complete(tmp_path: Path) -> None:
    """C26's converse: rows without any label; their targets are all fill values."""
    encoding = make_encoding()
    rows = make_rows(8, encoding)
    for name in ("tokens", "segments", "label_mask"):
        rows[name][4:] = 0
    rows["documents"][4:] = 2**32 - 1
    targets = make_targets(np.zeros((8, 8, 60)), rows, encoding)
    store = Store(str(tmp_path))
    manifest = open_manifest(encoding, {}, 100)
    store.write(MANIFEST, manifest.to_bytes())
    create_arrays(store, encoding, 8)
    for shard in range(2):
        place = slice(4 * shard, 4 * shard + 4)
        stored = encode_shard(
            {name: value[place] for name, value in rows.items()},
            {name: value[place] for name, value in targets.items()},
            encoding,
        )
        receipt = write_shard(store, manifest, shard, 8, stored)
    assert receipt.documents is None
    finish(store, manifest, (Extent(0, 2, 8),))
    report = verify(tmp_path, full=True)
    assert report.sound, report.damage
    read = cache.open(tmp_path).rows([4, 7])
    assert not (read["label_mask"] == 1).any()
    assert np.isnan(read["entropy"]).all()
    (tmp_path / "arrays" / "entropy" / "c.1.0").unlink()
    (found,) = verify(tmp_path).damage
    assert str(found) == (
        "shard 1, rows 4-7, documents unknown, array entropy: arrays/entropy/c.1.0 is missing"
    )


# Receipts, metadata, tokenizer, manifest.


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (None, "is missing"),
        (lambda data: b"", "is not valid JSON"),
        (lambda data: data[:-20], "is not valid JSON"),
        (lambda data: data + b"\n", "is not the one the manifest lists"),
        (lambda data: data.replace(b'"shard":1', b'"shard":2'), "is not the one the manifest"),
        (lambda data: data.replace(b'"rows":4', b'"rows":5'), "is not the one the manifest lists"),
        (lambda data: data.replace(b'"tokens":', b'"tokins":'), "has no field 'tokens'"),
        (lambda data: data.replace(b'"bytes":', b'"bytes":"x","y":', 1), "field 'bytes' should be"),
    ],
)
def test_a_receipt_that_is_not_the_one_is_found(
    full: bool,
    change: Callable[[bytes], bytes] | None,
    reason: str,
    exact_cache: Built,
    copy: Any,
) -> None:
    built = copy(exact_cache)
    path = built.path / receipt_key(1)
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    (found,) = one_shards_damage(verify(built.path, full=full), built, 1)
    assert reason in found.reason


def test_swapped_receipts_are_found(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    one, other = (built.path / receipt_key(shard) for shard in (0, 1))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    assert [item.shard for item in verify(built.path).damage] == [0, 1]


@pytest.mark.parametrize("key", ["arrays/zarr.json", "arrays/tokens/zarr.json"])
@pytest.mark.parametrize("fault", ["missing", "edited", "cut", "other"])
def test_changed_metadata_is_found(key: str, fault: str, exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    path = built.path / key
    text = path.read_text()
    if fault == "missing":
        path.unlink()
    else:
        assert '"uint16"' in text
        path.write_text(
            {"edited": text.replace('"uint16"', '"int16"'), "cut": text[:40], "other": "{}"}[fault]
        )
    for full in (False, True):
        (found,) = verify(built.path, full=full).damage
        state = "is missing" if fault == "missing" else "was changed"
        assert str(found) == f"cache: {key} {state}"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("fault", ["is missing", "was changed"])
def test_a_damaged_tokenizer_is_found(name: str, fault: str, exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    path = built.path / "tokenizer" / name
    if fault == "is missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    (found,) = verify(built.path).damage
    assert str(found) == f"cache: tokenizer/{name} {fault}"


@pytest.mark.parametrize("full", [False, True])
def test_an_edited_manifest_is_found_by_its_backup(
    full: bool, exact_cache: Built, copy: Any
) -> None:
    built = copy(exact_cache)
    path = built.path / MANIFEST
    path.write_bytes(path.read_bytes().replace(b"made-up text", b"other texts"))
    (found,) = verify(built.path, full=full).damage
    assert str(found) == (
        "cache: manifest.json cannot be used: manifest.json was changed: its content does not "
        "have the digest it states"
    )
    path.unlink()
    (found,) = verify(built.path, full=full).damage
    assert str(found) == "cache: manifest.json is missing"


def test_an_edited_manifest_without_a_backup_is_refused(exact_cache: Built, copy: Any) -> None:
    for number, backup in enumerate((None, b"{}", b"")):
        built = copy(exact_cache, f"c{number}")
        path = built.path / MANIFEST
        path.write_bytes(path.read_bytes().replace(b"made-up text", b"other texts"))
        if backup is None:
            (built.path / BACKUP).unlink()
        else:
            (built.path / BACKUP).write_bytes(backup)
        with pytest.raises(CacheError, match=r"manifest\.json was changed"):
            verify(built.path)
        path.unlink()
        with pytest.raises(CacheError, match=r"is not a cache: it has no manifest\.json"):
            verify(built.path, repair=True)


@pytest.mark.parametrize("state", ["is missing", "edited", "of another cache"])
def test_a_backup_that_is_not_one_is_found(state: str, exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    path = built.path / BACKUP
    if state == "is missing":
        path.unlink()
    elif state == "edited":
        path.write_bytes(path.read_bytes().replace(b"made-up text", b"other texts"))
    else:
        path.write_bytes(replace(built.manifest, software={}).to_bytes())
    (found,) = verify(built.path).damage
    if state == "of another cache":
        assert str(found).startswith(
            "cache: manifest.json and manifest.backup.json do not say the same of software, and "
        )
    else:
        assert str(found) == "cache: manifest.backup.json is missing or damaged"


@pytest.mark.parametrize("part", ["statistics", "bytes"])
def test_a_manifest_whose_sums_are_wrong_is_found(part: str, exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    manifest = built.manifest
    change: Any = (
        {"statistics": replace(manifest.statistics, entropy=1.0)}
        if part == "statistics"
        else {"bytes": {**manifest.bytes, "tokens": 1}}
    )
    for key in (MANIFEST, BACKUP):
        built.store.write(key, replace(manifest, **change).to_bytes())
    (found,) = verify(built.path).damage
    assert str(found) == "cache: the manifest's statistics are not the sum of the receipts'"


def test_what_a_later_version_adds_does_not_disturb(exact_cache: Built, copy: Any) -> None:
    """Readers ignore arrays that they do not know: in manifest, group and receipts."""
    built = copy(exact_cache)
    group_path = built.path / "arrays" / "zarr.json"
    group = json.loads(group_path.read_text())
    members = group["consolidated_metadata"]["metadata"]
    members["hidden_states"] = members["entropy"]
    group_path.write_text(json.dumps(group))
    receipts = []
    for shard in range(3):
        path = built.path / receipt_key(shard)
        receipt = Receipt.from_bytes(path.read_bytes(), "it")
        more = {**receipt.arrays, "hidden_states": StoredArray("0" * 64, 7)}
        receipt = replace(receipt, arrays=more)
        path.write_bytes(receipt.to_bytes())
        receipts.append(receipt)
    listed = tuple(
        replace(entry, sha256=receipt.digest)
        for entry, receipt in zip(built.manifest.receipts, receipts, strict=True)
    )
    manifest = replace(
        built.manifest, receipts=listed, bytes={**built.manifest.bytes, "hidden_states": 21}
    )
    content = json.loads(manifest.to_bytes())
    content["version"] = [1, 7]
    content["arrays"]["hidden_states"] = {"dtype": "float16", "dimensions": ["row"]}
    del content["digest"]
    content["digest"] = digest(content)
    for key in (MANIFEST, BACKUP):
        built.store.write(key, json.dumps(content).encode())
    for full in (False, True):
        report = verify(built.path, full=full)
        assert report.sound, report.damage
    group["attributes"] = {"edited": 1}
    group_path.write_text(json.dumps(group))
    assert not verify(built.path).sound
