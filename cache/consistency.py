"""What stored arrays of one shard must satisfy, whoever wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
from jaxtyping import Bool, Float64

from cache.encoding import LEAST_FLOAT16
from cache.format import NO_DOCUMENT, Encoding

# Float32 arithmetic of the teacher: the slack of sums of probabilities and of log-probs.
SLACK = 1e-4


def inconsistencies(
    arrays: Mapping[str, np.ndarray],
    encoding: Encoding,
    documents: int | None = None,
    relative_error: float | None = None,
) -> Iterator[tuple[str, str]]:
    """Everything in a shard that contradicts the format, as (array, reason).

    Args:
      arrays: all arrays of the shard, [row, position, ...], as stored.
      encoding: the cache's encoding.
      documents: number of documents in the corpus, if known.
      relative_error: of the log-probs of entries, `Manifest.relative_error`; the encoding's if
        None.
    """
    error = encoding.relative_error if relative_error is None else relative_error
    checks = (_rows, _canonical, _entries, partial(_masses, relative_error=error))
    for check in checks:
        # Damaged data may hold any number, NaN and infinities included.
        with np.errstate(over="ignore", invalid="ignore"):
            findings = list(check(arrays, encoding))
        yield from findings
    if documents is not None:
        numbers = arrays["documents"]
        yield from _report(
            "documents", (numbers != NO_DOCUMENT) & (numbers >= documents), "no such document"
        )


def _report(name: str, wrong: np.ndarray, reason: str) -> Iterator[tuple[str, str]]:
    """One finding for an array of positions [row, position, ...] that are wrong."""
    where = np.argwhere(wrong)
    if len(where):
        row, position = where[0][:2].tolist()
        yield (
            name,
            f"{reason} at {len(where)} places, first at row {row} of the shard, "
            f"position {position}",
        )


def _rows(arrays: Mapping[str, np.ndarray], encoding: Encoding) -> Iterator[tuple[str, str]]:
    tokens, segments = arrays["tokens"], arrays["segments"].astype(np.int64)
    documents, mask = arrays["documents"], arrays["label_mask"]
    padding = segments == 0
    yield from _report("tokens", ~padding & (tokens >= encoding.vocabulary), "illegal token id")
    yield from _report("tokens", padding & (tokens != 0), "padding should be token 0")
    before = np.concatenate([np.zeros_like(segments[:, :1]), segments[:, :-1]], axis=1)
    first = np.zeros(segments.shape, bool)
    first[:, 0] = True
    rises = (segments == before) | (segments == before + 1)
    legal = np.where(padding, True, rises & ((before != 0) | first))
    yield from _report("segments", ~legal, "segments should number 1, 2, … and then be 0")
    yield from _report(
        "documents", padding != (documents == NO_DOCUMENT), "only padding has no document"
    )
    same = (segments[:, 1:] == segments[:, :-1]) & ~padding[:, 1:]
    differs = np.zeros(segments.shape, bool)
    differs[:, 1:] = same & (documents[:, 1:] != documents[:, :-1])
    yield from _report("documents", differs, "a segment should belong to one document")
    yield from _report("label_mask", mask > 1, "a label mask is 0 or 1")
    continues = np.concatenate([same, np.zeros_like(same[:, :1])], axis=1)
    yield from _report(
        "label_mask", (mask == 1) & ~continues, "a label where the segment does not go on"
    )


def _canonical(arrays: Mapping[str, np.ndarray], encoding: Encoding) -> Iterator[tuple[str, str]]:
    unlabelled = arrays["label_mask"] == 0
    for name, spec in encoding.arrays().items():
        if name in ("tokens", "segments", "documents", "label_mask"):
            continue
        raw = arrays[name].view(f"u{arrays[name].dtype.itemsize}")
        fill = np.asarray(spec.fill, spec.dtype).view(raw.dtype)
        wrong = (raw != fill).reshape(*unlabelled.shape, -1).any(axis=-1)
        yield from _report(name, unlabelled & wrong, "no label, yet not the canonical bytes")


def _entries(arrays: Mapping[str, np.ndarray], encoding: Encoding) -> Iterator[tuple[str, str]]:
    label = arrays["label_mask"] == 1
    ids = arrays["target_ids"].astype(np.int64)
    logprobs = arrays["target_logprobs"].astype(np.float32)
    counts = np.where(label, arrays["exact_counts"].astype(np.int64), 0)
    exact = np.arange(encoding.k) < counts[..., None]
    empty = ids == encoding.no_id
    yield from _report(
        "exact_counts", label & ((counts < 1) | (counts > encoding.k)), "an impossible count"
    )
    yield from _report("target_ids", exact & empty, "an exact entry without an id")
    yield from _report(
        "target_ids", label[..., None] & ~empty & (ids >= encoding.vocabulary), "illegal id"
    )
    bad = exact & ~((logprobs <= 0) & np.isfinite(logprobs))
    ascending = exact[..., 1:] & (logprobs[..., 1:] > logprobs[..., :-1])
    yield from _report("target_logprobs", bad, "a log-prob that is not a finite number <= 0")
    yield from _report("target_logprobs", ascending, "exact entries out of order")
    yield from _report(
        "target_logprobs", ~exact & ~np.isnan(logprobs), "a log-prob at an entry that is not exact"
    )
    rest = ~exact & ~empty & label[..., None]
    late = rest[..., 1:] & empty[..., :-1]
    yield from _report("target_ids", late, "an entry behind an empty slot")
    if encoding.tail == "none":
        yield from _report("target_ids", rest, "a sampled entry in a cache without samples")
    else:
        outside = (arrays["tail_logprobs"] > -np.inf).any(axis=-1)
        undrawn = label & outside & ~rest.any(axis=-1)
        yield from _report("exact_counts", undrawn, "no sampled entry, yet the tail has mass")
    backwards = rest[..., 1:] & rest[..., :-1] & (ids[..., 1:] <= ids[..., :-1])
    yield from _report("target_ids", backwards, "sampled ids should ascend")
    # Empty slots get distinct negative numbers, so that only real ids can be equal.
    shown = np.where(empty | ~label[..., None], -1 - np.arange(encoding.k), ids)
    shown = np.sort(shown, axis=-1)
    repeated = (shown[..., 1:] == shown[..., :-1]).any(axis=-1)
    yield from _report("target_ids", repeated, "the same id twice at one position")


def exact_mass(
    logprobs: Float64[np.ndarray, "*positions k"],
    exact: Bool[np.ndarray, "*positions k"],
    relative_error: float,
) -> tuple[Float64[np.ndarray, "*positions"], Float64[np.ndarray, "*positions"]]:
    """The mass of the exact entries at temperature 1 as stored, and how far it may be off.

    Args:
      logprobs: stored log-probs (natural log) of entries.
      exact: which of them are exact; the others may hold anything.
      relative_error: largest relative rounding error of a log-prob.
    """
    finite = np.where(exact, logprobs, 0.0)
    probabilities = np.where(exact, np.exp(finite), 0.0)
    rounding = np.minimum(relative_error * np.abs(finite), 50)
    return probabilities.sum(axis=-1), SLACK + (probabilities * np.expm1(rounding)).sum(axis=-1)


def _masses(
    arrays: Mapping[str, np.ndarray], encoding: Encoding, relative_error: float
) -> Iterator[tuple[str, str]]:
    label = arrays["label_mask"] == 1
    counts = np.where(label, arrays["exact_counts"].astype(np.int64), 0)
    exact = np.arange(encoding.k) < counts[..., None]
    finite = np.where(exact, arrays["target_logprobs"].astype(np.float64), 0.0)
    rounding = relative_error * np.abs(finite)
    total, bound = exact_mass(finite, exact, relative_error)
    yield from _report("target_logprobs", label & (total > 1 + bound), "exact mass above 1")

    tails = np.where(label[..., None], arrays["tail_logprobs"].astype(np.float64), -np.inf)
    yield from _report("tail_logprobs", ~(tails <= 0), "a tail that is not a number <= 0")
    if 1.0 in encoding.temperatures:
        tail = tails[..., encoding.temperatures.index(1.0)]
        mass = np.exp(np.minimum(tail, 0))
        # The tail's own rounding, the steps of float16 near 0 included.
        rounded = np.expm1(
            encoding.tail_error * np.abs(np.where(np.isfinite(tail), tail, 0)) + 2.0**-25
        )
        slack = bound + mass * rounded
        wrong = label & ~(np.abs(total + mass - 1) <= slack)
        yield from _report("tail_logprobs", wrong, "exact mass + tail mass is not 1")

    labels = np.concatenate([arrays["tokens"][:, 1:], arrays["tokens"][:, :1]], axis=1)
    hit = exact & (arrays["target_ids"].astype(np.int64) == labels.astype(np.int64)[..., None])
    stated = np.where(label, arrays["label_logprobs"].astype(np.float64), 0.0)[..., None]
    if encoding.logprob_dtype == "float16":
        stated = np.maximum(stated, LEAST_FLOAT16)
    off = hit & ~(np.abs(stated - finite) <= SLACK + rounding)
    lowest = np.where(exact, finite + rounding, np.inf).min(axis=-1, initial=np.inf)
    above = label & ~hit.any(axis=-1) & ~(stated[..., 0] <= lowest + SLACK)
    yield from _report("label_logprobs", off, "not the log-prob of the entry that is the label")
    yield from _report("label_logprobs", above, "label is no exact entry, yet likelier than one")
    entropy = np.where(label, arrays["entropy"].astype(np.float64), 0.0)
    limit = np.log(encoding.vocabulary) * (1 + 2.0**-10) + SLACK
    wrong = ~((entropy >= -SLACK) & (entropy <= limit))
    yield from _report("entropy", wrong, "an entropy outside 0 … log(vocabulary)")
