"""Pure functions of a model's parameters equal the model; the head is found, whatever it is."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from decoder import Decoder, DecoderConfig, load_model
from student.errors import StudentError
from student.functions import parameters_of, student_functions
from tests.decoder import functions as examples

CONFIG = DecoderConfig(
    vocabulary=12,
    width=8,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=4,
    mlp_width=8,
    max_positions=64,
)
ROW = [jnp.asarray(x, jnp.int32) for x in ([3, 1, 4, 1, 5], [1, 1, 1, 2, 2], [0, 1, 2, 0, 1])]


class Capped(nnx.Module):
    """An embedding and a head with a bias and a soft cap; no part of the family."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)

        def weights(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.asarray(random.normal(size=shape), jnp.float32))

        self.table, self.scale = weights(11, 6), weights(6)
        self.head, self.bias = weights(9, 6), weights(9)

    def __call__(self, tokens, segments, positions):
        return self.table[...][tokens] * self.scale[...][None]

    def unembed(self, hidden):
        logits = jnp.matmul(hidden, self.head[...].T, precision="highest") + self.bias[...][None]
        return 3.0 * jnp.tanh(logits / 3.0)


def decoder(tied: bool) -> Decoder:
    found = Decoder(replace(CONFIG, tied=tied), rngs=None)
    random = np.random.default_rng(0)
    for _, variable in nnx.to_flat_state(nnx.state(found)):
        drawn = random.normal(size=variable.get_value().shape)
        variable.set_value(jnp.asarray(drawn, jnp.float32))
    return found


@pytest.mark.parametrize(
    ("make", "head", "rows"),
    [
        (lambda: decoder(True), ("embedding.weight",), 12),
        (lambda: decoder(False), ("head.weight",), 12),
        (Capped, ("bias", "head"), 9),
        (examples.Hidden, ("table",), 7),
    ],
    ids=["tied", "untied", "soft cap", "one table"],
)
def test_the_functions_are_the_models(make, head, rows):
    model = make()
    parameters = parameters_of(model)
    found = student_functions(nnx.eval_shape(make))  # the values are not needed
    assert (found.head, found.rows) == (head, rows)
    hidden = jax.jit(found.hidden)(parameters, *ROW)
    np.testing.assert_allclose(hidden, jax.jit(lambda: model(*ROW))(), rtol=1e-5, atol=1e-6)
    # Of the parameters, the head's alone are needed.
    logits = found.unembed({name: parameters[name] for name in head}, hidden)
    assert logits.shape == (5, rows)
    np.testing.assert_allclose(logits, model.unembed(hidden), rtol=1e-5, atol=1e-6)
    # They are functions of the parameters they are given, not of the model's own.
    twice = {name: 2 * x for name, x in parameters.items()}
    other = found.unembed({name: twice[name] for name in head}, hidden)
    assert np.abs(np.asarray(other - logits)).max() > 1e-3


def test_parameters_have_the_names_of_their_places():
    parameters = parameters_of(decoder(False))
    assert parameters["layers.1.attention.query.weight"].shape == (8, 8)
    assert parameters["layers.0.attention.key.weight"].shape == (4, 8)
    assert parameters["head.weight"].shape == (12, 8)
    layer = "attention.key attention.output attention.query attention.value attention_norm"
    layer = [f"{name}.weight" for name in (layer + " mlp.down mlp.gate mlp.up mlp_norm").split()]
    expected = {f"layers.{place}.{name}" for place in (0, 1) for name in layer}
    assert set(parameters) == expected | {"embedding.weight", "head.weight", "norm.weight"}
    assert "head.weight" not in parameters_of(decoder(True))


def test_a_model_may_have_more_than_ten_layers():
    """Names sort as text, "10" before "2"; parameters must come back to their own places."""
    config = replace(CONFIG, layers=12, tied=True)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=None))
    shapes = parameters_of(model)
    numbers = {f"layers.{place}.mlp_norm.weight": float(place + 1) for place in range(12)}
    seen: list[float] = []

    def hidden(self, inputs, *_: Any):
        seen.append(float(self.mlp_norm.weight[...][0]))
        return inputs

    functions = student_functions(model)
    parameters = {
        name: jnp.full(x.shape, numbers.get(name, 0.0), x.dtype) for name, x in shapes.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decoder.model.Layer.__call__", hidden)
        functions.hidden(parameters, *ROW)
    assert seen == [float(place + 1) for place in range(12)]


@pytest.mark.parametrize("remat", [False, True])
def test_layers_are_computed_again_if_asked_for(remat):
    functions = student_functions(nnx.eval_shape(lambda: decoder(True)), remat)
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for name, x in parameters_of(decoder(True)).items()
    }
    traced = jax.make_jaxpr(functions.hidden)(shapes, *ROW)
    again = [e for e in traced.jaxpr.eqns if e.primitive.name in ("checkpoint", "remat2")]
    assert len(again) == (CONFIG.layers if remat else 0)


class Norms(Capped):
    """Statistics of a batch norm are state that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nnx.BatchNorm(6, rngs=nnx.Rngs(0))


class Dropping(Capped):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


class Batched(Capped):
    def __call__(self, tokens, segments, positions):
        return super().__call__(tokens, segments, positions)[None]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            examples.Table,
            r"the student Table has no method `unembed`; a student needs one that takes hidden "
            r"states \[n, width\] and gives logits \[n, vocabulary\]",
        ),
        (Norms, "the student Norms has variables that are no parameters .batch statistics"),
        (Dropping, "the student Dropping has variables that are no parameters"),
        (Batched, r"gives \[1, 2, 6\] for a row of 2 tokens; expected hidden states \[length, wid"),
    ],
)
def test_what_is_no_student_is_refused(model, message):
    with pytest.raises(StudentError, match=message):
        student_functions(model())


def test_a_teacher_may_have_statistics_and_keys():
    """Of a student they are refused; of a teacher in evaluation mode they are constants."""
    model: Any = load_model("tests.decoder.functions:Modes").model
    found = student_functions(model, trained=False)
    hidden = jax.jit(found.hidden)(parameters_of(model), *ROW)
    np.testing.assert_allclose(hidden, model(*ROW), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.unembed({}, hidden), hidden)
    with pytest.raises(StudentError, match="has variables that are no parameters"):
        student_functions(model)


def test_rematerialisation_needs_a_model_that_offers_it():
    with pytest.raises(StudentError, match="the student Capped cannot compute its layers again"):
        student_functions(Capped(), remat=True)
