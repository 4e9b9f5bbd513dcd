"""Storage: whole objects, conditional writes, sizes, listings, and what refuses how."""

import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import CacheError
from cache.storage import StorageError, Store, chunk_key, decode_chunk, encode_chunk
from tests.cache.builder import make_encoding, same


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "cache"))


def test_what_is_written_is_read(store: Store) -> None:
    assert store.read("a/b") is None
    store.write("a/b", b"one")
    store.write("empty", b"")
    assert store.read("a/b") == b"one"
    assert store.read("empty") == b""
    store.write("a/b", b"two")
    assert store.read_many(["a/b", "none", "empty"]) == [b"two", None, b""]
    assert store.local is not None
    assert (store.local / "a" / "b").read_bytes() == b"two"
    store.delete("a/b")
    store.delete("a/b")
    assert store.read("a/b") is None


def test_create_makes_only_what_is_not_there(store: Store) -> None:
    assert store.create("k", b"first")
    assert not store.create("k", b"second")
    assert store.read("k") == b"first"
    store.delete("k")
    assert store.create("k", b"third")


def test_replace_needs_the_generation_that_was_read(store: Store) -> None:
    store.write("k", b"1")
    value, old = store.read_versioned("k")
    assert value == b"1"
    assert store.replace("k", b"22", old)
    assert not store.replace("k", b"333", old)
    assert store.read("k") == b"22"
    _, absent = store.read_versioned("none")
    assert store.replace("none", b"made", absent)
    assert not store.replace("none", b"again", absent)


def test_of_many_creators_one_wins(tmp_path: Path) -> None:
    """Each with a store of its own, as processes have."""

    def create(number: int) -> bool:
        return Store(str(tmp_path)).create("k", str(number).encode())

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(32)))
    assert sum(won) == 1
    assert Store(str(tmp_path)).read("k") == str(won.index(True)).encode()


def test_of_many_replacers_one_wins(tmp_path: Path) -> None:
    Store(str(tmp_path)).write("k", b"old")
    _, generation = Store(str(tmp_path)).read_versioned("k")

    def replace(number: int) -> bool:
        return Store(str(tmp_path)).replace("k", b"new" + str(number).encode(), generation)

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(replace, range(32)))
    assert sum(won) == 1


def test_what_killed_writes_left_is_found_and_removed(tmp_path: Path) -> None:
    """TensorStore neither lists `<key>.__lock` nor takes it for a key."""
    store = Store(str(tmp_path))
    keys = ["__lock", "a/b.__lock", "a/c.0.0.__lock", "d.__lock", "d.__lock.1"]
    for key in (*keys, "a/b", "clock"):
        path = tmp_path / key
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    assert store.unfinished_writes() == keys
    for key in keys:
        store.delete(key)
        store.delete(key)
    assert store.unfinished_writes() == []
    assert store.list() == ["a/b", "clock"]
    (tmp_path / "f.__lock").mkdir()
    with pytest.raises(StorageError, match=r"cannot delete .*/f\.__lock: "):
        store.delete("f.__lock")


def test_list_is_sorted_relative_and_without_unfinished_writes(store: Store) -> None:
    for key in ("b/2", "b/10", "b/sub/x", "a", "bb/1", "b.json"):
        store.write(key, b"")
    assert store.list() == ["a", "b.json", "b/10", "b/2", "b/sub/x", "bb/1"]
    assert store.list("b") == ["10", "2", "sub/x"]
    assert store.list("b/") == ["10", "2", "sub/x"]
    assert store.list("none") == []
    assert store.local is not None
    (store.local / "b" / "3.__lock").write_bytes(b"half")
    (store.local / "b" / "3.__lock.tmp").write_bytes(b"half")
    assert store.list("b") == ["10", "2", "sub/x"]
    store.write("b/3", b"whole")
    assert store.read("b/3") == b"whole"


def test_delete_folder_takes_that_folder_only(store: Store) -> None:
    for key in ("b/2", "b/sub/x", "b0", "bb/1", "a/1"):
        store.write(key, b"")
    store.delete_folder("b")
    assert store.list() == ["a/1", "b0", "bb/1"]
    assert store.local is not None
    assert not (store.local / "b").exists()
    store.delete_folder("none")
    store.delete_folder("a/")
    assert store.list() == ["b0", "bb/1"]
    store.write("c/deep/1", b"")
    store.write("c/other/1", b"")
    store.delete_folder("c/deep")
    assert store.list("c") == ["other/1"]
    store.delete_folder("c/other")
    assert not (store.local / "c").exists()


