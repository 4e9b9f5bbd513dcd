"""Writing: making the arrays, storing a shard, committing its receipt."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import numpy as np

from cache.errors import CacheError
from cache.format import ARRAYS, RECEIPTS, SEALS, WORK, Encoding, group_metadata, receipt_key
from cache.manifest import Manifest, read_manifest
from cache.receipt import Receipt, StoredArray, data_digest
from cache.seals import seal_rows
from cache.statistics import document_range, statistics_of
from cache.storage import Store, chunk_key, encode_chunk


class TakenOverError(CacheError):
    """The cache is being filled by another run: this one must not write any more."""


def array_objects(encoding: Encoding, rows: int) -> dict[str, bytes]:
    """The metadata objects of the arrays of a cache with a number of stored rows, by key."""
    metadata = {
        name: spec.zarr(rows, encoding.rows_per_shard)
        for name, spec in encoding.stored_arrays().items()
    }
    objects = {f"{ARRAYS}/{name}/zarr.json": value for name, value in metadata.items()}
    objects[f"{ARRAYS}/zarr.json"] = group_metadata(metadata)
    return {key: json.dumps(value, indent=1).encode() for key, value in objects.items()}


def create_arrays(store: Store, encoding: Encoding, rows: int) -> None:
    """Writes the metadata of arrays with a number of rows; no data yet."""
    for key, value in array_objects(encoding, rows).items():
        if store.read(key) != value:
            store.write(key, value)


def array_chunk_key(name: str, rank: int, shard: int) -> str:
    """The key of one array's file of one shard."""
    return f"{ARRAYS}/{name}/{chunk_key(shard, rank)}"


def write_shard(
    store: Store,
    manifest: Manifest,
    shard: int,
    total_rows: int,
    arrays: Mapping[str, np.ndarray],
) -> Receipt:
    """Stores one shard's arrays, then commits its receipt.

    Args:
      store: where the cache is.
      manifest: the open manifest that this run wrote, its corpus digest known.
      shard: the shard's number.
      total_rows: stored rows of the whole cache.
      arrays: every array of the format but the seals, [rows of the shard, ...], as
        `encode_shard` gives.

    Raises:
      CacheError: there is no such shard; an array is missing, has another shape or type
        than the format says, or holds no finite number at a label. Nothing was written.
      TakenOverError: another run has taken over the cache.
      StorageError: storage refused a write.
    """
    encoding = manifest.encoding
    if not manifest.first_shard <= shard < encoding.shards(total_rows):
        raise CacheError(f"{total_rows} rows have no shard {shard}")
    first, end = encoding.shard_rows(shard, total_rows)
    _check_arrays(arrays, encoding, shard, end - first)
    _check_finite(arrays, shard, first)
    # A leftover of another run should not touch the files; a last look is before the receipt.
    check_run(store, manifest.run)
    identity = manifest.identity
    sealed = dict(arrays)
    if encoding.sealed:
        sealed[SEALS] = seal_rows(arrays, encoding, [identity], np.arange(first, end))
    stored = {}
    for name, spec in encoding.stored_arrays().items():
        values = sealed[name]
        data = encode_chunk(spec.zarr(total_rows, encoding.rows_per_shard), shard, values)
        store.write(array_chunk_key(name, values.ndim, shard), data)
        stored[name] = StoredArray(data_digest(values), len(data))
    receipt = Receipt(
        shard=shard,
        rows=(first, end),
        documents=document_range(arrays["documents"]),
        identity=identity,
        arrays=stored,
        statistics=statistics_of(arrays, encoding),
    )
    check_run(store, manifest.run)
    _commit(store, receipt)
    return receipt


def _commit(store: Store, receipt: Receipt) -> None:
    """Writes a receipt, unless there is one: of an equal attempt, which is as good.

    Raises:
      CacheError: the one that is there says something else.
    """
    key, data = receipt_key(receipt.shard), receipt.to_bytes()
    if store.create(key, data):
        return
    there = store.read(key)
    if there is None:
        raise CacheError(f"{store.location}/{key} came and went; another run is at work there.")
    if there != data:
        raise CacheError(
            f"{store.location}/{key} is there already and says something else: another run wrote "
            "it late, or this machine computes other last bits than the one that did. Run the "
            "same command again: it keeps what fits this capture and redoes the rest."
        )


def _check_arrays(
    arrays: Mapping[str, np.ndarray], encoding: Encoding, shard: int, rows: int
) -> None:
    for name, spec in encoding.arrays().items():
        expected = (rows, *spec.inner)
        if name not in arrays:
            raise CacheError(f"shard {shard}: the array {name} is missing")
        values = arrays[name]
        if values.shape != expected or values.dtype != spec.dtype:
            raise CacheError(
                f"shard {shard}, array {name}: expected {spec.dtype}{list(expected)}, "
                f"found {values.dtype}{list(values.shape)}"
            )


def _check_finite(arrays: Mapping[str, np.ndarray], shard: int, first_row: int) -> None:
    """Refuses what is no number at a label; log-probs of -inf are probability 0, and sound."""
    label = arrays["label_mask"] == 1
    wrong = {
        "label_logprobs": ~(arrays["label_logprobs"] < np.inf),
        "entropy": ~np.isfinite(arrays["entropy"]),
        "tail_logprobs": np.isnan(arrays["tail_logprobs"]).any(axis=-1),
    }
    for name, places in wrong.items():
        where = np.argwhere(places & label)
        if len(where):
            row, position = where[0].tolist()
            raise CacheError(
                f"shard {shard}, row {first_row + row}, position {position}: {name} is "
                f"{arrays[name][row, position]}, expected a number ({len(where)} such places)."
            )


def check_run(store: Store, run: str) -> None:
    """Checks that the cache is still being filled, and by the given run.

    Raises:
      TakenOverError: it is not.
    """
    current, _ = read_manifest(store)
    if current.state == "complete":
        data = store.read(WORK)
        if data is not None:
            current = Manifest.from_bytes(data, store.location, WORK)
    if current.state != "open" or current.run != run:
        raise TakenOverError(
            f"{store.location} is being filled by run {current.run or '(finished)'}, this is run "
            f"{run}: another run took over. Nothing is lost; let one of them finish."
        )


def read_receipts(store: Store, shards: Sequence[int]) -> dict[int, bytes | None]:
    """The receipts of some shards, None where there is none."""
    return dict(zip(shards, store.read_many(receipt_key(shard) for shard in shards), strict=True))


def finished_shards(store: Store) -> set[int]:
    """Numbers of the shards that have a receipt."""
    names = (re.fullmatch(r"([0-9]{6,})\.json", name) for name in store.list(RECEIPTS))
    return {int(name[1]) for name in names if name}
