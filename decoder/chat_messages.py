"""The messages of a conversation: their form, and special tokens that their text would make.

A special token comes from the template alone. Two checks see to it. `refuse_special_text` looks
for a special token's text in a message. `refuse_formed_specials` looks at the ids, for what the
text does not show: a token that a message completes with the template's text or with the next
message, one of a role in `<|{{ role }}|>`, one that the tokenizer's normaliser makes of other
characters.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import UInt32

from decoder.errors import DecoderError
from decoder.tokenizer import Tokenizer, is_byte_level

# {"role": str, "content": str}; other keys only if their value is None. Checked here, message by
# message, as conversations come from files.
Message = Any

ASSISTANT = "assistant"

# Characters for private use, in Unicode's first plane and in the two that are kept for them.
_NO_MEANING = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
# Roles that templates know; in any other, characters are as suspect as in the content.
_ROLES = {"system", "developer", "user", ASSISTANT, "tool", "function"}


def special_text(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[tuple[int, str]]:
    """The special tokens whose text stands in a message's role or content.

    Pairs of the message's number, from 1, and the token, in order. Looked for are the tokens
    that the tokenizer declares special, its BOS and EOS. `<think>` and the like, which it
    declares ordinary, may be written; and so may an end of turn that it declares ordinary.
    """
    pattern = _special_pattern(tokenizer)
    return [
        (number, found)
        for number, message in enumerate(checked(messages), 1)
        for text in (message["role"], message["content"])
        for found in pattern.findall(text)
    ]


def checked(messages: Sequence[Message]) -> list[dict[str, str]]:
    """The messages as plain dicts. Raises `DecoderError` with the number of one that is none."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise DecoderError(f"expected a list of messages, found {type(messages).__name__}")
    if not messages:
        raise DecoderError("the conversation has no messages; expected at least one")
    return [
        _checked_message(message, f"message {number} of {len(messages)}")
        for number, message in enumerate(messages, 1)
    ]


def _checked_message(message: Message, name: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise DecoderError(
            f'{name} is {type(message).__name__}; expected {{"role": …, "content": …}}'
        )
    extra = sorted(
        str(key)
        for key, value in message.items()
        if key not in ("role", "content") and value is not None
    )
    if extra:
        raise DecoderError(
            f"{name} has the keys {', '.join(extra)}; a message is a role and a content. Calls of "
            "tools and images are not supported; put thoughts into the content, as the model "
            "writes them"
        )
    for key in ("role", "content"):
        value = message.get(key)
        if not isinstance(value, str):
            found = "missing" if value is None else f"of the type {type(value).__name__}"
            raise DecoderError(f"{name}: the {key} is {found}; expected a string")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DecoderError(
                f"{name}: the {key} is not valid Unicode: half of a surrogate pair at character "
                f"{error.start}"
            ) from error
    return {"role": str(message["role"]), "content": str(message["content"])}


def refuse_special_text(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> None:
    """Refuse messages of the checked form in which `special_text` finds a place."""
    found = special_text(tokenizer, messages)
    if found:
        number, token = found[0]
        raise DecoderError(
            f"message {number} of {len(messages)} contains {token!r}, which would become the "
            f"special token of that text ({len(found)} such places in the conversation). Remove "
            "or escape it, or pass keep_specials=True if it is meant"
        )


def refuse_formed_specials(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, str]],
    ids: UInt32[np.ndarray, "tokens"],
    text: Callable[[list[dict[str, str]]], str],
) -> None:
    """Refuse messages whose characters take part in a special token of `ids`.

    The messages are rendered by `text` and encoded once more, with a character of no meaning for
    each of theirs but white space: the same special tokens have to follow each other. Not seen:
    special tokens that consist of white space, and a message that takes a character of a special
    token of the template's and gives it back (the tokens are the same). A template that writes
    other special tokens because of what a message says is refused along with them.
    """
    specials = _special_ids(tokenizer)
    own = [number for number in ids.tolist() if number in specials]
    parts = [part for message in messages for part in message.values()]
    spoken = {character for part in [*parts, *_special_texts(tokenizer)] for character in part}
    blank = next((mark for mark in map(chr, chain(*_NO_MEANING)) if mark not in spoken), None)
    if blank is None:
        raise DecoderError(
            "the messages hold every character of Unicode's private use, so that none is left to "
            "check them with. Pass keep_specials=True to go without this check"
        )

    def differs(blanked: Sequence[int]) -> bool:
        changed = [
            _blanked(message, blank) if place in blanked else dict(message)
            for place, message in enumerate(messages)
        ]
        found = tokenizer.encode(text(changed)).tolist()
        return own != [number for number in found if number in specials]

    count = len(messages)
    try:
        if not differs(range(count)):
            return
        guilty = next((place for place in range(count) if differs([place])), None)
    except DecoderError as error:
        raise DecoderError(
            "the chat template refuses the messages with other characters in place of theirs, so "
            "that the special tokens that they would make cannot be told from the template's: "
            f"{error}. Pass keep_specials=True to go without this check"
        ) from error
    who = "the messages" if guilty is None else f"message {guilty + 1} of {count}"
    raise DecoderError(
        f"{who}: role or content change which special tokens the conversation has, together with "
        "the text around or by the tokenizer's normaliser. Change the text, or pass "
        "keep_specials=True if it is meant"
    )


def _blanked(message: Mapping[str, str], blank: str) -> dict[str, str]:
    role = message["role"]
    return {
        "role": role if role in _ROLES else re.sub(r"\S", blank, role),
        "content": re.sub(r"\S", blank, message["content"]),
    }


@lru_cache(maxsize=8)
def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Without that of unknown characters, where any text may have it."""
    definition = json.loads(tokenizer.definition)
    model = definition["model"]
    place = model.get("unk_id")
    unknown = model.get("unk_token") if place is None else model["vocab"][place][0]
    # With all bytes in the vocabulary no character is unknown.
    whole = model.get("byte_fallback") or is_byte_level(definition)
    texts = _special_texts(tokenizer)
    if not whole:
        texts -= {unknown} - {tokenizer.bos, tokenizer.eos}
    ids = (tokenizer.backend.token_to_id(text) for text in texts)
    return frozenset(number for number in ids if number is not None)


def _special_texts(tokenizer: Tokenizer) -> set[str]:
    added = tokenizer.backend.get_added_tokens_decoder().values()
    texts = {token.content for token in added if token.special} | {tokenizer.bos, tokenizer.eos}
    return {text for text in texts if text}


@lru_cache(maxsize=8)
def _special_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    longest_first = sorted(_special_texts(tokenizer), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
