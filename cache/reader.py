"""Reading a finished cache: `open`, rows, weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Integer
from tokenizers import Tokenizer

from cache import encoding as _encoding
from cache.errors import CacheError, Damage, DamageError
from cache.finishing import before_growth
from cache.format import ARRAYS, RECEIPTS, SEALS, TOKENIZER, ArraySpec, Encoding
from cache.local_copy import LocalCopy
from cache.manifest import Manifest, read_manifest
from cache.seals import broken_seals
from cache.storage import StorageError, Store


def repair(location: str) -> str:
    """What to do about a damaged cache."""
    return (
        f"Run `stillroom verify {location} --full --repair`, then the command that made it "
        "(precompute, derive, copy or append) again: it redoes exactly what is broken."
    )


def open(
    location: str | os.PathLike[str], *, local_copy: str | os.PathLike[str] | None = None
) -> Cache:
    """Opens a finished cache for reading. Reads one object, the manifest.

    Args:
      location: a local path, or a gs://, s3:// or http:// address.
      local_copy: a local folder for whole files of shards, fetched when first touched and read
        there from then on (local_copy.py). Several caches and processes may share it.

    Raises:
      CacheError: there is no cache, it is of a newer version, or its capture is not finished.
    """
    store = Store(location)
    manifest, _ = read_manifest(store)
    if manifest.state != "complete":
        done = len(store.list(RECEIPTS)) if store.lists else "some"
        raise CacheError(
            f"the capture into {store.location} is not finished ({done} shards done). "
            f"Run the same `stillroom {manifest.command}` again: it goes on where it stopped."
        )
    copy = None if local_copy is None else LocalCopy(store, local_copy, manifest)
    return Cache(store, manifest, copy)


class Cache:
    """A finished cache. Made by `cache.open`; safe to pickle and to use from threads.

    `len(cache)` is the number of rows. Rows are numbered 0 … len - 1.

    Attributes:
      manifest: what the cache is.
    """

    def __init__(self, store: Store, manifest: Manifest, copy: LocalCopy | None = None):
        self._store = store
        self._copy = copy
        self.manifest = manifest
        self._encoding = manifest.as_read.encoding
        self._specs = self._encoding.arrays()
        self._identities = manifest.identities()
        # Opened arrays, by place and name.
        self._arrays: dict[tuple[str, str], Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self._store, "manifest": self.manifest, "copy": self._copy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["store"], state["manifest"], state["copy"])

    def __len__(self) -> int:
        return self.manifest.rows

    def __repr__(self) -> str:
        settings = self.encoding
        exact = "exact" if settings.tail == "none" else "sampled tail"
        temperatures = ", ".join(f"{value:g}" for value in settings.temperatures)
        statistics = self.manifest.statistics
        labels = statistics.labels if statistics else 0
        return (
            f"<Cache {self._store.location}: {len(self):,} rows of {settings.length}, "
            f"{labels:,} labels, k = {settings.k} ({exact}), temperature {temperatures}, "
            f"{settings.vocabulary:,} tokens, teacher {self.manifest.teacher.get('source', '?')}>"
        )

    @property
    def location(self) -> str:
        return self._store.location

    @property
    def encoding(self) -> Encoding:
        """What the cache holds: `Manifest.as_read`'s."""
        return self._encoding

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return tuple(self._specs)

    def before(self, extents: int) -> Cache:
        """The cache as it was when it had only its first so many extents, before it grew.

        Raises:
          CacheError: a receipt of theirs is missing.
        """
        earlier = before_growth(self._store, self.manifest, extents)
        return Cache(self._store, earlier, self._copy)

    def rows(
        self,
        indices: Sequence[int] | Integer[np.ndarray, "batch"] | slice,
        fields: Iterable[str] | None = None,
    ) -> dict[str, np.ndarray]:
        """Rows of the cache, in the order asked for, in one batched read per array.

        Args:
          indices: row numbers, 0 … len - 1, in any order, repeats allowed; or a slice.
          fields: names of arrays, or one name; all of them if None.

        Returns:
          Per array a numpy array [batch, position, ...] of the stored type. Positions without
          a label (`label_mask` = 0) hold NaN, an illegal id or the largest count.

        Raises:
          CacheError: a row or field that does not exist.
          DamageError: data is missing or damaged, or is of other rows or of another cache; names
            shards, rows and documents.
        """
        stored = self.stored_rows(indices)
        if isinstance(fields, str):
            fields = (fields,)
        names = self.fields if fields is None else tuple(fields)
        for name in names:
            if name not in self._specs:
                raise CacheError(f"no field {name!r}; the cache has {', '.join(self._specs)}")
        if self.encoding.sealed and names:
            names = (*names, SEALS)
        if self._copy is None:
            return self._read(self._store, names, stored)
        try:
            self._fetch(self._copy, names, stored)
            return self._read(self._copy.store, names, stored)
        except DamageError as error:
            # Of the copy, or of the cache itself, which is read now and says so.
            self._copy.renew(
                (item.array, item.shard)
                for item in error.damage
                if item.array is not None and item.shard is not None
            )
            # What is open remembers what it has read.
            self._arrays = {}
            return self._read(self._store, names, stored)

    def _read(
        self, store: Store, names: Sequence[str], stored: Integer[np.ndarray, "batch"]
    ) -> dict[str, np.ndarray]:
        futures = [(name, self._array(store, name)[stored].read()) for name in names]
        values = {}
        for name, future in futures:
            try:
                values[name] = future.result()
            except ValueError as error:
                raise self._damage(store, name, stored, error) from error
        if SEALS in values:
            self._check_seals(values, stored)
            del values[SEALS]
        return values

    def _fetch(
        self, copy: LocalCopy, names: Sequence[str], stored: Integer[np.ndarray, "batch"]
    ) -> None:
        """Fetches the files that some rows are in, where they are not there yet.

        Raises:
          DamageError: the cache does not have them.
        """
        shards = np.unique(stored // self.encoding.rows_per_shard).tolist()
        missing = copy.fetch(names, shards)
        if missing:
            found = [
                self._damage_in(shard, name, f"{ARRAYS}/{name} has no file of this shard")
                for name, shard in missing
            ]
            raise DamageError(found, repair(self.location))

    def weights(
        self, arrays: dict[str, np.ndarray], temperature: float | None = None
    ) -> Float32[np.ndarray, "*rows k"]:
        """The weight of each entry in the teacher's distribution; see `encoding.weights`.

        Args:
          arrays: what `rows` returned (all fields, or those that `encoding.weights` names).
          temperature: a captured temperature; the first one if None.
        """
        if temperature is None:
            temperature = self.encoding.temperatures[0]
        return _encoding.weights(arrays, self.encoding, temperature)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the teacher, as stored in the cache.

        Raises:
          DamageError: it is missing, or is not the one that was stored.
        """
        data = self._tokenizer_files(["tokenizer.json"])["tokenizer.json"]
        return Tokenizer.from_str(data.decode())

    def tokenizer_files(self) -> dict[str, bytes]:
        """Every file of the teacher's tokenizer, its settings and template included, by name.

        Raises:
          DamageError: a file is missing, or is not what was stored.
        """
        files = self.manifest.tokenizer.get("files", {})
        return self._tokenizer_files(sorted({"tokenizer.json", *files}))

    def _tokenizer_files(self, names: Sequence[str]) -> dict[str, bytes]:
        digests = self.manifest.tokenizer.get("files", {})
        keys = [f"{TOKENIZER}/{name}" for name in names]
        files, damage = {}, []
        for name, key, data in zip(names, keys, self._store.read_many(keys), strict=True):
            if data is None or hashlib.sha256(data).hexdigest() != digests.get(name):
                damage.append(Damage(f"{key} {'is missing' if data is None else 'was changed'}"))
            else:
                files[name] = data
        if damage:
            raise DamageError(damage, repair(self.location))
        return files

    def stored_rows(
        self, indices: Sequence[int] | Integer[np.ndarray, "batch"] | slice
    ) -> Integer[np.ndarray, "batch"]:
        """Positions of rows on the arrays' row axis.

        Raises:
          CacheError: a row that does not exist.
        """
        if isinstance(indices, slice):
            indices = np.arange(len(self))[indices]
        rows = np.asarray(indices)
        if rows.size == 0:
            rows = rows.astype(np.int64)
        if rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer):
            raise CacheError(
                f"row numbers should be a list of integers, found {rows.dtype}{list(rows.shape)}"
            )
        rows = rows.astype(np.int64)
        wrong = rows[(rows < 0) | (rows >= len(self))]
        if wrong.size:
            raise CacheError(f"the cache has rows 0 to {len(self) - 1}, not {wrong[0]}")
        extents = self.manifest.extents
        if len(extents) == 1:
            return rows
        ends = np.cumsum([extent.rows for extent in extents])
        index = np.searchsorted(ends, rows, side="right")
        starts = ends - [extent.rows for extent in extents]
        firsts = np.array([extent.first_shard for extent in extents])
        return rows - starts[index] + firsts[index] * self.encoding.rows_per_shard

    def _array(self, store: Store, name: str) -> Any:
        key = (store.location, name)
        array = self._arrays.get(key)
        if array is None:
            spec: ArraySpec = self.encoding.stored_arrays()[name]
            metadata = spec.zarr(self.manifest.stored_rows, self.encoding.rows_per_shard)
            array = self._arrays[key] = store.open_array(f"{ARRAYS}/{name}", metadata)
        return array

    def _check_seals(
        self, values: dict[str, np.ndarray], stored: Integer[np.ndarray, "batch"]
    ) -> None:
        """Checks that rows are those asked for, of this cache.

        Raises:
          DamageError: they are not.
        """
        shards = stored // self.encoding.rows_per_shard
        identities = self._identities
        if len(identities) > 1:
            identities = [identities[self.manifest.extent_at(shard)] for shard in shards.tolist()]
        broken = broken_seals(values, self.encoding, identities, stored)
        found = [
            self._damage_in(shard, name, "the file is of another shard or of another cache")
            for name, places in broken.items()
            for shard in np.unique(shards[places]).tolist()
        ]
        if found:
            raise DamageError(found, repair(self.location))

    def _damage_in(self, shard: int, name: str, reason: str) -> Damage:
        return Damage(
            reason,
            shard=shard,
            array=name,
            rows=self.manifest.shard_rows(shard),
            documents=self.manifest.receipts[shard].documents,
        )

    def _damage(
        self, store: Store, name: str, stored: Integer[np.ndarray, "batch"], error: ValueError
    ) -> CacheError:
        """Finds which of the shards that a failed read touched are broken."""
        key = f"{ARRAYS}/{name}"
        failed = store.failed_to_read(key, error)
        if failed is not None:
            return failed
        array = self._array(store, name)
        per_shard = self.encoding.rows_per_shard
        found = []
        for shard in np.unique(stored // per_shard).tolist():
            inside = stored[stored // per_shard == shard]
            try:
                array[inside].read().result()
            except ValueError as reason:
                failed = store.failed_to_read(key, reason)
                if failed is not None:
                    return failed
                found.append(self._damage_in(shard, name, str(reason)))
        if not found:
            return StorageError(f"reading {name} from {self.location} failed once: {error}")
        return DamageError(found, repair(self.location))
