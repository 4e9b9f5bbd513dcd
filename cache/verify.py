"""Checking a cache: quickly (what is there, how long is it) or every byte."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cache.consistency import inconsistencies
from cache.errors import CacheError, Damage
from cache.filling import makers
from cache.format import ARRAYS, TOKENIZER, WORK
from cache.jsonfields import parse_object
from cache.manifest import Manifest
from cache.receipt import Receipt, data_digest
from cache.repair import SUMS, find_manifest, mend, stray_objects, sums_agree
from cache.seals import broken_seals
from cache.shards import array_objects, finished_shards
from cache.soundness import damage_at, listed_receipts, size_damage
from cache.statistics import Statistics, statistics_of
from cache.storage import Store

WORK_UNFINISHED = Damage(
    "shards are being added to it or made again, and that is not finished. Run the command that "
    "began it again"
)
# Receipts read, and sizes asked for, at a time.
_BATCH = 256


@dataclass(frozen=True)
class Report:
    """What `verify` found.

    Attributes:
      location: the cache.
      state: "complete" or "open".
      full: whether every byte was read.
      shards: number of shards that were looked at.
      bytes: size of the array files that the receipts state.
      damage: everything found.
      repaired: shards whose receipts were removed.
      mended: keys of objects that were put right or removed.
      makers: which commands make the repaired shards again, a sentence each.
      notes: what is no damage and yet worth knowing, a sentence or two each.
    """

    location: str
    state: str
    full: bool
    shards: int
    bytes: int
    damage: tuple[Damage, ...]
    repaired: tuple[int, ...] = ()
    mended: tuple[str, ...] = ()
    makers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        return not self.damage


def verify(
    location: str | os.PathLike[str],
    *,
    full: bool = False,
    repair: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Checks a cache.

    Quick: the manifest's digest and its backup, the arrays' metadata, the tokenizer, every
    receipt's digest, every file's existence and size. Full: also every byte of every array
    (checksums, digests, seals), whether the values make sense together (consistency.py), and
    what a killed or late writer left behind.

    Args:
      location: the cache.
      full: read every byte.
      repair: remove the receipts of broken shards, so that the command that made them redoes
        exactly those, and put right what can be without a teacher (repair.py). The rest of the
        cache stays as it is.
      progress: called with (shards done, shards in all).

    Raises:
      CacheError: there is no readable manifest and no backup of it, so that nothing else can
        be checked.
    """
    store = Store(location)
    found = find_manifest(store)
    manifest = found.manifest
    damage = [*found.damage, *_metadata_damage(store, manifest), *_unfinished(store, manifest)]
    shards = sorted(finished_shards(store)) if manifest.state == "open" else range(manifest.shards)
    size = 0
    sound: list[Receipt] = []
    shards = list(shards)
    for start in range(0, len(shards), _BATCH):
        batch = shards[start : start + _BATCH]
        receipts, broken = listed_receipts(store, manifest, batch, manifest.stored_rows)
        sizes = list(size_damage(store, manifest, receipts))
        damage += [*broken, *sizes]
        for number, shard in enumerate(batch):
            receipt = receipts.get(shard)
            wrong = {item.array for item in sizes if item.shard == shard}
            if receipt is not None and not wrong:
                size += sum(
                    receipt.arrays[name].bytes for name in manifest.encoding.stored_arrays()
                )
                sound.append(receipt)
            if receipt is not None and full:
                damage += _data_damage(store, manifest, receipt, wrong)
            if progress is not None:
                progress(start + number + 1, len(shards))
    whole = manifest.state == "complete" and len(sound) == manifest.shards
    if whole and not sums_agree(manifest, sound):
        damage.append(SUMS)
    strays = stray_objects(store, manifest) if full else []
    damage += [Damage(f"{key} does not belong to the cache: a write was killed") for key in strays]
    repaired, mended = (), ()
    if repair and damage:
        repaired, mended = mend(store, found, damage, strays)
    return Report(
        location=store.location,
        state=manifest.state,
        full=full,
        shards=len(shards),
        bytes=size,
        damage=tuple(damage),
        repaired=repaired,
        mended=mended,
        makers=tuple(makers(manifest, repaired)),
        notes=manifest.notes,
    )


