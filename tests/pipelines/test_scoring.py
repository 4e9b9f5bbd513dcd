"""Rows to targets: labels, chunks, micro-batches, devices, and what is never built."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from pipelines.scoring import (
    TeacherFunctions,
    labels_from_tokens,
    make_scorer,
    positions_from_segments,
    replicate,
    score_row,
    spread,
    teacher_functions,
)
from pipelines.targets import TargetSettings

WIDTH = 32
ROWS_OF_HEAD = 200  # more than the vocabulary has
VOCABULARY = 170
SETTINGS = TargetSettings(
    k=12, vocabulary=VOCABULARY, tail="sampled", exact=3, temperatures=(1.0,), seed=3, chunk=16
)
EXACT = dataclasses.replace(SETTINGS, tail="none", temperatures=(1.0, 2.0))


def parameters(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"embed": (ROWS_OF_HEAD, WIDTH), "mix": (WIDTH, WIDTH), "head": (ROWS_OF_HEAD, WIDTH)}
    return {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}


def hidden(params, tokens, segments, positions):
    """A sum over the tokens so far of the same segment: it shows every input."""
    before = jnp.arange(tokens.shape[0])[:, None] >= jnp.arange(tokens.shape[0])[None, :]
    seen = (before & (segments[:, None] == segments[None, :])).astype(jnp.float32)
    x = jnp.dot(seen, params["embed"][tokens], precision="highest")
    x = x / (1.0 + positions[:, None].astype(jnp.float32))
    return jnp.tanh(jnp.dot(x, params["mix"], precision="highest"))


def unembed(params, hidden):
    return jnp.dot(hidden, params["head"].T, precision="highest")


TEACHER = TeacherFunctions(hidden, unembed)


def rows_of(count, length, seed=0):
    """(tokens, segments, row numbers): rows of two documents and some padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCABULARY, size=(count, length), dtype=np.int32)
    cuts = np.sort(rng.integers(1, length + 1, size=(count, 2)), axis=1)
    place = np.arange(length)[None, :]
    segments = np.where(place < cuts[:, :1], 1, np.where(place < cuts[:, 1:], 2, 0))
    return tokens, segments.astype(np.int32), np.arange(100, 100 + count, dtype=np.int32)


def as_numpy(targets):
    return jax.tree.map(np.asarray, targets)


def assert_same_bytes(a, b):
    for name, x, y in zip(a._fields, a, b, strict=True):
        assert x.dtype == y.dtype, name
        assert x.shape == y.shape, name
        assert x.tobytes() == y.tobytes(), name


def test_positions_restart_in_each_segment():
    segments = jnp.array([1, 1, 1, 2, 3, 3, 0, 0], jnp.int32)
    np.testing.assert_array_equal(positions_from_segments(segments), [0, 1, 2, 0, 0, 1, 0, 1])
    np.testing.assert_array_equal(positions_from_segments(segments[:1]), [0])


def test_labels_stay_inside_a_document():
    tokens = jnp.array([10, 11, 12, 20, 21, 99, 98], jnp.int32)
    segments = jnp.array([1, 1, 1, 2, 2, 0, 0], jnp.int32)
    expected = [11, 12, -1, 21, -1, -1, -1]
    np.testing.assert_array_equal(labels_from_tokens(tokens, segments), expected)
    full = jnp.ones((7,), jnp.int32)
    np.testing.assert_array_equal(labels_from_tokens(tokens, full)[-2:], [98, -1])


@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (24, 8), (24, 7), (24, 64)])
def test_a_row_against_float64(length, chunk):
    settings = dataclasses.replace(EXACT, chunk=chunk)
    params = parameters()
    tokens, segments, rows = rows_of(1, length)
    targets = as_numpy(
        jax.jit(score_row, static_argnums=(0, 5))(
            TEACHER, params, tokens[0], segments[0], rows[0], settings
        )
    )
    w = {name: np.asarray(x, np.float64) for name, x in params.items()}
    place = positions_from_segments(jnp.asarray(segments[0]))
    seen = np.tril(segments[0][:, None] == segments[0][None, :])
    x = np.tanh((seen @ w["embed"][tokens[0]] / (1.0 + np.asarray(place)[:, None])) @ w["mix"])
    logits = (x @ w["head"].T)[:, :VOCABULARY]
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    best = np.argsort(-logprobs, axis=-1, kind="stable")[:, : settings.k]
    assert targets.ids.shape == (length, settings.k)
    assert targets.tail_logprobs.shape == (length, 2)
    np.testing.assert_array_equal(targets.ids, best)
    np.testing.assert_allclose(
        targets.logprobs, np.take_along_axis(logprobs, best, axis=-1), atol=1e-5
    )
    labels = np.asarray(labels_from_tokens(jnp.asarray(tokens[0]), jnp.asarray(segments[0])))
    expected = np.where(labels >= 0, logprobs[np.arange(length), labels], np.nan)
    np.testing.assert_allclose(targets.label_logprobs, expected, atol=1e-5)
    np.testing.assert_allclose(
        targets.entropy, -(np.exp(logprobs) * logprobs).sum(axis=-1), atol=1e-5
    )


