"""A `DecoderConfig` from a parsed config.json, strictly, and a config.json from it.

Whatever stands there and could change the model's numbers but is not understood
is an error that names the field. What a family is, stands in `families`.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from decoder.config import DecoderConfig
from decoder.config_fields import flag, integer, number
from decoder.config_keys import HARMLESS, NEUTRAL, SAME
from decoder.config_layers import experts_of, layer_keys, ropes_of, windows_of
from decoder.config_rope import rope_of, rope_scaling_keys
from decoder.errors import DecoderError
from decoder.families import COMMON, Family, family_of
from decoder.tokenizer import Tokenizer

# transformers' names of the activations that a decoder knows.
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}

# Nulls in these are read as if the key was not there, whatever the family's default.
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq")


def from_hugging_face(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a parsed config.json describes.

    An absent key has the value that transformers gives it for this `model_type`; so has a key
    with the value null, where no such value exists or null is one.
    Raises `DecoderError` naming the field that is missing, of the wrong type,
    or not understood.
    """
    config = text_part(config)
    family = family_of(config.get("model_type"))
    present = {key: value for key, value in config.items() if value is not None}
    _check_unknown(present, family)
    values = _with_defaults(config, family)
    heads, width = integer(values, "num_attention_heads"), integer(values, "hidden_size")
    layers = integer(values, "num_hidden_layers")
    bias = _own_flag(values, "attention_bias", family)
    theta, scaling, local = rope_of(present, family)
    windows = windows_of(values, family, layers)
    fields: dict[str, Any] = {
        "vocabulary": integer(values, "vocab_size"),
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": integer(values, "num_key_value_heads", heads),
        "head_dim": integer(values, "head_dim", _head_dim(width, heads, values)),
        "mlp_width": integer(values, "intermediate_size"),
        "max_positions": integer(values, "max_position_embeddings"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_local_theta": local,
        "norm_epsilon": number(values, "rms_norm_eps", 0.0),
        "activation": _activation(values, family),
        "tied": flag(values, "tie_word_embeddings", False),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": _own_flag(values, "mlp_bias", family),
        "query_scalar": _optional(values, "query_pre_attn_scalar", family),
        "attention_cap": _optional(values, "attn_logit_softcapping", family),
        "output_cap": _optional(values, "final_logit_softcapping", family),
        "windows": windows,
        "ropes": ropes_of(values, family, windows),
        "family": family.name,
    }
    return DecoderConfig(**{**fields, **experts_of(values, family, layers), **family.fixed})


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries about the language model: all of them, or those of Gemma 3's text part.

    Raises `DecoderError` where the two levels of such a file disagree, or where transformers
    leaves out for the whole model what it does for the part.
    """
    if config.get("model_type") != "gemma3":
        return config
    part = config.get("text_config")
    if not isinstance(part, Mapping):
        raise DecoderError(f"config.json: text_config is {part!r}; expected an object")
    _check_architecture(config, "Gemma3ForConditionalGeneration")
    outer = {key: config[key] for key in ("quantization_config",) if config.get(key) is not None}
    part = {"model_type": "gemma3_text", **part, **outer}
    tied = config.get("tie_word_embeddings")
    if tied is not None and part.setdefault("tie_word_embeddings", tied) != tied:
        raise DecoderError(
            f"config.json: tie_word_embeddings is {tied!r}, and "
            f"{part['tie_word_embeddings']!r} in text_config; keep the right one"
        )
    cap = part.get("final_logit_softcapping")
    if cap is not None:
        raise DecoderError(
            f"config.json: text_config.final_logit_softcapping is {cap!r}, which transformers "
            "applies to a language model alone and not to one that also sees. Set it to null, or "
            "save the language model by itself (model_type 'gemma3_text')"
        )
    if part["model_type"] != "gemma3_text":
        raise DecoderError(
            f"config.json: text_config.model_type is {part['model_type']!r}; supported is "
            "'gemma3_text'"
        )
    return part


def to_hugging_face(
    config: DecoderConfig,
    tokenizer: Tokenizer | None = None,
    dtype: str = "float32",
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The config.json of a decoder; `from_hugging_face` gives the decoder again.

    The rotary keys are the old ones, which every release of transformers reads. Ids of special
    tokens that are not known are null: without the key, transformers would assume some.
    `dtype` is that of the weights beside it. `settings` are entries that change no number, such as
    ids of special tokens: where given, they alone are written, and none of `tokenizer`.
    Raises `DecoderError` for what a config.json of the model's family cannot say.
    """
    family = family_of(config.family)
    if "attention_bias" in family.fields and config.qkv_bias != config.output_bias:
        raise DecoderError(
            "a config.json has one field, attention_bias, for all biases of the attention; this "
            f"model has qkv_bias {config.qkv_bias} and output_bias {config.output_bias}. Give it "
            "biases of zeros where it has none"
        )
    names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    written: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        family.activation_key: names[config.activation],
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling_keys(config.rope_scaling),
        "tie_word_embeddings": config.tied,
    }
    own = {
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "rope_local_base_freq": config.rope_local_theta,
        "query_pre_attn_scalar": _whole(config.query_scalar),
        "attn_logit_softcapping": config.attention_cap,
        "final_logit_softcapping": config.output_cap,
    }
    written |= {key: value for key, value in own.items() if key in family.fields}
    written |= layer_keys(config, family)
    _check_same(from_hugging_face(written), config)
    return (
        written
        | (special_ids(tokenizer) if settings is None else dict(settings))
        | {"torch_dtype": dtype}
    )


