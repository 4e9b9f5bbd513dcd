"""A GGUF file as a checkpoint in Hugging Face's naming.

What llama.cpp's converter does to a checkpoint is undone here: for the architecture 'llama' it
stores the rows of the query and key projections in another order (neighbouring pairs of a head
are rotated against each other, not its halves), and to norms of Gemma it adds the 1 that the
model adds to them.

A file does not say everything: what llama.cpp sets for an architecture by itself is in
`_ARCHITECTURES` and in `_own_rules`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from jaxtyping import Float32, UInt8

from decoder.checkpoint import Checkpoint, StoredTensor
from decoder.config import DecoderConfig, RopeScaling
from decoder.errors import DecoderError
from decoder.families import FAMILIES
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
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_NEEDED = {
    "block_count": "layers",
    "embedding_length": "width",
    "feed_forward_length": "mlp_width",
    "attention.head_count": "heads",
    "context_length": "max_positions",
}
_UNDERSTOOD = frozenset(_NEEDED) | {
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    *("rope.scaling.factor", "rope.scale_linear"),
    "vocab_size",
}


@dataclass(frozen=True)
class _Architecture:
    """What `general.architecture` means.

    Attributes:
      family: its name in config.json files.
      names: of tensors of a layer, where they are not `_PER_LAYER`'s.
      fields: metadata understood beyond `_UNDERSTOOD`, without the architecture's name.
      base: of the rotary frequencies where the file has none; None: it must.
      in_pairs: rows of query and key projections are stored for neighbouring pairs.
      large: layers of the one published size whose scores llama.cpp divides by the root of
        width / heads instead of the head's size.
    """

    family: str
    names: Mapping[str, str] = field(default_factory=dict)
    fields: frozenset[str] = frozenset()
    base: float | None = 10000.0
    in_pairs: bool = False
    large: int | None = None


_ARCHITECTURES = {
    "llama": _Architecture("llama", in_pairs=True),
    "qwen2": _Architecture("qwen2", base=None),
    "qwen3": _Architecture("qwen3", names=_HEAD_NORMS, base=None),
    "gemma": _Architecture("gemma"),
    "gemma2": _Architecture(
        "gemma2",
        names=_POST_NORMS,
        fields=frozenset(
            {"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}
        ),
        large=46,
    ),
    "gemma3": _Architecture(
        "gemma3_text",
        names={**_POST_NORMS, **_HEAD_NORMS},
        fields=frozenset(
            {"attention.sliding_window", "final_logit_softcapping", "rope.freq_base_swa"}
        ),
        base=None,
        large=62,
    ),
}


class _Metadata:
    """The fields of one file's architecture, by their names without the architecture's."""

    def __init__(self, header: GGUFHeader, architecture: str) -> None:
        self.header, self.prefix = header, f"{architecture}."

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.metadata.get(self.prefix + key, default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise DecoderError(
                f"{self.header.path}: {self.prefix}{key} is {value!r}; expected one whole number"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, float):
            raise DecoderError(
                f"{self.header.path}: {self.prefix}{key} is {value!r}; expected a number"
            )
        return value

    def decimal(self, key: str) -> float:
        """Stored as float32: the shortest decimal number that rounds to it."""
        return float(str(np.float32(self.number(key))))


def read_gguf(path: Path) -> Checkpoint:
    """The checkpoint in a GGUF file; reads its header, and the rotary divisors if it has any."""
    header = read_header(path)
    name = header.metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise DecoderError(
            f"{path} is of the architecture {name!r}; supported: {', '.join(_ARCHITECTURES)}"
        )
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise DecoderError(f"{path} is one of several parts; merge them with llama-gguf-split")
    architecture = _ARCHITECTURES[name]
    config = _config(_Metadata(header, name), architecture)
    identity = {
        key: value
        for key, value in header.metadata.items()
        if key.startswith(f"{name}.") or key == "general.architecture"
    }
    tensors = [_stored(header, tensor, config, architecture) for tensor in header.tensors.values()]
    by_parameter = {tensor.parameter: tensor for tensor in tensors}
    return Checkpoint("gguf", path, config, identity, by_parameter)


def _config(metadata: _Metadata, architecture: _Architecture) -> DecoderConfig:
    header, prefix = metadata.header, metadata.prefix
    path = header.path
    for key, value in header.metadata.items():
        understood = _UNDERSTOOD | architecture.fields
        if key.startswith(prefix) and key.removeprefix(prefix) not in understood:
            raise DecoderError(
                f"{path}: the field {key} ({value!r}) is not understood and may change the "
                "model's numbers"
            )
    for name in ("token_embd.weight", "blk.0.attn_q.weight"):
        if name not in header.tensors:
            raise DecoderError(f"{path}: the tensor {name} is missing")
    sizes = {name: metadata.integer(key) for key, name in _NEEDED.items()}
    heads, width = sizes["heads"], sizes["width"]
    head_dim = metadata.integer("attention.key_length", width // max(heads, 1))
    for key in ("rope.dimension_count", "attention.value_length"):
        if metadata.integer(key, head_dim) != head_dim:
            raise DecoderError(
                f"{path}: {prefix}{key} is {metadata.get(key)}; supported is {head_dim}"
            )
    vocabulary = header.tensors["token_embd.weight"].shape[0]
    if metadata.integer("vocab_size", vocabulary) != vocabulary:
        raise DecoderError(
            f"{path}: {prefix}vocab_size is {metadata.get('vocab_size')}, but token_embd.weight "
            f"has {vocabulary} rows"
        )
    fields: dict[str, Any] = {
        **sizes,
        "vocabulary": vocabulary,
        "kv_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_theta": metadata.number("rope.freq_base", architecture.base),
        "rope_scaling": _scaling(metadata),
        "norm_epsilon": metadata.decimal("attention.layer_norm_rms_epsilon"),
        "tied": "output.weight" not in header.tensors,
        "qkv_bias": "blk.0.attn_q.bias" in header.tensors,
        "output_bias": "blk.0.attn_output.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "family": architecture.family,
    }
    fixed = FAMILIES[architecture.family].fixed
    own = _own_rules(metadata, architecture, heads=heads, width=width, head_dim=head_dim)
    return DecoderConfig(**{**fields, **fixed, **own})


def _own_rules(
    metadata: _Metadata, architecture: _Architecture, *, heads: int, width: int, head_dim: int
) -> dict[str, Any]:
    """What llama.cpp's code gives the layers of Gemma: which have the window, scale, base."""
    if not architecture.family.startswith("gemma"):
        return {}
    own: dict[str, Any] = {"activation": "gelu_tanh"}
    if architecture.family == "gemma":
        return own
    layers = metadata.integer("block_count")
    window = metadata.integer("attention.sliding_window")
    every = 2 if architecture.family == "gemma2" else 6
    windows = tuple(window if (layer + 1) % every else 0 for layer in range(layers))
    scalar = width // heads if layers == architecture.large else head_dim
    own |= {"windows": windows, "query_scalar": float(scalar)}
    if architecture.family == "gemma2":
        own["attention_cap"] = metadata.decimal("attn_logit_softcapping")
        own["output_cap"] = metadata.decimal("final_logit_softcapping")
        return own
    if metadata.get("final_logit_softcapping") is not None:
        own["output_cap"] = metadata.decimal("final_logit_softcapping")
    own["ropes"] = tuple("local" if one else "global" for one in windows)
    own["rope_local_theta"] = metadata.number("rope.freq_base_swa", 10000.0)
    return own


