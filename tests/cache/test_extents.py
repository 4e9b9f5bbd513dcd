"""Extents: how rows of a cache that grew map to shards and to places on the arrays' row axis."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import CacheError
from cache.manifest import Extent, Manifest
from cache.reader import Cache
from tests.cache.builder import Built


def with_extents(manifest: Manifest, *rows: int) -> Manifest:
    assert manifest.statistics is not None
    extents, shard = [], 0
    for count in rows:
        shards = manifest.encoding.shards(count)
        corpus = {"digest": f"digest-{shard}", "documents": 5} if shard else None
        extents.append(Extent(shard, shards, count, corpus, {"documents": 5} if shard else None))
        shard += shards
    return replace(
        manifest,
        extents=tuple(extents),
        receipts=tuple(manifest.receipts[0] for _ in range(shard)),
        statistics=replace(manifest.statistics, rows=sum(rows)),
    )


def test_extents(exact_cache: Built) -> None:
    """A partly filled last shard stays as it is when a later capture adds shards."""
    manifest = with_extents(exact_cache.manifest, 10, 4, 1)
    assert (manifest.rows, manifest.shards, manifest.stored_rows) == (15, 5, 17)
    spans = [manifest.shard_rows(shard) for shard in range(5)]
    assert spans == [(0, 4), (4, 8), (8, 10), (12, 16), (16, 17)]
    assert Manifest.from_bytes(manifest.to_bytes(), "here") == manifest
    for shard in (-1, 5):
        with pytest.raises(CacheError, match=f"the cache has shards 0 to 4, not {shard}"):
            manifest.shard_rows(shard)
    assert [manifest.extent_at(shard) for shard in range(5)] == [0, 0, 0, 1, 2]


def test_every_extent_is_of_a_corpus_of_its_own(exact_cache: Built) -> None:
    manifest = with_extents(exact_cache.manifest, 10, 4, 1)
    own = manifest.corpus["documents"]
    assert manifest.documents == own + 10
    assert manifest.identity == exact_cache.manifest.identity
    identities = manifest.identities()
    assert identities == [
        manifest.identity,
        *(replace(manifest, corpus={"digest": f"digest-{shard}"}).identity for shard in (3, 4)),
    ]
    assert len(set(identities)) == 3
    for corpus in (None, {}, {"digest": "d"}, {"documents": 3}, {"digest": 1, "documents": 3}):
        extents = (*manifest.extents[:2], replace(manifest.extents[2], corpus=corpus))
        with pytest.raises(CacheError, match="an appended extent should have a corpus of its own"):
            replace(manifest, extents=extents)


@settings(max_examples=80, deadline=None)
@given(rows=st.lists(st.integers(1, 13), min_size=1, max_size=6), data=st.data())
def test_any_extents(rows: list[int], data: st.DataObject, exact_cache: Built) -> None:
    """Every row has one place, in the order of the shards, and no shard holds two extents'."""
    manifest = with_extents(exact_cache.manifest, *rows)
    assert Manifest.from_bytes(manifest.to_bytes(), "here") == manifest
    spans = [manifest.shard_rows(shard) for shard in range(manifest.shards)]
    places = [place for span in spans for place in range(*span)]
    owners = [extent for extent, count in enumerate(rows) for _ in range(count)]
    per_shard = manifest.encoding.rows_per_shard
    opened = Cache(exact_cache.store, manifest)
    assert len(opened) == manifest.rows == sum(rows) == len(places)
    assert opened.stored_rows(slice(None)).tolist() == places == sorted(set(places))
    assert manifest.stored_rows == places[-1] + 1
    assert [manifest.extent_at(place // per_shard) for place in places] == owners
    for shard, (first, end) in enumerate(spans):
        assert (first, first // per_shard) == (shard * per_shard, (end - 1) // per_shard)
    picked = data.draw(st.lists(st.integers(0, sum(rows) - 1), max_size=9))
    assert opened.stored_rows(picked).tolist() == [places[row] for row in picked]
    for outside in (-1, sum(rows)):
        with pytest.raises(CacheError, match=f"the cache has rows 0 to {sum(rows) - 1}, not "):
            opened.stored_rows(np.array([0, outside]))
