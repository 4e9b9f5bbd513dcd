"""Conversations as ids: the tokenizer's own chat template, one BOS, the assistant's tokens.

    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    text = render_chat(tokenizer, messages)
    ids = encode_chat(tokenizer, messages)              # as the model was trained to read them
    ids, assistant = encode_turns(tokenizer, messages)  # and which of them the assistant wrote
    end_of_turn(tokenizer).token                        # "<|im_end|>"

A template is a Jinja program of the model's makers. It runs in Jinja's immutable sandbox and is
given what `transformers` gives it: `messages`, `add_generation_prompt`, `bos_token`, `eos_token`,
`tools` and `documents` (both none), `raise_exception`, `strftime_now`, a `tojson` that escapes no
HTML, loop controls and `{% generation %}` blocks. Where it prints an undefined name it prints
nothing, as there.

**The day.** Nothing here reads a clock or draws a random number. A template that asks for the
date (`strftime_now`) is refused unless the caller says which day to write, and so records it.

**Special tokens.** The text is encoded as it stands, nothing is inserted by a post-processor. If
the tokenizer's settings add BOS and the template did not write it, one is put before; two at the
start are refused. EOS is the template's business alone. A special token's text inside a message
becomes that token, with which a message could end its own turn and forge the next:
`special_text` finds such places, and `encode_chat` and `encode_turns` refuse them unless told to
keep them; also where only the ids show them (`decoder/chat_messages.py`). JAX is not imported.
"""

import bisect
import datetime
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import tokenizers
from jaxtyping import Bool, UInt32

from decoder.chat_messages import (
    ASSISTANT,
    Message,
    checked,
    refuse_formed_specials,
    refuse_special_text,
)
from decoder.chat_messages import special_text as special_text
from decoder.chat_template import render
from decoder.errors import DecoderError
from decoder.tokenizer import Tokenizer
from decoder.tokenizer_ends import Doubt

_PROBE = "stillroom"  # what the assistant says where only the template's own text is wanted


@dataclass(frozen=True)
class EndOfTurn:
    """The token that a template puts after an assistant's turn.

    Attributes:
      token: its text, and `token_id` its id; both None if there is no such token.
      reason: then, why not; "" otherwise.
    """

    token: str | None
    token_id: int | None
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.token is None) != (self.token_id is None) or bool(self.reason) != (
            self.token is None
        ):
            raise ValueError("an end of turn has a token and its id, or a reason for neither")


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = False,
    date: datetime.date | None = None,
) -> str:
    """The text of a conversation, by the tokenizer's template.

    Args:
      messages: at least one, each {"role": str, "content": str}.
      add_generation_prompt: whether the header of the assistant's next turn ends the text.
      date: what the template gets for today, if it asks.

    Raises `DecoderError` for a message that is not of that form, for a conversation that the
    template refuses, and for a template that cannot be used; numbers of messages start at 1.
    """
    return _render(tokenizer, checked(messages), add_generation_prompt, date)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = False,
    date: datetime.date | None = None,
    keep_specials: bool = False,
) -> UInt32[np.ndarray, "tokens"]:
    """The ids of a conversation, with one BOS where template or tokenizer want one.

    `transformers.apply_chat_template` gives the same ids, except where the template does not
    write the BOS that the tokenizer's settings add: there it leaves BOS out; and in release 5 for
    `LlamaTokenizer`, whose pre-tokenizer it builds itself (release 4 follows tokenizer.json).

    Arguments and errors are those of `render_chat`; and a special token's text inside a message
    is refused, or with `keep_specials` becomes that token.
    """
    plain = checked(messages)
    if not keep_specials:
        refuse_special_text(tokenizer, plain)

    def text(changed: list[dict[str, str]]) -> str:
        return _render(tokenizer, changed, add_generation_prompt, date)

    ids = tokenizer.encode(text(plain))
    if not keep_specials:
        refuse_formed_specials(tokenizer, plain, ids, text)
    return _with_bos(tokenizer, ids)


