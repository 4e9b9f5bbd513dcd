"""Putting a damaged cache right, as far as that needs no teacher.

Receipts of broken shards are removed; the command that made the shards makes them again. What
follows from other objects of the cache is written anew: the manifest from its backup or the
backup from it, the arrays' metadata, the sums in the manifest. What a killed write left is
removed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cache.errors import CacheError, Damage
from cache.filling import completed, new_run
from cache.format import ARRAYS, BACKUP, MANIFEST, RECEIPTS, WORK, receipt_key
from cache.manifest import Manifest, read_manifest
from cache.shards import array_chunk_key, array_objects
from cache.soundness import check_receipts
from cache.storage import Store


@dataclass(frozen=True)
class FoundManifest:
    """The manifest that a cache has, or that its backup says it should have.

    Attributes:
      manifest: to be trusted.
      generation: of the object manifest.json, for `Store.replace`.
      restored: whether it is the backup's.
      damage: what is wrong with either.
    """

    manifest: Manifest
    generation: bytes
    restored: bool
    damage: tuple[Damage, ...]


def find_manifest(store: Store) -> FoundManifest:
    """The manifest of a cache, from its backup where it is missing or not what it should be.

    Where both are whole and differ, the one that fits more of the receipts is right.

    Raises:
      CacheError: there is neither.
    """
    data, generation = store.read_versioned(MANIFEST)
    backup = _backup(store)
    try:
        manifest, generation = read_manifest(store)
    except CacheError as error:
        if backup is None:
            raise
        state = "is missing" if data is None else f"cannot be used: {_first_line(error)}"
        return FoundManifest(backup, generation, True, (Damage(f"{MANIFEST} {state}"),))
    if manifest.state == "open" or backup == manifest:
        return FoundManifest(manifest, generation, False, ())
    if backup is None:
        damage = Damage(f"{BACKUP} is missing or damaged")
    elif backup.state == "complete" and _misfits(store, backup) < _misfits(store, manifest):
        damage = Damage(f"{MANIFEST} was changed: the receipts fit {BACKUP} and not it")
        return FoundManifest(backup, generation, True, (damage,))
    else:
        damage = Damage(f"{BACKUP} is not the backup of {MANIFEST}")
    return FoundManifest(manifest, generation, False, (damage,))


def _backup(store: Store) -> Manifest | None:
    data = store.read(BACKUP)
    if data is None:
        return None
    try:
        return Manifest.from_bytes(data, store.location, BACKUP)
    except CacheError:
        # Whoever asks says so.
        return None


def _misfits(store: Store, manifest: Manifest) -> int:
    shards = range(manifest.shards)
    return len(check_receipts(store, manifest, shards, manifest.stored_rows)[1])


def _first_line(error: CacheError) -> str:
    damage = getattr(error, "damage", ())
    return damage[0].reason if damage else str(error).split(". ")[0]


def stray_objects(store: Store, manifest: Manifest) -> list[str]:
    """Keys of what a killed or late writer left in a finished cache, sorted.

    Unfinished writes, and shards and receipts beyond the last; arrays that we do not know are
    left alone, and so is the log of the runs. While work is under way, there are none.
    """
    if manifest.state == "open" or not store.lists or store.read(WORK) is not None:
        return []
    strays = store.unfinished_writes()
    for name in store.list(RECEIPTS):
        known = re.fullmatch(r"[0-9]{6,}\.json", name)
        if not known or int(name.removesuffix(".json")) >= manifest.shards:
            strays.append(f"{RECEIPTS}/{name}")
    for name, spec in manifest.encoding.stored_arrays().items():
        rank = len(spec.inner) + 1
        expected = {array_chunk_key(name, rank, shard) for shard in range(manifest.shards)}
        expected.add(f"{ARRAYS}/{name}/zarr.json")
        found = {f"{ARRAYS}/{name}/{key}" for key in store.list(f"{ARRAYS}/{name}")}
        strays += sorted(found - expected)
    return sorted(strays)


def mend(
    store: Store, found: FoundManifest, damage: Sequence[Damage], strays: Sequence[str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Repairs what `verify` found.

    Returns:
      The shards whose receipts were removed, and the keys that were put right.

    Raises:
      CacheError: the manifest changed since it was read.
    """
    manifest = found.manifest
    changed = CacheError(
        f"the manifest of {store.location} changed while it was verified; verify again"
    )
    if store.read_versioned(MANIFEST)[1] != found.generation:
        raise changed
    mended = list(strays)
    for key in strays:
        store.delete(key)
    shards = sorted({item.shard for item in damage if item.shard is not None})
    for shard in shards:
        store.delete(receipt_key(shard))
    if manifest.state == "open":
        if found.restored:
            taken = replace(manifest, run=new_run())
            if not store.replace(MANIFEST, taken.to_bytes(), found.generation):
                raise changed
            mended.append(MANIFEST)
        return tuple(shards), tuple(mended)
    if not shards:
        # The receipts are whole: the sums follow from them.
        manifest = completed(store, manifest, manifest.extents, manifest.accounting)
    if found.restored or manifest != found.manifest:
        if not store.replace(MANIFEST, manifest.to_bytes(), found.generation):
            raise changed
        mended.append(MANIFEST)
    expected = {
        BACKUP: manifest.to_bytes(),
        **array_objects(manifest.encoding, manifest.stored_rows),
    }
    blamed = [item.reason.split(" ")[0] for item in damage]
    for key, value in expected.items():
        if key in blamed or (key == BACKUP and store.read(key) != value):
            store.write(key, value)
            mended.append(key)
    return tuple(shards), tuple(mended)
