"""The tokens beyond the listed ones: sums over the vocabulary, dense or modelled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

from pipelines.compare_measure import Mass

# Sums over the vocabulary: of so many terms in float32, then in float64.
_BLOCK = 64


class DenseBeyond:
    """The tokens beyond the listed ones, from both distributions over the whole vocabulary.

    Attributes:
      mass: at the positions that count.
      p, q: float32 [all, vocabulary]: teacher and student, 0 at the listed tokens.
    """

    def __init__(
        self,
        log_p: Float32[Array, "all vocabulary"],
        log_q: Float32[Array, "all vocabulary"],
        ids: Int32[np.ndarray, "all m"],
        where: Int[np.ndarray, " n"],
    ):
        """Takes some of all positions; the others cost time, but no compiling.

        Args:
          log_p, log_q: of teacher and student, natural log; -inf where impossible.
          ids: the listed tokens, -1 in empty slots.
          where: the positions that count.
        """
        self._all, self._where = len(ids), where
        listed = np.where(ids < 0, log_p.shape[1], ids).astype(np.int32)
        self.p, self.q, sums = _beyond(log_p, log_q, listed)
        found = np.asarray(sums).astype(np.float64).sum(axis=2)[:, where]
        self.mass = Mass(*found)

    def distances(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        found = _distances(self.p, self.q, self._spread(a).T, self._spread(b).T)
        return np.asarray(found).astype(np.float64).sum(axis=2).T[self._where]

    def totals(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        found = _totals(self.p, self.q, self._spread(a), self._spread(b))
        return np.asarray(found).astype(np.float64)[:, : self.p.shape[1]]

    def _spread(self, values: np.ndarray) -> np.ndarray:
        """Coefficients of the positions that count, as float32 of all; 0 elsewhere."""
        found = np.zeros((self._all, values.shape[1]), np.float32)
        found[self._where] = values
        return found


def _block_sums(x):
    """[..., blocks] of [..., vocabulary]."""
    padding = -x.shape[-1] % _BLOCK
    x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, padding),))
    ones = jnp.ones((_BLOCK,), jnp.float32)
    return jnp.dot(x.reshape(*x.shape[:-1], -1, _BLOCK), ones, precision="highest")


def _numbers(x):
    """0 for NaN, which only positions without a label may hold: 0 times NaN is NaN."""
    return jnp.where(jnp.isnan(x), 0.0, x)


@jax.jit
def _beyond(log_p, log_q, listed):
    place = jnp.arange(listed.shape[0], dtype=jnp.int32)[:, None]
    p = _numbers(jnp.exp(log_p)).at[place, listed].set(0.0, mode="drop")
    q = _numbers(jnp.exp(log_q)).at[place, listed].set(0.0, mode="drop")
    p_log_p = jnp.where(p > 0, p * log_p, 0.0)
    p_log_q = jnp.where(p > 0, p * log_q, 0.0)
    terms = (p, q, p * p, p * q, q * q, p_log_p, p_log_q)
    return p, q, jnp.stack([_block_sums(x) for x in terms])


@jax.jit
def _distances(p, q, a, b):
    """[m, n, blocks] for a and b [m, n]."""
    return jax.lax.map(
        lambda pair: _block_sums(jnp.abs(pair[0][:, None] * p - pair[1][:, None] * q)), (a, b)
    )


@jax.jit
def _totals(p, q, a, b):
    """[m, vocabulary] for a and b [n, m]."""
    return jnp.dot(a.T, p, precision="highest") - jnp.dot(b.T, q, precision="highest")


class ModelBeyond:
    """What is assumed of the tokens beyond the listed ones where only their mass is known.

    They are taken to be spread as the student spreads them, with whom the whole sample has one
    distribution q: p = (mass of p / mass of q) q.
    """

    def __init__(
        self,
        q: Float[np.ndarray, " vocabulary"],
        ids: Int[np.ndarray, "n m"],
        present: np.ndarray,
        mass: Float[np.ndarray, " n"],
    ):
        """Args:
        q: the student's distribution, float64.
        ids: the listed tokens.
        present: bool [n, m]: false in empty slots.
        mass: the teacher's, beyond the listed tokens.
        """
        self._q_all, self._ids = q, ids
        self._listed = np.where(present, q[ids], 0.0)
        rest = np.maximum(q.sum() - self._listed.sum(axis=1), 0.0)
        squares = np.maximum((q * q).sum() - (self._listed**2).sum(axis=1), 0.0)
        self._scale = np.divide(mass, rest, out=np.zeros_like(mass), where=rest > 0)
        scale = self._scale
        with np.errstate(divide="ignore"):
            ratio = np.where(scale > 0, np.log(np.where(scale > 0, scale, 1.0)), 0.0)
        # Only the difference of the last two is used.
        self.mass = Mass(
            p=mass,
            q=rest,
            pp=scale**2 * squares,
            pq=scale * squares,
            qq=squares,
            p_log_p=mass * ratio,
            p_log_q=np.zeros_like(mass),
        )

    def distances(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.abs(a * self._scale[:, None] - b) * self.mass.q[:, None]

    def totals(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        factors = a * self._scale[:, None] - b
        found = []
        for column in factors.T:
            listed = np.bincount(
                self._ids.ravel(),
                (self._listed * column[:, None]).ravel(),
                minlength=len(self._q_all),
            )
            found.append(column.sum() * self._q_all - listed)
        return np.stack(found)
