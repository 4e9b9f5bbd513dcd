"""Checkpoints of every supported architecture as GGUF files, as llama.cpp's converter makes them.

Names of tensors and fields are those of the `gguf` package.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from flax import nnx

from decoder.config import DecoderConfig
from decoder.model import Decoder
from decoder.tensor_names import parameter_name

_BASE = DecoderConfig(
    vocabulary=64,
    width=48,
    layers=7,
    heads=6,
    kv_heads=2,
    head_dim=8,
    mlp_width=40,
    max_positions=512,
    rope_theta=30000.0,
    norm_epsilon=1e-5,
)
_GEMMA = replace(
    _BASE,
    heads=3,
    kv_heads=1,
    rope_theta=10000.0,
    head_dim=16,
    family="gemma",
    norm="offset",
    scaled_embedding=True,
    activation="gelu_tanh",
    tied=True,
)
_GEMMA2 = replace(
    _GEMMA,
    family="gemma2",
    norm_places="both",
    query_scalar=16.0,
    attention_cap=50.0,
    output_cap=30.0,
    windows=(24, 0, 24, 0, 24, 0, 24),
)
# By architecture.
CONFIGS = {
    "llama": _BASE,
    "qwen2": replace(_BASE, family="qwen2", qkv_bias=True, tied=True),
    "qwen3": replace(_BASE, family="qwen3", head_norm="head"),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": replace(
        _GEMMA2,
        family="gemma3_text",
        rope_theta=1000000.0,
        head_norm="head",
        attention_cap=None,
        output_cap=None,
        windows=(24, 24, 24, 24, 24, 0, 24),
        ropes=("local",) * 5 + ("global", "local"),
        rope_local_theta=10000.0,
    ),
}


def write_gguf(path: Path, architecture: str, model: Decoder) -> Path:
    """The model as its family's converter writes it."""
    writer = gguf.GGUFWriter(path, architecture)
    _add_fields(writer, model.config)
    for place, variable in nnx.to_flat_state(nnx.state(model)):
        name, values = parameter_name(place, model.config), np.asarray(variable.get_value())
        writer.add_tensor(*_converted(name, values, architecture, model.config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_fields(writer: gguf.GGUFWriter, config: DecoderConfig) -> None:
    writer.add_vocab_size(config.vocabulary)
    writer.add_block_count(config.layers)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_context_length(config.max_positions)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    if config.rope_scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
    if config.family not in ("gemma", "gemma2"):
        writer.add_rope_freq_base(config.rope_theta)
    if config.family == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if config.windows:
        writer.add_sliding_window(max(config.windows))
    if config.attention_cap is not None:
        writer.add_attn_logit_softcapping(config.attention_cap)
    if config.output_cap is not None:
        writer.add_final_logit_softcapping(config.output_cap)


def _converted(
    name: str, values: np.ndarray, architecture: str, config: DecoderConfig
) -> tuple[str, np.ndarray]:
    kind: Any = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(kind, config.layers)
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        # Neighbouring pairs of a head instead of its halves.
        split = values.reshape(-1, 2, config.head_dim // 2, *values.shape[1:])
        values = np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))
    if config.norm == "offset" and name.endswith("norm.weight"):
        values = values + 1
    return found, values
