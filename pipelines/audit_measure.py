"""How far targets scored again are from those in a cache. Pure functions of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Integer

from cache.format import Encoding
from cache.provenance import Recomputed

# How far log-probs (natural) of one teacher may lie apart when they are computed again: on other
# micro-batches, devices or releases. Largest and mean; derived in the README of benchmarks/. What
# storing explains is allowed on top: see `compare_log_probs`. `audit --help` states them too.
BOUNDS = {"float32": (1e-3, 1e-4), "bfloat16": (2.0, 5e-2)}
# Half a step of float16, relative: the coarsest that tails are rounded to.
_FLOAT16 = 2.0**-11
# More than any chain of roundings is off by, relative.
_MOST_ERROR = 0.5
# Least share of sampled entries that are drawn again, where the draws can be compared at all.
LEAST_DRAWS = {"float32": 0.99, "bfloat16": 0.5}


@dataclass(frozen=True)
class Difference:
    """Absolute differences of one quantity, over the positions where both sides have it.

    Attributes:
      name: what is compared.
      count: values compared.
      largest, mean: nats; beyond what rounding in storage explains, where it is rounded.
    """

    name: str
    count: int
    largest: float
    mean: float


@dataclass(frozen=True)
class Ids:
    """Whether the same ids are there.

    Attributes:
      name: which entries are compared.
      count: entries of the cache that were compared.
      same: those that are there again.
      unexplained: those that are not, although no log-prob is close enough for a tie.
    """

    name: str
    count: int
    same: int
    unexplained: int = 0

    @property
    def share(self) -> float:
        """Of entries that are there again; 1 where there are none."""
        return self.same / self.count if self.count else 1.0


def compare_log_probs(
    stored: Mapping[str, np.ndarray],
    fresh: Mapping[str, np.ndarray],
    encoding: Encoding,
    relative_error: float,
    recomputed: Recomputed,
) -> list[Difference]:
    """Differences in log-probs, the mass of the tail, and entropy.

    What storing rounded is allowed for: of log-probs of entries r |log p|; of entropy
    `Encoding.tail_error`, half a step of its type; of the tail's log-mass the same, and in a
    derived cache what `tail_error` says.

    Args:
      stored: arrays of a cache, [row, position, ...].
      fresh: `targets.Targets` of the same rows as numpy arrays, by name; float32, not rounded.
      encoding: the cache's.
      relative_error: r, `Manifest.relative_error`.
      recomputed: `provenance.recomputed`; nothing was in a cache that was captured as it is.

    Returns:
      "label log-prob" (stored as float32), "entry log-prob" over exact entries that both have,
      "tail log-mass" per temperature, "entropy".
    """
    label = stored["label_mask"] == 1
    before, again = (side["label_logprobs"].astype(np.float64) for side in (stored, fresh))
    found = [_summary("label log-prob", before, again, label, 0.0)]
    there, place = _places(stored, fresh, encoding)
    again = np.take_along_axis(fresh["logprobs"].astype(np.float64), place, axis=-1)
    before = stored["target_logprobs"].astype(np.float64)
    allowed = relative_error * np.abs(again)
    found.append(_summary("entry log-prob", before, again, there, allowed))
    same_head = label & (stored["exact_counts"] == fresh["exact_counts"])
    for index, temperature in enumerate(encoding.temperatures):
        before = stored["tail_logprobs"][..., index].astype(np.float64)
        again = np.minimum(fresh["tail_logprobs"][..., index].astype(np.float64), 0)
        # No mass at all on both sides is equal; a mass of nothing is compared as one of e^-20.
        before, again = np.maximum(before, -20.0), np.maximum(again, -20.0)
        name = f"tail log-mass at temperature {temperature:g}"
        allowed = encoding.tail_error * np.abs(again)
        if recomputed.times:
            logprobs, counts = fresh["logprobs"].astype(np.float64), fresh["exact_counts"]
            allowed = allowed + tail_error(logprobs, counts, again, temperature, recomputed)
        found.append(_summary(name, before, again, same_head, allowed))
    again = fresh["entropy"].astype(np.float64)
    before = stored["entropy"].astype(np.float64)
    found.append(_summary("entropy", before, again, label, encoding.tail_error * np.abs(again)))
    return found


def tail_error(
    logprobs: Float64[np.ndarray, "*positions k"],
    exact_counts: Integer[np.ndarray, " *positions"],
    tail: Float64[np.ndarray, " *positions"],
    temperature: float,
    recomputed: Recomputed,
) -> Float64[np.ndarray, " *positions"]:
    """How far a recomputed log-mass of the tail may be off before it is rounded itself, nats.

    Where entries D are dropped and K kept, `derivation.tail_beyond` gives
    1 - e^t' = (1 - e^t) / (1 + S_D / S_K), S being sums of e^(log p_i / T): of a stored t and of
    stored log-probs, off by at most r |log p_i| each. So

    - a relative error of t, at most half a step of float16, becomes no greater one of t', since
      |t| e^t / (1 - e^t) grows with t: |t'| 2^-11 for each time.
    - S_K is off by a factor of at most e^A = Σ_K s_i e^(r |log p_i| / T), s_i = p_i^(1/T) / S_K.
      Of S_D only the mass W is known, from above: n entries, none likelier than the last of K, and
      inside of e^t'. Its sum is largest where all are equally likely, each with
      |log p_i| / T = L = log n - log W - z, where z = log S_K - log(1 - e^t'); and
      W (e^(A + r L) - 1) then grows with W as long as L > -log(1 - r) / r. The odds S_D / S_K are
      off by a factor of at most e^c, c = A + r max(L, -log(1 - r) / r), and
      |Δt'| <= log(1 + (W / e^t') (e^c - 1)).
    - Drops one after the other from the same log-probs are one drop of all. Each further rounding
      between them puts the odds of what is dropped later twice more between t and t', to first
      order in c: with R roundings, 2 R - 1 times the last line.

    Args:
      logprobs: true ones, natural log, of the kept entries, descending; anything behind them.
      exact_counts: how many are kept.
      tail: t', the true log of the mass outside them at the temperature, <= 0.
      temperature: T.
      recomputed: n + K and r, and how often.
    """
    kept = np.arange(logprobs.shape[-1]) < exact_counts[..., None]
    size = np.where(kept, -logprobs / temperature, 0.0)
    r = min(recomputed.relative_error, _MOST_ERROR)
    with np.errstate(divide="ignore"):
        weights = np.where(kept, -size, -np.inf)
        total = np.logaddexp.reduce(weights, axis=-1)
        a = np.logaddexp.reduce(weights + r * size, axis=-1) - total
        z = total - np.log(-np.expm1(np.minimum(tail, -1e-12)))
        dropped = np.log(np.maximum(recomputed.k - exact_counts, 0))
    last = np.max(size, axis=-1)
    # Logs of W / e^t' and of e^t' / n.
    share = np.minimum(dropped - last - z - tail, 0.0)
    least = np.maximum(last, dropped - z - tail)
    c = a + r * np.maximum(least, -np.log1p(-r) / r)
    error = np.log1p(np.exp(share) * np.expm1(np.minimum(c, 50.0)))
    return recomputed.times * _FLOAT16 * np.abs(tail) + (2 * recomputed.roundings - 1) * error


def compare_ids(
    stored: Mapping[str, np.ndarray],
    fresh: Mapping[str, np.ndarray],
    encoding: Encoding,
    relative_error: float,
    bound: float,
    draws: bool,
) -> list[Ids]:
    """Whether the same tokens are entries.

    Args:
      stored, fresh, encoding, relative_error: see `compare_log_probs`.
      bound: how far log-probs may be apart: exact entries closer than that may change places
        with the tokens that come after them.
      draws: whether the sampled entries are draws of the same random numbers.
    """
    exact = _exact(stored["exact_counts"], stored["label_mask"], encoding.k)
    there, _ = _places(stored, fresh, encoding)
    last = np.maximum(fresh["exact_counts"] - 1, 0)[..., None]
    least = np.take_along_axis(fresh["logprobs"].astype(np.float64), last, axis=-1)
    logprobs = np.where(exact, stored["target_logprobs"].astype(np.float64), -np.inf)
    slack = bound + relative_error * np.abs(np.where(exact, logprobs, 0))
    # A cache may hold fewer exact entries than were scored again, never one that is likelier
    # than all of those.
    lost = exact & ~there & (logprobs > least + slack)
    found = [Ids("exact entries", int(exact.sum()), int((exact & there).sum()), int(lost.sum()))]
    if encoding.tail == "sampled" and draws:
        ids = stored["target_ids"].astype(np.int64)
        label = (stored["label_mask"] == 1)[..., None]
        sampled = label & ~exact & (ids != encoding.no_id)
        fresh_sampled = np.where(
            _exact(fresh["exact_counts"], stored["label_mask"], encoding.k), -2, fresh["ids"]
        )
        hit = (ids[..., :, None] == fresh_sampled[..., None, :]).any(axis=-1) & sampled
        found.append(Ids("sampled entries", int(sampled.sum()), int(hit.sum())))
    return found


def _exact(counts: np.ndarray, label_mask: np.ndarray, k: int) -> Bool[np.ndarray, "..."]:
    slots = np.arange(k)
    return (slots < counts[..., None].astype(np.int64)) & (label_mask == 1)[..., None]


def _places(
    stored: Mapping[str, np.ndarray], fresh: Mapping[str, np.ndarray], encoding: Encoding
) -> tuple[np.ndarray, np.ndarray]:
    """Which stored exact entries are exact again, and in which slot; both [row, position, k]."""
    exact = _exact(stored["exact_counts"], stored["label_mask"], encoding.k)
    again = _exact(fresh["exact_counts"], stored["label_mask"], encoding.k)
    ids = np.where(again, fresh["ids"].astype(np.int64), -1)
    equal = stored["target_ids"].astype(np.int64)[..., :, None] == ids[..., None, :]
    return equal.any(axis=-1) & exact, equal.argmax(axis=-1)


def _summary(
    name: str,
    before: Float64[np.ndarray, "..."],
    again: Float64[np.ndarray, "..."],
    where: Bool[np.ndarray, "..."],
    allowed: Float64[np.ndarray, "..."] | float,
) -> Difference:
    """The differences beyond what is allowed; equal infinities do not differ."""
    with np.errstate(invalid="ignore"):
        apart = np.where(before == again, 0.0, np.maximum(np.abs(before - again) - allowed, 0.0))
    values = apart[where]
    if not values.size:
        return Difference(name, 0, 0.0, 0.0)
    # A number on one side and none on the other is as far apart as can be.
    values = np.where(np.isnan(values), np.inf, values)
    return Difference(name, int(values.size), float(values.max()), float(values.mean()))
