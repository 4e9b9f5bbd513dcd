"""A run's folder: what decides it is kept and compared; one process at a time works on it."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from student.errors import RunError
from student.run import find_record, last_options, open_run, read_run

RECORD = {
    "batch": 64,
    "learning_rate": 1e-5,
    "temperature": None,
    "layers": [9, 18],
    "model": {"layers": 20, "fingerprint": "aa"},
    "cache": {"location": "cache", "identity": "bb", "rows": {"train": 20, "held_out": 2}},
}


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of every file: what a refused command must not change."""
    found = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in found}


def test_a_run_begins_and_goes_on(tmp_path):
    folder = tmp_path / "runs/first"
    options = {"batch": 64, "epochs": 3, "track": ("wandb",), "length": None}
    with open_run(folder, RECORD, options) as run:
        assert (run.session, run.resumed, run.record) == (1, False, RECORD)
        assert read_run(folder) == RECORD
        assert (folder / "lock").read_text() == f"{os.getpid()}\n"
        assert tomllib.loads((folder / "sessions/1.toml").read_text()) == {
            "batch": 64,
            "epochs": 3,
            "track": ["wandb"],
        }
        assert (run.checkpoints, run.metrics, run.evaluations) == (
            folder / "checkpoints",
            folder / "metrics.jsonl",
            folder / "evaluations.jsonl",
        )
    before = files(folder)
    with open_run(str(folder), {**RECORD, "layers": (9, 18)}, {"epochs": 4}) as run:
        assert (run.session, run.resumed, run.record) == (2, True, RECORD)
    after = files(folder)
    assert {name: after[name] for name in before if not name.endswith("lock")} == {
        name: value for name, value in before.items() if not name.endswith("lock")
    }
    assert tomllib.loads((folder / "sessions/2.toml").read_text()) == {"epochs": 4}


def test_every_field_that_differs_is_named(tmp_path):
    folder = tmp_path / "run"
    open_run(folder, RECORD, {}).close()
    (folder / "lock").unlink()
    before = files(folder)
    wanted = {
        **{name: value for name, value in RECORD.items() if name != "layers"},
        "batch": 32,
        "learning_rate": 3e-4,
        "temperature": 2.0,
        "seed": 1,
        "model": {"layers": 20, "fingerprint": "cc"},
        "cache": {"location": "cache", "identity": "dd", "rows": {"train": 20, "held_out": 3}},
    }
    with pytest.raises(RunError) as error:
        open_run(folder, wanted, {})
    assert str(error.value).splitlines()[1:-1] == [
        "  batch: the run has 64, you ask for 32",
        "  learning-rate: the run has 1e-05, you ask for 0.0003",
        "  temperature: the run has none, you ask for 2.0",
        "  layers: the run has [9, 18], you ask for none",
        "  model.fingerprint: the student's first weights are others",
        "  cache.identity: the cache is another one",
        "  cache.rows.held-out: the run has 2, you ask for 3",
        "  seed: the run has none, you ask for 1",
    ]
    assert files(folder) == before


def test_true_is_not_one(tmp_path):
    open_run(tmp_path / "run", {"remat": True}, {}).close()
    with pytest.raises(RunError, match="remat: the run has true, you ask for 1"):
        open_run(tmp_path / "run", {"remat": 1}, {})


_HOLDER = """
import sys
from student.run import open_run
run = open_run(sys.argv[1], {"batch": 64}, {})
print("open", flush=True)
sys.stdin.read()
"""


def test_one_process_at_a_time(tmp_path):
    folder = tmp_path / "run"
    arguments = [sys.executable, "-c", _HOLDER, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(arguments, **pipes) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "open\n"
            before = files(folder)
            match = rf"in use by process {holder.pid}\..*kill {holder.pid}\)"
            with pytest.raises(RunError, match=match):
                open_run(folder, {"batch": 64}, {})
            # Reading needs no lock; and a refused command changes nothing.
            assert read_run(folder) == {"batch": 64}
            assert files(folder) == before
        finally:
            holder.send_signal(signal.SIGKILL)
    with open_run(folder, {"batch": 64}, {}) as run:
        assert run.session == 2
        # Nor twice in one process.
        with pytest.raises(RunError, match=f"process {os.getpid()}"):
            open_run(folder, {"batch": 64}, {})
        run.close()
    open_run(folder, {"batch": 64}, {}).close()


def test_a_folder_of_something_else_is_not_touched(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    before = files(tmp_path)
    with pytest.raises(RunError, match=r"not empty and holds no run"):
        open_run(tmp_path, RECORD, {})
    assert files(tmp_path) == before
    with pytest.raises(RunError, match="should be a folder, found a file"):
        open_run(tmp_path / "thesis.txt", RECORD, {})
    with pytest.raises(RunError, match=re.escape("local path, found 'gs://bucket/run'")):
        open_run("gs://bucket/run", RECORD, {})
    with pytest.raises(RunError, match="cannot write to the run"):
        open_run(tmp_path / "thesis.txt/run", RECORD, {})


def test_an_empty_folder_and_a_start_that_was_killed_can_begin(tmp_path):
    open_run(tmp_path, RECORD, {}).close()
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "lock").write_text("1\n")
    (killed / "run.json.unfinished").write_text('{"form')
    with open_run(killed, RECORD, {}) as run:
        assert not run.resumed
    assert read_run(killed) == RECORD


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[: len(text) // 2], "is not valid JSON"),
        (lambda text: "", "is not valid JSON"),
        (lambda text: "[]", "should be a JSON object"),
        (lambda text: "{}", 'should hold "format" and "record"'),
        (lambda text: text.replace("64", "65"), "digest is of another content"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "newer Stillroom"),
    ],
)
def test_a_damaged_record_is_refused(tmp_path, change, reason):
    open_run(tmp_path, RECORD, {}).close()
    (tmp_path / "run.json").write_text(change((tmp_path / "run.json").read_text()))
    before = files(tmp_path)
    for use in (lambda: open_run(tmp_path, RECORD, {}), lambda: read_run(tmp_path)):
        with pytest.raises(RunError, match=reason):
            use()
    assert files(tmp_path) == before


