"""Which shards of a cache are sound, by their receipts and the sizes of their files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from cache.errors import CacheError, Damage
from cache.format import receipt_key
from cache.manifest import Manifest
from cache.receipt import Receipt
from cache.shards import array_chunk_key, read_receipts
from cache.storage import Store


def check_receipts(
    store: Store, manifest: Manifest, shards: Sequence[int], rows: int
) -> tuple[dict[int, Receipt], list[Damage]]:
    """The receipts of some shards that are sound, with files of the right size, and what is not.

    Args:
      store: the cache.
      manifest: its manifest. Of an open one, receipts are compared as far as it knows.
      shards: numbers of shards.
      rows: stored rows of the cache, or 0 if they are not known yet.
    """
    receipts, damage = listed_receipts(store, manifest, shards, rows)
    broken = list(size_damage(store, manifest, receipts))
    unsound = {item.shard for item in broken}
    sound = {shard: receipt for shard, receipt in receipts.items() if shard not in unsound}
    return sound, damage + broken


def listed_receipts(
    store: Store, manifest: Manifest, shards: Sequence[int], rows: int
) -> tuple[dict[int, Receipt], list[Damage]]:
    """The receipts of some shards that are those of the cache, and what is wrong with others.

    Args: as `check_receipts`.
    """
    receipts, damage = {}, []
    # Before its corpus is read, an open cache does not know its own identity.
    identities = manifest.identities() if "digest" in manifest.corpus else [""]
    for shard, data in read_receipts(store, shards).items():
        listed = manifest.receipts[shard] if manifest.state == "complete" else None
        where: dict[str, Any] = {"shard": shard}
        if listed is not None:
            where |= {"rows": manifest.shard_rows(shard), "documents": listed.documents}
        if data is None:
            damage.append(Damage(f"{receipt_key(shard)} is missing", **where))
            continue
        try:
            receipt = Receipt.from_bytes(data, receipt_key(shard))
        except CacheError as error:
            damage.append(Damage(str(error), **where))
            continue
        if listed is not None and (hashlib.sha256(data).hexdigest(), receipt.documents) != (
            listed.sha256,
            listed.documents,
        ):
            damage.append(
                Damage(f"{receipt_key(shard)} is not the one the manifest lists", **where)
            )
            continue
        identity = identities[manifest.extent_at(shard)]
        if receipt.shard != shard or (identity and receipt.identity != identity):
            damage.append(Damage(f"{receipt_key(shard)} belongs to something else", **where))
        elif not _fits(receipt, manifest, rows):
            damage.append(Damage(f"{receipt_key(shard)} does not fit this cache", **where))
        else:
            receipts[shard] = receipt
    return receipts, damage


def _fits(receipt: Receipt, manifest: Manifest, rows: int) -> bool:
    """Whether a receipt has the arrays (others may stand beside them) and rows of its shard."""
    encoding = manifest.encoding
    if manifest.state == "complete":
        ends = [manifest.shard_rows(receipt.shard)[1]]
    elif rows:
        ends = [encoding.shard_rows(receipt.shard, rows)[1]]
    else:
        first = receipt.shard * encoding.rows_per_shard
        ends = range(first + 1, first + encoding.rows_per_shard + 1)
    masses = (receipt.statistics.exact_mass, receipt.statistics.exact_mass_histogram)
    return (
        set(encoding.stored_arrays()) <= set(receipt.arrays)
        and receipt.rows[0] == receipt.shard * encoding.rows_per_shard
        and receipt.rows[1] in ends
        and all(len(mass) == len(encoding.temperatures) for mass in masses)
    )


def size_damage(store: Store, manifest: Manifest, receipts: dict[int, Receipt]) -> Iterator[Damage]:
    """Files that are missing or do not have the size that their shard's receipt says."""
    places = {
        array_chunk_key(name, len(spec.inner) + 1, shard): (shard, name)
        for name, spec in manifest.encoding.stored_arrays().items()
        for shard in receipts
    }
    sizes = {key: receipts[shard].arrays[name].bytes for key, (shard, name) in places.items()}
    for key, reason in store.sizes_differ(sizes).items():
        shard, name = places[key]
        yield damage_at(receipts[shard], name, f"{key} {reason}")


def damage_at(receipt: Receipt, name: str | None, reason: str) -> Damage:
    return Damage(
        reason, shard=receipt.shard, array=name, rows=receipt.rows, documents=receipt.documents
    )
