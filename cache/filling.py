"""Filling a cache with shards: who may write, and how the work is finished.

A cache is filled in one of three ways: its first capture, which begins with an open manifest;
more shards behind those of a finished cache (append); and shards of a finished cache made again
where their receipts are missing (after `verify --repair`). The last two leave the complete
manifest as it is, so that readers go on reading, and keep the open manifest of their work in an
object of its own. Either way the open manifest names a run, and only that run may commit.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cache.errors import CacheError
from cache.format import BACKUP, MANIFEST, WORK, receipt_key
from cache.manifest import Extent, Manifest, ReceiptEntry, read_manifest
from cache.receipt import Receipt
from cache.shards import check_run, create_arrays, finished_shards, read_receipts
from cache.statistics import combine
from cache.storage import Store


def new_run() -> str:
    """An id for a run, different from all others."""
    return uuid.uuid4().hex[:12]


def check_place(store: Store, error: type[ValueError] = CacheError) -> None:
    """Refuses a folder that holds something else than a cache.

    Raises:
      error: it does.
    """
    place = store.local
    if place is None or not place.exists():
        return
    if not place.is_dir():
        raise error(f"{place} is a file. A cache is a folder; choose another path.")
    # A write that was killed leaves its lock behind, perhaps that of the very first object.
    names = sorted(path.name for path in place.iterdir() if "__lock" not in path.name)
    if names and MANIFEST not in names and BACKUP not in names:
        raise error(
            f"{place} is not a cache and not empty: it holds {', '.join(names[:5])}. "
            "Choose another path."
        )


def begin_fill(
    store: Store,
    wanted: Manifest,
    differences: Callable[[Manifest], list[str]],
    error: type[ValueError] = CacheError,
) -> Manifest:
    """Begins to fill a new cache, or takes over the same work left unfinished.

    Args:
      store: where the cache is or will be.
      wanted: the open manifest of the work; of its corpus what is known before it begins.
      differences: between the manifest found there and the wanted one, a line each.
      error: what to raise.

    Returns:
      The open manifest, stored, with the wanted run; or the complete one that is there.

    Raises:
      error: the cache there was made otherwise, or another run has just begun; nothing was
        changed.
    """
    if store.read(MANIFEST) is None:
        if store.read(BACKUP) is not None:
            raise error(
                f"the cache {store.location} lost its {MANIFEST}. `stillroom verify "
                f"{store.location} --repair` restores it; then run this command again."
            )
        if store.create(MANIFEST, wanted.to_bytes()):
            store.write(BACKUP, wanted.to_bytes())
            return wanted
    found, generation = read_manifest(store)
    lines = differences(found)
    if lines:
        listed = "\n".join(f"  {line}" for line in lines)
        unfinished = ", or delete this unfinished one" if found.state == "open" else ""
        raise error(
            f"the cache {store.location} was made otherwise than you ask now:\n{listed}\n"
            f"Ask for the same, or choose another place{unfinished}. Nothing was changed."
        )
    if found.state == "complete":
        return found
    taken_over = replace(
        found,
        run=wanted.run,
        software=wanted.software,
        corpus={**found.corpus, **wanted.corpus},
    )
    if not store.replace(MANIFEST, taken_over.to_bytes(), generation):
        raise error(
            f"another run has just begun to fill {store.location}. Let it finish, then run this "
            "command again."
        )
    store.write(BACKUP, taken_over.to_bytes())
    return taken_over


def reopened(manifest: Manifest, extent: int = 0, run: str = "") -> Manifest:
    """The open manifest with which an extent of a finished cache was filled."""
    where = manifest.extents[extent]
    corpora = [each.corpus or manifest.corpus for each in manifest.extents]
    return replace(
        manifest,
        state="open",
        run=run or new_run(),
        corpus=corpora[extent],
        first_shard=where.first_shard,
        first_document=sum(corpus.get("documents", 0) for corpus in corpora[:extent]),
        extents=(),
        receipts=(),
        accounting={},
        statistics=None,
        bytes={},
    )


def missing_shards(store: Store, manifest: Manifest, extent: int = 0) -> list[int]:
    """Shards of an extent of a finished cache that have no receipt."""
    where = manifest.extents[extent]
    shards = range(where.first_shard, where.first_shard + where.shards)
    have = finished_shards(store)
    return [shard for shard in shards if shard not in have]


def begin_work(
    store: Store, wanted: Manifest, differences: Callable[[Manifest], list[str]]
) -> Manifest:
    """Begins to add shards to a finished cache, or takes over the same work left unfinished.

    Args:
      store: the cache.
      wanted: the open manifest of the work.
      differences: between the work found there and the wanted one, a line each.

    Returns:
      The open manifest, stored, with the wanted run.

    Raises:
      CacheError: other work is under way there; nothing was changed.
    """
    data, generation = store.read_versioned(WORK)
    if data is None:
        if store.create(WORK, wanted.to_bytes()):
            return wanted
        raise CacheError(
            f"another run has just begun to add to {store.location}. Let it finish, then run this "
            "command again."
        )
    found = Manifest.from_bytes(data, store.location, WORK)
    lines = differences(found)
    if lines:
        listed = "\n".join(f"  {line}" for line in lines)
        raise CacheError(
            f"other work on {store.location} is not finished:\n{listed}\nFinish it with the "
            f"command it was begun with, or delete {store.location}/{WORK} to give it up. "
            "Nothing was changed."
        )
    taken_over = replace(found, run=wanted.run, software=wanted.software)
    if not store.replace(WORK, taken_over.to_bytes(), generation):
        raise CacheError(
            f"another run has just begun to add to {store.location}. Let it finish, then run this "
            "command again."
        )
    return taken_over


def finish(
    store: Store, filled: Manifest, rows: int, accounting: Mapping[str, Any]
) -> tuple[Manifest, bool]:
    """Makes the shards that a run has filled a part of the finished cache.

    Args:
      store: the cache; every shard of the extent has its receipt.
      filled: the open manifest, its corpus digest known.
      rows: rows of the extent.
      accounting: where the tokens of the extent went.

    Returns:
      The complete manifest, stored; and whether shards of the cache that were made again have
      other bytes than before.

    Raises:
      TakenOverError: another run has taken over.
      CacheError: a receipt is missing, or the manifest was changed meanwhile.
    """
    # In this order: a run that takes over after the first line is seen by the second, or by the
    # generation.
    found, generation = read_manifest(store)
    check_run(store, filled.run)
    before = found.extents if found.state == "complete" else ()
    where = {extent.first_shard: place for place, extent in enumerate(before)}
    first = filled.first_shard == 0
    here = Extent(
        filled.first_shard,
        filled.encoding.shards(rows),
        rows,
        None if first else filled.corpus,
        None if first else dict(accounting),
    )
    place = where.get(here.first_shard, len(before))
    if place == len(before) and here.first_shard != sum(extent.shards for extent in before):
        raise CacheError(f"the cache {store.location} was changed while shards were added to it.")
    extents = (*before[:place], here, *before[place + 1 :])
    own = accounting if first else _first_accounting(found)
    complete = completed(
        store,
        replace(
            filled,
            corpus=filled.corpus if first else found.corpus,
            # What is there was made with these; more shards do not change that.
            software=found.software if before else filled.software,
        ),
        extents,
        added([own, *(extent.accounting or {} for extent in extents)]),
    )
    changed = bool(before) and complete.receipts[: len(found.receipts)] != found.receipts
    if complete != found and not store.replace(MANIFEST, complete.to_bytes(), generation):
        raise CacheError(
            f"the manifest of {store.location} was changed by another run at the very end. Run "
            "the same command again."
        )
    settle(store, complete)
    return complete, changed


def settle(store: Store, complete: Manifest) -> None:
    """What follows from a complete manifest: its backup, the arrays' sizes, no work left."""
    data = complete.to_bytes()
    backup = store.read(BACKUP)
    if backup != data and not _disputed(store, backup, complete):
        store.write(BACKUP, data)
    create_arrays(store, complete.encoding, complete.stored_rows)
    if store.read(WORK) is not None:
        store.delete(WORK)


