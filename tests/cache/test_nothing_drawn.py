"""Caches whose tail is called sampled although all entries are exact: read as what they are."""

from pathlib import Path

import pytest

import cache
from cache.derive import derive
from cache.errors import CacheError
from cache.manifest import Manifest
from cache.options import DeriveOptions, InspectOptions
from cache.show import render, render_report
from cache.storage import Store
from cache.summary import inspect, summary
from cache.verify import verify
from tests.cache.builder import Built, contents, make_cache, same, shard_file


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """10 rows of k = 6, asked for as a sampled tail with 6 exact entries. Do not change it."""
    return make_cache(tmp_path_factory.mktemp("old") / "cache", tail="sampled", exact=6)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The same entries, called what they are. Do not change it."""
    folder = tmp_path_factory.mktemp("plain") / "cache"
    return make_cache(folder, tail="none", temperatures=(1.0,), exact=6)


def _derived(tmp_path: Path, *places: Path, **asked: object) -> cache.Cache:
    words = (*(str(place) for place in places), str(tmp_path / "out"))
    return derive(DeriveOptions(words, **asked)).cache  # type: ignore[arg-type]


def test_the_fixture_is_of_that_kind(old: Built, plain: Built) -> None:
    assert old.manifest.nothing_drawn
    assert old.encoding.tail == "sampled"
    assert old.manifest.statistics is not None
    assert old.manifest.statistics.sampled_entries == 0
    assert not plain.manifest.nothing_drawn
    assert plain.manifest.as_read == plain.manifest


@pytest.mark.parametrize(("exact", "drawn"), [(5, True), (6, False), (7, False)])
def test_the_recorded_settings_decide(old: Built, exact: int, drawn: bool) -> None:
    content = {**old.manifest.capture, "exact": exact}
    manifest = Manifest(
        old.encoding, content, old.manifest.teacher, old.manifest.tokenizer, {}, run="r"
    )
    assert manifest.nothing_drawn is not drawn
    assert manifest.as_read.encoding.tail == ("sampled" if drawn else "none")


def test_it_is_read_as_exact_entries(old: Built, plain: Built) -> None:
    opened, other = cache.open(old.path), cache.open(plain.path)
    assert opened.encoding == other.encoding
    assert opened.encoding.tail == "none"
    assert "k = 6 (exact), temperature 1" in repr(opened)
    rows, others = opened.rows(slice(None)), other.rows(slice(None))
    assert all(same(rows[name], others[name]) for name in opened.fields)
    assert same(opened.weights(rows), other.weights(others))


def test_it_is_sound_and_verify_says_so(old: Built, plain: Built) -> None:
    for full in (False, True):
        report = verify(old.path, full=full)
        assert report.sound, report.damage
        (note,) = report.notes
        assert "nothing was drawn" in note
        assert "--tail none --temperatures 1" in note
        assert f"note: {note}" in render_report(report)
        assert render_report(report).splitlines()[-1].startswith("sound")
    assert verify(plain.path).notes == ()


def test_inspect_shows_exact_entries(old: Built, plain: Built) -> None:
    view = summary(str(old.path))
    assert view["encoding"] == summary(str(plain.path))["encoding"]
    assert len(view["notes"]) == 1
    text = render(view)
    assert "k = 6, all exact" in text
    assert "note: The tail is called sampled, but nothing was drawn" in text
    position = inspect(InspectOptions(str(old.path), row=0, position=0))
    assert {entry["kind"] for entry in position["entries"]} == {"exact"}


def test_damage_is_found_in_it(old: Built, tmp_path: Path) -> None:
    built = make_cache(tmp_path / "c", tail="sampled", exact=6)
    path = shard_file(built, "target_ids", 1)
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    assert not verify(built.path, full=True).sound


@pytest.mark.parametrize("asked", [{}, {"k": 3}, {"k": 6}, {"mantissa_bits": 4, "k": 1}])
def test_what_is_derived_has_exact_entries(
    old: Built, plain: Built, tmp_path: Path, asked: dict[str, int]
) -> None:
    found = _derived(tmp_path / "old", old.path, **asked)
    expected = _derived(tmp_path / "plain", plain.path, **asked)
    assert found.encoding == expected.encoding == found.manifest.encoding
    assert found.manifest.capture["exact"] == found.encoding.k
    rows, others = found.rows(slice(None)), expected.rows(slice(None))
    assert all(same(rows[name], others[name]) for name in found.fields)
    assert verify(found.location, full=True).sound
    assert verify(found.location).notes == ()
    before = contents(found.location)
    _derived(tmp_path / "old", old.path, **asked)
    assert contents(found.location) == before


def test_what_its_tail_cannot_give(old: Built, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="the cache has no sampled tail; all entries are exact"):
        _derived(tmp_path, old.path, tail="drop")
    with pytest.raises(CacheError, match="--exact: all entries of the cache are exact"):
        _derived(tmp_path, old.path, k=4, exact=2)


def test_it_joins_caches_of_exact_entries(old: Built, plain: Built, tmp_path: Path) -> None:
    """Not those with a sampled tail."""
    cut = _derived(tmp_path / "a", plain.path, rows="0:4")
    rest = _derived(tmp_path / "b", old.path, rows="4:10")
    joined = _derived(tmp_path, Path(cut.location), Path(rest.location))
    rows, others = joined.rows(slice(None)), cache.open(plain.path).rows(slice(None))
    assert all(same(rows[name], others[name]) for name in ("target_ids", "target_logprobs"))
    sampled = make_cache(tmp_path / "sampled", tail="sampled", seed=5)
    with pytest.raises(CacheError, match=r'tail: .* has "none", .* has "sampled"'):
        _derived(tmp_path / "c", old.path, sampled.path)


def test_nothing_of_it_is_changed(old: Built) -> None:
    """Reading it as something else does not change what it is known by."""
    stored = Manifest.from_bytes(Store(old.path).read("manifest.json") or b"", "here")
    assert stored.identity == old.manifest.identity != old.manifest.as_read.identity
    assert cache.open(old.path).manifest == stored
