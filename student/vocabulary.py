"""Whether a student reads a cache's ids as its teacher did, and which ids it may predict."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool

from decoder import Tokenizer
from student.errors import StudentError


def check_tokenizers(student: Tokenizer, cached: Tokenizer) -> None:
    """Checks that both tokenizers give the same ids; one may have further *added* tokens.

    Raises:
      StudentError: they do not; names a token.
    """
    difference = student.mapping_difference(cached)
    if difference is None:
        difference = _learnt_by_one(student, cached)
    if difference is not None:
        raise StudentError(
            "the student's tokenizer (this) is not that of the cache's teacher (the other): "
            f"{difference}. The student would read other tokens than were meant. Use a student "
            "of the same tokenizer, or capture a cache with a teacher that has the student's."
        )


def _learnt_by_one(student: Tokenizer, cached: Tokenizer) -> str | None:
    """An example of a token that one alone has and that is no added one."""
    ours, theirs = (one.backend.get_vocab(with_added_tokens=True) for one in (student, cached))
    larger, smaller, name, backend = (
        (ours, theirs, "this", student.backend)
        if len(ours) > len(theirs)
        else (theirs, ours, "the other", cached.backend)
    )
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    learnt = larger.keys() - smaller.keys() - added
    if not learnt:
        return None
    token = min(learnt, key=larger.__getitem__)
    return (
        f"the token {token!r} with the id {larger[token]} is in {name} tokenizer alone and is no "
        "added token, so that the two cut text differently"
    )


def softmax_ids(rows: int, cached: int, student: Tokenizer | None, name: str) -> int:
    """How many ids the student's softmax is over: those of the cache and of its own tokenizer.

    Args:
      rows: logits that the student gives per position.
      cached: the cache's vocabulary.
      student: the student's own tokenizer, if it has one.
      name: the student's, for the error.

    Raises:
      StudentError: the cache has ids for which the student has no row.
    """
    if rows < cached:
        raise StudentError(
            f"the student {name} has {rows:,} rows, but the cache's vocabulary is "
            f"{cached:,}: it has targets that the student cannot predict. Use a student of at "
            f"least {cached:,} rows, or make a cache for this one: `stillroom precompute "
            f"--vocabulary {rows}`."
        )
    own = 0 if student is None else student.vocabulary
    return min(max(cached, own), rows)


def legal_ids(
    rows: int, vocabulary: int, tokenizers: Iterable[Tokenizer]
) -> Bool[np.ndarray, " rows"] | None:
    """True for ids below `vocabulary` that are a token of one of the tokenizers.

    None if all rows are.
    """
    legal = np.zeros(rows, bool)
    for tokenizer in tokenizers:
        ids = np.ones(tokenizer.vocabulary, bool)
        ids[list(tokenizer.holes)] = False
        legal[: len(ids)] |= ids[:rows]
    legal[vocabulary:] = False
    return None if legal.all() else legal
