"""The end of filling a cache: its shards enter the complete manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cache.errors import CacheError
from cache.filling import reopened
from cache.format import BACKUP, MANIFEST, WORK, receipt_key
from cache.manifest import Extent, Manifest, ReceiptEntry, read_manifest
from cache.receipt import Receipt
from cache.shards import check_run, create_arrays, read_receipts
from cache.statistics import combine
from cache.storage import Store


def finish(
    store: Store, filled: Manifest, rows: int, accounting: Mapping[str, Any]
) -> tuple[Manifest, bool, list[int]]:
    """Makes the shards that a run has filled a part of the finished cache.

    Args:
      store: the cache; every shard of the extent has its receipt.
      filled: the open manifest, its corpus digest known.
      rows: rows of the extent.
      accounting: where the tokens of the extent went.

    Returns:
      The complete manifest, stored; whether shards of the cache that were made again have
      other bytes than before; and the shards of other extents that lack their receipts, which
      is for the commands that made them to mend.

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
    complete, lacking = _completed(
        store,
        replace(
            filled,
            corpus=filled.corpus if first else found.corpus,
            # What is there was made with these; more shards do not change that.
            software=found.software if before else filled.software,
        ),
        extents,
        added([own, *(extent.accounting or {} for extent in extents)]),
        found if before else None,
    )
    changed = bool(before) and complete.receipts[: len(found.receipts)] != found.receipts
    if complete != found and not store.replace(MANIFEST, complete.to_bytes(), generation):
        raise CacheError(
            f"the manifest of {store.location} was changed by another run at the very end. Run "
            "the same command again."
        )
    settle(store, complete, found)
    return complete, changed, lacking


def settle(store: Store, complete: Manifest, replaced: Manifest | None = None) -> None:
    """What follows from a complete manifest: its backup, the arrays' sizes, no work left.

    Args:
      replaced: the manifest that it has just replaced, whose backup is not in dispute.
    """
    settle_contents(store, complete, replaced)
    if store.read(WORK) is not None:
        store.delete(WORK)


def settle_contents(store: Store, complete: Manifest, replaced: Manifest | None = None) -> None:
    """`settle`, without an end to the work that is under way."""
    data = complete.to_bytes()
    backup = store.read(BACKUP)
    old = None if replaced is None else replaced.to_bytes()
    if backup != data and (backup == old or not _disputed(store, backup, complete)):
        store.write(BACKUP, data)
    create_arrays(store, complete.encoding, complete.stored_rows)


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
    return _completed(store, manifest, extents, accounting, None)[0]


def before_growth(store: Store, complete: Manifest, extents: int) -> Manifest:
    """The complete manifest that a cache had when it had only its first so many extents.

    Raises:
      CacheError: a receipt of theirs is missing.
    """
    kept = complete.extents[:extents]
    parts = [_first_accounting(complete), *(extent.accounting or {} for extent in kept)]
    return completed(store, reopened(complete), kept, added(parts))


def _completed(
    store: Store,
    manifest: Manifest,
    extents: tuple[Extent, ...],
    accounting: dict[str, Any],
    before: Manifest | None,
) -> tuple[Manifest, list[int]]:
    """`completed`, for a cache that may be damaged elsewhere.

    Args:
      before: the complete manifest of the cache to which one extent is added or made again. What
        it says of shards in other extents stands where their receipts are lost. The sums are
        then its own, until whoever makes the last of them again adds all receipts up.

    Returns:
      The manifest, and the shards of other extents whose receipts are lost.
    """
    entries, lacking = [], []
    receipts: dict[int, Receipt] = {}
    whole = replace(manifest, extents=extents)
    identities = whole.identities()
    for shard, data in read_receipts(store, range(sum(each.shards for each in extents))).items():
        extent = whole.extent_at(shard)
        try:
            receipts[shard] = _receipt_of(store, shard, data, identities[extent])
        except CacheError:
            if before is None or extents[extent].first_shard == manifest.first_shard:
                raise
            lacking.append(shard)
            entries.append(before.receipts[shard])
        else:
            entries.append(ReceiptEntry(receipts[shard].digest, receipts[shard].documents))
    statistics = [receipt.statistics for receipt in receipts.values()]
    sizes = dict.fromkeys(manifest.encoding.stored_arrays(), 0)
    if lacking and before is not None and before.statistics is not None:
        receipts = {shard: x for shard, x in receipts.items() if shard >= before.shards}
        statistics = [before.statistics, *(receipt.statistics for receipt in receipts.values())]
        sizes = dict(before.bytes)
    for name in sizes:
        sizes[name] += sum(receipt.arrays[name].bytes for receipt in receipts.values())
    complete = replace(
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
    return complete, lacking


def _receipt_of(store: Store, shard: int, data: bytes | None, identity: str) -> Receipt:
    if data is None:
        raise CacheError(
            f"{store.location}: shard {shard} has no receipt. Run the command that made it "
            "(precompute or append) again first."
        )
    receipt = Receipt.from_bytes(data, receipt_key(shard))
    if (receipt.shard, receipt.identity) != (shard, identity):
        raise CacheError(
            f"{store.location}: the receipt of shard {shard} belongs to something else; "
            "another run wrote it late. Run the command that made the shard (precompute, "
            "append or derive) again: it makes it again."
        )
    return receipt


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
