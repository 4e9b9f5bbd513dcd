"""A large finished cache without a teacher, whose values are spread as a real one's are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

import cache
from cache.encoding import encode_shard
from cache.filling import reopened
from cache.finishing import finish
from cache.format import MANIFEST, Encoding
from cache.manifest import Extent, Manifest, ReceiptEntry
from cache.shards import create_arrays, write_shard
from cache.statistics import statistics_of
from cache.storage import Store

# SmolLM2's vocabulary, and k and length of the goal in issue 2.
ENCODING = Encoding(length=512, vocabulary=49_152, k=64, tail="none", temperatures=(1.0, 2.0, 4.0))
# Ids are drawn with probability ~ 1 / (id + SHIFT): Zipf's law with Mandelbrot's shift.
_SHIFT = 300


def write_cache(location: Path, shards: int, encoding: Encoding = ENCODING) -> None:
    """Writes a finished cache of whole shards, through the functions of a capture."""
    store = Store(str(location))
    rows = shards * encoding.rows_per_shard
    manifest = _manifest(encoding, documents=2 * rows)
    store.write(MANIFEST, manifest.to_bytes())
    create_arrays(store, encoding, rows)
    for shard in range(shards):
        write_shard(store, manifest, shard, rows, encode_shard(*_shard(shard, encoding), encoding))
    finish(store, manifest, rows, {})


def write_manifest_alone(location: Path, shards: int, encoding: Encoding = ENCODING) -> None:
    """Writes the manifest of a finished cache of many shards, and empty files in their place."""
    location.mkdir(parents=True)
    (location / MANIFEST).write_bytes(_made_up(shards, encoding).to_bytes())
    folders = {location / "receipts": "{:06d}.json"}
    for name, spec in encoding.stored_arrays().items():
        folders[location / "arrays" / name] = "c.{}" + ".0" * len(spec.inner)
    for folder, pattern in folders.items():
        folder.mkdir(parents=True)
        for shard in range(shards):
            (folder / pattern.format(shard)).touch()


def write_some_shards(
    location: Path,
    shards: int,
    encoding: Encoding,
    which: Callable[[cache.Cache], Iterable[int]],
) -> None:
    """Writes the manifest of a cache of many shards, and those that `which` names."""
    store = Store(str(location))
    finished = _made_up(shards, encoding)
    store.write(MANIFEST, finished.to_bytes())
    chosen = list(which(cache.open(location)))
    opened = reopened(finished)
    store.write(MANIFEST, opened.to_bytes())
    create_arrays(store, encoding, finished.rows)
    for shard in chosen:
        arrays = encode_shard(*_shard(shard, encoding), encoding)
        write_shard(store, opened, shard, finished.rows, arrays)
    store.write(MANIFEST, finished.to_bytes())


def _made_up(shards: int, encoding: Encoding) -> Manifest:
    """The manifest of a finished cache of many shards; its receipts exist nowhere."""
    rows = shards * encoding.rows_per_shard
    # Of one row: only their number of rows has to be right.
    small = replace(encoding, rows_per_shard=1)
    statistics = statistics_of(encode_shard(*_shard(0, small), small), small)
    random = np.random.default_rng(0)
    entries = (
        ReceiptEntry(random.bytes(32).hex(), (shard * 300, shard * 300 + 301))
        for shard in range(shards)
    )
    return replace(
        _manifest(encoding, documents=300 * shards + 2),
        state="complete",
        run="",
        extents=(Extent(0, shards, rows),),
        receipts=tuple(entries),
        statistics=replace(statistics, rows=rows),
        bytes=dict.fromkeys(encoding.stored_arrays(), shards),
    )


def _manifest(encoding: Encoding, documents: int) -> Manifest:
    return Manifest(
        encoding=encoding,
        capture={"layout": "pack", "exact": encoding.k, "precision": "float32"},
        teacher={"fingerprint": "0" * 64, "source": "synthetic", "parameters": 0},
        tokenizer={"fingerprint": "0" * 64, "files": {}},
        corpus={"description": "synthetic", "documents": documents, "digest": "0" * 64},
        run="synthetic",
    )


def _shard(shard: int, encoding: Encoding) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Rows and targets of one shard, as `encode_shard` takes them; two documents in a row."""
    random = np.random.default_rng(shard)
    shape = (encoding.rows_per_shard, encoding.length)
    rows, length = shape
    start = random.integers(2, length - 2, rows)[:, None]
    place = np.arange(length)[None, :]
    second = place >= start
    numbers = shard * rows + np.arange(rows)[:, None]
    ids = _distinct_ids(random, math.prod(shape), encoding).reshape(*shape, encoding.k)
    logprobs, outside = _logprobs(random, shape, encoding.k)
    # The likeliest entry follows as often as it should, seldom one of the last.
    probabilities = np.exp(logprobs).cumsum(axis=-1)
    drawn = random.random((*shape, 1)) * probabilities[..., -1:]
    slot = (probabilities < drawn).sum(axis=-1, keepdims=True).clip(max=encoding.k - 1)
    tokens = np.zeros(shape, np.int32)
    tokens[:, 1:] = np.take_along_axis(ids, slot, axis=-1)[:, :-1, 0]
    laid = {
        "tokens": tokens,
        "segments": 1 + second,
        "documents": 2 * numbers + second,
        "label_mask": (place != start - 1) & (place != length - 1),
    }
    tails = [np.log(outside)]
    for mass in (0.75, 0.98)[: len(encoding.temperatures) - 1]:
        tails.append(np.log(mass) + 0.01 * np.log(random.random(shape)))
    targets = {
        "ids": ids,
        "logprobs": logprobs,
        "exact_counts": np.full(shape, encoding.k, np.int32),
        "tail_logprobs": np.stack(tails, axis=-1).astype(np.float32),
        "label_logprobs": np.take_along_axis(logprobs, slot, axis=-1)[..., 0],
        "entropy": random.gamma(2.5, 1.0, shape).clip(max=10).astype(np.float32),
    }
    return laid, targets


