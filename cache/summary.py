"""Looking into a cache: a summary, a shard, a row, a position, each as a JSON-able object."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from cache.errors import CacheError, Damage, DamageError
from cache.filling import describe_work, work_under_way
from cache.format import ARRAYS, NO_DOCUMENT, VERSION, receipt_key
from cache.jsonfields import parse_object
from cache.manifest import Manifest, read_manifest
from cache.options import InspectOptions
from cache.reader import Cache
from cache.reader import open as open_cache
from cache.receipt import Receipt
from cache.runlog import read_events
from cache.shards import array_chunk_key, finished_shards
from cache.statistics import Statistics, perplexity
from cache.storage import Store, chunk_key

# Tokens of text shown on each side of a position.
_CONTEXT = 40


def inspect(options: InspectOptions) -> dict[str, Any]:
    """What `stillroom inspect` shows, as a JSON-able object with a "view" field.

    Raises:
      CacheError: no such cache, shard, row or position.
      DamageError: what was asked for is missing or damaged.
    """
    if options.shard is not None:
        return shard_view(options.cache, options.shard)
    if options.row is None:
        return summary(options.cache, files=options.files)
    cache = open_cache(options.cache)
    if options.position is None:
        return row_view(cache, options.row)
    return position_view(cache, options.row, options.position, options.temperature)


def summary(location: str, files: bool = True) -> dict[str, Any]:
    """The summary of a cache, finished or not, from its manifest and a look at what is there.

    Args:
      location: the cache.
      files: list its files, to see what is missing. Without, a finished cache of any size is
        summarised from one object.
    """
    store = Store(location)
    manifest, _ = read_manifest(store)
    settings = manifest.as_read
    encoding = settings.encoding
    view: dict[str, Any] = {
        "view": "summary",
        "cache": store.location,
        "state": manifest.state,
        "format_version": ".".join(map(str, VERSION)),
        "teacher": {
            name: manifest.teacher.get(name)
            for name in ("source", "revision", "parameters", "fingerprint")
        },
        "tokenizer": {"fingerprint": manifest.tokenizer["fingerprint"]},
        "corpus": {
            "description": manifest.corpus.get("description"),
            "documents": manifest.documents,
        },
        "encoding": encoding.to_json(),
        "capture": settings.capture,
        "notes": list(manifest.notes),
        "shards": _shards(store, manifest, files),
    }
    if manifest.state == "complete" and manifest.statistics is not None:
        cells = manifest.rows * encoding.length
        view |= {
            "rows": manifest.rows,
            "extents": [
                {
                    "first_shard": extent.first_shard,
                    "shards": extent.shards,
                    "rows": extent.rows,
                    "documents": corpus.get("documents"),
                    "description": corpus.get("description"),
                }
                for extent, corpus in zip(manifest.extents, manifest.corpora, strict=True)
            ],
            "work": _work(store, manifest) if files else None,
            "padding": 1 - manifest.statistics.tokens / cells,
            "accounting": manifest.accounting,
            "bytes": _bytes(manifest, manifest.statistics),
            **statistics_view(manifest.statistics, encoding.temperatures),
        }
    return view


def _work(store: Store, manifest: Manifest) -> dict[str, Any] | None:
    """Unfinished work on a finished cache."""
    try:
        work = work_under_way(store)
    except CacheError as error:
        return {"damaged": str(error)}
    return None if work is None else describe_work(store, work, manifest)


def statistics_view(statistics: Statistics, temperatures: tuple[float, ...]) -> dict[str, Any]:
    """Counts and means over labels: masses, entropy (nats), the teacher's perplexity."""
    labels = max(statistics.labels, 1)
    return {
        "tokens": statistics.tokens,
        "labels": statistics.labels,
        "rows_without_labels": statistics.rows_without_labels,
        "exact_entries_per_label": statistics.exact_entries / labels,
        "sampled_entries_per_label": statistics.sampled_entries / labels,
        "exact_mass": [
            {
                "temperature": temperature,
                "mean": _number(statistics.mean_exact_mass(index)),
                "percentile_10": _number(statistics.exact_mass_percentile(index, 10.0)),
            }
            for index, temperature in enumerate(temperatures)
        ],
        "entropy": _number(statistics.mean_entropy),
        "teacher_perplexity": _number(statistics.perplexity),
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _bytes(manifest: Manifest, statistics: Statistics) -> dict[str, Any]:
    tokens = max(statistics.tokens, 1)
    total = sum(manifest.bytes.values())
    return {
        "total": total,
        "per_token": total / tokens,
        "arrays": {
            name: {"total": size, "per_token": size / tokens}
            for name, size in manifest.bytes.items()
        },
    }


def _shards(store: Store, manifest: Manifest, listed: bool) -> dict[str, Any]:
    """Shards done, missing and damaged, by a listing of receipts and files if there is one."""
    if manifest.state == "complete" and not (listed and store.lists):
        return {"total": manifest.shards, "done": None, "missing": None, "damaged": None}
    receipts = finished_shards(store)
    if manifest.state == "open":
        total = _planned_shards(store, manifest)
        return {
            "total": total,
            "done": len(receipts),
            "missing": [] if total is None else sorted(set(range(total)) - receipts),
            "damaged": [],
        }
    files = set(store.list(ARRAYS))
    damaged = []
    for name, spec in manifest.encoding.stored_arrays().items():
        rank = len(spec.inner) + 1
        for shard in range(manifest.shards):
            if f"{name}/{chunk_key(shard, rank)}" not in files:
                damaged.append(
                    Damage(
                        f"{array_chunk_key(name, rank, shard)} is missing",
                        shard=shard,
                        array=name,
                        rows=manifest.shard_rows(shard),
                        documents=manifest.receipts[shard].documents,
                    )
                )
    missing = sorted(set(range(manifest.shards)) - receipts)
    broken = {item.shard for item in damaged} | set(missing)
    return {
        "total": manifest.shards,
        "done": manifest.shards - len(broken),
        "missing": missing,
        "damaged": [str(item) for item in damaged],
    }


def _planned_shards(store: Store, manifest: Manifest) -> int | None:
    """Shards of an unfinished cache, once its arrays are made."""
    data = store.read(f"{ARRAYS}/tokens/zarr.json")
    if data is None:
        return None
    shape = parse_object(data, f"{ARRAYS}/tokens/zarr.json").get("shape")
    if not isinstance(shape, list) or not shape or not isinstance(shape[0], int):
        raise CacheError(f"{ARRAYS}/tokens/zarr.json has no shape; capture into a new folder")
    return manifest.encoding.shards(shape[0])


def shard_view(location: str, shard: int) -> dict[str, Any]:
    """One shard: its receipt, rows, documents, timings and statistics."""
    store = Store(location)
    manifest, _ = read_manifest(store)
    known = manifest.shards if manifest.state == "complete" else _planned_shards(store, manifest)
    if shard < 0 or (known is not None and shard >= known):
        raise CacheError(f"the cache has shards 0 to {(known or 0) - 1}, not {shard}.")
    data = store.read(receipt_key(shard))
    if data is None and manifest.state == "open":
        raise CacheError(f"shard {shard} is not done yet. Run the same precompute to go on.")
    receipt = _listed_receipt(manifest, shard, data)
    timings = [
        {key: value for key, value in event.items() if key not in ("event", "shard")}
        for event in read_events(store)
        if event["event"] == "shard" and event.get("shard") == shard
    ]
    return {
        "view": "shard",
        "cache": store.location,
        "shard": shard,
        "rows": list(receipt.rows),
        "documents": None if receipt.documents is None else list(receipt.documents),
        "arrays": {name: asdict(stored) for name, stored in receipt.arrays.items()},
        "receipt_sha256": receipt.digest,
        "timings": timings,
        **statistics_view(receipt.statistics, manifest.encoding.temperatures),
    }


def _listed_receipt(manifest: Manifest, shard: int, data: bytes | None) -> Receipt:
    """A shard's receipt; in a complete cache it must be the one that the manifest lists."""
    if manifest.state == "complete":
        listed = manifest.receipts[shard]
        if data is None or hashlib.sha256(data).hexdigest() != listed.sha256:
            state = "is missing" if data is None else "is not the one the manifest lists"
            damage = Damage(
                f"{receipt_key(shard)} {state}",
                shard=shard,
                rows=manifest.shard_rows(shard),
                documents=listed.documents,
            )
            raise DamageError([damage], "Run `stillroom verify` for all that is wrong.")
    return Receipt.from_bytes(data or b"", receipt_key(shard))


def row_view(cache: Cache, row: int) -> dict[str, Any]:
    """One row: its segments with document, length, labels and text."""
    arrays = {name: values[0] for name, values in cache.rows([row]).items()}
    tokenizer = cache.tokenizer()
    segments = []
    for segment in range(1, int(arrays["segments"].max()) + 1):
        inside = arrays["segments"] == segment
        mask = arrays["label_mask"][inside] == 1
        logprobs = arrays["label_logprobs"][inside][mask].astype(np.float64)
        segments.append(
            {
                "segment": segment,
                "document": int(arrays["documents"][inside][0]),
                "positions": [int(np.argmax(inside)), int(np.argmax(inside) + inside.sum())],
                "labels": int(mask.sum()),
                "teacher_perplexity": _number(perplexity(logprobs.sum(), len(logprobs))),
                "text": _text(tokenizer, arrays["tokens"][inside]),
            }
        )
    return {
        "view": "row",
        "cache": cache.location,
        "row": row,
        "shard": int(cache.stored_rows([row])[0]) // cache.encoding.rows_per_shard,
        "padding": int((arrays["segments"] == 0).sum()),
        "segments": segments,
    }


def position_view(
    cache: Cache, row: int, position: int, temperature: float | None = None
) -> dict[str, Any]:
    """One position: the text around it, the teacher's entries, the true next token."""
    length = cache.encoding.length
    if not 0 <= position < length:
        raise CacheError(f"a row has positions 0 to {length - 1}, not {position}.")
    batch = cache.rows([row])
    arrays = {name: values[0] for name, values in batch.items()}
    tokenizer = cache.tokenizer()
    segment = arrays["segments"] == arrays["segments"][position]
    before = arrays["tokens"][max(0, position + 1 - _CONTEXT) : position + 1]
    before = before[segment[max(0, position + 1 - _CONTEXT) : position + 1]]
    after = arrays["tokens"][position + 1 : position + 1 + _CONTEXT]
    after = after[segment[position + 1 : position + 1 + _CONTEXT]]
    document = int(arrays["documents"][position])
    view = {
        "view": "position",
        "cache": cache.location,
        "row": row,
        "position": position,
        "document": None if document == NO_DOCUMENT else document,
        "before": _text(tokenizer, before) if document != NO_DOCUMENT else "",
        "after": _text(tokenizer, after) if document != NO_DOCUMENT else "",
        "label": None,
    }
    if arrays["label_mask"][position] != 1:
        return view
    chosen = cache.encoding.temperatures[0] if temperature is None else temperature
    weights = cache.weights(batch, chosen)[0, position]
    count = int(arrays["exact_counts"][position])
    label = int(arrays["tokens"][position + 1])
    ids = arrays["target_ids"][position].tolist()
    exact = ids[:count]
    return {
        **view,
        "temperature": chosen,
        "entropy": float(arrays["entropy"][position]),
        "label": {
            "id": label,
            "text": _token(tokenizer, label),
            "probability": float(np.exp(arrays["label_logprobs"][position])),
            "rank": exact.index(label) + 1 if label in exact else None,
            "rank_above": count,
        },
        "entries": [
            {
                "id": token,
                "text": _token(tokenizer, token),
                "probability": float(weights[slot]),
                "kind": "exact" if slot < count else "sampled",
            }
            for slot, token in enumerate(ids)
            if token != cache.encoding.no_id
        ],
    }


def _text(tokenizer: Tokenizer, tokens: np.ndarray) -> str:
    return tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


def _token(tokenizer: Tokenizer, token: int) -> str:
    text = tokenizer.decode([token], skip_special_tokens=False)
    # Half a character, or nothing: the vocabulary's own spelling says more.
    if not text or "\ufffd" in text:
        return tokenizer.id_to_token(token) or f"<{token}>"
    return text
