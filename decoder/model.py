"""One decoder of the Llama family as Flax NNX modules.

Every call takes ONE ROW, without a batch axis; lift it with `jax.vmap`:

    graphdef, state = nnx.split(model)
    score = lambda state, *row: nnx.merge(graphdef, state)(*row)
    jax.vmap(score, in_axes=(None, 0, 0, 0))(state, tokens, segments, positions)

The parameters' dtype sets the precision of the computation: float32 computes in
float32 throughout, bfloat16 in bfloat16 with float32 accumulation, norms,
softmax, rotary angles and logits.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Integer

from decoder import rope
from decoder.attention import attend, segment_mask
from decoder.config import DecoderConfig
from decoder.precision import project

INITIAL_SCALE = 0.02  # standard deviation of random weights, as in the family's own training

_ACTIVATIONS = {"silu": jax.nn.silu}


def _initial(shape: tuple[int, int], dtype: DTypeLike, rngs: nnx.Rngs | None) -> Array:
    """Random normal weights; zeros without random numbers, to be filled from a checkpoint."""
    if rngs is None:
        return jnp.zeros(shape, dtype)
    return jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(INITIAL_SCALE, dtype)


class Linear(nnx.Module):
    """`x @ weight.T + bias`; weight [outputs, inputs], as checkpoints store it."""

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs | None
    ) -> None:
        self.weight = nnx.Param(_initial((outputs, inputs), dtype, rngs))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None

    def __call__(self, inputs: Float[Array, "length inputs"]) -> Float[Array, "length outputs"]:
        outputs = project(inputs, self.weight[...])
        if self.bias is not None:
            outputs = outputs + self.bias[...].astype(jnp.float32)[None, :]
        return outputs.astype(inputs.dtype)


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x ** 2) + epsilon) * weight`, the division in float32."""

    def __init__(self, width: int, epsilon: float, *, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.epsilon = epsilon

    def __call__(self, inputs: Float[Array, "length width"]) -> Float[Array, "length width"]:
        wide = inputs.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.epsilon)
        return self.weight[...][None, :] * normed.astype(inputs.dtype)


class Attention(nnx.Module):
    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs | None) -> None:
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.head_dim = config.head_dim
        self.query = Linear(config.width, queries, bias=config.qkv_bias, **options)
        self.key = Linear(config.width, keys, bias=config.qkv_bias, **options)
        self.value = Linear(config.width, keys, bias=config.qkv_bias, **options)
        self.output = Linear(queries, config.width, bias=config.output_bias, **options)

    def __call__(
        self,
        inputs: Float[Array, "length width"],
        mask: Bool[Array, "length length"],
        cosine: Float32[Array, "length half"],
        sine: Float32[Array, "length half"],
    ) -> Float[Array, "length width"]:
        length = inputs.shape[0]
        queries = self.query(inputs).reshape(length, -1, self.head_dim)
        keys = self.key(inputs).reshape(length, -1, self.head_dim)
        values = self.value(inputs).reshape(length, -1, self.head_dim)
        queries, keys = rope.rotate(queries, cosine, sine), rope.rotate(keys, cosine, sine)
        return self.output(attend(queries, keys, values, mask).reshape(length, -1))


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))`: SwiGLU when the activation is silu."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs | None) -> None:
        options: dict[str, Any] = {"bias": config.mlp_bias, "dtype": dtype, "rngs": rngs}
        self.activation = config.activation
        self.gate = Linear(config.width, config.mlp_width, **options)
        self.up = Linear(config.width, config.mlp_width, **options)
        self.down = Linear(config.mlp_width, config.width, **options)

    def __call__(self, inputs: Float[Array, "length width"]) -> Float[Array, "length width"]:
        gate = _ACTIVATIONS[self.activation](self.gate(inputs))
        return self.down(gate * self.up(inputs))


class Layer(nnx.Module):
    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs | None) -> None:
        self.attention_norm = RMSNorm(config.width, config.norm_epsilon, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.width, config.norm_epsilon, dtype=dtype)
        self.mlp = GatedMLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        inputs: Float[Array, "length width"],
        mask: Bool[Array, "length length"],
        cosine: Float32[Array, "length half"],
        sine: Float32[Array, "length half"],
    ) -> Float[Array, "length width"]:
        inputs = inputs + self.attention(self.attention_norm(inputs), mask, cosine, sine)
        return inputs + self.mlp(self.mlp_norm(inputs))


def _rematerialised(layer: Layer) -> Callable[..., Array]:
    """The layer as a function whose activations are computed again for its gradient."""
    graphdef, state = nnx.split(layer)
    again = jax.checkpoint(lambda state, *inputs: nnx.merge(graphdef, state)(*inputs))
    return lambda *inputs: again(state, *inputs)


class Embedding(nnx.Module):
    def __init__(
        self, vocabulary: int, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs | None
    ) -> None:
        self.weight = nnx.Param(_initial((vocabulary, width), dtype, rngs))

    def __call__(self, tokens: Integer[Array, "length"]) -> Float[Array, "length width"]:
        """Rows of the table; an id outside it gives NaN, never another token's row."""
        return (
            self.weight[...]
            .at[tokens.astype(jnp.int32)]
            .get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        )


class Decoder(nnx.Module):
    """Tokens to hidden states, and hidden states to logits.

    `layers` is a plain list, so that single layers can be replaced or dropped.
    With `rngs` None all weights are zeros, to be filled from a checkpoint.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs | None, dtype: DTypeLike = jnp.float32
    ) -> None:
        self.config = config
        self.embedding = Embedding(config.vocabulary, config.width, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(Layer(config, dtype=dtype, rngs=rngs) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_epsilon, dtype=dtype)
        self.head = (
            None
            if config.tied
            else Linear(config.width, config.vocabulary, bias=False, dtype=dtype, rngs=rngs)
        )

    def __call__(
        self,
        tokens: Integer[Array, "length"],
        segments: Integer[Array, "length"],
        positions: Integer[Array, "length"],
        *,
        remat: bool = False,
    ) -> Float[Array, "length width"]:
        """Hidden states of one row after the last norm, in the parameters' dtype.

        Position t sees s iff s <= t and both are of one segment. Segment 0 is
        padding: its tokens may be anything, its hidden states are finite and
        mean nothing. With `remat` a backward pass keeps only what goes into each
        layer and computes the rest of the layer again.
        """
        tokens = jnp.where(segments == 0, 0, tokens.astype(jnp.int32))
        hidden = self.embedding(tokens)
        mask = segment_mask(segments)
        cosine, sine = rope.angles(positions, self.config)
        for layer in self.layers:
            call = _rematerialised(layer) if remat else layer
            hidden = call(hidden, mask, cosine, sine)
        return self.norm(hidden)

    def unembed(
        self, hidden: Float[Array, "positions width"]
    ) -> Float32[Array, "positions vocabulary"]:
        """Logits, always float32, for any number of positions."""
        head = self.embedding if self.head is None else self.head
        return project(hidden, head.weight[...])
