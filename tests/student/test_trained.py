"""What is done with a trained student: reading a checkpoint, measuring it, exporting it."""

import json
import shutil
from dataclasses import asdict, fields, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import decoder
import stillroom
from cache.manifest import Manifest
from student.errors import RunError, StudentError
from student.functions import parameters_of
from student.metrics import read_metrics
from student.options import EvaluateOptions, ExportOptions
from student.run import open_run, read_run
from student.train import train
from student.trained import evaluate, export, filled, open_checkpoint
from tests.student import runs


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    runs.quick(monkeypatch)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A cache, a student, and the run `run` of them with every checkpoint."""
    folder = runs.make(tmp_path_factory.mktemp("made"))
    with pytest.MonkeyPatch.context() as patch:
        runs.quick(patch)
        train(runs.options(folder, keep=100))
    return folder


@pytest.fixture
def copied(made, tmp_path) -> Path:
    shutil.copytree(made, tmp_path / "work", copy_function=shutil.copy2)
    return tmp_path / "work"


def loss_of(run: Path, step: int) -> float:
    text = (run / "checkpoints" / str(step) / "checkpoint.json").read_text()
    return json.loads(text)["content"]["metrics"]["loss"]


# Reading.


def test_what_decides_a_run_is_read_from_its_record_alone(made, copied):
    """An edited or cut file of a session must not change what is held out."""
    wanted = evaluate(EvaluateOptions(str(made / "run")))
    session = copied / "run/sessions/1.toml"
    place = json.dumps(str(copied / "cache"))
    for text in (f"cache = {place}\n", f"cache = {place}\nseed = 3\nalpha = 1.0\nbatch = 'x'\n"):
        session.write_text(text)
        assert evaluate(EvaluateOptions(str(copied / "run"))) == wanted
    session.write_text("")
    with pytest.raises(RunError, match=r"does not say where the run's cache is.*--cache"):
        evaluate(EvaluateOptions(str(copied / "run")))
    moved = EvaluateOptions(str(copied / "run"), cache=str(copied / "cache"))
    assert evaluate(moved) == wanted


def test_a_damaged_checkpoint_that_may_be_the_best_is_named(copied):
    (copied / "run/checkpoints/9/checkpoint.json").write_text("{}")
    found = open_checkpoint(copied / "run", "best")
    assert found.step != 9
    assert len(found.warnings) == 1
    assert "the checkpoint of step 9 is damaged" in found.warnings[0]


def test_a_lost_tokenizer_stops_an_export(copied, tmp_path):
    shutil.rmtree(copied / "run/tokenizer")
    with pytest.raises(RunError, match=r"has lost its tokenizer\.json\. Put it back"):
        export(ExportOptions(str(copied / "run"), str(tmp_path / "out")))


def test_a_student_is_the_same_by_any_path_to_it(copied, monkeypatch):
    """Its run is gone on with from another folder, too."""
    asked = runs.options(copied, "other", epochs=1, batch=16)
    train(asked)
    monkeypatch.chdir(copied)
    assert train(replace(asked, student="student")).steps == 0


def test_a_checkpoint_of_a_run(made):
    first = open_checkpoint(made / "run", "0")
    last = open_checkpoint(str(made / "run"))
    assert (first.step, last.step, open_checkpoint(made / "run", "5").step) == (0, 9, 5)
    assert last.warnings == ()
    asked = runs.options(made)
    for name in ("batch", "epochs", "seed", "held_out", "alpha", "learning_rate", "cache"):
        assert getattr(last.options, name) == getattr(asked, name)
    assert last.record["batch"] == 4
    # Step 0 is the student as it was.
    start = parameters_of(decoder.load_model(str(made / "student"), None, "float32").model)
    assert set(first.parameters) == set(start) == set(last.parameters)
    for name, value in start.items():
        assert np.array_equal(first.parameters[name], value)
        assert not np.array_equal(last.parameters[name], value)


def test_the_best_checkpoint_is_that_of_least_loss(made, copied):
    losses = {step: loss_of(made / "run", step) for step in (0, 5, 9)}
    assert len(set(losses.values())) == 3
    best = min(losses, key=losses.__getitem__)
    assert open_checkpoint(made / "run", "best").step == best
    shutil.rmtree(copied / "run/checkpoints" / str(best))
    del losses[best]
    again = open_checkpoint(copied / "run", "best").step
    assert again == min(losses, key=losses.__getitem__)


def test_a_damaged_checkpoint_is_left_out(copied):
    (copied / "run/checkpoints/9/checkpoint.json").unlink()
    found = open_checkpoint(copied / "run")
    assert found.step == 8
    (warning,) = found.warnings
    assert "step 9 is damaged" in warning
    with pytest.raises(RunError, match=r"step 9 .* is damaged"):
        open_checkpoint(copied / "run", "9")


def test_the_cache_is_where_the_last_session_found_it(made, copied):
    assert open_checkpoint(copied / "run").options.cache == str(made / "cache")
    train(runs.options(copied, student=str(made / "student"), keep=7))
    assert open_checkpoint(copied / "run").options.cache == str(copied / "cache")
    moved = open_checkpoint(copied / "run", cache="elsewhere")
    assert moved.options.cache == "elsewhere"


# Measuring.


@pytest.mark.parametrize(("batch", "devices"), [(3, 2), (2, 1)])
def test_the_evaluation_is_that_of_training(made, batch, devices, monkeypatch):
    """For any batch and any number of devices."""
    runs.use_devices(monkeypatch, devices)
    lines = {line["step"]: line for line in read_metrics(made / "run/evaluations.jsonl")}
    for checkpoint, step in (("last", 9), ("5", 5)):
        progress: list[tuple[int, int]] = []
        found_step, found = evaluate(
            EvaluateOptions(str(made / "run"), checkpoint, batch=batch),
            progress=lambda done, total: progress.append((done, total)),  # noqa: B023
        )
        assert found_step == step
        for name, value in found.to_json().items():
            expected = lines[step][name]
            if isinstance(value, float):
                assert value == pytest.approx(expected, rel=1e-6, abs=1e-6)
            else:
                assert value == expected
        assert progress[-1] == (3, 3)


def test_an_evaluation_changes_nothing_and_needs_no_lock(made):
    before = runs.files(made)
    evaluate(EvaluateOptions(str(made / "run"), batch=3))
    assert runs.files(made) == before


def test_an_evaluation_with_a_cache_that_was_moved(made, copied):
    # Trained on, of late, from the copy.
    train(runs.options(copied, student=str(made / "student")))
    (copied / "cache").rename(copied / "moved")
    with pytest.raises(RunError, match="--cache"):
        evaluate(EvaluateOptions(str(copied / "run"), batch=3))
    options = EvaluateOptions(str(copied / "run"), cache=str(copied / "moved"), batch=3)
    line = read_metrics(copied / "run/evaluations.jsonl")[-1]
    assert evaluate(options)[1].kl == pytest.approx(line["kl"], rel=1e-6)


def test_a_run_from_a_cache_of_which_nothing_was_drawn(tmp_path, monkeypatch):
    """Trained when such a cache passed for a sampled one; measured by what it holds."""
    runs.make(tmp_path, exact=6)
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "nothing_drawn", property(lambda manifest: False))
        runs.run(runs.options(tmp_path, epochs=1))
    assert read_run(tmp_path / "run")["objective"] == "sampled"
    _, found = evaluate(EvaluateOptions(str(tmp_path / "run")))
    assert found.kl_kind == "bucket, temperature 1"
    assert found.kl > 0


def test_a_warning_about_a_damaged_checkpoint(copied):
    (copied / "run/checkpoints/9/checkpoint.json").unlink()
    said: list[str] = []
    step, _ = evaluate(EvaluateOptions(str(copied / "run"), batch=3), said.append)
    assert step == 8
    assert any("Warning: the checkpoint of step 9 is damaged" in line for line in said)


# Exporting.


def test_the_exported_folder_gives_the_same_logits(made, tmp_path):
    trained = export(ExportOptions(str(made / "run"), str(tmp_path / "out")))
    assert trained.step == 9
    loaded = decoder.load_model(str(tmp_path / "out"), None, "float32").model
    expected = filled(open_checkpoint(made / "run"))
    found, wanted = parameters_of(loaded), parameters_of(expected)
    assert set(found) == set(wanted)
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, runs.VOCABULARY, 8), jnp.int32)
    segments = jnp.asarray([1, 1, 1, 2, 2, 2, 2, 0], jnp.int32)
    places = jnp.asarray([0, 1, 2, 0, 1, 2, 3, 0], jnp.int32)

    def logits(model):
        return jax.jit(lambda: model.unembed(model(tokens, segments, places)))()

    assert np.array_equal(logits(loaded), logits(expected))
    mine = decoder.load_tokenizer(str(tmp_path / "out"))
    theirs = decoder.load_tokenizer(str(made / "student"))
    assert mine.fingerprint == theirs.fingerprint
    # It is a student to start from, and a checkpoint may be chosen.
    export(ExportOptions(str(made / "run"), str(tmp_path / "first"), checkpoint="0"))
    first = parameters_of(decoder.load_model(str(tmp_path / "first"), None, "float32").model)
    start = parameters_of(decoder.load_model(str(made / "student"), None, "float32").model)
    assert all(np.array_equal(first[name], start[name]) for name in start)


def test_an_export_in_bfloat16(made, tmp_path):
    export(ExportOptions(str(made / "run"), str(tmp_path / "out"), dtype="bfloat16"))
    found = parameters_of(decoder.load_model(str(tmp_path / "out"), None, "float32").model)
    for name, value in open_checkpoint(made / "run").parameters.items():
        rounded = np.asarray(value.astype(jnp.bfloat16).astype(jnp.float32))
        assert np.array_equal(found[name], rounded)


def test_an_export_while_the_run_is_trained(copied):
    asked = asdict(runs.options(copied))
    with open_run(copied / "run", read_run(copied / "run"), asked):
        export(ExportOptions(str(copied / "run"), str(copied / "out")))
    assert (copied / "out/config.json").exists()


# A student of a class of its own.


class Bag(nnx.Module):
    """Predicts from the mean of the row's tokens so far."""

    def __init__(self):
        random = np.random.default_rng(0)
        table = random.normal(size=(runs.VOCABULARY, 4)).astype(np.float32)
        self.table = nnx.Param(jnp.asarray(table))

    def __call__(self, tokens, segments, positions):
        return jnp.cumsum(self.table[...][tokens], axis=0) / (1 + positions)[:, None].astype(
            jnp.float32
        )

    def unembed(self, hidden):
        return hidden @ self.table[...].T


