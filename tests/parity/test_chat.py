"""Conversations of every family, tokenised by transformers from the files that we save."""

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoder.chat import encode_chat, encode_turns, end_of_turn, render_chat
from decoder.tokenizer import Tokenizer, load_tokenizer
from tests.decoder.chat_families import CONVERSATION, FAMILIES, Family, conversation
from tests.decoder.test_chat import GENERATION, with_template
from tests.decoder.test_chat_template import LLAMA31
from tests.models import smollm2_path

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

EACH = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def reference(tokenizer: Tokenizer, folder: Path) -> Any:
    from transformers import AutoTokenizer

    folder.mkdir(exist_ok=True)
    for name, data in tokenizer.files().items():
        (folder / name).write_bytes(data)
    return AutoTokenizer.from_pretrained(folder)


def assert_same(tokenizer: Tokenizer, theirs: Any, messages: list[dict[str, str]]) -> None:
    for prompt in (False, True):
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert render_chat(tokenizer, messages, add_generation_prompt=prompt) == text
        ids = theirs.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
        ours = encode_chat(tokenizer, messages, add_generation_prompt=prompt)
        np.testing.assert_array_equal(ours, ids)


@EACH
def test_ids_are_those_of_transformers(family: Family, tmp_path: Path) -> None:
    tokenizer = family.tokenizer()
    theirs = reference(tokenizer, tmp_path)
    messages = conversation(family)
    assert_same(tokenizer, theirs, messages)
    assert_same(tokenizer, theirs, messages[:-1])
    odd = [
        {"role": "user", "content": "  7\n\n x=1 <b>\t"},
        {"role": "assistant", "content": "\n<think>\né\n</think>\n\n 語 "},
    ]
    assert_same(tokenizer, theirs, odd)
    # The comparison sees a BOS too many, and end of turn by another token.
    if tokenizer.bos_id is not None:
        ours = encode_chat(tokenizer, messages)
        twice = with_template("{{ bos_token }}" + family.template, family.name)
        text = render_chat(twice, messages)
        assert not np.array_equal(theirs(text, add_special_tokens=False)["input_ids"], ours)
    assert theirs.convert_tokens_to_ids(family.end) == end_of_turn(tokenizer).token_id


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_bos_that_the_template_does_not_write(name: str, tmp_path: Path) -> None:
    """The reference is transformers' ids of the text: its apply_chat_template leaves BOS out."""
    (family,) = (one for one in FAMILIES if one.name == name)
    silent = with_template(family.template.replace("{{ bos_token }}", ""), name)
    theirs = reference(silent, tmp_path)
    text = theirs.apply_chat_template(CONVERSATION[1:], tokenize=False)
    ours = encode_chat(silent, CONVERSATION[1:])
    np.testing.assert_array_equal(ours, theirs(text)["input_ids"])
    np.testing.assert_array_equal(
        ours[1:], theirs.apply_chat_template(CONVERSATION[1:])["input_ids"]
    )


def test_generation_blocks(tmp_path: Path) -> None:
    blocks = with_template(GENERATION)
    found = reference(blocks, tmp_path).apply_chat_template(
        CONVERSATION, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = encode_turns(blocks, CONVERSATION)
    np.testing.assert_array_equal(ids, found["input_ids"])
    np.testing.assert_array_equal(mask, np.array(found["assistant_masks"], bool))
    assert 0 < mask.sum() < len(mask)


def test_a_pinned_date(tmp_path: Path) -> None:
    tokenizer = with_template(LLAMA31, "llama3")
    theirs = reference(tokenizer, tmp_path)
    messages = [{"role": "user", "content": "a"}]
    assert_same(tokenizer, theirs, messages)
    ours = encode_chat(tokenizer, messages, date=datetime.date(2025, 3, 4))
    ids = theirs.apply_chat_template(messages, date_string="04 Mar 2025")["input_ids"]
    np.testing.assert_array_equal(ours, ids)


def test_smollm2s_own_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(smollm2_path()))
    theirs = reference(tokenizer, tmp_path)
    assert_same(tokenizer, theirs, CONVERSATION)
    assert_same(tokenizer, theirs, CONVERSATION[1:])
