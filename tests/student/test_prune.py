"""Blocks of layers: dropped exactly, and found by held-out cross-entropy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from decoder import Decoder, DecoderConfig
from student import prune
from student.batches import Batch
from student.errors import StudentError
from student.functions import parameters_of
from student.prune import best_block, drop, trim, without_layers

LAYERS, LENGTH, VOCABULARY = 5, 7, 40
CONFIG = DecoderConfig(
    vocabulary=VOCABULARY,
    width=16,
    layers=LAYERS,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp_width=24,
    max_positions=64,
)


def make(config: DecoderConfig = CONFIG, seed: int = 0) -> Decoder:
    """Every parameter random and large enough that each layer matters."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=None)))
    random = np.random.default_rng(seed)
    values = jax.tree.map(
        lambda one: jnp.asarray(random.normal(size=one.shape) * 0.4, one.dtype), state
    )
    return nnx.merge(graphdef, values)


def scaled(model: Decoder, layers: range, factor: float) -> Decoder:
    """What the layers add to the residual stream, scaled; 0 makes them the identity."""
    for layer in layers:
        for linear in (model.layers[layer].attention.output, model.layers[layer].mlp.down):
            linear.weight.set_value(linear.weight[...] * factor)
    return model


def batch(seed: int = 0, rows: int = 3) -> Batch:
    """Rows of two documents and padding, as the cache has them; the last row is padding."""
    random = np.random.default_rng(seed)
    segments = np.tile(np.asarray([1, 1, 1, 2, 2, 2, 0], np.int32), (rows, 1))
    segments[-1] = 0
    tokens = np.where(segments > 0, random.integers(0, 30, (rows, LENGTH)), 0).astype(np.int32)
    following = np.concatenate([segments[:, 1:], np.zeros((rows, 1), np.int32)], axis=1)
    mask = (segments > 0) & (segments == following)
    labels = np.where(mask, np.roll(tokens, -1, axis=1), 0).astype(np.int32)
    unused = np.zeros((rows, LENGTH), np.float32)
    return Batch(np.arange(rows, dtype=np.int32), tokens, segments, labels, mask, unused, None)


@partial(jax.jit, static_argnums=0)
def _logits(graphdef: Any, state: Any, *row: jax.Array) -> jax.Array:
    model = nnx.merge(graphdef, state)
    return model.unembed(model(*row))


def cross_entropy(model: Decoder, batches: list[Batch], legal: np.ndarray | None = None) -> float:
    """Nats per label in float64, each document scored alone, from all its logits."""
    losses = []
    for one in batches:
        for row in range(len(one.rows)):
            for segment in {1, 2} & set(one.segments[row].tolist()):
                tokens = one.tokens[row][one.segments[row] == segment]
                ones, order = np.ones_like(tokens), np.arange(len(tokens), dtype=np.int32)
                row_of = [jnp.asarray(each) for each in (tokens, ones, order)]
                logits = np.asarray(_logits(*nnx.split(model), *row_of), np.float64)
                if legal is not None:
                    logits[:, ~legal] = -np.inf
                logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
                losses += [-logp[place, tokens[place + 1]] for place in range(len(tokens) - 1)]
    return float(np.mean(losses))


@pytest.mark.parametrize(
    ("first", "last", "kept"),
    [(1, 2, [0, 3, 4]), (0, 0, [1, 2, 3, 4]), (3, 4, [0, 1, 2]), (0, 3, [4])],
)
def test_dropping_keeps_the_other_layers(first: int, last: int, kept: list[int]) -> None:
    model = make(replace(CONFIG, tied=True, qkv_bias=True))
    before = parameters_of(model)
    smaller = drop(model, first, last)
    assert smaller.config == replace(model.config, layers=len(kept))
    found = parameters_of(smaller)
    expected = {name: value for name, value in before.items() if not name.startswith("layers.")}
    for place, layer in enumerate(kept):
        inside = f"layers.{layer}."
        expected |= {
            name.replace(inside, f"layers.{place}.", 1): value
            for name, value in before.items()
            if name.startswith(inside)
        }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
    assert parameters_of(model).keys() == before.keys()


def test_layers_from_ten_on_are_numbers() -> None:
    names = {f"layers.{layer}.norm": jnp.asarray(layer) for layer in range(12)}
    kept = without_layers(names, 2, 9)
    assert {name: int(value) for name, value in kept.items()} == {
        "layers.0.norm": 0,
        "layers.1.norm": 1,
        "layers.2.norm": 10,
        "layers.3.norm": 11,
    }


@pytest.mark.parametrize(("first", "last"), [(0, 4), (2, 1), (4, 5), (-1, 0)])
def test_blocks_that_are_not_there(first: int, last: int) -> None:
    with pytest.raises(StudentError, match="from the layers 0 to 4"):
        drop(make(), first, last)


