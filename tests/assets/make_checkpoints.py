"""Writes tests/assets/checkpoints/: small random Llama checkpoints with expected logits.

The reference is `transformers` in float32 on a CPU. Run it where torch and
transformers are installed (the environment of `make parity`):

    .venv-parity/bin/python -m tests.assets.make_checkpoints

Each folder holds config.json, one or more *.safetensors as transformers writes
them, and expected.npz: `tokens` int16[1501], `positions` int16[n], `logits`
float32[n, vocabulary] at those positions.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

CHECKPOINTS = Path(__file__).parent / "checkpoints"
LENGTH = 1501  # positions 0 … 1,500
KEPT = sorted({0, 1, 2, 3, *range(0, LENGTH, 50), 1023, 1024, LENGTH - 2, LENGTH - 1})

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Every layout: settings of LlamaConfig, the stored dtype, the largest shard.
LAYOUTS: dict[str, dict[str, Any]] = {
    "every_head_its_own": {
        "config": {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "dtype": "float32",
    },
    "grouped_tied": {
        "config": {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        "dtype": "bfloat16",
    },
    "one_key_head_wide": {
        "config": {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
        "dtype": "float32",
    },
    "biases": {
        "config": {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "dtype": "float16",
    },
    "llama3_sharded": {
        "config": {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
        "dtype": "float32",
        "shard": "16KB",
    },
    "linear_tied": {
        "config": {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
        "dtype": "bfloat16",
    },
}


def write_checkpoint(folder: Path, layout: dict[str, Any], seed: int) -> Any:
    """Save a random model of the layout; returns it in float32 with the stored values."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(**COMMON, **layout["config"], attn_implementation="eager")
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.25)
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    model.to(getattr(torch, layout["dtype"])).save_pretrained(
        folder, max_shard_size=layout.get("shard", "1GB")
    )
    (folder / "generation_config.json").unlink(missing_ok=True)
    # Loaded anew: `model.to(float32)` would keep rotary frequencies that were rounded above.
    return LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def reference_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """float32 [length, vocabulary] of one row."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens.astype(np.int64))[None]).logits[0].numpy()


def random_tokens(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, COMMON["vocab_size"], LENGTH).astype(np.int16)


def main() -> None:
    shutil.rmtree(CHECKPOINTS, ignore_errors=True)
    for seed, (name, layout) in enumerate(LAYOUTS.items()):
        folder = CHECKPOINTS / name
        tokens = random_tokens(seed)
        logits = reference_logits(write_checkpoint(folder, layout, seed), tokens)
        np.savez_compressed(
            folder / "expected.npz",
            tokens=tokens,
            positions=np.asarray(KEPT, np.int16),
            logits=logits[KEPT],
        )
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{name}: {size / 1000:.0f} kB, logits {np.abs(logits).max():.1f} at most")


if __name__ == "__main__":
    sys.exit(main())
