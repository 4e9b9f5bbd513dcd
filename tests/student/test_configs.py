"""Presets, config.json files, and configurations that go through JSON unchanged."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx

from decoder import Decoder, DecoderConfig, RopeScaling
from student.configs import (
    PRESETS,
    config_from_json,
    config_to_json,
    is_scratch,
    scratch_config,
)
from student.errors import RunError, StudentError

FULL = DecoderConfig(
    vocabulary=30,
    width=8,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=6,
    mlp_width=12,
    max_positions=64,
    rope_theta=1e6 / 3,
    rope_scaling=RopeScaling("divisors", divisors=(1.0, 0.1, 2.5)),
    norm_epsilon=1e-5,
    tied=True,
    qkv_bias=True,
)


@pytest.mark.parametrize(("name", "millions"), [("nano", 1), ("mini", 10), ("small", 60)])
def test_presets_have_the_stated_size(name: str, millions: int) -> None:
    """Counted in the model itself, without its embedding, to 4 %."""
    config = scratch_config(f"preset:{name}", 300, 8)
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=None)))
    count = sum(leaf.size for leaf in jax.tree.leaves(state)) - 300 * config.width
    assert count == pytest.approx(millions * 1e6, rel=0.04)
    assert config.tied
    assert config.head_dim <= 64
    assert config.width == config.heads * config.head_dim
    assert (config.vocabulary, config.max_positions) == (300, 2048)


def test_there_are_positions_for_every_row() -> None:
    assert scratch_config("preset:nano", 300, 5000).max_positions == 5000
    assert set(PRESETS) == {"nano", "mini", "small"}


WRITTEN = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize("given", [{}, {"vocab_size": 12345}])
def test_sizes_from_a_file(tmp_path: Path, given: dict[str, int]) -> None:
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps(WRITTEN | given))
    assert is_scratch(str(path))
    config = scratch_config(str(path), 300, 100)
    assert (config.width, config.mlp_width, config.layers, config.head_dim) == (24, 40, 3, 6)
    assert (config.vocabulary, config.max_positions) == (300, 100)


def test_a_config_of_several_parts_gets_the_vocabulary_of_the_cache(tmp_path: Path) -> None:
    text = {
        "model_type": "gemma3_text",
        "vocab_size": 48,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert scratch_config(str(path), 300, 8).vocabulary == 300


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "not valid JSON"),
        ("[]", "holds no JSON object"),
        (json.dumps({**WRITTEN, "hidden_size": None}), "hidden_size is missing"),
        (json.dumps({**WRITTEN, "adapters": 8}), "adapters"),
    ],
)
def test_files_that_hold_no_sizes(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "sizes.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(StudentError, match=message) as raised:
        scratch_config(str(path), 300, 8)
    assert "sizes.json" in str(raised.value)


def test_an_unknown_preset_names_the_others() -> None:
    with pytest.raises(StudentError, match=r"'huge'.*preset:nano, preset:mini, preset:small"):
        scratch_config("preset:huge", 300, 8)


def test_what_is_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "odd.json").mkdir()
    assert [is_scratch(name) for name in ("preset:x", "a/config.json", "a/b", "x.gguf")] == [
        True,
        True,
        False,
        False,
    ]
    assert not is_scratch(str(tmp_path / "odd.json"))


@pytest.mark.parametrize(
    "config",
    [
        FULL,
        replace(FULL, rope_scaling=None),
        replace(FULL, rope_scaling=RopeScaling("linear", 2.0)),
        *PRESETS.values(),
    ],
)
def test_a_config_goes_through_json_unchanged(config: DecoderConfig) -> None:
    again = config_from_json(json.loads(json.dumps(config_to_json(config))))
    assert again == config
    for field in fields(config):
        found = getattr(again, field.name)
        assert type(found) is type(getattr(config, field.name)), field.name


def changed(**changes: Any) -> dict[str, Any]:
    return {**config_to_json(FULL), **changes}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "config is None"),
        ({"width": 8}, "lacks .*'vocabulary'"),
        (changed(adapters=8), "unknown .*'adapters'"),
        (changed(layers="2"), "layers is '2', expected int"),
        (changed(layers=True), "layers is True, expected int"),
        (changed(tied=1), "tied is 1, expected bool"),
        (changed(rope_theta="1e4"), "rope_theta is '1e4', expected float"),
        (changed(layers=0), "layers is 0"),
        (changed(rope_scaling={"kind": "linear"}), "rope_scaling lacks"),
        (changed(rope_scaling="linear"), "rope_scaling is 'linear'"),
        (
            changed(rope_scaling={**config_to_json(FULL)["rope_scaling"], "divisors": ["1"]}),
            "divisors is .*expected a list of numbers",
        ),
    ],
)
def test_a_damaged_record_is_refused(value: Any, message: str) -> None:
    with pytest.raises(RunError, match=message):
        config_from_json(value)