@pytest.mark.parametrize(
    ("size", "wanted", "finding"),
    [
        (5, 5, None),
        (5, 4, "should be 4 bytes long, is longer"),
        (5, 0, "should be 0 bytes long, is longer"),
        (5, 6, "should be 6 bytes long, is shorter"),
        (5, 7, "should be 7 bytes long, is shorter"),
        (5, 500, "should be 500 bytes long, is shorter"),
        (0, 0, None),
        (0, 1, "should be 1 bytes long, is shorter"),
        (0, 9, "should be 9 bytes long, is shorter"),
        (None, 0, "is missing"),
        (None, 5, "is missing"),
    ],
)
def test_sizes_differ(store: Store, size: int | None, wanted: int, finding: str | None) -> None:
    store.write("other", b"x")
    if size is not None:
        store.write("k", b"x" * size)
    expected = {} if finding is None else {"k": finding}
    assert store.sizes_differ({"k": wanted, "other": 1}) == expected


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 300), st.integers(0, 300))
def test_any_two_sizes(tmp_path_factory: pytest.TempPathFactory, size: int, wanted: int) -> None:
    store = Store(str(tmp_path_factory.getbasetemp() / "sizes"))
    store.write("k", b"x" * size)
    found = store.sizes_differ({"k": wanted})
    assert set(found) == (set() if size == wanted else {"k"})
    if found:
        assert found["k"].endswith("longer" if size > wanted else "shorter")


@pytest.mark.parametrize(
    "operation",
    [
        lambda store: store.write("k", b"1"),
        lambda store: store.create("k", b"1"),
        lambda store: store.delete("k"),
        lambda store: store.list(),
        lambda store: store.delete_folder("f"),
    ],
)
def test_a_place_inside_a_file_is_refused(
    tmp_path: Path, operation: Callable[[Store], Any]
) -> None:
    (tmp_path / "file").write_text("x")
    store = Store(str(tmp_path / "file" / "cache"))
    with pytest.raises(StorageError, match=r"cannot (write|list|delete) .*file/cache/.*: "):
        operation(store)
    assert store.read("k") is None


def test_writing_over_a_folder_is_refused(store: Store) -> None:
    store.write("a/b", b"1")
    with pytest.raises(StorageError, match=r"cannot write .*/a: "):
        store.write("a", b"2")
    assert store.read("a/b") == b"1"


def test_an_address_that_nothing_knows_is_named_once() -> None:
    for operation in (Store.read, lambda store, key: store.write(key, b"")):
        with pytest.raises(CacheError, match=r"^cannot open nosuch://a/b as a place") as caught:
            operation(Store("nosuch://a/b"), "k")
        assert "gs:// or s3://" in str(caught.value)


def test_what_a_place_cannot_do_is_refused() -> None:
    """http:// can be read only; nothing is asked of the network here."""
    store = Store("http://127.0.0.1:9/cache")
    assert store.local is None
    for operation in (
        lambda: store.write("k", b"1"),
        lambda: store.create("k", b"1"),
        lambda: store.list(),
        lambda: store.delete_folder("f"),
    ):
        with pytest.raises(StorageError, match="does not support"):
            operation()


def test_object_storage_keeps_the_same_rules() -> None:
    """In memory, the one store that can be tried without a server."""
    store = Store("memory://bucket/cache")
    assert store.local is None
    assert store.read("k") is None
    assert store.create("k", b"1")
    assert not store.create("k", b"2")
    _, generation = store.read_versioned("k")
    assert store.replace("k", b"33", generation)
    assert not store.replace("k", b"4", generation)
    store.write("f/x", b"")
    assert store.list() == ["f/x", "k"]
    assert store.sizes_differ({"k": 1, "f/x": 0, "n": 0}) == {
        "k": "should be 1 bytes long, is longer",
        "n": "is missing",
    }
    store.delete_folder("f")
    assert store.list() == ["k"]


def test_a_file_address_is_a_folder_too(tmp_path: Path) -> None:
    Store(str(tmp_path / "c")).write("k", b"1")
    assert Store(f"file://{tmp_path}/c").read("k") == b"1"


@pytest.mark.parametrize("name", ["with space", "per%20cent", "ünïcode", "a?b#c", "tr/ail/"])
def test_odd_paths(tmp_path: Path, name: str) -> None:
    store = Store(f"{tmp_path}/{name}")
    store.write("k", b"1")
    assert (tmp_path / name / "k").read_bytes() == b"1"
    assert store.list() == ["k"]
    assert not store.location.endswith("/")


def test_paths_that_go_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one" / "two").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "one" / "two")
    Store(tmp_path / "one" / "cache").write("a", b"1")
    monkeypatch.chdir(tmp_path / "one" / "two")
    for place in ("../cache", "../../one/cache", str(tmp_path / "link" / ".." / "cache")):
        assert Store(place).read("a") == b"1"
        assert Store(place).location == place
    monkeypatch.chdir(tmp_path / "one" / "cache")
    assert Store("../cache/.").list() == ["a"]


def test_pathlib_paths(tmp_path: Path) -> None:
    assert Store(tmp_path / "c").local == tmp_path / "c"


