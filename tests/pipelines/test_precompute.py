"""A capture as a whole: resuming, failing, sharing a folder, repair, and the same bytes always."""

import json
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cache
from cache import finishing
from cache.errors import CacheError
from cache.format import receipt_key
from cache.runlog import read_events
from cache.shards import TakenOverError, check_run
from cache.storage import Store
from pipelines import precompute as precompute_module
from pipelines import transforms
from pipelines.begin import begin
from pipelines.errors import CaptureError, CorpusError
from pipelines.teacher import loads
from tests.pipelines import poison, small


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a teacher, a corpus and a complete cache that nothing disturbed."""
    return small.captured(tmp_path_factory.mktemp("made"), "whole")


@pytest.fixture(scope="module")
def whole(made: Path) -> dict[str, bytes]:
    return small.stored(made / "whole")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    small.quick(monkeypatch)


def copied(made: Path, name: Path) -> Path:
    shutil.copytree(made / "whole", name)
    return name


def capture(made: Path, out: Path, **changes: Any):
    return small.capture(made, out, **changes)


def test_what_comes_of_a_capture(made, whole):
    assert {key.split("/")[0] for key in whole} == {
        "arrays", "manifest.json", "manifest.backup.json", "receipts", "tokenizer"
    }  # fmt: skip
    assert whole["manifest.backup.json"] == whole["manifest.json"]
    assert cache.verify(made / "whole", full=True).sound
    opened = cache.open(made / "whole")
    shards = opened.manifest.shards
    assert shards >= 4
    assert len(opened) % 6 != 0
    assert small.scored_shards(made / "whole") == list(range(shards))
    # Shards and parts end at different rows, so that a shard has rows of several parts.
    assert opened.manifest.accounting["documents"] == 20
    events = read_events(Store(made / "whole"))
    assert [event["event"] for event in events][:1] == ["begin"]
    assert events[-1]["event"] == "finish"
    assert sum(event["event"] == "part" for event in events) == 4
    (run,) = small.runs(made / "whole")
    assert (made / f"whole/runs/{run}/config.toml").exists()


def test_a_finished_capture_is_done_again_without_a_forward_pass(made, tmp_path, monkeypatch):
    out = copied(made, tmp_path / "cache")
    before, loaded = small.everything(out), loads()
    monkeypatch.setattr(precompute_module, "run_pipeline", None)
    outcome = capture(made, out)
    assert (outcome.scored, outcome.notes, loads()) == (0, (), loaded)
    assert small.everything(out) == before
    assert len(outcome.cache) == outcome.cache.manifest.rows


@pytest.mark.parametrize("where", ["score_rows", "write_shard", "encode_shard"])
def test_a_shard_that_fails_is_the_only_one_done_again(made, whole, tmp_path, monkeypatch, where):
    real = getattr(transforms, where)
    calls = []

    def fail(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise ZeroDivisionError("cosmic ray")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(transforms, where, fail)
        with pytest.raises(CaptureError) as error:
            capture(made, tmp_path / "cache")
    text = str(error.value)
    assert text.startswith(
        "1 shard(s) could not be done; the others are finished:\n  shard 2: Zero"
    )
    assert "cosmic ray" in text
    assert "it redoes only these" in text
    (first,) = small.runs(tmp_path / "cache")
    assert f"{tmp_path / 'cache'}/runs/{first}/" in text
    shards = sum(key.startswith("receipts/") for key in whole)
    others = [shard for shard in range(shards) if shard != 2]
    assert small.scored_shards(tmp_path / "cache") == others
    assert json.loads((tmp_path / "cache/manifest.json").read_text())["state"] == "open"

    outcome = capture(made, tmp_path / "cache")
    assert outcome.scored == 1
    _, second = small.runs(tmp_path / "cache")
    assert small.scored_shards(tmp_path / "cache", second) == [2]
    assert small.stored(tmp_path / "cache") == whole


def test_many_shards_that_fail_are_counted(made, tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("always")

    monkeypatch.setattr(transforms, "score_rows", fail)
    with pytest.raises(CaptureError) as error:
        capture(made, tmp_path / "cache", rows_per_shard=3)
    listed = [line for line in str(error.value).splitlines() if line.startswith("  shard ")]
    assert len(listed) == 10
    assert f"and {int(str(error.value).split()[0]) - 10} more" in str(error.value)


def test_a_part_that_fails_is_the_only_one_done_again(made, whole, tmp_path, monkeypatch):
    real = transforms.lay_part
    laid: list[int] = []

    def lay(store: Store, corpus: Any, tokenizer: Any, settings: Any, part: int, to: str) -> Any:
        laid.append(part)
        if part == 1 and laid.count(1) == 1:
            raise ZeroDivisionError("cosmic ray")
        return real(store, corpus, tokenizer, settings, part, to)

    monkeypatch.setattr(transforms, "lay_part", lay)
    with pytest.raises(CaptureError, match=r"1 part\(s\) could not be done.*\n  part 1: ZeroDiv"):
        capture(made, tmp_path / "cache")
    assert small.scored_shards(tmp_path / "cache") == []
    capture(made, tmp_path / "cache")
    assert laid == [0, 1, 2, 3, 1]
    assert small.stored(tmp_path / "cache") == whole


def test_a_teacher_that_gives_nan_at_one_row(tmp_path, monkeypatch):
    small.options(tmp_path)
    documents = [text.replace("@", "") for text in small.texts()]
    documents[9] = "abc @ def"
    small.write_corpus(tmp_path / "corpus.jsonl", documents)
    settings = {
        "teacher": "tests.pipelines.poison:teacher",
        "tokenizer": str(tmp_path / "teacher"),
        "layout": "pad",
    }
    token = str(3 + ord("@"))
    monkeypatch.setattr(transforms, "Teacher", small.Teacher)  # no sharing: it changes
    monkeypatch.setenv(poison.VARIABLE, token)
    with pytest.raises(CaptureError) as error:
        small.capture(tmp_path, **settings)
    opened = Store(tmp_path / "cache")
    (run,) = small.runs(tmp_path / "cache")
    done = small.scored_shards(tmp_path / "cache", run)
    text = str(error.value)
    assert text.startswith("1 shard(s) could not be done")
    assert "(document 9)" in text
    assert "the teacher's logits are not numbers at 1 positions, first at row" in text
    row = int(text.split("first at row ")[1].split(",")[0])
    position = int(text.split("position ")[1].split()[0])
    assert row // 6 not in done
    assert len(done) == len(opened.list("receipts")) > 2

    monkeypatch.delenv(poison.VARIABLE)
    outcome = small.capture(tmp_path, **settings)
    assert outcome.scored == 1
    assert small.scored_shards(tmp_path / "cache", small.runs(tmp_path / "cache")[1]) == [row // 6]
    values = outcome.cache.rows([row], ("tokens", "documents"))
    assert values["tokens"][0, position] == int(token)
    assert values["documents"][0, position] == 9
    small.capture(tmp_path, "never", **settings)
    assert small.stored(tmp_path / "cache") == small.stored(tmp_path / "never")


def reorder(monkeypatch: pytest.MonkeyPatch, order: Any) -> None:
    stage = precompute_module.stage_pipeline
    monkeypatch.setattr(
        precompute_module,
        "stage_pipeline",
        lambda root, dofn, elements: stage(root, dofn, order(list(elements))),
    )


@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_the_order_of_work_changes_nothing(made, whole, tmp_path, monkeypatch, order):
    def shuffled(elements: list[int]) -> list[int]:
        random.Random(3).shuffle(elements)
        return elements

    reorder(monkeypatch, {"reversed": lambda x: x[::-1], "shuffled": shuffled}[order])
    capture(made, tmp_path / "cache")
    assert small.stored(tmp_path / "cache") == whole


def test_delays_change_nothing(made, whole, tmp_path, monkeypatch):
    chance, real = random.Random(5), transforms.write_shard

    def slow(*arguments: Any) -> Any:
        time.sleep(chance.random() / 20)
        return real(*arguments)

    monkeypatch.setattr(transforms, "write_shard", slow)
    capture(made, tmp_path / "cache")
    assert small.stored(tmp_path / "cache") == whole


def test_a_truncated_file_of_a_finished_shard_is_scored_again(made, whole, tmp_path, monkeypatch):
    real = transforms.write_shard

    def fail(store: Store, manifest: Any, shard: int, rows: int, arrays: Any) -> Any:
        if shard == 4:
            raise ZeroDivisionError
        return real(store, manifest, shard, rows, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(transforms, "write_shard", fail)
        with pytest.raises(CaptureError):
            capture(made, tmp_path / "cache")
    damage = [("target_ids", 0, "half"), ("tokens", 1, "gone"), ("entropy", 3, "longer")]
    for name, shard, kind in damage:
        (path,) = (tmp_path / f"cache/arrays/{name}").glob(f"c.{shard}.*")
        data = path.read_bytes()
        if kind == "gone":
            path.unlink()
        else:
            path.write_bytes(data[: len(data) // 2] if kind == "half" else data + b"x")
    outcome = capture(made, tmp_path / "cache")
    assert outcome.scored == 4
    run = small.runs(tmp_path / "cache")[-1]
    assert small.scored_shards(tmp_path / "cache", run) == [0, 1, 3, 4]
    assert small.stored(tmp_path / "cache") == whole


def test_receipts_of_another_cache_are_not_accepted(made, whole, tmp_path, capsys):
    capture(made, tmp_path / "other", mantissa_bits=5)
    begin(small.options(made, tmp_path / "cache"))
    for kind in ("receipts", "arrays"):
        shutil.copytree(tmp_path / "other" / kind, tmp_path / "cache" / kind)
    (tmp_path / "cache/receipts/000099.json").write_bytes(b"{}")
    (tmp_path / "cache/receipts/000001.json").write_bytes(b"not a receipt")
    shutil.copy(made / "whole/receipts/000003.json", tmp_path / "cache/receipts/000002.json")
    outcome = capture(made, tmp_path / "cache")
    assert outcome.scored == outcome.cache.manifest.shards
    assert small.stored(tmp_path / "cache") == whole


def test_a_receipt_of_other_arrays_is_not_accepted(made, whole, tmp_path):
    out = copied(made, tmp_path / "cache")
    cache.verify(out, full=True, repair=True)
    begin(small.options(made, tmp_path / "again"))
    for kind in ("receipts", "arrays"):
        shutil.copytree(out / kind, tmp_path / "again" / kind)
    receipt = json.loads((out / "receipts/000001.json").read_text())
    receipt["arrays"]["notes"] = receipt["arrays"].pop("entropy")
    (tmp_path / "again/receipts/000001.json").write_text(json.dumps(receipt))
    assert capture(made, tmp_path / "again").scored == 1
    assert small.stored(tmp_path / "again") == whole


def damage_bit(out: Path, shard: int) -> None:
    (path,) = (out / "arrays/target_logprobs").glob(f"c.{shard}.*")
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)


def damage_receipt(out: Path, shard: int) -> None:
    path = out / receipt_key(shard)
    path.write_text(path.read_text().replace('"entropy":', '"entropy" :', 1))


DAMAGES = {
    "a bit": damage_bit,
    "a missing receipt": lambda out, shard: (out / receipt_key(shard)).unlink(),
    "a changed receipt": damage_receipt,
    "a missing file": lambda out, shard: next(
        (out / "arrays/segments").glob(f"c.{shard}.*")
    ).unlink(),
    "a file of another shard": lambda out, shard: shutil.copy(
        next((out / "arrays/documents").glob(f"c.{(shard + 1) % 2}.*")),
        next((out / "arrays/documents").glob(f"c.{shard}.*")),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_repair_redoes_exactly_what_is_broken(made, whole, tmp_path, damage):
    out = copied(made, tmp_path / "cache")
    for shard in range(sum(key.startswith("receipts/") for key in whole)):
        DAMAGES[damage](out, shard)
        report = cache.verify(out, full=True, repair=True)
        assert not report.sound
        assert report.repaired == (shard,)
        outcome = capture(made, out)
        assert outcome.scored == 1
        assert small.scored_shards(out, small.runs(out)[-1]) == [shard]
        assert small.stored(out) == whole


def test_repair_of_what_is_no_shards(made, whole, tmp_path):
    out = copied(made, tmp_path / "cache")
    (out / "tokenizer/tokenizer.json").write_text("{}")
    (out / "arrays/tokens/zarr.json").unlink()
    assert cache.verify(out, repair=True).repaired == ()
    assert capture(made, out).scored == 0
    assert small.stored(out) == whole


def test_receipts_of_parts_without_their_rows_are_no_obstacle(made, whole, tmp_path):
    """A command that was killed while it removed the parts, then a repair."""
    out = tmp_path / "cache"
    capture(made, out, keep_parts=True)
    for part in (0, 2):
        (out / f"parts/{part:06d}.npz").unlink()
    damage_bit(out, 1)
    assert cache.verify(out, full=True, repair=True).repaired == (1,)
    assert capture(made, out).scored == 1
    assert small.stored(out) == whole


def test_a_corpus_that_changed_since_a_repair_is_refused(made, tmp_path):
    folder = tmp_path / "work"
    shutil.copytree(made, folder)
    small.capture(folder, "cache")
    damage_bit(folder / "cache", 1)
    cache.verify(folder / "cache", full=True, repair=True)
    documents = small.texts()
    documents[8] = "another"
    small.write_corpus(folder / "corpus.jsonl", documents)
    before = small.stored(folder / "cache")
    with pytest.raises(CaptureError, match="of the documents 6-11 at least one is another"):
        small.capture(folder, "cache")
    assert small.stored(folder / "cache") == before


def test_a_corpus_that_changes_under_way_is_refused(made, tmp_path, monkeypatch):
    """After the begin of the command that takes a repaired cache over."""
    folder = tmp_path / "work"
    shutil.copytree(made, folder)
    small.capture(folder, "cache")
    damage_bit(folder / "cache", 1)
    cache.verify(folder / "cache", full=True, repair=True)
    real = transforms.open_corpus

    def another(settings: Any) -> Any:
        documents = small.texts()
        documents[8] = "another"
        small.write_corpus(folder / "corpus.jsonl", documents)
        return real(settings)

    monkeypatch.setattr(transforms, "open_corpus", another)
    with pytest.raises(CorpusError, match="documents 6-11 are not those that the cache was made"):
        small.capture(folder, "cache")


def test_a_run_that_was_taken_over_may_not_commit(made, tmp_path):
    first = begin(small.options(made, tmp_path / "cache"))
    check_run(first.store, first.run)
    second = begin(small.options(made, tmp_path / "cache"))
    check_run(second.store, second.run)
    with pytest.raises(
        TakenOverError, match=f"filled by run {second.run}, this is run {first.run}"
    ):
        check_run(first.store, first.run)


@pytest.mark.parametrize("finishes", [False, True])
def test_two_captures_into_one_folder(made, whole, tmp_path, monkeypatch, finishes):
    """The second takes over while the first is about to store its shard 2."""
    out, real = tmp_path / "cache", transforms.write_shard
    first: list[str] = []

    def write(store: Store, manifest: Any, shard: int, rows: int, arrays: Any) -> Any:
        if not first and shard == 2:
            first.append(manifest.run)
            if finishes:
                capture(made, out)
            else:
                begin(small.options(made, out))
        return real(store, manifest, shard, rows, arrays)

    monkeypatch.setattr(transforms, "write_shard", write)
    with pytest.raises(CaptureError, match=r"this is run \w+: another run took over. Nothing is"):
        capture(made, out)
    assert small.scored_shards(out, first[0]) == [0, 1]
    if not finishes:
        assert Store(out).list("receipts") == ["000000.json", "000001.json"]
        capture(made, out)
    assert small.stored(out) == whole
    counted = small.scored_shards(out)
    assert counted == sorted(set(counted))


def test_the_manifest_is_completed_by_the_run_that_owns_it(made, tmp_path, monkeypatch):
    out, real = tmp_path / "cache", finishing.check_run

    def check(store: Store, run: str) -> None:
        real(store, run)
        begin(small.options(made, out))

    monkeypatch.setattr(finishing, "check_run", check)
    with pytest.raises(CacheError, match="was changed by another run at the very end"):
        capture(made, out)
    assert json.loads((out / "manifest.json").read_text())["state"] == "open"


def test_parts_are_kept_on_demand(made, whole, tmp_path):
    capture(made, tmp_path / "cache", keep_parts=True)
    kept = small.stored(tmp_path / "cache")
    assert sorted(key for key in kept if key.startswith("parts/")) == sorted(
        f"parts/{part:06d}.{kind}" for part in range(4) for kind in ("json", "npz")
    )
    capture(made, tmp_path / "cache")
    assert small.stored(tmp_path / "cache") == whole
    assert not (tmp_path / "cache/parts").exists()


@pytest.mark.parametrize("documents", [[""] * 3, ["", "a", ""], ["a"]])
def test_a_corpus_with_nothing_to_predict(tmp_path, documents):
    small.options(tmp_path)
    small.write_corpus(tmp_path / "corpus.jsonl", documents)
    ones = documents.count("a")
    with pytest.raises(
        CorpusError,
        match=f"nothing to predict: {len(documents)} documents, of which {documents.count('')} are "
        f"empty and {ones} have one token. Check --dataset and --column",
    ):
        small.capture(tmp_path)


def test_notes_tell_what_was_left_out(tmp_path, monkeypatch):
    from tests.models import tiny_tokenizer

    small.options(tmp_path)
    definition = tiny_tokenizer()
    # The symbol of byte 0xC3, which starts "ö"; nothing else gets its id.
    definition["model"]["vocab"] = {
        ("<|unused|>" if token == "Ã" else token): place
        for token, place in definition["model"]["vocab"].items()
    }
    (tmp_path / "teacher/tokenizer.json").write_text(json.dumps(definition))
    small.write_corpus(tmp_path / "corpus.jsonl", ["Zwölf", "a", "plain", "öö"])
    outcome = small.capture(tmp_path, layout="pad")
    assert outcome.notes == (
        "The tokenizer has no token for 3 bytes of 2 documents and leaves them out.",
        "1 rows have nothing to predict.",
    )
    assert outcome.cache.manifest.accounting["dropped_bytes"] == 3


def test_settings_of_threads_do_not_leak(made, whole, tmp_path):
    """The whole thing works outside of the main thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(capture(made, tmp_path / "cache")))
    thread.start()
    thread.join()
    assert results[0].scored > 0
    assert small.stored(tmp_path / "cache") == whole


def test_row_i_holds_the_tokens_of_row_i(made):
    """C32: rows are where the parts put them, not where they arrived."""
    opened = cache.open(made / "whole")
    values = opened.rows(slice(None), ("tokens", "documents", "segments"))
    tokenizer = opened.tokenizer()
    texts = small.texts()
    for row in range(len(opened)):
        for segment in range(1, int(values["segments"][row].max()) + 1):
            inside = values["segments"][row] == segment
            (document,) = np.unique(values["documents"][row][inside])
            text = tokenizer.decode(values["tokens"][row][inside].tolist())
            assert text.replace("\ufffd", "") in texts[document]
