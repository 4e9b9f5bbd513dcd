"""Between a teacher's targets and stored arrays: rounding, canonical bytes, weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Integer

from cache.errors import CacheError
from cache.format import NO_DOCUMENT, Encoding

# Finite log-probs below float16's range are stored as its least number.
LEAST_FLOAT16 = -65504.0


def round_mantissa(values: Float32[np.ndarray, "..."], bits: int) -> Float32[np.ndarray, "..."]:
    """Rounds float32 to a number of mantissa bits, ties to even; NaN and infinities stay."""
    drop = np.uint32(23 - bits)
    raw = np.ascontiguousarray(values).view(np.uint32)
    half = (np.uint32(1) << (drop - np.uint32(1))) - np.uint32(1)
    even = (raw >> drop) & np.uint32(1)
    rounded = ((raw + half + even) >> drop) << drop
    return np.where(np.isfinite(values), rounded.view(np.float32), values)


def encode_logprobs(
    logprobs: Float32[np.ndarray, "..."], encoding: Encoding
) -> Float[np.ndarray, "..."]:
    """Log-probs (natural log) of entries in the cache's rounding; NaN marks "not exact"."""
    if encoding.logprobs == "float32":
        return logprobs
    if encoding.logprobs == "rounded":
        logprobs = round_mantissa(logprobs, encoding.mantissa_bits)
    return to_float16(logprobs)


def to_float16(values: Float32[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """float16, finite values kept finite; -inf and NaN stay."""
    with np.errstate(invalid="ignore"):
        clipped = np.where(np.isfinite(values), np.maximum(values, LEAST_FLOAT16), values)
    return clipped.astype(np.float16)


def encode_shard(
    rows: Mapping[str, Integer[np.ndarray, "row position"]],
    targets: Mapping[str, Any],
    encoding: Encoding,
) -> dict[str, np.ndarray]:
    """The arrays of one shard as they are stored.

    Args:
      rows: tokens, segments, documents, label_mask, each [row, position].
      targets: ids int32 [row, position, k] with -1 for an empty slot, logprobs float32
        [row, position, k] (natural log, NaN where not exact), exact_counts int32,
        tail_logprobs float32 [row, position, temperature], label_logprobs and entropy
        float32 (nats).
      encoding: the cache's encoding.

    Returns:
      Every array of the format, C-contiguous, with fill values where there is no label.

    Raises:
      CacheError: a token id that is not in the vocabulary.
    """
    specs = encoding.arrays()
    label = rows["label_mask"] == 1
    ids = targets["ids"]
    highest = max(
        int(rows["tokens"].max(initial=0)), int(ids.max(initial=0, where=label[..., None]))
    )
    if highest >= encoding.vocabulary:
        raise CacheError(
            f"found the token id {highest}, expected ids below the vocabulary of "
            f"{encoding.vocabulary:,}. Does the tokenizer belong to the teacher?"
        )
    values = {
        "tokens": rows["tokens"],
        "segments": rows["segments"],
        "documents": rows["documents"],
        "label_mask": rows["label_mask"],
        "target_ids": np.where(ids < 0, encoding.no_id, ids),
        "target_logprobs": encode_logprobs(targets["logprobs"], encoding),
        "exact_counts": targets["exact_counts"],
        # A tail that holds nearly all the mass may come out above 1 by a rounding.
        "tail_logprobs": to_float16(np.minimum(targets["tail_logprobs"], np.float32(0))),
        "label_logprobs": targets["label_logprobs"],
        "entropy": to_float16(targets["entropy"]),
    }
    always = ("tokens", "segments", "documents", "label_mask")
    encoded = {}
    for name, spec in specs.items():
        value = values[name].astype(spec.dtype, copy=False)
        if name not in always:
            mask = label.reshape(label.shape + (1,) * (value.ndim - 2))
            value = np.where(mask, value, np.asarray(spec.fill, spec.dtype))
        if np.isnan(spec.fill):
            # One bit pattern for NaN, whatever the arithmetic gave.
            value = np.where(np.isnan(value), np.asarray(np.nan, spec.dtype), value)
        encoded[name] = np.ascontiguousarray(value)
    return encoded


def padding_rows(count: int, length: int) -> dict[str, np.ndarray]:
    """Rows of nothing but padding: token 0, segment 0, no document, no label."""
    shape = (count, length)
    return {
        "tokens": np.zeros(shape, np.uint32),
        "segments": np.zeros(shape, np.uint16),
        "documents": np.full(shape, NO_DOCUMENT, np.uint32),
        "label_mask": np.zeros(shape, np.uint8),
    }


def weights(
    arrays: Mapping[str, np.ndarray], encoding: Encoding, temperature: float
) -> Float32[np.ndarray, "*rows k"]:
    """The weight of every entry in the teacher's distribution at a captured temperature.

    Exact entries: `p_T(i) = (1 - e^tail_T) * softmax_over_exact(logprob_i / T)`, an
    identity of the softmax, so that stored weights agree with the stored tail whatever
    the rounding. Sampled entries: the tail's mass divided evenly, the unbiased estimate
    of variance-optimal sampling (Cohen, Duffield, Kaplan, Lund, Thorup, SIAM J. Comput.
    40(5), 2011). Where there are sampled entries, or nothing is outside the exact ones, the
    weights of a position sum to 1. Empty slots and positions without a label weigh 0.

    Args:
      arrays: target_ids, target_logprobs, exact_counts, tail_logprobs, label_mask as stored,
        with any leading axes.
      encoding: the cache's encoding.
      temperature: one of `encoding.temperatures`.

    Raises:
      CacheError: the temperature was not captured.
    """
    if temperature not in encoding.temperatures:
        captured = ", ".join(f"{value:g}" for value in encoding.temperatures)
        raise CacheError(
            f"the cache holds the tail's mass at temperature {captured}, not at {temperature:g}; "
            "the distribution at another temperature cannot be computed from it. "
            "Use a captured temperature, or capture again with this one."
        )
    label = (arrays["label_mask"] == 1)[..., None]
    tail_index = encoding.temperatures.index(temperature)
    tail = arrays["tail_logprobs"][..., tail_index, None].astype(np.float64)
    tail_mass = np.exp(np.where(label, tail, -np.inf))
    head_mass = -np.expm1(np.where(label, tail, -np.inf))

    slot = np.arange(encoding.k)
    counts = np.where(label, arrays["exact_counts"][..., None], 0)
    exact = slot < counts
    scaled = np.where(exact, arrays["target_logprobs"].astype(np.float64) / temperature, -np.inf)
    top = np.max(scaled, axis=-1, keepdims=True, initial=-1e300)
    unnormalised = np.exp(scaled - top)
    total = unnormalised.sum(axis=-1, keepdims=True)
    head = head_mass * unnormalised / np.where(total > 0, total, 1)

    sampled = label & ~exact & (arrays["target_ids"] != encoding.no_id)
    drawn = sampled.sum(axis=-1, keepdims=True)
    threshold = tail_mass / np.maximum(drawn, 1)
    return np.where(exact, head, np.where(sampled, threshold, 0.0)).astype(np.float32)
