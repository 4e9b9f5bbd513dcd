"""A run that was stopped, however it was, ends as if it had not been."""

import contextlib
import os
import pty
import shutil
import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import stillroom
from cache.storage import Store
from student.errors import RunError
from student.metrics import read_metrics
from student.run import open_run, read_run
from student.tracking import Trackers
from student.train import train
from tests.student import runs
from tests.student.small import make_student_cache

# Checkpoints after these of the nine steps; evaluations at 0, 5 (an epoch's end) and 9.
SAVED = (0, 2, 4, 5, 6, 8, 9)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    runs.quick(monkeypatch)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A cache, a student, and the uninterrupted run `whole` of them with every checkpoint."""
    folder = runs.make(tmp_path_factory.mktemp("made"))
    with pytest.MonkeyPatch.context() as patch:
        runs.quick(patch)
        train(runs.options(folder, "whole", keep=100))
    return folder


def killed(folder: Path, out: str, method: str, count: int, **changes) -> Path:
    """A run that ended at a call of a method; see `runs.killed_at`."""
    asked = runs.options(folder, out, **changes)
    with runs.killed_at(method, count), pytest.raises(runs.Killed):
        train(asked)
    return Path(asked.out)


def test_the_run_that_is_compared_with(made):
    """What the tests below rely on: the state changes at every step, and what is counted."""
    assert tuple(runs.steps_saved(made / "whole")) == SAVED
    states = [runs.saved(made / "whole", step) for step in SAVED]
    for before, after in pairwise(states):
        assert all(before[name] != after[name] for name in before if name.startswith("parameters/"))
    assert [x["step"] for x in runs.raw_lines(made / "whole/metrics.jsonl")] == list(range(1, 10))
    assert [x["step"] for x in runs.raw_lines(made / "whole/evaluations.jsonl")] == [0, 5, 9]
    lines = read_metrics(made / "whole/metrics.jsonl")
    # 18 rows, 4 a step: step 5 has rows of both epochs, and step 9 none but whole ones.
    assert [line["epoch"] for line in lines] == [1] * 5 + [2] * 4
    assert not any("repeat" in line for line in lines)


@pytest.mark.parametrize("step", range(1, 10))
def test_killed_at_any_step(made, tmp_path, step):
    """C37, C39, C60: bit for bit the same; the lines of a step that was repeated are marked."""
    run = killed(made, str(tmp_path / "run"), "_log", step - 1)
    before = max(x for x in SAVED if x < step)
    assert runs.steps_saved(run)[-1] == before
    train(runs.options(made, str(run)))
    runs.assert_equal(run, made / "whole")
    lines = runs.raw_lines(run / "metrics.jsonl")
    assert [x["step"] for x in lines] == [*range(1, step), *range(before + 1, 10)]
    assert [x["step"] for x in lines if x.get("repeat")] == list(range(before + 1, step))


@pytest.mark.parametrize(
    ("count", "repeated"), [(0, [0]), (3, [5]), (6, [9])], ids=["first", "middle", "last"]
)
def test_killed_between_an_evaluation_and_its_checkpoint(made, tmp_path, count, repeated):
    run = killed(made, str(tmp_path / "run"), "_save", count)
    assert (run / "checkpoints").exists() == (count > 0)
    train(runs.options(made, str(run)))
    runs.assert_equal(run, made / "whole")
    lines = runs.raw_lines(run / "evaluations.jsonl")
    assert [x["step"] for x in lines if x.get("repeat")] == repeated
    assert sorted(x["step"] for x in lines) == sorted([0, 5, 9, *repeated])


def test_killed_before_an_evaluation(made, tmp_path):
    run = killed(made, str(tmp_path / "run"), "_evaluate", 0)
    assert not (run / "checkpoints").exists()
    assert runs.raw_lines(run / "evaluations.jsonl") == []
    killed(made, str(run), "_evaluate", 1)
    train(runs.options(made, str(run)))
    runs.assert_equal(run, made / "whole")


def test_killed_again_and_again(made, tmp_path):
    """C37: the position after the second resume is that of the second, not of the first."""
    out = str(tmp_path / "run")
    for count in (3, 2, 2):  # steps 1-3, 3-4 and 5-6 done, the fourth session's from 7 on
        run = killed(made, out, "_log", count)
    assert [x["step"] for x in runs.raw_lines(run / "metrics.jsonl")] == [1, 2, 3, 3, 4, 5, 6]
    assert train(runs.options(made, out)).steps == 3
    runs.assert_equal(run, made / "whole")
    assert len(list((run / "sessions").iterdir())) == 4


def test_killed_with_accumulation(made, tmp_path):
    asked = {"accumulation": 2, "keep": 100}
    train(runs.options(made, str(tmp_path / "whole"), **asked))
    for count in (4, 3):
        run = killed(made, str(tmp_path / "run"), "_log", count, **asked)
    train(runs.options(made, str(run), **asked))
    runs.assert_equal(run, tmp_path / "whole")
    # Cut otherwise, the gradient has other last bits: the two are not the same run twice.
    assert runs.saved(run, 9) != runs.saved(made / "whole", 9)
    found, expected = runs.parameters(run), runs.parameters(made / "whole")
    assert all(np.allclose(found[name], expected[name], atol=2e-4) for name in expected)


def test_what_does_not_decide_a_run_may_change(made, tmp_path):
    run = killed(made, str(tmp_path / "run"), "_log", 5)
    changes = {"accumulation": 2, "keep": 1, "keep_best": False, "checkpoint_every": 4}
    train(runs.options(made, str(run), **changes))
    assert runs.steps_saved(run) == [9]
    found, expected = runs.parameters(run), runs.parameters(made / "whole")
    assert all(np.allclose(found[name], expected[name], atol=2e-4) for name in expected)


def rows_of_steps(patch: pytest.MonkeyPatch, devices: int) -> list[list[int]]:
    """Lets training see so many devices; the rows of the batches that it places on them."""
    rows: list[list[int]] = []
    original = runs.train_module.place

    def place(batch, accumulation, places):
        assert len(places) == devices
        rows.append(batch.rows.tolist())
        return original(batch, accumulation, places)

    patch.setattr("student.train.place", place)
    runs.use_devices(patch, devices)
    return rows


def test_resumed_on_another_number_of_devices(made, tmp_path):
    """C40: the same order of the data, the same parameters but for rounding, no device axis."""
    out, rows = str(tmp_path / "run"), []
    for devices, count in ((2, 5), (1, 2)):
        with pytest.MonkeyPatch.context() as patch:
            rows.append(rows_of_steps(patch, devices))
            killed(made, out, "_log", count)
    with pytest.MonkeyPatch.context() as patch:
        rows.append(rows_of_steps(patch, 2))
        train(runs.options(made, out))
    with pytest.MonkeyPatch.context() as patch:
        expected = rows_of_steps(patch, 2)
        train(runs.options(made, str(tmp_path / "whole")))
    assert len(expected) == 9
    # From the checkpoints after the steps 0, 5 and 6.
    for start, found in zip((0, 5, 6), rows, strict=True):
        assert found == expected[start : start + len(found)]
        assert len(found) > 1
    found, whole = runs.parameters(tmp_path / "run"), runs.parameters(tmp_path / "whole")
    for name, value in whole.items():
        assert found[name].shape == value.shape
        assert np.allclose(found[name], value, atol=2e-4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_asked_to_stop(made, tmp_path, number, monkeypatch, capsys):
    """A checkpoint of the step at hand, the signal's exit code, and bit-equal later."""
    run = tmp_path / "run"
    words = runs.words(runs.options(made, str(run), checkpoint_every=100))
    with monkeypatch.context() as patch:
        original = runs.train_module._Session._log

        def log(session, done, *rest):
            original(session, done, *rest)
            if done.step == 2:  # while step 3 is computed
                signal.raise_signal(number)

        patch.setattr(runs.train_module._Session, "_log", log)
        assert stillroom.main(words) == 128 + number
    captured = capsys.readouterr()
    assert "Stopping after this step, with a checkpoint" in captured.err
    assert "Run the same command again" in captured.err
    assert captured.out == ""
    assert runs.steps_saved(run) == [0, 3]
    assert stillroom.main(words) == 0
    assert "Going on after step 3 of 9" in capsys.readouterr().err
    runs.assert_equal(run, made / "whole")
    assert not any(x.get("repeat") for x in runs.raw_lines(run / "metrics.jsonl"))