def bag() -> Bag:
    return Bag()


def test_a_student_that_a_function_returns(made, tmp_path):
    """It is trained, gone on with and measured; Hugging Face has no such model."""
    asked = runs.options(made, str(tmp_path / "run"), student="tests.student.test_trained:bag")
    with runs.killed_at("_log", 5), pytest.raises(runs.Killed):
        train(asked)
    assert train(asked).steps == 4
    train(replace(asked, out=str(tmp_path / "whole")))
    runs.assert_equal(tmp_path / "run", tmp_path / "whole")
    line = read_metrics(tmp_path / "run/evaluations.jsonl")[-1]
    _, found = evaluate(EvaluateOptions(str(tmp_path / "run"), batch=2))
    assert found.cross_entropy == pytest.approx(line["cross_entropy"], rel=1e-6)
    with pytest.raises(StudentError, match=r"is a Bag that the function .* Hugging Face has no"):
        export(ExportOptions(str(tmp_path / "run"), str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()
    # What stands there in place of an export.
    assert open_checkpoint(tmp_path / "run").parameters["table"].shape == (runs.VOCABULARY, 4)


# From the command line.


def run(capsys, *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    try:
        code = stillroom.main(list(words))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_evaluate(capsys, made):
    words = ["evaluate", str(made / "run"), "--batch", "3"]
    line = read_metrics(made / "run/evaluations.jsonl")[-1]
    code, out, err = run(capsys, *words)
    assert (code, "Warning" in err) == (0, False)
    assert f"{made / 'run'}, step 9: 15 labels of 3 held-out rows" in out
    assert f"{line['cross_entropy']:.3f}" in out
    assert "KL over what the cache holds (estimate)" in out
    assert f"the teacher's own perplexity: {line['teacher_perplexity']:,.2f}" in out
    code, out, _ = run(capsys, *words, "--checkpoint", "5", "--json")
    found = json.loads(out)
    assert (code, found["step"], found["rows"], found["kl_full"]) == (0, 5, 3, None)
    expected = read_metrics(made / "run/evaluations.jsonl")[1]
    assert found["kl"] == pytest.approx(expected["kl"], rel=1e-6)


def test_the_command_export(capsys, made, tmp_path):
    code, out, err = run(capsys, "export", str(made / "run"), str(tmp_path / "a/b"))
    assert (code, err) == (0, "")
    assert out == f"{tmp_path / 'a/b'}: the student of {made / 'run'} after step 9\n"
    names = {path.name for path in (tmp_path / "a/b").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_the_command_train(capsys, made, tmp_path):
    words = runs.words(runs.options(made, str(tmp_path / "run")))
    code, out, err = run(capsys, *words)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == f"{tmp_path / 'run'}: 9 steps"
    assert lines[1].split() == [
        "epoch",
        "step",
        "cross-entropy",
        "perplexity",
        "KL",
        "top-1",
        "top-5",
        "ECE",
        "tokens/s",
    ]
    assert [line.split()[:2] for line in lines[2:5]] == [["0", "0"], ["1", "5"], ["2", "9"]]
    assert str(tmp_path / "run") in lines[-1]
    assert "metrics.jsonl" in lines[-1]
    assert "18 rows with" in err
    assert "Traceback" not in err
    runs.assert_equal(tmp_path / "run", made / "run")


def test_a_process_trains_and_ends(made, tmp_path):
    """C56: threads read ahead in it; nothing holds it back at the end."""
    done = runs.process(runs.words(runs.options(made, str(tmp_path / "run"))))
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 'run'}: 9 steps" in done.stdout
    assert "Traceback" not in done.stderr
    # Not to a terminal: no control characters.
    assert "\x1b" not in done.stdout + done.stderr
    runs.assert_equal(tmp_path / "run", made / "run")


@pytest.mark.parametrize("name", ["train", "evaluate", "export"])
def test_help_names_every_option(capsys, name):
    options = {
        "train": stillroom.TrainOptions,
        "evaluate": stillroom.EvaluateOptions,
        "export": stillroom.ExportOptions,
    }[name]
    code, out, err = run(capsys, name, "--help")
    assert (code, err) == (0, "")
    text = " ".join(out.replace("│", " ").split())
    assert f"usage: stillroom {name}" in text
    assert f"Example: stillroom {name}" in text
    positional = {"train": {"cache"}, "evaluate": {"run"}, "export": {"run", "out"}}[name]
    for field in fields(options):
        if field.name in positional:
            assert field.name.upper() in text
        else:
            assert f"--{field.name.replace('_', '-')}" in text
    code, out, _ = run(capsys, "--help")
    assert f"  {name} " in out
