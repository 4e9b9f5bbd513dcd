"""Configurations as they are published: each is read, and its keys that change nothing are so."""

import json
from typing import Any

import pytest

from decoder.config_json import from_hugging_face, numeric_part, text_part, to_hugging_face
from decoder.errors import DecoderError
from decoder.families import COMMON, FAMILIES
from tests.assets.published_configs import LOADED, REFUSED


@pytest.mark.parametrize("name", LOADED)
def test_is_read(name: str) -> None:
    published = json.loads(json.dumps(LOADED[name]))
    part = text_part(published)
    found = from_hugging_face(published)
    if "hidden_size" in part:
        assert (found.width, found.layers) == (part["hidden_size"], part["num_hidden_layers"])
    assert found.heads == part.get("num_attention_heads", 8)
    family = FAMILIES[part["model_type"]]
    heads = part.get("head_dim", family.default("head_dim")) or found.width // found.heads
    assert found.head_dim == heads
    # As it is written again, and without what changes nothing: the same decoder.
    assert from_hugging_face(to_hugging_face(found)) == found
    assert numeric_part(published).keys() <= COMMON | family.fields
    assert from_hugging_face(numeric_part(published)) == found


def test_every_family_is_published() -> None:
    assert {text_part(config)["model_type"] for config in LOADED.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name: str) -> None:
    published, text = REFUSED[name]
    with pytest.raises(DecoderError, match=text):
        from_hugging_face(published)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Llama 3.2 1B", {"rope_theta": 5e5, "tied": True, "kv_heads": 8, "qkv_bias": False}),
        ("Mistral 7B v0.1", {"windows": (4096,) * 32}),
        ("Mistral 7B v0.3", {"windows": ()}),
        ("Ministral 8B", {"windows": (32768,) * 36, "head_dim": 128}),
        ("Qwen 2.5 0.5B", {"windows": (), "qkv_bias": True, "output_bias": False}),
        ("R1 distill of Qwen 1.5B", {"windows": (), "rope_theta": 1e4, "tied": False}),
        ("Qwen 3 Coder 30B A3B", {"experts": 128, "shares_add_up": True, "head_norm": "head"}),
        ("Mixtral 8x7B", {"experts": 8, "experts_used": 2, "sparse": (True,) * 32}),
        ("Gemma 2B, first", {"activation": "gelu_tanh", "tied": True}),
        ("Gemma 2 27B", {"windows": (4096, 0) * 23, "query_scalar": 144.0, "output_cap": 30.0}),
        ("Gemma 3 270M", {"windows": ((512,) * 5 + (0,)) * 3, "rope_local_theta": 1e4}),
        ("Gemma 3 4B", {"windows": ((1024,) * 5 + (0,)) * 5 + (1024,) * 4, "kv_heads": 4}),
        ("Phi 3 mini 4k", {"windows": (2047,) * 32}),
        ("Phi 4", {"windows": (), "kv_heads": 10}),
        ("SmolLM3 3B", {"ropes": (("global",) * 3 + ("none",)) * 9, "windows": ()}),
        ("OLMo 2 7B", {"norm_places": "after", "head_norm": "whole"}),
    ],
)
def test_is_understood(name: str, expected: dict[str, Any]) -> None:
    found = from_hugging_face(LOADED[name])
    assert {key: getattr(found, key) for key in expected} == expected


# Each value that changes nothing, and one that does (None: there is none).
SWITCHES: list[tuple[str, str, Any, Any]] = [
    ("llama", "is_causal", True, False),
    ("llama", "use_mrope", False, True),
    ("qwen2", "use_mrope", False, True),
    ("llama", "num_nextn_predict_layers", 0, 1),
    ("llama", "partial_rotary_factor", 1.0, 0.5),
    ("llama", "use_qk_norm", False, True),
    ("qwen3", "use_qk_norm", True, False),
    ("llama", "qkv_bias", False, True),
    ("qwen2", "qkv_bias", True, False),
    ("qwen2", "attention_bias", None, False),
    ("llama", "shared_expert_intermediate_size", 0, 512),
    ("llama", "use_bidirectional_attention", False, True),
    ("llama", "add_cross_attention", False, True),
    ("llama", "is_encoder_decoder", False, True),
    ("llama", "tie_encoder_decoder", False, True),
    ("llama", "cross_attention_hidden_size", None, 64),
    ("llama", "pruned_heads", {}, {"0": [1]}),
    ("llama", "quantization_config", None, {"bits": 4}),
    ("llama", "sliding_window", None, 64),
    ("llama", "use_sliding_window", False, True),
    ("llama", "lm_head_bias", False, True),
    ("llama", "mrope_section", None, [16, 24, 24]),
    ("gemma2", "sliding_window_size", 4096, 512),
    ("llama", "some_new_switch", None, False),
    *(
        ("llama", key, value, None)
        for key, value in {
            "attn_implementation": "flash_attention_2",
            "_attn_implementation": "eager",
            "_attn_implementation_internal": "sdpa",
            "_flash_attn_2_enabled": True,
            "use_flash_attn": True,
            "model_max_length": 4096,
            "_commit_hash": "0123",
            "neftune_noise_alpha": 5.0,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.01,
            "chunk_size_feed_forward": 0,
            "max_length": 20,
            "top_k": 50,
            "do_sample": False,
            "num_beams": 1,
            "id2label": {"0": "LABEL_0"},
            "problem_type": "regression",
            "auto_map": {"AutoConfig": "x.Y"},
            "unsloth_version": "2025.1",
            "torchscript": False,
            "use_bfloat16": False,
            "tf_legacy_loss": False,
            "_name_or_path": "somewhere",
            "transformers_version": "4.30",
            "dtype": "bfloat16",
            "cache_implementation": "hybrid",
            "pretraining_tp": 1,
        }.items()
    ),
]

PLAIN = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 100,
}


@pytest.mark.parametrize(("family", "key", "neutral", "other"), SWITCHES)
def test_a_key_at_the_value_that_changes_nothing(
    family: str, key: str, neutral: Any, other: Any
) -> None:
    plain = {"model_type": family, **PLAIN}
    if family == "gemma2":
        plain["sliding_window"] = 4096
    assert from_hugging_face({**plain, key: neutral}) == from_hugging_face(plain)
    assert numeric_part({**plain, key: neutral}) == numeric_part(plain)
    if other is not None:
        with pytest.raises(DecoderError, match=f"{key} "):
            from_hugging_face({**plain, key: other})
