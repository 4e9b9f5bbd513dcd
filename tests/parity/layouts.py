"""Small random checkpoints of every family, written by transformers itself.

Each has several layers of each kind, an odd number of heads or of heads per key head, and
windows far below the length. Imports torch only when called.
"""

from pathlib import Path
from typing import Any

import numpy as np

COMMON: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 36,
    "intermediate_size": 28,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ALTERNATING = [_SLIDING, _FULL, _SLIDING, _FULL]
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_GEMMA = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10}

# Settings of the family's configuration class, beyond COMMON; "model_type" where the layout's
# name is another.
LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": _LLAMA3, "num_hidden_layers": 2},
    # Llama 2 and 3, SmolLM 2: positions as they are.
    "llama_plain": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": True,
        "num_hidden_layers": 2,
    },
    "mistral": {"sliding_window": 24, "num_hidden_layers": 3},
    "mistral_full": {"model_type": "mistral", "sliding_window": None, "num_hidden_layers": 2},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
    },
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 2},
    "qwen3_biases": {
        "model_type": "qwen3",
        "attention_bias": True,
        "layer_types": _ALTERNATING,
        "use_sliding_window": True,
        "sliding_window": 31,
    },
    "gemma": {**_GEMMA, "num_hidden_layers": 2},
    "gemma2": {
        **_GEMMA,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "sliding_window": 24,
        "query_pre_attn_scalar": 7,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        **_GEMMA,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "sliding_window": 24,
        "layer_types": _ALTERNATING,
        "query_pre_attn_scalar": 7,
        "final_logit_softcapping": 5.0,
        "rope_parameters": {
            _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
            _SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "smollm3_windows": {
        "model_type": "smollm3",
        "no_rope_layers": [0, 1, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 24,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "phi3": {
        "sliding_window": 47,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "hidden_size": 72,
    },
    "olmo2": {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2},
    "mixtral": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "sliding_window": 40,
    },
    "qwen3_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen3_moe_sums": {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 24,
    },
}


def model_type(layout: str) -> str:
    return LAYOUTS[layout].get("model_type", layout)


def settings(layout: str, **changes: Any) -> dict[str, Any]:
    """Keywords of the configuration class."""
    given = {key: value for key, value in LAYOUTS[layout].items() if key != "model_type"}
    merged = {**COMMON, **given, **changes}
    if model_type(layout) == "phi3":
        del merged["head_dim"]  # transformers checks rotary sizes against the derived one
    return merged


def write(folder: Path, layout: str, seed: int = 0, dtype: str = "float32", **changes: Any) -> Any:
    """Saves a random model in `dtype`; returns it as transformers loads it again, in float32.

    `changes` are keywords of the configuration class, before the layout's.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type(layout), **settings(layout, **changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomise(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return load(folder)


def randomise(model: Any) -> None:
    """Weights of deviation 0.25, norms around what leaves their input alone."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            offset = "norm.weight" in name and "Gemma" not in type(model).__name__
            parameter.normal_(1.0 if offset else 0.0, 0.25)


def load(folder: Path, dtype: str = "float32") -> Any:
    """As transformers loads it; refuses a folder whose tensors do not fit."""
    import torch
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        # The default takes no bfloat16 of sizes as odd as these.
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """float32 [length, vocabulary] of one document."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens.astype(np.int64))[None]).logits[0].float().numpy()


def random_tokens(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, COMMON["vocab_size"], length).astype(np.int32)