@pytest.mark.parametrize("kind", ["terminal", "pipe"])
def test_a_terminal_that_is_closed(made, tmp_path, monkeypatch, kind):
    """Nobody reads what is said any more, which is no reason not to save."""
    run = tmp_path / "run"
    near, far = pty.openpty() if kind == "terminal" else os.pipe()
    words = runs.words(runs.options(made, str(run), checkpoint_every=100))
    original = runs.train_module._Session._log

    def log(session, done, *rest):
        original(session, done, *rest)
        if done.step == 2:
            os.close(near)
            signal.raise_signal(signal.SIGHUP)

    with monkeypatch.context() as patch, os.fdopen(far, "w", buffering=1) as broken:
        patch.setattr(runs.train_module._Session, "_log", log)
        patch.setattr("sys.stderr", broken)
        assert stillroom.main(words) == 129
        with contextlib.suppress(OSError):  # what could not be said is in its buffer still
            broken.close()
    assert runs.steps_saved(run) == [0, 3]
    assert stillroom.main(words) == 0
    runs.assert_equal(run, made / "whole")


_KILLS_ITSELF = """
import os, signal
from student.train import _Session
original = _Session._log
def log(session, done, *rest):
    original(session, done, *rest)
    if done.step == 7:
        os.kill(os.getpid(), signal.SIGKILL)
_Session._log = log
"""


