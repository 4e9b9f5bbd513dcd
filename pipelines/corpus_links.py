"""The files of a folder, links followed."""

import os
from collections.abc import Iterator

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pipelines.errors import CorpusError


def list_files(
    filesystem: fsspec.AbstractFileSystem, folder: str, dataset: str, depth: int | None = None
) -> dict[str, str]:
    """What is in a folder and is no folder: {name relative to it: path}, in order of the names.

    Links to folders are followed, those that lead nowhere are listed. Hidden files and folders
    are left out.

    Args:
      dataset: what the user wrote, for messages.
      depth: 1 to leave the folders in it alone, 2 to look into those but not into theirs; all
        if None.

    Raises:
      CorpusError: a link leads back to a folder that it is in.
    """
    if isinstance(filesystem, LocalFileSystem):
        names = _walk(folder, depth, "", (), dataset)
        return {name: os.path.join(folder, name) for name in sorted(names)}
    files = {relative_name(file, folder): file for file in filesystem.find(folder, maxdepth=depth)}
    return {name: files[name] for name in sorted(files) if not is_hidden(name)}


def relative_name(path: str, root: str) -> str:
    return path.removeprefix(root).lstrip("/")


def is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def real_path(filesystem: fsspec.AbstractFileSystem, path: str) -> str:
    """The path without links; equal for two names of one file."""
    return os.path.realpath(path) if isinstance(filesystem, LocalFileSystem) else path


def leads_nowhere(filesystem: fsspec.AbstractFileSystem, path: str) -> bool:
    """Whether a name in a local folder is that of no file: a dead link, for one."""
    return isinstance(filesystem, LocalFileSystem) and not os.path.isfile(path)


def _walk(
    folder: str, depth: int | None, prefix: str, above: tuple[str, ...], dataset: str
) -> Iterator[str]:
    real = os.path.realpath(folder)
    if real in above:
        raise CorpusError(
            f"The link {prefix.rstrip('/')!r} in {dataset!r} leads back to {real}, which it is in. "
            "Remove it, or name the files you mean with a pattern that does not lead through it."
        )
    for name in os.listdir(folder):
        if is_hidden(name):
            continue
        path = os.path.join(folder, name)
        if not os.path.isdir(path):
            yield prefix + name
        elif depth is None or depth > 1:
            below = None if depth is None else depth - 1
            yield from _walk(path, below, f"{prefix}{name}/", (*above, real), dataset)
