"""A GGUF file of the architecture 'llama' as a checkpoint in Hugging Face's naming.

llama.cpp rotates neighbouring pairs of a head where Hugging Face rotates its
halves, and therefore stores the rows of the query and key projections in another
order; that order is undone here.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from jaxtyping import Float32, UInt8

from decoder.checkpoint import Checkpoint, StoredTensor
from decoder.config import DecoderConfig, RopeScaling
from decoder.errors import DecoderError
from decoder.gguf_file import GGUFHeader, GGUFTensor, read_header

ROPE_DIVISORS = "rope_freqs.weight"

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_NEEDED = {
    "llama.block_count": "layers",
    "llama.embedding_length": "width",
    "llama.feed_forward_length": "mlp_width",
    "llama.attention.head_count": "heads",
    "llama.context_length": "max_positions",
}
_UNDERSTOOD = frozenset(_NEEDED) | {
    "llama.attention.head_count_kv",
    "llama.attention.key_length",
    "llama.attention.value_length",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.rope.dimension_count",
    "llama.rope.freq_base",
    "llama.rope.scaling.type",
    "llama.rope.scaling.factor",
    "llama.vocab_size",
}


def read_llama(path: Path) -> Checkpoint:
    """The checkpoint in a GGUF file; reads its header, and the rotary divisors if it has any."""
    header = read_header(path)
    architecture = header.metadata.get("general.architecture")
    if architecture != "llama":
        raise DecoderError(f"{path} is of the architecture {architecture!r}; supported is 'llama'")
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise DecoderError(f"{path} is one of several parts; merge them with llama-gguf-split")
    config = _config(header)
    identity = {
        key: value
        for key, value in header.metadata.items()
        if key.startswith("llama.") or key == "general.architecture"
    }
    tensors = [_stored(header, tensor, config) for tensor in header.tensors.values()]
    by_parameter = {tensor.parameter: tensor for tensor in tensors}
    return Checkpoint("gguf", path, config, identity, by_parameter)


def _config(header: GGUFHeader) -> DecoderConfig:
    path, metadata = header.path, header.metadata
    for key, value in metadata.items():
        if key.startswith("llama.") and key not in _UNDERSTOOD:
            raise DecoderError(
                f"{path}: the field {key} ({value!r}) is not understood and may change the "
                "model's numbers"
            )
    for name in ("token_embd.weight", "blk.0.attn_q.weight"):
        if name not in header.tensors:
            raise DecoderError(f"{path}: the tensor {name} is missing")
    sizes = {name: _integer(header, key) for key, name in _NEEDED.items()}
    heads, width = sizes["heads"], sizes["width"]
    head_dim = _integer(header, "llama.attention.key_length", width // max(heads, 1))
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if _integer(header, key, head_dim) != head_dim:
            raise DecoderError(f"{path}: {key} is {metadata[key]}; supported is {head_dim}")
    vocabulary = header.tensors["token_embd.weight"].shape[0]
    if _integer(header, "llama.vocab_size", vocabulary) != vocabulary:
        raise DecoderError(
            f"{path}: llama.vocab_size is {metadata['llama.vocab_size']}, but token_embd.weight "
            f"has {vocabulary} rows"
        )
    return DecoderConfig(
        vocabulary=vocabulary,
        kv_heads=_integer(header, "llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        rope_theta=_number(header, "llama.rope.freq_base", 10000.0),
        rope_scaling=_scaling(header),
        norm_epsilon=_epsilon(header),
        tied="output.weight" not in header.tensors,
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        output_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
        layers=sizes["layers"],
        width=width,
        heads=heads,
        mlp_width=sizes["mlp_width"],
        max_positions=sizes["max_positions"],
    )


def _epsilon(header: GGUFHeader) -> float:
    """Stored as float32: the shortest decimal number that rounds to it."""
    return float(str(np.float32(_number(header, "llama.attention.layer_norm_rms_epsilon"))))


def _scaling(header: GGUFHeader) -> RopeScaling | None:
    kind = header.metadata.get("llama.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise DecoderError(
            f"{header.path}: llama.rope.scaling.type is {kind!r}; supported: none, linear, and "
            f"the tensor {ROPE_DIVISORS}"
        )
    divisors = header.tensors.get(ROPE_DIVISORS)
    if kind == "linear":
        if divisors is not None:
            raise DecoderError(f"{header.path} has linear rotary scaling and {ROPE_DIVISORS}")
        return RopeScaling("linear", factor=_number(header, "llama.rope.scaling.factor"))
    if divisors is None:
        return None
    stored = _tensor(header, divisors, ROPE_DIVISORS, None)
    values = stored.values(stored.read(), np.dtype(np.float32)).reshape(-1)
    return RopeScaling("divisors", divisors=tuple(values.tolist()))


def _integer(header: GGUFHeader, key: str, default: int | None = None) -> int:
    value = header.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise DecoderError(f"{header.path}: {key} is {value!r}; expected one whole number")
    return value


def _number(header: GGUFHeader, key: str, default: float | None = None) -> float:
    value = header.metadata.get(key, default)
    if not isinstance(value, float):
        raise DecoderError(f"{header.path}: {key} is {value!r}; expected a number")
    return value


def _parameter(name: str) -> str:
    """Hugging Face's name of a tensor; the file's own where there is none."""
    parts = name.split(".")
    if name in _TOP:
        return _TOP[name]
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _PER_LAYER:
        return f"model.layers.{parts[1]}.{_PER_LAYER[parts[2]]}.{parts[3]}"
    return name


def _stored(header: GGUFHeader, tensor: GGUFTensor, config: DecoderConfig) -> StoredTensor:
    parts = tensor.name.split(".")
    order = None
    whole_heads = tensor.shape[0] % config.head_dim == 0  # else its shape is refused later
    if len(parts) == 4 and parts[2] in ("attn_q", "attn_k") and whole_heads:
        order = _half_order(tensor.shape[0], config.head_dim)
    return _tensor(header, tensor, _parameter(tensor.name), order)


def _half_order(rows: int, head_dim: int) -> tuple[int, ...]:
    """For each row in half order (0, 1, … | half, …), its place in pair order (0, half, 1, …)."""
    places = np.arange(rows).reshape(-1, head_dim // 2, 2)
    return tuple(places.swapaxes(1, 2).reshape(-1).tolist())


def _tensor(
    header: GGUFHeader, tensor: GGUFTensor, parameter: str, order: tuple[int, ...] | None
) -> StoredTensor:
    return StoredTensor(
        tensor.name,
        parameter,
        tensor.shape,
        tensor.type.name,
        header.path,
        tensor.offset,
        tensor.size,
        _decoder(tensor.type),
        order,
    )


def _decoder(
    kind: GGMLQuantizationType,
) -> Callable[[UInt8[np.ndarray, "..."]], Float32[np.ndarray, "..."]]:
    def decode(raw: UInt8[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
        if kind == GGMLQuantizationType.F32:
            return raw.view("<f4")
        if kind == GGMLQuantizationType.F16:
            return raw.view("<f2").astype(np.float32)
        return dequantize(raw, kind)

    return decode
