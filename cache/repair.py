"""Putting a damaged cache right, as far as that needs no teacher.

Receipts of broken shards are removed; the command that made the shards makes them again. What
follows from other objects of the cache is written anew: the manifest from its backup or the
backup from it, the arrays' metadata, the sums in the manifest. What a killed write left is
removed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from cache.errors import CacheError, Damage
from cache.filling import new_run
from cache.finishing import completed, contradicts
from cache.format import ARRAYS, BACKUP, MANIFEST, RECEIPTS, WORK, receipt_key
from cache.manifest import Manifest, OtherFormatError, read_manifest
from cache.receipt import Receipt
from cache.shards import array_chunk_key, array_objects
from cache.soundness import check_receipts
from cache.statistics import combine
from cache.storage import Store

SUMS = Damage("the manifest's statistics are not the sum of the receipts'")


@dataclass(frozen=True)
class FoundManifest:
    """The manifest that a cache has, or that its backup says it should have.

    Attributes:
      manifest: to be trusted.
      generation: of the object manifest.json, for `Store.replace`.
      restored: whether it is the backup's.
      damage: what is wrong with either.
      disputed: whether the backup says otherwise and nothing tells which of them is right.
    """

    manifest: Manifest
    generation: bytes
    restored: bool
    damage: tuple[Damage, ...]
    disputed: bool = False


def find_manifest(store: Store) -> FoundManifest:
    """The manifest of a cache, from its backup where it is missing or not what it should be.

    Where both are whole and differ, the one that more receipts fit is right.

    Raises:
      CacheError: there is neither.
    """
    data, generation = store.read_versioned(MANIFEST)
    backup = _backup(store)
    try:
        manifest, generation = read_manifest(store)
    except CacheError as error:
        # A newer cache is none of ours to mend.
        if backup is None or (isinstance(error, OtherFormatError) and not error.edited):
            raise
        state = "is missing" if data is None else f"cannot be used: {_first_line(error)}"
        return FoundManifest(backup, generation, True, (Damage(f"{MANIFEST} {state}"),))
    finished_before = backup is not None and backup.state == "complete"
    if backup == manifest or (manifest.state == "open" and not finished_before):
        return FoundManifest(manifest, generation, False, ())
    if backup is None:
        damage = Damage(f"{BACKUP} is missing or damaged")
        return FoundManifest(manifest, generation, False, (damage,))
    fits = _fitting(store, manifest)
    others = _fitting(store, backup) if finished_before else (0, False)
    if others > fits:
        damage = Damage(f"{MANIFEST} was changed: the receipts fit {BACKUP} and not it")
        return FoundManifest(backup, generation, True, (damage,))
    if others == fits and contradicts(backup, manifest):
        names = ", ".join(_fields_that_differ(manifest, backup))
        damage = Damage(
            f"{MANIFEST} and {BACKUP} do not say the same of {names}, and both fit the receipts: "
            "one was edited. Delete that one, then --repair makes it anew from the other"
        )
        return FoundManifest(manifest, generation, False, (damage,), disputed=True)
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


def _fitting(store: Store, manifest: Manifest) -> tuple[int, bool]:
    """How many receipts fit a manifest, and whether its sums are theirs."""
    shards = range(manifest.shards)
    receipts, _ = check_receipts(store, manifest, shards, manifest.stored_rows)
    whole = len(receipts) == manifest.shards
    return len(receipts), whole and sums_agree(manifest, list(receipts.values()))


def sums_agree(manifest: Manifest, receipts: Sequence[Receipt]) -> bool:
    """Whether a complete manifest's statistics and sizes are the sums over its receipts."""
    names = manifest.encoding.stored_arrays()
    statistics = [receipt.statistics for receipt in receipts]
    total = combine(statistics, len(manifest.encoding.temperatures))
    sizes = {name: sum(receipt.arrays[name].bytes for receipt in receipts) for name in names}
    stated = {name: manifest.bytes.get(name) for name in names}
    return (total, sizes) == (manifest.statistics, stated)


def _fields_that_differ(one: Manifest, other: Manifest) -> list[str]:
    return [
        item.name
        for item in fields(Manifest)
        if getattr(one, item.name) != getattr(other, item.name)
    ]


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
      The shards whose receipts were removed, and the keys that were put right; nothing while
      manifest and backup are in dispute.

    Raises:
      CacheError: the manifest changed since it was read.
    """
    manifest = found.manifest
    changed = CacheError(
        f"the manifest of {store.location} changed while it was verified; verify again"
    )
    if store.read_versioned(MANIFEST)[1] != found.generation:
        raise changed
    if found.disputed:
        # What else is damaged depends on which of them is right.
        return (), ()
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
    if SUMS in damage and not shards:
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
    if WORK in blamed:
        # Nobody can go on with it; the shards it made are redone, or are strays.
        store.delete(WORK)
        mended.append(WORK)
    for key, value in expected.items():
        if key in blamed or (key == BACKUP and store.read(key) != value):
            store.write(key, value)
            mended.append(key)
    return tuple(shards), tuple(mended)
