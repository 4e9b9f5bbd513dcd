"""Audit: what a teacher gives now beside what a cache holds; the kinds of wrongness it finds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cache
import decoder
import stillroom
from cache.errors import CacheError
from cache.format import MANIFEST
from cache.manifest import read_manifest
from cache.provenance import Recomputed
from cache.storage import Store
from pipelines.append import append
from pipelines.audit import Audit, AuditOptions, audit, choose_rows, findings
from pipelines.audit_measure import Difference, Ids, compare_ids, compare_log_probs
from pipelines.errors import CaptureError, TeacherError
from pipelines.options import AppendOptions
from tests.cache.builder import make_encoding
from tests.models import write_tiny_teacher
from tests.pipelines import small


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sampled cache, and an exact one at three temperatures."""
    folder = small.captured(tmp_path_factory.mktemp("made"))
    with pytest.MonkeyPatch.context() as patch:
        small.quick(patch)
        small.capture(folder, "exact", tail="none", k=5)
    return folder


def _audit(folder: Path, name: str = "cache", **changes: Any) -> Audit:
    return audit(AuditOptions(str(folder / name), **{"rows": 8, **changes}))


@pytest.mark.parametrize("name", ["cache", "exact"])
def test_the_same_teacher_gives_the_same(made: Path, name: str) -> None:
    """Rows in an order of their own, on the same device: to the bit, sampled entries included."""
    found = _audit(made, name, rows=100)
    assert found.sound
    assert found.rows == tuple(range(33))
    opened = cache.open(made / name)
    assert opened.manifest.statistics is not None
    assert found.labels == opened.manifest.statistics.labels
    assert {each.largest for each in found.differences} == {0.0}
    names = [each.name for each in found.differences]
    tails = ["1"] if name == "cache" else ["1", "2", "4"]
    assert names == [
        "label log-prob",
        "entry log-prob",
        *(f"tail log-mass at temperature {tail}" for tail in tails),
        "entropy",
    ]
    entries = [(each.name, each.count, each.share) for each in found.ids]
    statistics = opened.manifest.statistics
    expected = [("exact entries", statistics.exact_entries, 1.0)]
    if name == "cache":
        expected.append(("sampled entries", statistics.sampled_entries, 1.0))
    assert entries == expected
    assert found.notes == ()


def test_another_precision_is_found(made: Path) -> None:
    found = _audit(made, precision="bfloat16")
    assert not found.sound
    assert any(finding.startswith("label log-prob: largest") for finding in found.findings)
    assert found.notes == ("The capture ran in float32, this is bfloat16.",)


def test_another_checkpoint_is_found_by_its_numbers_too(made: Path, tmp_path: Path) -> None:
    write_tiny_teacher(tmp_path / "other", seed=7)
    found = _audit(made, teacher=str(tmp_path / "other"))
    assert "fingerprint" in found.findings[0]
    found = _audit(made, teacher=str(tmp_path / "other"), other_files=True)
    assert not found.sound
    text = "\n".join(found.findings)
    assert "fingerprint" not in text
    for name in ("label log-prob", "tail log-mass at temperature 1", "exact entries", "sampled"):
        assert name in text


def test_the_same_weights_in_other_files(made: Path, tmp_path: Path) -> None:
    """Another fingerprint with equal numbers fails unless it is accepted."""
    loaded = decoder.load_model(str(made / "teacher"))
    write_tiny_teacher(tmp_path / "other", max_positions=2048)
    assert decoder.describe_model(str(tmp_path / "other")).fingerprint != loaded.fingerprint
    found = _audit(made, teacher=str(tmp_path / "other"))
    (finding,) = found.findings
    assert "fingerprint" in finding
    assert _audit(made, teacher=str(tmp_path / "other"), other_files=True).sound


def test_a_smaller_head_is_refused(made: Path, tmp_path: Path) -> None:
    write_tiny_teacher(tmp_path / "other", vocabulary=280)
    with pytest.raises(TeacherError, match="280 rows in its head, the cache 300 tokens"):
        _audit(made, teacher=str(tmp_path / "other"))


