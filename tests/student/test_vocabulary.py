"""C20, C21, C22: tokenizers that agree, widths, and ids that no token has."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from decoder import Tokenizer
from decoder.tokenizer import build_tokenizer, tokenizer_from_files
from student.errors import StudentError
from student.vocabulary import (
    check_tokenizers,
    legal_ids,
    softmax_ids,
)
from tests.models import BOS, EOS, tiny_tokenizer


def tokenizer(definition: dict[str, Any] | None = None, template: str | None = None) -> Tokenizer:
    return build_tokenizer(
        definition or tiny_tokenizer(),
        bos=BOS,
        eos=EOS,
        adds_bos=None,
        adds_eos=True,
        chat_template=template,
    )


def with_added(*tokens: str, first: int = 300) -> Tokenizer:
    """The tiny tokenizer and further added tokens, from an id on."""
    definition = tiny_tokenizer()
    for place, token in enumerate(tokens):
        added = {**definition["added_tokens"][0], "id": first + place, "content": token}
        definition["added_tokens"].append(added)
        definition["model"]["vocab"][token] = first + place
    return tokenizer(definition)


def swapped() -> Tokenizer:
    definition = tiny_tokenizer()
    ids = definition["model"]["vocab"]
    first, second = (token for token, place in ids.items() if place in (290, 291))
    ids[first], ids[second] = ids[second], ids[first]
    return tokenizer(definition)


def reordered() -> Tokenizer:
    definition = tiny_tokenizer()
    model = definition["model"]
    model["vocab"] = dict(reversed(model["vocab"].items()))
    return tokenizer(dict(reversed(definition.items())))


@pytest.mark.parametrize("template", [None, "{{ messages }}"])
def test_a_tokenizer_from_its_files(template: str | None) -> None:
    given = tokenizer(template=template)
    files = given.files()
    assert len(files) == (2 if template is None else 3)
    again = tokenizer_from_files(files)
    assert again == given
    assert again.fingerprint == given.fingerprint


@pytest.mark.parametrize(
    "other", [tokenizer(), reordered(), with_added("<a>", "<b>"), with_added("<a>", first=305)]
)
def test_the_same_mapping_and_added_tokens_are_accepted(other: Tokenizer) -> None:
    check_tokenizers(other, tokenizer())
    check_tokenizers(tokenizer(), other)


def test_swapped_ids_are_refused_with_an_example() -> None:
    """C22: equal sizes, another mapping."""
    ids = json.loads(tokenizer().definition)["model"]["vocab"]
    token = next(token for token, place in ids.items() if place == 291)
    expected = f"{token!r} has the id 290 in this tokenizer and the id 291 in the other"
    with pytest.raises(StudentError, match=re.escape(expected)):
        check_tokenizers(swapped(), tokenizer())


@pytest.mark.parametrize(("student", "cached"), [(310, 300), (300, 310)])
def test_more_merges_are_no_added_tokens(student: int, cached: int) -> None:
    """All common tokens have the same ids, but text is cut differently."""
    ours, theirs = (tokenizer(tiny_tokenizer(count)) for count in (student, cached))
    assert ours.mapping_difference(theirs) is None
    place = "this" if student > cached else "the other"
    with pytest.raises(StudentError, match=f"with the id 300 is in {place} tokenizer alone"):
        check_tokenizers(ours, theirs)


def test_too_few_rows_are_refused_by_both_widths() -> None:
    """C20: 18 tokens, a student of 16 rows."""
    with pytest.raises(StudentError, match=r"models/s has 16 rows.* is 18.*--vocabulary 16"):
        softmax_ids(16, 18, None, "models/s")


@pytest.mark.parametrize(
    ("rows", "cached", "own", "expected"),
    [
        (24, 18, None, 18),
        (18, 18, None, 18),
        (310, 300, tokenizer(), 300),
        (310, 250, tokenizer(), 300),
        (310, 300, with_added("<a>", "<b>"), 302),
        (301, 300, with_added("<a>", "<b>"), 301),
    ],
)
def test_the_softmax_is_over_the_ids_of_both(
    rows: int, cached: int, own: Tokenizer | None, expected: int
) -> None:
    assert softmax_ids(rows, cached, own, "it") == expected


def test_ids_without_a_token_are_illegal() -> None:
    """C21: rows beyond the vocabulary, and the holes 300 to 304 below the added token."""
    legal = legal_ids(310, 306, [with_added("<a>", first=305)])
    assert legal is not None
    assert np.flatnonzero(legal).tolist() == [*range(300), 305]
    one_of_both = legal_ids(310, 306, [tokenizer(), with_added("<a>", first=305)])
    np.testing.assert_array_equal(one_of_both, legal)
    cut = legal_ids(310, 303, [with_added("<a>", first=305)])
    assert cut is not None
    assert np.flatnonzero(cut).tolist() == list(range(300))


def test_nothing_is_illegal() -> None:
    assert legal_ids(300, 300, [tokenizer()]) is None
    assert legal_ids(60, 60, [tokenizer()]) is None
    assert legal_ids(306, 306, [with_added(*"ABCDEF")]) is not None
