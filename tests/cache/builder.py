"""Small complete caches from synthetic teachers: numpy only, no Beam, no JAX."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache import finishing
from cache.encoding import encode_shard, numbered_from, padding_rows
from cache.errors import Damage
from cache.filling import begin_work, reopened
from cache.finishing import completed
from cache.format import BACKUP, MANIFEST, TOKENIZER, Encoding
from cache.manifest import Extent, Manifest
from cache.shards import array_chunk_key, create_arrays, write_shard
from cache.storage import Store
from cache.verify import Report
from tests.models import write_tiny_tokenizer

# The tiny tokenizer's first id that stands for a printable byte ("!").
FIRST_TOKEN = 3 + 0x21


@dataclass(frozen=True)
class Built:
    """A cache and what it was made from.

    Attributes:
      path: where it is.
      manifest: the complete manifest.
      arrays: what was stored, all rows, by name.
      logits: the synthetic teacher, float64 [row, position, vocabulary].
      targets: what `encode_shard` was given, all rows.
    """

    path: Path
    manifest: Manifest
    arrays: dict[str, np.ndarray]
    logits: np.ndarray
    targets: dict[str, np.ndarray]

    @property
    def encoding(self) -> Encoding:
        return self.manifest.encoding

    @property
    def store(self) -> Store:
        return Store(str(self.path))

    def log_probabilities(self, temperature: float = 1.0) -> np.ndarray:
        """float64 [row, position, vocabulary]."""
        return log_softmax(self.logits / temperature)


def make_encoding(**changes: Any) -> Encoding:
    """Ten-odd rows' worth of a small encoding: 4 rows a shard, length 8, 60 tokens, k = 6."""
    tail = changes.get("tail", "none")
    settings: dict[str, Any] = {
        "length": 8,
        "vocabulary": 60,
        "k": 6,
        "tail": tail,
        "temperatures": (1.0, 2.0, 4.0) if tail == "none" else (1.0,),
        "rows_per_shard": 4,
    }
    return Encoding(**{**settings, **changes})


def log_softmax(logits: np.ndarray) -> np.ndarray:
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def make_rows(count: int, encoding: Encoding, seed: int = 0) -> dict[str, np.ndarray]:
    """Packed rows: several documents, a continued one, padding, and a row without labels.

    Documents are numbered in order; the last document of row 1 goes on in row 2 with its
    last token repeated. Row 3 is one document and padding. Row 5 holds one token alone.
    """
    random = np.random.default_rng(seed)
    length = encoding.length
    rows = padding_rows(count, length)
    # Text where the tokenizer has some, so that views of the cache show something.
    low = min(FIRST_TOKEN, encoding.vocabulary - 1)
    document = -1
    for row in range(count):
        sizes = _segment_sizes(row, length, random)
        start = 0
        for segment, size in enumerate(sizes, start=1):
            continued = row == 2 and segment == 1
            document += 0 if continued else 1
            place = slice(start, start + size)
            rows["tokens"][row, place] = random.integers(low, encoding.vocabulary, size)
            rows["segments"][row, place] = segment
            rows["documents"][row, place] = document
            rows["label_mask"][row, start : start + size - 1] = 1
            if continued:
                rows["tokens"][row, 0] = rows["tokens"][row - 1, length - 1]
            start += size
    return rows


