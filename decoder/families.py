"""The families of models that config.json files name: one entry each, read and written by
`config_json`.

An entry says what its family's code in transformers does and config.json does not say, what an
absent key means (which differs between families), and which keys change numbers. What a family
is made of is in `DecoderConfig`; nothing else in this package asks for a family's name but
`tensor_names`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from decoder.errors import DecoderError

# Keys that every family understands.
COMMON = frozenset(
    [
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "layer_types",
    ]
)

_COMMON_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


@dataclass(frozen=True)
class Family:
    """What one `model_type` means.

    Attributes:
      name: the `model_type`.
      architecture: transformers' class with a language model's head.
      fields: keys understood beyond `COMMON`.
      defaults: what transformers takes for an absent key, where it is not `_COMMON_DEFAULTS`'.
      nullable: keys with a default for which null says "none of it", as it is written.
      fixed: fields of `DecoderConfig` that no key says.
      windows: which layers have `sliding_window`: "none", "all", or those that are "listed" in
        `layer_types`.
      activation_key: where the activation's name stands.
      activations: names of the activation that mean another one in this family.
      ropes: the rotary types that its code in transformers takes.
      off: keys that may stand there with these values alone, before those of every family
        (`config_keys.NEUTRAL`).
    """

    name: str
    architecture: str
    fields: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    nullable: frozenset[str] = frozenset({"num_key_value_heads"})
    fixed: Mapping[str, Any] = field(default_factory=dict)
    windows: str = "none"
    activation_key: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=dict)
    ropes: tuple[str, ...] = ("default", "linear", "llama3")
    off: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def default(self, key: str) -> Any:
        """What transformers takes for an absent key; None where there is nothing to take."""
        return self.defaults.get(key, _COMMON_DEFAULTS.get(key))


_GEMMA: dict[str, Any] = {"norm": "offset", "scaled_embedding": True}
_GEMMA_DEFAULTS: dict[str, Any] = {
    "hidden_act": None,
    "head_dim": 256,
    "tie_word_embeddings": True,
}
_TANH = "gelu_pytorch_tanh"
_QWEN_WINDOWS = {"use_sliding_window", "sliding_window", "max_window_layers"}
_QWEN_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

# Some files say that there are the norms which these families always have.
_QK_NORM = {"use_qk_norm": (True,), "qk_layernorm": (True,)}

_ALL = [
    Family(
        "llama",
        "LlamaForCausalLM",
        fields=frozenset({"attention_bias", "mlp_bias"}),
        defaults={"max_position_embeddings": 2048},
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        fields=frozenset({"sliding_window"}),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        nullable=frozenset({"num_key_value_heads", "sliding_window"}),
        windows="all",
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        fields=frozenset(_QWEN_WINDOWS),
        defaults=_QWEN_DEFAULTS,
        nullable=frozenset({"num_key_value_heads", "sliding_window"}),
        fixed={"qkv_bias": True},
        windows="listed",
        # Its projections have biases whatever such a key says.
        off={"attention_bias": (), "qkv_bias": (True,)},
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        fields=frozenset({"attention_bias", *_QWEN_WINDOWS}),
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
        nullable=frozenset({"num_key_value_heads", "sliding_window"}),
        fixed={"head_norm": "head"},
        off=_QK_NORM,
        windows="listed",
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        fields=frozenset(
            {
                "attention_bias",
                "num_experts",
                "num_local_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
                "norm_topk_prob",
                "decoder_sparse_step",
                "mlp_only_layers",
                *_QWEN_WINDOWS,
            }
        ),
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
        nullable=frozenset({"sliding_window"}),
        fixed={"head_norm": "head"},
        off=_QK_NORM,
        windows="all",
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        fields=frozenset(
            {"num_experts", "num_local_experts", "num_experts_per_tok", "sliding_window"}
        ),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        fixed={"shares_add_up": True},
        windows="all",
    ),
    Family(
        "gemma",
        "GemmaForCausalLM",
        fields=frozenset({"attention_bias", "hidden_activation"}),
        defaults={
            **_GEMMA_DEFAULTS,
            "hidden_act": _TANH,
            "num_key_value_heads": 16,
            "max_position_embeddings": 8192,
        },
        nullable=frozenset(),
        fixed=_GEMMA,
        # The first files said "gelu" and meant the approximation; transformers knows.
        activations={"gelu": "gelu_tanh"},
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        fields=frozenset(
            {
                "attention_bias",
                "hidden_activation",
                "query_pre_attn_scalar",
                "attn_logit_softcapping",
                "final_logit_softcapping",
                "sliding_window",
            }
        ),
        defaults={
            **_GEMMA_DEFAULTS,
            "hidden_activation": _TANH,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
        },
        nullable=frozenset({"attn_logit_softcapping", "final_logit_softcapping", "sliding_window"}),
        fixed={**_GEMMA, "norm_places": "both"},
        windows="listed",
        activation_key="hidden_activation",
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        fields=frozenset(
            {
                "attention_bias",
                "hidden_activation",
                "query_pre_attn_scalar",
                "final_logit_softcapping",
                "sliding_window",
                "sliding_window_pattern",
                "_sliding_window_pattern",
                "rope_local_base_freq",
            }
        ),
        defaults={
            **_GEMMA_DEFAULTS,
            # The text part of published files leaves sizes out, too.
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "hidden_activation": _TANH,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
        },
        nullable=frozenset({"sliding_window"}),
        fixed={**_GEMMA, "norm_places": "both", "head_norm": "head"},
        off=_QK_NORM,
        windows="listed",
        activation_key="hidden_activation",
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        fields=frozenset(
            {
                "attention_bias",
                "mlp_bias",
                "no_rope_layers",
                "no_rope_layer_interval",
                *_QWEN_WINDOWS,
            }
        ),
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
        },
        windows="listed",
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        fields=frozenset({"sliding_window", "original_max_position_embeddings"}),
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        windows="all",
        ropes=("default",),
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        fields=frozenset({"attention_bias"}),
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        fixed={"norm": "wide", "norm_places": "after", "head_norm": "whole"},
        off=_QK_NORM,
    ),
]

FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}


def family_of(name: Any) -> Family:
    """The family of a `model_type`. Raises `DecoderError` for one that is not known."""
    if name not in FAMILIES:
        raise DecoderError(
            f"config.json: model_type is {name!r}; supported: {', '.join(FAMILIES)} and gemma3 "
            "(its text part). Another family can be given as a function of your own: "
            "package.module:function"
        )
    return FAMILIES[name]
