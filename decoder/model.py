"""One decoder as Flax NNX modules; what it is made of, its configuration says.

Every call takes ONE ROW, without a batch axis; lift it with `jax.vmap`:

    graphdef, state = nnx.split(model)
    score = lambda state, *row: nnx.merge(graphdef, state)(*row)
    jax.vmap(score, in_axes=(None, 0, 0, 0))(state, tokens, segments, positions)

The parameters' dtype sets the precision of the computation: float32 computes in
float32 throughout, bfloat16 in bfloat16 with float32 accumulation, norms,
softmax, rotary angles and logits.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Integer

from decoder import rope
from decoder.attention import attend, segment_mask, soft_cap
from decoder.config import DecoderConfig
from decoder.precision import project

INITIAL_SCALE = 0.02  # standard deviation of random weights, as in the family's own training


def _gelu(approximate: bool) -> Callable[[Array], Array]:
    """By tanh or by erf; in float32, since bfloat16 loses two digits within the formula."""
    return lambda x: jax.nn.gelu(x.astype(jnp.float32), approximate=approximate).astype(x.dtype)


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": _gelu(True),
    "gelu": _gelu(False),
}


def _initial(shape: tuple[int, ...], dtype: DTypeLike, rngs: nnx.Rngs | None) -> Array:
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
    """`x / sqrt(mean(x ** 2) + epsilon)` over the last axis, in float32, times the weight.

    `kind` is a `DecoderConfig.norm`; the weight of "offset" is what 1 is added to.
    """

    def __init__(self, width: int, config: DecoderConfig, *, dtype: DTypeLike) -> None:
        self.kind = config.norm
        self.weight = nnx.Param(jnp.full((width,), 0 if self.kind == "offset" else 1, dtype))
        self.epsilon = config.norm_epsilon

    def __call__(self, inputs: Float[Array, "*shape width"]) -> Float[Array, "*shape width"]:
        wide = inputs.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.epsilon)
        weight = self.weight[...].reshape((1,) * (inputs.ndim - 1) + (-1,))
        if self.kind == "plain":
            return weight * normed.astype(inputs.dtype)
        weight = weight.astype(jnp.float32)
        return (normed * (1 + weight if self.kind == "offset" else weight)).astype(inputs.dtype)


class Attention(nnx.Module):
    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs | None) -> None:
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.head_dim = config.head_dim
        self.scalar, self.cap = config.query_scalar, config.attention_cap
        self.query = Linear(config.width, queries, bias=config.qkv_bias, **options)
        self.key = Linear(config.width, keys, bias=config.qkv_bias, **options)
        self.value = Linear(config.width, keys, bias=config.qkv_bias, **options)
        self.output = Linear(queries, config.width, bias=config.output_bias, **options)
        self.norms_heads = config.head_norm == "head"
        sizes = {"none": None, "head": (self.head_dim,) * 2, "whole": (queries, keys)}
        normed = sizes[config.head_norm]
        self.query_norm = normed and RMSNorm(normed[0], config, dtype=dtype)
        self.key_norm = normed and RMSNorm(normed[1], config, dtype=dtype)

    def __call__(
        self,
        inputs: Float[Array, "length width"],
        mask: Bool[Array, "length length"],
        angles: tuple[Float32[Array, "length half"], Float32[Array, "length half"]] | None,
    ) -> Float[Array, "length width"]:
        """`angles` are the cosine and sine of each position; None: no rotary positions."""
        length = inputs.shape[0]
        queries = self._heads(self.query(inputs), self.query_norm)
        keys = self._heads(self.key(inputs), self.key_norm)
        values = self._heads(self.value(inputs), None)
        if angles is not None:
            queries, keys = rope.rotate(queries, *angles), rope.rotate(keys, *angles)
        mixed = attend(queries, keys, values, mask, self.scalar, self.cap)
        return self.output(mixed.reshape(length, -1))

    def _heads(self, projected: Array, norm: RMSNorm | None) -> Array:
        """Cut into heads, normed after or before that."""
        if norm is not None and not self.norms_heads:
            projected = norm(projected)
        heads = projected.reshape(projected.shape[0], -1, self.head_dim)
        return norm(heads) if norm is not None and self.norms_heads else heads


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


class Experts(nnx.Module):
    """The gated MLPs of a mixture, `experts` of each matrix in one array."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs | None) -> None:
        into = (config.experts, config.expert_width, config.width)
        self.gate = nnx.Param(_initial(into, dtype, rngs))
        self.up = nnx.Param(_initial(into, dtype, rngs))
        self.down = nnx.Param(_initial((into[0], into[2], into[1]), dtype, rngs))


