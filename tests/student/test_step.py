"""One step: each label weighs the same wherever it is; gradients are the whole model's."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from decoder import Decoder, DecoderConfig
from decoder.rows import positions_from_segments
from student.batches import Batch
from student.errors import StudentError
from student.functions import parameters_of, student_functions
from student.objectives import Objective
from student.optimiser import make_optimizer
from student.options import TrainOptions
from student.step import (
    LossSettings,
    State,
    check_batch,
    hidden_states,
    make_gradients,
    make_step,
    place,
    replicate,
)
from tests.student import plain
from tests.student.dense import NO_ID, softmax

VOCABULARY = 12
CONFIG = DecoderConfig(
    vocabulary=VOCABULARY,
    width=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp_width=16,
    max_positions=64,
    tied=True,
)
BUCKET = Objective("bucket", no_id=NO_ID)
SETTINGS = LossSettings(BUCKET, chunk=20)
# Rows of 6; 16 of them, two for each of 8 devices. Device 2 has few labels, 7 nothing at all.
SEGMENTS = np.array(
    [[1, 1, 1, 1, 1, 1], [1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 0, 0]]
    + [[1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    + [[1, 1, 1, 1, 2, 2]] * 8
    + [[0, 0, 0, 0, 0, 0]] * 2
)
ALPHA = np.float32(0.3)


@pytest.fixture(scope="module")
def model() -> Decoder:
    """Weights of another size than at the beginning of training, so that all of it matters."""
    found = Decoder(CONFIG, rngs=nnx.Rngs(0))
    random = np.random.default_rng(0)
    for _, variable in nnx.to_flat_state(nnx.state(found)):
        value = variable.get_value()
        near = 1.0 if value.ndim == 1 else 0.0
        drawn = near + 0.3 * random.normal(size=value.shape)
        variable.set_value(jnp.asarray(drawn, jnp.float32))
    return found


@pytest.fixture(scope="module")
def batch() -> Batch:
    return plain.make_batch(SEGMENTS, VOCABULARY)[0]


@pytest.fixture(scope="module")
def teacher() -> np.ndarray:
    return plain.make_batch(SEGMENTS, VOCABULARY)[1]


def gradients_of(
    model: Decoder, settings: LossSettings = SETTINGS, devices: int = 1, remat: bool = False
) -> Any:
    """A function (batch, accumulation, alpha) to gradients and metrics, compiled per shape."""
    used = jax.devices()[:devices]
    compiled = make_gradients(student_functions(model, remat), settings, used)
    parameters = replicate(parameters_of(model), used)
    return lambda batch, accumulation=1, alpha=ALPHA: compiled(
        parameters, place(batch, accumulation, used), alpha
    )


@pytest.fixture(scope="module")
def one_device(model) -> Any:
    return gradients_of(model)


@pytest.fixture(scope="module")
def found(one_device, batch) -> Any:
    return one_device(batch)


def assert_same_gradients(found: Any, expected: Any, most: float = 2e-6) -> None:
    """Relative L2 per tensor."""
    assert found.keys() == expected.keys()
    for name, reference in expected.items():
        reference = np.asarray(reference, np.float64)
        apart = np.linalg.norm(np.asarray(found[name], np.float64) - reference)
        assert apart <= most * np.linalg.norm(reference), name
        assert np.linalg.norm(reference) > 0, name


def test_eight_devices_give_the_gradients_of_one(model, batch, found):
    """Uneven labels, one device of padding only; two micro-batches on each."""
    per_device = batch.label_mask.reshape(8, -1).sum(axis=1)
    assert len(set(per_device.tolist())) >= 4
    assert per_device[7] == 0
    assert (batch.rows[14:] == -1).all()
    gradients, metrics = gradients_of(model, devices=8)(batch, 2)
    assert_same_gradients(gradients, found[0])
    assert float(metrics.labels) == float(found[1].labels) == per_device.sum()
    for ours, reference in zip(metrics.sums, found[1].sums, strict=True):
        np.testing.assert_allclose(ours, reference, rtol=2e-6)
    np.testing.assert_allclose(metrics.gradient_norm, found[1].gradient_norm, rtol=2e-6)


def test_gradients_are_those_of_a_dense_loss_through_the_whole_model(model, batch, teacher, found):
    """C51: a plain `jax.grad` of the unfused loss; the tied embedding gets both uses."""
    graph, state = nnx.split(model)
    p = jnp.asarray(softmax(teacher), jnp.float32)
    mask = jnp.asarray(batch.label_mask)

    def loss(read: Any, predict: Any, others: Any) -> Any:
        whole = nnx.merge(
            graph, nnx.from_flat_state([*others.items(), (("embedding", "weight"), read)])
        )
        tokens, segments = jnp.asarray(batch.tokens), jnp.asarray(batch.segments)
        hidden = jax.vmap(whole)(tokens, segments, jax.vmap(positions_from_segments)(segments))
        logq = jax.nn.log_softmax(jnp.matmul(hidden, predict.T, precision="highest"))
        ce = -jnp.take_along_axis(logq, jnp.asarray(batch.labels)[..., None], axis=-1)[..., 0]
        kl = (p * (jnp.log(p) - logq)).sum(-1)
        return jnp.where(mask, 0.3 * ce + 0.7 * kl, 0.0).sum() / mask.sum(dtype=jnp.float32)

    flat = dict(nnx.to_flat_state(state))
    table = flat.pop(("embedding", "weight"))
    value, (read, predict, others) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(
        table, table.get_value(), flat
    )
    gradients, metrics = found
    np.testing.assert_allclose(metrics.sums.loss / metrics.labels, value, rtol=1e-5)
    expected = {".".join(map(str, path)): x.get_value() for path, x in others.items()}
    read = read.get_value()
    assert_same_gradients(gradients, {**expected, "embedding.weight": read + predict}, 1e-5)
    for part in (read, predict):
        assert np.linalg.norm(part) > 0.1 * np.linalg.norm(gradients["embedding.weight"])
    norm = math.sqrt(sum(float((np.asarray(x) ** 2).sum()) for x in gradients.values()))
    assert float(metrics.gradient_norm) == pytest.approx(norm, rel=1e-5)


def test_another_teacher_gives_other_gradients_and_no_teacher_none(model, one_device, batch, found):
    """C08."""
    other = plain.make_batch(SEGMENTS, VOCABULARY, tokens=batch.tokens, seed=1)[0]
    assert (other.labels == batch.labels).all()
    changed = one_device(batch._replace(targets=other.targets))[0]
    difference = [np.abs(np.asarray(changed[x]) - np.asarray(found[0][x])).max() for x in changed]
    assert min(difference) > 1e-4
    labels = gradients_of(model, LossSettings(Objective("labels", no_id=NO_ID), chunk=20))
    plain_ce = labels(batch._replace(targets=None), alpha=np.float32(1))
    for targets in (batch.targets, other.targets):
        gradients, metrics = one_device(batch._replace(targets=targets), alpha=np.float32(1))
        for name, reference in plain_ce[0].items():
            np.testing.assert_allclose(gradients[name], reference, atol=1e-7, rtol=1e-6)
        np.testing.assert_allclose(metrics.sums.loss, plain_ce[1].sums.loss, rtol=1e-6)


def test_rematerialisation_gives_the_same_gradients(model, batch, found):
    gradients, metrics = gradients_of(model, remat=True)(batch)
    assert_same_gradients(gradients, found[0], 1e-6)
    np.testing.assert_allclose(metrics.sums.loss, found[1].sums.loss, rtol=1e-6)


def test_a_batch_of_padding_alone_changes_nothing(one_device, batch):
    empty = plain.make_batch(np.zeros_like(SEGMENTS), VOCABULARY)[0]
    # What a row of padding holds is the arrays' fill.
    targets = jax.tree.map(
        lambda x: np.full_like(x, np.nan if x.dtype.kind == "f" else x.max()), empty.targets
    )
    gradients, metrics = one_device(empty._replace(targets=targets))
    assert all((np.asarray(x) == 0).all() for x in gradients.values())
    assert [float(x) for x in (*metrics.sums, metrics.labels, metrics.gradient_norm)] == [0.0] * 5


def test_a_step_without_labels_changes_nothing_at_all(model, batch):
    """Neither decay nor momentum nor the count of the schedule; the next step is as without it."""
    devices = jax.devices()[:2]
    optimizer = make_optimizer(options(weight_decay=0.5, warmup=0.5), 10)
    step = make_step(student_functions(model), SETTINGS, optimizer, devices)
    unlabelled = batch._replace(
        labels=np.zeros_like(batch.labels), label_mask=np.zeros_like(batch.label_mask)
    )
    # On the second device there is none, and in the first micro-batch there is none.
    some = batch.label_mask.copy()
    some[4:] = False
    some[:2] = False
    few = batch._replace(labels=np.where(some, batch.labels, 0), label_mask=some)

    def run(batches: list[Batch]) -> list[list[np.ndarray]]:
        parameters = replicate(jax.tree.map(jnp.array, parameters_of(model)), devices)
        state = State(parameters, replicate(optimizer.init(parameters), devices))
        seen = []
        for each in batches:
            state, metrics = step(state, place(each, 2, devices), ALPHA)
            assert float(metrics.labels) == each.label_mask.sum()
            seen.append([np.asarray(x) for x in jax.tree.leaves(state)])
        return seen

    first, again, second, third = run([batch, unlabelled, few, batch])
    for found, expected in zip(
        [again, second, third], [first, *run([batch, few, batch])[1:]], strict=True
    ):
        for left, right in zip(found, expected, strict=True):
            assert (left.dtype, left.tobytes()) == (right.dtype, right.tobytes())
    assert any((a != b).any() for a, b in zip(first, second, strict=True))
    (before, *_) = run([unlabelled])
    fresh = State(parameters_of(model), optimizer.init(parameters_of(model)))
    for left, right in zip(before, jax.tree.leaves(fresh), strict=True):
        assert left.tobytes() == np.asarray(right).tobytes()


def options(**changes: Any) -> TrainOptions:
    given = {"cache": "c", "student": "s", "out": "o", "learning_rate": 0.1, "warmup": 0.0}
    return TrainOptions(**{**given, **changes})


def test_in_bfloat16_what_is_kept_stays_float32(model, batch, found):
    """Parameters and optimiser; the state that went in is given up, and has no device axis."""
    used = jax.devices()[:2]
    optimizer = make_optimizer(options(), 10)
    # A copy, for on the first device it may be the model's own arrays that are given up.
    parameters = replicate(jax.tree.map(np.array, parameters_of(model)), used)
    state = State(parameters, replicate(optimizer.init(parameters), used))
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    settings = LossSettings(BUCKET, "bfloat16", chunk=20)
    step = make_step(student_functions(model), settings, optimizer, used)
    after, metrics = step(state, place(batch, 1, used), ALPHA)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == shapes
    assert {str(x.dtype) for x in after.parameters.values()} == {"float32"}
    assert {str(x.dtype) for x in jax.tree.leaves(after)} == {"float32", "int32"}
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert not any(x.is_deleted() for x in jax.tree.leaves(after))
    # The result goes in again.
    second = step(after, place(batch, 1, used), ALPHA)[1]
    assert float(second.sums.loss) < float(metrics.sums.loss)
    # It was bfloat16, and near float32's.
    assert float(metrics.sums.loss) == pytest.approx(float(found[1].sums.loss), rel=0.02)
    assert float(metrics.sums.loss) != pytest.approx(float(found[1].sums.loss), rel=1e-6)
    assert metrics.sums.loss.dtype == jnp.float32


def test_documents_of_one_row_do_not_see_each_other(model):
    """C14: B is as alone, whatever A is; and a document's second copy is like its first."""
    functions, parameters = student_functions(model), parameters_of(model)
    a, other, b = [3, 7, 1, 9], [5, 5, 2, 8], [4, 6, 10, 2]
    rows = {
        "A then B": ([*a, *b], [1] * 4 + [2] * 4),
        "other then B": ([*other, *b], [1] * 4 + [2] * 4),
        "B alone": ([*b, 0, 0, 0, 0], [1] * 4 + [0] * 4),
        "B twice": ([*b, *b], [1] * 4 + [2] * 4),
        "B goes on": ([*a, *b], [1] * 8),
    }
    tokens, segments = (np.array(x) for x in zip(*rows.values(), strict=True))
    batch = plain.make_batch(segments, VOCABULARY, tokens=tokens)[0]
    batch = jax.tree.map(jnp.asarray, batch)
    compute = jax.jit(lambda p, b: hidden_states(functions, p, b, "float32"))
    hidden = compute(parameters, batch)
    assert hidden.shape == (5 * 8, 16)
    found = dict(zip(rows, np.asarray(hidden).reshape(5, 8, 16), strict=True))
    alone = found["B alone"][:4]
    np.testing.assert_allclose(found["A then B"][4:], alone, atol=1e-6)
    np.testing.assert_array_equal(found["other then B"][4:], found["A then B"][4:])
    np.testing.assert_allclose(found["B twice"][4:], found["B twice"][:4], atol=1e-6)
    # Leaks and wrong positions would show.
    assert np.abs(found["B goes on"][4:] - alone).max() > 0.1
    assert np.abs(found["B goes on"][:4] - found["other then B"][:4]).max() > 0.1


