"""Every object of a cache that is no array: receipts, manifest, backup, tokenizer, metadata."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cache
import stillroom
from cache.errors import CacheError, DamageError
from cache.format import BACKUP, MANIFEST, WORK, receipt_key
from cache.manifest import OtherFormatError
from cache.repair import find_manifest
from cache.verify import verify
from pipelines.errors import PipelineError
from tests.attack.conftest import Attacked, Base
from tests.attack.damage import (
    add_shards_beyond_the_last,
    array_file,
    edited,
    flip_bit_at,
    leave_half_written_files,
    other_value,
    paths,
    to_bytes,
    with_digest,
    without,
)
from tests.pipelines import small

# Of each, damage that its size alone does not show, and damage that it does.
FILE_DAMAGE: dict[str, Callable[[Path], Any]] = {
    "deleted": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a bit flipped": lambda path: flip_bit_at(path, 8 * (path.stat().st_size // 3) + 1),
    "a byte more": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "something else": lambda path: path.write_bytes(b"{}"),
}


def _write(path: Path, content: Any) -> None:
    path.write_bytes(to_bytes(content))


# Receipts.


@pytest.mark.parametrize("kind", FILE_DAMAGE)
def test_receipts(kind: str, attacked: Attacked) -> None:
    FILE_DAMAGE[kind](attacked.path / receipt_key(1))
    (found,) = attacked.found()
    assert (found["shard"], found["array"]) == (1, None)
    assert tuple(found["rows"]) == attacked.manifest.shard_rows(1)
    assert tuple(found["documents"]) == attacked.manifest.receipts[1].documents
    # The data is whole.
    attacked.check_readers({})
    attacked.repaired()


def test_every_field_of_a_receipt(attacked: Attacked) -> None:
    path = attacked.path / receipt_key(3)
    good = path.read_bytes()
    content = json.loads(good)
    places = list(paths(content))
    assert {place[0] for place in places} == {
        "shard", "rows", "documents", "identity", "arrays", "statistics"
    }  # fmt: skip
    assert len(places) > 50
    for place in places:
        for changed in (edited(content, place, other_value), without(content, place)):
            _write(path, changed)
            damage = verify(attacked.path).damage
            assert [(item.shard, item.array) for item in damage] == [(3, None)]
    _write(path, edited(content, places[5], other_value))
    attacked.repaired()


# The manifest and its backup.


def _places(content: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [place for place in paths(content) if place != ("digest",)]


def test_every_field_of_the_manifest_with_the_digest_as_it_is(attacked: Attacked) -> None:
    path = attacked.path / MANIFEST
    content = json.loads(path.read_bytes())
    places = _places(content)
    assert len(places) > 100
    for place in places:
        for changed in (edited(content, place, other_value), without(content, place)):
            _write(path, changed)
            with pytest.raises(CacheError):
                cache.open(attacked.path)
            found = find_manifest(cache.Store(attacked.path))
            assert found.restored
            assert str(found.damage[0]).startswith(f"cache: {MANIFEST} cannot be used: ")
    said = attacked.refused("inspect", str(attacked.path))
    assert said.startswith("stillroom inspect: ")
    (found,) = attacked.found()
    assert found["reason"].startswith(f"{MANIFEST} cannot be used: ")
    attacked.repaired()


# What a manifest says that nothing else in a cache knows: an edit of it with a right digest is
# found because the backup differs, and it is for people to say which of the two is right. Of
# bytes, names of arrays that we do not know.
ONLY_TOLD = {"teacher", "corpus", "software", "accounting", "tokenizer", "bytes"}


def test_every_field_of_the_manifest_with_its_digest_made_anew(
    base: Base, attacked: Attacked
) -> None:
    path = attacked.path / MANIFEST
    content = json.loads(path.read_bytes())
    restored, disputed = set(), set()
    for place in _places(content):
        for changed in (edited(content, place, other_value), without(content, place)):
            path.write_bytes(to_bytes(with_digest(changed)))
            version = changed.get("version", [])
            if len(version) == 2 and version[0] != 1:
                # What a newer Stillroom wrote is none of ours to mend.
                with pytest.raises(OtherFormatError):
                    find_manifest(cache.Store(attacked.path))
                continue
            found = find_manifest(cache.Store(attacked.path))
            if found.restored:
                assert found.manifest == base.manifest
                assert MANIFEST in str(found.damage[0])
                restored.add(place[0])
            elif found.disputed:
                assert f"do not say the same of {place[0]}, and" in str(found.damage[0])
                disputed.add(place[0])
            else:
                # It says the same: what the encoding decides, and names that we do not know.
                assert found.damage == ()
                assert found.manifest == base.manifest
    assert disputed == ONLY_TOLD
    known = {"encoding", "capture", "extents", "receipts", "statistics", "state", "format"}
    assert known <= restored


@pytest.mark.parametrize(
    "place",
    [
        ("encoding", "k"),
        ("encoding", "sealed"),
        ("capture", "seed"),
        ("corpus", "digest"),
        ("extents", 0, "rows"),
        ("receipts", "sha256", 0),
        ("receipts", "documents", 0),
        ("statistics", "entropy"),
        ("bytes", "tokens"),
        ("state",),
    ],
)
def test_a_forged_manifest_that_the_rest_contradicts(
    place: tuple[Any, ...], base: Base, attacked: Attacked
) -> None:
    path = attacked.path / MANIFEST
    changed = edited(json.loads(path.read_bytes()), place, other_value)
    if place[-1] == "documents":
        changed = edited(json.loads(path.read_bytes()), place, lambda span: [span[0], 10**6])
    path.write_bytes(to_bytes(with_digest(changed)))
    assert attacked.found()[0]["reason"].startswith(MANIFEST)
    assert attacked.verify("--repair")[1]["mended"] == [MANIFEST]
    assert small.stored(attacked.path) == base.stored
    attacked.sound()


def test_a_disputed_manifest_is_for_people_to_settle(base: Base, attacked: Attacked) -> None:
    path = attacked.path / MANIFEST
    content = json.loads(path.read_bytes())
    changed = edited(content, ("teacher", "source"), other_value)
    path.write_bytes(to_bytes(with_digest(changed)))
    (found,) = attacked.found()
    assert "do not say the same of teacher, and both fit the receipts" in found["reason"]
    before = small.stored(attacked.path)
    assert attacked.verify("--repair")[1]["mended"] == []
    # Nor does a precompute make the edit its own witness.
    with pytest.raises(DamageError, match="do not say the same of teacher"):
        small.precompute(small.options(base.made, attacked.path))
    assert small.stored(attacked.path) == before
    path.unlink()
    attacked.repaired()


@pytest.mark.parametrize("key", [MANIFEST, BACKUP])
@pytest.mark.parametrize("kind", FILE_DAMAGE)
def test_manifest_or_backup(kind: str, key: str, attacked: Attacked) -> None:
    FILE_DAMAGE[kind](attacked.path / key)
    if kind == "a byte more":
        # White space behind a JSON object: the same manifest.
        attacked.sound()
        return
    (found,) = attacked.found()
    assert found["reason"].startswith(key)
    if key == MANIFEST:
        for command in ("inspect", "verify"):
            said = attacked.refused(command, str(attacked.path)) if command == "inspect" else ""
            assert "Traceback" not in said
        with pytest.raises(CacheError):
            cache.open(attacked.path)
        with pytest.raises((CacheError, PipelineError)):
            small.precompute(small.options(attacked.base.made, attacked.path))
    else:
        attacked.check_readers({})
    attacked.repaired()


def test_manifest_and_backup_both_gone(attacked: Attacked) -> None:
    for key in (MANIFEST, BACKUP):
        (attacked.path / key).unlink()
    before = small.stored(attacked.path)
    for words in (["verify", "--full"], ["verify", "--repair"], ["inspect"]):
        said = attacked.refused(words[0], str(attacked.path), *words[1:])
        assert f"it has no {MANIFEST}" in said
        assert "capture again into a new folder" in said
    with pytest.raises(PipelineError, match="is not a cache and not empty"):
        small.precompute(small.options(attacked.base.made, attacked.path))
    assert small.stored(attacked.path) == before


def test_manifest_and_backup_both_edited(attacked: Attacked) -> None:
    for key in (MANIFEST, BACKUP):
        FILE_DAMAGE["a bit flipped"](attacked.path / key)
    said = attacked.refused("verify", str(attacked.path), "--full", "--repair")
    assert MANIFEST in said


@pytest.mark.parametrize("data", [b"", b"{}", b"[" * 10**5])
def test_work_that_is_nothing(data: bytes, attacked: Attacked) -> None:
    (attacked.path / WORK).write_bytes(data)
    (found,) = attacked.found()
    assert found["reason"].startswith(WORK)
    attacked.check_readers({})
    attacked.repaired()


# The tokenizer.


@pytest.mark.parametrize("kind", FILE_DAMAGE)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_the_tokenizer(name: str, kind: str, attacked: Attacked) -> None:
    FILE_DAMAGE[kind](attacked.path / "tokenizer" / name)
    (found,) = attacked.found()
    shown = "is missing" if kind == "deleted" else "was changed"
    assert found["reason"] == f"tokenizer/{name} {shown}"
    opened = cache.open(attacked.path)
    with pytest.raises(DamageError, match=f"tokenizer/{name} {shown}"):
        opened.tokenizer_files()
    if name == "tokenizer.json":
        said = attacked.refused("inspect", str(attacked.path), "--row", "0")
        assert f"tokenizer/{name} {shown}" in said
    attacked.check_readers({})
    attacked.repaired()


# Metadata.


@pytest.mark.parametrize("kind", FILE_DAMAGE)
@pytest.mark.parametrize("name", ["", "tokens/", "seals/"])
def test_metadata(name: str, kind: str, attacked: Attacked) -> None:
    key = f"arrays/{name}zarr.json"
    FILE_DAMAGE[kind](attacked.path / key)
    if kind == "a byte more" and not name:
        # The group may say more than we know; it says the same.
        attacked.sound()
        return
    (found,) = attacked.found()
    shown = "is missing" if kind == "deleted" else "was changed"
    assert found["reason"] == f"{key} {shown}"
    # Nobody reads it who opens the cache.
    attacked.check_readers({})
    attacked.repaired()


# What others left.


def test_half_written_files_in_every_folder(attacked: Attacked) -> None:
    keys = leave_half_written_files(attacked.path)
    folders = {str(Path(key).parent) for key in keys}
    assert {".", "arrays", "arrays/seals", "receipts", "tokenizer"} <= folders
    found = attacked.found()
    assert {item["reason"].split(" ")[0] for item in found} == set(keys)
    attacked.check_readers({})
    attacked.repaired()
    assert not list(attacked.path.rglob("*__lock*"))


def test_half_written_files_do_not_stop_a_capture(base: Base, attacked: Attacked) -> None:
    """Before, and while shards are made again."""
    (attacked.path / receipt_key(2)).unlink()
    array_file(attacked.path, base.manifest, "tokens", 4).unlink()
    leave_half_written_files(attacked.path)
    attacked.repaired()


def test_shards_beyond_the_last(attacked: Attacked) -> None:
    keys = add_shards_beyond_the_last(attacked.path, attacked.manifest)
    found = attacked.found()
    assert sorted(item["reason"].split(" ")[0] for item in found) == keys
    attacked.check_readers({})
    attacked.repaired()


# Training.


@pytest.mark.parametrize("name", ["documents", "seals", "target_ids"])
def test_the_command_train_ends_with_an_error_that_names_it(
    name: str, attacked: Attacked, tmp_path: Path
) -> None:
    array_file(attacked.path, attacked.manifest, name, 1).unlink()
    out = tmp_path / "run"
    student = str(attacked.base.made / "teacher")
    words = ["--student", student, "--out", str(out), "--batch", "8", "--accumulation", "1"]
    said = attacked.refused("train", str(attacked.path), *words)
    first, end = attacked.manifest.shard_rows(1)
    assert f"shard 1, rows {first}-{end - 1}, documents " in said
    assert f"array {name}: " in said


def test_verify_of_what_is_no_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stillroom.main(["verify", str(tmp_path), "--full"]) == 1
    assert "is not a cache" in capsys.readouterr().err
