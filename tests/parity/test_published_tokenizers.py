"""Tokenizers as families publish them: ids as the `tokenizers` library gives, BOS as transformers.

`make parity` fetches them, as packages of npm.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from decoder.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_files
from decoder.tokenizer_ends import Doubt
from tests.decoder.varied_text import CONTROLS, GLUE, SCRIPTS, lines

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

# Whether BOS is added: what transformers 5 does, and None where release 4 does something else.
PUBLISHED = {
    "llama3_1": True,
    "llama2": True,
    "gemma3": True,
    "qwen3": False,
    "gptoss": False,
    "claude": False,
    "deepseek_v3": None,
}
EACH = pytest.mark.parametrize("name", PUBLISHED)

ODD = (
    *SCRIPTS,
    *CONTROLS,
    f"a{CONTROLS}b",
    # Combining marks: in another order, many, alone, of other scripts.
    *(
        "e\u0301\u0323 e\u0323\u0301 \u1ec7 \u0301a",
        "Z\u0351\u036b\u0343\u032a\u0302",
        "\u0e01\u0e33 \u0928\u093f",
    ),
    *("\u1100\u1161\u11a8 \uac01", "\ufb01 \u2126 \u212b \u1e9b\u0323 \u00c5 A\u030a"),
    # Emoji sequences: skin, family, flags, keycap, a tag sequence, text style, a lone joiner.
    *(
        "\U0001f44d\U0001f3fd",
        "\U0001f469\u200d\U0001f469\u200d\U0001f467",
        "\U0001f1e9\U0001f1ea\U0001f1eb",
    ),
    "1\ufe0f\u20e3 \U0001f3f4\U000e0067\U000e0062\U000e007f \u2764\ufe0e \u2764\ufe0f \u200d",
    # From right to left, with its marks.
    *(
        "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd abc \u05e2\u05d5\u05dc\u05dd",
        "\u202e\u0627\u0644\u0639\u0631\u0628\u064a\u0629\u202c 12\u066b5 \u061c\u200f",
    ),
    # Line ends and spaces.
    *("a\r\nb\r\n\r\nc\rd\n\re", "\r\n", "\n\n\n", "  \t \n ", "a\u2028b\u2029c\x85d\x0be\x0cf"),
    *("\u00a0\u2003\u3000a\u200bb", " leading", "trailing ", "   ", " ", ""),
    # A byte order mark: first, within, alone.
    *("\ufeffa", "a\ufeffb", "\ufeff"),
    # The ends of Unicode.
    *("\ud7ff\ue000\ufffd\uffff", "\U00010000\U0010ffff", "\x00", "a\x00b"),
    "x" * 300 + " " * 300 + "\u4e2d" * 300,
)


@cache
def loaded(name: str) -> tuple[Path, Tokenizer, tokenizers.Tokenizer, Any]:
    """The folder; the tokenizer as we, the library and transformers read it."""
    from transformers import AutoTokenizer

    if "PUBLISHED_TOKENIZERS" not in os.environ:
        raise RuntimeError("PUBLISHED_TOKENIZERS names no folder; run `make parity`")
    folder = Path(os.environ["PUBLISHED_TOKENIZERS"]) / name
    plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return folder, load_tokenizer(str(folder)), plain, AutoTokenizer.from_pretrained(folder)


def texts(plain: tokenizers.Tokenizer) -> list[str]:
    """Odd ones, mixed ones, and such as look like special tokens or are."""
    special = [token.content for token in plain.get_added_tokens_decoder().values()]
    some = [*special[:12], *special[-12:]]
    like = [
        form
        for token in some
        for form in (
            token,
            f"a{token}b",
            f" {token} ",
            token[:-1],
            token[1:],
            token.upper(),
            token * 2,
        )
    ]
    fixed = (
        "<s>",
        "</s>",
        "<|endoftext|>",
        "<| im_start |>",
        "[INST]",
        "<0x0A>",
        "\u2581",
        "\u0120a",
    )
    return [*ODD, *(f"a{glue}b" for glue in GLUE), *like, *fixed, *lines(400)]


@EACH
def test_ids_are_those_of_the_library(name: str) -> None:
    _, ours, plain, _ = loaded(name)
    many = texts(plain)
    expected = [one.ids for one in plain.encode_batch(many, add_special_tokens=False)]
    differing = [
        (text, ids.tolist(), wanted)
        for text, ids, wanted in zip(many, ours.encode_batch(many), expected, strict=True)
        if ids.tolist() != wanted
    ]
    assert not differing, differing[:3]
    # The texts do have such tokens, as the library sees them.
    assert len({number for ids in expected for number in ids}) > 500
    added = plain.get_added_tokens_decoder()
    assert sum(number in added for ids in expected for number in ids) > 10


@EACH
def test_bos_and_eos_are_those_of_transformers(name: str) -> None:
    _, ours, _, theirs = loaded(name)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    ids, text = theirs("a")["input_ids"], theirs("a", add_special_tokens=False)["input_ids"]
    if PUBLISHED[name] is None:
        assert isinstance(ours.adds_bos, Doubt)
        assert ours.adds_bos.transformers_4 == (ours.bos,)
        assert ours.adds_bos.transformers_5 == ()
        assert ids == text
    else:
        assert ours.adds_bos is PUBLISHED[name]
        assert ids == [*([ours.bos_id] * PUBLISHED[name]), *text]
    assert ours.adds_eos is False


@EACH
def test_what_a_cache_keeps_of_them(name: str) -> None:
    _, ours, _, _ = loaded(name)
    again = tokenizer_from_files(ours.files())
    assert again == ours
    assert again.fingerprint == ours.fingerprint
    assert again.encode_batch(list(ODD))[-1].tolist() == ours.encode(ODD[-1]).tolist()


@EACH
def test_templates_write_one_bos(name: str) -> None:
    from decoder.chat import encode_chat

    _, ours, _, theirs = loaded(name)
    if ours.chat_template is None:
        assert theirs.chat_template is None
        return
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    ids = encode_chat(ours, messages).tolist()
    assert ids.count(ours.bos_id) == (ours.bos_id is not None and name != "gptoss")
    assert ids == theirs.apply_chat_template(messages)["input_ids"]
