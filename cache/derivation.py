"""Other targets from stored ones, without the teacher: fewer entries, coarser rounding.

Pure functions of arrays, computed in float64. What a cache holds of a distribution is its
entries' weights, which sum to 1 together with the mass outside; fewer entries are computed
from these weights, so that nothing but the rounding of what is stored comes between the result
and a direct capture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64, Integer, UInt64

from cache.consistency import exact_mass
from cache.encoding import LEAST_FLOAT16, encode_logprobs, encode_shard
from cache.errors import CacheError
from cache.format import Encoding

# Lengths of intervals are whole numbers of 2^-40: their sums are exact.
_UNIT_BITS = 40


@dataclass(frozen=True)
class Recipe:
    """How stored targets become others.

    Attributes:
      source, wanted: the encodings before and after; of the same length and vocabulary.
      exact: with a sampled tail, the least number of exact entries.
      source_error, error: `Manifest.relative_error` before and after.
      key: of the random numbers (`draw_key`).
    """

    source: Encoding
    wanted: Encoding
    exact: int
    source_error: float
    error: float
    key: int

    @property
    def keeps_targets(self) -> bool:
        """Whether stored targets stay as they are, byte for byte."""
        before, after = self.source, self.wanted
        return (before.k, before.tail, before.temperatures, before.logprobs) == (
            after.k,
            after.tail,
            after.temperatures,
            after.logprobs,
        ) and (before.logprobs != "rounded" or before.mantissa_bits == after.mantissa_bits)

    @property
    def draws(self) -> bool:
        """Whether entries of a sampled tail are drawn from again."""
        return self.wanted.tail == "sampled" and self.wanted.k < self.source.k


def derive_rows(
    arrays: Mapping[str, np.ndarray], rows: Int64[np.ndarray, " row"], recipe: Recipe
) -> dict[str, np.ndarray]:
    """Stored arrays of rows of the wanted encoding, from those of the source's.

    Args:
      arrays: every array of the format but the seals, [row, position, ...].
      rows: numbers of the rows in the derived cache, for the random numbers.
      recipe: what to do.
    """
    if recipe.keeps_targets:
        return dict(arrays)
    source, wanted = recipe.source, recipe.wanted
    label = arrays["label_mask"] == 1
    count = np.where(label, arrays["exact_counts"].astype(np.int64), 0)[label]
    ids = arrays["target_ids"][label].astype(np.int64)
    ids[ids == source.no_id] = -1
    logprobs = arrays["target_logprobs"][label].astype(np.float64)
    columns = [source.temperatures.index(value) for value in wanted.temperatures]
    tails = arrays["tail_logprobs"][label][:, columns].astype(np.float64)

    _check_exact(count, ids, wanted, recipe.exact)
    heads = np.minimum(count, wanted.k)
    slots = np.broadcast_to(np.arange(wanted.k), (len(ids), wanted.k))
    if recipe.draws:
        weights = log_weights(logprobs, ids >= 0, count, tails[:, 0], wanted.temperatures[0])
        bits = position_bits(recipe.key, rows, source.length)[label]
        entries = (ids >= 0).sum(axis=-1)
        heads, slots = fewer_entries(weights, count, entries, wanted.k, recipe.exact, bits)
    kept = np.arange(wanted.k) < heads[:, None]
    stays = (slots >= 0) & (kept | (wanted.tail == "sampled"))
    taken = np.where(stays, np.take_along_axis(ids, np.maximum(slots, 0), axis=-1), -1)
    rounded = np.where(kept, logprobs[:, : wanted.k], np.nan).astype(np.float32)
    stored = encode_logprobs(rounded, wanted).astype(np.float64)
    for column, temperature in enumerate(wanted.temperatures):
        tail = tail_beyond(logprobs, count, tails[:, column], heads, temperature)
        if temperature == 1.0:
            tail = within(tail, *exact_mass(logprobs[:, : wanted.k], kept, recipe.source_error))
            tail = within(tail, *exact_mass(stored, kept, recipe.error))
            tail = np.where(heads < count, tail, tails[:, column])
        tails[:, column] = tail
    targets = {
        "ids": _spread(label, _by_id(taken, heads), -1),
        "logprobs": _spread(label, rounded, np.nan),
        "exact_counts": _spread(label, heads, 0),
        "tail_logprobs": _spread(label, tails.astype(np.float32), np.nan),
        "label_logprobs": arrays["label_logprobs"],
        "entropy": arrays["entropy"].astype(np.float32),
    }
    return encode_shard(arrays, targets, wanted)


def _check_exact(count: np.ndarray, ids: np.ndarray, wanted: Encoding, exact: int) -> None:
    """Checks that every position has the exact entries that it is sure to have."""
    least = wanted.k if wanted.tail == "none" else exact
    short = (count < least) & (count < (ids >= 0).sum(axis=-1))
    if short.any():
        raise CacheError(
            f"a position has {count[short][0]} exact entries and others, yet every position is "
            f"sure to have {least} exact ones by the manifest. Check the source with `stillroom "
            "verify --full`."
        )


def _spread(label: np.ndarray, values: np.ndarray, fill: Any) -> np.ndarray:
    """[row, position, ...] from values at the positions with a label."""
    full = np.full((*label.shape, *values.shape[1:]), fill, values.dtype)
    full[label] = values
    return full


def log_weights(
    logprobs: Float64[np.ndarray, "position k"],
    used: Bool[np.ndarray, "position k"],
    exact_counts: Int64[np.ndarray, " position"],
    tail: Float64[np.ndarray, " position"],
    temperature: float,
) -> Float64[np.ndarray, "position k"]:
    """Logs of `encoding.entry_weights`, so that no weight is too small; -inf in empty slots.

    Args:
      logprobs: natural log, temperature 1; anything where an entry is not exact.
      used: slots that hold an entry.
      exact_counts: how many of the entries are exact.
      tail: log of the mass outside the exact entries at `temperature`, <= 0.
      temperature: where the tail was captured.
    """
    exact = np.arange(logprobs.shape[-1]) < exact_counts[:, None]
    sampled = used & ~exact
    drawn = np.maximum(sampled.sum(axis=-1), 1)
    # Mass of nothing behind sampled entries would be no number.
    threshold = np.maximum(tail, LEAST_FLOAT16) - np.log(drawn)
    head = _head(logprobs, exact, tail, temperature)
    return np.where(exact, head, np.where(sampled, threshold[:, None], -np.inf))


def _head(
    logprobs: np.ndarray, exact: np.ndarray, tail: np.ndarray, temperature: float
) -> np.ndarray:
    scaled = np.where(exact, logprobs, -np.inf) / temperature
    total = _log_sum(scaled)
    with np.errstate(divide="ignore"):
        inside = np.log(-np.expm1(tail))
    return (inside - np.where(np.isfinite(total), total, 0))[:, None] + scaled


def _log_sum(values: np.ndarray) -> np.ndarray:
    """log of the sum of exp over the last axis; -inf for a sum of nothing."""
    top = np.max(values, axis=-1, initial=-np.inf)
    finite = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return finite + np.log(np.exp(values - finite[..., None]).sum(axis=-1))


def tail_beyond(
    logprobs: Float64[np.ndarray, "position k"],
    exact_counts: Int64[np.ndarray, " position"],
    tail: Float64[np.ndarray, " position"],
    kept: Int64[np.ndarray, " position"],
    temperature: float,
) -> Float64[np.ndarray, " position"]:
    """log of the mass outside the first entries, where fewer of the exact ones are kept.

    `e^tail' = e^tail + Σ w_i` over the entries that are dropped, w as in
    `encoding.entry_weights`: all weights and the tail sum to 1. Where none is dropped the tail
    stays as it is.

    Args: see `log_weights`; `kept` is how many entries stay, at most `exact_counts`.
    """
    slot = np.arange(logprobs.shape[-1])
    exact = slot < exact_counts[:, None]
    head = _head(logprobs, exact, tail, temperature)
    dropped = _log_sum(np.where(exact & (slot >= kept[:, None]), head, -np.inf))
    return np.where(kept < exact_counts, np.minimum(np.logaddexp(tail, dropped), 0.0), tail)


def within(
    tail: Float64[np.ndarray, " position"],
    mass: Float64[np.ndarray, " position"],
    bound: Float64[np.ndarray, " position"],
) -> Float64[np.ndarray, " position"]:
    """Tails at temperature 1 brought into the range that the stored entries leave for them.

    The true mass outside is within `bound` of 1 - `mass` (`consistency.exact_mass`), so that
    this never makes an estimate worse.
    """
    least, most = 1 - mass - bound, 1 - mass + bound
    floor = np.log(np.where(least > 0, least, 1.0))
    tail = np.where(least > 0, np.maximum(tail, floor), tail)
    ceiling = np.log(np.where(most > 0, np.minimum(most, 1.0), 1.0))
    return np.minimum(tail, ceiling)


def fewer_entries(
    weights: Float64[np.ndarray, "position k"],
    exact_counts: Int64[np.ndarray, " position"],
    entries: Int64[np.ndarray, " position"],
    k: int,
    exact: int,
    bits: UInt64[np.ndarray, " position"],
) -> tuple[Int64[np.ndarray, " position"], Int64[np.ndarray, "position wanted"]]:
    """Samples k of a position's entries such that the weight of each is kept on average.

    The first h entries stay exact, h being the smallest count, not below `exact`, for
    which no other entry weighs more than τ = (weight of all others) / (k - h). Of the others
    k - h are drawn by systematic sampling, each with probability weight / τ, and stand for a
    weight of τ. Entry by entry the expected weight is what it was; where the weights are an
    unbiased estimate themselves, so are the new ones. This is the scheme of the capture
    (design.md, section 3) applied to its own result.

    Args:
      weights: logs of the weights, exact entries first and descending; -inf in empty slots.
      exact_counts: exact entries.
      entries: slots that are not empty. Where there are at most k, all entries stay.
      k: entries to keep, at least 2.
      exact: least number of exact entries of the result, below k.
      bits: 64 random bits for each position.

    Returns:
      Exact entries of the result, and the slots of all of its entries, ascending; -1: none.
    """
    slot = np.arange(weights.shape[1])
    beyond = np.logaddexp.accumulate(weights[:, ::-1], axis=1)[:, ::-1]
    largest = np.maximum.accumulate(weights[:, ::-1], axis=1)[:, ::-1]
    h = np.arange(k)
    enough = largest[:, :k] <= beyond[:, :k] - np.log(k - h)
    last = np.minimum(exact_counts, k - 1)[:, None]
    heads = np.argmax((h >= exact) & (enough | (h >= last)), axis=1)
    few = entries <= k
    heads = np.where(few, exact_counts, heads)

    draws = np.maximum(k - heads, 0)
    lengths = _lengths(weights, beyond, heads, draws)
    ends = np.cumsum(np.where(few[:, None], 0, lengths), axis=1)
    start = (bits >> np.uint64(64 - _UNIT_BITS)).astype(np.int64)[:, None]
    # How many of the points start, start + 1, … lie before each end.
    points = (ends - start + (2**_UNIT_BITS - 1)) >> _UNIT_BITS
    drawn = np.diff(points, axis=1, prepend=0) > 0
    chosen = (slot < heads[:, None]) | drawn | (few[:, None] & (slot < entries[:, None]))
    order = np.argsort(~chosen, axis=1, kind="stable")[:, :k]
    return heads, np.where(np.take_along_axis(chosen, order, axis=1), order, -1)


def _lengths(
    weights: np.ndarray, beyond: np.ndarray, heads: np.ndarray, draws: np.ndarray
) -> np.ndarray:
    """int64 [position, k]: intervals of the entries behind the heads; they sum to the draws.

    None is longer than 1, so that no entry is drawn twice. What rounding leaves over goes to
    the entry where it matters least: more to the shortest, less from the longest.
    """
    unit = 2**_UNIT_BITS
    rest = np.arange(weights.shape[1]) >= heads[:, None]
    mass = np.take_along_axis(beyond, np.minimum(heads, weights.shape[1] - 1)[:, None], axis=1)
    mass = np.where(np.isfinite(mass), mass, 0.0)
    real = rest & (weights > -np.inf)
    share = np.exp(np.where(real, weights - mass, -np.inf)) * draws[:, None]
    lengths = np.minimum(np.rint(share * unit), unit).astype(np.int64)
    over = draws * unit - lengths.sum(axis=1)
    shortest = np.where(real, lengths, 2 * unit).argmin(axis=1)
    place = np.where(over > 0, shortest, lengths.argmax(axis=1))
    lengths[np.arange(len(lengths)), place] += over
    return lengths


def _by_id(
    ids: Int64[np.ndarray, "position k"], heads: Int64[np.ndarray, " position"]
) -> Int64[np.ndarray, "position k"]:
    """Entries behind the heads by ascending id, empty ones (-1) last."""
    slot = np.arange(ids.shape[1])
    behind = np.where(ids < 0, np.iinfo(np.int64).max, ids)
    key = np.where(slot < heads[:, None], slot - ids.shape[1], behind)
    return np.take_along_axis(ids, np.argsort(key, axis=1, kind="stable"), axis=1)


def draw_key(seed: int, sources: Sequence[str]) -> int:
    """The key of `position_bits` for a seed and the digests of the sources.

    The sources are part of it, so that caches derived from derived ones with one seed draw
    independently each time.
    """
    text = "/".join(["stillroom derive", str(seed), *sources])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def position_bits(
    key: int, rows: Integer[np.ndarray, " row"], length: int
) -> UInt64[np.ndarray, "row position"]:
    """64 random bits for each position of some rows, a function of (key, row, position) only.

    The raw bits of Philox4x64 with the row in the second word of its counter.
    """
    bits = [np.random.Philox(key=key, counter=row << 64) for row in rows.tolist()]
    empty = np.empty((0, length), np.uint64)
    return np.stack([each.random_raw(length) for each in bits]) if bits else empty
