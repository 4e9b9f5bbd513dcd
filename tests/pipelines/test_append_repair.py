"""Damage in a cache that has grown: each command makes its own shards again and names the rest."""

import itertools
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cache
import stillroom
from cache import finishing
from cache.errors import CacheError, DamageError
from cache.format import WORK
from cache.storage import Store
from pipelines import transforms
from pipelines.append import append
from pipelines.errors import CaptureError
from pipelines.options import AppendOptions
from tests.cache.builder import stopped_at
from tests.pipelines import small
from tests.pipelines.small import capture, stored

# The package has the function under this name.
precompute: Any = sys.modules["pipelines.precompute"]
# Shards of a cache of three extents: 0-5 captured, 6-7 and 8-9 appended.
SECOND = [f"{index} a second text" for index in range(8)]
THIRD = [f"{index} a third text with some more words" for index in range(5)]
COMMANDS = ("corpus", "second", "third")


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small.captured(tmp_path_factory.mktemp("grown"))
    small.write_corpus(folder / "second.jsonl", SECOND)
    small.write_corpus(folder / "third.jsonl", THIRD)
    with pytest.MonkeyPatch.context() as patch:
        small.quick(patch)
        assert append(_options(folder, folder / "cache", "second")).scored == 2
        assert append(_options(folder, folder / "cache", "third")).scored == 2
    return folder


@pytest.fixture
def broken(grown: Path, tmp_path: Path) -> Path:
    """A copy of the cache without the receipts of a shard in each extent."""
    copy = small.copy(grown / "cache", tmp_path / "cache")
    for shard in (2, 3, 7, 9):
        (copy / "receipts" / f"{shard:06d}.json").unlink()
    return copy


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    small.quick(monkeypatch)


def _options(grown: Path, out: Path, name: str) -> AppendOptions:
    return AppendOptions(str(out), str(grown / f"{name}.jsonl"))


def _again(grown: Path, out: Path, name: str) -> int:
    """Runs the command that made an extent; the shards that it scored."""
    if name == "corpus":
        return capture(grown, out).scored
    return append(_options(grown, out, name)).scored


@pytest.mark.parametrize("order", list(itertools.permutations(COMMANDS)))
def test_each_command_makes_its_own_shards_again(
    grown: Path, broken: Path, order: tuple[str, ...]
) -> None:
    whole = stored(grown / "cache")
    for name in order[:-1]:
        before = set(Store(broken).list("receipts"))
        with pytest.raises(DamageError, match="run the commands again that made them") as caught:
            _again(grown, broken, name)
        left = list(order[order.index(name) + 1 :])
        text = str(caught.value)
        for other in COMMANDS:
            assert (f"{other}.jsonl (1 json file) makes shards" in text) == (other in left)
        assert Store(broken).read(WORK) is None
        made = set(Store(broken).list("receipts")) - before
        assert len(made) == (2 if name == "corpus" else 1)
    assert _again(grown, broken, order[-1]) == (2 if order[-1] == "corpus" else 1)
    assert stored(broken) == whole
    assert stillroom.verify(broken, full=True).sound


def test_a_command_with_nothing_to_do_names_those_that_have(grown: Path, broken: Path) -> None:
    with pytest.raises(DamageError):
        capture(grown, broken)
    before = stored(broken)
    with pytest.raises(
        DamageError,
        match=r"000007\.json is lost\n[^`]*`stillroom append` of .*second\.jsonl \(1 json file\) "
        r"makes shards 7\n  `stillroom append` of .*third\.jsonl \(1 json file\) makes shards 9$",
    ):
        capture(grown, broken)
    assert stored(broken) == before


