"""How good a student is on held-out rows: one pure function of a batch, and sums over batches.

Everything is summed per row on the devices and over rows in float64 on the host, in the order of
the rows, so that neither batch size nor device count decides a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from cache.format import Encoding
from cache.statistics import perplexity
from student.batches import Batch, Targets
from student.errors import StudentError
from student.functions import Parameters, StudentFunctions
from student.losses import Positions, in_chunks, masked, position_losses
from student.objectives import Objective, choose
from student.step import (
    AXIS,
    LossSettings,
    cast,
    flat_positions,
    hidden_states,
    on_devices,
    place,
)

# Of the confidence, for the calibration error (Guo et al., "On Calibration of Modern Neural
# Networks", 2017, use 15).
BINS = 15

# Nats between cross-entropies that say nothing. The teacher's is of log-probs that were computed
# in other batches, on another device or in another precision: each label's may differ by more
# (benchmarks/README.md), their mean does not.
_EQUAL = 0.01


@dataclass(frozen=True)
class Evaluation:
    """Means over all labels of some rows.

    Attributes:
      rows, labels: how many.
      loss: α CE + (1 − α) T² KD, what training minimises.
      cross_entropy: of the labels, nats, temperature 1.
      perplexity: exp of that.
      kl: KL(teacher, student), nats, over what the cache holds.
      kl_kind: "estimate" (sampled tail: unbiased) or "bucket" (exact entries and the rest as one
        class: at most the true KL), and the temperature.
      kl_full: over the whole vocabulary at temperature 1; None unless a teacher was given.
      top1: share of labels at which student and teacher find the same token most likely.
      top5: share at which the teacher's most likely token is among the student's five.
      accuracy: share at which the student's most likely token is the label.
      ece: expected calibration error of the student's most likely token, 15 equal bins.
      teacher_cross_entropy, teacher_perplexity: of the teacher, from the cache.
    """

    rows: int
    labels: int
    loss: float
    cross_entropy: float
    perplexity: float
    kl: float
    kl_kind: str
    kl_full: float | None
    top1: float
    top5: float
    accuracy: float
    ece: float
    teacher_cross_entropy: float
    teacher_perplexity: float

    @property
    def beats_teacher(self) -> bool:
        """Whether the student predicts the labels better, beyond what rounding may do."""
        return self.teacher_cross_entropy - self.cross_entropy > _EQUAL

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class RowSums(NamedTuple):
    """Sums over each row's labels, float32 [rows]; `bins` [rows, 15, 3] holds the number of labels,
    the confidence and the hits of each bin."""

    labels: Array
    ce: Array
    kd: Array
    kl: Array
    kl_full: Array
    top1: Array
    top5: Array
    hits: Array
    bins: Array


def kl_objective(encoding: Encoding) -> tuple[Objective, str]:
    """How KL to the teacher is measured with a cache of this encoding, and its name."""
    one = 1.0 if 1.0 in encoding.temperatures else encoding.temperatures[0]
    if encoding.tail == "sampled" and one == 1.0:
        return choose(encoding, "sampled"), "estimate"
    return choose(encoding, "bucket", temperature=one), f"bucket, temperature {one:g}"


@dataclass(frozen=True)
class Measures:
    """What an evaluation measures.

    Attributes:
      training: the run's loss.
      kl: how KL to the teacher is measured.
      vocabulary: the cache's, for `kl_full`.
    """

    training: LossSettings
    kl: Objective
    vocabulary: int


def make_row_sums(
    functions: StudentFunctions,
    measures: Measures,
    devices: Sequence[Any],
    teacher: StudentFunctions | None = None,
) -> Callable[[Parameters, Any, Batch, Targets | None], RowSums]:
    """A pmapped function (parameters, the teacher's, batch, training targets) to `RowSums`.

    The batch is placed with one micro-batch, its targets at the KL's temperature; the training
    targets are those at the objective's, where that is another one. Results are
    [devices, rows, ...].
    """
    settings = measures.training
    same = settings.objective == measures.kl

    def of_chunk(parameters: Any, theirs: Any, part: Any) -> dict[str, Array]:
        hidden, other, positions, soft_targets = part
        head = {name: parameters[name] for name in functions.head}
        logits = functions.unembed(cast(head, settings.precision), hidden).astype(jnp.float32)
        logits = masked(logits, settings.legal)
        ce, kl = position_losses(logits, positions, measures.kl)
        kd = kl
        if not same:
            kd = position_losses(
                logits, positions._replace(targets=soft_targets), settings.objective
            )[1]
        found = {"ce": ce, "kd": kd, "kl": kl, **_ranks(logits, positions)}
        if teacher is None:
            return {**found, "kl_full": jnp.zeros_like(ce)}
        theirs_head = {name: theirs[name] for name in teacher.head}
        wanted = teacher.unembed(theirs_head, other).astype(jnp.float32)
        wanted = wanted[:, : measures.vocabulary]
        log_q = jax.nn.log_softmax(logits, axis=-1)[:, : measures.vocabulary]
        log_p = jax.nn.log_softmax(
            masked(wanted, None if settings.legal is None else settings.legal[: wanted.shape[1]]),
            axis=-1,
        )
        terms = jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * (log_p - log_q), 0.0)
        return {**found, "kl_full": jnp.where(positions.label_mask, terms.sum(-1), 0.0)}

    def of_batch(parameters: Any, theirs: Any, batch: Batch, soft_targets: Any) -> RowSums:
        rows, length = batch.tokens.shape
        hidden = hidden_states(functions, parameters, batch, settings.precision)
        other = None if teacher is None else hidden_states(teacher, theirs, batch, "float32")
        soft = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), soft_targets)
        tree = (hidden, other, flat_positions(batch), soft)
        parts, n = in_chunks(tree, min(settings.chunk, rows * length))
        found = jax.lax.map(lambda part: of_chunk(parameters, theirs, part), parts)
        flat = {name: x.reshape(-1)[:n].reshape(rows, length) for name, x in found.items()}
        mask = batch.label_mask
        summed = {name: jnp.where(mask, x, 0.0).sum(-1) for name, x in flat.items()}
        return RowSums(
            labels=mask.sum(-1, dtype=jnp.float32),
            bins=_bins(flat["confidence"], flat["hits"], mask),
            **{name: summed[name] for name in RowSums._fields if name in summed},
        )

    def one_micro_batch(parameters: Any, theirs: Any, batch: Batch, soft: Any) -> RowSums:
        first = lambda tree: jax.tree.map(lambda x: x[0], tree)  # noqa: E731
        return of_batch(parameters, theirs, first(batch), first(soft))

    return jax.pmap(
        one_micro_batch, axis_name=AXIS, in_axes=(None, None, 0, 0), devices=list(devices)
    )


def _ranks(logits: Float32[Array, "n rows"], positions: Positions) -> dict[str, Array]:
    """Whether the teacher's first choice, and the label, are the student's; its confidence."""
    ids = jnp.where(positions.label_mask, positions.targets.ids[:, 0].astype(jnp.int32), 0)
    highest = logits.max(axis=-1)

    def above(token: Array) -> Array:
        score = jnp.take_along_axis(logits, token[:, None], axis=-1)
        return jnp.sum(logits > score, axis=-1, dtype=jnp.int32)

    theirs, labels = above(ids), above(positions.labels)
    one = lambda x: x.astype(jnp.float32)  # noqa: E731
    return {
        "top1": one(theirs == 0),
        "top5": one(theirs < 5),
        "hits": one(labels == 0),
        "confidence": jnp.exp(highest - jax.nn.logsumexp(logits, axis=-1)),
    }


def _bins(confidence: Array, hits: Array, mask: Array) -> Array:
    place = jnp.clip((confidence * BINS).astype(jnp.int32), 0, BINS - 1)
    inside = jax.nn.one_hot(place, BINS, dtype=jnp.float32)
    inside = jnp.where(mask[..., None], inside, 0.0)
    columns = jnp.stack([jnp.ones_like(hits), confidence, hits], axis=-1)
    return jnp.einsum("rlb,rlc->rbc", inside, columns, precision="highest")


def mean_over(
    row_sums: Callable[[Parameters, Any, Batch, Targets | None], RowSums],
    parameters: Parameters,
    batches: Iterable[tuple[Batch, Targets | None]],
    objective: Objective,
    alpha: float,
    kl_kind: str,
    devices: Sequence[Any],
    teacher: Parameters | None = None,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Means over every label of the batches.

    Args:
      row_sums: from `make_row_sums`.
      parameters: on the devices, replicated.
      batches: rows -1 count for nothing; beside each the training targets, or None.
      teacher: the teacher's parameters, replicated, if `row_sums` takes them.
      progress: called with the number of rows done.

    Raises:
      StudentError: there is no label, or a result is not a number.
    """
    seen: list[RowSums] = []
    rows = 0
    teacher_logprobs: list[float] = []
    for batch, soft in batches:
        kept = batch.rows >= 0
        found = row_sums(
            parameters, teacher, place(batch, 1, devices), on_devices(soft, 1, devices)
        )
        flat = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:])[kept], found)  # noqa: B023
        seen.append(flat)
        rows += int(kept.sum())
        teacher_logprobs += batch.label_logprobs[batch.label_mask].astype(np.float64).tolist()
        if progress is not None:
            progress(rows)
    return _combine(seen, rows, teacher_logprobs, objective, alpha, kl_kind, teacher is not None)


