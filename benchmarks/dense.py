"""Training steps with ordinary logits, `[tokens, vocabulary]` at one time: what ours stand beside.

The same student, optimiser, counting of labels and pmap as `student.step.make_step`; only the
loss differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from student.batches import Batch
from student.functions import Parameters, StudentFunctions
from student.losses import Sums
from student.step import (
    AXIS,
    Metrics,
    State,
    flat_positions,
    hidden_states,
    mean_gradients,
    updated,
)

# (whatever the teacher needs, batch) to logits [tokens, vocabulary].
TeacherLogits = Callable[[Any, Batch], jax.Array]


def make_dense_step(
    functions: StudentFunctions,
    optimizer: optax.GradientTransformation,
    devices: Sequence[Any],
    teacher_logits: TeacherLogits | None = None,
) -> Callable[[State, Batch, Any, Any], tuple[State, Metrics]]:
    """The pmapped step: (state, batch from `place`, alpha, for the teacher) to (state, metrics).

    Without a teacher its loss is the labels' cross-entropy; with one it is α CE + (1 − α) KL
    over the whole vocabulary. The state's buffers are donated.
    """

    def loss(parameters: Parameters, batch: Batch, alpha: Any, theirs: Any) -> Sums:
        hidden = hidden_states(functions, parameters, batch, "float32")
        logits = functions.unembed({name: parameters[name] for name in functions.head}, hidden)
        positions = flat_positions(batch._replace(targets=None))
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, positions.labels)
        ce = jnp.where(positions.label_mask, ce, 0.0).sum()
        if teacher_logits is None:
            return Sums(ce, ce, jnp.zeros_like(ce))
        kd = kl_of_logits(teacher_logits(theirs, batch), logits)
        kd = jnp.where(positions.label_mask, kd, 0.0).sum()
        return Sums(alpha * ce + (1 - alpha) * kd, ce, kd)

    def step(state: State, batches: Batch, alpha: Any, theirs: Any) -> tuple[State, Metrics]:
        gradients, metrics = mean_gradients(
            lambda parameters, batch, alpha: loss(parameters, batch, alpha, theirs),
            state.parameters,
            batches,
            alpha,
        )
        return updated(optimizer, state, gradients), metrics

    return jax.pmap(
        step,
        axis_name=AXIS,
        in_axes=(None, 0, None, None),
        out_axes=(None, None),
        devices=list(devices),
        donate_argnums=(0,),
    )


def kl_of_logits(teacher: jax.Array, student: jax.Array) -> jax.Array:
    """KL(teacher, student) of each position, nats, float32, over the whole vocabulary."""
    log_p, log_q = jax.nn.log_softmax(teacher), jax.nn.log_softmax(student)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def as_batch(tokens: np.ndarray, targets: Any = None) -> Batch:
    """Rows of one document each, [rows, length], as a training batch."""
    following = np.concatenate([tokens[:, 1:], np.zeros_like(tokens[:, :1])], axis=1)
    mask = np.ones(tokens.shape, bool)
    mask[:, -1] = False
    return Batch(
        rows=np.arange(len(tokens), dtype=np.int32),
        tokens=tokens,
        segments=np.ones_like(tokens),
        labels=np.where(mask, following, 0).astype(np.int32),
        label_mask=mask,
        label_logprobs=np.zeros(tokens.shape, np.float32),
        targets=targets,
    )
