"""A student simple enough to be written twice, in JAX and in numpy; and batches made by hand."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from student.batches import Batch, Targets
from student.functions import StudentFunctions
from tests.cache.builder import log_softmax
from tests.student.dense import targets_of


def _hidden(parameters: Any, tokens: Any, segments: Any, positions: Any) -> Any:
    """The mean of the embeddings so far of the same document: it shows every input."""
    table = parameters["table"]
    place = jnp.arange(tokens.shape[0])
    seen = (place[:, None] >= place[None]) & (segments[:, None] == segments[None])
    total = jnp.dot(seen.astype(table.dtype), table[tokens], precision="highest")
    return total / (1 + positions)[:, None].astype(table.dtype)


def _unembed(parameters: Any, hidden: Any) -> Any:
    logits = jnp.matmul(hidden, parameters["head"].T, precision="highest")
    return (logits + parameters["bias"][None]).astype(jnp.float32)


def functions(rows: int) -> StudentFunctions:
    return StudentFunctions(_hidden, _unembed, ("bias", "head"), rows)


def parameters(rows: int, vocabulary: int, seed: int = 0, width: int = 5) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    shapes = {"table": (vocabulary, width), "head": (rows, width), "bias": (rows,)}
    return {name: jnp.asarray(random.normal(size=x), jnp.float32) for name, x in shapes.items()}


def logits(parameters: Any, tokens: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """The student's, float64 [row, position, rows of the head]; one position after the other."""
    values = {name: np.asarray(x, np.float64) for name, x in parameters.items()}
    found = np.zeros((*tokens.shape, len(values["bias"])))
    for row, place in np.ndindex(*tokens.shape):
        start = place
        while start > 0 and segments[row, start - 1] == segments[row, place]:
            start -= 1
        hidden = values["table"][tokens[row, start : place + 1]].mean(axis=0)
        found[row, place] = values["head"] @ hidden + values["bias"]
    return found


def identity(rows: int) -> dict[str, Any]:
    """Parameters whose hidden states are logits; the table decides them."""
    return {
        "table": jnp.zeros((rows, rows), jnp.float32),
        "head": jnp.eye(rows, dtype=jnp.float32),
        "bias": jnp.zeros((rows,), jnp.float32),
    }


def make_batch(
    segments: Any,
    vocabulary: int,
    *,
    tokens: Any = None,
    teacher: np.ndarray | None = None,
    k: int | None = None,
    seed: int = 0,
) -> tuple[Batch, np.ndarray]:
    """Rows with a label wherever the next token is of the same document, and the teacher's
    logits, float64 [row, position, vocabulary]; random where not given. Rows of segment 0 alone
    are padding. The k entries are exact and float32; k is the vocabulary if not given.
    """
    segments = np.asarray(segments, np.int32)
    random = np.random.default_rng(seed)
    if tokens is None:
        tokens = random.integers(0, vocabulary, segments.shape)
    if teacher is None:
        teacher = random.normal(size=(*segments.shape, vocabulary)) * 2
    tokens = np.where(segments > 0, tokens, 0).astype(np.int32)
    mask = np.zeros(segments.shape, bool)
    mask[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    following = np.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)
    labels = np.where(mask, following, 0).astype(np.int32)
    flat = targets_of(teacher.reshape(-1, vocabulary), k or vocabulary)
    targets = Targets(*(x.reshape(*segments.shape, *x.shape[1:]) for x in flat))
    logp = np.take_along_axis(log_softmax(teacher), labels[..., None].astype(int), axis=-1)
    rows = np.arange(len(segments), dtype=np.int32)
    rows = np.where((segments > 0).any(axis=1), rows, -1).astype(np.int32)
    logprobs = logp[..., 0].astype(np.float32)
    return Batch(rows, tokens, segments, labels, mask, logprobs, targets), teacher