def _combine(
    seen: list[RowSums],
    rows: int,
    teacher_logprobs: list[float],
    objective: Objective,
    alpha: float,
    kl_kind: str,
    full: bool,
) -> Evaluation:
    if not seen:
        raise StudentError("there is no held-out row to evaluate on.")

    def total(name: str) -> float:
        return math.fsum(x for sums in seen for x in getattr(sums, name).tolist())

    labels = total("labels")
    if not labels:
        raise StudentError("the held-out rows have no label to evaluate on.")
    mean = {name: total(name) / labels for name in RowSums._fields if name != "bins"}
    unknown = [name for name, value in mean.items() if math.isnan(value)]
    if unknown:
        raise StudentError(
            f"the student's {unknown[0]} on the held-out rows is not a number: its parameters are "
            "not finite, or too large to compute with. Use an earlier checkpoint."
        )
    bins = np.sum([sums.bins.astype(np.float64).sum(0) for sums in seen], axis=0)
    loss = alpha * mean["ce"] + (1 - alpha) * objective.temperature**2 * mean["kd"]
    finite = [x for x in teacher_logprobs if x > -math.inf]
    impossible = len(finite) < len(teacher_logprobs)
    theirs = math.inf if impossible else -math.fsum(finite) / labels
    return Evaluation(
        rows=rows,
        labels=int(labels),
        loss=loss,
        cross_entropy=mean["ce"],
        perplexity=perplexity(-total("ce"), int(labels)),
        kl=mean["kl"],
        kl_kind=kl_kind,
        kl_full=mean["kl_full"] if full else None,
        top1=mean["top1"],
        top5=mean["top5"],
        accuracy=mean["hits"],
        ece=float(np.abs(bins[:, 1] - bins[:, 2]).sum() / labels),
        teacher_cross_entropy=theirs,
        teacher_perplexity=math.inf if impossible else perplexity(math.fsum(finite), int(labels)),
    )
