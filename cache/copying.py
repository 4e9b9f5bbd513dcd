"""Copying a cache from one storage to another, every byte checked on the way.

The copy is an open cache until all of it is there: the source's manifest with a run of its own,
then the tokenizer and the arrays' metadata, then shard by shard the array files (checked against
the receipt before they are written, and read back) and the shard's receipt; last the source's
manifest, byte for byte. What to copy follows from the manifest: nothing is listed, and a copy
that was stopped goes on with the shards whose receipts are not there yet.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace

from cache.errors import CacheError, Damage, DamageError
from cache.filling import new_run, reopened
from cache.format import BACKUP, COPY_RUN, MANIFEST, TOKENIZER, ArraySpec, receipt_key
from cache.manifest import Manifest, read_manifest
from cache.places import check_apart
from cache.receipt import Receipt, data_digest
from cache.shards import TakenOverError, array_chunk_key, create_arrays
from cache.soundness import damage_at
from cache.storage import Store, decode_chunk

# Shards under way at a time; each holds one array's file, as stored and decoded.
_WORKERS = 4
_FRESH = "Copy to another place, or delete what is there. Nothing was changed."


@dataclass(frozen=True)
class Copied:
    """What `copy` did.

    Attributes:
      location: where the copy is.
      shards: shards of the cache.
      present: of them, those that were there already.
      bytes: size of the array files that were copied.
    """

    location: str
    shards: int
    present: int
    bytes: int


def copy(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Copied:
    """Copies a finished cache; goes on where an earlier copy stopped. Safe to stop at any time.

    Args:
      source, destination: local paths or addresses, of the same kind or not.
      progress: called with (bytes that are there, bytes in all), from this thread.

    Raises:
      CacheError: the source is not finished, or something else is at the destination, which
        stays as it is.
      DamageError: shards of the source are damaged; the sound ones were copied.
      TakenOverError: another run began to write to the destination.
      StorageError: storage refused to read or write.
    """
    store, out = Store(source), Store(destination)
    check_apart(out.location, store.location, "which it would be a copy of")
    return _Copying(store, out).run(progress or (lambda done, total: None))


class _Copying:
    def __init__(self, source: Store, destination: Store):
        self._source, self._destination = source, destination
        data = source.read(MANIFEST)
        if data is None:
            # Says what is there instead.
            data = read_manifest(source)[0].to_bytes()
        self._data = data
        self._manifest = Manifest.from_bytes(data, source.location)
        if self._manifest.state != "complete":
            raise CacheError(
                f"the cache {source.location} is not finished. Run the command that began it "
                "again, then copy it."
            )
        self._specs = self._manifest.encoding.stored_arrays()
        self._files = self._tokenizer_files()
        self._stop = threading.Event()
        # What the destination's manifest is while this run copies.
        self._held = b""

    def run(self, progress: Callable[[int, int], None]) -> Copied:
        fresh = self._begin()
        there = self._destination.read_many(self._files)
        for (key, value), found in zip(self._files.items(), there, strict=True):
            if found != value:
                self._put(key, value)
        manifest = self._manifest
        create_arrays(self._destination, manifest.encoding, manifest.stored_rows)
        total, done, copied, present = sum(manifest.bytes.values()), 0, 0, 0
        damage: list[Damage] = []
        progress(0, total)
        pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="copy")
        try:
            shards = [pool.submit(self._shard, shard, fresh) for shard in range(manifest.shards)]
            for future in as_completed(shards):
                size, new, found = future.result()
                damage += found
                done += size
                copied += size if new else 0
                present += not new
                progress(done, total)
        finally:
            # An error or Ctrl-C: what is under way ends after the array it is at.
            self._stop.set()
            pool.shutdown(cancel_futures=True)
        if damage:
            raise DamageError(
                sorted(damage, key=lambda item: (item.shard or 0, item.array or "")),
                f"The sound shards of {self._source.location} were copied. Run `stillroom verify "
                f"{self._source.location} --full --repair` and the command that made it again, "
                "then copy again: it goes on with what is missing.",
            )
        self._finish()
        return Copied(self._destination.location, manifest.shards, present, copied)

    def _tokenizer_files(self) -> dict[str, bytes]:
        digests: dict[str, str] = self._manifest.tokenizer.get("files", {})
        keys = [f"{TOKENIZER}/{name}" for name in digests]
        found, damage = {}, []
        for name, data in zip(digests, self._source.read_many(keys), strict=True):
            if data is None or hashlib.sha256(data).hexdigest() != digests[name]:
                state = "is missing" if data is None else "was changed"
                damage.append(Damage(f"{TOKENIZER}/{name} {state}"))
            else:
                found[f"{TOKENIZER}/{name}"] = data
        if damage:
            raise DamageError(
                damage,
                "Restore it, or run the command that made the cache again; then copy again. "
                "Nothing was copied.",
            )
        return found

    def _begin(self) -> bool:
        """Makes the destination an open copy of the source. Returns whether nothing was there.

        Raises:
          CacheError: something else is there.
        """
        place = self._destination
        wanted = reopened(self._manifest, run=f"{COPY_RUN}{new_run()}").to_bytes()
        data, generation = place.read_versioned(MANIFEST)
        if data is None:
            if not place.lists:
                # The write says what such a place cannot do.
                place.create(MANIFEST, wanted)
            found = place.list()
            if found:
                raise CacheError(
                    f"{place.location} is not empty: it holds {', '.join(found[:3])}"
                    f"{', …' if len(found) > 3 else ''}. {_FRESH}"
                )
            taken = place.create(MANIFEST, wanted)
        elif data == self._data:
            # Finished; shards whose receipts were removed (verify --repair) are copied again.
            self._held = data
            return False
        else:
            self._check_same(Manifest.from_bytes(data, place.location))
            taken = place.replace(MANIFEST, wanted, generation)
        if not taken:
            raise CacheError(
                f"another run has just begun to fill {place.location}. Let it finish, then run "
                "this command again."
            )
        place.write(BACKUP, wanted)
        self._held = wanted
        return data is None

    def _check_same(self, found: Manifest) -> None:
        """Checks that an unfinished cache is an earlier copy of the source.

        Raises:
          CacheError: it is not.
        """
        wanted = reopened(self._manifest, run="x")
        if found.state == "open" and replace(found, run="x") == wanted:
            return
        known = len(found.receipts)
        if 0 < known < self._manifest.shards and self._manifest.receipts[:known] == found.receipts:
            raise CacheError(
                f"{self._destination.location} holds {found.rows:,} rows of "
                f"{self._source.location}, which has grown to {self._manifest.rows:,} since. A "
                f"copy does not change a finished cache. {_FRESH}"
            )
        state = "an unfinished cache" if found.state == "open" else "a finished cache"
        raise CacheError(
            f"{self._destination.location} holds {state} that is not {self._source.location}: "
            f"its teacher is {found.teacher.get('source', '?')}, its corpus "
            f"{found.corpus.get('description', '?')}. {_FRESH}"
        )

    def _shard(self, shard: int, fresh: bool) -> tuple[int, bool, list[Damage]]:
        """Copies one shard: bytes that are there now, whether they are new, what is damaged."""
        key = receipt_key(shard)
        if self._stop.is_set():
            return 0, False, []
        data = self._source.read(key)
        listed = self._manifest.receipts[shard]
        if data is None or hashlib.sha256(data).hexdigest() != listed.sha256:
            state = "is missing" if data is None else "is not the one the manifest lists"
            rows = self._manifest.shard_rows(shard)
            return 0, False, [Damage(f"{key} {state}", shard, None, rows, listed.documents)]
        receipt = Receipt.from_bytes(data, key)
        sizes = {
            array_chunk_key(name, len(spec.inner) + 1, shard): receipt.arrays[name].bytes
            for name, spec in self._specs.items()
        }
        size = sum(sizes.values())
        there = None if fresh else self._destination.read(key)
        if there == data and not self._destination.sizes_differ(sizes):
            return size, False, []
        if there is not None:
            # Until its files are whole again, the shard does not exist.
            self._destination.delete(key)
        damage = []
        for spec in self._specs.values():
            if self._stop.is_set():
                return 0, False, []
            damage += self._array(receipt, spec)
        if damage:
            return 0, False, damage
        self._check_held()
        if not self._destination.create(key, data) and self._destination.read(key) != data:
            raise self._otherwise(key)
        return size, True, []

    def _array(self, receipt: Receipt, spec: ArraySpec) -> Iterator[Damage]:
        """Copies the file of one array of one shard; yields what is wrong with the source's."""
        key = array_chunk_key(spec.name, len(spec.inner) + 1, receipt.shard)
        stored = receipt.arrays[spec.name]
        data = self._source.read(key)
        if data is None:
            yield damage_at(receipt, spec.name, f"{key} is missing")
            return
        if len(data) != stored.bytes:
            reason = f"{key} should be {stored.bytes} bytes long, is {len(data)}"
            yield damage_at(receipt, spec.name, reason)
            return
        metadata = spec.zarr(self._manifest.stored_rows, self._manifest.encoding.rows_per_shard)
        # The arrays' metadata ends with the last extent; a shard may end before its rows do.
        metadata["shape"][0] = receipt.rows[1]
        try:
            values = decode_chunk(metadata, receipt.shard, data)
        except ValueError as error:
            yield damage_at(receipt, spec.name, str(error))
            return
        if data_digest(values) != stored.sha256:
            yield damage_at(receipt, spec.name, "the data is not what the receipt's digest says")
            return
        self._put(key, data)

    def _put(self, key: str, data: bytes) -> None:
        """Writes an object and reads it back.

        Raises:
          CacheError: another object is there.
        """
        self._destination.write(key, data)
        if self._destination.read(key) != data:
            raise self._otherwise(key)

    def _otherwise(self, key: str) -> CacheError:
        return CacheError(
            f"{self._destination.location}/{key} is not what was written. Another run writes "
            "there, or the storage is faulty. Run the same command again."
        )

    def _check_held(self) -> None:
        """Checks that the destination is still this run's.

        Raises:
          TakenOverError: it is not.
        """
        if self._destination.read(MANIFEST) != self._held:
            raise TakenOverError(
                f"another run began to write to {self._destination.location}. Nothing is lost; let "
                "one of them finish."
            )

    def _finish(self) -> None:
        place = self._destination
        data, generation = place.read_versioned(MANIFEST)
        if data != self._held or (
            data != self._data and not place.replace(MANIFEST, self._data, generation)
        ):
            self._held = b""
            self._check_held()
        if place.read(BACKUP) != self._data:
            place.write(BACKUP, self._data)
