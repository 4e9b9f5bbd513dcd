"""A student as pure functions of a flat dictionary of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Var
from jaxtyping import Array, Float, Float32, Int32

from student.errors import StudentError

# Parameters by dotted path in the module: "layers.0.attention.query.weight".
Parameters: TypeAlias = Mapping[str, Array]


@dataclass(frozen=True)
class StudentFunctions:
    """Pure functions of one row; lift them with `jax.vmap`.

    Attributes:
      hidden: (parameters, tokens [length], segments [length], positions [length]) to
        [length, width], in the parameters' dtype.
      unembed: (parameters named in `head`, hidden [n, width]) to float32 logits [n, rows].
      head: names of the parameters that `unembed` uses. A tied embedding is one of them.
      rows: how many logits `unembed` gives per position.
    """

    hidden: Callable[[Parameters, Int32[Array, " n"], Int32[Array, " n"], Int32[Array, " n"]], Any]
    unembed: Callable[[Parameters, Float[Array, "n width"]], Float32[Array, "n rows"]]
    head: tuple[str, ...]
    rows: int


def parameters_of(model: nnx.Module) -> dict[str, Any]:
    """The model's parameters (shapes, if it is abstract), by dotted path."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {dotted(path): variable.get_value() for path, variable in flat}


def fill(model: nnx.Module, parameters: Parameters) -> nnx.Module:
    """A model of the same kind, real or abstract, with these parameters."""
    graph, state = nnx.split(model)
    for path, variable in nnx.to_flat_state(state):
        variable.set_value(parameters[dotted(path)])
    return nnx.merge(graph, state)


def dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def student_functions(
    model: nnx.Module, remat: bool = False, trained: bool = True
) -> StudentFunctions:
    """Splits a model, real or abstract (`nnx.eval_shape`), into pure functions.

    Args:
      model: maps (tokens, segments, positions) of one row to hidden states [length, width],
        and has a method `unembed` that gives logits for hidden states [n, width].
      remat: compute the activations of each layer again in the backward pass; the model's call
        takes a keyword `remat`.
      trained: whether it is a student. Of a teacher, variables that are no parameters (the
        running means of a batch norm) are constants.

    Raises:
      StudentError: the model has no such method, or other variables than parameters, or does not
        offer `remat`.
    """
    if not callable(getattr(model, "unembed", None)):
        raise StudentError(
            f"the student {type(model).__name__} has no method `unembed`; a student needs one "
            "that takes hidden states [n, width] and gives logits [n, vocabulary]."
        )
    if remat and "remat" not in inspect.signature(model).parameters:  # type: ignore[arg-type]
        raise StudentError(
            f"the student {type(model).__name__} cannot compute its layers again in the backward "
            "pass: its call has no keyword `remat`. Add one, or train without --remat."
        )
    graph, state, rest = nnx.split(model, nnx.Param, ...)
    if trained and jax.tree.leaves(rest):
        raise StudentError(
            f"the student {type(model).__name__} has variables that are no parameters "
            "(batch statistics, random numbers); a student is a function of parameters alone."
        )
    flat = nnx.to_flat_state(state)
    names = [dotted(path) for path, _ in flat]
    places = {dotted(path): variable for path, variable in flat}
    treedef = jax.tree.structure(state)
    in_order = [dotted(path) for path, _ in nnx.to_flat_state(jax.tree.unflatten(treedef, names))]
    options = {"remat": True} if remat else {}

    def merge(parameters: Parameters) -> Any:
        leaves = [parameters[name] for name in in_order]
        return nnx.merge(graph, jax.tree.unflatten(treedef, leaves), rest)

    def hidden(parameters, tokens, segments, positions):
        return merge(parameters)(tokens, segments, positions, **options)

    def whole_unembed(parameters, states):
        return merge(parameters).unembed(states)

    shapes = {name: jax.ShapeDtypeStruct(v.shape, v.dtype) for name, v in places.items()}
    row = jax.ShapeDtypeStruct((2,), jnp.int32)
    states = jax.eval_shape(hidden, shapes, row, row, row)
    if len(states.shape) != 2 or states.shape[0] != 2:
        raise StudentError(
            f"the student gives {list(states.shape)} for a row of 2 tokens; expected hidden "
            "states [length, width]."
        )
    head, logits = _used(whole_unembed, shapes, states)
    others = {name: shape for name, shape in shapes.items() if name not in head}

    def unembed(parameters, states):
        # What the head does not use may be anything of the right shape.
        unused = {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in others.items()}
        return whole_unembed({**unused, **parameters}, states)

    return StudentFunctions(hidden, unembed, head, logits.shape[-1])


def _used(function: Any, shapes: Any, states: Any) -> tuple[tuple[str, ...], Any]:
    """Names of the parameters that a function of (parameters, states) uses, and its result."""
    traced = jax.make_jaxpr(function, return_shape=True)(shapes, states)
    jaxpr, result = traced[0].jaxpr, traced[1]
    used = {v for equation in jaxpr.eqns for v in equation.invars if isinstance(v, Var)}
    used |= {v for v in jaxpr.outvars if isinstance(v, Var)}
    names = sorted(shapes)  # the order in which JAX flattens a dictionary
    head = tuple(n for n, v in zip(names, jaxpr.invars, strict=False) if v in used)
    return head, result
