from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from student.batches import Targets
from student.losses import fused_loss, loss_and_gradient, masked, position_losses
from student.objectives import Objective
from tests.student import dense
from tests.student.dense import NO_ID, positions_of, targets_of

MODES = [
    ("labels", "forward", 1.0),
    ("sampled", "forward", 1.0),
    ("sampled", "forward", 2.0),
    *[("bucket", way, 1.0) for way in ("forward", "reverse", "js", "tv")],
    *[("bucket", way, 2.0) for way in ("forward", "reverse", "js", "tv")],
    ("renormalise", "forward", 1.0),
    ("renormalise", "reverse", 2.0),
    ("renormalise", "js", 1.0),
    ("renormalise", "tv", 4.0),
]
EXACT_MODES = [mode for mode in MODES if mode[0] != "labels"]


def objective(kind: Any, way: Any = "forward", temperature=1.0, **more) -> Objective:
    return Objective(kind, way, temperature=temperature, no_id=NO_ID, **more)


# Compiling is nearly all of the time, so all cases but the largest are padded to one shape: rows
# that do not count, tokens whose probability is exactly 0 on both sides, and empty entries.
N, VOCABULARY, K = 8, 1_000, 64
NEVER = -1e4


@partial(jax.jit, static_argnums=3)
def compiled(logits, positions, alpha, chosen):
    sums, gradient = loss_and_gradient(logits, positions, alpha, chosen)
    return (sums, gradient, *position_losses(logits, positions, chosen))


def widened(values, shape, fill):
    """Padded with `fill`; and further rows like the first."""
    values = np.asarray(values)
    width = [(0, 0), *((0, most - size) for most, size in zip(shape, values.shape[1:]))]  # noqa: B905
    padded = np.pad(values, width, constant_values=fill)
    return np.concatenate([padded, np.repeat(padded[:1], N - len(values), axis=0)])


def widened_targets(targets):
    ids, logprobs, *others = targets
    padded = widened(ids, (K,), NO_ID), widened(logprobs, (K,), np.nan)
    return Targets(*padded, *(widened(x, (), 0) for x in others))


def counted(count, mask=None):
    mask = np.ones(count, bool) if mask is None else np.asarray(mask)
    return np.concatenate([mask, np.zeros(N - count, bool)])


def ours(student, labels, targets, alpha, chosen, mask=None):
    """The four results for logits [n, vocabulary], unpadded again."""
    n, vocabulary = student.shape
    logits = widened(student, (VOCABULARY,), NEVER).astype(np.float32)
    positions = positions_of(widened(labels, (), 0), widened_targets(targets), counted(n, mask))
    sums, gradient, ce, kd = compiled(logits, positions, jnp.float32(alpha), chosen)
    gradient = np.asarray(gradient)
    assert (gradient[n:] == 0).all()
    assert (gradient[:, vocabulary:] == 0).all()
    return sums.loss, gradient[:n, :vocabulary], ce[:n], kd[:n]


def theirs(mode, teacher, student, labels, targets, alpha):
    """The four results of the dense reference."""
    (n, vocabulary), (kind, way, temperature) = student.shape, mode
    loss, gradient, ce, kd = dense.loss(
        kind,
        widened(teacher, (VOCABULARY,), -np.inf),
        widened(student, (VOCABULARY,), NEVER),
        widened(labels, (), 0),
        widened_targets(targets),
        alpha=alpha,
        temperature=temperature,
        divergence=way,
        mask=counted(n),
    )
    return loss, gradient[:n, :vocabulary], ce[:n], kd[:n]


def results(kind, way, temperature, teacher, student, labels, k, alpha, beta=0.5):
    """Our loss, gradient, CE and KD."""
    targets = targets_of(teacher, k, temperature)
    return ours(student, labels, targets, alpha, objective(kind, way, temperature, beta=beta))


def draw(vocabulary, n=2):
    random = np.random.default_rng(0)
    teacher = random.normal(size=(n, vocabulary)) * 3
    student = teacher + random.normal(size=(n, vocabulary))
    return teacher, student, random.integers(0, vocabulary, n)


def assert_close(found, expected):
    assert abs(found[0] - expected[0]) <= 1e-5 * max(1.0, abs(expected[0]))
    scale = np.abs(expected[1]).max()
    np.testing.assert_allclose(found[1], expected[1], atol=1e-5 * scale, rtol=1e-4)
    np.testing.assert_allclose(found[2], expected[2], atol=1e-5)
    np.testing.assert_allclose(found[3], expected[3], atol=1e-5)


@pytest.mark.parametrize(("kind", "way", "temperature"), MODES)
def test_value_and_gradient_equal_a_dense_reference_in_float64(kind, way, temperature):
    teacher, student, labels = draw(VOCABULARY, n=N)
    targets = targets_of(teacher, K, temperature, 30 if kind == "sampled" else 0)
    found = ours(student, labels, targets, 0.3, objective(kind, way, temperature))
    assert_close(found, theirs((kind, way, temperature), teacher, student, labels, targets, 0.3))


