"""A corpus in files: telling their versions, converting them once.

The documents go into one Arrow file, which `datasets` then maps into memory.
Its name is a digest of the sources' paths, sizes, times and inodes, so that a
changed source can never be answered from an old conversion.
"""

import itertools
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from pipelines.corpus_formats import Format, TextUnit, read_documents
from pipelines.errors import CorpusError

_BATCH_DOCUMENTS = 1000  # documents per Arrow record batch, at most
_BATCH_CHARACTERS = 1 << 22  # characters per Arrow record batch, about
_READING = 2  # raised when the same bytes begin to be read as other documents
_CLOCK_TICK = 0.05  # seconds; file times advance in steps, of less than this

# What remote file systems call the version of a file; each has some of these.
_VERSION_KEYS = (
    "ETag", "etag", "generation", "VersionId", "blob_id", "md5Hash", "content_md5", "Content-MD5",
    "Digest", "LastModified", "last_modified", "Last-Modified", "updated", "mtime", "created",
)  # fmt: skip


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus.

    Attributes:
      path: where its file system finds it.
      identity: its name relative to what the user named (so that a folder can
        move), its size in bytes (None where a server does not say), and what
        changes with its content: `mtime_ns`, or an etag or the like.
      place: what else tells it from another file on this machine.
    """

    path: str
    identity: dict[str, Any]
    place: tuple[Any, ...]


@dataclass(frozen=True)
class Sources:
    """The files of a corpus in its order, all of one format.

    Attributes:
      note: what the description should say of them besides; begins with a comma.
    """

    filesystem: fsspec.AbstractFileSystem
    files: tuple[SourceFile, ...]
    format: Format
    note: str = ""


def describe_files(
    filesystem: fsspec.AbstractFileSystem, names: dict[str, str]
) -> tuple[SourceFile, ...]:
    """Looks up the versions of files given as {name: path}, in this order."""
    local = isinstance(filesystem, LocalFileSystem)
    describe = _describe_local if local else _describe_remote
    return tuple(describe(filesystem, name, path) for name, path in names.items())


def converted(
    sources: Sources, column: str, text_unit: TextUnit, limit: int | None, folder: Path
) -> Path:
    """The Arrow file with the sources' documents; made now if it is not there.

    Any number of processes may do this at once: each writes a file of its own
    and gives it its name when it is whole.
    """
    key = json.dumps([
        [[*file.place, file.identity] for file in sources.files],
        [_READING, sources.format, column, text_unit, limit],
    ])  # fmt: skip
    target = folder / f"{sha256(key.encode()).hexdigest()}.arrow"
    if target.exists():
        return target
    partial = folder / f"{target.stem}.{uuid.uuid4().hex}.partial"
    documents = itertools.islice(_read_all(sources, column, text_unit), limit)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _write_arrow(documents, column, partial)
            _check_unchanged(sources)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise CorpusError(
            f"Cannot keep the converted corpus in {folder}: {error}. Make room or "
            "permission there, or set HF_DATASETS_CACHE to another folder."
        ) from error
    return target


def _describe_local(_: fsspec.AbstractFileSystem, name: str, path: str) -> SourceFile:
    status = os.stat(path)
    if abs(time.time() - status.st_ctime) < _CLOCK_TICK:
        # One more change within this step of the clock would leave the times as they are.
        time.sleep(_CLOCK_TICK)
        status = os.stat(path)
    identity = {"name": name, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    return SourceFile(path, identity, (path, status.st_ino, status.st_ctime_ns))


def _describe_remote(filesystem: fsspec.AbstractFileSystem, name: str, path: str) -> SourceFile:
    info = filesystem.info(path)
    version = {key: str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None}
    identity = {"name": name, "size": info.get("size"), **version}
    # Without a version nothing tells whether a conversion is still good: make another.
    place = (filesystem.unstrip_protocol(path), None if version else uuid.uuid4().hex)
    return SourceFile(path, identity, place)


def _check_unchanged(sources: Sources) -> None:
    names = {file.identity["name"]: file.path for file in sources.files}
    after = describe_files(sources.filesystem, names)
    for file, now in zip(sources.files, after, strict=True):
        if file.identity != now.identity:
            raise CorpusError(f"{file.path} changed while it was read. Run again when it rests.")


def _read_all(sources: Sources, column: str, text_unit: TextUnit) -> Iterator[str]:
    count = 0
    for file in sources.files:
        try:
            stream = cast(Any, sources.filesystem.open(file.path, "rb"))
        except OSError as error:
            raise CorpusError(f"Cannot read {file.path}: {error}") from error
        with stream:
            for document in read_documents(stream, file.path, column, text_unit, count):
                yield document
                count += 1


def _write_arrow(documents: Iterable[str], column: str, path: Path) -> None:
    """Writes an Arrow stream of one column of texts."""
    schema = pa.schema([(column, pa.large_string())])
    with path.open("wb") as file:
        with pa.ipc.new_stream(file, schema) as writer:
            for batch in _batches(documents):
                array = pa.array(batch, pa.large_string())
                writer.write_batch(pa.record_batch([array], schema=schema))
        file.flush()
        os.fsync(file.fileno())


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
