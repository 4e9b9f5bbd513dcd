"""Kinds of damage to a cache on a local disk, as plain functions with names.

Each takes the cache's folder and says in its name what it does. What must come of it is in the
tests; nothing here knows how damage is found.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cache.format import receipt_key
from cache.jsonfields import digest
from cache.manifest import Manifest
from cache.shards import array_chunk_key

# Files of arrays: (folder, manifest, array, shard, folders of other caches by name) -> nothing.
ArrayDamage = Callable[[Path, Manifest, str, int, dict[str, Path]], None]


def manifest_of(folder: Path) -> Manifest:
    return Manifest.from_bytes((folder / "manifest.json").read_bytes(), str(folder))


def array_file(folder: Path, manifest: Manifest, name: str, shard: int) -> Path:
    rank = len(manifest.encoding.stored_arrays()[name].inner) + 1
    return folder / array_chunk_key(name, rank, shard)


def footer_bytes(manifest: Manifest) -> int:
    """Size of a shard file's index: where each row's bytes are, and the index's checksum."""
    return 16 * manifest.encoding.rows_per_shard + 4


def delete_file(
    folder: Path, manifest: Manifest, name: str, shard: int, others: dict[str, Path]
) -> None:
    array_file(folder, manifest, name, shard).unlink()


def _keep(part: Callable[[int], int]) -> ArrayDamage:
    def cut(
        folder: Path, manifest: Manifest, name: str, shard: int, others: dict[str, Path]
    ) -> None:
        path = array_file(folder, manifest, name, shard)
        data = path.read_bytes()
        path.write_bytes(data[: part(len(data))])

    return cut


def add_a_byte(
    folder: Path, manifest: Manifest, name: str, shard: int, others: dict[str, Path]
) -> None:
    path = array_file(folder, manifest, name, shard)
    path.write_bytes(path.read_bytes() + b"\0")


def flip_bit_at(path: Path, place: int) -> None:
    """Flips one bit of a file; `place` counts bits."""
    data = bytearray(path.read_bytes())
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)


def _flip(seed: int, footer: bool) -> ArrayDamage:
    def flip(
        folder: Path, manifest: Manifest, name: str, shard: int, others: dict[str, Path]
    ) -> None:
        path = array_file(folder, manifest, name, shard)
        size, index = path.stat().st_size, footer_bytes(manifest)
        first, end = (size - index, size) if footer else (0, size - index)
        place = random.Random(f"{seed} {name} {shard}").randrange(8 * first, 8 * end)
        flip_bit_at(path, place)

    return flip


def swap_files_of_two_shards(
    folder: Path, manifest: Manifest, name: str, shard: int, others: dict[str, Path]
) -> None:
    one = array_file(folder, manifest, name, shard)
    other = array_file(folder, manifest, name, (shard + 1) % manifest.shards)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def _copied_from(other: str) -> ArrayDamage:
    def replace_file(
        folder: Path, manifest: Manifest, name: str, shard: int, others: dict[str, Path]
    ) -> None:
        path = array_file(folder, manifest, name, shard)
        shutil.copy(others[other] / path.relative_to(folder), path)

    return replace_file


ARRAY_DAMAGE: dict[str, ArrayDamage] = {
    "deleted": delete_file,
    "cut to nothing": _keep(lambda size: 0),
    "cut in half": _keep(lambda size: size // 2),
    "cut by a byte": _keep(lambda size: size - 1),
    "longer by a byte": add_a_byte,
    "a bit flipped in the data": _flip(0, False),
    "another bit flipped in the data": _flip(1, False),
    "a bit flipped in the index": _flip(2, True),
    "another bit flipped in the index": _flip(3, True),
    "swapped with another shard's": swap_files_of_two_shards,
    "of another corpus": _copied_from("corpus"),
    "of another teacher": _copied_from("teacher"),
}


# Whole shards.


def swap_two_shards(folder: Path, manifest: Manifest, one: int, other: int) -> None:
    """The files of all arrays and the receipts of two shards, each in the other's place."""
    names = [
        *(
            [array_file(folder, manifest, name, shard) for shard in (one, other)]
            for name in manifest.encoding.stored_arrays()
        ),
        [folder / receipt_key(shard) for shard in (one, other)],
    ]
    for first, second in names:
        data = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)


def copy_a_shard_from(folder: Path, manifest: Manifest, other: Path, shard: int) -> None:
    """The files of all arrays and the receipt of one shard, from another cache."""
    for name in manifest.encoding.stored_arrays():
        path = array_file(folder, manifest, name, shard)
        shutil.copy(other / path.relative_to(folder), path)
    shutil.copy(other / receipt_key(shard), folder / receipt_key(shard))


# JSON objects.


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to every field of a JSON value; of lists, to the first element."""
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list):
        items = list(enumerate(value))[:1]
    else:
        return
    for key, inner in items:
        yield (*prefix, key)
        yield from paths(inner, (*prefix, key))


def other_value(value: Any) -> Any:
    """A value of the same type that is another: what a careless edit might leave."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, list):
        return value[:-1] if value else [1]
    if isinstance(value, dict):
        return {**value, "x": 1}
    return 0


def edited(content: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A copy of a JSON value with one of its fields changed; removed where `change` is None."""
    copy = json.loads(json.dumps(content))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = change(inner[path[-1]])
    return copy


def without(content: Any, path: tuple[Any, ...]) -> Any:
    """A copy of a JSON value without one of its fields."""
    copy = json.loads(json.dumps(content))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return copy


def with_digest(content: dict[str, Any]) -> dict[str, Any]:
    """The same manifest with the digest that its content has."""
    rest = {name: value for name, value in content.items() if name != "digest"}
    return {**rest, "digest": digest(rest)}


def to_bytes(content: Any) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True).encode()


# What killed writers leave: TensorStore writes a file under this name, then renames it.


def leave_half_written_files(folder: Path) -> list[str]:
    """One in every folder of a cache; returns their keys, sorted."""
    firsts = {
        path.parent: path for path in sorted(folder.rglob("*"), reverse=True) if path.is_file()
    }
    for path in firsts.values():
        lock = path.with_name(f"{path.name}.__lock")
        lock.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return sorted(f"{path.relative_to(folder)}.__lock" for path in firsts.values())


def add_shards_beyond_the_last(folder: Path, manifest: Manifest) -> list[str]:
    """A receipt, and a file of every array, of shards that the cache does not have."""
    keys = []
    for name in manifest.encoding.stored_arrays():
        last = array_file(folder, manifest, name, manifest.shards - 1)
        path = array_file(folder, manifest, name, manifest.shards)
        shutil.copy(last, path)
        keys.append(str(path.relative_to(folder)))
    for shard in (manifest.shards, manifest.shards + 7):
        shutil.copy(folder / receipt_key(manifest.shards - 1), folder / receipt_key(shard))
        keys.append(receipt_key(shard))
    return sorted(keys)
