"""Explicit precision of matrix products, so that no backend lowers it silently."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32


def matmul_precision(dtype: DTypeLike) -> jax.lax.Precision:
    """HIGHEST for float32 (TPUs and TF32 would round the inputs), else the backend's own."""
    if jnp.dtype(dtype) == jnp.float32:
        return jax.lax.Precision.HIGHEST
    return jax.lax.Precision.DEFAULT


def project(
    inputs: Float[Array, "length inputs"], weight: Float[Array, "outputs inputs"]
) -> Float32[Array, "length outputs"]:
    """`inputs @ weight.T`, accumulated and returned in float32."""
    return jax.lax.dot_general(
        inputs,
        weight,
        (((1,), (1,)), ((), ())),
        precision=matmul_precision(weight.dtype),
        preferred_element_type=jnp.float32,
    )
