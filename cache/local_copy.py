"""A local copy of what is read of a remote cache: whole shard files, fetched when first touched.

The folder may serve several caches, processes and threads at once: each cache has a folder of its
own there, named by its manifest's digest, with the same keys as the cache. Files are put there
whole, by one rename, and are never removed; one that is damaged is replaced. There is no limit:
the folder grows up to the size of the arrays that are read.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cache.errors import CacheError
from cache.manifest import Manifest
from cache.places import check_apart
from cache.shards import array_chunk_key
from cache.storage import Store

# Files that are fetched at a time, each of them whole in memory.
_FILES = 16


class LocalCopy:
    """The local copy of one cache. Safe to pickle and to use from threads.

    Attributes:
      store: the folder, with the keys of the cache.
    """

    def __init__(self, source: Store, folder: str | os.PathLike[str], manifest: Manifest):
        """Prepares the copy; nothing is fetched yet.

        Args:
          source: the cache.
          folder: a local folder for this and other caches; made when needed.
          manifest: the cache's.

        Raises:
          CacheError: the folder is not local, or a file; or it is the cache, inside or around it.
        """
        place = Store(folder)
        if place.local is None:
            raise CacheError(f"the local copy should be in a local folder, found {place.location}.")
        for path in (place.local, *place.local.parents):
            if path.exists():
                if not path.is_dir():
                    raise CacheError(f"{path} is a file; --local-copy needs a folder.")
                break
        check_apart(place.location, source.location, "which --local-copy would copy", around=True)
        digest = hashlib.sha256(manifest.to_bytes()).hexdigest()[:16]
        ranks = {
            name: len(spec.inner) + 1 for name, spec in manifest.encoding.stored_arrays().items()
        }
        self._setup(source, Store(place.local / digest), ranks)

    def _setup(self, source: Store, store: Store, ranks: dict[str, int]) -> None:
        self._source, self.store, self._ranks = source, store, ranks
        self._lock = threading.Lock()
        # Shards whose files are known to be there, by array.
        self._here: dict[str, set[int]] = {name: set() for name in ranks}

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self._source, "store": self.store, "ranks": self._ranks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._setup(**state)

    def fetch(self, names: Iterable[str], shards: Sequence[int]) -> list[tuple[str, int]]:
        """Fetches the files of some shards of some arrays that are not there yet.

        Returns:
          Array and shard of the files that the cache does not have.

        Raises:
          StorageError: the cache cannot be read, or the folder not written.
        """
        wanted = [(name, shard) for name in names for shard in shards]
        wanted = [(name, shard) for name, shard in wanted if shard not in self._here[name]]
        return self._get(wanted, self._is_here) if wanted else []

    def renew(self, files: Iterable[tuple[str, int]]) -> None:
        """Fetches files (array, shard) again, over those that are there."""
        self._get(list(files), lambda key: False)

    def _get(
        self, files: list[tuple[str, int]], skip: Callable[[str], bool]
    ) -> list[tuple[str, int]]:
        missing = []
        with self._lock:
            keys = {
                array_chunk_key(name, self._ranks[name], shard): (name, shard)
                for name, shard in files
            }
            absent = [key for key in keys if not skip(key)]
            for start in range(0, len(absent), _FILES):
                batch = absent[start : start + _FILES]
                for key, data in zip(batch, self._source.read_many(batch), strict=True):
                    if data is None:
                        missing.append(keys.pop(key))
                    else:
                        self.store.write(key, data)
            for name, shard in keys.values():
                self._here[name].add(shard)
        return missing

    def _is_here(self, key: str) -> bool:
        assert self.store.local is not None
        return (self.store.local / key).exists()
