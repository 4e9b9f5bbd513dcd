"""From the corpus's texts to token ids, with the special tokens that were asked for.

Nothing is lost in silence: what the tokenizer has no token for is counted, and
so is a start or end token that a text already brought.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt32

from decoder.tokenizer_ends import Doubt
from pipelines.errors import CorpusError, PipelineError, TeacherError


@runtime_checkable
class Tokenizer(Protocol):
    """What is needed of a tokenizer; `decoder.Tokenizer` is one."""

    @property
    def bos_id(self) -> int | None:
        """The token that starts a text, if there is one."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The token that ends a text, if there is one."""
        ...

    @property
    def adds_bos(self) -> bool | Doubt:
        """Whether texts start with `bos_id` by the tokenizer's own settings, if they settle it."""
        ...

    @property
    def adds_eos(self) -> bool | Doubt:
        """Whether texts end with `eos_id` by the tokenizer's own settings, if they settle it."""
        ...

    @property
    def missing_bytes(self) -> frozenset[int]:
        """Bytes that have no token and that encoding therefore drops."""
        ...

    def encode_batch(self, texts: Sequence[str], /) -> Sequence[np.ndarray]:
        """The uint32 ids of each text, nothing added."""
        ...


@dataclass(frozen=True)
class EncodedDocuments:
    """Token ids of a part's documents, and what encoding them left out.

    Attributes:
      ids: of each document, in order.
      dropped_bytes: bytes of UTF-8 without a token, which are in no document's ids.
      documents_with_dropped_bytes: documents that this concerns.
      doubled_specials: start and end tokens removed because a text brought more
        than the one that it should have.
    """

    ids: tuple[UInt32[np.ndarray, "_"], ...]
    dropped_bytes: int
    documents_with_dropped_bytes: int
    doubled_specials: int


def encode_documents(
    texts: Sequence[Any],
    tokenizer: Tokenizer,
    *,
    bos: bool,
    eos: bool,
    first_document: int = 0,
    column: str = "text",
    vocabulary: int | None = None,
) -> EncodedDocuments:
    """Encodes a part's documents.

    With `bos`, ids start with exactly one start token, also where the text
    itself begins with it (once or more often); without, none is added. With
    `eos` the same holds at the end. A document without any token (an empty
    text, or one of dropped bytes only) stays empty: there is nothing to start.

    Args:
      texts: values of the column; each must be a string.
      first_document: index in the corpus of texts[0], for messages.
      column: name of the column, for messages.
      vocabulary: every id must be below it, if given (the teacher's rows).

    Raises:
      CorpusError: a value is no text; names document, column and type.
      TeacherError: an id is beyond the vocabulary; names document and token.
      PipelineError: `bos` or `eos` without such a token.
    """
    start = _special_id(tokenizer.bos_id, "start", "bos") if bos else None
    end = _special_id(tokenizer.eos_id, "end", "eos") if eos else None
    missing = bytes(sorted(tokenizer.missing_bytes))
    dropped = []
    for index, text in enumerate(texts, first_document):
        data = utf8(text, index, column)
        dropped.append(len(data) - len(data.translate(None, missing)))
    encoded, doubled = [], 0
    for index, ids in enumerate(tokenizer.encode_batch(texts), first_document):
        ids, extra = _with_specials(ids, start, end)
        doubled += extra
        if vocabulary is not None and ids.size and int(ids.max()) >= vocabulary:
            _refuse_id(ids, vocabulary, index)
        encoded.append(ids)
    return EncodedDocuments(
        ids=tuple(encoded),
        dropped_bytes=sum(dropped),
        documents_with_dropped_bytes=sum(count > 0 for count in dropped),
        doubled_specials=doubled,
    )


def resolve_bos(choice: Literal["auto", "on", "off"], tokenizer: Tokenizer) -> bool:
    """Whether documents start with the start token; `auto` is the tokenizer's own way.

    Raises `PipelineError` without such a token, and for `auto` where the way is in doubt.
    """
    return _resolve(choice, tokenizer.adds_bos, tokenizer.bos_id, "start", "bos")


def resolve_eos(choice: Literal["auto", "on", "off"], tokenizer: Tokenizer) -> bool:
    """Whether documents end with the end token; `auto` is the tokenizer's own way.

    Raises `PipelineError` without such a token, and for `auto` where the way is in doubt.
    """
    return _resolve(choice, tokenizer.adds_eos, tokenizer.eos_id, "end", "eos")