@pytest.mark.parametrize(("kind", "way", "temperature"), MODES)
def test_the_same_at_a_vocabulary_of_151_936(kind, way, temperature):
    teacher, student, labels = draw(151_936)
    targets = targets_of(teacher, 12, temperature, 6 if kind == "sampled" else 0)
    chosen = objective(kind, way, temperature)
    logits, positions = jnp.asarray(student, jnp.float32), positions_of(labels, targets)
    sums, gradient, ce, kd = compiled(logits, positions, jnp.float32(0.3), chosen)
    settings = {"alpha": 0.3, "temperature": temperature, "divergence": way}
    expected = dense.loss(kind, teacher, student, labels, targets, **settings)
    assert_close((sums.loss, gradient, ce, kd), expected)


# Without room, k is the vocabulary, and there is nothing that could be outside the entries.
@pytest.mark.parametrize(
    ("kind", "temperature", "room"),
    [(kind, t, True) for kind in ("sampled", "bucket", "renormalise") for t in (1.0, 2.0)]
    + [("sampled", 1.0, False), ("bucket", 1.0, False), ("bucket", 2.0, False)],
)
def test_all_entries_exact_equal_dense_kl(kind, temperature, room):
    random = np.random.default_rng(1)
    teacher, student = random.normal(size=(2, 4, 50)) * 2
    p = dense.softmax(teacher / temperature)
    q = dense.softmax(student / temperature)
    targets, labels = targets_of(teacher, 50, temperature), [0, 1, 2, 3]
    chosen = objective(kind, temperature=temperature)
    if room:
        _, gradient, _, kd = ours(student, labels, targets, 0.0, chosen)
    else:
        logits, positions = jnp.asarray(student, jnp.float32), positions_of(labels, targets)
        _, gradient, _, kd = compiled(logits, positions, jnp.float32(0.0), chosen)
    np.testing.assert_allclose(kd, (p * np.log(p / q)).sum(-1), atol=1e-6)
    np.testing.assert_allclose(gradient, temperature * (q - p), atol=1e-6)


@pytest.mark.parametrize(("kind", "way", "temperature"), EXACT_MODES)
def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient(kind, way, temperature):
    """C01: both sides on one support. The mixed form gives 0.126928."""
    logits = np.array([[2.0, 1.0, 0.0, -1.0]])
    k = 4 if kind == "sampled" else 2
    loss, gradient, _, kd = results(kind, way, temperature, logits, logits, [1], k=k, alpha=0.0)
    assert abs(float(kd[0])) < 1e-6
    assert abs(float(loss)) < 1e-6
    assert np.abs(gradient).max() < 1e-6


def test_the_soft_term_has_its_factor_of_temperature_squared():
    """C04."""
    for kind in ("sampled", "bucket", "renormalise"):
        loss, gradient, ce, kd = results(
            kind, "forward", 2.0, np.array([[2.0, 0.0]]), np.zeros((1, 2)), [0], k=2, alpha=0.0
        )
        assert float(kd[0]) == pytest.approx(0.110944, abs=1e-6)
        assert float(loss) == pytest.approx(0.443776, abs=1e-6)
        np.testing.assert_allclose(gradient, [[-0.462117, 0.462117]], atol=1e-6)
        assert float(ce[0]) == pytest.approx(np.log(2), abs=1e-6)


@pytest.mark.parametrize(
    ("way", "beta", "value"),
    [
        ("forward", 0.5, 0.368064),
        ("reverse", 0.5, 0.510826),
        ("js", 0.5, 0.101749),
        ("js", 0.999, 0.00051),
        ("tv", 0.5, 0.4),
    ],
)
def test_the_direction_of_a_divergence(way, beta, value):
    """C05: p = (.9, .1), q = (.5, .5)."""
    teacher = np.log([[0.9, 0.1]])
    _, _, _, kd = results(
        "bucket", way, 1.0, teacher, np.zeros((1, 2)), [0], k=2, alpha=0.0, beta=beta
    )
    assert float(kd[0]) == pytest.approx(value, abs=2e-6)


def test_a_temperature_takes_the_mass_of_that_temperature():
    """C03: [4, 2, 0, 0], k = 2, at T = 2: exact .610296, .224515 and tail .165189."""
    teacher = np.array([[4.0, 2.0, 0.0, 0.0]])
    p = np.array([0.610296, 0.224515, 0.165189])
    student = np.array([[0.3, -0.2, 0.1, 0.5]])
    q = dense.softmax(student / 2)[0]
    q = np.array([q[0], q[1], q[2] + q[3]])
    _, _, _, kd = results("bucket", "forward", 2.0, teacher, student, [0], k=2, alpha=0.0)
    assert float(kd[0]) == pytest.approx((p * np.log(p / q)).sum(), abs=2e-6)
    _, _, _, kd = results("renormalise", "forward", 2.0, teacher, student, [0], k=2, alpha=0.0)
    p, q = np.array([0.731059, 0.268941]), q[:2] / q[:2].sum()
    assert float(kd[0]) == pytest.approx((p * np.log(p / q)).sum(), abs=2e-6)


