"""Tokenizers from folders: the spellings of special tokens and templates, and what is missing."""

import json
from pathlib import Path
from typing import Any

import pytest

from decoder.errors import DecoderError
from decoder.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_files
from tests.decoder.chat_families import FAMILIES
from tests.decoder.tokenizer_folders import (
    ADDED,
    CONSISTENT,
    EOT_ID,
    FOLLOWED,
    PUBLISHED,
    REFUSED,
    write_folder,
)
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
    """An older file, which overrides tokenizer_config.json unless that has a list of tokens."""
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": BOS}, "eos_token": BOS})
    )
    tokenizer = load_tokenizer(settings(tmp_path, eos_token=EOS))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 0)
    tokenizer = load_tokenizer(settings(tmp_path, eos_token=EOS, added_tokens_decoder={}))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 2)
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(str(tmp_path)).eos_id == 0


@pytest.mark.parametrize("name", FOLLOWED)
def test_tokens_beside_tokenizer_json(name: str, tmp_path: Path) -> None:
    """They are added; the parity tests say that the ids are those of transformers."""
    tokenizer = load_tokenizer(str(write_folder(tmp_path / "a", **FOLLOWED[name])))
    bare = load_tokenizer(str(write_folder(tmp_path / "b", **FOLLOWED[name], beside=False)))
    added = {one.content: number for number, one in added_tokens(tokenizer).items()}
    for content, token_id in ADDED[name].items():
        assert added[content] == token_id
        assert token_id in tokenizer.encode(f"a {content} b").tolist()
        assert repr(added_tokens(tokenizer)[token_id]) != repr(added_tokens(bare).get(token_id))
    assert len(added) == len({*added, *ADDED[name]})
    assert ADDED[name] or tokenizer.eos_id != bare.eos_id
    # What we write has them all.
    again = tokenizer_from_files(tokenizer.files())
    assert again == tokenizer
    assert again.fingerprint == tokenizer.fingerprint


def test_flags_beside_tokenizer_json(tmp_path: Path) -> None:
    ids = {
        name: load_tokenizer(str(write_folder(tmp_path / name.split()[-1], **FOLLOWED[name])))
        .encode("a  <|eot_id|>  b")
        .tolist()
        for name in ("decoder, other lstrip", "decoder, other rstrip")
    }
    plain = load_tokenizer(str(write_folder(tmp_path / "plain")))
    a, space, b = (plain.encode(text).tolist() for text in ("a", " ", "b"))
    assert plain.encode("a  <|eot_id|>  b").tolist() == [*a, *space * 2, EOT_ID, *space * 2, *b]
    assert list(ids.values()) == [[*a, EOT_ID, *space * 2, *b], [*a, *space * 2, EOT_ID, *b]]


@pytest.mark.parametrize(
    ("name", "special", "normalized"),
    [
        ("pad, new", True, False),
        ("pad, an object not declared special", True, False),
        ("decoder, new and ordinary", False, True),
        ("decoder, new and named", True, False),
        ("added_tokens.json", False, True),
        ("added_tokens.json, named", True, False),
        ("added_tokens.json, named by an object", True, True),
    ],
)
def test_named_tokens_are_special(
    name: str, special: bool, normalized: bool, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(write_folder(tmp_path, **FOLLOWED[name])))
    (token_id,) = ADDED[name].values()
    token = added_tokens(tokenizer)[token_id]
    assert (token.special, token.normalized) == (special, normalized)


@pytest.mark.parametrize("name", CONSISTENT)
def test_tokens_that_tokenizer_json_has(name: str, tmp_path: Path) -> None:
    """Nothing is rewritten: the definition and so the fingerprint are as without those files."""
    tokenizer = load_tokenizer(str(write_folder(tmp_path / "a", **CONSISTENT[name])))
    plain = load_tokenizer(str(write_folder(tmp_path / "b")))
    assert tokenizer == plain
    assert tokenizer.fingerprint == plain.fingerprint