# Losses that are known: two tokens, label 0, a logit of 0 for it and d for the other one.
def logit(loss: float) -> float:
    return math.log(math.expm1(loss)) if loss else -100.0


def two_way(losses: list[list[float]]) -> tuple[dict[str, Any], Batch]:
    """Rows of labels with these losses: position t reads token t + 1, whose logits give it.

    The teacher is sure of token 0, so that CE and KD are the same. A table of 64 tokens with
    logits for the first two.
    """
    flat = sorted({loss for row in losses for loss in row})
    table = np.zeros((8, 2), np.float32)
    table[1 : len(flat) + 1, 1] = [logit(loss) for loss in flat]
    length = max(map(len, losses)) + 1
    tokens, segments = np.zeros((2, len(losses), length), int)
    for row, each in enumerate(losses):
        segments[row, : len(each) + 1] = range(1, len(each) + 2)
        tokens[row, : len(each)] = [1 + flat.index(loss) for loss in each]
    sure = np.zeros((*tokens.shape, 2))
    sure[..., 1] = -80.0
    batch = plain.make_batch(segments, 2, tokens=tokens, teacher=sure)[0]
    # Each token is a document of its own, so that the student sees it alone; label it all the same.
    mask = segments > 0
    mask[np.arange(len(losses)), [len(each) for each in losses]] = False
    batch = batch._replace(tokens=tokens.astype(np.int32), label_mask=mask)
    return {**plain.identity(2), "table": jnp.asarray(table)}, batch


