"""SmolLM2 itself against transformers, and its tokenizer against the published patterns.

The reference model reads the same GGUF file through transformers' own
dequantisation; its tokenizer is not used (its conversion loses the digit rule).
"""

import json
import sysconfig
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from decoder.loading import load_model
from decoder.tokenizer import load_tokenizer
from tests.decoder.test_tokenizer_gguf import write
from tests.decoder.varied_text import lines
from tests.models import smollm2_path

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

SMOLLM = (
    r"\p{N}",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
QWEN2 = (LLAMA3[0].replace(r"\p{N}{1,3}", r"\p{N}"),)
PATTERNS = {"smollm": SMOLLM, "gpt-2": SMOLLM[1:], "llama-bpe": LLAMA3, "qwen2": QWEN2}


def real_tokens(count: int) -> np.ndarray:
    """Ids of real text: a source file of the standard library."""
    path = Path(sysconfig.get_paths()["stdlib"]) / "textwrap.py"
    return load_tokenizer(str(smollm2_path())).encode(path.read_text())[:count]


def transformers_model(path: Path) -> Any:
    """The file's configuration and weights as transformers reads and dequantises them.

    What `from_pretrained(gguf_file=…)` does, which would need one more package.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = LlamaConfig(**load_gguf_checkpoint(path)["config"], attn_implementation="eager")
    assert config.rope_parameters["rope_theta"] == 100000.0
    model = LlamaForCausalLM(config).eval()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
    model.tie_weights()
    return model


def test_log_probabilities() -> None:
    """To 1e-3 over the whole vocabulary at 500 positions of real text."""
    import torch

    path = smollm2_path()
    tokens = real_tokens(500)
    assert len(tokens) == 500
    reference = transformers_model(path)
    with torch.no_grad():
        logits = reference(torch.tensor(tokens.astype(np.int64))[None]).logits[0]
        expected = torch.log_softmax(logits, dim=-1).numpy()
    graphdef, state = nnx.split(load_model(str(path)).model)

    @jax.jit
    def score(state: nnx.State, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state)
        order = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        return jax.nn.log_softmax(model.unembed(model(tokens, jnp.ones_like(order), order)))

    got = np.asarray(score(state, jnp.asarray(tokens)))
    difference = np.abs(got - expected).max()
    assert difference < 1e-3, f"{difference:.1e}"
    labels = got[np.arange(499), tokens[1:]]
    assert -3 < labels.mean() < -0.5  # it does predict this text


@pytest.mark.parametrize("rule", PATTERNS)
def test_splitting_rules_are_the_published_patterns(tmp_path: Path, rule: str) -> None:
    """Each rule cuts a few thousand lines as the `regex` module does with the pattern."""
    import regex

    backend = load_tokenizer(str(write(tmp_path / "a.gguf", pre=rule))).backend
    compiled = [regex.compile(pattern) for pattern in PATTERNS[rule]]
    different = []
    for text in lines():
        pieces = [text]
        for pattern in compiled:
            pieces = [part for piece in pieces for part in _cut(pattern, piece)]
        found = backend.pre_tokenizer.pre_tokenize_str(text)
        if [text[start:end] for _, (start, end) in found] != pieces:
            different.append(text)
    assert different == []


def _cut(pattern, text: str) -> list[str]:
    """Matches and what lies between them, in order."""
    parts, place = [], 0
    for match in pattern.finditer(text):
        parts += [text[place : match.start()], match.group()]
        place = match.end()
    return [part for part in [*parts, text[place:]] if part]


def test_transformers_reads_our_tokenizer_files(tmp_path: Path) -> None:
    """The files that a cache carries are those of a usual tokenizer."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = load_tokenizer(str(smollm2_path()))
    for name, content in tokenizer.files().items():
        (tmp_path / name).write_bytes(content)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert (loaded.bos_token_id, loaded.eos_token_id) == (1, 2)
    assert loaded.chat_template == tokenizer.chat_template
    for text in lines()[::40]:
        ids = loaded(text, add_special_tokens=False)["input_ids"]
        assert ids == tokenizer.encode(text).tolist()
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["add_bos_token"] is False
