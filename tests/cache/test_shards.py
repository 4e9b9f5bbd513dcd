"""Writing shards: what is refused, what comes last, and several writers at once."""

import functools
import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cache
from cache.encoding import encode_shard
from cache.errors import CacheError
from cache.format import MANIFEST, Encoding, receipt_key
from cache.manifest import Extent, Manifest
from cache.shards import (
    TakenOverError,
    array_chunk_key,
    array_objects,
    check_run,
    create_arrays,
    finished_shards,
    read_receipts,
    write_shard,
)
from cache.storage import StorageError, Store
from tests.cache.builder import (
    Built,
    finish,
    make_encoding,
    make_rows,
    make_targets,
    open_manifest,
    same,
)

ROWS = 10


def _prepare(folder: Path, encoding: Encoding, rows: int = ROWS) -> tuple[Store, Manifest]:
    store = Store(str(folder))
    manifest = open_manifest(encoding, {}, 1000)
    store.write(MANIFEST, manifest.to_bytes())
    create_arrays(store, encoding, rows)
    return store, manifest


@functools.cache
def _all(encoding: Encoding, rows: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    laid = make_rows(rows, encoding)
    random = np.random.default_rng(0)
    logits = random.normal(size=(rows, encoding.length, encoding.vocabulary))
    return laid, make_targets(logits, laid, encoding)


def _shard(encoding: Encoding, shard: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    laid, targets = _all(encoding, rows)
    place = slice(*encoding.shard_rows(shard, rows))
    return encode_shard(
        {name: value[place] for name, value in laid.items()},
        {name: value[place] for name, value in targets.items()},
        encoding,
    )


def test_the_last_partly_filled_shard_reads_back(tmp_path: Path) -> None:
    """C27: N = 10, 4 rows a shard."""
    encoding = make_encoding()
    store, manifest = _prepare(tmp_path, encoding)
    arrays = _shard(encoding, 2)
    receipt = write_shard(store, manifest, 2, ROWS, arrays)
    assert receipt.rows == (8, 10)
    for name, values in arrays.items():
        metadata = encoding.arrays()[name].zarr(ROWS, 4)
        read = store.open_array(f"arrays/{name}", metadata)[8:10].read().result()
        assert same(read, values)
    assert finished_shards(store) == {2}
    assert read_receipts(store, [1, 2]) == {1: None, 2: receipt.to_bytes()}


def test_writing_a_shard_again_gives_the_same_bytes(tmp_path: Path) -> None:
    encoding = make_encoding()
    store, manifest = _prepare(tmp_path, encoding)
    write_shard(store, manifest, 1, ROWS, _shard(encoding, 1))
    before = {key: store.read(key) for key in store.list()}
    write_shard(store, manifest, 1, ROWS, _shard(encoding, 1))
    assert {key: store.read(key) for key in store.list()} == before


@pytest.mark.parametrize("name", ["tokens", "target_ids", "entropy"])
@pytest.mark.parametrize("fault", ["missing", "rows", "shape", "dtype", "order"])
def test_arrays_that_do_not_fit_are_refused_before_anything_is_written(
    tmp_path: Path, name: str, fault: str
) -> None:
    encoding = make_encoding()
    store, manifest = _prepare(tmp_path, encoding)
    arrays = _shard(encoding, 1)
    good = arrays[name]
    if fault == "missing":
        del arrays[name]
    else:
        arrays[name] = {
            "rows": good[:3],
            "shape": good[:, :7],
            "dtype": good.astype(np.float64),
            "order": good.astype(good.dtype.newbyteorder(">")),
        }[fault]
    before = store.list()
    with pytest.raises(CacheError, match=f"shard 1.*{name}"):
        write_shard(store, manifest, 1, ROWS, arrays)
    assert store.list() == before


@pytest.mark.parametrize("shard", [-1, 3, 99])
def test_a_shard_that_does_not_exist_is_refused(tmp_path: Path, shard: int) -> None:
    encoding = make_encoding()
    store, manifest = _prepare(tmp_path, encoding)
    before = store.list()
    with pytest.raises(CacheError, match=f"shard {shard}"):
        write_shard(store, manifest, shard, ROWS, _shard(encoding, 1))
    assert store.list() == before


def test_an_impossible_label_is_stored_and_counted(tmp_path: Path) -> None:
    encoding = make_encoding()
    store, manifest = _prepare(tmp_path, encoding)
    arrays = _shard(encoding, 1)
    row, position = np.argwhere(arrays["label_mask"] == 1)[5].tolist()
    others = arrays["label_logprobs"][arrays["label_mask"] == 1].astype(np.float64).sum()
    others -= float(arrays["label_logprobs"][row, position])
    arrays["label_logprobs"][row, position] = -np.inf
    receipt = write_shard(store, manifest, 1, 10, arrays)
    assert receipt.statistics.impossible_labels == 1
    assert receipt.statistics.label_logprobs == pytest.approx(others)
    assert receipt.statistics.perplexity == np.inf


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("label_logprobs", np.inf),
        ("label_logprobs", np.nan),
        ("entropy", np.nan),
        ("entropy", np.inf),
        ("tail_logprobs", np.nan),
    ],
)
def test_no_number_at_a_label_is_refused_with_its_place(
    tmp_path: Path, name: str, value: float
) -> None:
    encoding = make_encoding()
    store, manifest = _prepare(tmp_path, encoding)
    arrays = _shard(encoding, 1)
    row, position = np.argwhere(arrays["label_mask"] == 1)[5].tolist()
    arrays[name][row, position] = value
    before = store.list()
    with pytest.raises(CacheError, match=f"shard 1, row {4 + row}, position {position}: {name} is"):
        write_shard(store, manifest, 1, ROWS, arrays)
    assert store.list() == before


