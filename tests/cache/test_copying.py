"""Copying caches between storages: whole, checked, resumed, refused; and through faults."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cache
import stillroom
from cache import copying
from cache.copying import Copied, copy
from cache.errors import CacheError, DamageError
from cache.filling import begin_fill, reopened
from cache.format import BACKUP, MANIFEST, WORK, receipt_key
from cache.manifest import Extent, Manifest
from cache.shards import TakenOverError, array_chunk_key
from cache.storage import StorageError, Store
from tests.cache import s3
from tests.cache.builder import Built, Stop, contents, make_cache, same, shard_file, stopped_at
from tests.cache.s3 import Fault, Server, share


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return s3.connect(monkeypatch)


@pytest.fixture
def bucket(server: Server) -> str:
    return f"s3://{server.bucket()}/copy"


def check_whole(built: Built, location: str | Path) -> None:
    """The same objects, byte for byte, sound, and the same rows."""
    assert contents(location) == contents(built.path)
    assert cache.verify(location, full=True).sound
    found = cache.open(location).rows(slice(None))
    assert all(same(found[name], values) for name, values in built.arrays.items())


@pytest.mark.parametrize("way", ["local", "down", "http", "across"])
def test_a_copy_is_the_cache(
    exact_cache: Built, server: Server, bucket: str, tmp_path: Path, way: str
) -> None:
    remote = s3.upload(exact_cache.path, f"s3://{server.bucket()}/source")
    http = remote.replace("s3://", f"{server.endpoint}/")
    source, place = {
        "local": (exact_cache.path, tmp_path / "copy"),
        "down": (remote, tmp_path / "copy"),
        "http": (http, tmp_path / "copy"),
        "across": (remote, bucket),
    }[way]
    seen: list[tuple[int, int]] = []
    done = copy(source, place, progress=lambda *counts: seen.append(counts))
    size = sum(exact_cache.manifest.bytes.values())
    assert done == Copied(str(place), shards=3, present=0, bytes=size)
    assert seen[0] == (0, size)
    assert seen[-1] == (size, size)
    assert sorted(seen) == seen
    check_whole(exact_cache, place)
    again = copy(source, place)
    assert again == Copied(str(place), shards=3, present=3, bytes=0)
    check_whole(exact_cache, place)


def test_nothing_is_listed_at_the_source(
    sampled_cache: Built, server: Server, bucket: str, tmp_path: Path
) -> None:
    source = s3.upload(sampled_cache.path, bucket)
    with server.watch() as seen:
        copy(source, tmp_path / "copy")
    assert not any("list-type" in request.query for request in seen)
    # Manifest, tokenizer, and per shard a receipt and a file per array; each once.
    files = len(sampled_cache.manifest.tokenizer["files"])
    arrays = len(sampled_cache.encoding.stored_arrays())
    assert len(seen) == 1 + files + 3 * (1 + arrays)


def test_a_cache_of_several_extents(tmp_path: Path) -> None:
    built = _two_extents(tmp_path / "source")
    assert [extent.rows for extent in built.manifest.extents] == [10, 6]
    copy(built.path, tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(built.path)
    found = cache.open(tmp_path / "copy").rows(slice(None))
    assert same(found["tokens"], cache.open(built.path).rows(slice(None))["tokens"])


def _two_extents(folder: Path) -> Built:
    """Two caches joined by hand, the second appended; shard 2 has 2 rows of 4."""
    from cache.finishing import completed, settle
    from cache.shards import write_shard

    built = make_cache(folder)
    more = make_cache(folder.parent / "more", rows=6, seed=1)
    store = built.store
    documents = built.manifest.documents or 0
    opened = replace(
        built.manifest,
        state="open",
        run="append",
        corpus={**more.manifest.corpus, "digest": "a" * 64},
        first_shard=3,
        first_document=documents,
        extents=(),
        receipts=(),
        accounting={},
        statistics=None,
        bytes={},
    )
    store.write(WORK, opened.to_bytes())
    for shard in range(2):
        place = slice(*more.encoding.shard_rows(shard, 6))
        arrays = {name: values[place].copy() for name, values in more.arrays.items()}
        arrays["documents"][arrays["segments"] > 0] += documents
        write_shard(store, opened, 3 + shard, 18, arrays)
    extents = (
        Extent(0, 3, 10),
        Extent(3, 2, 6, corpus=opened.corpus, accounting={}),
    )
    complete = completed(
        store, replace(opened, corpus=built.manifest.corpus), extents, {"documents": documents}
    )
    store.write(MANIFEST, complete.to_bytes())
    settle(store, complete)
    assert cache.verify(folder, full=True).sound
    return replace(built, manifest=complete)


def test_an_older_cache_without_seals(tmp_path: Path) -> None:
    built = make_cache(tmp_path / "source", sealed=False)
    copy(built.path, tmp_path / "copy")
    check_whole(built, tmp_path / "copy")


# Stopped, and gone on with.


def stop_after(writes: int) -> Callable[[], None]:
    """Makes every write after some of them fail; returns what ends that."""
    left = [writes]
    patch = pytest.MonkeyPatch()

    def stopping(real: Callable[..., Any]) -> Callable[..., Any]:
        def write(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Stop
            return real(*arguments)

        return write

    for name in ("write", "replace"):
        patch.setattr(Store, name, stopping(getattr(Store, name)))
    return patch.undo


@pytest.mark.parametrize("writes", [1, 2, 4, 7, 15, 31, 42, 49])
def test_a_stopped_copy_goes_on(exact_cache: Built, tmp_path: Path, writes: int) -> None:
    place = tmp_path / "copy"
    go_on = stop_after(writes)
    try:
        with pytest.raises(Stop):
            copy(exact_cache.path, place)
    finally:
        go_on()
    # Nobody takes half a copy for a cache.
    with pytest.raises(CacheError, match="is not finished"):
        cache.open(place)
    assert not cache.verify(place).sound
    receipts = set(Store(place).list("receipts"))
    done = copy(exact_cache.path, place)
    assert done.present == len(receipts)
    check_whole(exact_cache, place)


def test_what_is_there_is_not_copied_again(
    exact_cache: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "copy"
    copy(exact_cache.path, place)
    store = Store(place)
    store.write(MANIFEST, _opened(exact_cache).to_bytes())
    store.delete(receipt_key(1))
    kept = shard_file(replace(exact_cache, path=place), "tokens", 0).stat().st_mtime_ns
    written: list[str] = []
    real = Store.create
    monkeypatch.setattr(
        Store, "create", lambda self, key, value: (written.append(key), real(self, key, value))[1]
    )
    assert copy(exact_cache.path, place).present == 2
    assert written == [receipt_key(1)]
    assert shard_file(replace(exact_cache, path=place), "tokens", 0).stat().st_mtime_ns == kept
    check_whole(exact_cache, place)


def _opened(built: Built) -> Manifest:
    from cache.filling import reopened

    return reopened(built.manifest)


@pytest.mark.parametrize("damage", ["truncated", "deleted", "other receipt"])
def test_what_is_there_and_broken_is_copied_again(
    exact_cache: Built, tmp_path: Path, damage: str
) -> None:
    place = tmp_path / "copy"
    copy(exact_cache.path, place)
    file = shard_file(replace(exact_cache, path=place), "entropy", 2)
    if damage == "truncated":
        os.truncate(file, file.stat().st_size - 1)
    elif damage == "deleted":
        file.unlink()
    else:
        shutil.copy(place / receipt_key(1), place / receipt_key(2))
    done = copy(exact_cache.path, place)
    assert done.present == 2
    check_whole(exact_cache, place)


def test_repair_and_copy_mend_a_finished_copy(exact_cache: Built, tmp_path: Path) -> None:
    place = tmp_path / "copy"
    copy(exact_cache.path, place)
    file = shard_file(replace(exact_cache, path=place), "target_ids", 1)
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    assert cache.verify(place, full=True, repair=True).repaired == (1,)
    assert copy(exact_cache.path, place).present == 2
    check_whole(exact_cache, place)


def test_a_killed_command_goes_on(exact_cache: Built, server: Server, bucket: str) -> None:
    words = [sys.executable, "-m", "stillroom", "copy", str(exact_cache.path), bucket]
    slow = Fault("delay", seconds=0.1)
    with (
        server.watch() as seen,
        server.faulty(lambda request, count: slow if request.method == "PUT" else None),
    ):
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while not any(request.method == "PUT" for request in seen):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Run the same command again" in err
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert f"{bucket}: copied" in done.stdout
    check_whole(exact_cache, bucket)


# Refused.


def test_an_unfinished_source_is_refused(tmp_path: Path) -> None:
    built = make_cache(tmp_path / "source", complete=False)
    with pytest.raises(CacheError, match="source is not finished"):
        copy(built.path, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    with pytest.raises(CacheError, match="not a cache: it has no manifest"):
        copy(tmp_path / "none", tmp_path / "copy")


@pytest.mark.parametrize("what", ["other", "sampled", "unfinished", "older", "things", "damaged"])
def test_a_place_that_holds_something_else_is_refused(
    exact_cache: Built, tmp_path: Path, what: str
) -> None:
    place = tmp_path / "copy"
    if what == "things":
        place.mkdir()
        (place / "thesis.tex").write_text("x")
    elif what == "damaged":
        place.mkdir()
        (place / MANIFEST).write_text("{")
    elif what == "older":
        built = _two_extents(tmp_path / "grown")
        copy(exact_cache.path, place)
        exact_cache = built
    else:
        settings = {"other": {"seed": 3}, "sampled": {"tail": "sampled"}}.get(what, {"k": 5})
        make_cache(place, complete=what != "unfinished", **settings)
    before = contents(place)
    said = {
        "things": "thesis.tex",
        "damaged": "not valid JSON",
        "older": r"holds 10 rows of .*grown, which has grown to \d+ since",
    }.get(what, r"holds an? \w+ cache that is not")
    with pytest.raises(CacheError, match=said):
        copy(exact_cache.path, place)
    assert contents(place) == before


def test_an_unfinished_copy_is_ended_by_copy_alone(exact_cache: Built, tmp_path: Path) -> None:
    """A capture there would leave out what was appended."""
    grown = _two_extents(tmp_path / "grown")
    place = tmp_path / "copy"

    with stopped_at(copying, "create_arrays"):
        copy(grown.path, place)
    with pytest.raises(CacheError, match="Run the same `stillroom copy` again"):
        cache.open(place)
    before = contents(place)
    opened = reopened(grown.manifest)
    with pytest.raises(CacheError, match="a copy of a cache that is not finished"):
        begin_fill(Store(place), opened, lambda found: [])
    assert contents(place) == before
    copy(grown.path, place)
    assert contents(place) == contents(grown.path)


def test_a_place_that_can_only_be_read_is_refused(exact_cache: Built, server: Server) -> None:
    with pytest.raises(StorageError, match="can only be read"):
        copy(exact_cache.path, f"{server.endpoint}/{server.bucket()}/x")


def test_of_two_copies_one_goes_on(
    exact_cache: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "copy"
    real = Store.write

    def write(self: Store, key: str, value: bytes) -> None:
        if key == array_chunk_key("tokens", 2, 2):
            monkeypatch.setattr(Store, "write", real)
            copy(exact_cache.path, place)
        real(self, key, value)

    monkeypatch.setattr(Store, "write", write)
    with pytest.raises(TakenOverError, match="another run began to write"):
        copy(exact_cache.path, place)
    check_whole(exact_cache, place)


# A damaged source.


@pytest.mark.parametrize(
    "damage", ["bit", "cut", "missing", "other shard", "receipt", "no receipt", "repacked"]
)
def test_damage_is_named_and_the_rest_is_copied(
    exact_cache: Built, copy: Callable[..., Built], tmp_path: Path, damage: str
) -> None:
    built = copy(exact_cache, "source")
    file = shard_file(built, "target_logprobs", 1)
    data = file.read_bytes()
    if damage == "bit":
        middle = len(data) // 2
        file.write_bytes(data[:middle] + bytes([data[middle] ^ 8]) + data[middle + 1 :])
    elif damage == "cut":
        file.write_bytes(data[:-1])
    elif damage == "missing":
        file.unlink()
    elif damage == "other shard":
        file.write_bytes(shard_file(built, "target_logprobs", 0).read_bytes())
    elif damage == "receipt":
        shutil.copy(built.path / receipt_key(0), built.path / receipt_key(1))
    elif damage == "no receipt":
        (built.path / receipt_key(1)).unlink()
    else:
        # Whole by every checksum, of the right size, and with other values.
        _store_other_values(built, file)
    place = tmp_path / "made"
    with pytest.raises(DamageError, match="then copy again") as caught:
        cache.copy(built.path, place)
    assert {item.shard for item in caught.value.damage} == {1}
    assert {item.rows for item in caught.value.damage} == {(4, 8)}
    if "receipt" not in damage:
        assert {item.array for item in caught.value.damage} == {"target_logprobs"}
    assert Store(place).list("receipts") == ["000000.json", "000002.json"]
    with pytest.raises(CacheError, match="is not finished"):
        cache.open(place)
    file.write_bytes(data)
    shutil.copy(exact_cache.path / receipt_key(1), built.path / receipt_key(1))
    assert cache.copy(built.path, place).present == 2
    check_whole(exact_cache, place)


def _store_other_values(built: Built, file: Path) -> None:
    from cache.storage import decode_chunk, encode_chunk

    metadata = built.encoding.arrays()["target_logprobs"].zarr(10, 4)
    data = file.read_bytes()
    values = decode_chunk(metadata, 1, data)
    for place in np.argwhere(np.isfinite(values)):
        other = values.copy()
        other[tuple(place)] = np.nextafter(other[tuple(place)], np.float16(0))
        changed = encode_chunk(metadata, 1, other)
        if len(changed) == len(data):
            file.write_bytes(changed)
            return
    raise AssertionError("no other values are as long")


def test_a_damaged_tokenizer_is_named_and_nothing_is_written(
    exact_cache: Built, copy: Callable[..., Built], tmp_path: Path
) -> None:
    built = copy(exact_cache, "source")
    (built.path / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(DamageError, match=r"tokenizer/tokenizer\.json was changed"):
        cache.copy(built.path, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_what_arrives_otherwise_is_seen(
    exact_cache: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Store.write
    key = array_chunk_key("tokens", 2, 1)

    def write(self: Store, name: str, value: bytes) -> None:
        real(self, name, value[:-1] + b"x" if name == key else value)

    monkeypatch.setattr(Store, "write", write)
    with pytest.raises(CacheError, match=f"{key} is not what was written"):
        copy(exact_cache.path, tmp_path / "copy")
    assert "000001.json" not in Store(tmp_path / "copy").list("receipts")


# Faults on the way.


def test_faults_on_the_way_change_nothing(exact_cache: Built, server: Server, bucket: str) -> None:
    source = s3.upload(exact_cache.path, f"s3://{server.bucket()}/source")
    with server.faulty(share(0, 0.25, "503", "500", "drop", "lost", "cut", "delay")) as injected:
        copy(source, bucket)
    assert len({fault.kind for fault in injected}) >= 4
    check_whole(exact_cache, bucket)


def test_a_server_that_fails_for_good_is_one_error_and_a_resume(
    exact_cache: Built, server: Server, bucket: str
) -> None:
    key = array_chunk_key("tokens", 2, 1)

    def plan(request: s3.Request, count: int) -> Fault | None:
        return Fault("status") if request.key.endswith(key) and request.method == "PUT" else None

    with server.faulty(plan), pytest.raises(StorageError, match=f"cannot write .*{key}.*too busy"):
        copy(exact_cache.path, bucket)
    copy(exact_cache.path, bucket)
    check_whole(exact_cache, bucket)


# The command.


def test_the_command(
    exact_cache: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "copy"
    assert stillroom.main(["copy", str(exact_cache.path), str(place)]) == 0
    assert capsys.readouterr().out == f"{place}: copied 3 of 3 shards (0.0 MB)\n"
    assert stillroom.main(["copy", str(exact_cache.path), str(place)]) == 0
    assert capsys.readouterr().out.endswith(
        "copied 0 of 3 shards (0.0 MB), 3 were there already (by receipt and size)\n"
    )
    shard_file(replace(exact_cache, path=place), "tokens", 0).unlink()
    assert stillroom.main(["copy", str(place), str(tmp_path / "next")]) == 1
    assert "shard 0" in capsys.readouterr().err


def test_the_backup_is_the_sources(exact_cache: Built, tmp_path: Path) -> None:
    copy(exact_cache.path, tmp_path / "copy")
    data = (exact_cache.path / MANIFEST).read_bytes()
    assert (tmp_path / "copy" / MANIFEST).read_bytes() == data
    assert (tmp_path / "copy" / BACKUP).read_bytes() == data


def test_a_copy_inside_of_the_cache_is_refused(tmp_path: Path) -> None:
    built = make_cache(tmp_path / "source")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CacheError, match=r"is inside .*source, which it would be a copy of"):
        copy(built.path, built.path / "inner")
    assert sorted(tmp_path.rglob("*")) == before
