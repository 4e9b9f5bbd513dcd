"""A teacher from a function: a table of logits, where one token can be made to give NaN."""

import os

import jax.numpy as jnp
import numpy as np
from flax import nnx

# The token is named outside of what identifies the teacher, so that mending it changes nothing.
VARIABLE = "STILLROOM_TEST_POISON"


class Table(nnx.Module):
    """Logits of the next token are a row of a table."""

    def __init__(self) -> None:
        values = np.random.default_rng(0).normal(size=(300, 300)).astype(np.float32)
        self.table = nnx.Param(jnp.asarray(values))
        self.poison = int(os.environ.get(VARIABLE, "-1"))

    def __call__(self, tokens, segments, positions):
        logits = self.table[...][tokens]
        return jnp.where((tokens == self.poison)[:, None], jnp.nan, logits)


def teacher() -> Table:
    return Table()
