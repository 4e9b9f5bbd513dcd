"""Where a checkpoint in Hugging Face's layout keeps each parameter of a decoder.

Mostly one tensor is one parameter. Phi 3 stores query, key and value as one matrix, and gate and
up as another; mixtures of experts store each expert's matrices by themselves, which are slices
of one parameter here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decoder.config import DecoderConfig

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

_NAMES = {
    "attention": "self_attn",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "query_norm": "q_norm",
    "key_norm": "k_norm",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "head": "lm_head",
    "router": "gate",
}
# By `DecoderConfig.norm_places`.
_NORMS = {
    "before": {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    },
    "after": {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "both": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}
_FAMILY_NAMES = {
    "mixtral": {"mlp": "block_sparse_moe", "gate": "w1", "down": "w2", "up": "w3"},
}
_FUSED = {
    "phi3": {
        "query": ("qkv_proj", ("query", "key", "value")),
        "key": ("qkv_proj", ("query", "key", "value")),
        "value": ("qkv_proj", ("query", "key", "value")),
        "gate": ("gate_up_proj", ("gate", "up")),
        "up": ("gate_up_proj", ("gate", "up")),
    },
}


@dataclass(frozen=True)
class Part:
    """A stored tensor that holds a parameter, a part of it, or more than it.

    Attributes:
      name: of the stored tensor.
      shape: of the stored tensor.
      start: the first of its rows that belong to the parameter; None: all do.
      place: where along the parameter's first axis it goes; None: it is the whole parameter.
    """

    name: str
    shape: tuple[int, ...]
    start: int | None = None
    place: int | None = None


def parameter_name(path: Sequence[Any], config: DecoderConfig | None = None) -> str:
    """Hugging Face's name of the parameter at a path of the model's state.

    Without a configuration: as in Llama. Not for what `parts` cuts.
    """
    if path[0] == "embedding":
        return EMBEDDING
    names = _names(config)
    parts = [names.get(str(part), str(part)) for part in path]
    return ".".join(parts if path[0] == "head" else ["model", *parts])


def parts(path: Sequence[Any], shape: tuple[int, ...], config: DecoderConfig) -> list[Part]:
    """The stored tensors that hold the parameter of this shape at a path of the model's state."""
    if "experts" in path:
        return _experts(path, shape, config)
    fused = _FUSED.get(config.family, {})
    module = str(path[-2])
    if module not in fused:
        return [Part(parameter_name(path, config), shape)]
    name, members = fused[module]
    rows = _rows(config)
    start = sum(rows[member] for member in members[: members.index(module)])
    total = sum(rows[member] for member in members)
    whole = parameter_name([*path[:-2], name, path[-1]], config)
    return [Part(whole, (total, *shape[1:]), start=start)]


def _experts(path: Sequence[Any], shape: tuple[int, ...], config: DecoderConfig) -> list[Part]:
    *before, module = path
    return [
        Part(parameter_name([*before, expert, module, "weight"], config), shape[1:], place=expert)
        for expert in range(shape[0])
    ]


def _rows(config: DecoderConfig) -> Mapping[str, int]:
    keys = config.kv_heads * config.head_dim
    return {
        "query": config.heads * config.head_dim,
        "key": keys,
        "value": keys,
        "gate": config.mlp_width,
        "up": config.mlp_width,
    }


def _names(config: DecoderConfig | None) -> Mapping[str, str]:
    if config is None:
        return {**_NAMES, **_NORMS["before"]}
    return {**_NAMES, **_NORMS[config.norm_places], **_FAMILY_NAMES.get(config.family, {})}