def special_ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The entries about special tokens that a tokenizer gives, where the model has none."""
    return {
        "bos_token_id": None if tokenizer is None else tokenizer.bos_id,
        "eos_token_id": None if tokenizer is None else tokenizer.eos_id,
        "pad_token_id": None,
    }


def _check_same(read: DecoderConfig, config: DecoderConfig) -> None:
    differing = [
        f"{field.name} {getattr(config, field.name)!r} (it would be read as "
        f"{getattr(read, field.name)!r})"
        for field in fields(config)
        if getattr(read, field.name) != getattr(config, field.name)
    ]
    if differing:
        raise DecoderError(
            f"a config.json of model_type {config.family!r} cannot say {', '.join(differing)}"
        )


def _whole(value: float | None) -> float | int | None:
    """As a whole number where it is one: transformers wants query_pre_attn_scalar so."""
    return int(value) if value is not None and value == int(value) else value


def numeric_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a config.json that can change numbers, for fingerprints."""
    config = text_part(config)
    family = family_of(config.get("model_type"))
    return {
        key: value
        for key, value in config.items()
        if key not in HARMLESS
        and (value is not None or (key in family.nullable and family.default(key) is not None))
        and (key in family.fields or (key not in NEUTRAL and key not in SAME))
    }


def _check_architecture(config: Mapping[str, Any], expected: str) -> None:
    architectures = config.get("architectures")
    if architectures is not None and architectures != [expected]:
        raise DecoderError(
            f"config.json: architectures is {architectures!r}; supported is ['{expected}']"
        )


def _check_unknown(config: Mapping[str, Any], family: Family) -> None:
    _check_architecture(config, family.architecture)
    neutral = {**NEUTRAL, **family.off}
    for key, value in config.items():
        if key in COMMON or key in family.fields or key in HARMLESS:
            continue
        if key in SAME and SAME[key] in family.fields:
            if value != config.get(SAME[key]):
                raise DecoderError(
                    f"config.json: {key} {value!r} and {SAME[key]} {config.get(SAME[key])!r} "
                    f"disagree; keep the right one as {SAME[key]}"
                )
            continue
        if key not in neutral:
            raise DecoderError(
                f"config.json: the field {key} ({value!r}) is not understood and may change the "
                "model's numbers. Take it out of a copy of the folder if the model computes the "
                "same without it; else give the model as a function of your own: "
                "package.module:function"
            )
        if value not in neutral[key]:
            raise DecoderError(
                f"config.json: {key} is {value!r}, which changes the model's numbers and is "
                f"not supported for model_type {family.name!r}"
            )


def _with_defaults(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The entries and the family's values of absent keys, without nulls."""
    keys = COMMON | family.fields
    for key in keys & set(config):
        null = config[key] is None and key not in family.nullable and key not in _ROPE
        if null and family.default(key) is not None:
            raise DecoderError(
                f"config.json: {key} is null. Leave it out for {family.default(key)!r}, which "
                "transformers takes for this model_type, or say the value"
            )
    values = {key: family.default(key) for key in keys} | dict(config)
    if config.get("num_local_experts") is not None and "num_experts" not in config:
        del values["num_experts"]  # the other name of the same
    return {key: value for key, value in values.items() if value is not None}


def _head_dim(width: int, heads: int, config: Mapping[str, Any]) -> int | None:
    if "head_dim" in config:
        return None
    if heads < 1 or width % heads:
        raise DecoderError(
            f"config.json: head_dim is missing and hidden_size {width} is no multiple of "
            f"num_attention_heads {heads}"
        )
    return width // heads


def _own_flag(config: Mapping[str, Any], key: str, family: Family) -> bool:
    return flag(config, key, False) if key in family.fields else False


def _optional(config: Mapping[str, Any], key: str, family: Family) -> float | None:
    return number(config, key, 0.0) if key in family.fields and key in config else None


def _activation(config: Mapping[str, Any], family: Family) -> str:
    """The activation, which files of Gemma name twice."""
    found = {}
    for key in ("hidden_act", "hidden_activation"):
        if key in config:
            name = config[key]
            if name not in _ACTIVATIONS:
                raise DecoderError(
                    f"config.json: {key} is {name!r}; supported: {', '.join(_ACTIVATIONS)}"
                )
            found[key] = family.activations.get(name, _ACTIVATIONS[name])
    if len(set(found.values())) > 1:
        raise DecoderError(
            f"config.json: hidden_act {config['hidden_act']!r} and hidden_activation "
            f"{config['hidden_activation']!r} disagree; keep the right one as "
            f"{family.activation_key}"
        )
    return found[family.activation_key]
