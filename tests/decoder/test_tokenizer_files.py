"""Tokenizers from folders: the spellings of special tokens and templates, and what is missing."""

import json
from pathlib import Path

import pytest

from decoder.errors import DecoderError
from decoder.tokenizer import load_tokenizer
from tests.models import BOS, EOS, write_tiny_tokenizer


def settings(folder: Path, **fields: object) -> str:
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return str(folder)


def test_tiny_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_tiny_tokenizer(tmp_path)))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 2)
    assert tokenizer.chat_template is None
    assert tokenizer.vocabulary == 300


def test_special_tokens_as_text_or_object(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    eos = {"content": EOS, "lstrip": False, "__type": "AddedToken"}
    tokenizer = load_tokenizer(settings(tmp_path, bos_token=BOS, eos_token=eos))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 2)


def test_special_tokens_map(tmp_path: Path) -> None:
    """An older file beside it, which tokenizer_config.json overrides."""
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": BOS}, "eos_token": BOS})
    )
    tokenizer = load_tokenizer(settings(tmp_path, eos_token=EOS))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 2)


def test_explicit_flags(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    fields = {"bos_token": BOS, "eos_token": None, "add_bos_token": True, "add_eos_token": None}
    tokenizer = load_tokenizer(settings(tmp_path, **fields))
    assert (tokenizer.adds_bos, tokenizer.adds_eos, tokenizer.eos_id) == (True, False, None)


@pytest.mark.parametrize(
    "template",
    ["{{ a }}", [{"name": "tool", "template": "no"}, {"name": "default", "template": "{{ a }}"}]],
)
def test_chat_template_in_the_config(tmp_path: Path, template: object) -> None:
    write_tiny_tokenizer(tmp_path)
    assert load_tokenizer(settings(tmp_path, chat_template=template)).chat_template == "{{ a }}"


def test_chat_template_file_wins(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ b }}\r\n")
    assert load_tokenizer(settings(tmp_path, chat_template="{{ a }}")).chat_template == (
        "{{ b }}\r\n"
    )


def test_without_a_config(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.bos_id, tokenizer.adds_bos, tokenizer.vocabulary) == (None, False, 300)


@pytest.mark.parametrize("other", ["tokenizer.model", "vocab.json"])
def test_another_format(tmp_path: Path, other: str) -> None:
    (tmp_path / other).write_bytes(b"")
    with pytest.raises(DecoderError, match=f"has {other} but no tokenizer.json. Convert it once"):
        load_tokenizer(str(tmp_path))


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DecoderError, match=r"has no tokenizer.json. Name the folder.*--tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_function_has_none() -> None:
    with pytest.raises(DecoderError, match=r"is a function and brings no tokenizer.*--tokenizer"):
        load_tokenizer("package.module:teacher")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"bos_token": 3}, "bos_token is 3; expected a token's text"),
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes'; expected true or false"),
        ({"chat_template": 3}, "chat_template is int"),
        ({"bos_token": "<s>"}, "the BOS token '<s>' is not in the vocabulary"),
    ],
)
def test_bad_settings(tmp_path: Path, fields: dict, text: str) -> None:
    write_tiny_tokenizer(tmp_path)
    with pytest.raises(DecoderError, match=text):
        load_tokenizer(settings(tmp_path, **fields))


def test_json_that_is_none(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{'a': 1}")
    with pytest.raises(DecoderError, match=r"tokenizer.json is not valid JSON"):
        load_tokenizer(str(tmp_path))
