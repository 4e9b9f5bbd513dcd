"""What Stillroom writes, loaded by transformers: the same logits, the same token ids.

Run by `make parity`, in an environment that has torch and transformers.
"""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from decoder.config import DecoderConfig, RopeScaling
from decoder.loading import load_model
from decoder.model import Decoder
from decoder.saving import save_folder
from decoder.settings import own_settings
from decoder.tokenizer import load_tokenizer
from decoder.weight_files import INDEX
from tests.assets.make_checkpoints import reference_logits
from tests.decoder.random_models import random_model
from tests.models import write_tiny_teacher, write_tiny_tokenizer

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


PROMPT = [5, 9, 40, 7]
MOST = 24  # tokens that are generated


def generated(folder: Path) -> list[int]:
    """What transformers generates of itself, greedily, by the settings in the folder."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=MOST)
    return found[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("place", ["config.json", "generation_config.json"])
def test_generation_stops_where_it_stops_on_the_source(tmp_path: Path, place: str) -> None:
    """At the second of two end tokens, wherever they are named."""
    from transformers import AutoTokenizer

    source = write_tiny_teacher(tmp_path / "source", layers=3, scale=0.5)
    settings = json.loads((source / "config.json").read_text())
    # Without an end the model goes on; a token that comes first at a later place is made one.
    (source / "config.json").write_text(json.dumps({**settings, "eos_token_id": None}))
    free = generated(source)
    assert len(free) == MOST
    stop = next(n for n in range(3, MOST) if free[n] not in free[:n])
    unseen = next(one for one in range(300) if one not in free)
    ends = {"eos_token_id": [unseen, free[stop]], "pad_token_id": 1}
    (source / "config.json").write_text(json.dumps({**settings, "eos_token_id": unseen}))
    path = source / place
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **ends}))
    named = json.loads((source / "tokenizer_config.json").read_text())
    named |= {"pad_token": "<|im_start|>", "padding_side": "left", "model_max_length": 77}
    (source / "tokenizer_config.json").write_text(json.dumps(named))

    model = load_model(str(source)).model
    assert isinstance(model, Decoder)
    save_folder(model, tmp_path / "out", None, settings=own_settings(str(source)))
    expected = free[: stop + 1]
    assert generated(source) == generated(tmp_path / "out") == expected

    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "out")]
    names = ("pad_token", "pad_token_id", "padding_side", "model_max_length", "all_special_ids")
    for name in names:
        assert getattr(tokenizers[0], name) == getattr(tokenizers[1], name), name
    assert (tokenizers[1].padding_side, tokenizers[1].model_max_length) == ("left", 77)


def test_which_weights_transformers_takes(tmp_path: Path) -> None:
    """model.safetensors, though there be an index of other files."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = write_tiny_teacher(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    other = {name: values + 1 for name, values in tensors.items()}
    save_file(other, folder / "model-00001-of-00001.safetensors", {"format": "pt"})
    save_file(other, folder / "consolidated.safetensors", {"format": "pt"})
    weight_map = dict.fromkeys(other, "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    def norms() -> list[np.ndarray]:
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ours = load_model(str(folder)).model
        assert isinstance(ours, Decoder)
        return [theirs.model.norm.weight.detach().numpy(), np.asarray(ours.norm.weight[...])]

    for found in norms():
        np.testing.assert_array_equal(found, tensors["model.norm.weight"])
    (folder / "model.safetensors").unlink()
    for found in norms():
        np.testing.assert_array_equal(found, other["model.norm.weight"])
