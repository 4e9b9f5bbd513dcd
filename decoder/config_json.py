"""A `DecoderConfig` from a parsed config.json, strictly, and a config.json from it.

Whatever stands there and could change the model's numbers but is not understood
is an error that names the field; a key with the value null counts as absent, as
it does in transformers.
"""

from collections.abc import Mapping
from typing import Any

from decoder.config import ACTIVATIONS, DecoderConfig, RopeScaling
from decoder.errors import DecoderError
from decoder.tokenizer import Tokenizer

# Keys that say how a checkpoint was trained, saved or sampled from, not what
# numbers its forward pass gives.
BOOKKEEPING = frozenset(
    [
        "_attn_implementation_autoset",
        "_attn_implementation",
        "_name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "initializer_range",
        "attention_dropout",
        "hidden_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "gradient_checkpointing",
        "pretraining_tp",
        "architectures",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "unk_token_id",
        "auto_map",
        "is_llama_config",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "torchscript",
        "use_bfloat16",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "is_decoder",
        "id2label",
        "label2id",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "prefix",
        "tokenizer_class",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "return_dict_in_generate",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
    ]
)

# Keys that may stand there if they say that a feature is off.
_OFF: dict[str, tuple[Any, ...]] = {
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1, 1.0),
    "cross_attention_hidden_size": (),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "use_sliding_window": (False,),
    "sliding_window": (),
    "quantization_config": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
}

_UNDERSTOOD = frozenset(
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
        "attention_bias",
        "mlp_bias",
    ]
)


