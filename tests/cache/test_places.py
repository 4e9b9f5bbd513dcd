"""Places that overlap: copies, derived caches and local copies are never inside of a cache."""

from pathlib import Path

import pytest

import cache
from cache.errors import CacheError
from cache.places import check_apart
from tests.cache.builder import Built


def test_places_are_compared_under_all_their_names(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    source = str(tmp_path / "cache")
    for out, where in [
        (source, "is"),
        (f"{source}/", "is"),
        (f"file://{source}", "is"),
        (str(tmp_path / "link"), "is"),
        (f"{source}/inner/deep", "is inside"),
        (str(tmp_path / "link" / "inner"), "is inside"),
    ]:
        with pytest.raises(CacheError) as caught:
            check_apart(out, source, "which is read")
        expected = f"{out} {where} {source}, which is read. Choose another place."
        assert str(caught.value) == expected
    check_apart(str(tmp_path), source, "which is read")
    check_apart(f"{source}-2", source, "which is read")
    for out in (str(tmp_path), "/"):
        with pytest.raises(CacheError, match=f"^{out} holds "):
            check_apart(out, source, "which is read", around=True)
    with pytest.raises(CacheError, match="is inside s3://bucket/a/, which"):
        check_apart("s3://bucket/a/b", "s3://bucket/a/", "which is read")
    check_apart(source, "s3://bucket/a", "which is read", around=True)


def test_a_cache_is_not_copied_onto_itself(exact_cache: Built) -> None:
    with pytest.raises(CacheError, match=r" is .*, which it would be a copy of"):
        cache.copy(exact_cache.path, f"{exact_cache.path}/")


def test_a_local_copy_is_apart_from_the_cache(exact_cache: Built, tmp_path: Path) -> None:
    place = exact_cache.path
    before = sorted(place.rglob("*"))
    for folder, where in [(place, "is"), (place / "copy", "is inside"), (place.parent, "holds")]:
        with pytest.raises(CacheError, match=f" {where} .*, which --local-copy would copy"):
            cache.open(place, local_copy=folder)
    assert sorted(place.rglob("*")) == before
    opened = cache.open(place, local_copy=tmp_path / "copy")
    assert (opened.rows([0])["tokens"] == exact_cache.arrays["tokens"][:1]).all()


def test_a_local_copy_needs_a_folder(exact_cache: Built, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for folder in (tmp_path / "notes.txt", tmp_path / "notes.txt" / "inner"):
        with pytest.raises(CacheError) as caught:
            cache.open(exact_cache.path, local_copy=folder)
        text = str(caught.value)
        assert text == f"{tmp_path}/notes.txt is a file; --local-copy needs a folder."
