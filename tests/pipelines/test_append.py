"""Append: more documents as a new extent; what was there stays, to the byte."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import cache
import stillroom
from cache.errors import CacheError
from cache.format import BACKUP, MANIFEST, NO_DOCUMENT, PARTS, WORK
from cache.manifest import read_manifest
from cache.storage import Store
from decoder.errors import DecoderError
from pipelines import transforms
from pipelines.append import append
from pipelines.errors import CaptureError, CorpusError, TeacherError
from pipelines.options import AppendOptions
from student.split import split_rows
from tests.cache.builder import same
from tests.models import write_tiny_teacher
from tests.pipelines import small
from tests.pipelines.small import capture, stored

MORE = [f"{index} an added text with its own words" for index in range(9)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.captured(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def grown(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache to which documents were added, and the file that has them."""
    folder = tmp_path_factory.mktemp("grown")
    small.copy(made / "cache", folder / "cache")
    small.write_corpus(folder / "more.jsonl", MORE)
    with pytest.MonkeyPatch.context() as patch:
        small.quick(patch)
        outcome = append(_options(folder))
    assert outcome.scored == 3
    return folder


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    small.quick(monkeypatch)


def _options(folder: Path, name: str = "more.jsonl", **changes: Any) -> AppendOptions:
    return AppendOptions(str(folder / "cache"), str(folder / name), **changes)


