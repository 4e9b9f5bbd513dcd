"""Captured caches to be attacked: made once, copied for each case."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cache
import stillroom
from cache.errors import DamageError
from cache.manifest import Manifest
from student.batches import BatchSettings
from student.input import InputSettings, TrainingInput
from student.split import split_rows
from tests.attack.damage import manifest_of
from tests.cache.builder import same
from tests.models import write_tiny_teacher
from tests.pipelines import small


@dataclass(frozen=True)
class Base:
    """A capture that nothing disturbed.

    Attributes:
      made: folder of teacher and corpus; the cache is `made / "cache"`.
      others: other caches with the same settings, by what differs: "corpus", "teacher".
      stored: every object of the cache.
      rows: every row of every array.
    """

    made: Path
    others: dict[str, Path]
    stored: dict[str, bytes]
    rows: dict[str, np.ndarray]
    manifest: Manifest


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    made = small.captured(tmp_path_factory.mktemp("attacked"))
    others = {name: tmp_path_factory.mktemp(name) for name in ("corpus", "teacher")}
    # As long as the documents that it stands for, so that shards hold the same rows.
    other_texts = [text[::-1] for text in small.texts()]
    small.write_corpus(others["corpus"] / "corpus.jsonl", other_texts)
    write_tiny_teacher(others["teacher"] / "teacher", seed=9)
    for folder in others.values():
        small.captured(folder)
    return Base(
        made,
        {name: folder / "cache" for name, folder in others.items()},
        small.stored(made / "cache"),
        cache.open(made / "cache").rows(slice(None)),
        manifest_of(made / "cache"),
    )


@dataclass(frozen=True)
class Attacked:
    """A copy of the cache that a test damages, and what can be asked of it."""

    base: Base
    path: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def manifest(self) -> Manifest:
        return self.base.manifest

    def verify(self, *words: str) -> tuple[int, dict[str, Any]]:
        """`stillroom verify CACHE --full --json`: exit code and report."""
        self.capsys.readouterr()
        code = stillroom.main(["verify", str(self.path), "--full", "--json", *words])
        output = self.capsys.readouterr()
        assert "Traceback" not in output.err
        return code, json.loads(output.out)

    def refused(self, *words: str) -> str:
        """What a command says that fails before it has anything to report."""
        self.capsys.readouterr()
        assert stillroom.main([*words]) == 1
        output = self.capsys.readouterr()
        assert "Traceback" not in output.err
        return output.err

    def found(self) -> list[dict[str, Any]]:
        """The damage that `verify --full` reports with a non-zero exit."""
        code, report = self.verify()
        assert (code, report["sound"]) == (1, not report["damage"])
        assert report["damage"]
        return report["damage"]

    def sound(self) -> None:
        code, report = self.verify()
        assert (code, report["sound"], report["damage"]) == (0, True, [])

    def repaired(self) -> None:
        """`verify --full --repair` and the same precompute give back every byte."""
        self.verify("--repair")
        small.precompute(small.options(self.base.made, self.path))
        assert small.stored(self.path) == self.base.stored
        self.sound()

    def check_readers(self, damaged: dict[str, set[int]]) -> None:
        """Rows and training batches: an error wherever something damaged is read, else the data.

        Args:
          damaged: the shards whose files are damaged, by array.
        """
        opened = cache.open(self.path)
        seals = damaged.get("seals", set())
        touched = set().union(*damaged.values())
        for shard in touched:
            rows = np.arange(*self.manifest.shard_rows(shard))
            for name in opened.fields:
                if shard in damaged.get(name, set()) | seals:
                    with pytest.raises(DamageError) as raised:
                        opened.rows(rows, (name,))
                    self._named(raised.value, shard, {name, "seals"})
                else:
                    assert same(opened.rows(rows, (name,))[name], self.base.rows[name][rows])
            broken = {name for name, shards in damaged.items() if shard in shards}
            with pytest.raises(DamageError) as raised:
                opened.rows(rows)
            self._named(raised.value, shard, broken)
        whole = [shard for shard in range(self.manifest.shards) if shard not in touched]
        rows = np.concatenate([np.arange(*self.manifest.shard_rows(shard)) for shard in whole])
        for name, values in opened.rows(rows).items():
            assert same(values, self.base.rows[name][rows])
        if damaged:
            with pytest.raises(DamageError) as raised:
                train_on(opened)
            assert {(item.array, item.shard) for item in raised.value.damage} <= {
                (name, shard)
                for array, shards in damaged.items()
                for shard in shards
                for name in ((array,) if array != "seals" else (*opened.fields, "seals"))
            }
        else:
            train_on(opened)

    def _named(self, error: DamageError, shard: int, names: set[str]) -> None:
        assert error.damage
        for item in error.damage:
            assert (item.shard, item.rows) == (shard, self.manifest.shard_rows(shard))
            assert item.documents == self.manifest.receipts[shard].documents
            assert item.array in names
        assert f"shard {shard}, rows " in str(error)


def train_on(opened: cache.Cache) -> int:
    """Everything that `train` reads of a cache: the split, then every batch of an epoch."""
    split = split_rows(opened, 0, 0)
    reading = BatchSettings(most_id=opened.encoding.vocabulary)
    settings = InputSettings(reading=reading, batch=6, epochs=1, seed=0)
    with TrainingInput(opened, split.training, settings) as batches:
        return sum(int((batch.rows >= 0).sum()) for batch in batches)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    small.quick(monkeypatch)


@pytest.fixture
def attacked(base: Base, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Attacked:
    return Attacked(base, small.copy(base.made / "cache", tmp_path / "cache"), capsys)


@pytest.fixture
def again(base: Base, attacked: Attacked) -> Callable[[], Attacked]:
    """The copy as it was before a test damaged it."""

    def fresh() -> Attacked:
        shutil.rmtree(attacked.path)
        small.copy(base.made / "cache", attacked.path)
        return attacked

    return fresh