def utf8(text: Any, document: int, column: str) -> bytes:
    """The bytes of a document's text; a CorpusError if it is none.

    Args:
      document: index in the corpus.
      column: where the value comes from.
    """
    if not isinstance(text, str):
        raise CorpusError(_not_a_text(text, document, column))
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CorpusError(
            f"Document {document} is no valid text: character {error.start} of column "
            f"{column!r} is the lone surrogate {text[error.start]!r}, which UTF-8 cannot "
            "write. Repair the document or take it out."
        ) from error


def _not_a_text(value: Any, document: int, column: str) -> str:
    found = f"Document {document} must be a text, but column {column!r} holds "
    if value is None:
        return (
            found + "nothing (null). Filter such rows out first, for example with "
            f"dataset.filter(lambda row: row[{column!r}] is not None)."
        )
    return (
        f"{found}a value of type {type(value).__name__}. "
        "Name the column that holds the texts, or convert this one to strings."
    )


def _with_specials(
    ids: UInt32[np.ndarray, "_"], start: int | None, end: int | None
) -> tuple[UInt32[np.ndarray, "_"], int]:
    """The ids with one start and one end token, and how many surplus ones went."""
    if ids.size == 0:
        return ids, 0
    before = _run_length(ids, start)
    ids = ids[before:]
    after = _run_length(ids[::-1], end)
    ids = ids[: len(ids) - after]
    head = [] if start is None else [start]
    tail = [] if end is None else [end]
    whole = np.concatenate([np.array(head, np.uint32), ids, np.array(tail, np.uint32)])
    return whole, max(0, before - 1) + max(0, after - 1)


def _run_length(ids: UInt32[np.ndarray, "_"], token: int | None) -> int:
    """How many of the first ids equal the token."""
    if token is None:
        return 0
    others = np.flatnonzero(ids != token)
    return int(others[0]) if others.size else len(ids)


def _special_id(token: int | None, place: str, name: str) -> int:
    if token is None:
        raise PipelineError(
            f"Documents should {place} with a token of their own, but this tokenizer has no "
            f"{name.upper()} token. Set {name} to 'off', or use a tokenizer that has one."
        )
    return token


def _resolve(choice: str, own: bool | Doubt, token: int | None, place: str, name: str) -> bool:
    if choice not in ("auto", "on", "off"):
        raise PipelineError(f"{name} must be 'auto', 'on' or 'off', but it is {choice!r}.")
    if choice == "auto" and isinstance(own, Doubt):
        raise PipelineError(_in_doubt(own, place, name))
    wanted = own is True if choice == "auto" else choice == "on"
    if wanted:
        _special_id(token, place, name)
    return wanted


def _in_doubt(doubt: Doubt, place: str, name: str) -> str:
    """What the releases of transformers do, and the options that decide."""
    four, five = doubt.transformers_4, doubt.transformers_5
    token = "a token of their own" if doubt.token is None else repr(doubt.token)
    lines = [
        f"The tokenizer's files do not settle whether documents {place} with {token}: transformers "
        f"4 {_puts(four)} there, and transformers 5 {_puts(five)}. It changes every position, so "
        "say which is meant:"
    ]
    readings = (("transformers 4 and the model's training", four), ("transformers 5", five))
    named = () if doubt.token is None else ((doubt.token,),)
    for option, tokens in (*(("on", one) for one in named), ("off", ())):
        as_which = " and ".join(which for which, reading in readings if reading == tokens)
        lines.append(f"  --{name} {option}: as {as_which or 'no release of transformers'}")
    if len(five) == 1 and five != (doubt.token,):
        lines.append(
            f"To have {five[0]!r} there, give a copy of the tokenizer (--tokenizer) whose "
            f"tokenizer_config.json names it as {name}_token."
        )
    return "\n".join(lines)


def _puts(tokens: tuple[str, ...] | None) -> str:
    if tokens is None:
        return "refuses the settings instead of putting anything"
    return f"puts {' '.join(map(repr, tokens)) or 'nothing'}"


def _refuse_id(ids: UInt32[np.ndarray, "_"], vocabulary: int, document: int) -> None:
    position = int(np.flatnonzero(ids >= vocabulary)[0])
    raise TeacherError(
        f"Document {document} holds token {int(ids[position])} at position {position}, but "
        f"the teacher's vocabulary ends at {vocabulary - 1}. "
        "Use the tokenizer that belongs to the teacher."
    )