class MixtureMLP(nnx.Module):
    """Each token goes through the experts of the largest shares of a softmax over all of them.

    Dense: every expert is computed for every token, one expert after the other, and weighted
    with 0 where it was not chosen. Shares and sums are float32.
    """

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs | None) -> None:
        self.activation, self.used = config.activation, config.experts_used
        self.shares_add_up = config.shares_add_up
        self.router = Linear(config.width, config.experts, bias=False, dtype=dtype, rngs=rngs)
        self.experts = Experts(config, dtype=dtype, rngs=rngs)

    def __call__(self, inputs: Float[Array, "length width"]) -> Float[Array, "length width"]:
        activation = _ACTIVATIONS[self.activation]

        def add(total: Array, expert: tuple[Array, Array, Array, Array]) -> tuple[Array, None]:
            gate, up, down, shares = expert
            gated = activation(project(inputs, gate).astype(inputs.dtype))
            gated = gated * project(inputs, up).astype(inputs.dtype)
            return total + project(gated, down) * shares[:, None], None

        experts = self.experts
        matrices = (experts.gate[...], experts.up[...], experts.down[...])
        nothing = jnp.zeros(inputs.shape, jnp.float32)
        total, _ = jax.lax.scan(add, nothing, (*matrices, self.shares(inputs).T))
        return total.astype(inputs.dtype)

    def shares(self, inputs: Float[Array, "length width"]) -> Float32[Array, "length experts"]:
        """How much of each expert a token gets: `used` of them are not 0."""
        shares = jax.nn.softmax(project(inputs, self.router.weight[...]), axis=-1)
        largest, chosen = jax.lax.top_k(shares, self.used)
        if self.shares_add_up:
            largest = largest / jnp.sum(largest, axis=-1, keepdims=True)
        place = jnp.arange(inputs.shape[0])[:, None]
        return jnp.zeros_like(shares).at[place, chosen].set(largest)


class Layer(nnx.Module):
    """One layer. It knows its own kind, so that it keeps it wherever it is put."""

    def __init__(
        self, config: DecoderConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs | None
    ) -> None:
        self.window, self.rope = config.window(index), config.rope(index)
        before, after = config.norm_places != "after", config.norm_places != "before"
        norm = lambda wanted: RMSNorm(config.width, config, dtype=dtype) if wanted else None  # noqa: E731
        mlp = MixtureMLP if config.has_experts(index) else GatedMLP
        self.attention_norm = norm(before)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.attention_post_norm = norm(after)
        self.mlp_norm = norm(before)
        self.mlp = mlp(config, dtype=dtype, rngs=rngs)
        self.mlp_post_norm = norm(after)

    def __call__(
        self,
        inputs: Float[Array, "length width"],
        mask: Bool[Array, "length length"],
        angles: tuple[Float32[Array, "length half"], Float32[Array, "length half"]] | None,
    ) -> Float[Array, "length width"]:
        mixed = self.attention(_normed(self.attention_norm, inputs), mask, angles)
        inputs = inputs + _normed(self.attention_post_norm, mixed)
        return inputs + _normed(self.mlp_post_norm, self.mlp(_normed(self.mlp_norm, inputs)))


def _normed(norm: RMSNorm | None, inputs: Array) -> Array:
    return inputs if norm is None else norm(inputs)


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
        self.layers = nnx.List(
            Layer(config, index, dtype=dtype, rngs=rngs) for index in range(config.layers)
        )
        self.norm = RMSNorm(config.width, config, dtype=dtype)
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

        Position t sees s iff s <= t, both are of one segment, and s is within the
        layer's window if it has one. Segment 0 is padding: its tokens may be
        anything, its hidden states are finite and mean nothing. With `remat` a
        backward pass keeps only what goes into each layer and computes the rest of
        the layer again.
        """
        tokens = jnp.where(segments == 0, 0, tokens.astype(jnp.int32))
        hidden = self.embedding(tokens)
        if self.config.scaled_embedding:
            # Rounded twice, as the reference does: 55.5 for width 3072 in bfloat16.
            root = np.float32(math.sqrt(self.config.width))
            hidden = hidden * jnp.asarray(root).astype(hidden.dtype)
        masks = {window: segment_mask(segments, window) for window in self._kinds("window")}
        angles: dict[str, Any] = {
            kind: None if kind == "none" else rope.angles(positions, self.config, kind)
            for kind in self._kinds("rope")
        }
        for layer in self.layers:
            call = _rematerialised(layer) if remat else layer
            hidden = call(hidden, masks[layer.window], angles[layer.rope])
        return self.norm(hidden)

    def _kinds(self, name: str) -> list[Any]:
        return sorted({getattr(layer, name) for layer in self.layers})

    def unembed(
        self, hidden: Float[Array, "positions width"]
    ) -> Float32[Array, "positions vocabulary"]:
        """Logits, always float32, capped if the model caps them, for any number of positions."""
        head = self.embedding if self.head is None else self.head
        logits = project(hidden, head.weight[...])
        cap = self.config.output_cap
        return logits if cap is None else soft_cap(logits, cap)