def test_a_label_weighs_the_same_in_any_micro_batch():
    """C41: {1 token, loss 4} and {3 tokens, loss 0} give 1, and the gradients of one batch."""
    parameters, batch = two_way([[4.0], [0.0, 0.0, 0.0]])
    used = jax.devices()[:1]
    compute = make_gradients(plain.functions(2), SETTINGS, used)
    found = [
        compute(replicate(parameters, used), place(batch, accumulation, used), np.float32(0.5))
        for accumulation in (2, 1)
    ]
    for _, metrics in found:
        assert float(metrics.labels) == 4
        assert float(metrics.sums.loss / metrics.labels) == pytest.approx(1.0, abs=1e-6)
    for name in ("table", "head", "bias"):
        np.testing.assert_allclose(found[0][0][name], found[1][0][name], atol=1e-6)
    # d loss / d logit of the label is -(1 - e^-4), of one label in four.
    slope = -math.expm1(-4.0) / 4
    np.testing.assert_allclose(found[0][0]["bias"], [-slope, slope], atol=1e-6)


def test_a_label_weighs_the_same_on_any_device():
    """C42: 5 tokens of loss 1 on one device, 1 of loss 7 on the other: 2, and the update of one
    device, for KD, CE and their mix. By plain descent: AdamW's first step has one length only."""
    parameters, batch = two_way([[1.0] * 5, [7.0]])
    optimizer = optax.sgd(0.5)
    found: dict[Any, Any] = {}
    for count in (1, 2):
        used = jax.devices()[:count]
        step = make_step(plain.functions(2), SETTINGS, optimizer, used)
        for alpha in (0.0, 1.0, 0.5):
            # Copies, for the step gives its state up.
            mine = replicate(jax.tree.map(np.array, parameters), used)
            state = State(mine, replicate(optimizer.init(mine), used))
            state, metrics = step(state, place(batch, 1, used), np.float32(alpha))
            assert float(metrics.labels) == 6
            assert float(metrics.sums.loss / metrics.labels) == pytest.approx(2.0, abs=2e-6)
            found[count, alpha] = jax.tree.map(np.asarray, state.parameters)
    for alpha in (0.0, 1.0, 0.5):
        for name, reference in found[1, alpha].items():
            np.testing.assert_allclose(found[2, alpha][name], reference, atol=1e-6)
            assert np.abs(reference - parameters[name]).max() > 1e-3