@pytest.mark.parametrize("name", PUBLISHED)
def test_folders_as_families_publish_them(name: str, tmp_path: Path) -> None:
    """The parity tests say that they are read as transformers reads them."""
    adds_bos, case = PUBLISHED[name]
    tokenizer = load_tokenizer(str(write_folder(tmp_path, **case)))
    (family,) = (one for one in FAMILIES if one.name == case["family"])
    assert (tokenizer.bos, tokenizer.eos) == (family.bos, family.eos)
    assert (tokenizer.adds_bos, tokenizer.adds_eos) == (adds_bos, False)


@pytest.mark.parametrize("name", REFUSED)
def test_tokens_that_are_refused(name: str, tmp_path: Path) -> None:
    case, message = REFUSED[name]
    with pytest.raises(DecoderError, match=message) as error:
        load_tokenizer(str(write_folder(tmp_path, **case)))
    assert str(tmp_path) in str(error.value)


def added_tokens(tokenizer: Tokenizer) -> dict[int, Any]:
    return tokenizer.backend.get_added_tokens_decoder()


@pytest.mark.parametrize("other", [{"pad_token": "R"}, {"additional_special_tokens": ["R"]}])
def test_one_token_named_twice(tmp_path: Path, other: dict[str, Any]) -> None:
    """With equal flags it is one token; with others, which of them counts is not said."""
    for flags, fits in (({}, True), ({"lstrip": True}, False)):
        eos = {"__type": "AddedToken", "content": "R", "special": True, **flags}
        folder = write_folder(tmp_path / str(fits), "smollm2", config={"eos_token": eos, **other})
        if fits:
            tokenizer = load_tokenizer(str(folder))
            assert added_tokens(tokenizer)[tokenizer.backend.token_to_id("R")].special
        else:
            with pytest.raises(DecoderError, match="names 'R' twice, with other flags"):
                load_tokenizer(str(folder))


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("family", ["smollm2", "qwen3"])
def test_flags_of_our_own_files(tmp_path: Path, family: str, adds: bool) -> None:
    """As of a GGUF file, whose tokenizer has no post-processor."""
    (made,) = (one for one in FAMILIES if one.name == family)
    tokenizer = made.tokenizer(adds_bos=adds, bos="<|endoftext|>")
    for name, data in tokenizer.files().items():
        (tmp_path / name).write_bytes(data)
    assert load_tokenizer(str(tmp_path)) == tokenizer == tokenizer_from_files(tokenizer.files())
    # With the same settings in other bytes, as anybody else would write them, no flag counts.
    fields = json.loads(tokenizer.files()["tokenizer_config.json"])
    assert load_tokenizer(settings(tmp_path, **fields)).adds_bos is False


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
        (
            {"chat_template": [{"nam": "x"}]},
            r"an entry of the list chat_template is \{'nam': 'x'\}",
        ),
        ({"chat_template": ["x"]}, "an entry of the list chat_template is 'x'; expected"),
        ({"chat_template": [{"name": "default", "template": 3}]}, "chat_template is int; expected"),
        ({"chat_template": "a\ud800"}, "chat_template is not valid Unicode: half of a surrogate"),
        ({"bos_token": "<s>"}, "the BOS token '<s>' is not in the vocabulary"),
    ],
)
def test_bad_settings(tmp_path: Path, fields: dict, text: str) -> None:
    write_tiny_tokenizer(tmp_path)
    with pytest.raises(DecoderError, match=text) as error:
        load_tokenizer(settings(tmp_path, **fields))
    assert str(tmp_path) in str(error.value)


def test_json_that_is_none(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{'a': 1}")
    with pytest.raises(DecoderError, match=r"tokenizer.json is not valid JSON"):
        load_tokenizer(str(tmp_path))


FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    "chat_template.jinja",
)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000])
@pytest.mark.parametrize("name", FILES)
def test_broken_files(tmp_path: Path, name: str, content: bytes) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(content)
    if name.endswith(".jinja") and content[:1] == b"[":
        assert load_tokenizer(str(tmp_path)).chat_template == content.decode()
        return
    with pytest.raises(DecoderError, match=f"{name} is not") as error:
        load_tokenizer(str(tmp_path))
    assert str(tmp_path) in str(error.value)
