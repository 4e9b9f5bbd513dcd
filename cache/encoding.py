"""Between a teacher's targets and stored arrays: rounding, canonical bytes, weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Integer, UInt32

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


def _tails(values: Float32[np.ndarray, "..."], encoding: Encoding) -> Float[np.ndarray, "..."]:
    return values if encoding.tail_dtype == "float32" else to_float16(values)


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
        "tail_logprobs": _tails(np.minimum(targets["tail_logprobs"], np.float32(0)), encoding),
        "label_logprobs": targets["label_logprobs"],
        "entropy": _tails(targets["entropy"], encoding),
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


def numbered_from(
    documents: UInt32[np.ndarray, "row position"], first: int
) -> UInt32[np.ndarray, "row position"]:
    """Document numbers moved up by `first`; padding stays padding.

    Raises:
      CacheError: a number beyond what the format holds.
    """
    real = documents != NO_DOCUMENT
    if int(documents.max(initial=0, where=real)) + first >= NO_DOCUMENT:
        raise CacheError(f"a cache can number {NO_DOCUMENT:,} documents; these are too many")
    return np.where(real, documents + np.uint32(first), documents)


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
    found, _ = entry_weights(
        arrays["label_mask"] == 1,
        arrays["target_ids"],
        arrays["target_logprobs"].astype(np.float64),
        arrays["exact_counts"],
        arrays["tail_logprobs"][..., encoding.temperatures.index(temperature)].astype(np.float64),
        temperature,
        encoding.no_id,
    )
    return found.astype(np.float32)


def entry_weights(
    label: Any,
    ids: Any,
    logprobs: Any,
    exact_counts: Any,
    tail_logprobs: Any,
    temperature: float,
    no_id: int,
    xp: Any = np,
) -> tuple[Any, Any]:
    """The formula of `weights`, for arrays of numpy or of JAX, in the log-probs' precision.

    Args:
      label: bool [...]: where there is a label; elsewhere all weights are 0.
      ids: [..., k], `no_id` where there is no entry.
      logprobs: float32 or float64 [..., k], natural log, temperature 1.
      exact_counts: integers [...].
      tail_logprobs: as `logprobs`, [...]: log of the mass outside the exact entries at
        `temperature`.
      temperature: where the tail's mass was captured.
      no_id: the encoding's.
      xp: numpy, or jax.numpy.

    Returns:
      Weights [..., k] of the log-probs' type, and which of the entries are exact, bool.
    """
    k = ids.shape[-1]
    label = label[..., None]
    tail = xp.where(label, tail_logprobs[..., None], -xp.inf)
    slot = xp.arange(k, dtype=xp.int32).reshape((1,) * (ids.ndim - 1) + (k,))
    exact = label & (slot < exact_counts[..., None].astype(xp.int32))
    scaled = xp.where(exact, logprobs / temperature, -xp.inf)
    top = xp.maximum(scaled.max(axis=-1, keepdims=True), -1e30)
    unnormalised = xp.exp(scaled - top)
    total = unnormalised.sum(axis=-1, keepdims=True)
    head = -xp.expm1(tail) * unnormalised / xp.where(total > 0, total, 1)

    sampled = label & ~exact & (ids != ids.dtype.type(no_id))
    drawn = sampled.sum(axis=-1, keepdims=True).astype(head.dtype)
    threshold = xp.exp(tail) / xp.maximum(drawn, 1)
    return xp.where(exact, head, xp.where(sampled, threshold, 0.0)), exact
