"""Filling a cache with shards: who may write. How the work ends is in finishing.py.

A cache is filled in one of three ways: its first capture, which begins with an open manifest;
more shards behind those of a finished cache (append); and shards of a finished cache made again
where their receipts are missing (after `verify --repair`). The last two leave the complete
manifest as it is, so that readers go on reading, and keep the open manifest of their work in an
object of its own. Either way the open manifest names a run, and only that run may commit.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from cache.errors import CacheError, listed
from cache.format import BACKUP, MANIFEST, WORK
from cache.manifest import Manifest, read_manifest
from cache.shards import finished_shards
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
    if found.command == "copy":
        raise error(
            f"{store.location} holds a copy of a cache that is not finished. Run the same "
            "`stillroom copy` again, or choose another place. Nothing was changed."
        )
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
    corpora = manifest.corpora
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


def missing_shards(store: Store, manifest: Manifest, extent: int | None = None) -> list[int]:
    """Shards of a finished cache that have no receipt; of one extent, if given."""
    extents = manifest.extents if extent is None else manifest.extents[extent : extent + 1]
    have = finished_shards(store)
    return [shard for each in extents for shard in each.numbers if shard not in have]


def unfinished(store: Store, manifest: Manifest, extent: int) -> bool:
    """Whether shards of an extent are to be made again, or such work is to be ended.

    Raises:
      CacheError: what describes work under way cannot be read.
    """
    if missing_shards(store, manifest, extent):
        return True
    work = work_under_way(store)
    return work is not None and work.first_shard == manifest.extents[extent].first_shard


def makers(manifest: Manifest, shards: Iterable[int]) -> list[str]:
    """Which commands make shards of a finished cache again, a sentence for each extent."""
    by_extent: dict[int, list[int]] = {}
    for shard in sorted(shards):
        by_extent.setdefault(manifest.extent_at(shard), []).append(shard)
    lines = []
    for extent, made in by_extent.items():
        corpus = manifest.corpora[extent] if manifest.extents else manifest.corpus
        documents = corpus.get("description") or f"the documents of extent {extent}"
        command = f"`stillroom {'append' if extent else manifest.command}` of {documents}"
        lines.append(f"{command} makes shards {listed(made)}")
    return lines


def work_under_way(store: Store) -> Manifest | None:
    """The open manifest of unfinished work on a finished cache; None if there is none.

    Raises:
      CacheError: it cannot be read.
    """
    data = store.read(WORK)
    return None if data is None else Manifest.from_bytes(data, store.location, WORK)


def describe_work(store: Store, work: Manifest, complete: Manifest) -> dict[str, Any]:
    """What unfinished work on a finished cache does: "command", "documents", "shards_done"."""
    # Work that is no extent's adds one, behind all others.
    shards = {each.first_shard: each.numbers for each in complete.extents}.get(work.first_shard)
    done = [
        shard
        for shard in finished_shards(store)
        if (shard >= work.first_shard if shards is None else shard in shards)
    ]
    return {
        "command": work.command,
        "documents": work.corpus.get("description"),
        "again": shards is not None,
        "shards_done": len(done),
    }


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
            f"other work on {store.location} is not finished: `stillroom {found.command}` of "
            f"{found.corpus.get('description')}. It differs from yours:\n{listed}\nRun that "
            f"command again, or delete {store.location}/{WORK} to give it up. Nothing was changed."
        )
    taken_over = replace(found, run=wanted.run, software=wanted.software)
    if not store.replace(WORK, taken_over.to_bytes(), generation):
        raise CacheError(
            f"another run has just begun to add to {store.location}. Let it finish, then run this "
            "command again."
        )
    return taken_over