def _segment_sizes(row: int, length: int, random: np.random.Generator) -> list[int]:
    if row == 3:
        return [length // 2]
    if row == 5:
        return [1]
    sizes: list[int] = []
    while sum(sizes) < length:
        sizes.append(min(int(random.integers(1, 6)), length - sum(sizes)))
    return sizes


def make_targets(
    logits: np.ndarray, rows: Mapping[str, np.ndarray], encoding: Encoding, exact: int = 2
) -> dict[str, np.ndarray]:
    """A teacher's targets in float64, rounded once at the end, as `encode_shard` takes them."""
    shape = logits.shape[:2]
    labels = np.concatenate([rows["tokens"][:, 1:], rows["tokens"][:, :1]], axis=1)
    logp = log_softmax(logits)
    targets = {
        "ids": np.full((*shape, encoding.k), -1, np.int32),
        "logprobs": np.full((*shape, encoding.k), np.nan, np.float32),
        "exact_counts": np.zeros(shape, np.int32),
        "tail_logprobs": np.zeros((*shape, len(encoding.temperatures)), np.float32),
        "label_logprobs": np.take_along_axis(logp, labels[..., None].astype(np.int64), axis=-1)[
            ..., 0
        ].astype(np.float32),
        "entropy": np.zeros(shape, np.float32),
    }
    random = np.random.default_rng(1)
    for place in np.ndindex(*shape):
        one = position_targets(logits[place], encoding, exact, random.random())
        for name, value in one.items():
            targets[name][place] = value
    return targets


def position_targets(
    logits: np.ndarray, encoding: Encoding, exact: int, uniform: float
) -> dict[str, Any]:
    """Targets of one position from its logits [vocabulary]; `uniform` draws the tail."""
    k = encoding.k
    logp = log_softmax(logits)
    order = np.argsort(-logits, kind="stable")
    order = order[np.isfinite(logits[order])]
    first = encoding.temperatures[0]
    p = np.exp(log_softmax(logits / first))
    head = min(k, len(order))
    drawn = encoding.tail == "sampled" and len(order) > k > exact
    if drawn:
        head = next(
            h for h in range(exact, k) if p[order[h]] < p[order[h:]].sum() / (k - h) or h == k - 1
        )
    ids = np.full(k, -1, np.int32)
    ids[:head] = order[:head]
    tail = np.sort(order[head:])
    if drawn:
        ends = np.cumsum(p[tail]) / p[tail].sum() * (k - head)
        ids[head:] = tail[np.searchsorted(ends[:-1], uniform + np.arange(k - head), side="right")]
    logprobs = np.full(k, np.nan, np.float32)
    logprobs[:head] = logp[order[:head]]
    with np.errstate(divide="ignore"):
        tails = [np.log(np.exp(log_softmax(logits / t))[tail].sum()) for t in encoding.temperatures]
    finite = logp[order]
    return {
        "ids": ids,
        "logprobs": logprobs,
        "exact_counts": head,
        "tail_logprobs": np.minimum(tails, 0.0).astype(np.float32),
        "entropy": np.float32(-(np.exp(finite) * finite).sum()),
    }


def open_manifest(
    encoding: Encoding,
    tokenizer: Mapping[str, bytes],
    documents: int,
    run: str = "run-1",
    exact: int = 2,
) -> Manifest:
    """An open manifest of a made-up teacher whose corpus digest is known."""
    return Manifest(
        encoding=encoding,
        capture={"layout": "pack", "exact": exact, "precision": "float32", "seed": 0},
        teacher={
            "source": "made-up/teacher",
            "revision": None,
            "fingerprint": "f" * 64,
            "parameters": 1234,
        },
        tokenizer={
            "fingerprint": "e" * 64,
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in tokenizer.items()},
        },
        corpus={
            "description": "made-up text",
            "identity": {"kind": "test"},
            "documents": documents,
            "digest": "d" * 64,
        },
        software={"numpy": "0"},
        run=run,
    )


def finish(store: Store, manifest: Manifest, extents: tuple[Extent, ...]) -> Manifest:
    """Replaces the open manifest by the complete one, as the last step of a capture does."""
    accounting = {"documents": manifest.corpus["documents"], "dropped_bytes": 0}
    complete = completed(store, manifest, extents, accounting)
    store.write(MANIFEST, complete.to_bytes())
    store.write(BACKUP, complete.to_bytes())
    return complete


