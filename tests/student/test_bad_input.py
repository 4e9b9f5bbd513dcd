"""Bad input to train, evaluate and export: one clear message, a next step, nothing written."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import stillroom
from tests.cache.builder import make_cache
from tests.models import tiny_tokenizer, write_tiny_teacher
from tests.student import runs
from tests.student.small import make_student_cache


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    runs.quick(monkeypatch)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A cache, a student, and a run that has just begun, with nothing held out."""
    folder = runs.make(tmp_path_factory.mktemp("made"))
    with pytest.MonkeyPatch.context() as patch:
        runs.quick(patch)
        with runs.killed_at("_steps", 0), pytest.raises(runs.Killed):
            stillroom.train(runs.options(folder, "trained", held_out=0.0))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    shutil.copytree(made, tmp_path / "work", copy_function=shutil.copy2)
    return tmp_path / "work"


def fails(capsys, words: list[str], *expected: str, code: int = 1) -> str:
    """Runs a command that must fail with a message of its own; returns the message."""
    capsys.readouterr()
    try:
        found = stillroom.main(words)
    except SystemExit as stop:  # of the parser of options
        found = stop.code
    captured = capsys.readouterr()
    message = " ".join(captured.err.replace("│", " ").split())
    assert found == code, message
    assert captured.out == ""
    assert "Traceback (most" not in message
    if code == 1:
        assert message.count(f"stillroom {words[0]}: ") == 1
    for part in expected:
        assert part in message
    return message


def refused(capsys, folder: Path, *expected: str, code: int = 1, **changes) -> str:
    """A training that must fail before it writes anything."""
    before = runs.files(folder)
    words = runs.words(runs.options(folder, "new"), **changes)
    message = fails(capsys, words, *expected, code=code)
    assert runs.files(folder) == before
    return message


# Options.


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"batch": 5}, ("--batch 5", "each of 2 devices", "a multiple of 2", "Change")),
        ({"batch": 10, "accumulation": 2}, ("--batch 10", "a multiple of 4", "accumulation")),
        ({"batch": 38}, ("--batch 38", "18 training rows", "at most 18")),
        ({"held_out": 22.0}, ("--held-out 22", "21 rows with labels", "Ask for fewer")),
        ({"held_out": 21.0}, ("--held-out 21 takes all 21 rows", "Ask for fewer")),
        ({"temperature": 2.0}, ("--temperature 2", "has it at temperature 1", "capture again")),
        ({"length": 9}, ("--length 9", "8 positions", "Use at most that")),
        ({"divergence": "js"}, ("--objective sampled", "Use --objective bucket")),
        ({"student": "preset:huge"}, ("no preset 'huge'", "preset:nano", "config.json")),
        ({"student": "nowhere/at/all"}, ("nowhere/at/all",)),
        ({"student": "tests.student.runs:nothing"}, ("has no attribute 'nothing'",)),
        ({"drop_layers": "ten"}, ("--drop-layers 'ten'", "FIRST-LAST", "1 layers")),
        ({"drop_layers": "0-0"}, ("cannot drop layers 0 to 0", "must keep one")),
        ({"drop_layers": "5-3"}, ("ends before it begins", "Did you mean 3-5")),
        ({"out": "s3://bucket/run"}, ("should be a local path", "s3://bucket/run")),
    ],
)
def test_options_that_do_not_fit(capsys, made, changes, expected):
    refused(capsys, made, *expected, **changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"batch": 5, "accumulation": 2}, "--batch 5 cannot be cut into --accumulation 2"),
        ({"alpha": 1.5}, "--alpha should be between 0 and 1, found 1.5"),
        ({"held_out": 1.5}, "--held-out should be a share below 1, or a whole number"),
        ({"learning_rate": 0.0}, "--learning-rate should be above 0"),
        ({"objective": "magic"}, "magic"),
    ],
)
def test_options_that_cannot_be(capsys, made, changes, expected):
    refused(capsys, made, expected, code=2, **changes)


