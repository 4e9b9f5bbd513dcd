"""The training loop: steps in order, the next batch on its way, metrics one step behind."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from student.batches import Batch
from student.errors import TrainingError
from student.step import Metrics, State


@runtime_checkable
class Source(Protocol):
    """Where batches come from; `input.TrainingInput` is one."""

    def __next__(self) -> Batch: ...

    def state(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class Done:
    """A finished step whose numbers are all finite.

    Attributes:
      step: counted from 1.
      loss, ce, kd: means over labels, nats; kd without T². NaN in a step without labels.
      gradient_norm: before clipping.
      alpha: of this step.
      labels: trained on.
      tokens: positions that are not padding.
      seconds: since the step before was finished; compiling included in a session's first.
      waited: of these, the seconds in which the host waited for input.
      position: of the input after this step's batch.
      state: after this step; None unless it was asked for.
    """

    step: int
    loss: float
    ce: float
    kd: float
    gradient_norm: float
    alpha: float
    labels: int
    tokens: int
    seconds: float
    waited: float
    position: dict[str, int]
    state: State | None


@dataclass(frozen=True)
class _Running:
    step: int
    metrics: Metrics
    alpha: float
    rows: np.ndarray
    tokens: int
    position: dict[str, int]
    waited: float


class StopRequest:
    """Whether the user asked to stop: once to stop after the step, twice at once.

    Ctrl-C, SIGTERM, and SIGHUP, which comes when the terminal is closed, ask so. A context
    manager; outside the main thread, signals keep their meaning, and one that is ignored (`nohup`)
    stays so.

    Attributes:
      asked: whether a signal did.
      number: which.
    """

    def __init__(self, say: Callable[[str], None] | None = None):
        self.asked, self.number = False, 0
        self._say = say
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt(number)
        self.asked, self.number = True, number
        if self._say is not None:
            self._say("Stopping after this step, with a checkpoint. Again: stop at once.")


def run_steps(
    state: State,
    source: Source,
    start: int,
    steps: int,
    step: Callable[[State, Batch, Any], tuple[State, Metrics]],
    put: Callable[[Batch], Batch],
    alpha: Callable[[int], float],
    needs_state: Callable[[int], bool],
    stop: StopRequest | None = None,
) -> Iterator[Done]:
    """Runs the steps start + 1 … steps and yields each when it is finished.

    Args:
      state: of step `start`; its buffers are donated.
      source: at the batch of step start + 1.
      step: from `step.make_step`.
      put: a host's batch to the devices.
      alpha: of a step counted from 0.
      needs_state: whether the step (counted from 1) is to be yielded with its state. The next
        step then begins only after the caller is done with it.
      stop: ends the iteration early, after a step that is yielded with its state.

    Raises:
      TrainingError: a loss or gradient is not finite; names step and rows.
      What `source` raises.
    """
    began = time.monotonic()
    behind: _Running | None = None
    upcoming = _take(source, put, rest=steps - start)
    for number in range(start + 1, steps + 1):
        assert upcoming is not None
        batch, placed, position, waited = upcoming
        weight = alpha(number - 1)
        state, metrics = step(state, placed, np.float32(weight))
        tokens = int((batch.segments > 0).sum())
        running = _Running(number, metrics, weight, batch.rows, tokens, position, waited)
        # The devices work on this step while the host reads the next and reports the last.
        upcoming = _take(source, put, rest=steps - number)
        if behind is not None:
            done, began = _finish(behind, None, began)
            yield done
        behind = running
        stopping = stop is not None and stop.asked
        if needs_state(number) or number == steps or stopping:
            done, _ = _finish(running, state, began)
            yield done
            behind, began = None, time.monotonic()
            if stopping:
                return


def _take(
    source: Source, put: Callable[[Batch], Batch], rest: int
) -> tuple[Batch, Batch, dict[str, int], float] | None:
    if not rest:
        return None
    began = time.monotonic()
    batch = next(source)
    waited = time.monotonic() - began
    return batch, put(batch), source.state(), waited


def _finish(running: _Running, state: State | None, began: float) -> tuple[Done, float]:
    """Waits for a step's numbers and checks them; also the time when they were there."""
    sums, labels, norm = jax.device_get(running.metrics)
    now = time.monotonic()
    count = max(float(labels), 1.0)
    values = [float(x) / count for x in sums]
    if not all(math.isfinite(x) for x in (*values, float(norm))):
        raise TrainingError(_not_finite(running, values, float(norm)))
    # Nothing was learnt of: 0 would look like the best of losses.
    loss, ce, kd = values if labels else (math.nan,) * 3
    done = Done(
        step=running.step,
        loss=loss,
        ce=ce,
        kd=kd,
        gradient_norm=float(norm),
        alpha=running.alpha,
        labels=int(labels),
        tokens=running.tokens,
        seconds=now - began,
        waited=min(running.waited, now - began),
        position=running.position,
        state=state,
    )
    return done, now


def _not_finite(running: _Running, values: list[float], norm: float) -> str:
    rows = running.rows[running.rows >= 0].tolist()
    shown = ", ".join(map(str, rows[:20])) + (f" and {len(rows) - 20} more" if rows[20:] else "")
    return (
        f"step {running.step} gave numbers that are not finite: loss {values[0]}, cross-entropy "
        f"{values[1]}, distillation {values[2]}, gradient norm {norm}. Its rows of the cache are "
        f"{shown}. Nothing of this step was saved; the newest checkpoint is sound. Look at the "
        "rows with `stillroom inspect --row N` on the cache, and try a lower --learning-rate, a "
        "--clip, or --precision float32 with another --out."
    )
