"""Functions that tests name as `tests.decoder.functions:…`, good ones and bad ones."""

import jax
import jax.numpy as jnp
from flax import nnx

VOCABULARY = 11

not_a_function = 3


class Table(nnx.Module):
    """Logits of the next token by the token alone: a bigram table."""

    max_positions = 99

    def __init__(self, shift: float = 0.0) -> None:
        values = jnp.arange(VOCABULARY * VOCABULARY, dtype=jnp.float32).reshape(VOCABULARY, -1)
        self.table = nnx.Param(jnp.sin(values) + shift)

    def __call__(self, tokens, segments, positions):
        return self.table[...][tokens]


class Hidden(Table):
    """The same table as an embedding, with an unembedding of its own."""

    def __call__(self, tokens, segments, positions):
        return self.table[...][tokens][:, :4]

    def unembed(self, hidden):
        return hidden @ self.table[...][:4, :7]


class WithKeys(Table):
    """State that is no parameter: random keys and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.rngs = nnx.Rngs(0)


class Batched(Table):
    def __call__(self, tokens, segments, positions):
        return self.table[...][tokens][None]


class Integers(Table):
    def __call__(self, tokens, segments, positions):
        return tokens[:, None]


class Raises(Table):
    def __call__(self, tokens, segments, positions):
        raise ValueError("needs a batch axis")


class TwoArguments(Table):
    def __call__(self, tokens, segments):
        return self.table[...][tokens]


class Several(Table):
    def __call__(self, tokens, segments, positions):
        return {"logits": self.table[...][tokens]}


def shifted() -> Table:
    return Table(1.0)


def no_module() -> jax.Array:
    return jnp.zeros(3)