def encode_turns(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    date: datetime.date | None = None,
    keep_specials: bool = False,
) -> tuple[UInt32[np.ndarray, "tokens"], Bool[np.ndarray, "tokens"]]:
    """The ids of `encode_chat`, and which of them are the assistant's.

    True from the first token that starts in the text of an assistant's turn to its end-of-turn
    token: what the model has to write after the header that the generation prompt is. A token
    that starts in the header is not, even if it reaches into the turn.

    A turn's text is what the `{% generation %}` blocks of the template enclose. In a template
    without, it follows the conversation before it with the generation prompt. That needs a
    template which writes earlier turns alike whether or not others follow. Those that drop
    thoughts from earlier turns (Qwen 3's) do not: such a conversation raises `DecoderError`,
    as does one that the assistant begins, and is to be encoded up to each turn, one by one,
    which is also what the model reads when it answers.
    """
    plain = checked(messages)
    if not keep_specials:
        refuse_special_text(tokenizer, plain)
    text = _render(tokenizer, plain, False, date)
    turns = _generation_blocks(tokenizer, plain, text, date) or _turns(tokenizer, plain, text, date)
    encoding = _offsets_backend(tokenizer).encode(text, add_special_tokens=False)
    starts = np.array([start for start, _ in encoding.offsets], np.int64)
    mask = np.zeros(len(starts), bool)
    for first, end in turns:
        mask |= (first <= starts) & (starts < end)
    plain_ids = np.asarray(encoding.ids, np.uint32)
    if not keep_specials:
        refuse_formed_specials(
            tokenizer, plain, plain_ids, lambda changed: _render(tokenizer, changed, False, date)
        )
    ids = _with_bos(tokenizer, plain_ids)
    return ids, np.concatenate([np.zeros(len(ids) - len(mask), bool), mask])


@lru_cache(maxsize=64)
def end_of_turn(tokenizer: Tokenizer, date: datetime.date | None = None) -> EndOfTurn:
    """The token that ends an assistant's turn, found by rendering one.

    It is often not the tokenizer's EOS: `<end_of_turn>` (Gemma), `<|eot_id|>` (Llama 3),
    `<|im_end|>` (ChatML). Raises `DecoderError` for a template that cannot be rendered.
    """
    messages = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": _PROBE}]
    text = _settled(tokenizer, messages, date)
    if _PROBE not in text:
        return EndOfTurn(None, None, "the template does not write the assistant's text as it is")
    after = text[text.rindex(_PROBE) + len(_PROBE) :]
    added = tokenizer.backend.get_added_tokens_decoder()
    for token_id in tokenizer.encode(after).tolist():
        if token_id in added and added[token_id].content.strip():
            return EndOfTurn(added[token_id].content, token_id)
    return EndOfTurn(
        None, None, f"after the assistant's text comes {after!r}, in which no token is special"
    )


def _with_bos(
    tokenizer: Tokenizer, ids: UInt32[np.ndarray, "tokens"]
) -> UInt32[np.ndarray, "longer"]:
    bos = tokenizer.bos_id
    if bos is None:
        return ids
    if ids[:2].tolist() == [bos, bos]:
        raise DecoderError(
            f"the conversation begins with two BOS tokens ({tokenizer.bos!r}): the chat template "
            "writes it twice, or writes it and the first message begins with its text"
        )
    if ids[:1].tolist() == [bos]:
        return ids
    if isinstance(tokenizer.adds_bos, Doubt):
        raise DecoderError(
            f"the chat template writes no BOS token ({tokenizer.bos!r}), and the tokenizer's files "
            "do not settle whether a text begins with one. Decide it, for example with "
            "dataclasses.replace(tokenizer, adds_bos=True), or False"
        )
    return np.concatenate([np.array([bos], np.uint32), ids]) if tokenizer.adds_bos else ids


