"""Every family against stored logits of transformers: 1e-4 in float32, from files and back.

The stored logits are rounded to six digits. `make parity` compares live, and more.
"""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from decoder.families import FAMILIES
from decoder.loading import load_model
from decoder.model import Decoder
from decoder.saving import save_folder
from tests.decoder.golden_checkpoints import LENGTH, NAMES, read, tokens, write


def decoder_at(folder: Path) -> Decoder:
    model = load_model(str(folder)).model
    assert isinstance(model, Decoder)
    return model


def test_every_family_is_here() -> None:
    """Llama has files of its own in tests/assets."""
    types = {read(name)["config"]["model_type"] for name in NAMES}
    assert types >= set(FAMILIES) - {"llama"}


@pytest.mark.parametrize("name", NAMES)
def test_logits(tmp_path: Path, name: str) -> None:
    golden = read(name)
    graphdef, state = nnx.split(decoder_at(write(tmp_path, golden)))

    # Compiled without effort: most of the time of this test is the compiler's.
    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def score(state: nnx.State, row: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state)
        return model.unembed(model(row, jnp.ones_like(row), jnp.arange(LENGTH)))

    found = np.asarray(score(state, jnp.asarray(tokens(golden))))[golden["positions"]]
    assert np.abs(found).max() > 1
    np.testing.assert_allclose(found, golden["logits"], atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_back(tmp_path: Path, name: str) -> None:
    """Tensors of the same names and values, and a config.json that gives the same decoder."""
    model = decoder_at(write(tmp_path / "in", read(name)))
    save_folder(model, tmp_path / "out", None)
    again = decoder_at(tmp_path / "out")
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["model_type"] == model.config.family
