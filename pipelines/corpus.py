"""The corpus: documents in a fixed order, their identity, and their digests.

A corpus is a dataset of the Hugging Face hub at a resolved commit, a folder
that `datasets` saved, or local or remote files. Opened with equal settings it
is the same in every process; which documents make a part depends on the part
size alone.
"""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec

from pipelines.corpus_datasets import Loaded, is_saved, load_hub, load_saved, quiet
from pipelines.corpus_files import converted
from pipelines.corpus_find import find_sources
from pipelines.corpus_formats import ACCEPTED, TextUnit, format_of, wrong_column
from pipelines.encode import utf8
from pipelines.errors import CorpusError

if TYPE_CHECKING:
    from datasets import Dataset

# `datasets` takes seconds to import, so it is imported where it is needed.

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_TEXT_TYPES = ("string", "large_string", "string_view")
_TEXT_UNIT: TextUnit = "file"  # files of prose or code are documents more often than lines
_DIGEST_SIZE = 32  # bytes of a sha256


@dataclass(frozen=True)
class CorpusSettings:
    """Which documents to capture.

    Attributes:
      dataset: hub name; folder saved with `save_to_disk`; or file, folder of files
        or pattern, local or as a URL that fsspec reads.
      name: configuration of a hub dataset, or of a folder whose README.md names it.
      split: split of a hub dataset, a saved one or a folder; single files have only `train`.
      revision: branch, tag or commit of a hub dataset.
      column: the column that holds the texts.
      limit: take the first documents only; all if None.
      text_unit: what is a document in text files: a whole file (if None), or a line.
    """

    dataset: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    column: str = "text"
    limit: int | None = None  # documents
    text_unit: TextUnit | None = None

    def __post_init__(self) -> None:
        if not self.dataset:
            raise CorpusError(f"No dataset is named. {_accepted_forms()}")
        if self.limit is not None and self.limit < 1:
            raise CorpusError(f"The limit must be at least 1 document, but it is {self.limit}.")
        if self.text_unit not in (None, "file", "line"):
            raise CorpusError(f"text_unit must be 'file' or 'line', but it is {self.text_unit!r}.")


@dataclass(frozen=True, eq=False)
class Corpus:
    """An open corpus.

    Attributes:
      settings: what it was opened with. These travel to other processes, not the corpus.
      identity: JSON-able; what tells it from another corpus at the cost of a look
        at file sizes and times, or of one request. It names no absolute path.
      description: for people.
    """

    settings: CorpusSettings
    identity: dict[str, Any]
    description: str
    _dataset: "Dataset"

    def __len__(self) -> int:
        """Number of documents."""
        held = len(self._dataset)
        return held if self.settings.limit is None else min(held, self.settings.limit)

    def texts(self, start: int, stop: int) -> list[Any]:
        """The column's values of documents start, ..., stop - 1, as they are.

        Texts, unless a hub or saved dataset holds null: `encode_documents` and
        `digest_documents` refuse such a document by its number.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(
                f"Documents {start} to {stop} were asked for, but there are {len(self)}."
            )
        return self._dataset[start:stop][self.settings.column] if start < stop else []


def open_corpus(settings: CorpusSettings) -> Corpus:
    """Opens a corpus; converts files the first time.

    Raises:
      CorpusError: not found, not reachable, empty, no such split or column, or a
        file that cannot be read; says what to do.
    """
    filesystem, path = _locate(settings.dataset)
    try:
        if filesystem.isdir(path) and is_saved(filesystem, path):
            _refuse_unused(settings, "was saved with save_to_disk", "name", "revision", "text_unit")
            loaded = load_saved(filesystem, path, settings.split, settings.dataset)
        else:
            loaded = _load_files(settings, filesystem, path)
    except OSError as error:
        raise CorpusError(f"Cannot read {settings.dataset!r}: {error}") from error
    if loaded is None:
        if format_of(settings.dataset) or not _HUB_NAME.fullmatch(settings.dataset):
            raise CorpusError(f"There is no {settings.dataset!r}. {_accepted_forms()}")
        _refuse_unused(settings, "is none: it would come from the hub", "text_unit")
        loaded = load_hub(settings.dataset, settings.name, settings.split, settings.revision)
    return _checked(settings, loaded)


def part_ranges(documents: int, documents_per_part: int) -> list[range]:
    """Contiguous parts of the corpus, all of one size but the last."""
    if documents_per_part < 1:
        raise ValueError(f"A part must hold at least 1 document, but found {documents_per_part}.")
    starts = range(0, documents, documents_per_part)
    return [range(start, min(start + documents_per_part, documents)) for start in starts]


def document_digest(text: Any, document: int = 0, column: str = "text") -> bytes:
    """sha256 of a document: its kind, its size in bytes, and its UTF-8.

    Args:
      document, column: for the CorpusError if the text is none.
    """
    data = utf8(text, document, column)
    return sha256(b"stillroom text\0" + struct.pack("<Q", len(data)) + data).digest()


def digest_documents(texts: Sequence[Any], first_document: int = 0, column: str = "text") -> str:
    """sha256 (hex) over the digests of documents in order.

    It changes when a document changes, moves, is split, joined, added or removed.
    """
    digests = (document_digest(text, i, column) for i, text in enumerate(texts, first_document))
    return sha256(b"stillroom documents\0" + b"".join(digests)).hexdigest()


def combine_digests(digests: Sequence[str]) -> str:
    """sha256 (hex) over the digests of a corpus's parts, in order."""
    parts = [bytes.fromhex(digest) for digest in digests]
    if any(len(part) != _DIGEST_SIZE for part in parts):
        raise ValueError(f"Every digest must be a sha256 of 64 hex digits, but found {digests}.")
    return sha256(b"stillroom parts\0" + b"".join(parts)).hexdigest()


