"""Grouped-query attention within the segments of one row."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from decoder.precision import matmul_precision


def segment_mask(segments: Integer[Array, "length"]) -> Bool[Array, "length length"]:
    """True where position t (first axis) sees position s: s <= t in the same segment.

    Padding (segment 0) sees earlier padding, so that no row of the mask is empty.
    """
    order = jnp.arange(segments.shape[0])
    return (order[None, :] <= order[:, None]) & (segments[:, None] == segments[None, :])


def attend(
    queries: Float[Array, "length heads head_dim"],
    keys: Float[Array, "length kv_heads head_dim"],
    values: Float[Array, "length kv_heads head_dim"],
    mask: Bool[Array, "length length"],
) -> Float[Array, "length heads head_dim"]:
    """Softmax attention; head h reads key-value head `h // (heads // kv_heads)`.

    Scores and softmax are float32 whatever the inputs' dtype.
    """
    length, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.reshape(length, kv_heads, heads // kv_heads, head_dim)
    precision = matmul_precision(queries.dtype)
    scores = jnp.einsum(
        "tkgd,skd->kgts", grouped, keys, precision=precision, preferred_element_type=jnp.float32
    )
    scores = jnp.where(mask[None, None], scores / math.sqrt(head_dim), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    mixed = jnp.einsum(
        "kgts,skd->tkgd", weights, values, precision=precision, preferred_element_type=jnp.float32
    )
    return mixed.reshape(length, heads, head_dim).astype(queries.dtype)
