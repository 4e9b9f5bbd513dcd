"""Text as a terminal may show it: what moves the cursor, reorders or hides is spelt out.

A corpus, a tokenizer, a file's name or another's manifest may hold anything.
"""

from __future__ import annotations

import io
import json
import sys
import unicodedata
from contextlib import suppress
from typing import Any

# Controls, formats, lone surrogates, private use, unassigned; line and paragraph separators.
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
_JOINERS = "\u200c\u200d"
_VIRAMA = 9


def visible(text: str, keep: str = "\n\t") -> str:
    r"""The text with whatever a terminal would obey, or not show, as Python spells it: \u2028.

    Text of any script stays as it is, and so do joiners (U+200C, U+200D) where they shape it:
    inside emoji, between letters, after a virama.

    Args:
      keep: control characters that stay: line ends and tabs.
    """
    if text.isprintable():
        return text
    return "".join(
        repr(char)[1:-1]
        if unicodedata.category(char) in _HIDDEN and char not in keep and not _joins(text, place)
        else char
        for place, char in enumerate(text)
    )


def one_line(text: object) -> str:
    r"""What stands inside a line, such as a name: line ends and tabs are spelt out, too."""
    return visible(str(text), keep="")


def quoted(text: str) -> str:
    """One line between quotes, as Python writes it but for text of other scripts, which stays."""
    quote = '"' if "'" in text and '"' not in text else "'"
    escaped = text.replace("\\", "\\\\").replace(quote, f"\\{quote}")
    return f"{quote}{one_line(escaped)}{quote}"


def as_json(value: Any, allow_nan: bool = True) -> str:
    """JSON of ASCII without control characters."""
    return json.dumps(value, indent=1, allow_nan=allow_nan).replace("\x7f", "\\u007f")


def show(text: str) -> None:
    """Writes lines to standard output."""
    sys.stdout.write(f"{visible(text)}\n")


def say(text: str) -> None:
    """Writes lines to standard error, at once."""
    with unheard():
        sys.stderr.write(f"{visible(text)}\n")
        sys.stderr.flush()


def unheard() -> suppress:
    """Lets standard error be gone: its terminal was closed, or the program that it was piped to
    has ended. Work does not stop for want of somebody who watches it."""
    return suppress(OSError)


def escape_what_cannot_be_written() -> None:
    """From now on standard output and error take any text, whatever their encoding."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _joins(text: str, place: int) -> bool:
    """Whether a character is a joiner where it shapes what is around it."""
    if text[place] not in _JOINERS or place == 0:
        return False
    after = text[place + 1 : place + 2]
    shaped = _is_shaped(text[place - 1])
    return unicodedata.combining(text[place - 1]) == _VIRAMA or (shaped and _is_shaped(after))


def _is_shaped(char: str) -> bool:
    return char > "\x7f" and unicodedata.category(char)[0] in "LMS"