def test_a_process_that_is_killed(made, tmp_path):
    """A real SIGKILL; what it left is gone on with as if one process had run through."""
    run = tmp_path / "run"
    done = runs.process(runs.words(runs.options(made, str(run))), _KILLS_ITSELF)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [x["step"] for x in runs.raw_lines(run / "metrics.jsonl")] == list(range(1, 8))
    assert (run / "lock").exists()
    assert train(runs.options(made, str(run))).steps == 3
    runs.assert_equal(run, made / "whole")


# Damage.


def cut(run: Path, step: int) -> None:
    """Takes the last byte of the largest file of a checkpoint."""
    files = [path for path in (run / "checkpoints" / str(step)).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])


def test_a_damaged_checkpoint(made, tmp_path):
    """C40: the one before it, with a warning, and the same end."""
    run = killed(made, str(tmp_path / "run"), "_log", 7)
    assert runs.steps_saved(run) == [4, 5, 6]  # of which 5 is the best
    cut(run, 6)
    (run / "checkpoints/5/checkpoint.json").unlink()
    done, said = runs.run(runs.options(made, str(run)))
    assert "Warning: the checkpoint of step 6 is damaged" in said
    assert "Warning: the checkpoint of step 5 is damaged" in said
    assert "Going on after step 4 of 9" in said
    assert done.steps == 5
    runs.assert_equal(run, made / "whole")


def test_no_sound_checkpoint(made, tmp_path):
    run = killed(made, str(tmp_path / "run"), "_log", 5)
    for step in runs.steps_saved(run):
        cut(run, step)
    before = {name: x for name, x in runs.files(run).items() if not _of_session(run, name)}
    with pytest.raises(
        RunError, match=r"none of the checkpoints .* can be used(.|\n)*another --out"
    ):
        train(runs.options(made, str(run)))
    after = {name: x for name, x in runs.files(run).items() if not _of_session(run, name)}
    assert after == before


def _of_session(run: Path, name: str) -> bool:
    return name == str(run / "lock") or name.startswith(str(run / "sessions"))


def test_a_student_that_changed_before_the_first_checkpoint(made, tmp_path):
    """It is read again then, and must be the same; later its files are not needed."""
    shutil.copytree(made / "student", tmp_path / "student")
    asked = {"student": str(tmp_path / "student")}
    run = killed(made, str(tmp_path / "run"), "_save", 0, **asked)
    runs.write_student(tmp_path / "student", seed=2)
    with pytest.raises(RunError, match=r"is another one than when the run .* began. Bring back"):
        train(runs.options(made, str(run), **asked))
    runs.write_student(tmp_path / "student", seed=1)
    killed(made, str(run), "_log", 3, **asked)
    shutil.rmtree(tmp_path / "student")
    train(runs.options(made, str(run), **asked))
    runs.assert_equal(run, made / "whole")


