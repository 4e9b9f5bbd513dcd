"""Commands where JAX has no such backend: one line, whatever they would have done."""

import os

import jax
import pytest

import stillroom
from decoder.errors import BackendError
from pipelines import begin
from pipelines.errors import TeacherError
from pipelines.teacher import _host, named_by_manifest
from tests.pipelines import small

ASKED = "JAX_PLATFORMS='nonsense' asks for a backend that JAX does not have here."
COMMANDS = {
    "precompute": "--dataset {0}/corpus.jsonl --teacher {0}/teacher --out {0}/new",
    "append": "{0}/cache --dataset {0}/corpus.jsonl",
    "audit": "{0}/cache",
    "compare": "--dataset {0}/corpus.jsonl --teacher {0}/teacher",
    "train": "{0}/cache --student {0}/teacher --out {0}/run",
    "evaluate": "{0}/run",
    "export": "{0}/run {0}/exported",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return small.captured(tmp_path_factory.mktemp("made"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_uses_devices_says_so(made, monkeypatch, capsys, command):
    def fails() -> None:
        raise AssertionError

    monkeypatch.setattr(jax, "devices", fails)
    monkeypatch.setattr("decoder.devices.sys.executable", "false")
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    before = sorted(os.listdir(made))
    assert stillroom.main([command, *COMMANDS[command].format(made).split()]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"stillroom {command}: {ASKED} Those that it has: none.")
    assert sorted(os.listdir(made)) == before


def test_worker_processes_are_tried_before_anything_is_read(tmp_path, monkeypatch):
    """In real processes, one for the try and one for the list."""
    options = small.options(tmp_path, workers=2)
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    monkeypatch.setattr(begin.decoder, "load_tokenizer", None)
    with pytest.raises(BackendError, match=f"^{ASKED} Those that it has: cpu"):
        begin.what_is_wanted(options)


def test_it_is_no_fault_of_the_teachers():
    """Where the manifest names the teacher, --teacher is no way out."""
    with pytest.raises(BackendError, match=r"^no such backend$"), named_by_manifest(True):
        raise BackendError("no such backend")


def test_a_teacher_that_is_cut_needs_the_host(monkeypatch):
    def fails(backend: str) -> None:
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", fails)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(TeacherError, match=r"JAX_PLATFORMS=cuda leaves it out. Set .*=cuda,cpu"):
        _host()
