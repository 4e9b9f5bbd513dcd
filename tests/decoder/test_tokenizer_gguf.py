"""Tokenizers from GGUF: SmolLM2's against a reference in plain Python; other rules; refusals."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers

from decoder.errors import DecoderError
from decoder.gguf_file import read_header
from decoder.tokenizer import Tokenizer, load_tokenizer
from tests.decoder.bpe_reference import ReferenceBPE, split_smollm
from tests.decoder.varied_text import lines
from tests.models import smollm2_path, tiny_tokenizer


@cache
def smollm2() -> Tokenizer:
    return load_tokenizer(str(smollm2_path()))


@cache
def reference() -> ReferenceBPE:
    metadata = read_header(smollm2_path()).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    return ReferenceBPE(
        {token: place for place, token in enumerate(tokens)},
        [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3],
    )


def test_smollm2_settings() -> None:
    tokenizer = smollm2()
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert (tokenizer.bos, tokenizer.eos) == ("<|im_start|>", "<|im_end|>")
    assert not tokenizer.adds_bos
    assert not tokenizer.adds_eos
    assert tokenizer.vocabulary == 49152
    assert tokenizer.holes == ()
    assert len(tokenizer.missing_bytes) == 21
    assert 0x04 in tokenizer.missing_bytes
    assert not any(0x20 <= byte < 0x7F for byte in tokenizer.missing_bytes)
    assert tokenizer.chat_template is not None
    assert "<|im_start|>" in tokenizer.chat_template


def test_smollm2_against_plain_python() -> None:
    """A few thousand lines; the reference splits by scanner and merges by rank."""
    texts = lines()
    assert len(texts) > 4000
    different = [
        text
        for text, ids in zip(texts, smollm2().encode_batch(texts), strict=True)
        if ids.tolist() != reference().encode(text)
    ]
    assert different == []


def test_smollm2_round_trips() -> None:
    """Text comes back, but for the bytes that the vocabulary lacks."""
    tokenizer = smollm2()
    lossy = 0
    for text in lines():
        kept = bytes(byte for byte in text.encode() if byte not in tokenizer.missing_bytes)
        assert tokenizer.decode(tokenizer.encode(text)) == kept.decode(errors="replace")
        lossy += kept != text.encode()
    assert lossy == 0
    assert tokenizer.decode(tokenizer.encode("a\x04b\x1dc")) == "abc"


def test_the_digit_rule_matters() -> None:
    """The plain GPT-2 rule, which other conversions use, differs before digits."""
    assert split_smollm("a   12") == ["a", "   ", "1", "2"]
    plain = smollm2().backend
    texts = [text for text in lines() if any(character.isdigit() for character in text)]
    ids = [encoding.ids for encoding in plain.encode_batch(texts, add_special_tokens=False)]
    definition = json.loads(smollm2().definition)
    definition["pre_tokenizer"] = definition["pre_tokenizer"]["pretokenizers"][1]
    without = tokenizers.Tokenizer.from_str(json.dumps(definition))
    other = [encoding.ids for encoding in without.encode_batch(texts, add_special_tokens=False)]
    assert sum(one != two for one, two in zip(ids, other, strict=True)) > 50


def test_special_text_in_a_document_becomes_the_special_token() -> None:
    assert smollm2().encode("<|im_end|>").tolist() == [2]
    assert smollm2().token_text(2) == "<|im_end|>"


def test_written_files_give_the_same_tokenizer(tmp_path: Path) -> None:
    for name, content in smollm2().files().items():
        (tmp_path / name).write_bytes(content)
    again = load_tokenizer(str(tmp_path))
    assert again == smollm2()
    assert again.fingerprint == smollm2().fingerprint
    assert again.files() == smollm2().files()
    text = "def f(x):  return x + 12\r\n"
    assert again.encode(text).tolist() == smollm2().encode(text).tolist()


def write(path: Path, **fields: Any) -> Path:
    """A GGUF file without tensors that holds the tiny tokenizer."""
    vocabulary = tiny_tokenizer(300)["model"]["vocab"]
    metadata: dict[str, Any] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": list(vocabulary),
        "token_type": [3] * 3 + [1] * (len(vocabulary) - 3),
        "merges": [" ".join(pair) for pair in tiny_tokenizer(300)["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 2,
        **fields,
    }
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split(tmp_path: Path, rule: str, text: str) -> list[str]:
    """How the rule cuts a text, as text."""
    backend = load_tokenizer(str(write(tmp_path / "a.gguf", pre=rule))).backend
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("smollm", ["It", "'s", " ", "2", "0", "2", "6", "  ", "1", ",", "\n\n", " DON", "'", "T"]),
        ("gpt-2", ["It", "'s", " 2026", " ", " 1", ",", "\n\n", " DON", "'", "T"]),
        ("llama-bpe", ["It", "'s", " ", "202", "6", " ", " ", "1", ",\n\n", " DON", "'T"]),
        ("qwen2", ["It", "'s", " ", "2", "0", "2", "6", " ", " ", "1", ",\n\n", " DON", "'T"]),
    ],
)
def test_splitting_rules(tmp_path: Path, rule: str, expected: list[str]) -> None:
    assert split(tmp_path, rule, "It's 2026  1,\n\n DON'T") == expected


def test_bos_by_the_file_or_by_the_rule(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    assert not load_tokenizer(str(write(path))).adds_bos
    assert load_tokenizer(str(write(path, add_bos_token=True))).adds_bos
    assert load_tokenizer(str(write(path, pre="llama-bpe"))).adds_bos
    assert not load_tokenizer(str(write(path, pre="llama-bpe", add_bos_token=False))).adds_bos
    assert load_tokenizer(str(write(path, add_eos_token=True))).adds_eos


def test_user_defined_and_unused_tokens(tmp_path: Path) -> None:
    """Type 4 is an added token that is not special; type 5 has no token: a hole."""
    vocabulary = [*tiny_tokenizer(300)["model"]["vocab"], "<tool>", "[PAD301]", "<last>"]
    kinds = [3] * 3 + [1] * 297 + [4, 5, 3]
    path = write(tmp_path / "a.gguf", tokens=vocabulary, token_type=kinds)
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.vocabulary, tokenizer.holes) == (303, (301,))
    assert tokenizer.encode("a<tool>b<last>").tolist()[1::2] == [300, 302]
    added = tokenizer.backend.get_added_tokens_decoder()
    assert (added[300].special, added[302].special) == (False, True)
    assert tokenizer.token_text(301) == "<unused 301>"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model": "llama"}, r"of the kind 'llama'; supported is 'gpt2'.*\(--tokenizer\)"),
        ({"pre": "default"}, r"the splitting rule 'default' .* is not known.*\(--tokenizer\)"),
        ({"pre": None}, r"the splitting rule None"),
        ({"merges": None}, r"the field tokenizer.ggml.merges is missing"),
        ({"token_type": [1, 1]}, "300 tokens but 2 token types"),
        ({"token_type": [2] * 300}, "is of the unsupported type 2"),
        ({"add_space_prefix": True}, "add_space_prefix is not supported"),
        ({"bos_token_id": 300}, "bos_token_id is 300 of 300 tokens"),
        ({"add_bos_token": True, "bos_token_id": None}, "adds BOS but names no BOS token"),
        ({"merges": ["zz yy"]}, "tokenizer.json is not understood"),
    ],
)
def test_refuses(tmp_path: Path, fields: dict, text: str) -> None:
    with pytest.raises(DecoderError, match=text):
        load_tokenizer(str(write(tmp_path / "a.gguf", **fields)))


def test_a_token_twice(tmp_path: Path) -> None:
    tokens = list(tiny_tokenizer(300)["model"]["vocab"])
    tokens[299] = tokens[5]
    with pytest.raises(DecoderError, match="has the ids 5 and 299"):
        load_tokenizer(str(write(tmp_path / "a.gguf", tokens=tokens)))
