"""What a checkpoint holds on disk: arrays by name, and a record that tells if they are intact."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from cache.errors import CacheError
from cache.jsonfields import canonical, digest, parse_object

RECORD, STATE, PARAMETERS = "checkpoint.json", "state", "parameters"

# Arrays by path in a part of the state, by part: {"optimizer": {"0/mu/layers.0.weight": …}}.
Flat: TypeAlias = dict[str, dict[str, Any]]


class DamageError(Exception):
    """A checkpoint is not what was saved, or not of the state that is asked for."""


def flatten(state: Mapping[str, Any]) -> Flat:
    """Leaves by path, so that what is on disk does not depend on Python's classes.

    Raises:
      ValueError: two leaves would have the same name.
    """
    flat: Flat = {}
    for part, tree in state.items():
        leaves = flat[part] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if name in leaves:
                raise ValueError(f"two arrays of the {part} are named {name}")
            leaves[name] = leaf
    return flat


def named(flat: Flat) -> Iterator[tuple[str, Any]]:
    for part, leaves in flat.items():
        for name, leaf in leaves.items():
            yield f"{part}/{name}", leaf


def describe(leaf: np.ndarray) -> dict[str, Any]:
    """Shape, dtype, and sha256 of the bytes in C order."""
    data = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    return {**_kind(leaf), "sha256": hashlib.sha256(data.data).hexdigest()}


def _kind(leaf: Any) -> dict[str, Any]:
    return {"shape": list(leaf.shape), "dtype": np.dtype(leaf.dtype).name}


def check_leaves(found: dict[str, dict[str, Any]], wanted: Flat) -> None:
    """Raises unless the parts of the state that are wanted hold just these arrays."""
    expected = dict(named(wanted))
    parts = tuple(f"{part}/" for part in wanted)
    for name in sorted(name for name in found if name.startswith(parts)):
        if name not in expected:
            raise DamageError(f"it holds {name}, which this student has not")
    for name, leaf in expected.items():
        if name not in found:
            raise DamageError(f"it does not hold {name}")
        for key, value in _kind(leaf).items():
            if found[name].get(key) != value:
                raise DamageError(
                    f"the {key} of {name} is {found[name].get(key)}, expected {value}"
                )


def place(host: Flat, abstract: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays on the devices of the abstract state, in its structure."""
    placed: dict[str, Any] = {}
    for part, tree in abstract.items():
        leaves, structure = jax.tree.flatten(tree)
        names = list(flatten({part: tree})[part])
        arrays = [
            # Never memory that numpy has a hold of: the step donates its buffers.
            jax.device_put(host[part].pop(name), getattr(leaf, "sharding", None), may_alias=False)
            for name, leaf in zip(names, leaves, strict=True)
        ]
        placed[part] = jax.tree.unflatten(structure, arrays)
    return placed


def read_record(path: Path, step: int) -> dict[str, Any]:
    """What checkpoint.json says, if it is of this step and every file has its size.

    Raises:
      DamageError: otherwise.
    """
    try:
        whole = parse_object((path / RECORD).read_bytes(), RECORD)
    except FileNotFoundError as error:
        raise DamageError(f"{RECORD} is missing") from error
    except (CacheError, OSError) as error:
        raise DamageError(str(error)) from error
    content = whole.get("content")
    if not isinstance(content, dict) or digest(content) != whole.get("sha256"):
        raise DamageError(f"{RECORD} is not as it was written")
    if content["step"] != step:
        raise DamageError(f"it is of step {content['step']}")
    for name, (size, _) in content["files"].items():
        try:
            found = (path / name).stat().st_size
        except OSError as error:
            raise DamageError(f"{name} is missing") from error
        if found != size:
            raise DamageError(f"{name} has {found} bytes, expected {size}")
    return content


def check_files(path: Path, content: Mapping[str, Any]) -> None:
    """Reads every file. Orbax gets only whole ones: it takes some damage badly.

    Raises:
      DamageError: a file's bytes are not those that were written.
    """
    for name, (_, expected) in content["files"].items():
        try:
            found = _file_digest(path / name)
        except OSError as error:
            raise DamageError(f"{name} cannot be read ({error})") from error
        if found != expected:
            raise DamageError(f"the bytes of {name} are not those that were written")


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Writes checkpoint.json, and puts the checkpoint's folder on disk.

    Args:
      path: the checkpoint's folder, with its arrays.
      content: JSON: step, position, metrics, leaves; "files" is added: size and sha256 of each
        file by relative path.
    """
    files = {
        file.relative_to(path).as_posix(): (file.stat().st_size, _file_digest(file))
        for file in sorted((path / STATE).rglob("*"))
        if file.is_file()
    }
    whole = {**content, "files": files}
    with (path / RECORD).open("wb") as file:
        file.write(canonical({"content": whole, "sha256": digest(whole)}))
        file.flush()
        os.fsync(file.fileno())
    sync(path)


def sync(folder: Path) -> None:
    """Puts a folder's entries on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
