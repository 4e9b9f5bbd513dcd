"""The local copy of a remote cache: fetched once, checked, shared, never mixed up."""

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import cache
from cache.errors import CacheError, DamageError
from cache.shards import array_chunk_key
from cache.storage import StorageError, Store
from tests.cache import s3
from tests.cache.builder import Built, make_cache, same
from tests.cache.s3 import Fault, Server, share


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return s3.connect(monkeypatch)


@pytest.fixture
def place(server: Server, exact_cache: Built) -> str:
    return s3.upload(exact_cache.path, f"s3://{server.bucket()}/cache")


def check_rows(opened: cache.Cache, built: Built, rows: list[int]) -> None:
    found = opened.rows(rows)
    assert all(same(found[name], values[rows]) for name, values in built.arrays.items())


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_second_epoch_asks_for_nothing(
    exact_cache: Built, server: Server, place: str, tmp_path: Path
) -> None:
    order = np.random.default_rng(0).permutation(10).tolist()
    with server.watch() as seen:
        opened = cache.open(place, local_copy=tmp_path / "copy")
    assert [request.key.rsplit("/", 1)[-1] for request in seen] == ["manifest.json"]
    with server.watch() as seen:
        check_rows(opened, exact_cache, order)
    # Each file once, and whole.
    arrays = len(exact_cache.encoding.stored_arrays())
    assert len(seen) == len({request.key for request in seen}) == 3 * arrays
    assert not any(request.range for request in seen)
    with server.watch() as seen:
        check_rows(opened, exact_cache, order[::-1])
        for row in order:
            check_rows(opened, exact_cache, [row])
    assert seen == []
    # Nor does another process, or the next run.
    with server.watch() as seen:
        again = cache.open(place, local_copy=tmp_path / "copy")
        check_rows(pickle.loads(pickle.dumps(again)), exact_cache, order)
    assert len(seen) == 1


def test_only_what_is_touched_is_fetched(
    exact_cache: Built, server: Server, place: str, tmp_path: Path
) -> None:
    opened = cache.open(place, local_copy=tmp_path)
    opened.rows([5], "tokens")
    keys = [path.relative_to(tmp_path).parts[1:] for path in files(tmp_path)]
    assert keys == [("arrays", "seals", "c.1.0"), ("arrays", "tokens", "c.1.0")]
    with server.watch() as seen:
        check_rows(opened, exact_cache, [4])
    assert len(seen) == len(exact_cache.encoding.stored_arrays()) - 2


def test_caches_never_mix(exact_cache: Built, server: Server, place: str, tmp_path: Path) -> None:
    other = make_cache(tmp_path / "other", seed=5)
    second = s3.upload(other.path, f"s3://{server.bucket()}/cache")
    folder = tmp_path / "copy"
    check_rows(cache.open(place, local_copy=folder), exact_cache, [0, 9])
    check_rows(cache.open(second, local_copy=folder), other, [0, 9])
    assert len(list(folder.iterdir())) == 2
    # The same cache elsewhere is the same.
    third = s3.upload(exact_cache.path, f"s3://{server.bucket()}/third")
    with server.watch() as seen:
        check_rows(cache.open(third, local_copy=folder), exact_cache, [0, 9])
    assert len(seen) == 1


@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "gone", "other shard", "folder"])
@pytest.mark.parametrize("name", ["target_ids", "seals"])
def test_a_damaged_local_file_is_fetched_again(
    exact_cache: Built, server: Server, place: str, tmp_path: Path, damage: str, name: str
) -> None:
    check_rows(cache.open(place, local_copy=tmp_path), exact_cache, list(range(10)))
    rank = len(exact_cache.encoding.stored_arrays()[name].inner) + 1
    (folder,) = tmp_path.iterdir()
    file = folder / array_chunk_key(name, rank, 1)
    data = file.read_bytes()
    opened = cache.open(place, local_copy=tmp_path)
    opened.rows([0])
    if damage == "bit":
        # In the chunk of the first row.
        file.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
    elif damage == "cut":
        os.truncate(file, len(data) - 1)
    elif damage == "empty":
        os.truncate(file, 0)
    elif damage == "other shard":
        file.write_bytes((folder / array_chunk_key(name, rank, 0)).read_bytes())
    else:
        file.unlink()
    if damage == "folder":
        for path in files(tmp_path):
            path.unlink()
    with server.watch() as seen:
        check_rows(opened, exact_cache, [4, 5, 6, 7])
    assert seen
    assert file.read_bytes() == data
    if damage != "folder":
        with server.watch() as seen:
            check_rows(opened, exact_cache, [4, 5, 6, 7])
        assert seen == []


