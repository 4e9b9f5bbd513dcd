"""GGUF files that transformers reads too, by code of its own: the same logits.

Run by `make parity`. Sizes are those of which transformers' reader is right: it takes some of
what a file says from its own defaults (the size of Qwen 3's heads, Gemma's scale of scores).
It does not read the architecture "gemma", which is Gemma 2's without norms after, windows, caps.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.decoder.gguf_files import CONFIGS, write_gguf
from tests.decoder.random_models import random_model
from tests.parity.layouts import logits, random_tokens
from tests.parity.test_families import SHORT, decoder_at, row_logits

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

CHANGES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "gemma2": {"head_dim": 256, "query_scalar": 256.0},
    "gemma3": {"head_dim": 256, "query_scalar": 256.0},
}


@pytest.mark.parametrize("architecture", CHANGES)
def test_logits(tmp_path: Path, architecture: str) -> None:
    config = replace(CONFIGS[architecture], **CHANGES[architecture])
    path = write_gguf(tmp_path / "model.gguf", architecture, random_model(config))
    tokens = random_tokens(SHORT, 8)
    expected = logits(read_by_transformers(path), tokens)
    assert np.abs(expected).max() > 1
    assert np.abs(row_logits(decoder_at(path), tokens) - expected).max() < 1e-4


def read_by_transformers(path: Path) -> Any:
    """What `from_pretrained(gguf_file=…)` does, which wants a further package for it."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    given = load_gguf_checkpoint(str(path))["config"]
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    found = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(found, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model
