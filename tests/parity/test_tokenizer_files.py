"""Folders whose files disagree about tokens, read by transformers: the same ids, or a refusal.

The tokens of tokenizer_config.json, special_tokens_map.json and added_tokens.json that
tokenizer.json lacks or describes otherwise.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from decoder.errors import DecoderError
from decoder.tokenizer import load_tokenizer
from tests.decoder.chat_families import FAMILIES
from tests.decoder.tokenizer_folders import CONSISTENT, FOLLOWED, PUBLISHED, REFUSED, write_folder

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

TEXTS = (
    "Hello the tail",
    "  two  spaces \n\n tokens",
    "a<|eot_id|>b <|end_of_text|>  c  <|begin_of_text|>d",
    "<|extra|> q <|EXTRA|>  [X]<|more|>w <|extra|><|more|>",
    "x</s> y <s>z <unk>\n",
    "x<eos> y <bos>z <end_of_turn> ",
    "x<|im_end|>y <|endoftext|> z<|im_start|>",
    "the<|eot_id|>the thethe extra",
    "é 语 😀 ＜|extra|＞",
)


def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def assert_same(folder: Path) -> None:
    ours, reference = load_tokenizer(str(folder)), theirs(folder)
    assert (ours.bos_id, ours.eos_id) == (reference.bos_token_id, reference.eos_token_id)
    assert ours.backend.get_vocab() == reference.get_vocab()
    for text in TEXTS:
        ids = reference(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text).tolist() == ids, text
        bos, eos = [ours.bos_id] * ours.adds_bos, [ours.eos_id] * ours.adds_eos
        assert [*bos, *ours.encode(text).tolist(), *eos] == reference(text)["input_ids"], text
    added = {number: repr(token) for number, token in reference.added_tokens_decoder.items()}
    assert {
        number: repr(token) for number, token in ours.backend.get_added_tokens_decoder().items()
    } == added


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_families(family: str, tmp_path: Path) -> None:
    assert_same(write_folder(tmp_path, family))


@pytest.mark.parametrize("name", CONSISTENT)
def test_consistent(name: str, tmp_path: Path) -> None:
    assert_same(write_folder(tmp_path, **CONSISTENT[name]))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name: str, tmp_path: Path) -> None:
    adds_bos, case = PUBLISHED[name]
    folder = write_folder(tmp_path, **case)
    if case.get("cls") not in ("LlamaTokenizer", "GemmaTokenizer"):
        assert_same(folder)
        return
    # For these transformers 5 builds the tokenizer anew, from vocabulary and merges: texts that
    # begin with spaces get other ids than by tokenizer.json, which we follow, as release 4 does.
    ours, reference = load_tokenizer(str(folder)), theirs(folder)
    assert (ours.bos_id, ours.eos_id) == (reference.bos_token_id, reference.eos_token_id)
    text = ours.encode("the").tolist()
    assert reference("the")["input_ids"] == [*([ours.bos_id] * adds_bos), *text]


@pytest.mark.parametrize("normalizer", [None, {"type": "Lowercase"}, {"type": "NFKC"}])
@pytest.mark.parametrize("name", FOLLOWED)
def test_followed(name: str, normalizer: Mapping[str, Any] | None, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, **FOLLOWED[name], normalizer=normalizer)
    assert_same(folder)
    # Without what is beside it, tokenizer.json gives other ids or names other tokens.
    alone = write_folder(tmp_path / "alone", **FOLLOWED[name], normalizer=normalizer, beside=False)
    bare, reference = load_tokenizer(str(alone)), theirs(folder)
    assert (bare.bos_id, bare.eos_id) != (
        reference.bos_token_id,
        reference.eos_token_id,
    ) or any(
        bare.encode(text).tolist() != reference(text, add_special_tokens=False)["input_ids"]
        for text in TEXTS
    )


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    case, message = REFUSED[name]
    with pytest.raises(DecoderError, match=message):
        load_tokenizer(str(write_folder(tmp_path, **case)))