def from_hugging_face(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a parsed config.json describes.

    A key with the value null counts as absent, as it does in transformers.
    Raises `DecoderError` naming the field that is missing, of the wrong type,
    or not understood.
    """
    present = {key: value for key, value in config.items() if value is not None}
    _check_family(present)
    _check_unknown(present)
    heads = _integer(present, "num_attention_heads")
    width = _integer(present, "hidden_size")
    bias = _flag(present, "attention_bias", False)
    theta, scaling = _rope(present)
    return DecoderConfig(
        vocabulary=_integer(present, "vocab_size"),
        width=width,
        layers=_integer(present, "num_hidden_layers"),
        heads=heads,
        kv_heads=_integer(present, "num_key_value_heads", heads),
        head_dim=_integer(present, "head_dim", _head_dim(width, heads, present)),
        mlp_width=_integer(present, "intermediate_size"),
        max_positions=_integer(present, "max_position_embeddings", 2048),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_epsilon=_number(present, "rms_norm_eps", 1e-6),
        activation=_activation(present),
        tied=_flag(present, "tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=_flag(present, "mlp_bias", False),
    )


def to_hugging_face(
    config: DecoderConfig, tokenizer: Tokenizer | None = None, dtype: str = "float32"
) -> dict[str, Any]:
    """The config.json of a decoder; `from_hugging_face` gives the decoder again.

    The rotary keys are the old ones, which every release of transformers reads. Ids of special
    tokens that are not known are null: without the key, transformers would assume 1 and 2.
    `dtype` is that of the weights beside it.
    Raises `DecoderError` for what a config.json of this family cannot say.
    """
    if config.qkv_bias != config.output_bias:
        raise DecoderError(
            "a config.json has one field, attention_bias, for all biases of the attention; this "
            f"model has qkv_bias {config.qkv_bias} and output_bias {config.output_bias}. Give it "
            "biases of zeros where it has none"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling(config.rope_scaling),
        "tie_word_embeddings": config.tied,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": None if tokenizer is None else tokenizer.bos_id,
        "eos_token_id": None if tokenizer is None else tokenizer.eos_id,
        "torch_dtype": dtype,
    }


def _rope_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.kind == "divisors":
        raise DecoderError(
            "a config.json cannot say the rotary scaling 'divisors' (one divisor per frequency, "
            "as GGUF files have it). Start from the original model's folder instead of its GGUF "
            "file: its config.json has the rule that the divisors come from"
        )
    group = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        group |= {
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
    return group


def numeric_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a config.json that can change numbers, for fingerprints."""
    return {
        key: value
        for key, value in config.items()
        if key not in BOOKKEEPING and value is not None and key not in _OFF
    }


def _check_family(config: Mapping[str, Any]) -> None:
    family = config.get("model_type")
    if family != "llama":
        raise DecoderError(
            f"config.json: model_type is {family!r}; supported is 'llama'. Another family can be "
            "given as a function of your own: package.module:function"
        )
    architectures = config.get("architectures", ["LlamaForCausalLM"])
    if architectures != ["LlamaForCausalLM"]:
        raise DecoderError(
            f"config.json: architectures is {architectures!r}; supported is ['LlamaForCausalLM']"
        )


def _check_unknown(config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if key in _OFF:
            if value not in _OFF[key]:
                raise DecoderError(
                    f"config.json: {key} is {value!r}, which changes the model's numbers and is "
                    "not supported"
                )
        elif key not in _UNDERSTOOD and key not in BOOKKEEPING:
            raise DecoderError(
                f"config.json: the field {key} ({value!r}) is not understood and may change the "
                "model's numbers. Remove it from config.json if you know that it does not"
            )


def _head_dim(width: int, heads: int, config: Mapping[str, Any]) -> int | None:
    if "head_dim" in config:
        return None
    if heads < 1 or width % heads:
        raise DecoderError(
            f"config.json: head_dim is missing and hidden_size {width} is no multiple of "
            f"num_attention_heads {heads}"
        )
    return width // heads


def _activation(config: Mapping[str, Any]) -> str:
    name = config.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise DecoderError(
            f"config.json: hidden_act is {name!r}; supported: {', '.join(ACTIVATIONS)}"
        )
    return name


# For each rotary type, the keys that belong to it; any other key is an error.
_ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
}


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from the old keys (rope_theta, rope_scaling) or the new one
    (rope_parameters, transformers 5), which must agree where both stand."""
    old = _rope_group(config, "rope_scaling")
    new = _rope_group(config, "rope_parameters")
    if old is not None and new is not None and old[1] != new[1]:
        raise DecoderError(
            f"config.json: rope_scaling {config['rope_scaling']!r} and rope_parameters "
            f"{config['rope_parameters']!r} disagree; keep the right one"
        )
    thetas = {group[0] for group in (old, new) if group is not None and group[0] is not None}
    if "rope_theta" in config:
        thetas.add(_number(config, "rope_theta", 0.0))
    if len(thetas) > 1:
        raise DecoderError(
            f"config.json: rope_theta is given as {sorted(thetas)}; keep the right one"
        )
    group = new if new is not None else old
    return (thetas.pop() if thetas else 10000.0), (group[1] if group is not None else None)


def _rope_group(
    config: Mapping[str, Any], field: str
) -> tuple[float | None, RopeScaling | None] | None:
    if field not in config:
        return None
    if not isinstance(config[field], Mapping):
        raise DecoderError(f"config.json: {field} is {config[field]!r}; expected an object")
    group = {key: value for key, value in config[field].items() if value is not None}
    names = {group.pop(key) for key in ("rope_type", "type") if key in group}
    if len(names) > 1:
        raise DecoderError(f"config.json: {field} names two types: {sorted(map(str, names))}")
    kind = names.pop() if names else "default"
    if kind not in _ROPE_KEYS:
        raise DecoderError(
            f"config.json: {field} has the type {kind!r}; supported: {', '.join(_ROPE_KEYS)}"
        )
    theta = _number(group, "rope_theta", 0.0) if "rope_theta" in group else None
    group.pop("rope_theta", None)
    if group.pop("partial_rotary_factor", 1) != 1:
        raise DecoderError(
            f"config.json: {field}.partial_rotary_factor is "
            f"{config[field]['partial_rotary_factor']!r}; supported is 1"
        )
    unknown = sorted(set(group) - _ROPE_KEYS[kind])
    missing = sorted(_ROPE_KEYS[kind] - set(group))
    if unknown or missing:
        raise DecoderError(
            f"config.json: {field} of type {kind!r} needs the keys {sorted(_ROPE_KEYS[kind])}; "
            f"missing: {missing}, not understood: {unknown}"
        )
    return theta, _scaling(kind, group)


def _scaling(kind: str, group: Mapping[str, Any]) -> RopeScaling | None:
    if kind == "default":
        return None
    factor = _number(group, "factor", 1.0)
    if kind == "linear":
        return RopeScaling("linear", factor=factor)
    return RopeScaling(
        "llama3",
        factor=factor,
        low_frequency_factor=_number(group, "low_freq_factor", 1.0),
        high_frequency_factor=_number(group, "high_freq_factor", 1.0),
        original_positions=_integer(group, "original_max_position_embeddings"),
    )


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    if key not in config and default is None:
        raise DecoderError(f"config.json: the field {key} is missing")
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise DecoderError(f"config.json: {key} is {value!r}; expected a whole number")
    return value


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DecoderError(f"config.json: {key} is {value!r}; expected a number")
    return float(value)


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise DecoderError(f"config.json: {key} is {value!r}; expected true or false")
    return value
