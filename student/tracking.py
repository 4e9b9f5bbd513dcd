"""Curves for TensorBoard and Weights & Biases, which a resumed run goes on with.

What a tracker has of earlier sessions is found in its own files; points that it has are not sent
again, and points that a killed process could not hand over are sent late, from RUN/metrics.jsonl.
"""

from __future__ import annotations

import importlib
import json
import platform
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from student.errors import RunError, StudentError
from student.options import Tracker
from student.tracker_files import last_steps, tensorboard_records, wandb_records

_TENSORBOARD, _WANDB = "tensorboard", "wandb.json"


class Trackers:
    """Sends values to every tracker that was asked for; a context manager."""

    def __init__(self, targets: Sequence[_TensorBoard | _Wandb]):
        self._targets = tuple(targets)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Sends those of the values that an earlier session did not send for this or a later step.

        Args:
          step: never falls within a session.
          values: by the names of the curves; what is no number is left out.
        """
        for target in self._targets:
            _send(target, step, values)
            target.flush()

    def close(self) -> None:
        for target in self._targets:
            target.close()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_trackers(
    names: Sequence[Tracker],
    folder: str | Path,
    project: str,
    settings: Mapping[str, Any],
    past: Iterable[tuple[int, Mapping[str, Any]]] = (),
) -> Trackers:
    """Opens the trackers; call it before training begins.

    Args:
      names: those to open; packages of others are not imported.
      folder: the run's; an existing one's curves are gone on with.
      project: of Weights & Biases.
      settings: of the run, JSON values, to be shown beside the curves.
      past: what was logged up to the step that training goes on from, by the names of the
        curves, ascending by step: sent now if a tracker lacks it. From RUN/metrics.jsonl and
        RUN/evaluations.jsonl.

    Raises:
      StudentError: a package is not installed, or Weights & Biases cannot be used as it is set
        up; says what to do.
      RunError: what the folder holds of earlier sessions is damaged.
    """
    modules = {name: _package(name) for name in dict.fromkeys(names)}
    targets: list[_TensorBoard | _Wandb] = []
    try:
        for name, module in modules.items():
            if name == "tensorboard":
                targets.append(_TensorBoard(module, Path(folder)))
            else:
                targets.append(_Wandb(module, Path(folder), project, settings))
        if targets:
            for step, values in past:
                for target in targets:
                    _send(target, step, values)
        for target in targets:
            target.flush()
    except BaseException:
        Trackers(targets).close()
        raise
    return Trackers(targets)


def _send(target: _TensorBoard | _Wandb, step: int, values: Mapping[str, Any]) -> None:
    fresh = {
        name: float(value)
        for name, value in values.items()
        if step > target.sent.get(name, -1)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and name != "step"
    }
    if fresh:
        target.log(step, fresh)


def _package(name: Tracker) -> Any:
    package = {"tensorboard": "tensorboardX", "wandb": "wandb"}[name]
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise StudentError(
            f"--track {name} needs the package {package} ({error}). Install it with "
            f'pip install "stillroom[tracking]", or leave out --track {name}: RUN/metrics.jsonl '
            "is always written."
        ) from error


class _TensorBoard:
    """Event files below RUN/tensorboard, one a session."""

    def __init__(self, package: Any, folder: Path):
        events = importlib.import_module(f"{package.__name__}.proto.event_pb2")
        summaries = importlib.import_module(f"{package.__name__}.proto.summary_pb2")
        self._event, self._summary = events.Event, summaries.Summary
        logs = folder / _TENSORBOARD
        # The last step of each value that earlier sessions wrote.
        self.sent = last_steps(
            (event.step, [value.tag for value in event.summary.value])
            for path in logs.glob("*.tfevents.*")
            for event in map(self._event.FromString, tensorboard_records(path.read_bytes()))
        )
        logs.mkdir(parents=True, exist_ok=True)
        now = time.time()
        # The package's writer for scalars hands records to a thread and does not wait for it
        # when it flushes; this one writes.
        self._writer = package.RecordWriter(
            str(logs / f"events.out.tfevents.{now:.0f}.{platform.node()}.{uuid.uuid4().hex[:8]}")
        )
        self._write(self._event(wall_time=now, file_version="brain.Event:2"))

    def log(self, step: int, values: dict[str, float]) -> None:
        summary = self._summary(
            value=[
                self._summary.Value(tag=name, simple_value=value) for name, value in values.items()
            ]
        )
        self._write(self._event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        """Puts everything on disk: a process may be killed behind a checkpoint."""
        self._writer.flush()

    def close(self) -> None:
        self.flush()
        self._writer.close()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())


class _Wandb:
    """One run of Weights & Biases, whose id and last steps stand in RUN/wandb.json.

    The step is a value of its own, by which the curves are drawn: the tracker's own counter
    refuses steps that it takes for old ones after a restart.
    """

    def __init__(self, package: Any, folder: Path, project: str, settings: Mapping[str, Any]):
        self._path = folder / _WANDB
        state = _read_state(self._path) if self._path.exists() else None
        self._id = state["id"] if state else uuid.uuid4().hex[:8]
        kept = _kept(folder / "wandb", self._id) if state and not state["closed"] else {}
        try:
            self._run = package.init(
                project=project,
                id=self._id,
                name=folder.resolve().name,
                dir=str(folder),
                resume="allow",
                config=dict(settings),
                # It would wrap standard output and error, where the live line is.
                settings=package.Settings(console="off", silent=True),
            )
        except package.Error as error:
            raise StudentError(
                f"--track wandb: {error} Log in with `wandb login`, or set WANDB_MODE=offline "
                "and send the curves later with `wandb sync`."
            ) from error
        self._run.define_metric("*", step_metric="step")
        # What is behind the last step that arrived was lost with the process.
        self.sent: dict[str, int] = state["sent"] if state else {}
        if state and not state["closed"]:
            if self._run.offline:
                arrived = kept
            else:
                arrived = dict.fromkeys(self.sent, int(self._run.summary.get("step", -1)))
            self.sent = {name: min(step, arrived.get(name, -1)) for name, step in self.sent.items()}
        self._now = dict(self.sent)
        self.flush()

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({**values, "step": step})
        self._now |= dict.fromkeys(values, step)

    def flush(self) -> None:
        self._write_state(closed=False)

    def close(self) -> None:
        self._run.finish()
        self._write_state(closed=True)

    def _write_state(self, closed: bool) -> None:
        unfinished = self._path.with_suffix(".unfinished")
        record = {"id": self._id, "sent": self._now, "closed": closed}
        unfinished.write_text(json.dumps(record), encoding="utf-8")
        unfinished.replace(self._path)


def _kept(folder: Path, identity: str) -> dict[str, int]:
    """The last step of each value in the files of a run; they are written with a delay."""
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    rows = []
    for path in folder.glob(f"*/run-{identity}.wandb"):
        for data in wandb_records(path.read_bytes()):
            items = {
                item.key or ".".join(item.nested_key): item.value_json
                for item in record.FromString(data).history.item
            }
            if "step" in items:
                rows.append((int(json.loads(items["step"])), list(items)))
    return last_steps(rows)


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_bytes())
        return {
            "id": str(state["id"]),
            "sent": {str(name): int(step) for name, step in state["sent"].items()},
            "closed": bool(state["closed"]),
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{path} is damaged ({error!r}). Remove it to begin new curves at Weights & Biases; "
            "RUN/metrics.jsonl has all of them."
        ) from error
