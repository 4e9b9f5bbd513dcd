"""Rotary frequencies against published numbers and float64; rotation against complex numbers."""

import dataclasses
import decimal
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from numpy._core._multiarray_umath import __cpu_dispatch__ as dispatched
from numpy._core._multiarray_umath import __cpu_features__ as features

from decoder import rope
from decoder.config import DecoderConfig, RopeScaling


def config(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> DecoderConfig:
    return DecoderConfig(
        vocabulary=10,
        width=head_dim,
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=head_dim,
        mlp_width=8,
        max_positions=8192,
        rope_theta=theta,
        rope_scaling=scaling,
    )


def llama3(factor: float) -> RopeScaling:
    return RopeScaling("llama3", factor, 1.0, 4.0, 8192)


def test_default_frequencies() -> None:
    expected = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(rope.frequencies(config(128, 5e5)), expected, rtol=2e-7)


HEAD_DIMS = (6, 12, 20, 64, 80, 96, 128, 256)
THETAS = (1e4, 1e5, 5e5, 1e6)


def nearest(exact: Decimal) -> np.float32:
    """The float32 next to a number that is known to 40 digits."""
    guess = np.float32(float(exact))
    near = [np.nextafter(guess, np.float32(0)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(near, key=lambda one: abs(Decimal(float(one)) - exact))


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_step_is_the_float32_next_to_its_exact_value(head_dim: int, theta: float) -> None:
    """Exponent, power and inverse, in decimal numbers of 40 digits; no bit is left to chance."""
    expected = []
    with decimal.localcontext(prec=40):
        for pair in range(head_dim // 2):
            exponent = nearest(Decimal(2 * pair) / head_dim)
            power = nearest(Decimal(theta) ** Decimal(float(exponent)))
            expected.append(nearest(1 / Decimal(float(power))))
    np.testing.assert_array_equal(rope.frequencies(config(head_dim, theta)), expected)


def frequencies_of_all() -> str:
    """Bytes, as hexadecimal digits, of frequencies of many sizes, with scaling and without."""
    return b"".join(
        rope.frequencies(config(head_dim, theta, scaling)).tobytes()
        for head_dim in HEAD_DIMS
        for theta in THETAS
        for scaling in (None, RopeScaling("linear", 3.0), llama3(8.0))
    ).hex()


def test_the_same_bytes_on_a_lesser_cpu() -> None:
    """numpy takes other code on a CPU without this one's instructions; so it does when told to.

    The bytes differ where `frequencies` takes `np.power` in float32.
    """
    present = [name for name in dispatched if features[name]]
    if not present:
        pytest.skip("this CPU has nothing that numpy would choose its code by")
    command = "from tests.decoder.test_rope import frequencies_of_all as of; print(of())"
    lesser = subprocess.run(
        [sys.executable, "-c", command],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(present)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert lesser.stdout.strip() == frequencies_of_all()


@pytest.mark.parametrize(
    ("head_dim", "factor", "kept", "blended"), [(128, 8.0, 29, 35), (64, 32.0, 15, 18)]
)
def test_llama3_bands(head_dim: int, factor: float, kept: int, blended: int) -> None:
    """C45: which frequencies are unchanged, blended and divided."""
    plain = rope.frequencies(config(head_dim, 5e5))
    scaled = rope.frequencies(config(head_dim, 5e5, llama3(factor)))
    np.testing.assert_array_equal(scaled[:kept], plain[:kept])
    between = slice(kept, blended)
    assert np.all(scaled[between] < plain[between])
    assert np.all(scaled[between] > plain[between] / factor)
    np.testing.assert_allclose(scaled[blended:], plain[blended:] / factor, rtol=1e-7)


def test_llama3_last_frequency() -> None:
    assert rope.frequencies(config(128, 5e5))[-1] == pytest.approx(2.45514e-06, rel=1e-5)
    assert rope.frequencies(config(128, 5e5, llama3(8.0)))[-1] == pytest.approx(
        3.06893e-07, rel=1e-5
    )


def test_llama3_blend_in_float64() -> None:
    """The rule as published, by wavelength, one frequency at a time."""
    expected = []
    for exponent in range(0, 128, 2):
        frequency = 500000.0 ** (-exponent / 128)
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4.0:
            expected.append(frequency)
        elif wavelength > 8192 / 1.0:
            expected.append(frequency / 8.0)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * frequency / 8.0 + smooth * frequency)
    np.testing.assert_allclose(rope.frequencies(config(128, 5e5, llama3(8.0))), expected, rtol=2e-6)


def test_linear_and_divisors() -> None:
    plain = rope.frequencies(config(8, 1e4))
    linear = rope.frequencies(config(8, 1e4, RopeScaling("linear", 4.0)))
    np.testing.assert_allclose(linear, plain / 4, rtol=1e-7)
    divisors = (1.0, 2.0, 4.0, 8.0)
    divided = rope.frequencies(config(8, 1e4, RopeScaling("divisors", divisors=divisors)))
    np.testing.assert_allclose(divided, plain / np.asarray(divisors, np.float32), rtol=1e-7)


def test_neighbouring_late_positions_stay_apart() -> None:
    """C52: bfloat16 would make both of these 8192."""
    cosine, sine = rope.angles(jnp.asarray([8190, 8191], jnp.int32), config(64, 1e4))
    assert cosine.dtype == sine.dtype == jnp.float32
    expected = np.cos([8190.0, 8191.0])
    np.testing.assert_allclose(np.asarray(cosine[:, 0]), expected, atol=1e-5)
    assert abs(float(cosine[0, 0] - cosine[1, 0])) > 0.1


def test_rotates_halves_as_complex_numbers() -> None:
    """Element i and element i + half are real and imaginary part."""
    random = np.random.default_rng(0)
    heads = random.normal(size=(5, 3, 8))
    positions = np.asarray([0, 1, 7, 300, 4000])
    frequencies = 100.0 ** (-np.arange(4) / 4)
    turned = (heads[..., :4] + 1j * heads[..., 4:]) * np.exp(
        1j * positions[:, None] * frequencies[None]
    )[:, None, :]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    cosine, sine = rope.angles(jnp.asarray(positions, jnp.int32), config(8, 100.0))
    rotated = rope.rotate(jnp.asarray(heads, jnp.float32), cosine, sine)
    np.testing.assert_allclose(np.asarray(rotated), expected, atol=2e-3)
    np.testing.assert_allclose(np.asarray(rotated[:3]), expected[:3], atol=1e-5)


def test_keeps_the_dtype_and_computes_wide() -> None:
    heads = jnp.ones((2, 1, 4), jnp.bfloat16)
    cosine, sine = rope.angles(jnp.asarray([8190, 8191], jnp.int32), config(4, 1e4))
    rotated = rope.rotate(heads, cosine, sine)
    assert rotated.dtype == jnp.bfloat16
    assert not np.array_equal(
        np.asarray(rotated[0], np.float32), np.asarray(rotated[1], np.float32)
    )


def test_scaling_changes_angles_at_every_position_but_the_first() -> None:
    plain = config(16, 1e4)
    scaled = dataclasses.replace(plain, rope_scaling=RopeScaling("linear", 8.0))
    positions = jnp.asarray([0, 1, 1000], jnp.int32)
    difference = np.abs(rope.angles(positions, plain)[1] - rope.angles(positions, scaled)[1])
    assert difference[0].max() == 0
    assert difference[1:].max(axis=1).min() > 0.1
