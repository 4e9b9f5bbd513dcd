"""Teachers given as `package.module:function`: any NNX module of the one-row convention."""

import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Jaxpr, Var, jaxprs_in_params
from jaxtyping import Array, Float, Integer

from decoder.checkpoint import canonical_digest
from decoder.errors import DecoderError

_PROBE = 8  # positions of the row that a module is tried on, abstractly

# JAX's primitives that draw random numbers.
_DRAWS = {"random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform"}


class LogitsModel(nnx.Module):
    """A module that returns logits itself, seen as one whose hidden states are the logits."""

    def __init__(self, model: nnx.Module) -> None:
        self.model = model
        self.max_positions = getattr(model, "max_positions", None)

    def __call__(
        self,
        tokens: Integer[Array, "length"],
        segments: Integer[Array, "length"],
        positions: Integer[Array, "length"],
    ) -> Float[Array, "length vocabulary"]:
        return self.model(tokens, segments, positions)  # pyright: ignore[reportCallIssue]

    def unembed(
        self, hidden: Float[Array, "positions vocabulary"]
    ) -> Float[Array, "positions vocabulary"]:
        return hidden.astype(jnp.float32)


def build(name: str) -> tuple[nnx.Module, int]:
    """Call the function; its module, with an `unembed`, and the rows of its vocabulary.

    The module is put into evaluation mode (`nnx.Module.eval`): what it gives for a row should
    depend on that row alone.

    Raises `DecoderError` if it cannot be imported or does not follow the convention, draws random
    numbers in evaluation mode, or changes its batch statistics.
    """
    try:
        model = _function(name)()
        if isinstance(model, nnx.Module):
            model.eval()
    except DecoderError:
        raise
    except Exception as error:  # it is the user's code
        raise DecoderError(
            f"the function {name} failed: {type(error).__name__}: {error}. Mend it; --debug shows "
            "where"
        ) from error
    if not isinstance(model, nnx.Module):
        raise DecoderError(f"{name} returned a {type(model).__name__}; expected a flax.nnx.Module")
    if not callable(model):
        raise DecoderError(f"{name}: the module has no __call__(tokens, segments, positions)")
    row = jax.ShapeDtypeStruct((_PROBE,), jnp.int32)
    hidden = _abstract(name, model, "hidden states", lambda whole, *row: whole(*row), row, row, row)
    if not callable(getattr(model, "unembed", None)):
        return LogitsModel(model), hidden.shape[1]
    logits = _abstract(name, model, "logits", lambda whole, hidden: whole.unembed(hidden), hidden)
    return model, logits.shape[1]


def fingerprint(name: str, model: nnx.Module) -> str:
    """sha256 over the name, the source file of its module, and every array of the state."""
    source = inspect.getsourcefile(importlib.import_module(name.partition(":")[0]))
    if source is None:
        raise DecoderError(f"{name} comes from no source file, so that it cannot be identified")
    arrays = [
        [".".join(map(str, path)), *_identity(variable)]
        for path, variable in nnx.to_flat_state(nnx.state(model))
    ]
    code = hashlib.sha256(Path(source).read_bytes()).hexdigest()
    return canonical_digest({"function": name, "code": code, "state": sorted(arrays)})


def _identity(variable: Any) -> list[Any]:
    value = variable[...] if isinstance(variable, nnx.Variable) else variable
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return [list(array.shape), str(array.dtype), digest]


def _function(name: str) -> Any:
    module_name, _, attributes = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise DecoderError(
            f"{name}: importing {module_name} failed ({error}). It must be installed, or its "
            "folder must be on PYTHONPATH"
        ) from error
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise DecoderError(f"{name}: {module_name} has no attribute {attributes!r}")
        found = getattr(found, attribute)
    if not callable(found):
        raise DecoderError(f"{name} is a {type(found).__name__}; expected a function")
    return found


def _abstract(
    name: str, model: nnx.Module, what: str, call: Callable[..., Any], *inputs: Any
) -> jax.ShapeDtypeStruct:
    """Shape and dtype of what a call returns, checked, without computing it."""
    graphdef, state = nnx.split(model)

    def run(state: Any, *inputs: Any) -> Any:
        merged = nnx.merge(graphdef, state)
        found = call(merged, *inputs)
        return nnx.state(merged, nnx.BatchStat), found

    try:
        traced, (kept, found) = jax.make_jaxpr(run, return_shape=True)(state, *inputs)
    except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        raise DecoderError(
            f"{name}: computing {what} failed on one row (tokens, segments, positions, each "
            f"int32[{_PROBE}], no batch axis): {type(error).__name__}: {error}"
        ) from error
    _check_evaluates(name, what, traced.jaxpr, len(jax.tree.leaves(kept)))
    shape = getattr(found, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != _PROBE:
        raise DecoderError(
            f"{name}: the {what} of a row of {_PROBE} are a {type(found).__name__} of shape "
            f"{shape}; expected an array of shape [{_PROBE}, …], without a batch axis"
        )
    if not jnp.issubdtype(found.dtype, jnp.floating):
        raise DecoderError(f"{name}: the {what} are {found.dtype}; expected a floating dtype")
    return found


def _check_evaluates(name: str, what: str, jaxpr: Jaxpr, statistics: int) -> None:
    """Refuses a trace that draws random numbers, or whose first outputs, the batch statistics
    after the call, are not those that went in."""
    still = f"{name}: although eval() was called on the module, computing {what} still "
    if _DRAWS & set(_primitives(jaxpr)):
        raise DecoderError(
            f"{still}draws random numbers (dropout?), so that a row would give something else each "
            "time. Return a module that draws none: deterministic=True"
        )
    given = list(jaxpr.invars)
    if any(found is None for found in _passed_on(jaxpr, given)[:statistics]):
        raise DecoderError(
            f"{still}changes batch statistics: it normalises by those of the row at hand, as in "
            "training. Return a module that uses the stored ones: use_running_average=True"
        )


def _primitives(jaxpr: Jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jaxprs_in_params(equation.params):
            yield from _primitives(inner)


def _passed_on(jaxpr: Jaxpr, given: Sequence[Var | None]) -> list[Var | None]:
    """For each output the input that it is, unchanged, also through jitted functions; or None."""
    known: dict[Any, Var | None] = dict(zip(jaxpr.invars, given, strict=True))

    def value(atom: Any) -> Var | None:
        return known.get(atom) if isinstance(atom, Var) else None

    for equation in jaxpr.eqns:
        inner = list(jaxprs_in_params(equation.params))
        whole = len(inner) == 1 and len(inner[0].invars) == len(equation.invars)
        if whole and len(inner[0].outvars) == len(equation.outvars):
            results = _passed_on(inner[0], [value(atom) for atom in equation.invars])
            known |= dict(zip(equation.outvars, results, strict=True))
    return [value(atom) for atom in jaxpr.outvars]
