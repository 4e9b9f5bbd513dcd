"""One optimiser step: over micro-batches and devices, each label weighing the same.

The loss is a sum over labels, divided once by the number of labels of all devices and
micro-batches together (psum / psum). Parameters and optimiser state are replicated and have no
device axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float32

from decoder.rows import positions_from_segments
from student.batches import Batch
from student.errors import StudentError
from student.functions import Parameters, StudentFunctions
from student.losses import Positions, Sums, fused_loss
from student.objectives import Objective

AXIS = "devices"


class State(NamedTuple):
    """What a step changes. Parameters and optimiser state are float32, replicated."""

    parameters: dict[str, Array]
    optimizer: Any


class Metrics(NamedTuple):
    """Of one step, over all devices; float32 scalars.

    Attributes:
      sums: over labels; divide by `labels`.
      labels: how many.
      gradient_norm: global norm before clipping, of the mean loss.
    """

    sums: Sums
    labels: Float32[Array, ""]
    gradient_norm: Float32[Array, ""]


@dataclass(frozen=True)
class LossSettings:
    """What the loss of a batch depends on, beside parameters and batch.

    Attributes:
      precision: "float32" or "bfloat16", of activations and matrix products.
      legal: false at rows of the head that no token has.
      chunk: positions whose logits exist at once.
    """

    objective: Objective
    precision: str = "float32"
    legal: Bool[np.ndarray, " rows"] | None = None
    chunk: int = 128


def cast(parameters: Parameters, precision: str) -> dict[str, Array]:
    """Parameters in the dtype that the model is to compute in."""
    return {name: x.astype(jnp.dtype(precision)) for name, x in parameters.items()}


def hidden_states(
    functions: StudentFunctions, parameters: Parameters, batch: Batch, precision: str
) -> Array:
    """Hidden states of every position of a batch, [rows * length, width]."""
    places = jax.vmap(positions_from_segments)(batch.segments)
    over_rows = jax.vmap(functions.hidden, in_axes=(None, 0, 0, 0))
    hidden = over_rows(cast(parameters, precision), batch.tokens, batch.segments, places)
    return hidden.reshape(-1, hidden.shape[-1])


def flat_positions(batch: Batch) -> Positions:
    """A batch's positions, [rows * length]."""
    tree = Positions(batch.labels, batch.label_mask, batch.targets)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def make_batch_loss(
    functions: StudentFunctions, settings: LossSettings
) -> Callable[[Parameters, Batch, Any], Sums]:
    """A function (parameters, batch, alpha) to sums over the batch's labels."""

    def unembed(head: Parameters, hidden: Array) -> Array:
        # Cast here, so that gradients of the head are summed over chunks in float32.
        return functions.unembed(cast(head, settings.precision), hidden)

    fused = fused_loss(unembed, settings.objective, settings.legal, settings.chunk)

    def loss(parameters: Parameters, batch: Batch, alpha: Any) -> Sums:
        hidden = hidden_states(functions, parameters, batch, settings.precision)
        head = {name: parameters[name] for name in functions.head}
        return fused(head, hidden, flat_positions(batch), alpha)

    return loss


def summed_gradients(
    loss: Callable[[Parameters, Batch, Any], Sums],
    parameters: Parameters,
    batches: Batch,
    alpha: Any,
) -> tuple[dict[str, Array], Sums, Float32[Array, ""]]:
    """Gradients of the summed loss, its sums, and the labels, over micro-batches.

    Args:
      batches: arrays [micro-batches, rows, ...].
    """

    def one(batch: Batch) -> tuple[dict[str, Array], Sums, Array]:
        def scalar(parameters: Parameters) -> tuple[Array, Sums]:
            sums = loss(parameters, batch, alpha)
            return sums.loss, sums

        gradients, sums = jax.grad(scalar, has_aux=True)(dict(parameters))
        return gradients, sums, jnp.sum(batch.label_mask, dtype=jnp.float32)

    if batches.tokens.shape[0] == 1:
        return one(jax.tree.map(lambda x: x[0], batches))
    zero = jnp.zeros((), jnp.float32)
    nothing = jax.tree.map(jnp.zeros_like, dict(parameters)), Sums(zero, zero, zero), zero
    add = lambda total, batch: (jax.tree.map(jnp.add, total, one(batch)), None)  # noqa: E731
    return jax.lax.scan(add, nothing, batches)[0]