def test_rows_that_no_token_has_get_no_probability():
    """C21: a bias of 50 on them changes no loss and no gradient."""
    batch = plain.make_batch(SEGMENTS[:4], VOCABULARY)[0]
    settings = LossSettings(BUCKET, legal=np.arange(18) < VOCABULARY, chunk=20)
    used = jax.devices()[:1]
    compute = make_gradients(plain.functions(18), settings, used)
    parameters = plain.parameters(18, VOCABULARY)
    raised = {**parameters, "bias": parameters["bias"].at[VOCABULARY:].set(50.0)}
    found = [
        compute(replicate(x, used), place(batch, 1, used), ALPHA) for x in (parameters, raised)
    ]
    assert float(found[0][1].sums.loss) == float(found[1][1].sums.loss)
    for name, gradient in found[0][0].items():
        np.testing.assert_array_equal(found[1][0][name], gradient)
    assert (np.asarray(found[0][0]["bias"])[VOCABULARY:] == 0).all()
    assert (np.asarray(found[0][0]["bias"])[:VOCABULARY] != 0).all()


def test_a_batch_that_cannot_be_cut_is_refused():
    check_batch(48, 3, 8)
    message = (
        "--batch 20 cannot be cut into --accumulation 2 micro-batches on each of 8 devices: "
        "expected a multiple of 16. Change the batch or the accumulation."
    )
    with pytest.raises(StudentError) as error:
        check_batch(20, 2, 8)
    assert str(error.value) == message
    with pytest.raises(StudentError, match="--batch 16 cannot be cut into --accumulation 3"):
        place(plain.make_batch(SEGMENTS, VOCABULARY)[0], 3, jax.devices()[:1])


def test_what_is_placed_and_replicated():
    """Rows in order over devices, then micro-batches; replicated trees without a device axis."""
    batch, used = plain.make_batch(SEGMENTS, VOCABULARY)[0], jax.devices()[:2]
    placed = place(batch, 4, used)
    assert placed.tokens.shape == (2, 4, 2, 6)
    np.testing.assert_array_equal(placed.tokens, batch.tokens.reshape(2, 4, 2, 6))
    assert [shard.data.shape for shard in placed.tokens.addressable_shards] == [(1, 4, 2, 6)] * 2
    tree = replicate({"x": np.arange(3.0, dtype=np.float32)}, used)
    assert tree["x"].shape == (3,)
    assert tree["x"].devices() == set(used)
    assert float(optax.tree.norm(tree)) == pytest.approx(math.sqrt(5))
