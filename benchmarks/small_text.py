"""Text with a small vocabulary: the standard library's source, and a tokenizer made for it."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|end|>"
# As examples/stdlib_corpus.py: tests, what others installed, generated tables.
_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "encodings", "lib2to3"}


@dataclass(frozen=True)
class Text:
    """Rows of token ids, int32 [rows, length]; no file is in two of the three parts.

    Attributes:
      vocabulary: how many ids there are.
      teacher: what the teacher is trained on.
      students: what every student is trained on.
      held_out: what teacher and students are measured on.
    """

    vocabulary: int
    teacher: np.ndarray
    students: np.ndarray
    held_out: np.ndarray


def read_text(vocabulary: int, length: int, rows: dict[str, int]) -> Text:
    """Files in an order that looks random and is always the same, end to end, cut into rows.

    The parts take whole files one after the other: held-out first, then students, then teacher.

    Raises:
      SystemExit: the library has less text than is asked for.
    """
    files = _files()
    tokenizer = _tokenizer([text for text in files if len(text) < 100_000][:400], vocabulary)
    end = tokenizer.token_to_id(END)
    rest = iter(files)
    parts = {}
    for part in ("held_out", "students", "teacher"):
        ids: list[int] = []
        while len(ids) < rows[part] * length:
            text = next(rest, None)
            if text is None:
                raise SystemExit(f"the standard library has too little text for {rows} rows")
            # No file is more than about an eighth of a part.
            most = 4 * length * max(rows[part] // 8, 1)
            ids += [*tokenizer.encode(text[:most]).ids, end]
        cut = np.array(ids[: rows[part] * length], np.int32)
        parts[part] = cut.reshape(rows[part], length)
    return Text(vocabulary=tokenizer.get_vocab_size(), **parts)


def _files() -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(folder) for path in folder.rglob("*.py")]
    names = [name for name in names if not _LEFT_OUT.intersection(name.parts)]
    names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    return [(folder / name).read_text(encoding="utf-8") for name in names]


def _tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer of so many tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
