"""Reading config.json: what is understood, in old and new spelling, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoder.config import DecoderConfig, RopeScaling
from decoder.config_json import from_hugging_face, numeric_part, to_hugging_face
from decoder.errors import DecoderError

ASSETS = Path(__file__).parent.parent / "assets" / "checkpoints"

PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_SCALING = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_defaults_are_those_of_llama() -> None:
    assert from_hugging_face(PLAIN) == DecoderConfig(
        vocabulary=100,
        width=32,
        layers=2,
        heads=4,
        kv_heads=4,
        head_dim=8,
        mlp_width=64,
        max_positions=2048,
        rope_theta=10000.0,
        norm_epsilon=1e-6,
        tied=False,
    )


def test_a_config_that_transformers_wrote() -> None:
    written = json.loads((ASSETS / "llama3_sharded" / "config.json").read_text())
    config = from_hugging_face(written)
    assert (config.heads, config.kv_heads, config.head_dim, config.width) == (4, 2, 16, 24)
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 128)
    assert not config.tied


def test_a_config_of_an_older_release() -> None:
    """SmolLM2's: null scaling, bookkeeping of its own."""
    config = from_hugging_face(
        PLAIN
        | {
            "architectures": ["LlamaForCausalLM"],
            "is_llama_config": True,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "pretraining_tp": 1,
            "torch_dtype": "bfloat16",
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
            "tie_word_embeddings": True,
            "num_key_value_heads": 2,
            "head_dim": None,
        }
    )
    assert config.tied
    assert config.rope_theta == 100000.0
    assert config.rope_scaling is None
    assert (config.head_dim, config.kv_heads) == (8, 2)


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            5e5,
            LLAMA3_SCALING,
        ),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}}, 5e5, LLAMA3_SCALING),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            5e5,
            LLAMA3_SCALING,
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}, 777.0, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 1e4, RopeScaling("linear", 2.0)),
        ({"rope_scaling": {"rope_type": "default"}}, 1e4, None),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3},
                "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
            },
            5e5,
            LLAMA3_SCALING,
        ),
    ],
)
def test_rotary_settings(fields: dict, theta: float, scaling: RopeScaling | None) -> None:
    config = from_hugging_face(PLAIN | fields)
    assert config.rope_theta == theta
    assert config.rope_scaling == scaling


def test_stated_head_size_wins_over_the_derived_one() -> None:
    """C49: hidden 64, 4 heads, head_dim 32."""
    config = from_hugging_face(PLAIN | {"hidden_size": 64, "head_dim": 32})
    assert config.head_dim == 32


def test_biases() -> None:
    config = from_hugging_face(PLAIN | {"attention_bias": True, "mlp_bias": True})
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model_type": "gpt_neox"}, "model_type is 'gpt_neox'; supported: llama, mistral, qwen2"),
        ({"model_type": None}, "model_type is None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
        (
            {"hidden_act": "relu2"},
            "hidden_act is 'relu2'; supported: silu, gelu_pytorch_tanh, gelu",
        ),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"embedding_multiplier": 12.0}, "the field embedding_multiplier .12.0. is not understood"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling has the type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "has the type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters has the type 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "missing: .'factor'."),
        ({"rope_scaling": {"factor": 2.0}}, "not understood: .'factor'."),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "missing: .'high_freq_factor'"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}},
            "not understood: .'mscale'.",
        ),
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, "names two types"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; expected an object"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5; supported is 1",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_theta is given as .10000.0, 500000.0.",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default"},
            },
            "disagree",
        ),
        ({"hidden_size": None}, "the field hidden_size is missing"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5; expected a whole number"),
        ({"num_attention_heads": True}, "num_attention_heads is True; expected a whole number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; expected a number"),
        ({"attention_bias": 1}, "attention_bias is 1; expected true or false"),
        ({"hidden_size": 33}, "hidden_size 33 is no multiple of num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "cannot share 3 key-value heads"),
    ],
)
def test_refuses_by_name(fields: dict, text: str) -> None:
    with pytest.raises(DecoderError, match=text):
        from_hugging_face(PLAIN | fields)


def test_a_null_is_absent() -> None:
    assert from_hugging_face(PLAIN | {"sliding_window": None, "some_new_field": None}) == (
        from_hugging_face(PLAIN)
    )


def test_numeric_part_leaves_bookkeeping_out() -> None:
    noisy = PLAIN | {
        "transformers_version": "5.0",
        "_name_or_path": "/somewhere",
        "torch_dtype": "float32",
        "dtype": "float32",
        "bos_token_id": 1,
        "rope_scaling": None,
        "sliding_window": None,
    }
    assert numeric_part(noisy) == PLAIN
    assert numeric_part(PLAIN | {"rope_theta": 5e5}) != PLAIN


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": {"type": "linear", "factor": 3}},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"head_dim": 6, "num_key_value_heads": 2, "max_position_embeddings": 77},
        {"rms_norm_eps": 1e-5, "intermediate_size": 65},
    ],
)
def test_what_is_written_is_read_back(changes: dict[str, Any]) -> None:
    config = from_hugging_face(PLAIN | changes)
    written = to_hugging_face(config)
    assert from_hugging_face(json.loads(json.dumps(written))) == config
    assert from_hugging_face({**written, "vocab_size": 99}) != config
    # Absent, they would be 1 and 2 for transformers.
    assert (written["bos_token_id"], written["eos_token_id"]) == (None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv_bias": True}, "qkv_bias True and output_bias False"),
        ({"rope_scaling": RopeScaling("divisors", divisors=(1.0,) * 4)}, "'divisors'"),
    ],
)
def test_what_cannot_be_written(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DecoderError, match=message):
        to_hugging_face(replace(from_hugging_face(PLAIN), **changes))
