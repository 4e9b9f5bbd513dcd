"""Sums over the tokens beyond the listed ones against float64, and the model of the unknown."""

import jax.numpy as jnp
import numpy as np
import pytest

from pipelines.compare_beyond import DenseBeyond, ModelBeyond
from pipelines.compare_measure import Positions, bucket, measure, renormalised
from tests.pipelines.test_compare_measure import K, M, N, V, head_of, log_softmax, positions_of


@pytest.fixture(scope="module")
def both():
    """Log-probs of teacher and student, [N, V]."""
    random = np.random.default_rng(3)
    return tuple(log_softmax(random.normal(size=(N, V)) * scale) for scale in (2, 1))


def test_dense_sums_are_of_the_tokens_that_are_not_listed(both):
    log_p, log_q = both
    ids, inside = head_of(log_p, M)
    ids = ids.astype(np.int32)
    ids[0, -1] = -1  # an empty slot lists nothing
    inside[0, head_of(log_p, M)[0][0, -1]] = False
    where = np.array([0, 3])
    beyond = DenseBeyond(
        jnp.asarray(log_p, jnp.float32), jnp.asarray(log_q, jnp.float32), ids, where
    )
    p, q = (np.where(inside, 0.0, np.exp(x))[where] for x in both)
    expected = {
        "p": p.sum(1),
        "q": q.sum(1),
        "pp": (p * p).sum(1),
        "pq": (p * q).sum(1),
        "qq": (q * q).sum(1),
        "p_log_p": (p * log_p[where]).sum(1),
        "p_log_q": (p * log_q[where]).sum(1),
    }
    for name, value in expected.items():
        assert getattr(beyond.mass, name) == pytest.approx(value, rel=3e-6), name
    a, b = np.array([[1.0, 0.5], [1.0, 0.0]]), np.array([[0.5, 2.0], [0.0, 1.5]])
    terms = a[:, :, None] * p[:, None, :] - b[:, :, None] * q[:, None, :]
    np.testing.assert_allclose(beyond.distances(a, b), np.abs(terms).sum(axis=2), rtol=3e-6)
    np.testing.assert_allclose(beyond.totals(a, b), terms.sum(axis=0), atol=1e-7)


def test_the_model_of_the_unknown_equals_dense_arrays_made_by_it(both):
    log_p, log_q = both
    q = np.exp(log_q[0])
    ids, inside = head_of(log_p, M)
    p = np.where(inside, np.exp(log_p), 0.0)
    mass = 1 - p.sum(axis=1)
    outside = np.where(inside, 0.0, q)
    p += mass[:, None] * outside / outside.sum(axis=1, keepdims=True)
    log_q = np.broadcast_to(log_q[0], log_p.shape)
    dense = positions_of(np.log(p), log_q, ids=ids)
    modelled = Positions(
        ids, dense.p, dense.log_q, ModelBeyond(q, ids, np.ones(ids.shape, bool), mass)
    )
    weights = dense.p[:, :K] * 1.02
    tail = 1 - weights.sum(axis=1)
    for positions in (dense, modelled):
        assert positions.beyond.mass.p == pytest.approx(mass, rel=1e-5)
    found = [
        measure(x, [bucket(x, weights, tail), renormalised(x, np.log(weights))], V)
        for x in (dense, modelled)
    ]
    for expected, tally in zip(*found, strict=True):
        assert tally.bias2 == pytest.approx(expected.bias2, rel=1e-4)
        assert tally.total_variation == pytest.approx(expected.total_variation, rel=1e-4)
        assert tally.kl == pytest.approx(expected.kl, rel=1e-3)
        np.testing.assert_allclose(tally.error, expected.error, atol=1e-6)
