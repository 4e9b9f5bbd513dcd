"""The one place that reads and writes storage: a folder on anything TensorStore reaches.

Every write in the project, arrays included, is one `Store.write`, `Store.create`
or `Store.replace` of one object, and each is atomic: a reader sees the old object
or the new one, never a part of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import tensorstore as ts

from cache import remote
from cache.errors import CacheError

# What TensorStore says a key's generation is while the key does not exist.
_ABSENT = b"\x02"
# How TensorStore fails; the second where a place cannot do a thing (http://: write, list).
_FAILURES = (ValueError, NotImplementedError)
# The cached shard indices of the arrays a process reads; 8 MiB hold thousands.
_POOL_BYTES = 8 * 2**20
# Seconds within which object storage has to answer a first time.
_PATIENCE = 40.0
# Errors that say nothing of what is stored: it could not be asked, or did not let us.
_UNASKED = ("ABORTED", "DEADLINE_EXCEEDED", "INTERNAL", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED")
_UNASKED += ("UNAUTHENTICATED", "UNAVAILABLE", "UNKNOWN")

# What to do next, by the prefix of TensorStore's error.
_ADVICE = {
    "RESOURCE_EXHAUSTED": "Free some space there, then run the same command again: what is "
    "stored stays.",
    "PERMISSION_DENIED": "Get permission for that place, or choose another one.",
    "FAILED_PRECONDITION": "Choose another place.",
    "NOT_FOUND": "Choose another place.",
}
_OTHER_ADVICE = "Check the place and the connection, then run the same command again."


class StorageError(CacheError):
    """Storage refused an operation: no permission, disk full, connection lost."""


class Store:
    """A folder that holds objects by key ("receipts/000000.json"). Safe to use from threads.

    Args:
      location: a local path, or an address (s3://bucket/path, gs://bucket/path, and to read only
        http://host/path and https://; see remote.py).
    """

    def __init__(self, location: str | os.PathLike[str]):
        self.location = os.fspath(location).rstrip("/") or "/"
        # Absolute from the start: a process may change its folder, or open us elsewhere.
        self._local = None if remote.is_remote(self.location) else _absolute(self.location)
        self._kvstore: Any = None
        self._context = ts.Context(self._resources())
        # Whether there has been an answer, and whether it was an object: the bucket exists.
        self._answered = self._local is not None
        self._found = self._local is not None

    def __getstate__(self) -> dict[str, Any]:
        return {"location": self.location, "local": self._local}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["location"])
        self._local = state["local"]

    def __repr__(self) -> str:
        return f"Store({self.location!r})"

    @property
    def local(self) -> Path | None:
        """The folder as a local path, or None for object storage."""
        return self._local

    def _resources(self) -> dict[str, Any]:
        pool = {"cache_pool": {"total_bytes_limit": _POOL_BYTES}}
        return pool if self._local is not None else {**pool, **remote.resources()}

    def specification(self, folder: str = "") -> dict[str, Any] | str:
        """TensorStore's key-value specification of this folder, or of one inside it."""
        suffix = f"{folder.strip('/')}/" if folder else ""
        try:
            # TensorStore takes UTF-8, whatever this process takes paths to be.
            path = os.fsencode(str(self.local or self.location)).decode()
        except UnicodeDecodeError as error:
            raise CacheError(
                f"cannot open {self.location!r} as a place to store a cache: its name is not "
                "UTF-8. Rename the folder."
            ) from error
        if self.local is None:
            return remote.specification(path, suffix)
        return {"driver": "file", "path": f"{path}/{suffix}"}

    @property
    def lists(self) -> bool:
        """Whether objects can be listed there, and written; on a web server they cannot."""
        return not self.location.startswith(("http://", "https://"))

    @property
    def kvstore(self) -> Any:
        if self._kvstore is None:
            specification = self.specification()
            try:
                self._kvstore = ts.KvStore.open(specification, context=self._context).result()
            except ValueError as error:
                raise CacheError(
                    f"cannot open {self.location} as a place to store a cache: {error}. "
                    "Give a local path, or a gs:// or s3:// address."
                ) from error
        return self._kvstore

    def read(self, key: str) -> bytes | None:
        """The object's bytes, or None if there is none."""
        return self.read_versioned(key)[0]

    def read_versioned(self, key: str) -> tuple[bytes | None, bytes]:
        """The object's bytes (None if absent) and the generation `replace` compares with."""
        result = self._answer("read", key, self.kvstore.read(key))
        return self._value(key, result), result.stamp.generation

    def read_many(self, keys: Iterable[str]) -> list[bytes | None]:
        """Several objects at once."""
        keys = list(keys)
        futures = [self.kvstore.read(key) for key in keys]
        return [
            self._value(key, self._answer("read", key, future))
            for key, future in zip(keys, futures, strict=True)
        ]

    def _answer(self, verb: str, key: str, future: Any) -> Any:
        """What a read or a listing gives; without any answer for long, an error."""
        try:
            if self._answered:
                return future.result()
            try:
                result = future.result(timeout=_PATIENCE)
            except TimeoutError:
                raise ValueError(f"DEADLINE_EXCEEDED: no answer in {_PATIENCE:.0f} s") from None
        except _FAILURES as error:
            raise self.refused(verb, key, error) from error
        self._answered = True
        return result

    def _value(self, key: str, result: Any) -> bytes | None:
        """An object's bytes, or None where there is no object, but a bucket."""
        if result.state == "value":
            self._found = True
            return result.value
        if not self._found and self.lists:
            # A read in a bucket that does not exist finds nothing too; a listing is refused.
            place = ts.KvStore.KeyRange(key, f"{key}\0")
            try:
                self.kvstore.list(place).result()
            except ValueError as error:
                # Who may read only is refused as well, and knows that there is a bucket.
                if str(error).startswith("NOT_FOUND"):
                    raise self.refused("read", key, error) from error
            self._found = True
        return None

    def write(self, key: str, value: bytes) -> None:
        """Writes one object, replacing what was there."""
        try:
            self.kvstore.write(key, value).result()
        except _FAILURES as error:
            raise self.refused("write", key, error) from error

    def create(self, key: str, value: bytes) -> bool:
        """Writes one object if there is none; False if there was one already.

        See `replace`.
        """
        return self.replace(key, value, _ABSENT)

    def replace(self, key: str, value: bytes, generation: bytes) -> bool:
        """Writes one object if its generation is still the given one; False if it is not.

        Of several that try, one gets True; those that should be told apart write different
        values (a run's id). On object storage whoever finds there what it wrote has written it.
        """
        try:
            stamp = self.kvstore.write(key, value, if_equal=generation).result()
        except _FAILURES as error:
            raise self.refused("write", key, error) from error
        if stamp.generation != b"":
            return True
        # A request whose answer was lost is sent again, and then finds its own object there.
        return self.local is None and self.read(key) == value

    def delete(self, key: str) -> None:
        """Removes one object, or what a killed write left of it, if it is there."""
        if self.local is not None and _unfinished(key):
            # No key for TensorStore.
            try:
                (self.local / key).unlink(missing_ok=True)
            except OSError as error:
                raise StorageError(f"cannot delete {self.location}/{key}: {error}") from error
            return
        try:
            self.kvstore.write(key, None).result()
        except _FAILURES as error:
            raise self.refused("delete", key, error) from error

    def delete_folder(self, folder: str) -> None:
        """Removes every object under a folder."""
        prefix = f"{folder.strip('/')}/"
        try:
            self.kvstore.delete_range(_under(prefix)).result()
        except _FAILURES as error:
            raise self.refused("delete", prefix, error) from error
        if self.local is not None:
            _remove_empty_folders(self.local / folder.strip("/").split("/")[0])

    def list(self, folder: str = "") -> list[str]:
        """Keys under a folder, sorted, relative to the folder."""
        prefix = f"{folder.strip('/')}/" if folder else ""
        try:
            future = self.kvstore.list(_under(prefix), strip_prefix_length=len(prefix))
        except _FAILURES as error:
            raise self.refused("list", prefix, error) from error
        keys = self._answer("list", prefix, future)
        return sorted(name for key in keys if not _unfinished(name := key.decode()))

    def unfinished_writes(self) -> list[str]:
        """Keys of what killed writes left behind, sorted; of arrays and all else."""
        if self.local is not None:
            # TensorStore lists all files but these.
            found = (
                Path(folder, name) for folder, _, names in os.walk(self.local) for name in names
            )
            return sorted(
                path.relative_to(self.local).as_posix() for path in found if _unfinished(path.name)
            )
        try:
            keys = [key.decode() for key in self.kvstore.list().result()]
        except _FAILURES as error:
            raise self.refused("list", "", error) from error
        return sorted(key for key in keys if _unfinished(key))

    def sizes_differ(self, sizes: dict[str, int]) -> dict[str, str]:
        """Which objects are absent or do not have the given size in bytes, and how.

        One small read an object: the last byte at the given size, and nothing after it.
        """
        futures = {
            key: self.kvstore.read(key, byte_range=slice(max(size - 1, 0), None))
            for key, size in sizes.items()
        }
        found = {}
        for key, future in futures.items():
            try:
                result = future.result()
            except _FAILURES as error:
                if "OUT_OF_RANGE" not in str(error):
                    raise self.refused("read", key, error) from error
                found[key] = f"should be {sizes[key]} bytes long, is shorter"
                continue
            excess = len(result.value) - min(sizes[key], 1)
            if result.state != "value":
                found[key] = "is missing"
            elif excess:
                state = "longer" if excess > 0 else "shorter"
                found[key] = f"should be {sizes[key]} bytes long, is {state}"
        return found

    def refused(self, verb: str, key: str, error: Exception) -> CacheError:
        """The error to raise where TensorStore failed: what could not be done, what to do."""
        if isinstance(error, CacheError):
            return error
        reason = str(error)
        if isinstance(error, NotImplementedError) and not self.lists:
            advice = "An http:// address can only be read. Give a local path, s3:// or gs://."
        elif self.local is None:
            reason, advice = remote.explain(self.location, reason)
        else:
            found = [advice for prefix, advice in _ADVICE.items() if reason.startswith(prefix)]
            advice = found[0] if found else _OTHER_ADVICE
        return StorageError(f"cannot {verb} {self.location}/{key}: {reason}. {advice}")

    def failed_to_read(self, key: str, error: Exception) -> StorageError | None:
        """The error to raise where data could not be read and nothing is known of it.

        None if the error is about the data (missing, damaged).
        """
        if self.local is None and str(error).startswith(_UNASKED):
            return StorageError(str(self.refused("read", key, error)))
        return None

    def open_array(self, folder: str, metadata: dict[str, Any] | None = None) -> Any:
        """Opens the Zarr v3 array in a folder such that a missing chunk is an error.

        Args:
          folder: the array's folder.
          metadata: the array's zarr.json, if known, which saves reading it.
        """
        specification: dict[str, Any] = {
            "driver": "zarr3",
            "kvstore": self.specification(folder),
            "fill_missing_data_reads": False,
            "store_data_equal_to_fill_value": True,
            "recheck_cached_data": "open",
        }
        options: dict[str, Any] = {"open": True}
        if metadata is not None:
            specification["metadata"] = metadata
            options["assume_metadata"] = True
        return ts.open(specification, context=self._context, **options).result()


def encode_chunk(metadata: dict[str, Any], index: int, values: Any) -> bytes:
    """The bytes of one outer chunk of a Zarr v3 array, as TensorStore would store it.

    The chunk is encoded in memory, so that the caller stores it as one object of a
    known size.

    Args:
      metadata: the array's zarr.json.
      index: the chunk's index along the first axis; it covers the other axes whole.
      values: the chunk's values, cut where the array ends.
    """
    array, store = _in_memory(metadata)
    first = index * metadata["chunk_grid"]["configuration"]["chunk_shape"][0]
    array[first : first + len(values)].write(values).result()
    return store.read(chunk_key(index, len(metadata["shape"]))).result().value


def decode_chunk(metadata: dict[str, Any], index: int, data: bytes) -> Any:
    """The values that `encode_chunk` was given.

    Raises:
      ValueError: the bytes are damaged.
    """
    array, store = _in_memory(metadata)
    store.write(chunk_key(index, len(metadata["shape"])), data).result()
    rows = metadata["chunk_grid"]["configuration"]["chunk_shape"][0]
    return array[index * rows : min((index + 1) * rows, metadata["shape"][0])].read().result()


def _in_memory(metadata: dict[str, Any]) -> tuple[Any, Any]:
    """A Zarr v3 array without chunks, in memory of its own, and the store of its chunks."""
    context = ts.Context()
    place = {"driver": "memory", "path": "chunk/"}
    specification = {
        "driver": "zarr3",
        "kvstore": place,
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
        "metadata": metadata,
    }
    array = ts.open(specification, context=context, create=True).result()
    return array, ts.KvStore.open(place, context=context).result()


def chunk_key(index: int, rank: int) -> str:
    """The key of an outer chunk that is cut along the first axis only: c.<index>.0.0"""
    return f"c.{index}" + ".0" * (rank - 1)


def _absolute(location: str) -> Path:
    """A local place from the root on; TensorStore takes no path with ".."."""
    path = Path(location)
    # What ".." means after a link is not seen in the path's text.
    return path.resolve() if ".." in path.parts else path.absolute()


def _unfinished(key: str) -> bool:
    """Whether a key is of TensorStore's own unfinished writes: <key>.__lock, temporaries of it."""
    return "__lock" in key


def _under(prefix: str) -> Any:
    # The end of the range is the prefix with its final "/" replaced by the next
    # character, "0".
    return ts.KvStore.KeyRange(prefix, prefix[:-1] + "0" if prefix else "")


def _remove_empty_folders(folder: Path) -> None:
    for path, _, _ in os.walk(folder, topdown=False):
        if not os.listdir(path):
            # Where another process has put an object meanwhile, the folder stays.
            with suppress(OSError):
                os.rmdir(path)


def place_of(location: str) -> str:
    """A location in the form in which places can be compared: an absolute path, or an address."""
    location = location.removeprefix("file://")
    local = Store(location).local
    return location.rstrip("/") if local is None else str(Path(local).resolve())