def contradicts(backup: Manifest, complete: Manifest) -> bool:
    """Whether a backup says other things of the same shards: no writer leaves such a pair."""
    return (
        backup.state == "complete"
        and backup != complete
        and (backup.extents, backup.receipts) == (complete.extents, complete.receipts)
    )


def _disputed(store: Store, backup: bytes | None, complete: Manifest) -> bool:
    try:
        found = Manifest.from_bytes(backup or b"", store.location, BACKUP)
    except CacheError:
        # No backup of anything: it is written anew.
        return False
    return contradicts(found, complete)


def completed(
    store: Store, manifest: Manifest, extents: tuple[Extent, ...], accounting: dict[str, Any]
) -> Manifest:
    """The complete manifest of a cache whose shards all have receipts.

    Raises:
      CacheError: a receipt is missing, or belongs to something else.
    """
    entries, statistics = [], []
    whole = replace(manifest, extents=extents)
    identities = whole.identities()
    sizes = dict.fromkeys(manifest.encoding.stored_arrays(), 0)
    for shard, data in read_receipts(store, range(sum(each.shards for each in extents))).items():
        if data is None:
            raise CacheError(
                f"{store.location}: shard {shard} has no receipt. Run the command that made it "
                "(precompute or append) again first."
            )
        receipt = Receipt.from_bytes(data, receipt_key(shard))
        if (receipt.shard, receipt.identity) != (shard, identities[whole.extent_at(shard)]):
            raise CacheError(
                f"{store.location}: the receipt of shard {shard} belongs to something else; "
                "another run wrote it late. Run the command that made the shard (precompute, "
                "append or derive) again: it makes it again."
            )
        entries.append(ReceiptEntry(receipt.digest, receipt.documents))
        statistics.append(receipt.statistics)
        for name in sizes:
            sizes[name] += receipt.arrays[name].bytes
    return replace(
        whole,
        state="complete",
        run="",
        first_shard=0,
        first_document=0,
        receipts=tuple(entries),
        accounting=accounting,
        statistics=combine(statistics, len(manifest.encoding.temperatures)),
        bytes=sizes,
    )


def _first_accounting(found: Manifest) -> dict[str, Any]:
    """What the first extent's tokens came to: all, less those of the appended ones."""
    appended = [extent.accounting or {} for extent in found.extents]
    return added([found.accounting, *(_negative(part) for part in appended)])


def added(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of several parts, by name; a count may be an object of counts."""
    total: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, Mapping):
                total[name] = added([total.get(name, {}), value])
            else:
                total[name] = total.get(name, 0) + value
    return total


def _negative(part: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _negative(value) if isinstance(value, Mapping) else -value
        for name, value in part.items()
    }