def _scaling(metadata: _Metadata) -> RopeScaling | None:
    """As llama.cpp reads a file: a factor without a type is of linear scaling."""
    header = metadata.header
    kind = metadata.get("rope.scaling.type")
    if kind not in (None, "none", "linear"):
        raise DecoderError(
            f"{header.path}: {metadata.prefix}rope.scaling.type is {kind!r}; supported: none, "
            f"linear, and the tensor {ROPE_DIVISORS}"
        )
    divisors = header.tensors.get(ROPE_DIVISORS)
    factor = 1.0 if kind == "none" else _linear_factor(metadata, required=kind == "linear")
    if factor != 1:
        if divisors is not None:
            raise DecoderError(f"{header.path} has linear rotary scaling and {ROPE_DIVISORS}")
        return RopeScaling("linear", factor=factor)
    if divisors is None:
        return None
    stored = _tensor(header, divisors, ROPE_DIVISORS, None)
    values = stored.load(np.dtype(np.float32))[0].reshape(-1)
    if not (values > 0).all():
        raise DecoderError(
            f"{header.path}: the tensor {ROPE_DIVISORS} holds {values.min()}; frequencies are "
            "divided by its numbers, which must be above 0. The file is damaged"
        )
    return RopeScaling("divisors", divisors=tuple(values.tolist()))


