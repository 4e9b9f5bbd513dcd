"""What a student learns of its teacher: the choice, whether a cache can serve it, its formulas.

A position's loss is `α · CE + (1 − α) · T² · KD` (Hinton, Vinyals, Dean, "Distilling the Knowledge
in a Neural Network", 2015), with CE at temperature 1 and KD at temperature T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from cache.encoding import entry_weights
from cache.format import Encoding
from student.errors import ObjectiveError
from student.options import Divergence

Kind = Literal["labels", "sampled", "bucket", "renormalise"]

# Where a teacher's probability of 0 meets a divergence that divides by it, it counts as
# float32's least normal number, 2^-126: the loss is large and finite instead of infinite.
LEAST_LOG = -126 * math.log(2.0)
# A log-prob whose exp is 0 and that is still finite, so that 0 times it is 0 and not NaN.
_ZERO_LOG = -1e30
# Relative difference of two float32 probabilities that is rounding alone: without it, the total
# variation of a student that equals its teacher has no value but a gradient of random signs.
_ROUNDING = 4e-6


@dataclass(frozen=True)
class Objective:
    """What is trained on; hashable, so that it can be static under jit.

    Attributes:
      kind: "labels" (cross-entropy only), "sampled", "bucket" or "renormalise".
      divergence, beta: of bucket and renormalise.
      temperature: T of both sides.
      no_id: the cache's id of an empty entry.
    """

    kind: Kind
    divergence: Divergence = "forward"
    beta: float = 0.5
    temperature: float = 1.0
    no_id: int = -1

    def __post_init__(self) -> None:
        if self.kind == "sampled" and self.divergence != "forward":
            raise ObjectiveError(
                f"--objective sampled gives --divergence forward only, not {self.divergence}: "
                "the others need the probability of every sampled token, which is not stored. "
                "Use --objective bucket, which trains on the exact entries and the rest as one."
            )
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ObjectiveError(f"--temperature should be above 0, found {self.temperature}.")
        if not 0 < self.beta < 1:
            raise ObjectiveError(
                f"--beta should be above 0 and below 1, found {self.beta}: at the ends the "
                "mixed divergence is 0, not a KL. Use --divergence forward or reverse."
            )


def choose(
    encoding: Encoding,
    objective: str = "auto",
    divergence: Divergence = "forward",
    beta: float = 0.5,
    temperature: float | None = None,
) -> Objective:
    """The objective that options ask for, if a cache of this encoding can serve it.

    Raises:
      ObjectiveError: it cannot; says what it can.
    """
    if objective == "auto":
        objective = "sampled" if encoding.tail == "sampled" else "bucket"
    if objective == "sampled" and encoding.tail != "sampled":
        raise ObjectiveError(
            "--objective sampled needs a cache with a sampled tail, and this one holds the "
            f"{encoding.k} most likely tokens alone. Use --objective bucket, or capture with "
            "--tail sampled."
        )
    chosen = encoding.temperatures[0] if temperature is None else float(temperature)
    if objective != "renormalise" and chosen not in encoding.temperatures:
        captured = ", ".join(f"{value:g}" for value in encoding.temperatures)
        raise ObjectiveError(
            f"--temperature {chosen:g} was not captured, and --objective {objective} needs the "
            f"tail's mass there: the cache has it at temperature {captured}. Use one of these, or "
            f"capture again with --temperatures {chosen:g}."
        )
    kinds: dict[str, Kind] = {
        "sampled": "sampled",
        "bucket": "bucket",
        "renormalise": "renormalise",
    }
    if objective not in kinds:
        raise ObjectiveError(
            f"there is no objective {objective!r}; there are auto, {', '.join(kinds)}."
        )
    return Objective(kinds[objective], divergence, float(beta), chosen, encoding.no_id)


class Teacher(NamedTuple):
    """The teacher's side of some positions, ready for the formulas.

    Attributes:
      ids: int32 [n, k]; 0 where there is no entry.
      entry: bool [n, k]: whether there is one.
      exact: bool [n, k]: whether it is an exact one.
      weights: float32 [n, k], at the objective's temperature; 0 where there is no entry.
      logprobs: float32 [n, k], at temperature 1, of exact entries, at least -1e30; elsewhere 0.
      tail: float32 [n]: log of the mass outside the exact entries, at least -1e30.
      own: float32 [n, k]: log of the weights where all entries are exact, so that the
        teacher's entropy follows from them; elsewhere 0.
      entropy: float32 [n]: of the teacher's distribution where it does not follow from `own`;
        0 where it is not known.
    """

    ids: Int32[Array, "n k"]
    entry: Bool[Array, "n k"]
    exact: Bool[Array, "n k"]
    weights: Float32[Array, "n k"]
    logprobs: Float32[Array, "n k"]
    tail: Float32[Array, " n"]
    own: Float32[Array, "n k"]
    entropy: Float32[Array, " n"]


def teacher_side(targets: Any, label_mask: Bool[Array, " n"], objective: Objective) -> Teacher:
    """Stored targets (`batches.Targets` with leading axis [n]) as the formulas take them.

    Whatever stands at positions without a label and in empty entries is ignored.
    """
    temperature = objective.temperature
    tail = targets.tail_logprobs
    weights, exact = entry_weights(
        label_mask,
        targets.ids,
        targets.logprobs.astype(jnp.float32),
        targets.exact_counts,
        tail,
        temperature,
        objective.no_id,
        xp=jnp,
    )
    entry = weights > 0
    entry |= exact
    whole = ~jnp.any(entry & ~exact, axis=-1)
    own = jnp.where(whole[:, None] & (weights > 0), jnp.log(_positive(weights)), 0.0)
    known = targets.entropy if temperature == 1.0 else jnp.zeros_like(targets.entropy)
    return Teacher(
        ids=jnp.where(entry, targets.ids.astype(jnp.int32), 0),
        entry=entry,
        exact=exact,
        weights=weights,
        logprobs=jnp.maximum(
            jnp.where(exact, targets.logprobs.astype(jnp.float32), 0.0), _ZERO_LOG
        ),
        tail=jnp.maximum(jnp.where(label_mask, tail, _ZERO_LOG), _ZERO_LOG),
        own=own,
        entropy=jnp.where(label_mask & ~whole, known, 0.0),
    )


def _positive(x: Array) -> Array:
    return jnp.where(x > 0, x, 1.0)


def divergence(
    objective: Objective,
    teacher: Teacher,
    scores: Float32[Array, "n k"],
    total: Float32[Array, " n"],
    rest: Float32[Array, " n"],
) -> Float32[Array, " n"]:
    """KD of each position, nats, without the factor T².

    With z the student's logits, finite in every argument, and so is its gradient.

    Args:
      scores: z / T at the teacher's entries.
      total: logsumexp of z / T over the vocabulary.
      rest: logsumexp of z / T over the tokens that are no exact entry; used by bucket alone.

    Formulas, P the teacher and Q the student over the same classes:
      forward KL(P, Q), reverse KL(Q, P), total variation sum |P - Q| / 2, and the generalised
      Jensen-Shannon divergence β KL(P, M) + (1 - β) KL(Q, M) with M = β P + (1 - β) Q (Agarwal
      et al., "On-Policy Distillation of Language Models", 2024).
      sampled: sum_i w_i (total - scores_i) minus the teacher's entropy, which is unbiased
      for KL(P, Q) over the whole vocabulary, since E[w_i] = p_i. Where the entropy is not known
      (a sampled tail at another temperature than 1) it is not subtracted, and the value is the
      cross-entropy.
    """
    if objective.kind == "sampled":
        terms = teacher.weights * (total[:, None] - scores + teacher.own)
        return jnp.sum(terms, axis=-1) - teacher.entropy
    exact = teacher.exact
    if objective.kind == "renormalise":
        theirs = _log_softmax(teacher.logprobs / objective.temperature, exact)
        ours = _log_softmax(scores, exact)
    else:
        theirs = jnp.where(teacher.weights > 0, jnp.log(_positive(teacher.weights)), _ZERO_LOG)
        theirs = jnp.concatenate([theirs, teacher.tail[:, None]], axis=-1)
        ours = jnp.concatenate([scores, rest[:, None]], axis=-1) - total[:, None]
        exact = jnp.concatenate([exact, jnp.ones_like(exact[:, :1])], axis=-1)
    return _between(objective, theirs, ours, exact)


def _log_softmax(x: Float32[Array, "n k"], valid: Bool[Array, "n k"]) -> Float32[Array, "n k"]:
    """Over the valid entries; -1e30 elsewhere. Finite, also where nothing is valid."""
    return jax.nn.log_softmax(jnp.where(valid, x, _ZERO_LOG), axis=-1)


def _between(
    objective: Objective,
    theirs: Float32[Array, "n classes"],
    ours: Float32[Array, "n classes"],
    valid: Bool[Array, "n classes"],
) -> Float32[Array, " n"]:
    p, q = jnp.exp(theirs), jnp.exp(ours)
    if objective.divergence == "forward":
        terms = p * (theirs - ours)
    elif objective.divergence == "reverse":
        terms = q * (ours - jnp.maximum(theirs, LEAST_LOG))
    elif objective.divergence == "tv":
        apart = jnp.abs(p - q) > _ROUNDING * jnp.maximum(p, q)
        terms = jnp.where(apart, 0.5 * jnp.abs(p - q), 0.0)
    else:
        beta = objective.beta
        mixed = jnp.logaddexp(theirs + math.log(beta), ours + math.log(1 - beta))
        terms = beta * p * (theirs - mixed) + (1 - beta) * q * (ours - mixed)
    return jnp.sum(jnp.where(valid, terms, 0.0), axis=-1)
