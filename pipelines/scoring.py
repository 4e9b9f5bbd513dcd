"""From rows of token ids to targets: the teacher's forward pass, and its head in chunks.

`score_row` is a pure function of one row. `make_scorer` lifts it over the rows of a
micro-batch (`jax.vmap`) and over local devices (`jax.pmap`), compiled once for one shape.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from decoder.rows import positions_from_segments
from pipelines.sampling import position_bits
from pipelines.targets import Targets, TargetSettings, select_targets

Devices: TypeAlias = Sequence[Any]  # of jax.Device
Device: TypeAlias = Any  # a jax.Device, which type checkers take for a variable
Params: TypeAlias = Any  # a pytree of arrays, of a shape that only the teacher's functions know


@dataclass(frozen=True)
class TeacherFunctions:
    """A teacher as pure functions of its parameters and of one row.

    `hidden(params, tokens [length], segments [length], positions [length])` gives
    `[length, width]`, the input of `unembed(params, hidden [n, width])`, which gives
    logits `[n, rows]` with at least as many rows as the vocabulary has tokens. Without
    `unembed`, `hidden` gives the logits themselves, for all positions at one time.
    """

    hidden: Callable[[Params, Array, Array, Array], Array]
    unembed: Callable[[Params, Array], Array] | None = None


def teacher_functions(model: nnx.Module) -> tuple[TeacherFunctions, Params]:
    """Splits an NNX model into pure functions and the parameters they take.

    The model maps `(tokens, segments, positions)` of one row to hidden states and has a
    method `unembed`, or has none and maps them to logits.
    """
    graph, params = nnx.split(model)

    def hidden(params, tokens, segments, positions):
        return nnx.merge(graph, params)(tokens, segments, positions)

    def unembed(params, hidden):
        merged: Any = nnx.merge(graph, params)
        return merged.unembed(hidden)

    has_head = callable(getattr(model, "unembed", None))
    return TeacherFunctions(hidden, unembed if has_head else None), params


def labels_from_tokens(
    tokens: Int32[Array, " length"], segments: Int32[Array, " length"]
) -> Int32[Array, " length"]:
    """The token that each position predicts; -1 at the end of a document and in padding."""
    same = (segments[:-1] == segments[1:]) & (segments[:-1] != 0)
    none = jnp.full((1,), -1, jnp.int32)
    return jnp.concatenate([jnp.where(same, tokens[1:], -1), none])


def score_row(
    functions: TeacherFunctions,
    params: Params,
    tokens: Int32[Array, " length"],
    segments: Int32[Array, " length"],
    row: Int32[Array, ""],
    settings: TargetSettings,
    legal: Bool[Array, " vocabulary"] | None = None,
) -> Targets:
    """Targets of every position of one row, of leading axis `length`.

    Logits exist for `settings.chunk` positions at one time. Padding (segment 0) is scored
    like a document and has no labels; whoever stores targets leaves it out.

    Args:
      row: the row's number in the cache; it keys the random numbers of a sampled tail.
      legal: false for ids below the vocabulary's size that no token has.
    """
    length = tokens.shape[0]
    chunk = min(settings.chunk, length)
    padding = -length % chunk
    hidden = functions.hidden(params, tokens, segments, positions_from_segments(segments))
    labels = labels_from_tokens(tokens, segments)
    places = jnp.arange(length, dtype=jnp.int32)

    def in_chunks(x):
        x = jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(-1, chunk, *x.shape[1:])

    def select(part: tuple[Array, Array, Array]) -> Targets:
        hidden, labels, places = part
        logits = _real_logits(functions, params, hidden, settings.vocabulary)
        bits = position_bits(settings.seed, row, places) if settings.tail == "sampled" else None
        return select_targets(logits, labels, settings, bits, legal)

    parts = jax.lax.map(select, (in_chunks(hidden), in_chunks(labels), in_chunks(places)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:length], parts)


def _real_logits(functions, params, hidden, vocabulary) -> Float[Array, "chunk vocabulary"]:
    logits = hidden if functions.unembed is None else functions.unembed(params, hidden)
    if logits.shape[-1] < vocabulary:
        raise ValueError(
            f"the teacher gives {logits.shape[-1]} logits per position and the vocabulary has "
            f"{vocabulary} tokens: the tokenizer is not this teacher's"
        )
    return logits[:, :vocabulary].astype(jnp.float32)


def replicate(params: Params, devices: Devices) -> Params:
    """A copy of the parameters on each device, placed as the scorer takes them."""
    return jax.device_put(params, NamedSharding(_mesh(devices), PartitionSpec()))


def spread(params: Params, devices: Devices) -> Params:
    """One copy of the parameters over all devices; see :func:`spreading`."""
    return jax.tree.map(spreading(devices), params)


def spreading(devices: Devices) -> Callable[[Array | np.ndarray], Array]:
    """A function that puts an array on all devices, cut along its longest axis that fits.

    For a teacher that is larger than a device; XLA's partitioner divides the work. Each device
    gets its part alone.
    """
    mesh = _mesh(devices)

    def place(x: Array | np.ndarray) -> Array:
        fitting = [axis for axis, size in enumerate(x.shape) if size % len(devices) == 0]
        cut = max(fitting, key=lambda axis: x.shape[axis], default=None)
        names = ["devices" if axis == cut else None for axis in range(x.ndim)]
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*names)))

    return place


def _mesh(devices: Devices) -> Mesh:
    return Mesh(np.array(devices), ("devices",), axis_types=(AxisType.Auto,))


def make_scorer(
    functions: TeacherFunctions,
    settings: TargetSettings,
    length: int,
    micro_batch: int,
    devices: Devices,
    legal: Bool[np.ndarray, " vocabulary"] | None = None,
    sharded: bool = False,
) -> Callable[[Params, np.ndarray, np.ndarray, np.ndarray], Targets]:
    """A function that scores `len(devices) * micro_batch` rows of `length` tokens.

    With `sharded`, it scores `micro_batch` rows on all devices together, with parameters
    from :func:`spread`; the last bits then depend on the number of devices.

    It takes parameters from :func:`replicate` and int32 arrays `tokens [rows, length]`,
    `segments [rows, length]` and `rows [rows]` (numbers of the rows in the cache), and
    returns targets of leading axes `[rows, length]` as soon as the work is dispatched.
    A row's targets depend neither on the rows beside it nor on the number of devices.
    """
    mask = None if legal is None else jnp.asarray(legal)

    def score(params, tokens, segments, row):
        return score_row(functions, params, tokens, segments, row, settings, mask)

    over_rows = jax.vmap(score, in_axes=(None, 0, 0, 0))
    groups = 1 if sharded else len(devices)
    if sharded:
        together = jax.jit(over_rows)
    else:
        lifted = jax.pmap(
            over_rows, axis_name="devices", in_axes=(None, 0, 0, 0), devices=list(devices)
        )

        def together(params, *rows):
            split = [x.reshape(groups, micro_batch, *x.shape[1:]) for x in rows]
            found = lifted(params, *split)
            return jax.tree.map(lambda x: x.reshape(rows_per_call, *x.shape[2:]), found)

    rows_per_call = groups * micro_batch

    def scorer(params: Params, tokens: np.ndarray, segments: np.ndarray, rows: np.ndarray):
        for name, found, shape in (
            ("tokens", tokens, (rows_per_call, length)),
            ("segments", segments, (rows_per_call, length)),
            ("rows", rows, (rows_per_call,)),
        ):
            if found.shape != shape or found.dtype != np.int32:
                raise ValueError(
                    f"{name} is {found.dtype}{list(found.shape)}; expected int32{list(shape)}: "
                    f"{groups} times {micro_batch} rows; pad the last micro-batch"
                )
        return together(params, tokens, segments, rows)

    return scorer
