"""What the installed transformers makes of the tables' settings, and of what we write of them."""

import functools
from pathlib import Path
from typing import Any

import pytest

from decoder.tokenizer import load_tokenizer
from tests.decoder.test_tokenizer_settings import LINES
from tests.decoder.tokenizer_settings import PROBE, ROWS, Cell, Row, Seen, put_there, sign

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]


@functools.cache
def column() -> str:
    """That of the installed release; .ci/run has 5, which is the one that the project names."""
    import transformers

    return {"4": "four", "5": "five"}[transformers.__version__.partition(".")[0]]


def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def their_sign(cell: Cell, folder: Path) -> str:
    try:
        tokenizer = theirs(folder)
    except ValueError:
        return "!"
    ids, text = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    return sign(cell.named, tokenizer.convert_ids_to_tokens(put_there(cell.name, ids, text)))


@pytest.mark.parametrize("line", LINES)
def test_whether_a_token_is_added(line: list[Cell], tmp_path: Path) -> None:
    """The files that we write of a tokenizer are read as the published ones are."""
    for cell in line:
        expected = getattr(cell, column())
        folder = cell.write(tmp_path / "q")
        assert their_sign(cell, folder) == expected, cell
        if cell.ours in ("+", "-", "!"):
            continue
        for name, data in load_tokenizer(str(folder)).files().items():
            (folder / name).write_bytes(data)
        assert their_sign(cell, folder) == expected, cell


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_files_that_disagree(row: Row, tmp_path: Path) -> None:
    tokenizer = theirs(row.write(tmp_path / "q"))
    template = tokenizer.chat_template
    assert Seen(
        " ".join(tokenizer.convert_ids_to_tokens(tokenizer(PROBE)["input_ids"])),
        tokenizer.bos_token,
        tokenizer.eos_token,
        template["default"] if isinstance(template, dict) else template,
    ) == ((column() == "four" and row.four) or row.five)
