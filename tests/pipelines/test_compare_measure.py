"""Errors of gradients against brute force over the vocabulary, in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from pipelines.compare_beyond import DenseBeyond
from pipelines.compare_measure import (
    Positions,
    Reconstruction,
    Tally,
    bucket,
    measure,
    renormalised,
    sampled,
    step_error,
)

N, V, M, K = 5, 150, 12, 7


def log_softmax(x):
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def both():
    """Log-probs of teacher and student, float64 of float32 values, [N, V]."""
    random = np.random.default_rng(0)
    teacher = log_softmax(random.normal(size=(N, V)) * 2).astype(np.float32)
    student = log_softmax(random.normal(size=(N, V))).astype(np.float32)
    return teacher.astype(np.float64), student.astype(np.float64)


def positions_of(log_p, log_q, where=None, ids=None):
    """`Positions` of dense log-probs, at some of all positions."""
    if ids is None:
        ids, _ = head_of(log_p, M)
    ids = ids.astype(np.int32)
    where = np.arange(len(log_p)) if where is None else where
    beyond = DenseBeyond(
        jnp.asarray(log_p, jnp.float32), jnp.asarray(log_q, jnp.float32), ids, where
    )
    chosen = ids[where]
    return Positions(
        ids=chosen,
        p=np.exp(np.take_along_axis(log_p[where], chosen, axis=1)),
        log_q=np.take_along_axis(log_q[where], chosen, axis=1),
        beyond=beyond,
    )


def head_of(log_p, k):
    """Ids of the k most likely tokens, and whether a token is one of them, [N, V]."""
    ids = np.argsort(-log_p, axis=1, kind="stable")[:, :k]
    inside = np.zeros(log_p.shape, bool)
    np.put_along_axis(inside, ids, True, axis=1)
    return ids, inside


def check(tally, bias2, variance, error):
    """`error` is p - r, the full gradient subtracted from the one that is given."""
    assert tally.labels == N
    np.testing.assert_allclose(tally.bias2, bias2, rtol=2e-5, atol=1e-12)
    np.testing.assert_allclose(tally.variance, variance, rtol=2e-5, atol=1e-12)
    np.testing.assert_allclose(tally.error, error, atol=3e-7)


def test_bucket_is_the_gradient_of_the_loss_with_the_rest_as_one_class(both):
    log_p, log_q = both
    p, q = np.exp(log_p), np.exp(log_q)
    ids, inside = head_of(log_p, K)
    weights = np.take_along_axis(p, ids, axis=1) * 1.01  # as if rounded
    tail = 1 - weights.sum(axis=1)
    # d/dz of - sum w log q - tail log(sum of q outside).
    rest = np.where(inside, 0.0, q).sum(axis=1, keepdims=True)
    gradient = np.where(inside, q, q - tail[:, None] * q / rest)
    place = np.arange(N)[:, None]
    gradient[place, ids] -= weights

    positions = positions_of(log_p, log_q)
    (tally,) = measure(positions, [bucket(positions, weights, tail)], V)
    bias = gradient - (q - p)
    check(tally, (bias**2).sum(), 0.0, bias.sum(axis=0))
    implied = q - gradient
    np.testing.assert_allclose(tally.total_variation, np.abs(p - implied).sum() / 2, rtol=1e-5)
    np.testing.assert_allclose(tally.kl, (p * (log_p - np.log(implied))).sum(), rtol=1e-5)
    assert np.isnan(tally.draw_distance)


def test_renormalised_is_the_gradient_of_both_sides_renormalised(both):
    log_p, log_q = both
    p, q = np.exp(log_p), np.exp(log_q)
    ids, inside = head_of(log_p, K)
    logprobs = np.take_along_axis(log_p, ids, axis=1)
    ours = np.where(inside, q, 0.0) / np.where(inside, q, 0.0).sum(axis=1, keepdims=True)
    theirs = np.where(inside, p, 0.0) / np.where(inside, p, 0.0).sum(axis=1, keepdims=True)
    positions = positions_of(log_p, log_q)
    (tally,) = measure(positions, [renormalised(positions, logprobs)], V)
    bias = (ours - theirs) - (q - p)
    check(tally, (bias**2).sum(), 0.0, bias.sum(axis=0))
    np.testing.assert_allclose(tally.total_variation, np.abs(p - theirs).sum() / 2, rtol=1e-5)
    assert tally.kl == np.inf


def systematic(inclusion, uniform):
    """Which tokens systematic sampling takes, bool [V]."""
    ends = np.cumsum(inclusion)
    points = uniform + np.arange(round(inclusion.sum()))
    return np.isin(
        np.arange(len(inclusion)), np.searchsorted(ends, points, side="right").clip(max=V - 1)
    )


def test_a_sampled_tail_against_the_mean_and_variance_over_every_draw(both):
    """The draw of one uniform number is averaged over all of them on a fine grid."""
    log_p, log_q = both
    p = np.exp(log_p)
    k, scale = 9, 0.98  # the stored tail holds 2 % too little, the head 2 % more of the rest
    ids, _ = head_of(log_p, M)
    heads = np.zeros(N, int)
    weights, tails = np.zeros((N, k)), np.zeros(N)
    bias, variance, distance = np.zeros((N, V)), np.zeros(N), np.zeros(N)
    grid = (np.arange(4000) + 0.5) / 4000
    for n in range(N):
        ranked = p[n, ids[n]]
        for h in range(1, k):
            rest = 1 - ranked[:h].sum()
            if ranked[h] < rest / (k - h):
                break
        heads[n], tails[n] = h, scale * rest
        weights[n, :h] = ranked[:h] + (1 - scale) * rest / h
        threshold = rest / (k - h)
        inclusion = p[n] / threshold
        inclusion[ids[n, :h]] = 0.0
        drawn = np.stack([systematic(inclusion, u) for u in grid])
        r = np.where(drawn, scale * threshold, 0.0)
        r[:, ids[n, :h]] = weights[n, :h]
        mean = r.mean(axis=0)
        bias[n] = p[n] - mean
        variance[n] = ((r - mean) ** 2).sum(axis=1).mean()
        distance[n] = np.abs(r - p[n]).sum(axis=1).mean() / 2

    positions = positions_of(log_p, log_q)
    drawn = k - heads
    (tally,) = measure(positions, [sampled(positions, weights, heads, drawn, tails)], V)
    np.testing.assert_allclose(tally.variance, variance.sum(), rtol=1e-3)
    np.testing.assert_allclose(tally.bias2, (bias**2).sum(), rtol=2e-2)
    np.testing.assert_allclose(tally.error, bias.sum(axis=0), atol=5e-4)
    np.testing.assert_allclose(tally.draw_distance, distance.sum(), rtol=1e-3)
    np.testing.assert_allclose(tally.total_variation, np.abs(bias).sum() / 2, rtol=2e-2)


def test_several_settings_at_once_and_positions_left_out(both):
    log_p, log_q = both
    dirty = np.concatenate([log_p, np.full((1, V), np.nan)])
    where = np.array([0, 2, 4])
    positions = positions_of(dirty, np.concatenate([log_q, log_q[:1]]), where=where)
    few = positions_of(log_p[where], log_q[where])
    weights = positions.p[:, :K] * 0.9
    made = [
        lambda x: bucket(x, weights, 1 - weights.sum(axis=1)),
        lambda x: renormalised(x, np.log(weights)),
        lambda x: bucket(x, weights, np.full(3, 0.25)),
    ]
    together = measure(positions, [make(positions) for make in made], V)
    for make, tally in zip(made, together, strict=True):
        (alone,) = measure(few, [make(few)], V)
        assert tally.labels == 3
        assert tally.bias2 == pytest.approx(alone.bias2, rel=1e-6)
        assert tally.total_variation == pytest.approx(alone.total_variation, rel=1e-6)
        np.testing.assert_allclose(tally.error, alone.error, atol=1e-6)
    assert len({tally.bias2 for tally in together}) == 3


def test_a_step_averages_variance_out_and_shared_bias_not():
    """Against the mean of many simulated steps."""
    random = np.random.default_rng(1)
    shared = np.array([0.3, -0.1, 0.0])
    labels, batch = 200_000, 50
    own = random.normal(size=(labels, 3)) * 0.2
    noise = random.normal(size=(labels, 3)) * 0.4
    bias = shared + own
    steps = (bias + noise).reshape(-1, batch, 3).mean(axis=1)
    measured = (steps**2).sum(axis=1).mean()

    tally = Tally(labels=labels, bias2=float((bias**2).sum()), error=bias.sum(axis=0))
    variance = 3 * 0.4**2
    found = step_error(tally.bias2 / labels, variance, tally.lasting(), batch)
    assert found == pytest.approx(measured, rel=0.05)
    assert tally.lasting() == pytest.approx((shared**2).sum(), rel=0.02)
    assert step_error(0.5, 0.25, 0.1, 1) == pytest.approx(0.75)
    assert step_error(0.5, 0.25, 0.1, 10**12) == pytest.approx(0.1)


def test_lasting_bias_of_independent_biases_is_none():
    bias = np.random.default_rng(2).normal(size=(400, 8))
    tally = Tally(labels=400, bias2=float((bias**2).sum()), error=bias.sum(axis=0))
    # Taken as it stands, the mean of 400 vectors of squared length 8 has 8 / 400.
    assert np.sum((tally.error / 400) ** 2) > 0.005
    assert tally.lasting() < 0.01
    assert Tally(labels=1, bias2=2.0, error=np.array([1.0, 1.0])).lasting() == 2.0


def test_tallies_add_up(both):
    log_p, log_q = both
    parts = [np.array([0, 1]), np.array([2, 3, 4])]
    total = Tally()
    for part in [*parts, None]:
        chosen = np.arange(N) if part is None else part
        positions = positions_of(log_p[chosen], log_q[chosen])
        weights = positions.p[:, :K]
        (tally,) = measure(positions, [bucket(positions, weights, 1 - weights.sum(axis=1))], V)
        if part is not None:
            total.add(tally)
    assert total.labels == tally.labels == N
    assert total.bias2 == pytest.approx(tally.bias2, rel=1e-6)
    np.testing.assert_allclose(total.error, tally.error, atol=1e-6)


def test_nothing_beyond_and_empty_slots():
    """A vocabulary of three tokens, one of them impossible: all exact, no error at all."""
    log_p = np.log(
        np.array([[0.75, 0.25, 0.0]]), where=[[True, True, False]], out=np.full((1, 3), -np.inf)
    )
    log_q = np.log(np.array([[0.5, 0.25, 0.25]]))
    ids = np.array([[0, 1, -1]], np.int32)
    beyond = DenseBeyond(
        jnp.asarray(log_p, jnp.float32), jnp.asarray(log_q, jnp.float32), ids, np.array([0])
    )
    positions = Positions(
        np.array([[0, 1, 0]]), np.array([[0.75, 0.25, 0.0]]), np.log([[0.5, 0.25, 0.5]]), beyond
    )
    made: list[Reconstruction] = [
        bucket(positions, np.array([[0.75, 0.25, 0.0]]), np.zeros(1)),
        sampled(
            positions, np.array([[0.75, 0.25, 0.0]]), np.array([2]), np.array([0]), np.zeros(1)
        ),
    ]
    for tally in measure(positions, made, 3):
        assert (tally.bias2, tally.variance, tally.kl) == (0.0, 0.0, 0.0)
        assert tally.total_variation == 0.0