def _unfinished(store: Store, manifest: Manifest) -> Iterator[Damage]:
    if manifest.state == "open":
        done = len(finished_shards(store))
        yield Damage(
            f"it is not finished: {done} shards have receipts. Run the command that began it again"
        )
        return
    data = store.read(WORK)
    if data is None:
        return
    try:
        work = Manifest.from_bytes(data, store.location, WORK)
    except CacheError:
        work = None
    if work is None or work.state != "open":
        yield Damage(f"{WORK} is not what work under way is described by")
    else:
        yield WORK_UNFINISHED


def _metadata_damage(store: Store, manifest: Manifest) -> Iterator[Damage]:
    if manifest.state == "complete":
        expected = array_objects(manifest.encoding, manifest.stored_rows)
        found = dict(zip(expected, store.read_many(expected), strict=True))
        for key, value in expected.items():
            if not _same_metadata(found[key], value):
                state = "is missing" if found[key] is None else "was changed"
                yield Damage(f"{key} {state}")
    files: dict[str, Any] = manifest.tokenizer.get("files", {})
    for name, sha256 in files.items():
        data = store.read(f"{TOKENIZER}/{name}")
        if data is None:
            yield Damage(f"{TOKENIZER}/{name} is missing")
        elif hashlib.sha256(data).hexdigest() != sha256:
            yield Damage(f"{TOKENIZER}/{name} was changed")


def _same_metadata(found: bytes | None, expected: bytes) -> bool:
    """Whether metadata is as expected; a group may have arrays that we do not know."""
    if found is None or found == expected:
        return found is not None
    try:
        group = parse_object(found, "zarr.json")
        members, known = group["consolidated_metadata"]["metadata"], json.loads(expected)
        known_members = known["consolidated_metadata"]["metadata"]
        group["consolidated_metadata"]["metadata"] = {name: members[name] for name in known_members}
    except (CacheError, KeyError, TypeError):
        return False
    return group == known


def read_shard(store: Store, manifest: Manifest, receipt: Receipt) -> dict[str, Any]:
    """Every array of one shard and its seals; a ValueError in place of what cannot be read."""
    first, end = receipt.rows
    futures = {}
    for name, spec in manifest.encoding.stored_arrays().items():
        rows = manifest.stored_rows or end
        metadata = spec.zarr(max(rows, end), manifest.encoding.rows_per_shard)
        futures[name] = store.open_array(f"{ARRAYS}/{name}", metadata)[first:end].read()
    values: dict[str, Any] = {}
    for name, future in futures.items():
        try:
            values[name] = future.result()
        except ValueError as error:
            failed = store.failed_to_read(f"{ARRAYS}/{name}", error)
            if failed is not None:
                raise failed from error
            values[name] = error
    return values


def _data_damage(
    store: Store, manifest: Manifest, receipt: Receipt, known: set[str | None]
) -> Iterator[Damage]:
    """What is wrong with a shard's data, beside the arrays that are known to be damaged."""
    values = read_shard(store, manifest, receipt)
    whole = not known
    for name, value in values.items():
        if name in known:
            continue
        if isinstance(value, ValueError):
            whole = False
            yield damage_at(receipt, name, str(value))
        elif data_digest(value) != receipt.arrays[name].sha256:
            whole = False
            yield damage_at(receipt, name, "the data is not what the receipt's digest says")
    if not whole:
        return
    if manifest.encoding.sealed:
        rows = np.arange(*receipt.rows)
        broken = broken_seals(values, manifest.encoding, [receipt.identity], rows)
        yield from (damage_at(receipt, name, "not what its seals say") for name in broken)
        if broken:
            return
    encoding = manifest.as_read.encoding
    found = list(inconsistencies(values, encoding, manifest.documents, manifest.relative_error))
    yield from (damage_at(receipt, name, reason) for name, reason in found)
    if found:
        return
    if not _same_statistics(statistics_of(values, manifest.encoding), receipt.statistics):
        yield damage_at(receipt, None, "the receipt's statistics are not those of the data")


def _same_statistics(one: Statistics, other: Statistics) -> bool:
    floats = ("label_logprobs", "entropy", "exact_mass")
    blank: dict[str, Any] = {"label_logprobs": 0.0, "entropy": 0.0, "exact_mass": ()}
    return replace(one, **blank) == replace(other, **blank) and all(
        np.allclose(getattr(one, name), getattr(other, name), rtol=1e-9, atol=1e-9)
        for name in floats
    )