def test_rows_of_the_head_without_a_token_are_never_seen():
    tokens, segments, rows = rows_of(1, 24)
    score = jax.jit(score_row, static_argnums=(0, 5))
    plain = parameters()
    raised = {**plain, "head": plain["head"].at[VOCABULARY:].mul(50.0)}
    a, b = (
        as_numpy(score(TEACHER, p, tokens[0], segments[0], rows[0], SETTINGS))
        for p in (plain, raised)
    )
    assert_same_bytes(a, b)
    assert a.ids.max() < VOCABULARY
    assert a.ids.min() >= 0


def test_a_teacher_narrower_than_the_vocabulary_is_refused():
    tokens, segments, rows = rows_of(1, 8)
    settings = dataclasses.replace(EXACT, vocabulary=300)
    with pytest.raises(
        ValueError, match="gives 200 logits per position and the vocabulary has 300"
    ):
        score_row(
            TEACHER, parameters(), *map(jnp.asarray, (tokens[0], segments[0], rows[0])), settings
        )


def test_a_teacher_that_gives_logits():
    def logits(params, *row):
        return unembed(params, hidden(params, *row))

    tokens, segments, rows = rows_of(1, 32)
    score = jax.jit(score_row, static_argnums=(0, 5))
    a, b = (
        as_numpy(score(f, parameters(), tokens[0], segments[0], rows[0], EXACT))
        for f in (TEACHER, TeacherFunctions(logits))
    )
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    np.testing.assert_array_equal(a.ids, b.ids)


class Model(nnx.Module):
    def __init__(self):
        self.embed = nnx.Param(parameters()["embed"])
        self.head = nnx.Param(parameters()["head"])

    def __call__(self, tokens, segments, positions):
        place = (positions + segments).astype(jnp.float32)
        return jnp.tanh(self.embed[...][tokens] + place[:, None])

    def unembed(self, hidden):
        return jnp.dot(hidden, self.head[...].T, precision="highest")


class ModelOfLogits(Model):
    unembed = None

    def __call__(self, tokens, segments, positions):
        return jnp.dot(super().__call__(tokens, segments, positions), self.head[...].T)


@pytest.mark.parametrize("kind", [Model, ModelOfLogits])
def test_an_nnx_model_becomes_pure_functions(kind):
    model = kind()
    functions, params = teacher_functions(model)
    tokens, segments, rows = rows_of(2, 24)
    place = jnp.stack([positions_from_segments(jnp.asarray(s)) for s in segments])
    expected = model(tokens[0], jnp.asarray(segments[0]), place[0])
    np.testing.assert_array_equal(
        functions.hidden(params, tokens[0], jnp.asarray(segments[0]), place[0]), expected
    )
    assert (functions.unembed is None) == (kind is ModelOfLogits)
    devices = jax.devices()[:2]
    scorer = make_scorer(functions, EXACT, 24, 1, devices)
    targets = as_numpy(scorer(replicate(params, devices), tokens, segments, rows))
    logits = expected if functions.unembed is None else model.unembed(expected)
    best = np.argsort(-np.asarray(logits)[:, :VOCABULARY], axis=-1, kind="stable")[:, : EXACT.k]
    np.testing.assert_array_equal(targets.ids[0], best)


def score_all(count, orders, settings, length=40):
    """Targets of 16 rows by `count` devices, once in each order, put back in the rows' order."""
    devices = jax.devices()[:count]
    scorer = make_scorer(TEACHER, settings, length, 2, devices)
    params = replicate(parameters(), devices)
    tokens, segments, rows = rows_of(16, length)
    for order in orders:
        parts = []
        for batch in np.asarray(order).reshape(-1, count * 2):
            parts.append(as_numpy(scorer(params, tokens[batch], segments[batch], rows[batch])))
        back = np.argsort(order)
        yield jax.tree.map(lambda *x, back=back: np.concatenate(x)[back], *parts)


def test_any_number_of_devices_and_any_order_give_the_same_bytes():
    assert len(jax.devices()) == 8
    orders = [np.arange(16), np.random.default_rng(0).permutation(16)]
    results = [t for count in (1, 2, 8) for t in score_all(count, orders, SETTINGS)]
    assert results[0].ids.shape == (16, 40, SETTINGS.k)
    for other in results[1:]:
        assert_same_bytes(results[0], other)
    assert len({row.tobytes() for row in results[0].label_logprobs}) == 16


