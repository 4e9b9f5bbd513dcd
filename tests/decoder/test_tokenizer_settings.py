"""Settings as families publish them: what we make of each row of the tables.

That transformers does what the tables say is compared in the parity tests.
"""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from decoder.errors import DecoderError
from decoder.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_files
from decoder.tokenizer_ends import Doubt
from tests.decoder.tokenizer_settings import PROBE, ROWS, Cell, Row, cells

LINES = [
    pytest.param(list(line), id="-".join(key))
    for key, line in itertools.groupby(cells(), lambda cell: (cell.name, cell.cls, cell.flag))
]


def read(folder: Path) -> Tokenizer:
    """The tokenizer; that of the files which we write of it is the same one."""
    tokenizer = load_tokenizer(str(folder))
    again = tokenizer_from_files(tokenizer.files())
    assert again == tokenizer
    assert again.fingerprint == tokenizer.fingerprint
    return tokenizer


def our_sign(cell: Cell, folder: Path) -> str:
    if cell.ours == "!":
        with pytest.raises(DecoderError, match=f"token '{cell.named}' is not in the vocabulary"):
            load_tokenizer(str(cell.write(folder)))
        return "!"
    tokenizer = read(cell.write(folder))
    adds = tokenizer.adds_bos if cell.name == "bos" else tokenizer.adds_eos
    if not isinstance(adds, Doubt):
        return "+" if adds else "-"
    assert adds.token == cell.named
    for decided in (True, False) if cell.named else (False,):
        settled = replace(tokenizer, adds_bos=False, adds_eos=False)
        settled = replace(settled, **{f"adds_{cell.name}": decided})
        assert tokenizer_from_files(settled.files()) == settled
    return "?"


@pytest.mark.parametrize("line", LINES)
def test_whether_a_token_is_added(line: list[Cell], tmp_path: Path) -> None:
    signs = {(one.token, one.post_processor): our_sign(one, tmp_path) for one in line}
    assert signs == {(one.token, one.post_processor): one.ours for one in line}


def test_what_is_not_in_doubt_is_what_both_releases_do() -> None:
    for cell in cells():
        if cell.ours in ("+", "-"):
            assert cell.four in (cell.ours, "!"), cell
            assert cell.five == cell.ours, cell
        elif cell.ours == "?":
            assert "x" in (cell.four, cell.five) or cell.four != cell.five, cell


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_files_that_disagree(row: Row, tmp_path: Path) -> None:
    folder = row.write(tmp_path)
    if row.why and row.ours is None:
        with pytest.raises(DecoderError, match=r"has the id \d+ in added_tokens_decoder"):
            load_tokenizer(str(folder))
        return
    seen, tokenizer = row.ours or row.five, read(folder)
    in_doubt = isinstance(tokenizer.adds_bos, Doubt)
    put = [] if in_doubt or not tokenizer.adds_bos else [tokenizer.bos_id]
    names = map(tokenizer.backend.id_to_token, [*put, *tokenizer.encode(PROBE).tolist()])
    assert (" ".join(names), in_doubt) == (seen.tokens, seen.in_doubt)
    assert (tokenizer.bos, tokenizer.eos) == (seen.bos, seen.eos)
    assert tokenizer.chat_template == seen.template


def test_a_doubt_has_no_truth_value(tmp_path: Path) -> None:
    cell = Cell("bos", "text", "LlamaTokenizerFast", "true", "bytes")
    doubt = load_tokenizer(str(cell.write(tmp_path))).adds_bos
    assert doubt == Doubt(cell.named, (cell.named,), (), "LlamaTokenizerFast")
    with pytest.raises(TypeError, match="is neither true nor false"):
        bool(doubt)