@pytest.mark.parametrize("tied", [True, False])
def test_trimming_cuts_rows_alone(tied: bool) -> None:
    model = make(replace(CONFIG, tied=tied))
    smaller = trim(model, 33)
    assert smaller.config == replace(model.config, vocabulary=33)
    row = [jnp.asarray(one) for one in (batch().tokens[0], batch().segments[0])]
    row.append(jnp.asarray([0, 1, 2, 0, 1, 2, 0], jnp.int32))
    whole = _logits(*nnx.split(model), *row)
    np.testing.assert_allclose(_logits(*nnx.split(smaller), *row), whole[:, :33], atol=1e-5)
    with pytest.raises(StudentError, match="41 of 40 rows"):
        trim(model, 41)


@pytest.mark.parametrize("first", [0, 2, 3])
def test_the_search_finds_layers_that_do_nothing(first: int) -> None:
    """The teacher is sure of the labels; without any of its other layers it is not."""
    model = scaled(make(), range(first, first + 2), 0.0)
    assert model.head is not None
    model.head.weight.set_value(model.head.weight[...] * 20.0)
    tokens = batch()
    found = best_block(model, 2, [sure_labels(model, tokens)])
    assert (found.first, found.last) == (first, first + 1)
    others = np.delete(found.cross_entropies, first)
    assert found.cross_entropies[first] + 0.1 < others.min()


def sure_labels(model: Decoder, given: Batch) -> Batch:
    """The batch with the model's own most likely token as each label."""
    labels = np.zeros_like(given.labels)
    order = np.asarray([0, 1, 2, 0, 1, 2, 0], np.int32)
    for row in range(len(given.rows)):
        places = (given.tokens[row], given.segments[row], order)
        logits = _logits(*nnx.split(model), *map(jnp.asarray, places))
        labels[row] = np.where(given.label_mask[row], np.argmax(logits, axis=-1), 0)
    return given._replace(labels=labels)


@pytest.mark.parametrize("masked", [False, True])
def test_the_table_is_the_cross_entropy_of_each_candidate(masked: bool) -> None:
    """Against float64 over single documents; 3 positions of a row at a time."""
    model = make()
    batches = [batch(0), batch(1)]
    legal = np.arange(VOCABULARY) < 31 if masked else None
    calls: list[tuple[int, int]] = []
    found = best_block(
        model, 3, batches, legal=legal, chunk=3, progress=lambda *call: calls.append(call)
    )
    expected = [cross_entropy(drop(model, first, first + 2), batches, legal) for first in range(3)]
    np.testing.assert_allclose(found.cross_entropies, expected, rtol=2e-5)
    assert found.first == int(np.argmin(expected))
    assert len({round(value, 3) for value in expected}) == 3
    assert found.labels == sum(int(one.label_mask.sum()) for one in batches) == 16
    assert calls == [(done, 6) for done in range(1, 7)]


def test_equal_blocks_give_the_lowest() -> None:
    found = best_block(scaled(make(), range(LAYERS), 0.0), 2, [batch()])
    assert (found.first, found.last) == (0, 1)
    assert len(set(found.cross_entropies)) == 1


def test_everything_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many candidates and batches there are, the model is traced as often as for one."""

    def traces(count: int, batches: int) -> int:
        found = []

        def counted(model: nnx.Module) -> Any:
            functions = original(model)

            def hidden(*arguments: Any) -> Any:
                found.append(1)
                return functions.hidden(*arguments)

            return replace(functions, hidden=hidden)

        original = prune.student_functions
        with monkeypatch.context() as patch:
            patch.setattr(prune, "student_functions", counted)
            best_block(make(), count, [batch(seed) for seed in range(batches)])
        return len(found)

    assert traces(4, 3) == traces(4, 1) == traces(1, 1) > 0


def test_a_block_without_which_nothing_is_finite_is_not_taken() -> None:
    model = scaled(make(), range(2, 3), float("nan"))
    found = best_block(model, 2, [batch()])
    assert np.isfinite(found.cross_entropies).tolist() == [False, True, True, False]
    assert found.first in (1, 2)


def test_nothing_finite_at_all() -> None:
    model = scaled(make(), range(0, LAYERS, 2), float("nan"))
    with pytest.raises(StudentError, match=r"without any 2 contiguous layers .* is not finite"):
        best_block(model, 2, [batch()])


@pytest.mark.parametrize("count", [0, 5, 6])
def test_counts_that_do_not_fit(count: int) -> None:
    with pytest.raises(StudentError, match=f"{count} of the layers 0 to 4"):
        best_block(make(), count, [batch()])


@pytest.mark.parametrize("rows", [[], [batch()._replace(label_mask=np.zeros((3, LENGTH), bool))]])
def test_no_labels_to_measure_by(rows: list[Batch]) -> None:
    with pytest.raises(StudentError, match="Raise --held-out, or name the layers"):
        best_block(make(), 2, rows)


def test_reading_stops_at_enough_labels() -> None:
    read = []

    def batches() -> Iterator[Batch]:
        for seed in range(5):
            read.append(seed)
            yield batch(seed)

    found = best_block(make(), 4, batches(), labels=9)
    assert read == [0, 1]
    assert found.labels == 16
