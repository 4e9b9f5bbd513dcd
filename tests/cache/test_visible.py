"""Text for a terminal: what it would obey or hide is spelt out, and text of any script stays."""

import io
import json
import sys
import unicodedata

import pytest

from cache.visible import as_json, escape_what_cannot_be_written, one_line, quoted, visible

_SPELT = {
    "\x1b[31m": r"\x1b[31m",
    "\x1b]0;title\x07": r"\x1b]0;title\x07",
    "\x9b2J": r"\x9b2J",
    "\x08\x0b\x0c\r": r"\x08\x0b\x0c\r",
    "\x1c\x1d\x1e\x1f\x7f\x85": r"\x1c\x1d\x1e\x1f\x7f\x85",
    "\u2028\u2029": r"\u2028\u2029",
    "\u202a\u202e\u2066\u2069\u200e\u200f\u061c": r"\u202a\u202e\u2066\u2069\u200e\u200f\u061c",
    "\u200b\u2060\ufeff\xad": r"\u200b\u2060\ufeff\xad",
    "\U000e0041\U000e007f": r"\U000e0041\U000e007f",
    "\ud800\udcff": r"\ud800\udcff",
    "\ue000\U000f0000\uffff": r"\ue000\U000f0000\uffff",
    # Joiners that join nothing.
    "\u200d": r"\u200d",
    "a\u200db": r"a\u200db",
    "\u4e2d\u200d\u200d\u4e2d": "\u4e2d" + r"\u200d\u200d" + "\u4e2d",
}
_ORDINARY = (
    "plain text, [red]x[/red] :smile: \\u2028",
    "two\nlines\tand a tab",
    "Zwölf Boxkämpfer\xa0! e\u0301 \u4e2d\u6587\u3000\u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4",
    "العربية \u0648\u064e עברית \u05e9\u05b8",
    "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",  # Persian, with a non-joiner
    "हिन्दी \u0915\u094d\u200d\u0937 \u0d28\u0d4d\u200d ภาษาไทย \u0e17\u0e35\u0e48",
    "👩‍💻 👩🏽‍🚀 🏳️‍🌈 ❤️‍🔥 👨‍👩‍👧 1️⃣",
)


@pytest.mark.parametrize(("text", "spelt"), _SPELT.items())
def test_what_a_terminal_obeys_or_hides_is_spelt_out(text, spelt):
    assert visible(f"a {text} b") == one_line(f"a {text} b") == f"a {spelt} b"


@pytest.mark.parametrize("text", _ORDINARY)
def test_ordinary_text_stays(text):
    assert visible(text) == text


def test_every_character_is_either_shown_or_harmless():
    ranges = (range(0x3100), range(0xD7F0, 0xE010), range(0xFDD0, 0x10020), range(0xE0000, 0xE0200))
    chars = [chr(code) for codes in ranges for code in codes]
    hidden = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    spelt = [
        ascii(char)[1:-1] if unicodedata.category(char) in hidden and char not in "\n\t" else char
        for char in chars
    ]
    assert visible("a".join(chars)).split("a") == "a".join(spelt).split("a")


def test_line_ends_stay_only_where_there_may_be_lines():
    assert visible("a\n\tb") == "a\n\tb"
    assert one_line("a\n\tb") == r"a\n\tb"


@pytest.mark.parametrize("text", ["it's", 'say "x"', "both ' and \"", "back\\slash\n", "plain"])
def test_quotes_are_those_of_python(text):
    assert quoted(text) == repr(text)


def test_quoted_text_of_other_scripts_stays():
    assert quoted("👩‍💻\u3000\xa0\u2028") == "'👩‍💻\u3000\xa0\\u2028'"


def test_json_is_ascii_and_what_it_was():
    value = {"a\x7f\u2028": ["\x1b\ud800é", 1]}
    text = as_json(value)
    assert visible(text) == text
    assert text.isascii()
    assert json.loads(text) == value


def test_streams_of_any_encoding_take_any_text(monkeypatch):
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # a caller's own, that takes all
    escape_what_cannot_be_written()
    stream.write("é\u4e2d─\n")
    stream.flush()
    assert written.getvalue() == b"\\xe9\\u4e2d\\u2500\n"