@pytest.mark.parametrize(("kind", "way", "temperature"), MODES)
def test_gradients_are_finite_whatever_the_student_thinks(kind, way, temperature):
    """All of its mass inside the entries, or outside, at logit gaps of 20, 60 and 300."""
    teacher = np.random.default_rng(2).normal(size=(6, 40))
    targets = targets_of(teacher, 6, temperature, 3 if kind == "sampled" else 0)
    student = np.zeros((6, 40))
    for row, gap in enumerate((20.0, -20.0, 60.0, -60.0, 300.0, -300.0)):
        student[row, targets.ids[row].astype(int)] = gap
    labels = list(range(6))
    loss, gradient, _, _ = ours(student, labels, targets, 0.3, objective(kind, way, temperature))
    expected = theirs((kind, way, temperature), teacher, student, labels, targets, 0.3)
    assert np.isfinite([loss, *gradient.flat]).all()
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("kind", "way", "temperature"), MODES)
def test_a_teacher_with_impossible_tokens(kind, way, temperature):
    """Probabilities of exactly 0, among the exact entries and as the whole tail."""
    teacher = np.full((1, 9), -np.inf)
    teacher[0, :3] = [1.0, 0.0, -1.0]
    student = np.linspace(-1, 1, 9)[None]
    with np.errstate(divide="ignore", invalid="ignore"):
        targets = targets_of(teacher, 5, temperature)
    assert np.isneginf(targets.logprobs[0, 3:]).all()
    assert np.isneginf(targets.tail_logprobs).all()
    targets = targets._replace(entropy=np.array([0.8324], np.float32))
    loss, gradient, _, _ = ours(student, [0], targets, 0.5, objective(kind, way, temperature))
    assert np.isfinite([loss, *gradient.flat]).all()
    expected = theirs((kind, way, temperature), teacher, student, [0], targets, 0.5)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "way", "temperature"), MODES)
def test_what_stands_at_positions_without_a_label_changes_nothing(kind, way, temperature):
    """C10, C19: garbage and any label value give the same bits, and nothing is NaN."""
    random = np.random.default_rng(3)
    teacher, student = random.normal(size=(2, 5, 30))
    targets = targets_of(teacher, 6, temperature, 3 if kind == "sampled" else 0)
    mask = [True, False, True, False, False]
    chosen = objective(kind, way, temperature)
    seen = []
    for garbage, label in ((0.0, 0), (1e4, 29), (np.nan, 3), (-np.inf, 0)):
        dirty = jax.tree.map(np.array, targets)
        for values in dirty:
            junk = garbage if values.dtype.kind == "f" else 255
            values[~np.array(mask)] = junk
        labels = np.where(mask, [4, 0, 7, 0, 0], label)
        loss, gradient, _, _ = ours(student, labels, dirty, 0.5, chosen, mask)
        seen.append((np.asarray(loss).tobytes(), gradient))
        assert np.isfinite(gradient).all()
        assert (gradient[~np.array(mask)] == 0).all()
    assert all(one[0] == seen[0][0] for one in seen)
    for one in seen[1:]:
        np.testing.assert_array_equal(one[1], seen[0][1])


