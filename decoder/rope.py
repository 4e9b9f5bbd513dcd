"""Rotary position embeddings: frequencies, and their application.

Position and frequency stay float32 whatever the model's dtype (bfloat16 cannot
tell position 8190 from 8191). The halves of a head are rotated against each
other, as in Hugging Face checkpoints, not neighbouring pairs.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64, Integer

from decoder.config import DecoderConfig, RopeScaling


def frequencies(config: DecoderConfig, kind: str = "global") -> Float32[np.ndarray, "half"]:
    """Radians per position for each pair of a head, highest first.

    `kind` is that of a layer, "global" or "local" (`DecoderConfig.ropes`).

    `theta ** (-2 i / head_dim)`, then scaled in float64 and rounded once where the configuration
    says so. Before that exponent, power and inverse are each the float32 next to their exact
    value, in the order in which transformers computes them, since at position 1,500 the last bit
    of a frequency is worth 1e-4 radians. The power is the C library's in float64, rounded: numpy's
    float32 power depends on the CPU's instructions by its last bit, and what a teacher writes
    should not.
    """
    local = config.rope_local_theta if kind == "local" else None
    theta = config.rope_theta if local is None else local
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    powers = np.asarray([math.pow(theta, exponent) for exponent in exponents.tolist()], np.float32)
    base = np.float32(1.0) / powers
    if config.rope_scaling is None or local is not None:
        return base
    return _scale(base.astype(np.float64), config.rope_scaling).astype(np.float32)


def _scale(base: Float64[np.ndarray, "half"], scaling: RopeScaling) -> Float64[np.ndarray, "half"]:
    if scaling.kind == "linear":
        return base / scaling.factor
    if scaling.kind == "divisors":
        return base / np.asarray(scaling.divisors)
    return _llama3(base, scaling)


def _llama3(base: Float64[np.ndarray, "half"], scaling: RopeScaling) -> Float64[np.ndarray, "half"]:
    """Llama 3.1's rule: long wavelengths divided by the factor, short ones kept.

    Between the two, `(1 - s) f / factor + s f` with s rising linearly in
    `original_positions / wavelength` from the low to the high factor, which is 0 and 1 beyond.
    """
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_positions * base / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - smooth) * base / scaling.factor + smooth * base


def angles(
    positions: Integer[Array, "length"], config: DecoderConfig, kind: str = "global"
) -> tuple[Float32[Array, "length half"], Float32[Array, "length half"]]:
    """Cosine and sine of position times frequency."""
    radians = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies(config, kind))[None]
    return jnp.cos(radians), jnp.sin(radians)


def rotate(
    heads: Float[Array, "length heads head_dim"],
    cosine: Float32[Array, "length half"],
    sine: Float32[Array, "length half"],
) -> Float[Array, "length heads head_dim"]:
    """Each head's first half against its second by the position's angles."""
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosine[:, None, :], sine[:, None, :]
    rotated = jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )
    return rotated.astype(heads.dtype)
