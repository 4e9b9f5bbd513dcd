"""What config.json files of each family say, in old and new spelling, and what is refused."""

import json
from dataclasses import replace
from typing import Any

import pytest

from decoder.config import DecoderConfig, RopeScaling
from decoder.config_json import from_hugging_face, numeric_part, to_hugging_face
from decoder.errors import DecoderError
from decoder.families import FAMILIES

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def read(family: str, **fields: Any) -> DecoderConfig:
    return from_hugging_face({"model_type": family, **SIZES, **fields})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_written_as_it_is_read(family: str) -> None:
    config = read(family)
    written = json.loads(json.dumps(to_hugging_face(config)))
    assert from_hugging_face(written) == config
    assert written["architectures"] == [FAMILIES[family].architecture]


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("mistral", {"sliding_window": 5}, (5, 5, 5, 5)),
        ("mistral", {}, (4096,) * 4),
        ("mistral", {"sliding_window": None}, ()),
        ("qwen2", {"sliding_window": 5}, ()),
        (
            "qwen2",
            {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 3},
            (0, 0, 0, 5),
        ),
        (
            "qwen3",
            {
                "sliding_window": 5,
                "use_sliding_window": True,
                "layer_types": [SLIDING, FULL, FULL, SLIDING],
            },
            (5, 0, 0, 5),
        ),
        ("gemma2", {"sliding_window": 5}, (5, 0, 5, 0)),
        ("gemma3_text", {"sliding_window": 5, "sliding_window_pattern": 3}, (5, 5, 0, 5)),
        ("gemma3_text", {"sliding_window": 5, "layer_types": [FULL] * 3 + [SLIDING]}, (0, 0, 0, 5)),
        ("phi3", {"sliding_window": 5}, (5, 5, 5, 5)),
        ("phi3", {}, ()),
        ("mixtral", {"sliding_window": 5}, (5, 5, 5, 5)),
        ("mixtral", {}, ()),
        ("qwen3_moe", {"sliding_window": 5, "use_sliding_window": True}, (5, 5, 5, 5)),
        ("qwen3_moe", {"sliding_window": 5}, ()),
        # Without layer_types, the layers without positions have the window.
        ("smollm3", {"sliding_window": 5, "use_sliding_window": True}, (0, 0, 0, 5)),
        (
            "smollm3",
            {
                "sliding_window": 5,
                "use_sliding_window": True,
                "no_rope_layer_interval": 2,
            },
            (0, 5, 0, 5),
        ),
        (
            "smollm3",
            {
                "sliding_window": 5,
                "use_sliding_window": True,
                "no_rope_layers": [0, 1, 1, 0],
            },
            (5, 0, 0, 5),
        ),
        ("smollm3", {"sliding_window": 5}, ()),
    ],
)
def test_windows(family: str, fields: dict, windows: tuple[int, ...]) -> None:
    assert read(family, **fields).windows == windows


def test_positions_that_only_some_layers_have() -> None:
    assert read("smollm3").ropes == ("global", "global", "global", "none")
    assert read("smollm3", no_rope_layers=[0, 1, 1, 1]).ropes == ("none",) + ("global",) * 3
    assert read("smollm3", no_rope_layer_interval=2).ropes == ("global", "none") * 2
    assert read("smollm3", no_rope_layer_interval=1).ropes == ("none",) * 4


def test_both_bases_of_gemma3_in_both_spellings() -> None:
    scaled = {"rope_type": "linear", "factor": 8.0}
    old = read(
        "gemma3_text",
        rope_theta=5e4,
        rope_scaling=scaled,
        rope_local_base_freq=7e3,
        layer_types=None,
    )
    new = read(
        "gemma3_text",
        rope_parameters={
            FULL: {**scaled, "rope_theta": 5e4},
            SLIDING: {"rope_type": "default", "rope_theta": 7e3},
        },
    )
    assert old == new
    assert (old.rope_theta, old.rope_local_theta) == (5e4, 7e3)
    assert old.rope_scaling == RopeScaling("linear", 8.0)


def test_gemma3_with_eyes() -> None:
    """Of a model that also sees, its text part; absent sizes are transformers'."""
    config = from_hugging_face(
        {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 3},
            "vision_config": {"hidden_size": 1},
        }
    )
    assert (config.family, config.layers, config.width) == ("gemma3_text", 3, 2304)
    with pytest.raises(DecoderError, match="tie_word_embeddings is False, and True in text_con"):
        from_hugging_face(
            {
                "model_type": "gemma3",
                "tie_word_embeddings": False,
                "text_config": {"tie_word_embeddings": True},
            }
        )