def test_an_objective_that_the_cache_cannot_serve(capsys, tmp_path):
    runs.make(tmp_path, tail="none")
    refused(capsys, tmp_path, "--objective sampled", "--tail sampled", objective="sampled")
    refused(capsys, tmp_path, "--temperature 3", "1, 2, 4", temperature=3.0)


def test_a_block_to_be_found_without_held_out_rows(capsys, tmp_path):
    runs.make(tmp_path)
    runs.write_student(tmp_path / "student", layers=2)
    refused(capsys, tmp_path, "--drop-layers", "--held-out", drop_layers="1", held_out=0.0)


def test_a_place_that_is_taken(capsys, made):
    refused(capsys, made, "holds no run", "another --out", out=str(made / "student"))
    refused(capsys, made, "found a file", out=str(made / "student/config.json"))


# The cache.


def test_what_is_no_cache(capsys, made):
    refused(capsys, made, "no such folder", cache=str(made / "nowhere"))
    refused(capsys, made, "config.json", cache=str(made / "student"))


def test_a_cache_that_is_not_finished(capsys, tmp_path):
    runs.write_student(tmp_path / "student")
    make_cache(
        tmp_path / "cache", rows=22, tail="sampled", vocabulary=runs.VOCABULARY, complete=False
    )
    refused(capsys, tmp_path, "is not finished", "stillroom precompute")


@pytest.mark.parametrize(
    "array",
    [
        "tokens",
        "segments",
        "documents",
        "label_mask",
        "label_logprobs",
        "target_ids",
        "target_logprobs",
        "exact_counts",
        "tail_logprobs",
        "entropy",
    ],
)
def test_a_missing_chunk(capsys, made, folder, array):
    """C26: the rows are not read as zeros, and the documents are named."""
    (path,) = (folder / "cache/arrays" / array).glob("c.2.*")
    path.unlink()
    # Shard 2 holds the rows 8 to 11.
    words = runs.words(runs.options(folder, "new"))
    message = fails(capsys, words, array, "shard 2, rows 8-11, documents", "--repair")
    # What the split reads is missed before anything is written.
    early = array in ("tokens", "segments", "documents", "label_mask")
    assert (folder / "new").exists() != early
    if not early:
        # What was done is kept, and to repair the cache is enough.
        shutil.copy2(made / path.relative_to(folder), path)
        assert stillroom.main(words) == 0, message


def test_a_damaged_tokenizer(capsys, folder):
    path = folder / "cache/tokenizer/tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b'"version": "1.0"', b'"version": "1.1"'))
    refused(capsys, folder, "tokenizer.json")


# The student.


def test_a_student_of_another_tokenizer(capsys, folder):
    """C22: as many ids, with two of them swapped."""
    definition = tiny_tokenizer(runs.VOCABULARY)
    vocabulary = definition["model"]["vocab"]
    vocabulary["x"], vocabulary["y"] = vocabulary["y"], vocabulary["x"]
    (folder / "student/tokenizer.json").write_text(json.dumps(definition))
    message = refused(capsys, folder, "is not that of the cache's teacher", "Use a student")
    assert "'x'" in message or "'y'" in message


def test_a_student_that_is_too_narrow(capsys, folder):
    """C20: both widths are named."""
    shutil.rmtree(folder / "student")
    runs.write_student(folder / "student", rows=290)
    refused(capsys, folder, "has 290 rows", "vocabulary is 300", "--vocabulary 290")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_student_with_a_number_that_is_none(capsys, folder, value):
    path = folder / "student/model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 5] = value
    save_file(tensors, path)
    refused(capsys, folder, "not finite", "layers.0.mlp.up")


