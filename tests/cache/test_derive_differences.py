"""What a derivation that is asked for again says where it is another one: names, no JSON."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cache
from cache.derive_differences import differences
from cache.errors import CacheError
from cache.format import receipt_key
from cache.manifest import Manifest
from cache.options import DeriveOptions
from tests.cache.builder import Built, contents, grow, make_cache, stopped_at

# The package has the function under this name.
derive_module: Any = sys.modules["cache.derive"]


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


def test_a_source_that_has_grown_otherwise(tmp_path: Path) -> None:
    """What a grown source had is taken again; rows that were never there are refused."""
    built = make_cache(tmp_path / "cache")
    cache.derive(DeriveOptions((str(built.path), str(tmp_path / "out")), k=3))
    grow(make_cache(tmp_path / "similar", seed=5))
    text = _refused(tmp_path / "similar", tmp_path / "out", k=3)
    place = f"source 1 ({tmp_path / 'similar'})"
    assert f"\n  {place} has grown from 10 to 16 rows since\n" in text


def test_a_source_that_has_grown_is_taken_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built, other = make_cache(tmp_path / "cache"), make_cache(tmp_path / "other")
    asked: dict[str, Any] = {"k": 3, "rows_per_shard": 4, "sample": 0.7}
    out = DeriveOptions((str(built.path), str(tmp_path / "out")), **asked)
    cache.derive(DeriveOptions((str(other.path), str(tmp_path / "reference")), **asked))
    reference = contents(tmp_path / "reference")

    with stopped_at(derive_module, "write_shard", 1):
        cache.derive(out)
    grow(built)
    made = cache.derive(out).made
    assert made == len(cache.open(tmp_path / "out").manifest.receipts) - 1 > 0
    note = f"{built.path} has grown to 16 rows since: its first 10 are taken, as before. For all"
    assert note in capsys.readouterr().err
    assert contents(tmp_path / "out") == reference
    # Finished, it is what was asked for; and a shard of it can be made again.
    assert cache.derive(out).made == 0
    (tmp_path / "out" / receipt_key(1)).unlink()
    assert cache.derive(out).made == 1
    assert contents(tmp_path / "out") == reference


def test_a_source_that_has_grown_twice(tmp_path: Path) -> None:
    built = make_cache(tmp_path / "cache")
    once = grow(built)
    places = (str(built.path), str(tmp_path / "out"))
    cache.derive(DeriveOptions(places, rows="3:15"))
    reference = contents(tmp_path / "out")
    grow(once, rows=4)
    assert cache.derive(DeriveOptions(places, rows="3:15")).made == 0
    assert contents(tmp_path / "out") == reference
    with pytest.raises(CacheError, match="--rows 3:18 should be within 0:16"):
        cache.derive(DeriveOptions(places, rows="3:18"))


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