def _accepted_forms() -> str:
    return (
        "A dataset is the name of a hub dataset, a folder saved with save_to_disk, or a file, "
        f"folder or pattern (*) of files, by path or URL. Files end with {ACCEPTED}."
    )


def _locate(dataset: str) -> tuple[fsspec.AbstractFileSystem, str]:
    try:
        return fsspec.core.url_to_fs(dataset)
    except ImportError as error:
        raise CorpusError(
            f"Cannot read {dataset!r}: {error}. Install what it asks for, or copy the files here."
        ) from error
    except (ValueError, OSError) as error:
        raise CorpusError(f"Cannot read {dataset!r}: {error}. {_accepted_forms()}") from error


_USES = {
    "name": "is for datasets of the hub and folders whose README.md names it",
    "revision": "is for datasets of the hub",
    "text_unit": "is for text files (.txt)",
}


def _refuse_unused(settings: CorpusSettings, what: str, *names: str) -> None:
    """Raises for options that nothing uses for a dataset; `what` says what that is instead."""
    for name in names:
        value = getattr(settings, name)
        if value is not None:
            option = name.replace("_", "-")
            raise CorpusError(
                f"--{option} {value} {_USES[name]}, but {settings.dataset!r} {what}. Leave it out."
            )


def _load_files(
    settings: CorpusSettings, filesystem: fsspec.AbstractFileSystem, path: str
) -> Loaded | None:
    sources = find_sources(filesystem, path, settings.dataset, settings.split, settings.name)
    if sources is None:
        return None
    _refuse_unused(settings, "is not on it", "revision")
    unit = settings.text_unit or _TEXT_UNIT
    if sources.format != "text":
        _refuse_unused(settings, f"holds {sources.format}", "text_unit")
    from datasets import Dataset, config

    folder = Path(config.HF_DATASETS_CACHE) / "stillroom"
    arrow = converted(sources, settings.column, unit, settings.limit, folder)
    with quiet():
        dataset = Dataset.from_file(str(arrow))
    files = [file.identity for file in sources.files]
    identity = {"source": "files", "format": sources.format, "files": files}
    if sources.format == "text":
        identity["text_unit"] = unit
    count = f"{len(files)} {sources.format} file{'s' if len(files) > 1 else ''}"
    return Loaded(dataset, identity, f"{settings.dataset} ({count}{sources.note})")


def _checked(settings: CorpusSettings, loaded: Loaded) -> Corpus:
    column, features = settings.column, loaded.dataset.features
    kinds = {name: getattr(kind, "dtype", kind) for name, kind in features.items()}
    if column not in kinds:
        raise CorpusError(f"{settings.dataset}: {wrong_column(column, kinds)}")
    if kinds[column] not in _TEXT_TYPES:
        raise CorpusError(
            f"Column {column!r} of {settings.dataset!r} must hold texts, but holds "
            f"{features[column]}. Name another column, or convert this one to strings."
        )
    if len(loaded.dataset) == 0:
        raise CorpusError(f"{settings.dataset!r} is empty: it holds no document at all.")
    identity = {**loaded.identity, "column": column, "limit": settings.limit}
    # A saved dataset may remember to give numpy or torch values; texts are wanted.
    dataset = loaded.dataset.with_format(None).select_columns(column)
    return Corpus(settings, identity, loaded.description, dataset)