# What is refused, and what there is nothing to do for.


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"batch": 2}, "batch: the run has 4, you ask for 2"),
        ({"seed": 1}, "seed: the run has 0, you ask for 1"),
        ({"alpha": 0.6}, "alpha: the run has 0.5, you ask for 0.6"),
        ({"alpha_end": 0.6}, "alpha-end: the run has none, you ask for 0.6"),
        ({"objective": "bucket"}, 'objective: the run has "sampled", you ask for "bucket"'),
        ({"epochs": 3}, "epochs: the run has 2, you ask for 3"),
        ({"held_out": 4.0}, "held-out: the run has 3.0, you ask for 4.0"),
        ({"length": 6}, "length: the run has none, you ask for 6"),
        ({"learning_rate": 0.02}, "learning-rate: the run has 0.01, you ask for 0.02"),
        ({"precision": "bfloat16"}, 'precision: the run has "float32", you ask for "bfloat16"'),
        ({"trim_vocabulary": True}, "trim-vocabulary: the run has false, you ask for true"),
        ({"student": "preset:nano"}, 'you ask for "preset:nano"'),
        ({"cache": "other"}, "cache.identity: the cache is another one"),
    ],
)
def test_another_run_in_the_same_folder(made, changes, field, capsys):
    if "cache" in changes:
        changes = {"cache": str(made / "other/cache")}
        if not (made / "other").exists():
            make_student_cache(made / "other", vocabulary=runs.VOCABULARY, seed=1)
    before = runs.files(made / "whole")
    assert stillroom.main(runs.words(runs.options(made, "whole", **changes))) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"stillroom train: the run {made / 'whole'} is another one")
    assert field in captured.err
    assert captured.err.count("the run has") + captured.err.count("another one\n") <= 1
    assert "choose another --out. Nothing was changed." in captured.err
    assert captured.out == ""
    assert runs.files(made / "whole") == before


def test_a_cache_that_was_moved_is_the_same(made, tmp_path):
    run = killed(made, str(tmp_path / "run"), "_log", 5)
    for key in Store(made / "cache").list():
        Store(tmp_path / "moved").write(key, Store(made / "cache").read(key) or b"")
    train(runs.options(made, str(run), cache=str(tmp_path / "moved")))
    runs.assert_equal(run, made / "whole")


def test_a_finished_run(made, capsys):
    before = runs.files(made / "whole")
    assert stillroom.main(runs.words(runs.options(made, "whole"))) == 0
    captured = capsys.readouterr()
    assert f"{made / 'whole'}: already complete" in captured.out
    assert "is finished: 9 steps" in captured.err
    after = runs.files(made / "whole")
    run = made / "whole"
    changed = {name for name in after if after[name] != before.get(name)}
    assert all(_of_session(run, name) for name in changed)
    assert train(runs.options(made, "whole")).steps == 0


def test_a_run_that_another_process_works_on(made, capsys):
    with open_run(made / "whole", read_run(made / "whole"), {"cache": "x"}):
        before = runs.files(made / "whole")
        assert stillroom.main(runs.words(runs.options(made, "whole"))) == 1
        assert runs.files(made / "whole") == before
    err = capsys.readouterr().err
    assert f"in use by process {os.getpid()}" in err
    assert f"kill {os.getpid()}" in err


# Curves.


def test_trackers_get_what_they_have_missed(made, tmp_path, monkeypatch):
    """C60: a resumed run's curves have neither holes nor doubles, whatever the tracker kept."""
    sessions: list[tuple[list, list]] = []

    class Stand(Trackers):
        def __init__(self, names, folder, project, settings, past):
            super().__init__(())
            assert (names, folder, project) == (("tensorboard", "wandb"), tmp_path / "run", "mine")
            assert (settings["batch"], settings["steps"]) == (4, 9)
            self.logged: list = []
            sessions.append((list(past), self.logged))

        def log(self, step, values):
            self.logged.append((step, dict(values)))

    monkeypatch.setattr("student.train.open_trackers", Stand)
    more = {"track": ("tensorboard", "wandb"), "project": "mine"}
    with runs.killed_at("_log", 3), pytest.raises(runs.Killed):
        train(runs.options(made, str(tmp_path / "run"), **more))
    train(runs.options(made, str(tmp_path / "run"), **more))
    (nothing, first), (past, second) = sessions
    assert nothing == []
    assert [step for step, _ in first] == [0, 1, 2, 3]
    # The checkpoint was of step 2.
    assert [step for step, _ in past] == [0, 1, 2]
    assert past == first[:3]
    assert [step for step, _ in second] == [3, 4, 5, 5, 6, 7, 8, 9, 9]
    lines = {x["step"]: x for x in read_metrics(tmp_path / "run/metrics.jsonl")}
    for step, values in past + second:
        for name, value in values.items():
            if name.startswith("train/"):
                assert value == lines[step][name.removeprefix("train/")]
    names = {name for _, values in second for name in values}
    assert {"train/loss", "train/ce", "train/kd", "held_out/kl", "held_out/perplexity"} <= names
