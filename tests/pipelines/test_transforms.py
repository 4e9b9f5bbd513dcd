"""The stages: small to send, one teacher per process, errors that find their way to the user."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from apache_beam.utils.shared import Shared

from cache.runlog import FAILED, read_events
from cache.shards import TakenOverError
from cache.storage import StorageError
from pipelines import transforms
from pipelines.begin import begin
from pipelines.errors import CorpusError
from pipelines.plan import Plan
from pipelines.teacher import Teacher, loads
from pipelines.transforms import LayPart, ScoreShard, WorkerError, stage_pipeline, user_text
from tests.pipelines import small


def plan(folder: Path, **changes: Any) -> Plan:
    started = begin(small.options(folder, **changes))
    assert isinstance(started, Plan)
    return started


def test_a_stage_is_small_and_holds_no_weights(tmp_path):
    made = plan(tmp_path)
    weights = (tmp_path / "teacher/model.safetensors").read_bytes()
    for stage in (LayPart, ScoreShard):
        pickled = cloudpickle.dumps(stage(made, Shared()))
        assert len(pickled) < 100_000 < len(weights)
        assert weights[-64:] not in pickled
        back = cloudpickle.loads(pickled)
        assert back._plan.manifest == made.manifest
        assert back._plan.store.location == made.store.location


def test_eight_threads_load_one_teacher(tmp_path):
    made = plan(tmp_path)
    barrier = threading.Barrier(8)
    shared = Shared()
    before = loads()

    def acquire(_: int) -> Teacher:
        stage = ScoreShard(made, cloudpickle.loads(cloudpickle.dumps(shared)))
        barrier.wait()
        stage.setup()
        return stage._teacher

    with ThreadPoolExecutor(8) as pool:
        teachers = list(pool.map(acquire, range(8)))
    assert loads() - before == 1
    assert len({id(teacher) for teacher in teachers}) == 1


@pytest.mark.parametrize("text", ["plain", 'with "quotes"\nand \\ lines', "Zwölf \x1e 日本", ""])
def test_a_users_text_survives_what_beam_does_to_it(text):
    error = WorkerError(text)
    assert user_text(error) == text
    assert user_text(WorkerError(f"{error} [while running 'y']")) == text
    wrapped = RuntimeError(f"Traceback (most recent call last):\n  x\n{error} [while running 'y']")
    assert user_text(RuntimeError(f"{wrapped}\n{wrapped}")) == text


def test_other_errors_are_not_a_users():
    assert user_text(ValueError("k")) is None
    assert user_text(ValueError("\x1estillroom:half")) is None


def test_elements_go_through_one_chain(tmp_path):
    import apache_beam as beam

    class Double(transforms._Stage):
        name = "number"

        def _work(self, element: int) -> None: ...

    pipeline = beam.Pipeline()
    stage_pipeline(pipeline, Double(plan(tmp_path), Shared()), [1, 2])
    producers: dict[Any, int] = {}

    class Count(beam.pipeline.PipelineVisitor):
        def visit_transform(self, node: Any) -> None:
            for value in node.inputs:
                producers[value] = producers.get(value, 0) + 1

    pipeline.visit(Count())
    assert set(producers.values()) == {1}


def stage_of(kind: type, made: Plan) -> Any:
    stage = kind(made, Shared())
    stage.setup()
    return stage


@pytest.mark.parametrize(
    ("error", "reason"),
    [(CorpusError("Document 3 is bad."), "Document 3 is bad."), (KeyError("x"), "KeyError('x')")],
)
def test_an_elements_error_is_logged_and_the_others_go_on(tmp_path, monkeypatch, error, reason):
    made = plan(tmp_path)
    real = transforms.lay_part

    def lay(store, corpus, tokenizer, settings, part, folder):
        if part == 1:
            raise error
        return real(store, corpus, tokenizer, settings, part, folder)

    monkeypatch.setattr(transforms, "lay_part", lay)
    stage = stage_of(LayPart, made)
    assert [element for part in range(3) for element in stage.process(part)] == [0, 1, 2]
    events = read_events(made.store, made.run)
    assert [event.get("part") for event in events if event["event"] == "part"] == [0, 2]
    (failed,) = [event for event in events if event["event"] == FAILED]
    assert (failed["part"], failed["reason"]) == (1, reason)
    assert "lay_part" in failed["trace"]


@pytest.mark.parametrize("kind", [StorageError, TakenOverError])
def test_what_every_element_would_meet_ends_the_stage(tmp_path, monkeypatch, kind):
    made = plan(tmp_path)

    def lay(*_: Any) -> None:
        raise kind("no more")

    monkeypatch.setattr(transforms, "lay_part", lay)
    with pytest.raises(WorkerError) as error:
        list(stage_of(LayPart, made).process(0))
    assert user_text(error.value) == "no more"


def test_a_full_disk_where_a_failure_is_logged_is_a_users_error_too(tmp_path, monkeypatch):
    made = plan(tmp_path)

    def lay(*_: Any) -> None:
        raise KeyError("x")

    monkeypatch.setattr(transforms, "lay_part", lay)
    stage = stage_of(LayPart, made)

    def full(*_: Any, **__: Any) -> None:
        raise StorageError("disk full")

    monkeypatch.setattr(stage._log, "write", full)
    with pytest.raises(WorkerError, match="disk full"):
        list(stage.process(0))


def test_a_teacher_that_cannot_be_loaded_is_a_users_error(tmp_path):
    made = plan(tmp_path)
    (tmp_path / "teacher/model.safetensors").unlink()
    with pytest.raises(WorkerError) as error:
        ScoreShard(made, Shared()).setup()
    assert "has no model.safetensors" in (user_text(error.value) or "")


def test_the_revision_is_the_teachers_alone(tmp_path, monkeypatch):
    from dataclasses import replace

    asked = []
    made = plan(tmp_path)
    real = transforms.load_tokenizer(made.options.teacher)

    def load(source: str, revision: str | None) -> Any:
        asked.append((source, revision))
        return real

    monkeypatch.setattr(transforms, "load_tokenizer", load)
    for tokenizer in (None, "own"):
        options = replace(made.options, teacher_revision="abc", tokenizer=tokenizer)
        stage_of(LayPart, replace(made, options=options))
    assert asked == [(made.options.teacher, "abc"), ("own", None)]


def test_a_worker_with_another_tokenizer_is_refused(tmp_path):
    made = plan(tmp_path)
    folder = tmp_path / "teacher"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<|im_end|>"}))
    with pytest.raises(WorkerError) as error:
        LayPart(made, Shared()).setup()
    assert "the tokenizer that this worker loaded has fingerprint" in (user_text(error.value) or "")


def test_fifty_lengths_compile_once(tmp_path, monkeypatch):
    from pipelines import scoring

    traced = []
    real = scoring.score_row

    def score_row(*arguments: Any) -> Any:
        traced.append(arguments[2].shape)
        return real(*arguments)

    monkeypatch.setattr(scoring, "score_row", score_row)
    small.run_without_beam(monkeypatch)
    small.options(tmp_path)
    small.write_corpus(tmp_path / "corpus.jsonl", ["x" * size for size in range(1, 51)])
    outcome = small.capture(tmp_path, layout="pad", rows_per_shard=37, documents_per_part=50)
    assert len(outcome.cache) > 100
    assert outcome.scored > 2
    assert traced == [(16,)]
    counted = np.concatenate(list(small.per_document(outcome.cache, "label_logprobs").values()))
    assert np.isfinite(counted).all()
