"""A corpus in files: finding them, telling their versions, converting them once.

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
from pathlib import Path, PurePosixPath
from typing import Any, cast

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from pipelines.corpus_formats import ACCEPTED, Format, TextUnit, format_of, read_documents
from pipelines.errors import CorpusError

_BATCH_DOCUMENTS = 1000  # documents per Arrow record batch, at most
_BATCH_CHARACTERS = 1 << 22  # characters per Arrow record batch, about
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
    """The files of a corpus, all of one format, in order of their names."""

    filesystem: fsspec.AbstractFileSystem
    files: tuple[SourceFile, ...]
    format: Format


def find_sources(filesystem: fsspec.AbstractFileSystem, path: str, dataset: str) -> Sources | None:
    """The files of a file, a folder or a pattern; None if there is nothing of that name.

    Hidden files, and files of other formats in a folder, are left out. To read a
    hidden file, name it.

    Args:
      dataset: what the user wrote, for messages.
    """
    if filesystem.isdir(path):
        root = path
        names = {relative_name(file, root): file for file in filesystem.find(path)}
        names = {
            name: file for name, file in names.items() if format_of(name) and not _is_hidden(name)
        }
        if not names:
            raise CorpusError(
                f"The folder {dataset!r} holds no file that can be read ({ACCEPTED}), "
                "and was not saved with save_to_disk."
            )
    elif filesystem.isfile(path):
        names = {PurePosixPath(path).name: path}
    elif any(character in path for character in "*?["):
        root = path[: min(path.index(c) for c in "*?[" if c in path)].rpartition("/")[0]
        matches = [str(match) for match in filesystem.glob(path)]
        names = {relative_name(file, root): file for file in matches if filesystem.isfile(file)}
        names = {name: file for name, file in names.items() if not _is_hidden(name)}
        if not names:
            raise CorpusError(f"No file matches {dataset!r}. Check the folder and the pattern.")
    else:
        return None
    format = _common_format(sorted(names), dataset)
    return Sources(filesystem, describe_files(filesystem, names), format)


def describe_files(
    filesystem: fsspec.AbstractFileSystem, names: dict[str, str]
) -> tuple[SourceFile, ...]:
    """Looks up the versions of files given as {name: path}, in order of their names."""
    local = isinstance(filesystem, LocalFileSystem)
    describe = _describe_local if local else _describe_remote
    return tuple(describe(filesystem, name, names[name]) for name in sorted(names))


def relative_name(path: str, root: str) -> str:
    return path.removeprefix(root).lstrip("/")


def converted(
    sources: Sources, column: str, text_unit: TextUnit, limit: int | None, folder: Path
) -> Path:
    """The Arrow file with the sources' documents; made now if it is not there.

    Any number of processes may do this at once: each writes a file of its own
    and gives it its name when it is whole.
    """
    key = json.dumps([
        [[*file.place, file.identity] for file in sources.files],
        [sources.format, column, text_unit, limit],
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


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(name).parts)


def _common_format(names: list[str], dataset: str) -> Format:
    formats: dict[Format, str] = {}
    for name in names:
        format = format_of(name)
        if format is None:
            raise CorpusError(
                f"Cannot read {name!r} of {dataset!r}: the name of a file must end with one of "
                f"{ACCEPTED}."
            )
        formats.setdefault(format, name)
    if len(formats) > 1:
        examples = " and ".join(repr(name) for name in formats.values())
        raise CorpusError(
            f"{dataset!r} holds files of several kinds, such as {examples}. "
            "Name those you mean with a pattern, for example 'folder/*.jsonl'."
        )
    return next(iter(formats))
