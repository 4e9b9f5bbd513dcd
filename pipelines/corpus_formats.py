"""Reading the documents of one file: JSON, Parquet or text, compressed or not.

These are readers of our own, because a corpus must be taken as it is. The
loaders of `datasets` are made for tables, and change texts: they read text
files with universal newlines (CRLF becomes LF), and turn a JSON column whose
strings all look like dates into timestamps.
"""

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import PurePosixPath
from typing import Any, Literal, Protocol, cast, runtime_checkable

import pyarrow as pa
import pyarrow.parquet as pq

from decoder.stand_ins import HEAD, stand_in
from pipelines.encode import utf8
from pipelines.errors import CorpusError

Format = Literal["json", "parquet", "text"]
TextUnit = Literal["file", "line"]

SUFFIXES: dict[str, Format] = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
}


def _open_zstd(file: Any) -> Any:
    # Reads all frames of a file, and raises where one is cut off.
    return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")


COMPRESSIONS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}
ACCEPTED = f"{', '.join(SUFFIXES)}; all but Parquet also with {', '.join(COMPRESSIONS)}"

_PARQUET_BATCH = 1000  # rows read at once
_BOM = b"\xef\xbb\xbf"  # of UTF-8
_NUL_TEST = 64  # bytes at a file's start in which UTF-16 of plain text shows


@runtime_checkable
class BinaryFile(Protocol):
    """What is needed of an open file."""

    def read(self, size: int = -1, /) -> bytes: ...

    def __iter__(self) -> Iterator[bytes]: ...


def format_of(name: str) -> Format | None:
    """The format of a file by its name, or None if it is none of ours."""
    path = PurePosixPath(name.lower())
    if path.suffix not in COMPRESSIONS:
        return SUFFIXES.get(path.suffix)
    inner = SUFFIXES.get(path.with_suffix("").suffix)
    return None if inner == "parquet" else inner


def read_documents(
    file: BinaryFile, path: str, column: str, text_unit: TextUnit, first_document: int
) -> Iterator[str]:
    """The documents of a file, in order.

    Args:
      file: an open file, which the caller closes.
      path: its name, which tells the format, and where errors say it is.
      column: the column of JSON and Parquet; text files have the one column `text`.
      text_unit: what is a document in a text file.
      first_document: index in the corpus of the file's first document.

    Raises:
      CorpusError: the file cannot be read or parsed, there is no such column, or a
        value is no text; names the file, the line where there is one, and the
        document.
    """
    try:
        with ExitStack() as stack:
            format = format_of(path)
            decompress = COMPRESSIONS.get(PurePosixPath(path.lower()).suffix)
            raw = stream = io.BufferedReader(cast(Any, file))
            # The caller closes the file; pyarrow may have closed it already.
            stack.callback(lambda: raw.closed or raw.detach())
            if decompress:
                _refuse_stand_in_of(raw, path)
                stream = io.BufferedReader(stack.enter_context(decompress(raw)))
            _refuse_stand_in_of(stream, path, format)
            values = _values(stream, format, column, text_unit)
            for document, (where, value) in enumerate(values, first_document):
                try:
                    utf8(value, document, column)
                except CorpusError as error:
                    raise CorpusError(f"{path}{where}: {error}") from error
                yield value
    except _Malformed as error:
        raise CorpusError(f"{path}{error}") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
        raise CorpusError(f"Cannot read {path}: {error}") from error


def refuse_stand_in(head: bytes, path: str, format: Format | None = None) -> None:
    """Raises CorpusError for a file that is not what its name says.

    Args:
      head: the first `HEAD` bytes, or all if there are fewer.
    """
    found = stand_in(head)
    if found:
        way_out = ""
        if format == "text":
            way_out = '. If it is meant as a document, put it into a .jsonl file: {"text": "…"}'
        raise CorpusError(f"{path} {found}{way_out}.")
    if format in ("json", "text") and _is_wide(head):
        raise CorpusError(f"{path} is UTF-16 or UTF-32 text, but must be UTF-8. Convert it.")


def _refuse_stand_in_of(stream: io.BufferedReader, path: str, format: Format | None = None) -> None:
    refuse_stand_in(stream.peek(HEAD)[:HEAD], path, format)


