"""What a derivation that is asked for again says where it is another one: names, no JSON."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cache
from cache.derive_differences import differences
from cache.errors import CacheError
from cache.manifest import Manifest
from cache.options import DeriveOptions
from tests.cache.builder import Built, grow, make_cache


def _refused(*places: Any, **asked: Any) -> str:
    with pytest.raises(CacheError) as caught:
        cache.derive(DeriveOptions(tuple(str(place) for place in places), **asked))
    text = str(caught.value)
    assert "manifest_sha256" not in text
    assert "made otherwise than you ask now:\n" in text
    return text


def test_another_source_is_named_once(exact_cache: Built, tmp_path: Path) -> None:
    cache.derive(DeriveOptions((str(exact_cache.path), str(tmp_path / "out")), k=3))
    similar = make_cache(tmp_path / "similar", rows=8, seed=5).path
    text = _refused(similar, tmp_path / "out", k=3)
    place = f"source 1 ({similar})"
    assert text.count(place) == 1
    # By their settings and corpus they are one capture.
    assert f"\n  {place} had 10 rows, and now has 8 rows\n" in text
    other = make_cache(tmp_path / "other", mantissa_bits=4).path
    text = _refused(other, tmp_path / "out", k=3)
    assert f"source 1 ({other}) is another cache: it has 10 rows, k 6, and the identity " in text
    assert "mantissa-bits: the cache has 6, you ask for 4" in text


def test_a_source_that_has_grown(tmp_path: Path) -> None:
    built = make_cache(tmp_path / "cache")
    cache.derive(DeriveOptions((str(built.path), str(tmp_path / "out")), k=3))
    grow(built)
    text = _refused(built.path, tmp_path / "out", k=3)
    assert f"\n  source 1 ({built.path}) has grown from 10 to 16 rows since\n" in text


def test_rows_and_draws(exact_cache: Built, tmp_path: Path) -> None:
    place = exact_cache.path
    cache.derive(DeriveOptions((str(place), str(tmp_path / "out"))))
    text = _refused(place, tmp_path / "out", rows="2:9")
    assert "\n  rows: the cache has all, you ask for 2:9\n" in text
    assert "rows_held" not in text
    text = _refused(place, tmp_path / "out", sample=0.5)
    assert "\n  sample: the cache has null, you ask for 0.5\n" in text
    assert "seed" not in text


_Change = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda d: {**d, "sources": [{**d["sources"][0], "manifest_sha256": "0" * 64}]},
            "source 1 (a) has another manifest since, though its settings, teacher and documents "
            "are the same: it was made again, or shards of it were",
        ),
        (
            lambda d: {**d, "sources": [*d["sources"], d["sources"][0]]},
            "sources: the cache was derived from 1, you give 2",
        ),
        (lambda d: {**d, "version": 2}, "version: the cache has 1, you ask for 2"),
        (lambda d: {**d, "rows_held": None}, "rows_held: other than in the cache"),
    ],
)
def test_lines(exact_cache: Built, tmp_path: Path, change: _Change, line: str) -> None:
    out = tmp_path / "out"
    cache.derive(DeriveOptions((str(exact_cache.path), str(out))))
    found = cache.open(out).manifest
    derived = change(found.capture["derived"])
    wanted: Manifest = replace(found, capture={**found.capture, "derived": derived})
    assert differences(found, wanted, ["a", "b"]) == [line]
    assert differences(found, found, ["a"]) == []


def test_order_and_origin(exact_cache: Built, tmp_path: Path) -> None:
    cache.derive(DeriveOptions((str(exact_cache.path), str(tmp_path / "out"))))
    found = cache.open(tmp_path / "out").manifest
    derived = found.capture["derived"]
    one, two = derived["sources"][0], {**derived["sources"][0], "manifest_sha256": "0" * 64}

    def of(*sources: Any) -> Manifest:
        return replace(
            found, capture={**found.capture, "derived": {**derived, "sources": list(sources)}}
        )

    line = "sources: they are the same caches in another order"
    assert differences(of(one, two), of(two, one), ["a", "b"]) == [line]
    captured = exact_cache.manifest
    line = "derived: the cache was captured, you ask for one that is derived"
    assert differences(captured, found, ["a"])[0] == line