def test_a_student_that_was_cut_off(capsys, folder):
    path = folder / "student/model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(capsys, folder, "truncated or damaged", "download it again")


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, "cannot be read"), ("{", "is not valid JSON"), ("[]", "no JSON object"), ("{}", "")],
)
def test_sizes_that_are_none(capsys, folder, text, expected):
    if text is not None:
        (folder / "sizes.json").write_text(text)
    refused(capsys, folder, "sizes.json", expected, student=str(folder / "sizes.json"))


def test_rows_that_are_longer_than_the_student_can(capsys, tmp_path):
    runs.make(tmp_path)
    runs.write_student(tmp_path / "student", max_positions=6)
    refused(capsys, tmp_path, "8 positions", "beyond the 6", "--length 6")


# A run.


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_what_is_no_run(capsys, made, tmp_path, command):
    more = [] if command == "evaluate" else [str(tmp_path / "out")]
    for place in ("nowhere", "student", "cache"):
        fails(
            capsys,
            [command, str(made / place), *more],
            f"{made / place} holds no run",
            "`stillroom train`",
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_a_checkpoint_that_is_not_there(capsys, made, tmp_path, command):
    more = [] if command == "evaluate" else [str(tmp_path / "x")]
    words = [command, str(made / "trained"), *more]
    fails(capsys, [*words, "--checkpoint", "7"], "no checkpoint of step 7", "of steps 0")
    fails(capsys, [*words, "--checkpoint", "best"], "none is the best", "of steps 0")
    fails(capsys, [*words, "--checkpoint", "newest"], "best, last or the number", code=2)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_not_evaluated(capsys, made):
    fails(capsys, ["evaluate", str(made / "trained")], "held no rows out", "--held-out")


def test_a_run_without_a_checkpoint(capsys, folder):
    shutil.rmtree(folder / "trained/checkpoints")
    words = ["export", str(folder / "trained"), str(folder / "out")]
    fails(capsys, words, "holds no checkpoint yet", "Train")
    assert not (folder / "out").exists()


def test_an_export_that_would_overwrite(capsys, folder):
    for name in ("student", "cache/manifest.json"):
        before = runs.files(folder)
        words = ["export", str(folder / "trained"), str(folder / name)]
        fails(capsys, words, "is not overwritten", "Choose another folder")
        assert runs.files(folder) == before


def test_an_export_whose_tokenizer_is_gone(capsys, folder):
    words = ["export", str(folder / "trained"), str(folder / "out")]
    shutil.copy2(folder / "student/config.json", folder / "trained/tokenizer")
    definition = tiny_tokenizer(runs.VOCABULARY)
    definition["model"]["vocab"]["x"], definition["model"]["vocab"]["y"] = 91, 90
    (folder / "trained/tokenizer/tokenizer.json").write_text(json.dumps(definition))
    fails(capsys, words, "tokenizer.json is another file than when the run began", "Put it back")
    shutil.rmtree(folder / "trained/tokenizer")
    fails(capsys, words, "tokenizer")
    assert not (folder / "out").exists()


def test_an_evaluation_with_another_cache_or_teacher(capsys, tmp_path):
    """A cache that was moved is asked for; neither another one nor another teacher is taken."""
    runs.make(tmp_path)
    with runs.killed_at("_steps", 0), pytest.raises(runs.Killed):
        stillroom.train(runs.options(tmp_path))
    words = ["evaluate", str(tmp_path / "run")]
    write_tiny_teacher(tmp_path / "teacher")
    message = ("is not the teacher of the cache", "fingerprint", "Give the same model")
    fails(capsys, [*words, "--teacher", str(tmp_path / "teacher")], *message)
    (tmp_path / "cache").rename(tmp_path / "moved")
    fails(capsys, words, str(tmp_path / "cache"), "--cache")
    fails(capsys, [*words, "--cache", str(tmp_path / "student")], "config.json", "--cache")
    make_student_cache(tmp_path / "other", vocabulary=runs.VOCABULARY, seed=1)
    other = ["--cache", str(tmp_path / "other/cache")]
    fails(capsys, [*words, *other], "is not the one that the run was trained from", "--cache")