@pytest.mark.parametrize("damage", ["bit", "missing", "other shard"])
def test_damage_of_the_cache_itself_stays_an_error(
    exact_cache: Built, place: str, tmp_path: Path, damage: str
) -> None:
    store = Store(place)
    key = array_chunk_key("tokens", 2, 1)
    data = store.read(key) or b""
    if damage == "missing":
        store.delete(key)
    elif damage == "bit":
        store.write(key, data[:10] + bytes([data[10] ^ 1]) + data[11:])
    else:
        store.write(key, store.read(array_chunk_key("tokens", 2, 0)) or b"")
    opened = cache.open(place, local_copy=tmp_path)
    for _ in range(2):
        with pytest.raises(DamageError) as caught:
            opened.rows([4, 8])
        assert {(item.shard, item.array) for item in caught.value.damage} == {(1, "tokens")}
        assert str(tmp_path) not in str(caught.value)
    check_rows(opened, exact_cache, [0, 9])
    store.write(key, data)
    check_rows(opened, exact_cache, [4, 8])


def test_through_faults(exact_cache: Built, server: Server, place: str, tmp_path: Path) -> None:
    with server.faulty(share(3, 0.3, "503", "drop", "cut", "lost")) as injected:
        check_rows(cache.open(place, local_copy=tmp_path), exact_cache, list(range(10)))
    assert len({fault.kind for fault in injected}) == 4
    keys = [path.relative_to(next(tmp_path.iterdir())) for path in files(tmp_path)]
    for key, path in zip(keys, files(tmp_path), strict=True):
        assert path.read_bytes() == (exact_cache.path / key).read_bytes()


def test_a_server_that_fails_is_no_damage(server: Server, place: str, tmp_path: Path) -> None:
    opened = cache.open(place, local_copy=tmp_path)
    with (
        server.faulty(lambda request, count: Fault("status")),
        pytest.raises(StorageError, match="too busy"),
    ):
        opened.rows([0])
    assert len(opened.rows([0])["tokens"]) == 1


def test_threads_share_a_folder(
    exact_cache: Built, server: Server, place: str, tmp_path: Path
) -> None:
    opened = cache.open(place, local_copy=tmp_path)
    with server.watch() as seen, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda row: check_rows(opened, exact_cache, [row]), list(range(10)) * 4))
    # One of them fetches, the others wait.
    assert len(seen) == 3 * len(exact_cache.encoding.stored_arrays())


def test_processes_share_a_folder(exact_cache: Built, place: str, tmp_path: Path) -> None:
    code = f"""
import sys, cache
rows = cache.open({place!r}, local_copy={str(tmp_path)!r}).rows(slice(None))
print(int(rows["tokens"].astype(int).sum()), int(rows["target_ids"].astype(int).sum()))
"""
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    sums = [int(exact_cache.arrays[name].astype(int).sum()) for name in ("tokens", "target_ids")]
    for process in started:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert out.split() == [str(value) for value in sums]
    assert not Store(tmp_path).unfinished_writes()


def test_a_copy_elsewhere_than_on_a_disk_is_refused(place: str) -> None:
    with pytest.raises(CacheError, match="should be in a local folder, found s3://b/x"):
        cache.open(place, local_copy="s3://b/x")


def test_a_folder_that_cannot_be_written_is_named(place: str, tmp_path: Path) -> None:
    opened = cache.open(place, local_copy=tmp_path / "file")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=r"cannot write .*/file/"):
        opened.rows([0])


def test_a_local_cache_may_have_one(exact_cache: Built, tmp_path: Path) -> None:
    """Such as one on a slow network disk."""
    check_rows(cache.open(exact_cache.path, local_copy=tmp_path), exact_cache, [0, 9])
    assert len(files(tmp_path)) == 2 * len(exact_cache.encoding.stored_arrays())
