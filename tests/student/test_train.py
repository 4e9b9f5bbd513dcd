"""Whole runs: what they write, in which order rows come, what is repeatable, what is kept."""

import json
import math
import threading
import tomllib
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import cache
import decoder
import stillroom
from student.errors import TrainingError
from student.metrics import read_metrics
from student.plan import decides, make_plan
from student.run import read_run
from student.train import train
from student.trained import evaluate
from tests.pipelines import small
from tests.student import runs


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    runs.quick(monkeypatch)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A cache, a student, and the run `whole` of them with every checkpoint."""
    folder = runs.make(tmp_path_factory.mktemp("made"))
    with pytest.MonkeyPatch.context() as patch:
        runs.quick(patch)
        _, said = runs.run(runs.options(folder, "whole", keep=100))
    (folder / "said").write_text(said)
    return folder


def placed(patch: pytest.MonkeyPatch) -> list:
    """The batches that training places on devices from now on."""
    batches: list = []
    original = runs.train_module.place

    def place(batch, *rest):
        batches.append(batch)
        return original(batch, *rest)

    patch.setattr("student.train.place", place)
    return batches


# What a run leaves behind.


def test_what_a_run_holds(made):
    run, plan = made / "whole", make_plan(runs.options(made, "whole", keep=100))
    assert {path.name for path in run.iterdir()} == {
        "run.json",
        "lock",
        "sessions",
        "tokenizer",
        "checkpoints",
        "metrics.jsonl",
        "evaluations.jsonl",
    }
    record = read_run(run)
    model = record.pop("model")
    assert record == json.loads(json.dumps(decides(plan)))
    assert (model["kind"], model["source"]) == ("checkpoint", str(made / "student"))
    kept = decoder.load_tokenizer(str(run / "tokenizer"))
    assert kept.fingerprint == decoder.load_tokenizer(str(made / "student")).fingerprint
    session = tomllib.loads((run / "sessions/1.toml").read_text())
    assert session["cache"] == str((made / "cache").resolve())
    assert (session["keep"], session["batch"]) == (100, 4)


def test_what_is_said(made):
    said = (made / "said").read_text()
    assert "18 rows with" in said
    assert "Objective: sampled" in said
    first = read_metrics(made / "whole/evaluations.jsonl")[0]
    assert (
        f"Held-out perplexity before step 1: student {first['perplexity']:,.1f}, teacher "
        f"{first['teacher_perplexity']:,.1f}"
    ) in said
    assert [f"Step {step}, held out: " in said for step in (5, 9)] == [True, True]


def test_the_teachers_perplexity_is_that_of_the_held_out_labels(made):
    plan = make_plan(runs.options(made))
    rows = plan.cache.rows(plan.split.held_out, ("label_logprobs", "label_mask"))
    logprobs = rows["label_logprobs"][rows["label_mask"] == 1].astype(np.float64)
    for line in read_metrics(made / "whole/evaluations.jsonl"):
        assert (line["rows"], line["labels"]) == (3, len(logprobs))
        assert line["teacher_perplexity"] == pytest.approx(math.exp(-logprobs.mean()), rel=1e-9)


def test_the_lines_of_the_steps(made):
    """The schedule and the counts, worked out here; the loss from its parts."""
    plan = make_plan(runs.options(made))
    lines = read_metrics(made / "whole/metrics.jsonl")
    warm, steps, highest = 1, 9, 0.01  # 5 % of 9 steps, rounded up
    for step, line in enumerate(lines):
        share = max(step - warm, 0) / (steps - 1 - warm)
        cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2
        rate = highest * (0.5 if step == 0 else cosine)
        assert line["learning_rate"] == pytest.approx(rate, rel=1e-5)
        assert line["alpha"] == 0.5
        assert line["loss"] == pytest.approx(0.5 * line["ce"] + 0.5 * line["kd"], rel=1e-5)
        assert line["perplexity"] == pytest.approx(math.exp(line["ce"]), rel=1e-6)
        assert line["gradient_norm"] > 0
        assert 0 <= line["input_wait"] <= 1
        assert line["tokens_per_second"] > 0
        assert line["device_memory"] is None  # CPUs do not tell
    assert sum(line["labels"] for line in lines) == 2 * plan.split.training_labels
    segments = plan.cache.rows(plan.split.training, "segments")["segments"]
    assert sum(line["tokens"] for line in lines) == 2 * np.count_nonzero(segments)


def test_alpha_moves(made, tmp_path):
    train(runs.options(made, str(tmp_path / "run"), alpha=0.9, alpha_end=0.1))
    lines = read_metrics(tmp_path / "run/metrics.jsonl")
    for step, line in enumerate(lines):
        expected = 0.9 - 0.8 * step / 8
        assert line["alpha"] == pytest.approx(expected, abs=1e-6)
        mixed = expected * line["ce"] + (1 - expected) * line["kd"]
        assert line["loss"] == pytest.approx(mixed, rel=1e-5)
    # Evaluations weigh as the last step does, so that they can be compared.
    for line in read_metrics(tmp_path / "run/evaluations.jsonl"):
        mixed = 0.1 * line["cross_entropy"] + 0.9 * line["kl"]
        assert line["loss"] == pytest.approx(mixed, rel=1e-5)


def test_a_student_learns(made):
    first, _, last = read_metrics(made / "whole/evaluations.jsonl")
    assert last["loss"] < first["loss"]
    assert last["kl"] < first["kl"]


# The data.


def test_every_row_once_an_epoch_and_no_other(made, tmp_path, monkeypatch):
    """Rows that are held out, or have no label (C16, C35), are never trained on."""
    batches = placed(monkeypatch)
    train(runs.options(made, str(tmp_path / "run")))
    plan = make_plan(runs.options(made))
    rows = np.concatenate([batch.rows for batch in batches])
    training = plan.split.training.tolist()
    assert len(batches) == 9
    assert sorted(rows[:18].tolist()) == sorted(rows[18:36].tolist()) == training
    assert rows[:18].tolist() != rows[18:36].tolist()
    mask = plan.cache.rows(slice(None), "label_mask")["label_mask"]
    nothing = np.flatnonzero(~mask.any(axis=-1)).tolist()
    assert nothing == [5]
    assert not set(training) & {*nothing, *plan.split.held_out.tolist()}
    # The tokens of each row are its own.
    tokens = plan.cache.rows(slice(None), "tokens")["tokens"]
    for batch in batches:
        real = batch.rows >= 0
        assert np.array_equal(batch.tokens[real], tokens[batch.rows[real]])
        assert batch.label_mask[real].any(axis=-1).all()


def test_the_same_run_twice_and_another_seed(made, tmp_path, monkeypatch):
    train(runs.options(made, str(tmp_path / "again")))
    runs.assert_equal(tmp_path / "again", made / "whole")
    batches = placed(monkeypatch)
    train(runs.options(made, str(tmp_path / "other"), seed=1))
    assert runs.saved(tmp_path / "other", 9) != runs.saved(made / "whole", 9)
    found, expected = runs.parameters(tmp_path / "other"), runs.parameters(made / "whole")
    assert all(not np.array_equal(found[name], expected[name]) for name in expected)
    assert len(batches) == 9


def test_a_dropped_block(made, tmp_path):
    """A student of two layers without the second is the student of the first."""
    runs.write_student(tmp_path / "two", layers=2)
    asked = {"student": str(tmp_path / "two"), "drop_layers": "1-1"}
    _, said = runs.run(runs.options(made, str(tmp_path / "run"), **asked))
    assert "1 layers" in said
    assert read_run(tmp_path / "run")["model"]["dropped"] == {"first": 1, "last": 1, "of": 2}
    names = set(runs.parameters(tmp_path / "run"))
    assert names == set(runs.parameters(made / "whole"))


# Checkpoints.


@pytest.mark.parametrize(
    ("changes", "losses", "kept"),
    [
        ({"keep": 2}, (3.0, 2.0, 1.0), [8, 9]),
        ({"keep": 2}, (3.0, 1.0, 2.0), [5, 8, 9]),
        ({"keep": 1}, (1.0, 2.0, 3.0), [0, 9]),
        ({"keep": 1, "keep_best": False}, (1.0, 2.0, 3.0), [9]),
    ],
)
def test_which_checkpoints_are_kept(made, tmp_path, monkeypatch, changes, losses, kept):
    found = iter(losses)
    original = runs.train_module.mean_over
    monkeypatch.setattr(
        "student.train.mean_over", lambda *given: replace(original(*given), loss=next(found))
    )
    train(runs.options(made, str(tmp_path / "run"), **changes))
    assert runs.steps_saved(tmp_path / "run") == kept


def test_without_held_out_rows_nothing_is_evaluated(made, tmp_path):
    with runs.killed_at("_steps", 0), pytest.raises(runs.Killed):
        train(runs.options(made, str(tmp_path / "run"), held_out=0.0))
    assert (tmp_path / "run/evaluations.jsonl").read_text() == ""
    assert runs.steps_saved(tmp_path / "run") == [0]


# Numbers that are not finite.


def poison(patch: pytest.MonkeyPatch, step: int, before: bool) -> None:
    """Makes a parameter NaN before or after a step is computed."""
    make = runs.train_module.make_step

    def made(*arguments):
        compiled, calls = make(*arguments), iter(range(1, 100))

        def spoilt(state):
            bad = {name: x * np.float32(np.nan) for name, x in state.parameters.items()}
            return state._replace(parameters=bad)

        def run(state, batch, alpha):
            now = next(calls) == step
            state, metrics = compiled(spoilt(state) if now and before else state, batch, alpha)
            return (spoilt(state) if now and not before else state), metrics

        return run

    patch.setattr("student.train.make_step", made)


@pytest.mark.parametrize("step", [1, 4, 6])
def test_a_loss_that_is_not_finite(made, tmp_path, step, capsys):
    """Step and rows are named; from the newest checkpoint the run goes on as if nothing was."""
    words = runs.words(runs.options(made, str(tmp_path / "run")))
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, step, before=True)
        batches = placed(patch)
        assert stillroom.main(words) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    rows = ", ".join(map(str, batches[step - 1].rows.tolist()))
    assert f"stillroom train: step {step} gave numbers that are not finite" in captured.err
    assert f"Its rows of the cache are {rows}. " in captured.err
    assert "Traceback" not in captured.err
    assert [x["step"] for x in read_metrics(tmp_path / "run/metrics.jsonl")] == list(range(1, step))
    assert runs.steps_saved(tmp_path / "run")[-1] == max(x for x in (0, 2, 4, 5) if x < step)
    train(runs.options(made, str(tmp_path / "run")))
    runs.assert_equal(tmp_path / "run", made / "whole")


@pytest.mark.parametrize("step", [6, 9])
def test_parameters_that_are_not_finite_are_not_saved(made, tmp_path, step):
    """The loss of a step is that before its update: it cannot tell."""
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, step, before=False)
        with pytest.raises(TrainingError, match=rf"after step {step} the parameter .* not finite"):
            train(runs.options(made, str(tmp_path / "run"), keep=1))
    assert runs.steps_saved(tmp_path / "run")[-1] == {6: 5, 9: 8}[step]
    train(runs.options(made, str(tmp_path / "run")))
    runs.assert_equal(tmp_path / "run", made / "whole")


# The process.


def test_no_thread_is_left(made, tmp_path):
    """C56; also where a run ends early."""
    before = set(threading.enumerate())
    train(runs.options(made, str(tmp_path / "run")))
    with runs.killed_at("_log", 2), pytest.raises(runs.Killed):
        train(runs.options(made, str(tmp_path / "killed")))
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join(20)  # it is on its way out
            assert not thread.is_alive(), thread.name


def test_what_is_said_goes_to_who_asked(made, tmp_path, capsys):
    _, said = runs.run(runs.options(made, str(tmp_path / "run")))
    err = capsys.readouterr().err
    assert "held out: cross-entropy" in said
    assert "held out: cross-entropy" not in err
    train(runs.options(made, str(tmp_path / "other")))
    assert "held out: cross-entropy" in capsys.readouterr().err


# A real capture.


@pytest.fixture(scope="module")
def captured(tmp_path_factory) -> Path:
    """A small teacher's cache of everything: k is the vocabulary."""
    folder = tmp_path_factory.mktemp("captured")
    runs.write_student(folder / "teacher", seed=3)
    with pytest.MonkeyPatch.context() as patch:
        small.share_teachers(patch)
        small.run_without_beam(patch)
        settings = {"k": runs.VOCABULARY, "tail": "none", "temperatures": (1.0,)}
        small.capture(folder, logprobs="float32", **settings)
    return folder


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(captured, tmp_path, seed):
    """C36: whatever the order, rows and targets belong together: KD 0 at every first step."""
    asked = runs.options(
        captured, str(tmp_path / "run"), student=str(captured / "teacher"), seed=seed, alpha=0.0
    )
    said: list[str] = []
    # All are kept: of losses that are all but 0, which is the best is chance.
    train(replace(asked, learning_rate=1e-9, epochs=1, keep=100), said.append)
    assert any(line.startswith("Held-out perplexity before step 1") for line in said)
    assert not any("better than the teacher" in line for line in said)
    opened = cache.open(captured / "cache")
    assert opened.encoding.k == runs.VOCABULARY
    for line in read_metrics(tmp_path / "run/evaluations.jsonl"):
        assert abs(line["kl"]) <= 1e-5
        assert line["top1"] == line["top5"] == 1.0
        assert line["perplexity"] == pytest.approx(line["teacher_perplexity"], rel=1e-4)
    for line in read_metrics(tmp_path / "run/metrics.jsonl"):
        assert abs(line["kd"]) <= 1e-5
    if seed == 0:
        words = stillroom.EvaluateOptions(
            str(tmp_path / "run"), checkpoint="0", teacher=str(captured / "teacher"), batch=2
        )
        _, found = evaluate(words)
        assert found.kl_full is not None
        assert abs(found.kl_full) <= 1e-5
    assert jax.default_backend() == "cpu"