def test_pickling_and_changing_folder_keep_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = Store("cache")
    assert repr(store) == "Store('cache')"
    pickled = pickle.dumps(store)
    os.chdir(tmp_path / "elsewhere")
    store.write("one", b"1")
    again = pickle.loads(pickled)
    again.write("two", b"2")
    assert again.location == "cache"
    assert Store(str(tmp_path / "cache")).list() == ["one", "two"]
    assert not any((tmp_path / "elsewhere").iterdir())
    remote = pickle.loads(pickle.dumps(Store("gs://bucket/cache")))
    assert remote.local is None
    place = {"driver": "gcs", "bucket": "bucket", "path": "cache/a/"}
    assert remote.specification("a") == place


def test_a_write_that_was_cut_leaves_the_old_object(store: Store) -> None:
    """What a killed writer leaves: its temporary file. The object is the old one."""
    store.write("k", b"old")
    assert store.local is not None
    (store.local / "k.__lock").write_bytes(b"ne")
    assert store.read("k") == b"old"
    store.write("k", b"new")
    assert store.read("k") == b"new"
    assert store.list() == ["k"]


# Arrays.


def test_a_missing_chunk_is_an_error_never_a_fill(store: Store) -> None:
    spec = make_encoding().arrays()["tokens"]
    metadata = spec.zarr(10, 4)
    store.write("a/c.0.0", encode_chunk(metadata, 0, np.ones((4, 8), np.uint16)))
    array = store.open_array("a", metadata)
    assert array[0:4].read().result().sum() == 32
    for rows in (slice(0, 5), slice(4, 5), slice(8, 10)):
        with pytest.raises(ValueError, match=r"a/c\.[12]\.0"):
            array[rows].read().result()


def test_a_chunk_of_fill_values_is_data(store: Store) -> None:
    """C26's converse: a chunk that equals the fill value is stored and read."""
    for spec in make_encoding().arrays().values():
        metadata = spec.zarr(10, 4)
        values = np.full((4, *spec.inner), spec.fill, spec.dtype)
        data = encode_chunk(metadata, 1, values)
        store.write(f"{spec.name}/{chunk_key(1, values.ndim)}", data)
        read = store.open_array(spec.name, metadata)[4:8].read().result()
        assert same(read, values)


def test_chunk_keys() -> None:
    assert chunk_key(0, 2) == "c.0.0"
    assert chunk_key(1234567, 3) == "c.1234567.0.0"


def test_encoding_a_chunk_is_repeatable_and_copes_with_any_layout() -> None:
    metadata = make_encoding().arrays()["target_logprobs"].zarr(10, 4)
    values = np.random.default_rng(0).normal(size=(4, 8, 6)).astype(np.float16)
    once = encode_chunk(metadata, 0, values)
    assert encode_chunk(metadata, 0, values) == once
    assert encode_chunk(metadata, 0, np.asfortranarray(values)) == once
    assert encode_chunk(metadata, 0, values[::-1].copy()[::-1]) == once
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: encode_chunk(metadata, 0, values), range(16)))
    assert set(found) == {once}
    assert same(decode_chunk(metadata, 0, once), values)
    short = encode_chunk(metadata, 2, values[:2])
    assert same(decode_chunk(metadata, 2, short), values[:2])
    for place in range(0, len(once), 7):
        flipped = once[:place] + bytes([once[place] ^ 1]) + once[place + 1 :]
        with pytest.raises(ValueError):
            decode_chunk(metadata, 0, flipped)
    with pytest.raises(ValueError):
        decode_chunk(metadata, 0, once[:-1])


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 9),
    per_shard=st.integers(1, 5),
    name=st.sampled_from(["tokens", "label_mask", "target_logprobs", "label_logprobs"]),
    seed=st.integers(0, 100),
)
def test_chunks_are_what_tensorstore_stores(
    rows: int, per_shard: int, name: str, seed: int
) -> None:
    encoding = make_encoding(rows_per_shard=per_shard)
    spec = encoding.arrays()[name]
    metadata = spec.zarr(rows, per_shard)
    random = np.random.default_rng(seed)
    values = random.integers(0, 3, (rows, *spec.inner)).astype(spec.dtype)
    values[random.random(rows) < 0.3] = spec.fill
    context = ts.Context()
    array = ts.open(
        {
            "driver": "zarr3",
            "kvstore": "memory://x/",
            "metadata": metadata,
            "store_data_equal_to_fill_value": True,
        },
        context=context,
        create=True,
    ).result()
    array.write(values).result()
    kvstore = ts.KvStore.open("memory://x/", context=context).result()
    for shard in range(encoding.shards(rows)):
        place = slice(*encoding.shard_rows(shard, rows))
        theirs = kvstore.read(chunk_key(shard, values.ndim)).result().value
        assert encode_chunk(metadata, shard, values[place]) == theirs