def test_another_release_or_device_is_named(made: Path, tmp_path: Path) -> None:
    small.copy(made / "cache", tmp_path / "cache")
    store = Store(tmp_path / "cache")
    manifest, _ = read_manifest(store)
    changed = {**manifest.software, "jax": "0.1"}
    store.write(MANIFEST, small.with_changes(manifest, software=changed).to_bytes())
    found = _audit(tmp_path, teacher=str(made / "teacher"))
    assert found.sound
    assert found.notes[0].startswith("The capture ran with jax 0.1, this is ")


def test_a_grown_cache(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws are keyed by stored rows, which a second extent numbers with a gap."""
    small.quick(monkeypatch)
    small.copy(made / "cache", tmp_path / "cache")
    small.write_corpus(tmp_path / "more.jsonl", [f"{n} more" for n in range(5)])
    append(AppendOptions(str(tmp_path / "cache"), str(tmp_path / "more.jsonl")))
    found = _audit(tmp_path, rows=100)
    assert found.sound
    assert len(found.rows) > 33
    assert {each.largest for each in found.differences} == {0.0}
    assert {each.share for each in found.ids} == {1.0}


def test_the_choice_of_rows() -> None:
    chosen = choose_rows(1000, 50, 3)
    assert (np.diff(chosen) > 0).all()
    assert (chosen.min() >= 0, chosen.max() < 1000, len(chosen)) == (True, True, 50)
    assert (choose_rows(1000, 50, 3) == chosen).all()
    assert not np.array_equal(choose_rows(1000, 50, 4), chosen)
    assert choose_rows(5, 50, 3).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"rows": 0}, "--rows should be at least 1"), ({"seed": -1}, "--seed should be between")],
)
def test_options_are_checked(changes: dict[str, int], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        AuditOptions("c", **changes)


def test_a_manifest_that_does_not_say_how_it_was_captured(made: Path, tmp_path: Path) -> None:
    small.copy(made / "cache", tmp_path / "cache")
    store = Store(tmp_path / "cache")
    manifest, _ = read_manifest(store)
    capture = {name: value for name, value in manifest.capture.items() if name != "chunk"}
    store.write(MANIFEST, small.with_changes(manifest, capture=capture).to_bytes())
    with pytest.raises(CacheError, match="lacks 'chunk'"):
        _audit(tmp_path, teacher=str(made / "teacher"))


def test_the_command(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", str(made / "cache"), "--teacher", str(made / "teacher"), "--rows", "3"]
    assert stillroom.main(words) == 0
    shown = capsys.readouterr().out
    assert "3 rows scored again" in shown
    assert shown.endswith("sound\n")
    assert stillroom.main([*words, "--precision", "bfloat16", "--json"]) == 1
    view = json.loads(capsys.readouterr().out)
    assert view["sound"] is False
    assert view["ids"][0]["name"] == "exact entries"


# The measures, on numbers made by hand.


def _sides() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """One row of two positions with labels and one without; two exact and one sampled entry."""
    stored = {
        "label_mask": np.array([[1, 1, 0]], np.uint8),
        "target_ids": np.array([[[3, 5, 9], [4, 2, 7], [65535] * 3]], np.uint16),
        "target_logprobs": np.array(
            [[[-1.0, -2.0, np.nan], [-0.5, -3.0, np.nan], [np.nan] * 3]], np.float32
        ),
        "exact_counts": np.array([[2, 2, 255]], np.uint8),
        "tail_logprobs": np.array([[[-0.7], [-1.0], [np.nan]]], np.float16),
        "label_logprobs": np.array([[-1.0, -4.0, np.nan]], np.float32),
        "entropy": np.array([[2.0, 1.0, np.nan]], np.float16),
    }
    fresh = {
        "ids": np.array([[[3, 5, 9], [4, 2, 7], [0, 1, 2]]], np.int32),
        "logprobs": np.array(
            [[[-1.0, -2.0, np.nan], [-0.5, -3.0, np.nan], [-1.0, -1.0, np.nan]]], np.float32
        ),
        "exact_counts": np.array([[2, 2, 2]], np.int32),
        "tail_logprobs": np.array([[[-0.7], [-1.0], [-1.0]]], np.float32),
        "label_logprobs": np.array([[-1.0, -4.0, -1.0]], np.float32),
        "entropy": np.array([[2.0, 1.0, 5.0]], np.float32),
    }
    return stored, fresh


_ENCODING = make_encoding(length=3, k=3, tail="sampled", logprobs="float32", wide_tails=False)


def _found(stored: Any, fresh: Any) -> dict[str, Difference]:
    return {
        each.name: each
        for each in compare_log_probs(
            stored, fresh, _ENCODING, _ENCODING.relative_error, Recomputed()
        )
    }


def test_equal_sides_do_not_differ() -> None:
    found = _found(*_sides())
    assert {name: each.count for name, each in found.items()} == {
        "label log-prob": 2,
        "entry log-prob": 4,
        "tail log-mass at temperature 1": 2,
        "entropy": 2,
    }
    assert {each.largest for each in found.values()} == {0.0}


def test_differences_are_the_largest_and_the_mean() -> None:
    stored, fresh = _sides()
    fresh["label_logprobs"][0, 1] -= 0.25
    fresh["logprobs"][0, 0, 1] += 0.5
    fresh["tail_logprobs"][0, 0, 0] = -np.inf
    fresh["entropy"][0, 0] = np.nan
    found = _found(stored, fresh)
    assert (found["label log-prob"].largest, found["label log-prob"].mean) == (0.25, 0.125)
    entry = found["entry log-prob"]
    assert (entry.largest, entry.mean) == pytest.approx((0.5, 0.125), abs=1e-6)
    tail = found["tail log-mass at temperature 1"].largest
    assert tail == pytest.approx(20 - 0.7, abs=0.01)
    assert found["entropy"].largest == np.inf


def test_impossible_labels_are_equal_on_both_sides_only() -> None:
    stored, fresh = _sides()
    stored["label_logprobs"][0, 0] = fresh["label_logprobs"][0, 0] = -np.inf
    assert _found(stored, fresh)["label log-prob"].largest == 0.0
    fresh["label_logprobs"][0, 0] = -50.0
    assert _found(stored, fresh)["label log-prob"].largest == np.inf


def test_rounding_in_storage_is_no_difference() -> None:
    stored, fresh = _sides()
    rounded = make_encoding(length=3, k=3, tail="sampled", mantissa_bits=6)
    stored["target_logprobs"][0, 0, 0] *= 1 + 2**-8
    found = {
        each.name: each
        for each in compare_log_probs(stored, fresh, rounded, rounded.relative_error, Recomputed())
    }
    assert found["entry log-prob"].largest == 0.0
    stored["target_logprobs"][0, 0, 0] *= 1 + 2**-5
    found = {
        each.name: each
        for each in compare_log_probs(stored, fresh, rounded, rounded.relative_error, Recomputed())
    }
    assert found["entry log-prob"].largest > 0.02


def test_an_id_may_change_places_with_one_as_likely_only() -> None:
    stored, fresh = _sides()
    fresh["ids"][0, 0, 1] = 6
    exact, sampled = compare_ids(stored, fresh, _ENCODING, 2.0**-24, 1e-3, True)
    assert exact == Ids("exact entries", 4, 3, 0)
    assert sampled == Ids("sampled entries", 2, 2)
    fresh["logprobs"][0, 0, 1] = -2.1
    exact, _ = compare_ids(stored, fresh, _ENCODING, 2.0**-24, 1e-3, True)
    assert exact == Ids("exact entries", 4, 3, 1)


def test_draws_are_compared_where_they_can_be() -> None:
    stored, fresh = _sides()
    fresh["ids"][0, 1, 2] = 8
    found = compare_ids(stored, fresh, _ENCODING, 2.0**-24, 1e-3, True)
    assert found[1] == Ids("sampled entries", 2, 1)
    assert len(compare_ids(stored, fresh, _ENCODING, 2.0**-24, 1e-3, False)) == 1
    assert findings([], found, "float32") == [
        "sampled entries: 50.0% are drawn again, expected at least 99%"
    ]


def test_findings_name_what_is_beyond_its_bound() -> None:
    good = Difference("a", 5, 1e-3, 1e-4)
    assert findings([good], [Ids("exact entries", 0, 0)], "float32") == []
    for bad in (Difference("a", 5, 2e-3, 0.0), Difference("a", 5, 1e-3, 2e-4)):
        (finding,) = findings([bad], [], "float32")
        assert finding.startswith("a: largest difference")
    assert findings([Difference("a", 5, np.nan, 0.0)], [], "bfloat16")
    assert findings([], [Ids("exact entries", 9, 8, 1)], "bfloat16")