def test_cross_entropy_skips_padding():
    """C19: logits [1, 2, 3], label 2, and one pad."""
    logits = jnp.asarray([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    sums, *_ = compiled(
        logits, positions_of([2, 0], None, [True, False]), jnp.float32(1.0), objective("labels")
    )
    assert float(sums.ce) == pytest.approx(0.407606, abs=1e-6)


def test_a_weight_of_0_for_the_teacher_is_plain_cross_entropy():
    """C08."""
    random = np.random.default_rng(4)
    teacher, student = random.normal(size=(2, 6, 40))
    labels = random.integers(0, 40, 6)
    _, soft, _, _ = results("bucket", "forward", 1.0, teacher, student, labels, k=8, alpha=1.0)
    _, hard, _, _ = results("labels", "forward", 1.0, teacher, student, labels, k=8, alpha=1.0)
    np.testing.assert_allclose(soft, hard, atol=1e-7)


@pytest.mark.parametrize("kind", ["sampled", "bucket", "renormalise"])
def test_another_teacher_gives_another_gradient(kind):
    """C08: the cached targets reach the loss."""
    random = np.random.default_rng(5)
    one, other, student = random.normal(size=(3, 6, 40))
    _, first, _, _ = results(kind, "forward", 1.0, one, student, [0] * 6, k=8, alpha=0.0)
    _, second, _, _ = results(kind, "forward", 1.0, other, student, [0] * 6, k=8, alpha=0.0)
    assert np.abs(first - second).max() > 1e-4


def test_rows_of_the_head_that_no_token_has_get_no_probability():
    """C21: their logits may be as high as they like."""
    random = np.random.default_rng(6)
    teacher, student = random.normal(size=(2, 3, 18))
    targets = targets_of(teacher, 4)
    chosen, labels = objective("bucket"), [0, 1, 2]
    loss, without, _, _ = ours(student, labels, targets, 0.5, chosen)
    wide = np.full((N, VOCABULARY), 50.0, np.float32)
    wide[:, :18] = widened(student, (18,), 0)
    positions = positions_of(widened(labels, (), 0), widened_targets(targets), counted(3))
    logits = masked(jnp.asarray(wide), np.arange(VOCABULARY) < 18)
    sums, gradient, _, _ = compiled(logits, positions, jnp.float32(0.5), chosen)
    np.testing.assert_allclose(sums.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(gradient[:3, :18], without, atol=1e-7)
    assert (np.asarray(gradient[:, 18:]) == 0).all()
    # It is the mask that does it.
    assert compiled(jnp.asarray(wide), positions, jnp.float32(0.5), chosen)[0].loss > 2 * loss


def linear(head, hidden):
    return jnp.matmul(hidden, head["weight"].T, precision="highest") + head["bias"][None]


@pytest.fixture(scope="module")
def case():
    random = np.random.default_rng(7)
    head = {
        "weight": jnp.asarray(random.normal(size=(64, 16)), jnp.float32),
        "bias": jnp.asarray(random.normal(size=64), jnp.float32),
    }
    hidden = jnp.asarray(random.normal(size=(21, 16)), jnp.float32)
    teacher = random.normal(size=(21, 64)) * 2
    return head, hidden, teacher, random.integers(0, 64, 21), random.random(21) < 0.7


FUSED = [*MODES[:3], ("bucket", "reverse", 1.0), MODES[-1]]


@pytest.mark.parametrize(
    ("kind", "way", "temperature", "chunk"),
    [*[(*mode, 4) for mode in FUSED], (*FUSED[3], 7), (*FUSED[3], 64)],
)
def test_fused_equals_unfused_for_any_chunk(case, kind, way, temperature, chunk):
    head, hidden, teacher, labels, mask = case
    targets = targets_of(teacher, 8, temperature, 4 if kind == "sampled" else 0)
    chosen, alpha = objective(kind, way, temperature), jnp.float32(0.4)
    positions = positions_of(labels, targets, mask)

    def plain(head, hidden):
        ce, kd = position_losses(linear(head, hidden), positions, chosen)
        return (alpha * ce + (1 - alpha) * temperature**2 * kd).sum()

    fused = fused_loss(linear, chosen, chunk=chunk)

    # The factor shows that the cotangent is used.
    def ours(head, hidden):
        return 0.25 * fused(head, hidden, positions, alpha).loss

    @jax.jit
    def everything(head, hidden):
        arguments = (0, 1)
        return (
            jax.value_and_grad(ours, arguments)(head, hidden),
            fused(head, hidden, positions, alpha).loss,
            jax.value_and_grad(plain, arguments)(head, hidden),
        )

    (value, gradients), undifferentiated, (expected, wanted) = everything(head, hidden)
    np.testing.assert_allclose(value, 0.25 * expected, rtol=2e-6)
    np.testing.assert_allclose(undifferentiated, expected, rtol=2e-6)
    for found, reference in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(found, 0.25 * reference, rtol=2e-4, atol=2e-6)


def inner_jaxprs(parameters):
    for value in jax.tree.leaves(parameters, is_leaf=lambda x: hasattr(x, "eqns")):
        if hasattr(value, "eqns"):
            yield value
        elif hasattr(value, "jaxpr"):
            yield value.jaxpr


def test_logits_of_all_positions_never_exist(case):
    head, hidden, teacher, labels, mask = case
    positions = positions_of(labels, targets_of(teacher, 8), mask)
    fused = fused_loss(linear, objective("bucket"), chunk=4)
    function = jax.grad(lambda head: fused(head, hidden, positions, jnp.float32(0.5)).loss)
    shapes = set()

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            shapes.update(v.aval.shape for v in equation.outvars)
            for inner in inner_jaxprs(equation.params):
                walk(inner)

    walk(jax.make_jaxpr(function)(head).jaxpr)
    assert (4, 64) in shapes
    assert not any(
        64 in shape and np.prod(shape) >= 21 * 64 for shape in shapes if shape != (64, 16)
    )
