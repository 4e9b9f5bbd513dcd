"""What a row of packed documents means to a model."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


def positions_from_segments(segments: Int32[Array, " length"]) -> Int32[Array, " length"]:
    """The place of each token in its own document: 0, 1, … from the start of its segment."""
    place = jnp.arange(segments.shape[0], dtype=jnp.int32)
    changed = jnp.concatenate([jnp.ones((1,), bool), segments[1:] != segments[:-1]])
    return place - jax.lax.cummax(jnp.where(changed, place, 0))
