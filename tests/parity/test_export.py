"""What Stillroom writes, loaded by transformers: the same logits, the same token ids.

Run by `make parity`, in an environment that has torch and transformers.
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoder.config import DecoderConfig, RopeScaling
from decoder.saving import save_folder
from decoder.tokenizer import load_tokenizer
from tests.assets.make_checkpoints import reference_logits
from tests.decoder.random_models import random_model
from tests.models import write_tiny_tokenizer

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

LENGTH = 300
PLAIN = DecoderConfig(
    vocabulary=310,
    width=24,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_width=40,
    max_positions=2048,
    rope_theta=20000.0,
    norm_epsilon=1e-5,
)
CONFIGS = {
    "untied": PLAIN,
    "tied": replace(PLAIN, tied=True),
    "biases": replace(PLAIN, qkv_bias=True, output_bias=True, mlp_bias=True),
    "llama3": replace(PLAIN, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 128)),
    "linear": replace(PLAIN, rope_scaling=RopeScaling("linear", 4.0), tied=True),
}


@pytest.mark.parametrize("files", ["one", "several"])
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_gives_our_logits(tmp_path: Path, name: str, files: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = random_model(CONFIGS[name])
    tokenizer = load_tokenizer(str(write_tiny_tokenizer(tmp_path / "tokenizer")))
    limit = {"one": 10**9, "several": 20_000}[files]
    save_folder(model, tmp_path / "out", tokenizer, most_bytes=limit)

    reference, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert reference.config.eos_token_id == tokenizer.eos_id

    tokens = np.random.default_rng(1).integers(0, 310, LENGTH).astype(np.int32)
    row = (jnp.asarray(tokens), jnp.ones(LENGTH, jnp.int32), jnp.arange(LENGTH, dtype=jnp.int32))
    ours = np.asarray(jax.jit(lambda *row: model.unembed(model(*row)))(*row))
    theirs = reference_logits(reference.eval(), tokens)
    assert np.abs(theirs).max() > 1
    assert np.abs(ours - theirs).max() < 1e-4

    text = "the teacher reads <|im_end|> the corpus: Zwölf, 12\n\tx"
    auto = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert auto(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text).tolist()
    assert (auto.bos_token, auto.eos_token) == (tokenizer.bos, tokenizer.eos)


def test_bfloat16_is_read_as_bfloat16(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = random_model(PLAIN)
    save_folder(model, tmp_path / "out", None, "bfloat16")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert reference.dtype == torch.bfloat16
    assert reference.config.eos_token_id is None
    head = reference.lm_head.weight.detach().float().numpy()
    assert model.head is not None
    expected = model.head.weight[...].astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(head, np.asarray(expected))
