"""Finished caches that many tests read; a test that damages one takes a copy."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cache.builder import Built, make_cache


@pytest.fixture(scope="session")
def exact_cache(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """10 rows, 4 a shard, all entries exact, temperatures 1, 2, 4. Do not change it."""
    return make_cache(tmp_path_factory.mktemp("exact") / "cache")


@pytest.fixture(scope="session")
def sampled_cache(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The same rows with a sampled tail. Do not change it."""
    return make_cache(tmp_path_factory.mktemp("sampled") / "cache", tail="sampled")


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., Built]:
    """Copies a cache into this test's own folder, to be damaged there."""

    def copy_of(built: Built, name: str = "copy") -> Built:
        shutil.copytree(built.path, tmp_path / name)
        return replace(built, path=tmp_path / name)

    return copy_of