def _is_wide(head: bytes) -> bool:
    if head.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")):
        return True
    start = head[:_NUL_TEST]
    halves = (start[::2], start[1::2])
    return len(start) >= 8 and any(
        not any(zeros) and all(others) for zeros, others in (halves, halves[::-1])
    )


def wrong_column(column: str, held: Mapping[str, Any]) -> str:
    """Says that a column is missing, and which ones there are, with their types."""
    names = ", ".join(f"{name!r} ({kind})" for name, kind in held.items()) or "none"
    return f"There is no column {column!r}. The columns are: {names}. Name one that holds texts."


class _Malformed(ValueError):
    """What is wrong with a file; the message goes on from the file's path."""


def _values(
    stream: BinaryFile, format: Format | None, column: str, text_unit: TextUnit
) -> Iterator[tuple[str, Any]]:
    """(where in the file, value) of each document."""
    if format == "json":
        return _read_json(stream, column)
    if format == "parquet":
        return _read_parquet(stream, column)
    if column != "text":
        raise _Malformed(f": {wrong_column(column, {'text': 'string'})}")
    return _read_lines(stream) if text_unit == "line" else _read_whole(stream)


def _read_whole(stream: BinaryFile) -> Iterator[tuple[str, Any]]:
    yield "", _decoded(stream.read().removeprefix(_BOM), "")


def _read_lines(stream: BinaryFile) -> Iterator[tuple[str, Any]]:
    """Lines end with LF or CRLF, which is not part of the document; nothing else ends one."""
    for number, line in enumerate(stream, 1):
        where = f", line {number}"
        if number == 1:
            line = line.removeprefix(_BOM)
            if not line:
                return
        if line.endswith(b"\n"):
            line = line[:-1].removesuffix(b"\r")
        yield where, _decoded(line, where)


def _read_json(stream: BinaryFile, column: str) -> Iterator[tuple[str, Any]]:
    for number, (where, record) in enumerate(_json_records(stream)):
        if not isinstance(record, dict):
            raise _Malformed(f"{where}: expected an object, but found {_json_type(record)}.")
        if number == 0 and column not in record:
            held = {name: _json_type(value) for name, value in record.items()}
            raise _Malformed(f"{where}: {wrong_column(column, held)}")
        yield where, record.get(column)


def _json_records(stream: BinaryFile) -> Iterator[tuple[str, Any]]:
    """The records of a file of JSON lines (LF ends a line), or of one array."""
    for number, line in enumerate(stream, 1):
        while line.startswith(_BOM):  # of the file, or of one that was joined to others
            line = line.removeprefix(_BOM)
        if not line.strip():
            continue
        if line.lstrip().startswith(b"["):
            records = _parsed(line + stream.read(), number)
            yield from ((f", element {index}", record) for index, record in enumerate(records))
            return
        yield f", line {number}", _parsed(line.rstrip(), number)


def _parsed(data: bytes, line: int) -> Any:
    text = _decoded(data, f", line {line}")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _Malformed(
            f", line {line + error.lineno - 1}: malformed JSON ({error.msg}, character "
            f"{error.colno}). Expected one object per line, or one array of objects."
        ) from error
    except RecursionError as error:
        raise _Malformed(f", line {line}: this JSON is nested too deep.") from error


def _read_parquet(stream: BinaryFile, column: str) -> Iterator[tuple[str, Any]]:
    with pq.ParquetFile(cast(Any, stream)) as file:
        held = {field.name: field.type for field in file.schema_arrow}
        if column not in held:
            raise _Malformed(f": {wrong_column(column, held)}")
        row = 0
        for batch in file.iter_batches(batch_size=_PARQUET_BATCH, columns=[column]):
            for value in batch.column(column).to_pylist():
                yield f", row {row}", value
                row += 1


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Malformed(
            f"{where}: no valid UTF-8 at byte {error.start} ({error.reason}). "
            "Convert the file to UTF-8."
        ) from error


def _json_type(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "number", float: "number", list: "array"}
    return "null" if value is None else names.get(type(value), "object")
