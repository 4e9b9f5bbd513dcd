"""Live comparison with transformers: random Llama checkpoints in every layout, float32.

Run by `make parity`, in an environment that has torch and transformers.
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from decoder.loading import load_model
from tests.assets.make_checkpoints import (
    LAYOUTS,
    LENGTH,
    random_tokens,
    reference_logits,
    write_checkpoint,
)

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_at_every_position(tmp_path: Path, name: str) -> None:
    """Other random weights than the committed assets; all 1,501 positions, to 1e-4."""
    reference = write_checkpoint(tmp_path, LAYOUTS[name], seed=100)
    tokens = random_tokens(100)
    expected = reference_logits(reference, tokens)
    model = load_model(str(tmp_path)).model
    ones, order = np.ones(LENGTH, np.int32), np.arange(LENGTH, dtype=np.int32)
    hidden = model(*(jnp.asarray(one) for one in (tokens.astype(np.int32), ones, order)))  # pyright: ignore
    difference = np.abs(np.asarray(model.unembed(hidden)) - expected)  # pyright: ignore
    assert np.abs(expected).max() > 1
    assert difference.max() < 1e-4, f"largest difference per 100 positions: {_profile(difference)}"


def _profile(difference: np.ndarray) -> list[float]:
    return [float(part.max()) for part in np.array_split(difference, 15)]