def test_reading_a_folder_without_a_run(tmp_path):
    with pytest.raises(RunError, match=r"holds no run: there is no run\.json"):
        read_run(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_record_is_readable_and_keeps_its_letters(tmp_path):
    # A path that is not UTF-8 reaches us with a lone surrogate.
    record = {"student": "модель", "out": b"\xff".decode(errors="surrogateescape")}
    open_run(tmp_path, record, record).close()
    assert "модель" in (tmp_path / "run.json").read_text()
    assert read_run(tmp_path) == record
    assert json.loads((tmp_path / "run.json").read_text())["record"] == record
    assert open_run(tmp_path, record, record).session == 2


# What else lies in the folder.


def test_the_record_is_found_if_there_is_one(tmp_path):
    assert find_record(tmp_path / "none") is None
    assert find_record(tmp_path) is None  # an empty folder
    assert list(tmp_path.iterdir()) == []
    open_run(tmp_path / "run", RECORD, {}).close()
    assert find_record(str(tmp_path / "run")) == RECORD
    before = files(tmp_path)
    with pytest.raises(RunError, match="holds no run"):
        find_record(tmp_path)  # its `run` is something else
    with pytest.raises(RunError, match="found a file"):
        find_record(tmp_path / "run/run.json")
    with pytest.raises(RunError, match="local path"):
        find_record("s3://bucket/run")
    assert files(tmp_path) == before
    (tmp_path / "run/run.json").write_text("{")
    with pytest.raises(RunError, match="is damaged"):
        find_record(tmp_path / "run")


def test_what_a_start_that_was_killed_left_is_no_record(tmp_path):
    (tmp_path / "lock").write_text("1\n")
    (tmp_path / "run.json.unfinished").write_text("{")
    assert find_record(tmp_path) is None


def test_the_options_of_the_last_session(tmp_path):
    for session in range(1, 12):  # 10 comes after 9
        open_run(tmp_path, RECORD, {"keep": session, "length": None, "track": ("wandb",)}).close()
    assert last_options(tmp_path) == {"keep": 11, "track": ["wandb"]}
    (tmp_path / "sessions/12.toml.unfinished").write_text("keep = ")
    (tmp_path / "sessions/notes.toml").write_text("keep = 99")
    assert last_options(str(tmp_path))["keep"] == 11
    for damage in ("keep = ", "\udcff"):
        text = damage.encode(errors="surrogateescape")
        (tmp_path / "sessions/11.toml").write_bytes(text)
        with pytest.raises(RunError, match=r"11\.toml is damaged.*Put it back"):
            last_options(tmp_path)


def test_options_that_are_gone(tmp_path):
    open_run(tmp_path, RECORD, {"keep": 1}).close()
    (tmp_path / "sessions/1.toml").unlink()
    with pytest.raises(RunError, match="holds no options"):
        last_options(tmp_path)
    (tmp_path / "sessions").rmdir()
    with pytest.raises(RunError, match="holds no options"):
        last_options(tmp_path)


def test_the_tokenizer_is_kept(tmp_path):
    kept = {"tokenizer.json": b'{"a": 1}', "chat_template.jinja": "ä{{".encode()}
    with open_run(tmp_path, RECORD, {}) as run:
        run.keep_tokenizer(kept)
        folder = tmp_path / "tokenizer"
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == kept
        # Again, after a start that was killed in the middle of it.
        (folder / "tokenizer.json").write_bytes(b'{"a"')
        (folder / "tokenizer.json.unfinished").write_bytes(b"{")
        run.keep_tokenizer(kept)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == kept