def mean_gradients(
    loss: Callable[[Parameters, Batch, Any], Sums],
    parameters: Parameters,
    batches: Batch,
    alpha: Any,
) -> tuple[dict[str, Array], Metrics]:
    """Gradients of the mean loss over the labels of all devices; under an axis named `AXIS`."""
    found = summed_gradients(loss, parameters, batches, alpha)
    gradients, sums, labels = jax.lax.psum(found, AXIS)
    scale = 1.0 / jnp.maximum(labels, 1.0)
    gradients = jax.tree.map(lambda x: x * scale, gradients)
    return gradients, Metrics(sums, labels, optax.tree.norm(gradients))


def updated(
    optimizer: optax.GradientTransformation, state: State, gradients: dict[str, Array]
) -> State:
    """The state after one update."""
    updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.parameters)
    parameters = optax.apply_updates(state.parameters, updates)
    return State(parameters, optimizer_state)  # type: ignore[arg-type]


def make_step(
    functions: StudentFunctions,
    settings: LossSettings,
    optimizer: optax.GradientTransformation,
    devices: Sequence[Any],
) -> Callable[[State, Batch, Any], tuple[State, Metrics]]:
    """The pmapped step: (state, batch from `place`, alpha) to (state, metrics).

    A batch without any label, on any device, leaves the state as it is: weights, moments and
    counts. The state's buffers are donated: the state that went in must not be used again.
    """
    loss = make_batch_loss(functions, settings)

    def step(state: State, batches: Batch, alpha: Any) -> tuple[State, Metrics]:
        gradients, metrics = mean_gradients(loss, state.parameters, batches, alpha)
        after = updated(optimizer, state, gradients)
        # Decay and momentum would move the weights without a gradient too.
        taught = metrics.labels > 0
        return jax.tree.map(lambda new, old: jnp.where(taught, new, old), after, state), metrics

    return jax.pmap(
        step,
        axis_name=AXIS,
        in_axes=(None, 0, None),
        out_axes=(None, None),
        devices=list(devices),
        donate_argnums=(0,),
    )


def make_gradients(
    functions: StudentFunctions, settings: LossSettings, devices: Sequence[Any]
) -> Callable[[Parameters, Batch, Any], tuple[dict[str, Array], Metrics]]:
    """The gradients that `make_step` uses, without the update."""
    loss = make_batch_loss(functions, settings)
    return jax.pmap(
        lambda parameters, batches, alpha: mean_gradients(loss, parameters, batches, alpha),
        axis_name=AXIS,
        in_axes=(None, 0, None),
        out_axes=(None, None),
        devices=list(devices),
    )


def check_batch(batch: int, accumulation: int, devices: int) -> None:
    """Raises `StudentError` if a batch cannot be cut into equal parts for the devices."""
    if batch % (accumulation * devices):
        raise StudentError(
            f"--batch {batch} cannot be cut into --accumulation {accumulation} micro-batches on "
            f"each of {devices} devices: expected a multiple of {accumulation * devices}. Change "
            "the batch or the accumulation."
        )


def mesh_of(devices: Sequence[Any]) -> Mesh:
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def place(batch: Batch, accumulation: int, devices: Sequence[Any]) -> Batch:
    """A host's batch on its devices: arrays [devices, micro-batches, rows, ...].

    Returns at once; copying goes on meanwhile.
    """
    check_batch(len(batch.rows), accumulation, len(devices))
    return on_devices(batch, accumulation, devices)


def on_devices(tree: Any, accumulation: int, devices: Sequence[Any]) -> Any:
    """Arrays [rows, ...] on the devices, as `place` cuts a batch; the rows must divide."""
    sharding = NamedSharding(mesh_of(devices), PartitionSpec(AXIS))

    def put(x: np.ndarray) -> Array:
        cut = x.reshape(len(devices), accumulation, -1, *x.shape[1:])
        return jax.device_put(cut, sharding)

    return jax.tree.map(put, tree)


def replicate(tree: Any, devices: Sequence[Any]) -> Any:
    """A pytree on each device, without a device axis.

    What is on the first device already is not copied: donating the result ends the original.
    """
    return jax.device_put(tree, NamedSharding(mesh_of(devices), PartitionSpec()))
