"""Validation of the sizes and choices of a decoder."""

import dataclasses
import math

import pytest

from decoder.config import DecoderConfig, RopeScaling
from decoder.errors import DecoderError

GOOD = DecoderConfig(
    vocabulary=100,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_width=64,
    max_positions=128,
)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"vocabulary": 0}, "vocabulary is 0; it must be at least 1"),
        ({"layers": 0}, "layers is 0"),
        ({"mlp_width": -1}, "mlp_width is -1"),
        ({"kv_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"head_dim": 7}, "head_dim is 7; rotary positions need an even number"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0; it must be above 0"),
        ({"rope_theta": math.nan}, "rope_theta is nan"),
        ({"norm_epsilon": -1.0}, "norm_epsilon is -1.0"),
        ({"activation": "relu"}, "activation 'relu' is not supported; supported: silu, gelu_tanh"),
        (
            {"rope_scaling": RopeScaling("divisors", divisors=(1.0, 2.0))},
            "2 rotary divisors for head_dim 8: expected 4",
        ),
    ],
)
def test_refuses(change: dict, text: str) -> None:
    with pytest.raises(DecoderError, match=text):
        dataclasses.replace(GOOD, **change)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"kind": "yarn"}, "rotary scaling 'yarn' is not supported"),
        ({"kind": "linear", "factor": 0.0}, "divides by 0.0; it must be above 0"),
        ({"kind": "divisors", "divisors": (1.0, math.inf)}, "divides by inf"),
        ({"kind": "llama3", "factor": 8.0}, "original_max_position_embeddings >= 1"),
        (
            {
                "kind": "llama3",
                "low_frequency_factor": 4.0,
                "high_frequency_factor": 4.0,
                "original_positions": 8192,
            },
            "low_freq_factor < high_freq_factor, found 8192, 4.0 and 4.0",
        ),
    ],
)
def test_scaling_refuses(arguments: dict, text: str) -> None:
    with pytest.raises(DecoderError, match=text):
        RopeScaling(**arguments)


def test_is_hashable() -> None:
    """Static under jit: equal configurations are one cache entry."""
    assert hash(GOOD) == hash(dataclasses.replace(GOOD))
    assert len({GOOD, dataclasses.replace(GOOD), dataclasses.replace(GOOD, layers=3)}) == 2
