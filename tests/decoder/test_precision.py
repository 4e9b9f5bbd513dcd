"""Explicit precision of matrix products."""

import jax
import jax.numpy as jnp
import numpy as np

from decoder.precision import matmul_precision, project


def test_float32_is_never_lowered() -> None:
    assert matmul_precision(jnp.float32) == jax.lax.Precision.HIGHEST
    assert matmul_precision(jnp.bfloat16) == jax.lax.Precision.DEFAULT


def test_project_multiplies_by_the_transpose() -> None:
    random = np.random.default_rng(0)
    inputs, weight = random.normal(size=(5, 7)), random.normal(size=(3, 7))
    got = project(jnp.asarray(inputs, jnp.float32), jnp.asarray(weight, jnp.float32))
    np.testing.assert_allclose(got, inputs @ weight.T, atol=1e-5)


def test_bfloat16_accumulates_in_float32() -> None:
    """4,096 ones and a small rest: a bfloat16 sum stops growing at 256."""
    inputs = jnp.ones((1, 4096), jnp.bfloat16)
    got = project(inputs, jnp.ones((1, 4096), jnp.bfloat16))
    assert got.dtype == jnp.float32
    assert float(got[0, 0]) == 4096.0