@lru_cache(maxsize=8)
def _offsets_backend(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer with each token's true place in the text.

    A byte-level post-processor takes spaces out of the offsets, so that a token of the header's
    last space and the turn's first word would seem to start in the turn.
    """
    definition = {**json.loads(tokenizer.definition), "post_processor": None}
    return tokenizers.Tokenizer.from_str(json.dumps(definition))


def _generation_blocks(
    tokenizer: Tokenizer,
    messages: list[dict[str, str]],
    text: str,
    date: datetime.date | None,
) -> list[tuple[int, int]]:
    """Where the template's `{% generation %}` blocks lie in the text; [] without any."""
    unused = (mark for mark in map(chr, range(0xE000, 0xF900)) if mark not in text)
    start, end = next(unused), next(unused)
    marked = _render(tokenizer, messages, False, date, (start, end))
    pieces = re.split(f"([{start}{end}])", marked)
    if "".join(piece for piece in pieces if piece not in (start, end)) != text:
        raise DecoderError("the chat template computes with the text of its generation blocks")
    blocks, place, first = [], 0, 0
    for piece in pieces:
        if piece == start:
            first = place
        elif piece == end:
            blocks.append((first, place))
        else:
            place += len(piece)
    return blocks


def _turns(
    tokenizer: Tokenizer,
    messages: list[dict[str, str]],
    text: str,
    date: datetime.date | None,
) -> list[tuple[int, int]]:
    """Where the assistant's turns lie in the text, from renderings of its beginnings."""
    turns = []
    end = end_of_turn(tokenizer, date).token
    for place, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        name = f"message {place + 1} of {len(messages)}"
        if place == 0:
            raise DecoderError(
                f"{name} is the assistant's: no message stands before it, so that the end of its "
                "header cannot be found. Put a system or user message first"
            )
        header = _render(tokenizer, messages[:place], True, date)
        _check_begins(text, header, f"{name}: the generation prompt before")
        _check_header(tokenizer, messages[:place], header, date)
        turn = _settled(tokenizer, messages[: place + 1], date)
        if end is not None and end in turn[len(header) :]:
            turn = turn[: turn.rindex(end) + len(end)]
        _check_begins(text, turn, f"{name}: the text up to the end of")
        if end is not None and end not in turn[len(header) :]:
            raise DecoderError(
                f"{name}: the chat template ends other turns of the assistant with {end!r}, and "
                f"not this one: {turn[len(header) :]!r}"
            )
        turns.append((len(header), len(turn)))
    return turns


def _check_header(
    tokenizer: Tokenizer,
    before: list[dict[str, str]],
    header: str,
    date: datetime.date | None,
) -> None:
    """Refuse a template that writes a header into the turn, for want of a generation prompt."""
    if header != _render(tokenizer, before, False, date):
        return
    text = _render(tokenizer, [*before, {"role": ASSISTANT, "content": _PROBE}], False, date)
    written = text[len(header) :].partition(_PROBE)[0] if text.startswith(header) else text
    if written.strip():
        raise DecoderError(
            "this chat template ignores add_generation_prompt, and writes "
            f"{written[:40]!r} before the assistant's text; the mask of the assistant's turns "
            "cannot be told. Use a template that writes that header as the generation prompt, or "
            "one with {% generation %} blocks"
        )


def _check_begins(text: str, part: str, what: str) -> None:
    if text.startswith(part):
        return
    shared = _shared(text, part)
    raise DecoderError(
        f"{what} the assistant's turn is not how the whole conversation begins: it has "
        f"{part[shared : shared + 40]!r} where the whole has {text[shared : shared + 40]!r}. This "
        "chat template writes earlier turns differently once others follow (some drop thoughts). "
        "Encode the conversation up to each of the assistant's turns as one of its own"
    )


def _settled(
    tokenizer: Tokenizer, messages: list[dict[str, str]], date: datetime.date | None
) -> str:
    """What the text begins with whether the conversation stops here or goes on."""
    ends, goes_on = (_render(tokenizer, messages, more, date) for more in (False, True))
    return ends[: _shared(ends, goes_on)]


def _render(
    tokenizer: Tokenizer,
    messages: list[dict[str, str]],
    add_generation_prompt: bool,
    date: datetime.date | None,
    marks: tuple[str, str] | None = None,
) -> str:
    return render(
        tokenizer.chat_template,
        messages,
        add_generation_prompt=add_generation_prompt,
        special_tokens={"bos_token": tokenizer.bos, "eos_token": tokenizer.eos},
        date=date,
        marks=marks,
    )


def _shared(first: str, second: str) -> int:
    """How many characters two texts have in common at their beginning."""
    lengths = range(1, min(len(first), len(second)) + 1)
    return bisect.bisect_left(lengths, True, key=lambda length: first[:length] != second[:length])