def make_cache(
    folder: Path,
    *,
    rows: int = 10,
    seed: int = 0,
    scale: float = 2.0,
    exact: int = 2,
    complete: bool = True,
    logits: np.ndarray | None = None,
    laid: dict[str, np.ndarray] | None = None,
    **settings: Any,
) -> Built:
    """A complete small cache. `settings` change `make_encoding`'s; nothing is random but `seed`.

    Its rows are `laid` (tokens, segments, documents, label_mask), or those of `make_rows`.
    With `complete=False` the manifest stays open and the last shard is not made.
    """
    encoding = make_encoding(**settings)
    random = np.random.default_rng(seed)
    if laid is None:
        laid = make_rows(rows, encoding, seed)
    rows = len(laid["tokens"])
    if logits is None:
        logits = random.normal(size=(rows, encoding.length, encoding.vocabulary)) * scale
    targets = make_targets(logits, laid, encoding, exact)
    store = Store(str(folder))
    tokenizer = _write_tokenizer(folder)
    real = laid["documents"][laid["segments"] > 0]
    documents = int(real.max()) + 1 if real.size else 0
    manifest = open_manifest(encoding, tokenizer, documents, exact=exact)
    assert store.create(MANIFEST, manifest.to_bytes())
    create_arrays(store, encoding, rows)
    shards = encoding.shards(rows)
    arrays = []
    for shard in range(shards if complete else shards - 1):
        place = slice(*encoding.shard_rows(shard, rows))
        stored = encode_shard(
            {name: value[place] for name, value in laid.items()},
            {name: value[place] for name, value in targets.items()},
            encoding,
        )
        write_shard(store, manifest, shard, rows, stored)
        arrays.append(stored)
    if complete:
        manifest = finish(store, manifest, (Extent(0, shards, rows),))
    joined = {name: np.concatenate([each[name] for each in arrays]) for name in encoding.arrays()}
    return Built(folder, manifest, joined, logits, targets)


def grow(built: Built, rows: int = 6) -> Built:
    """Appends rows of another corpus, as `append` does: an extent whose first shard is new."""
    store, encoding, manifest = built.store, built.encoding, built.manifest
    laid = make_rows(rows, encoding, 3)
    logits = np.random.default_rng(3).normal(size=(rows, encoding.length, encoding.vocabulary)) * 2
    documents = int(laid["documents"][laid["segments"] > 0].max()) + 1
    opened = replace(
        reopened(manifest),
        corpus={"description": "appended", "documents": documents, "digest": "a" * 64},
        first_shard=manifest.shards,
        first_document=manifest.documents or 0,
    )
    begin_work(store, opened, lambda found: [])
    laid["documents"] = numbered_from(laid["documents"], opened.first_document)
    arrays = encode_shard(laid, make_targets(logits, laid, encoding), encoding)
    total = manifest.shards * encoding.rows_per_shard + rows
    create_arrays(store, encoding, total)
    for number in range(encoding.shards(rows)):
        part = slice(*encoding.shard_rows(number, rows))
        values = {name: value[part] for name, value in arrays.items()}
        write_shard(store, opened, manifest.shards + number, total, values)
    complete, _, _ = finishing.finish(store, opened, rows, {"documents": documents})
    joined = {name: np.concatenate([built.arrays[name], arrays[name]]) for name in arrays}
    return replace(built, manifest=complete, arrays=joined)


def _write_tokenizer(folder: Path) -> dict[str, bytes]:
    place = write_tiny_tokenizer(folder / TOKENIZER)
    return {path.name: path.read_bytes() for path in sorted(place.iterdir())}


def contents(location: str | Path) -> dict[str, bytes | None]:
    """Every object of a cache by its key, but for the logs of runs."""
    store = Store(location)
    return {key: store.read(key) for key in store.list() if not key.startswith("runs/")}


class Stop(BaseException):
    """What stops a command in a test."""


@contextmanager
def stopped_at(module: Any, name: str, call: int = 0) -> Iterator[None]:
    """What runs inside is stopped by one call of a module's function, counted from 0."""
    real, calls = getattr(module, name), itertools.count()

    def function(*arguments: Any) -> Any:
        if next(calls) == call:
            raise Stop
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, function)
        with pytest.raises(Stop):
            yield


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    """Whether two arrays have the same type, shape and bytes."""
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and np.ascontiguousarray(found).tobytes() == np.ascontiguousarray(expected).tobytes()
    )


def shard_file(built: Built, name: str, shard: int) -> Path:
    """The file of one array of one shard."""
    rank = len(built.encoding.stored_arrays()[name].inner) + 1
    return built.path / array_chunk_key(name, rank, shard)


def one_shards_damage(
    report: Report, built: Built, shard: int, name: str | None = None
) -> list[Damage]:
    """Checks that all damage is of one shard (and array), with its rows and documents."""
    assert not report.sound
    for item in report.damage:
        assert item.shard == shard
        assert item.rows == built.manifest.shard_rows(shard)
        assert item.documents == built.manifest.receipts[shard].documents
        if name is not None:
            assert item.array == name
    return list(report.damage)
