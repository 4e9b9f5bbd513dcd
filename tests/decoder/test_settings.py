"""Settings of a model's own files, from where it was to where it is written."""

import json
from pathlib import Path
from typing import Any

import pytest

from decoder.errors import DecoderError
from decoder.loading import load_model
from decoder.model import Decoder
from decoder.saving import save_folder
from decoder.settings import OwnSettings, own_settings
from decoder.tokenizer import load_tokenizer
from tests.assets.published_configs import LOADED
from tests.decoder.full_settings import FILES, add_settings, assert_exported
from tests.decoder.test_tokenizer_gguf import write
from tests.models import smollm2_path, write_tiny_teacher


def of(folder: Path) -> OwnSettings:
    found = own_settings(str(folder))
    assert found is not None
    return found


def test_everything_comes_through(tmp_path: Path) -> None:
    source = add_settings(write_tiny_teacher(tmp_path / "source"))
    model = load_model(str(source)).model
    assert isinstance(model, Decoder)
    save_folder(model, tmp_path / "out", None, "bfloat16", settings=of(source))
    files = {name: (source / name).read_bytes() for name in (*FILES, "tokenizer.json")}
    assert_exported(tmp_path / "out", files, "bfloat16")
    assert load_tokenizer(str(tmp_path / "out")) == load_tokenizer(str(source))
    assert of(tmp_path / "out") == of(source)


def test_what_is_absent_stays_absent(tmp_path: Path) -> None:
    """transformers takes its own values for the family, for the export as for the source."""
    found = of(write_tiny_teacher(tmp_path, config={"eos_token_id": None}))
    assert found.config == {"eos_token_id": None}
    assert sorted(found.files) == ["tokenizer.json", "tokenizer_config.json"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "generation_config.json").write_text("{}")
    assert sorted(of(tmp_path).files) == ["generation_config.json"]


@pytest.mark.parametrize(
    ("part", "outer", "expected"),
    [
        ({}, {"eos_token_id": [1, 106]}, {"eos_token_id": [1, 106]}),
        ({"eos_token_id": 1}, {"eos_token_id": [1, 106]}, {"eos_token_id": [1, 106]}),
        ({"eos_token_id": 1}, {"eos_token_id": None}, {"eos_token_id": 1}),
        ({"pad_token_id": None}, {}, {"pad_token_id": None}),
    ],
)
def test_of_a_model_that_also_sees(
    tmp_path: Path, part: dict[str, Any], outer: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = {key: LOADED["Gemma 3 4B"][key] for key in ("model_type", "architectures")}
    text = {**LOADED["Gemma 3 4B"]["text_config"], **part}
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": text, **outer}))
    assert of(tmp_path).config == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("generation_config.json", "[2, 0]", "generation_config.json holds a JSON list"),
        ("generation_config.json", "{", "generation_config.json is not valid JSON"),
        ("config.json", '{"model_type": "llama", "temperature": NaN}', "that is not finite"),
    ],
)
def test_files_that_are_damaged(tmp_path: Path, name: str, text: str, message: str) -> None:
    (write_tiny_teacher(tmp_path) / name).write_text(text)
    with pytest.raises(DecoderError, match=message):
        own_settings(str(tmp_path))


def test_of_a_function() -> None:
    assert own_settings("some.package:function") is None


def test_ids() -> None:
    generation = json.dumps({"eos_token_id": [7, 8], "top_k": 50}).encode()
    config = {"eos_token_id": 2, "pad_token_id": None, "max_length": 99}
    assert OwnSettings(config, {"generation_config.json": generation}).ids() == {2, 7, 8}


@pytest.mark.parametrize(
    ("fields", "expected", "named"),
    [
        (
            {"eos_token_id": 2, "eot_token_id": 0, "eom_token_id": 2, "padding_token_id": 1},
            {"bos_token_id": 0, "eos_token_id": [2, 0], "pad_token_id": 1},
            {"pad_token": "<|im_start|>"},
        ),
        (
            {"padding_token_id": 2**32 - 1, "unknown_token_id": 1, "seperator_token_id": 2},
            {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": None, "unk_token_id": 1}
            | {"sep_token_id": 2},
            {"unk_token": "<|im_start|>", "sep_token": "<|im_end|>"},
        ),
        # A piece that is no special token, which naming it would make.
        (
            {"padding_token_id": 100},
            {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 100},
            {},
        ),
    ],
)
def test_of_a_gguf_file(
    tmp_path: Path, fields: dict[str, int], expected: dict[str, Any], named: dict[str, str]
) -> None:
    path = write(tmp_path / "a.gguf", **{"bos_token_id": 0, "eos_token_id": 2, **fields})
    found = of(path)
    assert found.config == expected
    for name, data in found.files.items():
        (tmp_path / name).write_bytes(data)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    standard = {"bos_token", "eos_token", "add_bos_token", "add_eos_token", "tokenizer_class"}
    assert {key: written[key] for key in written.keys() - standard} == named
    assert load_tokenizer(str(tmp_path)) == load_tokenizer(str(path))


def test_of_a_real_gguf_file() -> None:
    assert of(smollm2_path()).config == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "unk_token_id": 0,
    }