def test_draws_depend_on_the_row_and_the_position():
    tokens = np.full((2, 32), 5, np.int32)
    segments = np.ones((2, 32), np.int32)
    teacher = TeacherFunctions(lambda p, t, s, q: jnp.zeros((t.shape[0], WIDTH)), unembed)
    devices = jax.devices()[:1]
    scorer = make_scorer(teacher, SETTINGS, 32, 2, devices)
    params = replicate(parameters(), devices)
    first = as_numpy(scorer(params, tokens, segments, np.array([4, 9], np.int32)))
    second = as_numpy(scorer(params, tokens, segments, np.array([9, 7], np.int32)))
    np.testing.assert_array_equal(first.ids[1], second.ids[0])
    assert (first.ids[0] != first.ids[1]).any(axis=1).mean() > 0.9
    assert len(np.unique(first.ids[0], axis=0)) > 20


def test_one_shape_is_compiled_once_and_parameters_stay_where_they_are(caplog):
    devices = jax.devices()
    traces = []

    def counted(params, *row):
        traces.append(1)
        return hidden(params, *row)

    scorer = make_scorer(TeacherFunctions(counted, unembed), EXACT, 40, 2, devices)
    params = replicate(parameters(), devices)
    for leaf in jax.tree.leaves(params):
        assert leaf.is_fully_replicated
        assert leaf.sharding.device_set == set(devices)
    tokens, segments, rows = rows_of(16, 40)
    scorer(params, tokens, segments, rows)
    assert len(traces) == 1
    with jax.log_compiles(), jax.transfer_guard_device_to_device("disallow"):
        for shift in range(1, 4):
            order = np.roll(np.arange(16), shift)
            scorer(params, tokens[order], segments[order], rows[order])
    assert len(traces) == 1
    assert not [r for r in caplog.records if "ompil" in r.getMessage()]
    with (
        jax.transfer_guard_device_to_device("disallow"),
        pytest.raises(Exception, match=r"(?i)disallowed device-to-device transfer"),
    ):
        scorer(jax.device_put(parameters(), devices[0]), tokens, segments, rows)


def avals(jaxpr):
    """The shapes of every value in a jaxpr and in those inside it."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield variable.aval.shape
        for inner in jaxprs_in_params(equation.params):
            yield from avals(inner)


@pytest.mark.parametrize("settings", [SETTINGS, EXACT], ids=["sampled", "none"])
def test_logits_never_exist_for_a_whole_row(settings):
    length, vocabulary, micro_batch = 512, 5000, 2
    settings = dataclasses.replace(settings, vocabulary=vocabulary)
    params = {**parameters(), "head": jnp.zeros((vocabulary, WIDTH))}
    tokens, segments, rows = rows_of(micro_batch, length)
    teacher = TeacherFunctions(lambda p, tokens, *_: p["embed"][tokens], unembed)
    batch = jax.vmap(
        lambda p, t, s, r: score_row(teacher, p, t, s, r, settings), in_axes=(None, 0, 0, 0)
    )
    jaxpr = jax.make_jaxpr(batch)(params, tokens, segments, rows)
    largest = max(int(np.prod(shape)) for shape in avals(jaxpr.jaxpr))
    chunk = micro_batch * settings.chunk * vocabulary
    assert chunk <= largest < 1.1 * chunk
    memory = jax.jit(batch).lower(params, tokens, segments, rows).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 8 * 4 * chunk < 0.5 * 4 * micro_batch * length * vocabulary


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, s, r: (t[:-1], s, r), r"tokens is int32\[3, 24\]; expected int32\[4, 24\]"),
        (lambda t, s, r: (t, s[:, 1:], r), r"segments is int32\[4, 23\]; expected int32\[4, 24\]"),
        (lambda t, s, r: (t, s, r.astype(np.int64)), r"rows is int64\[4\]; expected int32\[4\]"),
    ],
)
def test_another_shape_is_refused(change, message):
    scorer = make_scorer(TEACHER, SETTINGS, 24, 2, jax.devices()[:2])
    with pytest.raises(ValueError, match=message):
        scorer(parameters(), *change(*rows_of(4, 24)))


def test_one_teacher_spread_over_devices_agrees_with_a_copy_on_one():
    params, devices = parameters(), jax.local_devices()[:4]
    batch = rows_of(4, 24)
    spread_out = spread(params, devices)
    assert all(not x.sharding.is_fully_replicated for x in jax.tree.leaves(spread_out))
    whole = make_scorer(TEACHER, EXACT, 24, 4, devices[:1])
    divided = make_scorer(TEACHER, EXACT, 24, 4, devices, sharded=True)
    one = as_numpy(whole(replicate(params, devices[:1]), *batch))
    other = as_numpy(divided(spread_out, *batch))
    assert other.ids.shape == (4, 24, EXACT.k)
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    np.testing.assert_allclose(one.tail_logprobs, other.tail_logprobs, atol=1e-5)
    np.testing.assert_allclose(one.entropy, other.entropy, atol=1e-5)
