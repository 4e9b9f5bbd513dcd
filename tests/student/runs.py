"""Whole training runs small enough to be made dozens of times, and what is compared of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import student.train as train_module
from student.functions import parameters_of
from student.metrics import read_metrics
from student.options import TrainOptions
from student.train import Trained, train
from student.trained import open_checkpoint
from tests.models import write_tiny_teacher
from tests.pipelines.small import environment
from tests.student.small import make_student_cache

VOCABULARY = 300
# 18 or so training rows in batches of 4, twice: an epoch ends within a batch.
SETTINGS: dict[str, Any] = {
    "held_out": 3.0,
    "epochs": 2,
    "batch": 4,
    "accumulation": 1,
    "learning_rate": 0.01,
    "checkpoint_every": 2,
    "chunk": 16,
}


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of this process share compiled programs and have two devices."""
    share_programs(monkeypatch)
    use_devices(monkeypatch, 2)


def make(folder: Path, **cache_settings: Any) -> Path:
    """A cache of 22 rows of 8 tokens and a student of one layer, in `folder`."""
    make_student_cache(folder, **{"vocabulary": VOCABULARY, **cache_settings})
    write_student(folder / "student")
    return folder


def write_student(folder: Path, **changes: Any) -> Path:
    sizes = {"seed": 1, "layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "mlp_width": 32}
    return write_tiny_teacher(folder, **{"vocabulary": VOCABULARY, **sizes, **changes})


def options(folder: Path, out: str = "run", **changes: Any) -> TrainOptions:
    given = {
        "cache": str(folder / "cache"),
        "student": str(folder / "student"),
        "out": str(folder / out),
    }
    return TrainOptions(**{**given, **SETTINGS, **changes})


def words(asked: TrainOptions, **changes: Any) -> list[str]:
    """The command line of a run."""
    default = {field.name: field.default for field in fields(TrainOptions)}
    values = {**asdict(asked), **changes}
    found = ["train", values.pop("cache")]
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"
        if value == default[name] or value is None:
            continue
        if isinstance(value, bool):
            found.append(option if value else f"--no-{name.replace('_', '-')}")
        else:
            found += [option, str(value)]
    return found


def run(asked: TrainOptions) -> tuple[Trained, str]:
    """Trains; also what was said."""
    said: list[str] = []
    return train(asked, said.append), "\n".join(said)


def share_programs(patch: pytest.MonkeyPatch) -> None:
    """Makes the runs of this process share compiled steps, by what decides them.

    Tracing and compiling takes a hundred times longer than these steps.
    """
    made: dict[Any, Any] = _PROGRAMS

    def shared(name: str, key: Callable[..., Any]) -> None:
        make = getattr(train_module, name)

        def get(*arguments: Any) -> Any:
            known = (name, key(*arguments))
            if known not in made:
                made[known] = make(*arguments)
            return made[known]

        patch.setattr(train_module, name, get)

    def of_model(model: Any, remat: bool) -> Any:
        shapes = [(name, x.shape) for name, x in parameters_of(model).items()]
        return str([type(model), getattr(model, "config", None), shapes, remat])

    def of_optimizer(asked: TrainOptions, steps: int) -> Any:
        names = "learning_rate warmup final_learning_rate weight_decay clip"
        return (*(getattr(asked, name) for name in names.split()), steps)

    def of_loss(settings: Any) -> Any:
        legal = None if settings.legal is None else settings.legal.tobytes()
        return settings.objective, settings.precision, legal, settings.chunk

    def of_step(functions: Any, settings: Any, optimizer: Any, devices: Any) -> Any:
        return id(functions), of_loss(settings), id(optimizer), tuple(devices)

    def of_sums(functions: Any, measures: Any, devices: Any) -> Any:
        loss = of_loss(measures.training)
        return id(functions), loss, measures.kl, measures.vocabulary, tuple(devices)

    shared("student_functions", of_model)
    shared("make_optimizer", of_optimizer)
    shared("make_step", of_step)
    shared("make_row_sums", of_sums)


_PROGRAMS: dict[Any, Any] = {}


def use_devices(patch: pytest.MonkeyPatch, count: int) -> None:
    """Lets training see the first so many devices."""
    devices = jax.devices()[:count]
    patch.setattr("student.plan.jax.local_devices", lambda: devices)


_ON_TWO_DEVICES = """
import sys
import jax
devices = jax.devices()[:2]
jax.local_devices = lambda: devices
import stillroom
{before}
sys.exit(stillroom.main(sys.argv[1:]))
"""


def process(command: list[str], before: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command line in a process of its own, on two of eight devices as the tests do, so
    that it finds what they have compiled.

    Args:
      before: code that is run first.
    """
    return subprocess.run(
        [sys.executable, "-c", _ON_TWO_DEVICES.format(before=before), *command],
        env=environment(devices=8),
        capture_output=True,
        text=True,
        timeout=300,
    )


class Killed(BaseException):
    """Stands for a process that ends without a chance to clean up its files."""


@contextmanager
def killed_at(name: str, count: int, owner: Any = train_module._Session) -> Iterator[None]:
    """The count-th call (from 0) of a method ends the run before it does anything."""
    with pytest.MonkeyPatch.context() as patch:
        original, calls = getattr(owner, name), iter(range(10_000))

        def method(*arguments: Any, **more: Any) -> Any:
            if next(calls) == count:
                raise Killed
            return original(*arguments, **more)

        patch.setattr(owner, name, method)
        yield


def saved(folder: Path, step: int) -> dict[str, str]:
    """sha256 of each array of a checkpoint: parameters and optimiser state."""
    text = (folder / "checkpoints" / str(step) / "checkpoint.json").read_text()
    leaves = json.loads(text)["content"]["leaves"]
    return {name: leaf["sha256"] for name, leaf in leaves.items()}


def steps_saved(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def parameters(folder: Path, checkpoint: str = "last") -> dict[str, np.ndarray]:
    found = open_checkpoint(folder, checkpoint).parameters
    return {name: np.asarray(x) for name, x in found.items()}


# Of the clock, not of the run.
_TIMES = {"tokens_per_second", "input_wait", "device_memory", "repeat"}


def curves(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of metrics without what the clock decides."""
    return [
        {name: value for name, value in line.items() if name not in _TIMES}
        for line in read_metrics(path)
    ]


def raw_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_equal(found: Path, expected: Path) -> None:
    """Both runs are finished, with the same last state and the same numbers of every step."""
    last = steps_saved(expected)[-1]
    assert steps_saved(found)[-1] == last
    assert saved(found, last) == saved(expected, last)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert curves(found / name) == curves(expected / name)


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of every file and folder: what a refused command must not change."""
    return {
        str(path): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }
