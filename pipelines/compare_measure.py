"""How far a gradient from what a cache keeps is from that of the whole distribution.

Pure functions; no model, no files. With p the teacher's distribution at a position and q the
student's (temperature 1), the gradient of KL(p, q) with respect to the student's logits is q - p.
A cache gives another gradient g in its place. Whatever the objective, g is that of KL(r, q) for
`r = q - g`, the *reconstruction*, so the error of the gradient is p - r:

- sampled tail: r holds the entries' weights, which are random. bias = p - E[r], variance =
  E |r - E[r]|². E[r] is the stored weight at exact entries and p times (stored tail mass / tail
  mass) elsewhere; the variance is that of variance-optimal sampling, the sum over the tail of
  p (τ - p), times the square of the same ratio.
- exact entries and the rest as one class ("bucket"): the stored weights, and the rest of the
  mass spread as the student itself spreads it, q over the rest times tail mass / q's mass there.
  A student learns nothing about how the rest is spread, so this error depends on the student.
- exact entries alone ("renormalise"), both sides renormalised over them: r = q + (renormalised
  p) - (renormalised q) at the entries, q elsewhere.

At one position the error counts as bias² + variance. The gradient of a training step is a mean
over N labels; there the variance is divided by N, and so is the part of the bias that differs
from label to label, but not the mean bias: it is the same in every step and no number of labels
averages it out. So the squared error of a step's mean gradient is

    |mean bias|² + (mean of bias² - |mean bias|² + mean variance) / N.

N = 1 gives the first, N = ∞ what lasts. Parameters that act on all contexts alike (a bias of the
logits) see exactly this; those that tell contexts apart average over fewer labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int


@dataclass(frozen=True)
class Mass:
    """Sums over the tokens beyond the listed ones, of each position; float64 [n].

    Attributes:
      p, q: probabilities of the teacher and of the student.
      pp, pq, qq: their products.
      p_log_p, p_log_q: cross terms, nats.
    """

    p: Float[np.ndarray, " n"]
    q: Float[np.ndarray, " n"]
    pp: Float[np.ndarray, " n"]
    pq: Float[np.ndarray, " n"]
    qq: Float[np.ndarray, " n"]
    p_log_p: Float[np.ndarray, " n"]
    p_log_q: Float[np.ndarray, " n"]


@runtime_checkable
class Beyond(Protocol):
    """The tokens beyond the listed ones: dense arrays, or a model of them."""

    mass: Mass

    def distances(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Sum of |a p - b q| over the tokens, for a and b [n, m]: float64 [n, m]."""
        ...

    def totals(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Sum over positions of a p - b q, for a and b [n, m]: float64 [m, vocabulary]."""
        ...


@dataclass(frozen=True)
class Positions:
    """Teacher and student at n positions with a label.

    Attributes:
      ids: the teacher's most likely tokens, descending; int [n, m]. 0 in empty slots.
      p: their probabilities, float64; 0 in empty slots.
      log_q: of the student, float64, finite.
      beyond: all other tokens.
    """

    ids: Int[np.ndarray, "n m"]
    p: Float[np.ndarray, "n m"]
    log_q: Float[np.ndarray, "n m"]
    beyond: Beyond

    @property
    def q(self) -> Float[np.ndarray, "n m"]:
        return np.where(self.p > 0, np.exp(self.log_q), 0.0)


@dataclass(frozen=True)
class Reconstruction:
    """The distribution whose KL has the gradient that a cache gives; its mean if random.

    Attributes:
      listed: float64 [n, m], at `Positions.ids`. It may be negative for "renormalise".
      alpha, beta: float64 [n]: beyond them it is alpha p + beta q.
      variance: float64 [n]: expected squared distance of one draw from the mean.
      draw_distance: float64 [n]: expected total variation of one draw; NaN where not known.
      shown: what total variation and KL are of, if that is not this one.
    """

    listed: Float[np.ndarray, "n m"]
    alpha: Float[np.ndarray, " n"]
    beta: Float[np.ndarray, " n"]
    variance: Float[np.ndarray, " n"]
    draw_distance: Float[np.ndarray, " n"]
    shown: Reconstruction | None = None


@dataclass
class Tally:
    """Sums over labels of one setting's errors.

    Attributes:
      labels: how many.
      bias2, variance: of the gradient.
      total_variation, kl: of the mean reconstruction; KL(teacher, reconstruction), nats.
      draw_distance: total variation of one draw.
      error: float64 [vocabulary]: sum of the biases themselves.
    """

    labels: int = 0
    bias2: float = 0.0
    variance: float = 0.0
    total_variation: float = 0.0
    kl: float = 0.0
    draw_distance: float = 0.0
    error: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def add(self, other: Tally) -> None:
        """Adds the sums of other labels of the same setting."""
        if not self.error.size:
            self.error = np.zeros_like(other.error)
        self.error += other.error
        for item in fields(self):
            if item.name != "error":
                setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def lasting(self) -> float:
        """|mean bias|², estimated without bias from the labels at hand, at least 0.

        The squared length of a mean of n vectors is too large by (mean squared length less
        what is looked for) / n, as if labels were independent.
        """
        n = self.labels
        found = float(np.sum((self.error / n) ** 2))
        if n == 1:
            return found
        return max(0.0, (n * found - self.bias2 / n) / (n - 1))


def step_error(bias2: float, variance: float, lasting: float, batch: int) -> float:
    """Expected squared error of the mean gradient of `batch` labels; see the module."""
    lasting = min(lasting, bias2)
    return lasting + (bias2 - lasting + variance) / batch


def bucket(
    positions: Positions, weights: Float[np.ndarray, "n k"], tail: Float[np.ndarray, " n"]
) -> Reconstruction:
    """Exact entries, and the rest as one class.

    Args:
      weights: stored weights of the first k listed tokens, float64.
      tail: stored mass of all other tokens.
    """
    k = weights.shape[1]
    q = positions.q
    rest = positions.beyond.mass.q + q[:, k:].sum(axis=1)
    beta = np.divide(tail, rest, out=np.zeros_like(tail), where=rest > 0)
    listed = np.concatenate([weights, beta[:, None] * q[:, k:]], axis=1)
    zero = np.zeros_like(tail)
    return Reconstruction(listed, zero, beta, zero, np.full_like(tail, np.nan))


def renormalised(positions: Positions, logprobs: Float[np.ndarray, "n k"]) -> Reconstruction:
    """Exact entries alone, both sides renormalised over them.

    Args:
      logprobs: stored log-probs of the first k listed tokens, float64; -inf in empty slots.
    """
    k = logprobs.shape[1]
    present = positions.p[:, :k] > 0
    theirs = softmax(np.where(present, logprobs, -np.inf))
    ours = softmax(np.where(present, positions.log_q[:, :k], -np.inf))
    q = positions.q
    zero = np.zeros(len(q))
    unknown = np.full(len(q), np.nan)
    listed = np.concatenate([q[:, :k] + theirs - ours, q[:, k:]], axis=1)
    alone = np.concatenate([theirs, np.zeros_like(q[:, k:])], axis=1)
    shown = Reconstruction(alone, zero, zero, zero, unknown)
    return Reconstruction(listed, zero, zero + 1, zero, unknown, shown)


def softmax(x: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n k"]:
    """Over the last axis; 0 everywhere where all is -inf."""
    top = np.maximum(x.max(axis=1, keepdims=True), -1e300)
    weight = np.exp(x - top)
    total = weight.sum(axis=1, keepdims=True)
    return np.divide(weight, total, out=np.zeros_like(weight), where=total > 0)


def sampled(
    positions: Positions,
    weights: Float[np.ndarray, "n k"],
    heads: Int[np.ndarray, " n"],
    drawn: Int[np.ndarray, " n"],
    tail: Float[np.ndarray, " n"],
) -> Reconstruction:
    """Exact entries and a variance-optimal sample of the rest.

    Args:
      weights: stored weights of the first k listed tokens, float64; those of the first
        `heads` count.
      heads: number of exact entries.
      drawn: number of sampled entries.
      tail: stored mass of all tokens that are not exact.
    """
    p, mass = positions.p, positions.beyond.mass
    in_tail = np.arange(p.shape[1])[None, :] >= heads[:, None]
    rest = mass.p + np.where(in_tail, p, 0.0).sum(axis=1)
    squares = mass.pp + np.where(in_tail, p * p, 0.0).sum(axis=1)
    alpha = np.divide(tail, rest, out=np.ones_like(tail), where=rest > 0)
    threshold = rest / np.maximum(drawn, 1)
    variance = alpha**2 * np.maximum(rest * threshold - squares, 0.0)
    padded = np.zeros_like(p)
    padded[:, : weights.shape[1]] = weights
    listed = np.where(in_tail, alpha[:, None] * p, padded)
    # A token is drawn with probability p / τ and then weighs alpha τ, which is at least p.
    missed = np.divide(squares, threshold, out=np.zeros_like(tail), where=threshold > 0)
    off = 0.5 * np.abs(np.where(in_tail, 0.0, p - listed)).sum(axis=1)
    draw_distance = off + 0.5 * (rest * (1 + alpha) - 2 * missed)
    return Reconstruction(listed, alpha, np.zeros_like(tail), variance, draw_distance)


def measure(
    positions: Positions, reconstructions: Sequence[Reconstruction], vocabulary: int
) -> list[Tally]:
    """The errors of several settings at the same positions, summed over these."""
    tails: dict[bytes, int] = {}
    columns: list[tuple[np.ndarray, np.ndarray]] = []

    def column(item: Reconstruction) -> int:
        key = item.alpha.tobytes() + item.beta.tobytes()
        if key not in tails:
            tails[key] = len(columns)
            columns.append((1.0 - item.alpha, item.beta))
        return tails[key]

    places = [column(item) for item in reconstructions]
    shown = [item.shown or item for item in reconstructions]
    shown_places = [column(item) for item in shown]
    a = np.stack([pair[0] for pair in columns], axis=1)
    b = np.stack([pair[1] for pair in columns], axis=1)
    distances = positions.beyond.distances(a, b)
    totals = positions.beyond.totals(a, b)
    return [
        _tally(positions, item, look, distances[:, beside], totals[place], vocabulary)
        for item, look, place, beside in zip(
            reconstructions, shown, places, shown_places, strict=True
        )
    ]


def _tally(
    positions: Positions,
    item: Reconstruction,
    shown: Reconstruction,
    distance: np.ndarray,
    total: np.ndarray,
    vocabulary: int,
) -> Tally:
    p, mass = positions.p, positions.beyond.mass
    off = p - item.listed
    a, b = 1.0 - item.alpha, item.beta
    beyond = a * a * mass.pp - 2 * a * b * mass.pq + b * b * mass.qq
    error = total + np.bincount(positions.ids.ravel(), off.ravel(), minlength=vocabulary)
    return Tally(
        labels=len(p),
        bias2=float(np.sum(off * off) + np.sum(np.maximum(beyond, 0.0))),
        variance=float(np.sum(item.variance)),
        total_variation=0.5 * float(np.sum(np.abs(p - shown.listed)) + np.sum(distance)),
        kl=float(np.sum(_kl(positions, shown))),
        draw_distance=float(np.sum(item.draw_distance)),
        error=error,
    )


def _kl(positions: Positions, shown: Reconstruction) -> np.ndarray:
    """KL(teacher, reconstruction) of each position, nats, at least 0; infinite where the
    reconstruction gives no probability to what the teacher does."""
    p, mass = positions.p, positions.beyond.mass
    with np.errstate(divide="ignore"):
        listed = np.where(p > 0, np.log(np.where(p > 0, p, 1.0)) - np.log(shown.listed), 0.0)
        alpha, beta = np.log(shown.alpha), np.log(shown.beta)
    found = (p * listed).sum(axis=1)
    # Beyond the listed tokens the reconstruction is alpha p or beta q, never a sum of both.
    by_p = mass.p * np.where(shown.alpha > 0, -alpha, 0.0)
    by_q = mass.p_log_p - mass.p_log_q - mass.p * np.where(shown.beta > 0, beta, 0.0)
    rest = np.where(shown.alpha > 0, by_p, np.where(shown.beta > 0, by_q, np.inf))
    return np.maximum(found + np.where(mass.p > 0, rest, 0.0), 0.0)