def test_shards_with_other_bytes_are_added_up_by_the_last_command(
    grown: Path, broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another machine: the sums are of old receipts until all are there again."""
    real = transforms.write_shard

    def other(store: Store, manifest: Any, shard: int, rows: int, arrays: Any) -> Any:
        arrays = {name: values.copy() for name, values in arrays.items()}
        arrays["entropy"][arrays["label_mask"] == 1] *= np.float16(1.01)
        return real(store, manifest, shard, rows, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(transforms, "write_shard", other)
        with pytest.raises(DamageError):
            capture(grown, broken)
        with pytest.raises(DamageError):
            append(_options(grown, broken, "second"))
    outcome = append(_options(grown, broken, "third"))
    report = stillroom.verify(broken, full=True)
    assert report.sound
    manifest = outcome.cache.manifest
    statistics, old = manifest.statistics, cache.open(grown / "cache").manifest.statistics
    assert statistics is not None
    assert old is not None
    assert statistics.entropy > old.entropy


def test_an_addition_ends_although_the_cache_was_damaged_meanwhile(
    grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither command waits for the other for ever."""
    out = small.copy(grown / "cache", tmp_path / "cache")
    small.write_corpus(tmp_path / "fourth.jsonl", ["a fourth text", "and a fifth"])
    more = AppendOptions(str(out), str(tmp_path / "fourth.jsonl"))
    real = transforms.write_shard

    def write(store: Store, manifest: Any, shard: int, rows: int, arrays: Any) -> Any:
        store.delete("receipts/000001.json")
        return real(store, manifest, shard, rows, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(transforms, "write_shard", write)
        with pytest.raises(DamageError, match=r"precompute` of .*corpus\.jsonl .* makes shards 1$"):
            append(more)
    direct = small.copy(grown / "cache", tmp_path / "direct")
    append(AppendOptions(str(direct), str(tmp_path / "fourth.jsonl")))
    assert capture(grown, out).scored == 1
    assert stored(out) == stored(direct)
    assert append(more).scored == 0


def test_nothing_is_added_to_a_damaged_cache(grown: Path, tmp_path: Path) -> None:
    out = small.copy(grown / "cache", tmp_path / "cache")
    small.write_corpus(tmp_path / "more.jsonl", ["some more"])
    (out / "arrays" / "entropy" / "c.1.0").unlink()
    before = small.everything(out)
    with pytest.raises(DamageError, match=r"shard 1, .*array entropy: .*is missing"):
        append(AppendOptions(str(out), str(tmp_path / "more.jsonl")))
    assert small.everything(out) == before


def test_documents_that_are_there_already_are_named(grown: Path, tmp_path: Path) -> None:
    """A part of the added corpus is a part of the first: said, not refused."""
    out = small.copy(grown / "cache", tmp_path / "cache")
    small.write_corpus(tmp_path / "more.jsonl", [*small.texts()[:6], "and new ones"])
    outcome = append(AppendOptions(str(out), str(tmp_path / "more.jsonl")))
    assert outcome.scored > 0
    (note,) = outcome.notes
    assert note.startswith("The documents from 0 on (6 or fewer) are in the cache already, of ")
    assert "corpus.jsonl" in note


def test_verify_names_the_commands(
    grown: Path, broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stillroom.main(["verify", str(broken), "--full", "--repair"]) == 1
    shown = capsys.readouterr().out
    assert "`stillroom precompute` of" in shown
    assert "corpus.jsonl (1 json file) makes shards 2, 3\n" in shown
    assert "second.jsonl (1 json file) makes shards 7\n" in shown
    assert "third.jsonl (1 json file) makes shards 9\n" in shown


def test_inspect_shows_what_was_appended_and_what_is_under_way(
    grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = small.copy(grown / "cache", tmp_path / "cache")
    assert stillroom.main(["inspect", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "second.jsonl (1 json file), 8 documents: rows 33-" in shown
    assert "shards 6-7" in shown
    assert "not finished" not in shown
    small.write_corpus(tmp_path / "more.jsonl", ["some more"])
    more = AppendOptions(str(out), str(tmp_path / "more.jsonl"))
    with monkeypatch.context() as patch:
        patch.setattr(transforms, "write_shard", lambda *_: 1 / 0)
        with pytest.raises(CaptureError):
            append(more)
    assert stillroom.main(["inspect", str(out)]) == 0
    assert "not finished: documents are being added, 0 shards done" in capsys.readouterr().out
    assert capture(grown, out).notes == (
        f"An append of {tmp_path / 'more.jsonl'} (1 json file) is not finished; run it again to "
        "finish it.",
    )
    (out / WORK).write_bytes(b"{")
    assert stillroom.main(["inspect", str(out)]) == 0
    shown = capsys.readouterr().out
    assert f"damaged: the manifest {out}/{WORK}" in shown
    assert f"`stillroom verify {out} --repair` removes it" in shown
    with pytest.raises(CacheError):
        append(more)
    shutil.rmtree(out)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("stopped", ["before", "after"])
def test_stopped_at_its_very_end(grown: Path, tmp_path: Path, name: str, stopped: str) -> None:
    """All receipts are there, but the work is not ended: the same command ends it."""
    copy = small.copy(grown / "cache", tmp_path / "cache")
    shard = {"corpus": 2, "second": 7, "third": 9}[name]
    (copy / "receipts" / f"{shard:06d}.json").unlink()

    where = (precompute, "finish") if stopped == "before" else (finishing, "settle")
    with stopped_at(*where):
        _again(grown, copy, name)
    assert Store(copy).read(WORK) is not None
    assert Store(copy).read(f"receipts/{shard:06d}.json") is not None
    assert _again(grown, copy, name) == 0
    assert Store(copy).read(WORK) is None
    assert stored(copy) == stored(grown / "cache")
    assert stillroom.verify(copy, full=True).sound


def test_an_addition_stopped_when_it_was_in_the_manifest_already(
    grown: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "cache"
    capture(grown, copy)

    with stopped_at(finishing, "settle"):
        append(_options(grown, copy, "second"))
    outcome = capture(grown, copy)
    assert any("second.jsonl (1 json file) is not finished" in note for note in outcome.notes)
    assert append(_options(grown, copy, "second")).scored == 0
    assert append(_options(grown, copy, "third")).scored == 2
    assert stored(copy) == stored(grown / "cache")
    assert stillroom.verify(copy, full=True).sound