def _distinct_ids(random: np.random.Generator, count: int, encoding: Encoding) -> np.ndarray:
    """int32 [count, k]: distinct ids in each position, few of the vocabulary much likelier."""
    ids = _zipf(random, (count, encoding.k), encoding.vocabulary)
    pending = np.arange(count)
    while len(pending):
        ranked = np.sort(ids[pending], axis=1)
        pending = pending[(ranked[:, 1:] == ranked[:, :-1]).any(axis=1)]
        ids[pending] = _zipf(random, (len(pending), encoding.k), encoding.vocabulary)
    return ids


def _zipf(random: np.random.Generator, shape: tuple[int, int], vocabulary: int) -> np.ndarray:
    spread = np.log1p(vocabulary / _SHIFT)
    values = _SHIFT * np.expm1(random.random(shape, np.float32) * np.float32(spread))
    return values.astype(np.int32).clip(max=vocabulary - 1)


def _logprobs(
    random: np.random.Generator, shape: tuple[int, int], k: int
) -> tuple[np.ndarray, np.ndarray]:
    """float32 [row, position, k], descending, and the mass outside them [row, position].

    The i-th step down is exponential with mean 1 / i, so that log-probs fall about as the
    logarithm of the rank; the mass outside is 3 to 40 %.
    """
    steps = random.standard_exponential((*shape, k), np.float32)
    falling = -np.cumsum(1.3 * steps / np.arange(1, k + 1, dtype=np.float32), axis=-1)
    outside = random.uniform(0.03, 0.4, shape)
    total = np.log(np.exp(falling).sum(axis=-1, dtype=np.float64))
    logprobs = falling - total[..., None] + np.log1p(-outside)[..., None]
    return logprobs.astype(np.float32), outside
