"""Special tokens exactly once, and nothing dropped in silence."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.tokenizer_ends import Doubt
from pipelines.encode import encode_documents, resolve_bos, resolve_eos, utf8
from pipelines.errors import CorpusError, PipelineError, TeacherError
from pipelines.layout import LayoutSettings, lay_rows

BOS, EOS = 300, 301


@dataclass(frozen=True)
class Bytes:
    """A tokenizer of bytes that knows `<s>` and `</s>` in a text, as real ones do."""

    bos_id: int | None = BOS
    eos_id: int | None = EOS
    adds_bos: bool | Doubt = False
    adds_eos: bool | Doubt = False
    missing_bytes: frozenset[int] = frozenset()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(self._ids(text), np.uint32) for text in texts]

    def _ids(self, text: str) -> list[int]:
        ids = []
        while text:
            for special, token in (("<s>", self.bos_id), ("</s>", self.eos_id)):
                if token is not None and text.startswith(special):
                    ids.append(token)
                    text = text[len(special) :]
                    break
            else:
                ids += [byte for byte in text[0].encode() if byte not in self.missing_bytes]
                text = text[1:]
        return ids


def ids_of(texts: list[str], tokenizer: Bytes | None = None, bos=False, eos=False) -> list[list]:
    encoded = encode_documents(texts, tokenizer or Bytes(), bos=bos, eos=eos)
    return [ids.tolist() for ids in encoded.ids]


@pytest.mark.parametrize(
    ("bos", "eos", "text", "expected"),
    [
        # C24.
        (True, False, "x", [BOS, 120]),
        (True, False, "<s>x", [BOS, 120]),
        (True, False, "<s><s>x", [BOS, 120]),
        (False, False, "x", [120]),
        (False, False, "<s>x", [BOS, 120]),
        (True, False, "x<s>", [BOS, 120, BOS]),
        (False, True, "x", [120, EOS]),
        (False, True, "x</s>", [120, EOS]),
        (False, True, "x</s></s>", [120, EOS]),
        (False, True, "</s>x", [EOS, 120, EOS]),
        (False, False, "x</s>", [120, EOS]),
        (True, True, "x", [BOS, 120, EOS]),
        (True, True, "<s>x</s>", [BOS, 120, EOS]),
        (True, True, "<s>", [BOS, EOS]),
        (True, True, "", []),
        (True, False, "", []),
    ],
)
def test_specials(bos, eos, text, expected):
    assert ids_of([text], bos=bos, eos=eos) == [expected]


def test_one_token_that_both_starts_and_ends():
    tokenizer = Bytes(eos_id=BOS)
    assert ids_of(["x", "<s>x<s>", "<s>"], tokenizer, bos=True, eos=True) == [
        [BOS, 120, BOS],
        [BOS, 120, BOS],
        [BOS, BOS],
    ]


def test_surplus_specials_are_counted():
    encoded = encode_documents(["<s><s><s>x</s></s>", "<s>x", "y"], Bytes(), bos=True, eos=True)
    assert encoded.doubled_specials == 2 + 1


@given(st.lists(st.text(max_size=8)), st.booleans(), st.booleans())
def test_specials_frame_what_the_tokenizer_gives(texts, bos, eos):
    plain = ids_of(texts)
    expected = [[BOS] * bos + ids + [EOS] * eos if ids else [] for ids in plain]
    assert ids_of(texts, bos=bos, eos=eos) == expected


def test_the_end_token_stands_at_the_end_of_the_document_only():
    # C16: no invented end where a long document is cut.
    encoded = encode_documents(["abcdefghi"], Bytes(), bos=True, eos=True)
    rows = lay_rows(encoded.ids, 0, LayoutSettings("pack", 4))
    assert np.flatnonzero(rows.tokens.reshape(-1) == EOS).tolist() == [13]
    assert np.count_nonzero(rows.tokens == BOS) == 1


def test_dropped_bytes_are_counted():
    tokenizer = Bytes(missing_bytes=frozenset({0x00, 0xE9, 0x0D}))
    texts = ["a\r\nb\r\n", "plain", "\x00", "中"]
    encoded = encode_documents(texts, tokenizer, bos=True, eos=False)
    # Two carriage returns, one NUL; 中 is E4 B8 AD.
    assert encoded.dropped_bytes == 3
    assert encoded.documents_with_dropped_bytes == 2
    assert encoded.ids[2].tolist() == []
    again = encode_documents(["\u9999"], tokenizer, bos=False, eos=False)  # E9 A6 99
    assert (again.dropped_bytes, again.documents_with_dropped_bytes) == (1, 1)


def test_no_documents():
    encoded = encode_documents([], Bytes(), bos=True, eos=True)
    assert encoded.ids == ()
    assert encoded.dropped_bytes == 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"Document 12 must be a text, but column 'body' holds nothing \(null\)\. Filter"),
        (3, "Document 12 must be a text, but column 'body' holds a value of type int"),
        (b"x", "value of type bytes"),
        (["x"], "value of type list"),
        ({"a": "x"}, "value of type dict"),
        ("ok\ud800", r"Document 12 is no valid text: character 2 .* lone surrogate '\\ud800'"),
    ],
)
def test_values_that_are_no_text(value, message):
    with pytest.raises(CorpusError, match=message):
        encode_documents(
            ["", "x", value], Bytes(), bos=False, eos=False, first_document=10, column="body"
        )


def test_ids_beyond_the_vocabulary():
    limit = {"bos": True, "eos": False, "first_document": 7}
    assert encode_documents(["a", "b"], Bytes(), vocabulary=301, **limit).ids[1].tolist() == [
        300,
        98,
    ]
    with pytest.raises(TeacherError, match=r"Document 8 holds token 301 at position 2, but .* 300"):
        encode_documents(["a", "b</s>"], Bytes(), vocabulary=301, **limit)


def test_utf8():
    assert utf8("é\r\n", 0, "text") == b"\xc3\xa9\r\n"


@pytest.mark.parametrize("own", [True, False])
def test_the_choice_of_specials(own):
    tokenizer = Bytes(adds_bos=own, adds_eos=not own)
    assert resolve_bos("auto", tokenizer) is own
    assert resolve_eos("auto", tokenizer) is not own
    assert resolve_bos("on", tokenizer)
    assert not resolve_bos("off", tokenizer)
    assert resolve_eos("on", tokenizer)
    assert not resolve_eos("off", tokenizer)


OTHER = (
    "To have '<x>' there, give a copy of the tokenizer (--tokenizer) whose tokenizer_config.json"
)


@pytest.mark.parametrize(
    ("doubt", "said"),
    [
        (
            Doubt("<s>", ("<s>",), (), "LlamaTokenizer"),
            [
                "with '<s>': transformers 4 puts '<s>' there, and transformers 5 puts nothing",
                "--bos on: as transformers 4 and the model's training",
                "--bos off: as transformers 5",
            ],
        ),
        (
            Doubt("<s>", (), ("<s>",), "LlamaTokenizer"),
            [
                "with '<s>': transformers 4 puts nothing there, and transformers 5 puts '<s>'",
                "--bos on: as transformers 5",
                "--bos off: as transformers 4 and the model's training",
            ],
        ),
        (
            Doubt("<s>", ("<x>",), ("<x>",), None),
            [
                "with '<s>': transformers 4 puts '<x>' there, and transformers 5 puts '<x>'",
                "--bos on: as no release of transformers",
                "--bos off: as no release of transformers",
                f"{OTHER} names it as bos_token.",
            ],
        ),
        (
            Doubt(None, None, ("<x>",), None),
            [
                "with a token of their own: transformers 4 refuses the settings",
                "--bos off: as no release of transformers",
                f"{OTHER} names it as bos_token.",
            ],
        ),
    ],
)
def test_what_is_in_doubt(doubt, said):
    """`auto` is refused with what the releases do; `on` and `off` decide."""
    tokenizer = Bytes(adds_bos=doubt, adds_eos=doubt)
    assert resolve_bos("on", tokenizer)
    assert not resolve_bos("off", tokenizer)
    with pytest.raises(PipelineError) as error:
        resolve_bos("auto", tokenizer)
    first, *choices = str(error.value).splitlines()
    assert f"whether documents start {said[0]}" in first
    assert [line.strip() for line in choices] == said[1:]
    with pytest.raises(PipelineError) as error:
        resolve_eos("auto", tokenizer)
    expected = [line.replace("bos", "eos") for line in said]
    first, *choices = str(error.value).splitlines()
    assert f"whether documents end {expected[0]}" in first
    assert [line.strip() for line in choices] == expected[1:]


def test_a_special_that_the_tokenizer_lacks():
    tokenizer = Bytes(bos_id=None, eos_id=None, adds_bos=True)
    with pytest.raises(PipelineError, match=r"no BOS token. Set bos to 'off'"):
        resolve_bos("on", tokenizer)
    with pytest.raises(PipelineError, match="no BOS token"):
        resolve_bos("auto", tokenizer)
    with pytest.raises(PipelineError, match=r"no EOS token. Set eos to 'off'"):
        resolve_eos("on", tokenizer)
    assert not resolve_eos("auto", tokenizer)
    with pytest.raises(PipelineError, match="no EOS token"):
        encode_documents(["x"], tokenizer, bos=False, eos=True)


def test_importing_it_reads_neither_jax_nor_datasets():
    program = "import sys, pipelines.encode; print({'jax', 'datasets'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n"