@pytest.mark.parametrize("cap", [None, 30.0])
def test_gemma3_with_eyes_caps_no_logits(cap: float | None) -> None:
    """transformers caps those of the language model alone, whatever the whole model's file says."""
    alone = {"model_type": "gemma3_text", "final_logit_softcapping": cap}
    assert from_hugging_face(alone).output_cap == cap
    whole = {"model_type": "gemma3", "text_config": alone}
    if cap is None:
        assert from_hugging_face(whole).output_cap is None
        return
    with pytest.raises(DecoderError, match=r"text_config.final_logit_softcapping is 30.0, which"):
        from_hugging_face(whole)


def test_the_gelu_of_gemma() -> None:
    assert read("gemma", hidden_act="gelu").activation == "gelu_tanh"
    assert read("gemma2", hidden_activation="gelu").activation == "gelu"
    with pytest.raises(DecoderError, match="hidden_act 'silu' and hidden_activation 'gelu_pyto"):
        read("gemma2", hidden_act="silu", hidden_activation="gelu_pytorch_tanh")


def test_experts() -> None:
    config = read(
        "qwen3_moe", num_experts=9, mlp_only_layers=[3], decoder_sparse_step=1, norm_topk_prob=True
    )
    assert config.sparse == (True, True, True, False)
    assert (config.experts, config.experts_used, config.expert_width) == (9, 8, 768)
    assert config.shares_add_up
    assert read("qwen3_moe", decoder_sparse_step=2).sparse == (False, True, False, True)
    assert read("qwen3_moe", decoder_sparse_step=3).sparse == (False, False, True, False)
    both = read("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[1])
    assert both.sparse == (False, False, False, True)
    assert read("qwen3_moe").sparse == (True,) * 4
    config = read("mixtral", num_local_experts=6)
    assert (config.experts, config.experts_used, config.expert_width) == (6, 2, 64)
    assert config.shares_add_up
    assert config.sparse == (True,) * 4


@pytest.mark.parametrize(
    ("family", "fields", "text"),
    [
        ("phi3", {"rope_scaling": {"type": "longrope", "factor": 4.0}}, "has the type 'longrope'"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "has the type 'linear'"),
        ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor is 0.75"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "has the type 'yarn'"),
        ("qwen2", {"attention_bias": False}, "attention_bias is False, which changes"),
        ("qwen3", {"layer_types": [FULL]}, "expected one entry for each of 4 layers"),
        ("qwen3", {"layer_types": [SLIDING] * 4}, "but no window is in use: sliding_window is"),
        (
            "gemma2",
            {"layer_types": ["chunked_attention"] * 4},
            "layer_types has 'chunked_attention'; supported: full_attention",
        ),
        ("mistral", {"layer_types": [FULL] * 4}, "which transformers does not read for"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0; it must be at least 1"),
        ("mistral", {"attention_bias": True}, "attention_bias is True, which changes"),
        ("gemma", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, which"),
        ("gemma", {"hidden_act": None}, "hidden_act is null. Leave it out for"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_scalar is 0.0; it must be above 0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is"),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_type": "default"}},
            "expected an object with 'full_attention' and 'sliding_attention'",
        ),
        ("olmo2", {"clip_qkv": 8.0}, "the field clip_qkv .8.0. is not understood"),
        ("mixtral", {"num_local_experts": 1}, "goes through 2 of 1 experts"),
        ("mixtral", {"num_local_experts": 4, "num_experts": 8}, r"disagree: \[4, 8\]"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        ("smollm3", {"no_rope_layers": [2, 1, 1, 1]}, "no_rope_layers has 2; supported: 0, 1"),
        ("llama", {"num_experts": 4}, "the field num_experts .4. is not understood"),
    ],
)
def test_refuses_by_name(family: str, fields: dict, text: str) -> None:
    with pytest.raises(DecoderError, match=text):
        read(family, **fields)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gemma2", {"attn_logit_softcapping": 20.0}),
        ("mistral", {"sliding_window": None}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
        ("qwen3_moe", {"norm_topk_prob": True}),
    ],
)
def test_what_changes_numbers_changes_the_fingerprint(family: str, change: dict) -> None:
    plain = {"model_type": family, **SIZES}
    assert numeric_part(plain | change) != numeric_part(plain)


@pytest.mark.parametrize(
    ("family", "change", "text"),
    [
        ("mistral", {"windows": (5, 5, 0, 5)}, "model_type 'mistral' cannot say windows"),
        ("llama", {"output_cap": 30.0}, "model_type 'llama' cannot say output_cap 30.0"),
        ("gemma2", {"windows": (5, 0, 6, 0)}, "model_type 'gemma2' cannot say windows"),
    ],
)
def test_what_a_family_cannot_say(family: str, change: dict, text: str) -> None:
    with pytest.raises(DecoderError, match=text):
        to_hugging_face(replace(read(family), **change))