def test_the_receipt_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = make_encoding()
    store, manifest = _prepare(tmp_path, encoding)
    keys: list[str] = []
    for name in ("write", "create"):
        real = getattr(Store, name)

        def noted(self: Store, key: str, value: bytes, real: Any = real) -> Any:
            keys.append(key)
            return real(self, key, value)

        monkeypatch.setattr(Store, name, noted)
    write_shard(store, manifest, 0, ROWS, _shard(encoding, 0))
    expected = [
        array_chunk_key(name, len(spec.inner) + 1, 0)
        for name, spec in encoding.stored_arrays().items()
    ]
    assert len(expected) == 11
    assert keys == [*expected, "receipts/000000.json"]


@pytest.mark.parametrize("fails_at", range(12))
def test_a_shard_that_was_cut_off_has_no_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """C29: stopped after each write in turn; then done again."""
    encoding = make_encoding()
    store, manifest = _prepare(tmp_path, encoding)
    count = 0

    def failing(real: Any) -> Any:
        def write(self: Store, key: str, value: bytes) -> Any:
            nonlocal count
            if count == fails_at:
                raise StorageError("no space left")
            count += 1
            return real(self, key, value)

        return write

    with monkeypatch.context() as patch:
        for name in ("write", "create"):
            patch.setattr(Store, name, failing(getattr(Store, name)))
        with pytest.raises(StorageError):
            write_shard(store, manifest, 0, ROWS, _shard(encoding, 0))
    assert finished_shards(store) == set()
    write_shard(store, manifest, 0, ROWS, _shard(encoding, 0))
    assert finished_shards(store) == {0}


def test_a_leftover_worker_of_another_run_cannot_commit(tmp_path: Path) -> None:
    encoding = make_encoding()
    store, manifest = _prepare(tmp_path, encoding)
    check_run(store, "run-1")
    store.write(MANIFEST, replace(manifest, run="run-2").to_bytes())
    with pytest.raises(TakenOverError, match="filled by run run-2, this is run run-1"):
        write_shard(store, manifest, 0, ROWS, _shard(encoding, 0))
    assert finished_shards(store) == set()


def test_a_receipt_is_never_written_over(tmp_path: Path) -> None:
    """An equal attempt is as good; one that says something else is refused, and stays unseen."""
    encoding = make_encoding()
    store, manifest = _prepare(tmp_path, encoding)
    receipt = write_shard(store, manifest, 0, ROWS, _shard(encoding, 0))
    assert write_shard(store, manifest, 0, ROWS, _shard(encoding, 0)) == receipt
    other = _shard(encoding, 0)
    other["entropy"] = np.where(other["label_mask"] == 1, np.float16(0.5), other["entropy"])
    with pytest.raises(CacheError, match="is there already and says something else"):
        write_shard(store, manifest, 0, ROWS, other)
    assert store.read(receipt_key(0)) == receipt.to_bytes()


def test_nobody_commits_into_a_finished_cache(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    before = {key: built.store.read(key) for key in built.store.list()}
    opened = open_manifest(built.encoding, {}, 100)
    with pytest.raises(TakenOverError, match=r"run \(finished\)"):
        check_run(built.store, opened.run)
    assert {key: built.store.read(key) for key in built.store.list()} == before


def test_creating_arrays_again_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = make_encoding()
    store, _ = _prepare(tmp_path, encoding)
    for key, value in array_objects(encoding, ROWS).items():
        assert store.read(key) == value
        assert json.loads(value)["zarr_format"] == 3
    monkeypatch.setattr(Store, "write", lambda *_: pytest.fail("wrote"))
    create_arrays(store, encoding, ROWS)


def test_finished_shards_are_receipts_and_nothing_else(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    assert finished_shards(store) == set()
    for name in ("000003.json", "1234567.json"):
        store.write(f"receipts/{name}", b"{}")
    for name in (
        "5",
        "7.json",
        "000004.json.bak",
        "notes.txt",
        "\u0662\u0662.json",
        "sub/000009.json",
    ):
        store.write(f"receipts/{name}", b"{}")
    assert finished_shards(store) == {3, 1234567}


def _write_some(folder: str, shards: list[int]) -> None:
    encoding = make_encoding(rows_per_shard=2)
    store = Store(folder)
    manifest = open_manifest(encoding, {}, 1000)
    for shard in shards:
        write_shard(store, manifest, shard, 64, _shard(encoding, shard, 64))


def test_two_processes_on_one_cache(tmp_path: Path) -> None:
    """C28: interleaved shards, and some shards by both: every row equals the reference."""
    encoding = make_encoding(rows_per_shard=2)
    store, manifest = _prepare(tmp_path, encoding, 64)
    context = multiprocessing.get_context("spawn")
    both = [0, 1, 15, 16, 31]
    work = [[*range(0, 32, 2), *both], [*both, *range(1, 32, 2)]]
    processes = [
        context.Process(target=_write_some, args=(str(tmp_path), shards)) for shards in work
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    finish(store, manifest, (Extent(0, 32, 64),))
    read = cache.open(tmp_path).rows(range(64))
    for shard in range(0, 32, 5):
        for name, values in _shard(encoding, shard, 64).items():
            assert same(read[name][2 * shard : 2 * shard + 2], values)
    assert cache.verify(tmp_path, full=True).sound
