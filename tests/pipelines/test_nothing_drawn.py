"""A cache whose tail is called sampled although nothing was drawn: what a teacher does for it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cache
import stillroom
from cache.manifest import Manifest
from pipelines import begin
from pipelines.append import append
from pipelines.audit import AuditOptions, audit
from pipelines.errors import CaptureError
from pipelines.options import AppendOptions
from tests.pipelines import small

# What such a cache is: exact entries, and the rest of the mass at one temperature.
PLAIN: dict[str, Any] = {"tail": "none", "temperatures": (1.0,)}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    small.quick(monkeypatch)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache as it came from `--tail sampled --k 4 --exact 4`, which is refused now."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        small.quick(patch)
        encoding = begin._encoding
        patch.setattr(begin, "_encoding", lambda *given: replace(encoding(*given), tail="sampled"))
        patch.setattr(Manifest, "as_read", property(lambda manifest: manifest))
        patch.setattr(
            "pipelines.plan.Plan.targets", property(lambda plan: _exact_targets(plan.manifest))
        )
        found = small.capture(folder, **PLAIN).cache
    assert found.manifest.nothing_drawn
    return folder


def _exact_targets(manifest: Manifest) -> Any:
    from pipelines.targets import TargetSettings

    return TargetSettings(manifest.encoding.k, manifest.encoding.vocabulary, chunk=8)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    small.copy(made / "cache", tmp_path / "cache")
    return tmp_path


def test_the_command_that_made_it_is_refused(made: Path) -> None:
    with pytest.raises(CaptureError, match="--exact 4 should be less than --k 4"):
        small.options(made, exact=4)


def test_a_capture_of_exact_entries_is_what_it_holds(made: Path, folder: Path) -> None:
    before = small.everything(folder / "cache")
    assert small.capture(made, folder / "cache", **PLAIN).scored == 0
    assert small.everything(folder / "cache") == before
    with pytest.raises(CaptureError, match=r'tail: the cache has "none", you ask for "sampled"'):
        small.capture(made, folder / "cache")


def test_shards_are_made_again_with_the_same_bytes(made: Path, folder: Path) -> None:
    before = small.stored(folder / "cache")
    damaged = folder / "cache/arrays/target_ids/c.1.0.0"
    damaged.write_bytes(b"nothing")
    report = stillroom.verify(folder / "cache", full=True, repair=True)
    assert report.repaired == (1,)
    assert small.capture(made, folder / "cache", **PLAIN).scored == 1
    assert small.stored(folder / "cache") == before
    assert stillroom.verify(folder / "cache", full=True).sound


def test_documents_are_added_to_it(made: Path, folder: Path) -> None:
    small.write_corpus(folder / "more.jsonl", ["an added text of its own", "and one more"])
    asked = AppendOptions(str(folder / "cache"), str(folder / "more.jsonl"))
    assert append(asked).scored == 1
    opened = cache.open(folder / "cache")
    assert opened.encoding.tail == "none"
    assert opened.manifest.encoding.tail == "sampled"
    assert stillroom.verify(folder / "cache", full=True).sound
    alone = small.capture(made, folder / "alone", dataset=asked.dataset, **PLAIN).cache
    rows, expected = (each.rows(slice(-len(alone), None)) for each in (opened, alone))
    for name in ("target_ids", "target_logprobs", "exact_counts", "tail_logprobs"):
        assert rows[name].tobytes() == expected[name].tobytes()


def test_an_audit_finds_it_sound(made: Path) -> None:
    found = audit(AuditOptions(str(made / "cache"), rows=8))
    assert found.sound
    assert [each.name for each in found.ids] == ["exact entries"]
    assert {each.largest for each in found.differences} == {0.0}