def _begun(made: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int = 7) -> None:
    """A copy of the cache with an addition that was stopped before one of its shards 6, 7, 8."""
    small.copy(made / "cache", folder / "cache")
    small.write_corpus(folder / "more.jsonl", MORE)
    real = transforms.write_shard

    def write(store: Store, manifest: Any, shard: int, rows: int, arrays: Any) -> Any:
        if shard >= fails_at:
            raise OSError("stopped")
        return real(store, manifest, shard, rows, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(transforms, "write_shard", write)
        with pytest.raises(CaptureError, match=r"shard 7: .*stopped"):
            append(_options(folder))


def test_what_was_there_stays_to_the_byte(made: Path, grown: Path) -> None:
    before, after = stored(made / "cache"), stored(grown / "cache")
    same = {key for key in before if after[key] == before[key]}
    changed = {key for key in before if key not in same}
    assert changed == {"manifest.json", "manifest.backup.json", "arrays/zarr.json"} | {
        key for key in before if key.startswith("arrays/") and key.endswith("/zarr.json")
    }
    assert {key for key in after if key.startswith("receipts/")} == {
        f"receipts/{shard:06d}.json" for shard in range(9)
    }
    assert not [key for key in after if key.startswith(PARTS) or key == WORK]


def test_rows_of_both_extents(made: Path, grown: Path) -> None:
    old, new = cache.open(made / "cache"), cache.open(grown / "cache")
    assert (len(old), len(new)) == (33, 51)
    first, second = old.rows(slice(None)), new.rows(slice(33, None))
    for name, values in new.rows(slice(0, 33)).items():
        assert values.tobytes() == first[name].tobytes()
    real = second["documents"] != NO_DOCUMENT
    assert np.unique(second["documents"][real]).tolist() == list(range(20, 29))
    assert new.manifest.documents == 29
    assert stillroom.verify(grown / "cache", full=True).sound
    with_labels = new.rows(np.array([50, 0, 33, 32]), "tokens")["tokens"]
    assert (with_labels[0] == second["tokens"][-1]).all()
    assert (with_labels[2] == second["tokens"][0]).all()


def test_the_added_targets_are_those_of_a_capture_of_the_same_documents(
    made: Path, grown: Path, tmp_path: Path
) -> None:
    alone = capture(
        made, tmp_path / "alone", dataset=str(grown / "more.jsonl"), tail="none", k=4
    ).cache
    both = small.per_document(cache.open(grown / "cache"), "target_ids")
    logprobs = small.per_document(cache.open(grown / "cache"), "label_logprobs")
    expected = small.per_document(alone, "target_ids")
    assert sorted(both) == list(range(29))
    for document, ids in expected.items():
        # The two exact entries; what is sampled has other row numbers.
        assert (both[20 + document][:, :2] == ids[:, :2]).all()
    for document, values in small.per_document(alone, "label_logprobs").items():
        np.testing.assert_allclose(logprobs[20 + document], values, atol=1e-5)


def test_accounting_and_statistics_are_of_both(made: Path, grown: Path) -> None:
    old, new = (read_manifest(Store(path / "cache"))[0] for path in (made, grown))
    extent = new.extents[1]
    assert extent.accounting is not None
    assert extent.corpus is not None
    assert new.accounting["tokens"] == old.accounting["tokens"] + extent.accounting["tokens"]
    assert new.accounting["documents"] == 29
    assert new.statistics is not None
    assert new.statistics.labels == new.accounting["labels"]
    assert extent.corpus["documents"] == 9


def test_zarr_reads_the_grown_arrays(grown: Path) -> None:
    opened = cache.open(grown / "cache")
    array: Any = zarr.open_array(str(grown / "cache" / "arrays" / "tokens"), mode="r")
    # The first extent ends with three rows of six.
    assert array.shape[0] == 6 * 6 + 18
    tokens = opened.rows(slice(None), "tokens")["tokens"]
    assert (np.concatenate([array[:33], array[36:]]) == tokens).all()


def test_a_student_splits_a_grown_cache(grown: Path) -> None:
    split = split_rows(cache.open(grown / "cache"), 0.2, 0)
    assert len(split.training) + len(split.held_out) == 51 - split.rows_without_labels


def test_a_reader_that_is_open_keeps_what_it_has(made: Path, tmp_path: Path) -> None:
    small.copy(made / "cache", tmp_path / "cache")
    small.write_corpus(tmp_path / "more.jsonl", MORE)
    reader = cache.open(tmp_path / "cache")
    before = reader.rows(slice(None))
    append(_options(tmp_path))
    assert len(reader) == 33
    for name, values in reader.rows(slice(None)).items():
        assert values.tobytes() == before[name].tobytes()
    with pytest.raises(CacheError, match="rows 0 to 32"):
        reader.rows([33])


def test_while_it_is_under_way(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finished part can be read and captured again; verify says that there is work left."""
    _begun(made, tmp_path, monkeypatch)
    assert len(cache.open(tmp_path / "cache")) == 33
    (damage,) = stillroom.verify(tmp_path / "cache", full=True).damage
    assert "shards are being added" in damage.reason
    assert capture(made, tmp_path / "cache").scored == 0
    assert Store(tmp_path / "cache").read(WORK) is not None


def test_an_interrupted_addition_comes_to_the_same_bytes(
    made: Path, grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _begun(made, tmp_path, monkeypatch)
    # The identity of files is in the manifest: the very same file goes on.
    outcome = append(_options(tmp_path))
    assert outcome.scored == 2
    assert stored(tmp_path / "cache", data_only=True) == stored(grown / "cache", data_only=True)
    again = append(_options(tmp_path))
    assert again.scored == 0
    assert again.notes == ("These documents are in the cache already; nothing was appended.",)


def test_another_addition_waits(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _begun(made, tmp_path, monkeypatch)
    small.write_corpus(tmp_path / "other.jsonl", ["something else"])
    before = small.everything(tmp_path / "cache")
    with pytest.raises(CacheError, match=r"other work .* is not finished") as raised:
        append(_options(tmp_path, "other.jsonl"))
    assert f"`stillroom append` of {tmp_path / 'more.jsonl'} (1 json file). It differs" in str(
        raised.value
    )
    assert "\n  its documents are of" in str(raised.value)
    assert small.everything(tmp_path / "cache") == before


def test_work_that_was_given_up_leaves_nothing_to_the_next(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that it had laid and the shards that it had scored are of other documents."""
    _begun(made, tmp_path, monkeypatch)
    other = [f"other text {number}" for number in range(len(MORE))]
    small.write_corpus(tmp_path / "other.jsonl", other)
    Store(tmp_path / "cache").delete(WORK)
    outcome = append(_options(tmp_path, "other.jsonl"))
    direct = small.copy(made / "cache", tmp_path / "direct" / "cache")
    small.write_corpus(tmp_path / "direct" / "other.jsonl", other)
    append(_options(tmp_path / "direct", "other.jsonl"))
    opened = outcome.cache
    whole = cache.open(direct)
    assert len(opened) == len(whole)
    for name, values in opened.rows(slice(None)).items():
        assert same(values, whole.rows(slice(None), (name,))[name])
    assert stillroom.verify(tmp_path / "cache", full=True).sound


def test_documents_that_are_there_already_are_refused(grown: Path, tmp_path: Path) -> None:
    small.copy(grown / "cache", tmp_path / "cache")
    small.write_corpus(tmp_path / "again.jsonl", MORE)
    before = stored(tmp_path / "cache")
    with pytest.raises(CorpusError, match="in the cache already, from shard 6 on"):
        append(_options(tmp_path, "again.jsonl"))
    assert stored(tmp_path / "cache") == before


@pytest.mark.parametrize("texts", [[""], ["a"]])
def test_documents_with_nothing_to_predict_do_not_stay_in_the_way(
    grown: Path, tmp_path: Path, texts: list[str]
) -> None:
    small.copy(grown / "cache", tmp_path / "cache")
    small.write_corpus(tmp_path / "nothing.jsonl", texts)
    before = stored(tmp_path / "cache")
    with pytest.raises(CorpusError, match="nothing to predict"):
        append(_options(tmp_path, "nothing.jsonl"))
    assert stored(tmp_path / "cache") == before
    small.write_corpus(tmp_path / "other.jsonl", ["something else"])
    assert append(_options(tmp_path, "other.jsonl")).scored > 0
    assert stillroom.verify(tmp_path / "cache", full=True).sound


def test_a_teacher_that_has_gone_is_asked_for(
    grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_folder = small.copy(grown / "cache", tmp_path / "cache")
    small.write_corpus(tmp_path / "other.jsonl", ["something else"])
    manifest = cache.open(cache_folder).manifest
    moved = replace(manifest, teacher={**manifest.teacher, "source": "./gone"})
    for name in (MANIFEST, BACKUP):
        Store(cache_folder).write(name, moved.to_bytes())
    with pytest.raises(TeacherError, match=r"'\./gone' does not exist (?s:.)*with --teacher"):
        append(_options(tmp_path, "other.jsonl"))
    given = replace(_options(tmp_path, "other.jsonl"), teacher="./nowhere")
    with pytest.raises(DecoderError, match=r"'\./nowhere' does not exist") as raised:
        append(given)
    assert "--teacher" not in str(raised.value)


def test_the_documents_of_the_capture_are_refused(made: Path) -> None:
    with pytest.raises(CaptureError, match=r"was made from\. Nothing was"):
        append(_options(made, "corpus.jsonl"))


def test_another_teacher_is_refused_by_name(made: Path, tmp_path: Path) -> None:
    small.write_corpus(tmp_path / "more.jsonl", MORE)
    small.copy(made / "cache", tmp_path / "cache")
    write_tiny_teacher(tmp_path / "other", seed=5)
    before = small.everything(tmp_path / "cache")
    with pytest.raises(CaptureError, match=r"teacher: the cache's has fingerprint"):
        append(_options(tmp_path, teacher=str(tmp_path / "other")))
    assert small.everything(tmp_path / "cache") == before


def test_an_unfinished_cache_is_refused(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.write_corpus(tmp_path / "more.jsonl", MORE)
    with monkeypatch.context() as patch:
        patch.setattr(transforms, "score_rows", lambda *_: 1 / 0)
        with pytest.raises(CaptureError):
            capture(made, tmp_path / "cache")
    with pytest.raises(CaptureError, match="is not finished"):
        append(_options(tmp_path))


@pytest.mark.parametrize("shard", [2, 7])
def test_damage_is_redone_by_the_command_that_made_the_shard(
    made: Path, grown: Path, tmp_path: Path, shard: int
) -> None:
    small.copy(grown / "cache", tmp_path / "cache")
    whole = stored(tmp_path / "cache")
    (tmp_path / "cache" / "arrays" / "entropy" / f"c.{shard}.0").write_bytes(b"broken")
    report = stillroom.verify(tmp_path / "cache", full=True, repair=True)
    assert report.repaired == (shard,)
    first = (
        capture(made, tmp_path / "cache")
        if shard == 2
        else append(AppendOptions(str(tmp_path / "cache"), str(grown / "more.jsonl")))
    )
    assert first.scored == 1
    assert stored(tmp_path / "cache") == whole
    assert stillroom.verify(tmp_path / "cache", full=True).sound


def test_the_command(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small.copy(made / "cache", tmp_path / "cache")
    small.write_corpus(tmp_path / "more.jsonl", MORE)
    words = ["append", str(tmp_path / "cache"), "--dataset", str(tmp_path / "more.jsonl")]
    assert stillroom.main(words) == 0
    shown = capsys.readouterr().out
    assert "scored 3 shards" in shown
    assert "29 documents" in shown
    assert stillroom.main(["append", str(tmp_path / "none"), "--dataset", "x.jsonl"]) == 1
    assert "is not a cache" in capsys.readouterr().err
