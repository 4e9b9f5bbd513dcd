"""The loss from logits, its gradient in closed form, and both fused with the unembedding.

The logits of a batch, `[positions, vocabulary]`, never exist: positions are taken in chunks, and
the gradient of a chunk is computed while its logits are there (as in "Cut Your Losses in
Large-Vocabulary Language Models", Wijmans et al., 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from student.objectives import Objective, Teacher, divergence, teacher_side


class Positions(NamedTuple):
    """Positions of a batch, flattened: what of a `Batch` the loss needs.

    Attributes:
      labels: int32 [n].
      label_mask: bool [n].
      targets: `batches.Targets` with leading axis [n], or None.
    """

    labels: Int32[Array, " n"]
    label_mask: Bool[Array, " n"]
    targets: Any


class Sums(NamedTuple):
    """Sums over the positions with a label, float32.

    Attributes:
      loss: α CE + (1 − α) T² KD.
      ce: cross-entropy of the labels, temperature 1, nats.
      kd: KD without T², nats; 0 when only labels are trained on.
    """

    loss: Float32[Array, ""]
    ce: Float32[Array, ""]
    kd: Float32[Array, ""]


class StudentSide(NamedTuple):
    """What the formulas take of a student's logits.

    Attributes:
      scores: z / T at the teacher's entries, float32 [n, k].
      total: logsumexp of z / T, float32 [n].
      rest: logsumexp of z / T outside the exact entries, float32 [n]; `total` where not needed.
      others: z / T with -inf at the exact entries, float32 [n, rows], or None.
    """

    scores: Array
    total: Array
    rest: Array
    others: Array | None


def student_side(
    logits: Float32[Array, "n rows"], teacher: Teacher, objective: Objective
) -> StudentSide:
    """Logits, with -inf at illegal ids, as `objectives.divergence` takes them."""
    scaled = logits / objective.temperature
    total = jax.nn.logsumexp(scaled, axis=-1)
    scores = jnp.take_along_axis(scaled, teacher.ids, axis=-1)
    scores = jnp.where(teacher.entry, scores, 0.0)
    if objective.kind != "bucket":
        return StudentSide(scores, total, total, None)
    outside = jnp.where(teacher.exact, teacher.ids, logits.shape[-1])
    place = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    others = scaled.at[place, outside].set(-jnp.inf, mode="drop")
    rest = jnp.maximum(jax.nn.logsumexp(others, axis=-1), -1e30)
    return StudentSide(scores, total, rest, others)


def position_losses(
    logits: Float32[Array, "n rows"], positions: Positions, objective: Objective
) -> tuple[Float32[Array, " n"], Float32[Array, " n"]]:
    """CE and KD (without T²) of each position, nats; 0 without a label. No gradient."""
    ce = jax.nn.logsumexp(logits, axis=-1) - _at(logits, positions.labels)
    ce = jnp.where(positions.label_mask, ce, 0.0)
    if objective.kind == "labels":
        return ce, jnp.zeros_like(ce)
    teacher = teacher_side(positions.targets, positions.label_mask, objective)
    ours = student_side(logits, teacher, objective)
    kd = divergence(objective, teacher, ours.scores, ours.total, ours.rest)
    return ce, jnp.where(positions.label_mask, kd, 0.0)


def loss_and_gradient(
    logits: Float32[Array, "n rows"],
    positions: Positions,
    alpha: Float32[Array, ""],
    objective: Objective,
) -> tuple[Sums, Float32[Array, "n rows"]]:
    """Sums over positions, and the gradient of `Sums.loss` with respect to the logits.

    Logits are -inf at illegal ids, and the gradient is 0 there.
    """
    mask = positions.label_mask
    temperature = objective.temperature
    total = jax.nn.logsumexp(logits, axis=-1)
    ce = jnp.where(mask, total - _at(logits, positions.labels), 0.0)
    place = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    hard = jnp.where(mask, alpha, 0.0)
    if objective.kind == "labels":
        gradient = jnp.exp(logits - total[:, None]) * hard[:, None]
        gradient = gradient.at[place, positions.labels[:, None]].add(-hard[:, None])
        ce_sum = ce.sum()
        return Sums(alpha * ce_sum, ce_sum, jnp.zeros_like(ce_sum)), gradient

    teacher = teacher_side(positions.targets, mask, objective)
    ours = student_side(logits, teacher, objective)
    kd, pull = jax.vjp(
        lambda scores, total, rest: divergence(objective, teacher, scores, total, rest),
        ours.scores,
        ours.total,
        ours.rest,
    )
    kd = jnp.where(mask, kd, 0.0)
    # T² of the objective, over T of z / T.
    soft = jnp.where(mask, (1 - alpha) * temperature, 0.0)
    by_score, by_total, by_rest = pull(jnp.ones_like(kd))
    by_score = jnp.where(teacher.entry, by_score, 0.0) * soft[:, None]
    # The softmax at T (and at 1), the softmax of the rest, and single entries.
    if temperature == 1.0:
        gradient = jnp.exp(logits - total[:, None]) * (hard + soft * by_total)[:, None]
    else:
        gradient = jnp.exp(logits - total[:, None]) * hard[:, None]
        softened = jnp.exp(logits / temperature - ours.total[:, None])
        gradient += softened * (soft * by_total)[:, None]
    if ours.others is not None:
        gradient += jnp.exp(ours.others - ours.rest[:, None]) * (soft * by_rest)[:, None]
    ids = jnp.concatenate([positions.labels[:, None], teacher.ids], axis=-1)
    values = jnp.concatenate([-hard[:, None], by_score], axis=-1)
    gradient = gradient.at[place, ids].add(values)
    ce_sum, kd_sum = ce.sum(), kd.sum()
    loss = alpha * ce_sum + (1 - alpha) * temperature**2 * kd_sum
    return Sums(loss, ce_sum, kd_sum), gradient


def _at(logits: Float32[Array, "n rows"], ids: Int32[Array, " n"]) -> Float32[Array, " n"]:
    return jnp.take_along_axis(logits, ids[:, None], axis=-1)[:, 0]


def masked(
    logits: Float32[Array, "n rows"], legal: Bool[np.ndarray, " rows"] | None
) -> Float32[Array, "n rows"]:
    """Logits with -inf at ids that no token has, so that these get no probability."""
    return logits if legal is None else jnp.where(jnp.asarray(legal)[None], logits, -jnp.inf)


def in_chunks(tree: Any, chunk: int) -> tuple[Any, int]:
    """Arrays [n, ...] as [chunks, chunk, ...], padded with zeros; and n."""
    n = jax.tree.leaves(tree)[0].shape[0]
    padding = -n % chunk

    def cut(x: Any) -> Array:
        x = jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(-1, chunk, *x.shape[1:])

    return jax.tree.map(cut, tree), n


FusedLoss = Callable[[Mapping[str, Array], Float[Array, "n width"], Positions, Any], Sums]


def fused_loss(
    unembed: Callable[[Mapping[str, Array], Array], Float32[Array, "n rows"]],
    objective: Objective,
    legal: Bool[np.ndarray, " rows"] | None = None,
    chunk: int = 128,
) -> FusedLoss:
    """A function (head, hidden [n, width], positions [n], alpha) to `Sums`.

    It can be differentiated in `Sums.loss` with respect to `head` (the parameters that `unembed`
    uses) and `hidden`; `ce` and `kd` are for reporting, and their cotangents are ignored. Logits
    exist for `chunk` positions at one time; what is kept for the backward pass are the gradients
    of `head` (float32, summed over chunks) and of `hidden`.
    """

    def logits_of(head: Any, hidden: Array) -> Array:
        return masked(unembed(head, hidden).astype(jnp.float32), legal)

    def over_chunks(body: Any, carry: Any, parts: Any) -> Any:
        size = min(chunk, parts[0].shape[0])
        cut, n = in_chunks(parts, size)
        if n <= size:  # one chunk needs no loop
            carry, out = body(carry, jax.tree.map(lambda x: x[0], cut))
            return carry, out
        carry, out = jax.lax.scan(body, carry, cut)
        return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:n], out)

    @jax.custom_vjp
    def loss(head, hidden, positions, alpha):
        def body(sums, part):
            logits = logits_of(head, part[0])
            ce, kd = position_losses(logits, part[1], objective)
            soft = (1 - alpha) * objective.temperature**2
            found = Sums((alpha * ce + soft * kd).sum(), ce.sum(), kd.sum())
            return jax.tree.map(jnp.add, sums, found), None

        return over_chunks(body, _zeros(), (hidden, positions))[0]

    def forward(head, hidden, positions, alpha):
        def body(carry, part):
            states, here = part
            logits, pull = jax.vjp(lambda h, x: unembed(h, x).astype(jnp.float32), head, states)
            found, gradient = loss_and_gradient(masked(logits, legal), here, alpha, objective)
            by_head, by_states = pull(gradient)
            sums, summed = carry
            summed = jax.tree.map(lambda x, y: x + y.astype(jnp.float32), summed, by_head)
            return (jax.tree.map(jnp.add, sums, found), summed), by_states

        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), head)
        carry = (_zeros(), nothing)
        (sums, by_head), by_hidden = over_chunks(body, carry, (hidden, positions))
        by_head = jax.tree.map(lambda x, y: y.astype(x.dtype), head, by_head)
        return sums, (by_head, by_hidden)

    def backward(kept, cotangents):
        scale = cotangents.loss
        by_head, by_hidden = jax.tree.map(lambda x: x * scale.astype(x.dtype), kept)
        return by_head, by_hidden, None, None

    loss.defvjp(forward, backward)
    return loss


def _zeros() -> Sums:
    zero = jnp.zeros((), jnp.float32)
    return Sums(zero, zero, zero)
