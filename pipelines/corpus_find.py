"""Finding the files of a corpus: those of one split of a folder, of a pattern, or one file."""

import os
import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import cast

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from decoder.stand_ins import HEAD
from pipelines.corpus_files import Sources, describe_files
from pipelines.corpus_formats import (
    ACCEPTED,
    COMPRESSIONS,
    SUFFIXES,
    Format,
    format_of,
    refuse_stand_in,
)
from pipelines.corpus_links import is_hidden, leads_nowhere, list_files, real_path, relative_name
from pipelines.corpus_splits import CARDS, find_splits
from pipelines.errors import CorpusError

# What `datasets` keeps beside data, and what holds none.
_METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
# A name with any of these may be of a file with data, even where it cannot be read here.
_DATA = {
    *(*SUFFIXES, *COMPRESSIONS, ".csv", ".tsv", ".arrow", ".feather", ".orc", ".avro", ".xml"),
    *(".h5", ".hdf5", ".lance", ".vortex", ".conll", ".conllu", ".warc", ".zip", ".tar", ".tgz"),
    *(".7z", ".rar", ".lz4", ".zstd", ".br"),
}  # fmt: skip
_NAMED = 3  # files that a description names at most


def find_sources(
    filesystem: fsspec.AbstractFileSystem,
    path: str,
    dataset: str,
    split: str = "train",
    name: str | None = None,
) -> Sources | None:
    """The files of a file, a folder or a pattern; None if there is nothing of that name.

    Of a folder they are those of one split, as `datasets.load_dataset` divides it. Links are
    followed, and no file is read twice. Hidden files, and files in a folder that hold no data,
    are left out. To read a hidden file, name it.

    Args:
      dataset: what the user wrote, for messages.
      split, name: of a folder; a file and a pattern have only the split "train".

    Raises:
      CorpusError: no such split or configuration, no file at all, or one that cannot be read.
    """
    note = ""
    if filesystem.isdir(path):
        names, note = _in_folder(filesystem, path, dataset, split, name)
    else:
        found = _named(filesystem, path, dataset)
        if found is None:
            return None
        names = found
        if name is not None:
            raise CorpusError(
                f"--name {name} is for datasets of the hub and folders whose README.md names it, "
                f"but {dataset!r} is neither. Leave it out."
            )
        if split != "train":
            raise CorpusError(
                f"Files have the one split 'train', but the split is {split!r}. Name the files of "
                "that split instead."
            )
    format = _common_format(names, dataset)
    for file, place in names.items():
        if leads_nowhere(filesystem, place):
            raise CorpusError(
                f"{file!r} of {dataset!r} is a link that leads nowhere, or no ordinary file. "
                "Put the file there, or remove the name."
            )
    once = {real_path(filesystem, file): name for name, file in reversed(names.items())}
    if len(once) < len(names):
        note += f", {len(names) - len(once)} more by other names"
    names = {name: file for name, file in names.items() if name in once.values()}
    return Sources(filesystem, describe_files(filesystem, names), format, note)


def _in_folder(
    filesystem: fsspec.AbstractFileSystem, path: str, dataset: str, split: str, name: str | None
) -> tuple[dict[str, str], str]:
    """The files of a split, and what there is to say about others."""
    files = {
        file: place
        for file, place in list_files(filesystem, path, dataset).items()
        if _may_hold_data(file)
    }
    if not any(format_of(file) for file in files):
        raise CorpusError(
            f"The folder {dataset!r} holds no file that can be read ({ACCEPTED}), "
            "and was not saved with save_to_disk."
        )
    splits = find_splits(files, _cards(filesystem, path), name, dataset)
    of = f" of its configuration {splits.configuration!r}" if splits.configuration else ""
    if split not in splits.files:
        raise CorpusError(
            f"{dataset!r} has no split {split!r}. Its splits{of} are: {', '.join(splits.files)}."
        )
    if not splits.files[split]:
        raise CorpusError(f"The split {split!r}{of} of {dataset!r} has no files.")
    notes = [f"configuration {splits.configuration}"] if splits.configuration else []
    if len(splits.files) > 1 or split != "train":
        notes.append(f"split {split}")
    others = sorted(set(files).difference(*splits.files.values()))
    if others and not splits.configuration:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        notes.append(f"without {', '.join(others[:_NAMED])}{more}, which are of no split")
    return {file: files[file] for file in splits.files[split]}, "".join(f", {n}" for n in notes)


def _cards(filesystem: fsspec.AbstractFileSystem, path: str) -> dict[str, str]:
    cards = {}
    for name in CARDS:
        place = f"{path.rstrip('/')}/{name}"
        if filesystem.isfile(place):
            data = cast(bytes, filesystem.cat_file(place))
            refuse_stand_in(data[:HEAD], place)
            cards[name] = data.decode("utf-8", errors="replace")
    return cards


def _may_hold_data(name: str) -> bool:
    path = PurePosixPath(name.lower())
    return not _DATA.isdisjoint(path.suffixes) and path.name not in _METADATA


def _named(filesystem: fsspec.AbstractFileSystem, path: str, dataset: str) -> dict[str, str] | None:
    """The file of this name, or those that match it."""
    if filesystem.isfile(path):
        return {PurePosixPath(path).name: path}
    if not any(character in path for character in "*?["):
        return None
    names = _matching(filesystem, path, dataset)
    if not names:
        raise CorpusError(f"No file matches {dataset!r}. Check the folder and the pattern.")
    return names


def _matching(filesystem: fsspec.AbstractFileSystem, pattern: str, dataset: str) -> dict[str, str]:
    root = pattern[: min(pattern.index(c) for c in "*?[" if c in pattern)].rpartition("/")[0]
    try:
        matches = re.compile(glob_translate(pattern)).match
    except ValueError as error:
        raise CorpusError(f"Cannot read {dataset!r}: {error}.") from error
    if isinstance(filesystem, LocalFileSystem):
        depth = None if "**" in pattern else pattern[len(root) + 1 :].count("/") + 1
        files = (
            list_files(filesystem, root or "/", dataset, depth)
            if os.path.isdir(root or "/")
            else {}
        )
        files = {name: path for name, path in files.items() if matches(path)}
    else:
        found = sorted(str(match) for match in filesystem.glob(pattern))
        files = {relative_name(file, root): file for file in found if filesystem.isfile(file)}
    return {
        name: path
        for name, path in files.items()
        if not is_hidden(name) and PurePosixPath(name).name not in _METADATA
    }


def _common_format(names: Iterable[str], dataset: str) -> Format:
    formats: dict[Format, str] = {}
    for name in names:
        format = format_of(name)
        if format is None:
            raise CorpusError(
                f"Cannot read {name!r} of {dataset!r}: the name of a file must end with one of "
                f"{ACCEPTED}. Move it elsewhere, or name the files you mean with a pattern."
            )
        formats.setdefault(format, name)
    if len(formats) > 1:
        examples = " and ".join(repr(name) for name in formats.values())
        raise CorpusError(
            f"{dataset!r} holds files of several kinds, such as {examples}. "
            "Name those you mean with a pattern, for example 'folder/*.jsonl'."
        )
    return next(iter(formats))
