"""The objectives written densely, in float64, from their definitions: what the sparse ones equal.

Here everything is a vector over the vocabulary; gradients are JAX's own, in float64.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from student.batches import Targets
from student.losses import Positions

NO_ID = 0xFFFFFFFF
LEAST = 2.0**-126


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def targets_of(
    logits: np.ndarray, k: int, temperature: float = 1.0, sampled: int = 0, seed: int = 0
) -> Targets:
    """What a capture keeps of teachers' float64 logits [n, vocabulary]; `sampled` of the k are
    drawn from the tail, which is what `--tail sampled` does but for the choice of the draws."""
    n, vocabulary = logits.shape
    exact = min(k - sampled, vocabulary)
    ids = np.full((n, k), NO_ID, np.uint32)
    logprobs = np.full((n, k), np.nan, np.float32)
    order = np.argsort(-logits, axis=-1, kind="stable")
    ids[:, :exact] = order[:, :exact]
    logp = np.log(softmax(logits))
    logprobs[:, :exact] = np.take_along_axis(logp, order[:, :exact], axis=-1)
    random = np.random.default_rng(seed)
    for row in range(n):
        tail = order[row, exact:]
        ids[row, exact : exact + sampled] = np.sort(random.choice(tail, sampled, replace=False))
    with np.errstate(divide="ignore"):
        p = softmax(logits / temperature)
        tail = np.log(np.take_along_axis(p, order[:, exact:], axis=-1).sum(-1))
        entropy = -(softmax(logits) * logp).sum(-1)
    return Targets(
        ids=ids,
        logprobs=logprobs,
        exact_counts=np.full(n, exact, np.int32),
        tail_logprobs=tail.astype(np.float32),
        entropy=entropy.astype(np.float32),
    )


def positions_of(labels: Any, targets: Targets | None, mask: Any = None) -> Positions:
    labels = np.asarray(labels, np.int32)
    mask = np.ones(len(labels), bool) if mask is None else np.asarray(mask, bool)
    return jax.tree.map(jnp.asarray, Positions(labels, mask, targets))


def loss(
    kind: str,
    teacher: np.ndarray,
    student: Any,
    labels: np.ndarray,
    targets: Targets,
    *,
    alpha: float,
    temperature: float,
    divergence: str = "forward",
    beta: float = 0.5,
    mask: Any = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Loss summed over positions, its gradient with respect to the student's logits, and CE and
    KD of each position. Everything in float64.

    Runs operation by operation: these are compiled once for all objectives, and an objective as
    a whole takes a second.
    """
    counted = np.ones(len(teacher)) if mask is None else np.asarray(mask, np.float64)
    with jax.enable_x64(True):
        z = jnp.asarray(np.asarray(student, np.float64))
        value = _Dense(kind, teacher, labels, targets, temperature, divergence, beta)

        def total(z: Any) -> Any:
            ce, kd = value(z)
            return jnp.sum(counted * (alpha * ce + (1 - alpha) * temperature**2 * kd)), (ce, kd)

        (found, (ce, kd)), gradient = jax.value_and_grad(total, has_aux=True)(z)
        return np.asarray(found), np.asarray(gradient), np.asarray(ce), np.asarray(kd)


class _Dense:
    def __init__(self, kind, teacher, labels, targets, temperature, divergence, beta):
        self.kind, self.labels = kind, labels
        self.temperature, self.divergence, self.beta = temperature, divergence, beta
        self.p = softmax(teacher / temperature)  # [n, vocabulary]
        self.exact = np.zeros(self.p.shape, bool)
        self.drawn = np.zeros_like(self.p)
        for row in range(len(teacher)):
            count = targets.exact_counts[row]
            kept = targets.ids[row][targets.ids[row] != NO_ID].astype(np.int64)
            self.exact[row, kept[:count]] = True
            self.drawn[row, kept[count:]] = 1
        self.entropy = np.asarray(targets.entropy, np.float64)

    def __call__(self, z):
        ce = -jnp.take_along_axis(jax.nn.log_softmax(z), self.labels[:, None], axis=-1)[:, 0]
        log_q = jax.nn.log_softmax(z / self.temperature)
        if self.kind == "labels":
            return ce, jnp.zeros_like(ce)
        if self.kind == "sampled":
            tail = (self.p * ~self.exact).sum(-1, keepdims=True)
            drawn = self.drawn.sum(-1, keepdims=True)
            weights = self.p * self.exact + self.drawn * tail / np.maximum(drawn, 1)
            return ce, -(weights * log_q).sum(-1) - self._entropy(drawn[:, 0] == 0)
        # A class for each exact token; 0 stands at the other tokens, and counts for nothing.
        valid, p = self.exact, self.p * self.exact
        if self.kind == "renormalise":
            ours = jax.nn.logsumexp(log_q, axis=-1, where=valid, keepdims=True)
            log_class = jnp.where(valid, log_q - ours, 0)
            p = p / p.sum(-1, keepdims=True)
        else:
            log_class = jnp.where(valid, log_q, 0)
            if not valid.all():
                rest = jax.nn.logsumexp(log_q, axis=-1, where=~valid, keepdims=True)
                log_class = jnp.concatenate([log_class, rest], axis=-1)
                left = (self.p * ~valid).sum(-1, keepdims=True)
                p = np.concatenate([p, left], axis=-1)
                valid = np.pad(valid, ((0, 0), (0, 1)), constant_values=True)
        terms = self._between(p, jnp.exp(log_class), log_class)
        return ce, jnp.where(valid, terms, 0).sum(-1)

    def _entropy(self, whole):
        spread = -(self.p * np.log(np.where(self.p > 0, self.p, 1))).sum(-1)
        known = self.entropy if self.temperature == 1 else np.zeros_like(self.entropy)
        return np.where(whole, spread, known)

    def _between(self, p, q, log_q):
        log_p = jnp.log(jnp.where(p > 0, p, 1))
        if self.divergence == "forward":
            return jnp.where(p > 0, p * (log_p - log_q), 0)
        if self.divergence == "reverse":
            floor = jnp.log(jnp.maximum(p, LEAST))
            return jnp.where(q > 0, q * (log_q - floor), 0)
        if self.divergence == "tv":
            return jnp.abs(p - q) / 2
        mixed = self.beta * p + (1 - self.beta) * q
        some = mixed > 0
        log_m = jnp.log(jnp.where(some, mixed, 1))
        ours = jnp.where(q > 0, q * (log_q - log_m), 0)
        theirs = jnp.where(p > 0, p * (log_p - log_m), 0)
        return self.beta * theirs + (1 - self.beta) * ours