def _linear_factor(metadata: _Metadata, *, required: bool) -> float:
    """1 where nothing is scaled, which files also write as 0. The older key counts second."""
    keys = [
        key for key in ("rope.scaling.factor", "rope.scale_linear") if metadata.get(key) is not None
    ]
    if not keys and not required:
        return 1.0
    return metadata.number(keys[0] if keys else "rope.scaling.factor") or 1.0


def _parameter(name: str, architecture: _Architecture) -> str:
    """Hugging Face's name of a tensor; the file's own where there is none."""
    parts, names = name.split("."), {**_PER_LAYER, **architecture.names}
    if name in _TOP:
        return _TOP[name]
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in names:
        return f"model.layers.{parts[1]}.{names[parts[2]]}.{parts[3]}"
    return name


def _stored(
    header: GGUFHeader, tensor: GGUFTensor, config: DecoderConfig, architecture: _Architecture
) -> StoredTensor:
    parts = tensor.name.split(".")
    order = None
    whole_heads = tensor.shape[0] % config.head_dim == 0  # else its shape is refused later
    if architecture.in_pairs and len(parts) == 4 and parts[2] in ("attn_q", "attn_k"):
        order = _half_order(tensor.shape[0], config.head_dim) if whole_heads else None
    added = 1.0 if config.norm == "offset" and tensor.name.endswith("norm.weight") else 0.0
    return _tensor(header, tensor, _parameter(tensor.name, architecture), order, added)


def _half_order(rows: int, head_dim: int) -> tuple[int, ...]:
    """For each row in half order (0, 1, … | half, …), its place in pair order (0, half, 1, …)."""
    places = np.arange(rows).reshape(-1, head_dim // 2, 2)
    return tuple(places.swapaxes(1, 2).reshape(-1).tolist())


def _tensor(
    header: GGUFHeader,
    tensor: GGUFTensor,
    parameter: str,
    order: tuple[int, ...] | None,
    added: float = 0.0,
) -> StoredTensor:
    try:
        decode = block_decoder(tensor.type)
    except NotImplementedError as error:
        raise DecoderError(
            f"{header.path}: the tensor {tensor.name} is stored as {tensor.type.name}, which the "
            "gguf package does not decode. Convert the model to another type, such as F16 or Q8_0"
        ) from error
    return StoredTensor(
        tensor.name,
        parameter,
        tensor.shape,
        tensor.type.name,
        header.path,
        tensor.offset,
        tensor.size,
        decode,
        order,
        added,
    )


def block_decoder(
    kind: GGMLQuantizationType,
) -> Callable[[UInt8[np.ndarray, "..."]], Float32[np.ndarray, "..."]]:
    """What turns the bytes of whole rows of this type into numbers.

    Raises `NotImplementedError` for a type that the `gguf` package does not decode.
    """
    if kind not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        _, size = GGML_QUANT_SIZES[kind]
        dequantize(np.zeros((1, size), np.uint8), kind)

    def decode(raw: UInt8[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
        if kind == GGMLQuantizationType.F32:
            return raw.view("<f4")
        if kind == GGMLQuantizationType.F16:
            return raw.view("<f2").astype(np.float32)
        return dequantize(raw, kind)

    return decode
