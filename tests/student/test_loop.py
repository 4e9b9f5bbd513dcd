"""The loop: the order of things, what each step reports, stopping, and numbers that are none."""

import re
import signal
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from student.batches import Batch
from student.errors import TrainingError
from student.loop import StopRequest, run_steps
from student.losses import Sums
from student.step import Metrics, State


class Numbers:
    """A source whose n-th batch (from 0) has the rows 10 n, 10 n + 1 and padding."""

    def __init__(self, events: list[str], at: int = 0):
        self.at, self._events = at, events

    def __next__(self) -> Batch:
        rows = np.array([10 * self.at, 10 * self.at + 1, -1], np.int32)
        segments = np.array([[1, 1, 2, 0], [1, 0, 0, 0], [0, 0, 0, 0]], np.int32)
        self._events.append(f"read {self.at}")
        self.at += 1
        return Batch(rows, segments, segments, segments, segments > 0, segments, None)

    def state(self) -> dict[str, int]:
        return {"step": self.at}


class Model:
    """Steps whose state counts them; `bad` gives what a step reports in place of numbers."""

    def __init__(self, events: list[str], bad: dict[int, dict[str, float]] | None = None):
        self._events, self._bad = events, bad or {}

    def __call__(self, state: State, batch: Batch, alpha: np.float32) -> tuple[State, Metrics]:
        step = int(state.optimizer) + 1
        self._events.append(f"step {step} of rows {batch.rows[0]} with {alpha:g}")
        told = {"loss": 8.0 * step, "ce": 6.0, "kd": 2.0, "norm": 0.5, "labels": 4.0}
        told |= self._bad.get(step, {})
        one = lambda name: jnp.asarray(told[name], jnp.float32)  # noqa: E731
        sums = Sums(*(one(name) for name in Sums._fields))
        return State({}, step), Metrics(sums, one("labels"), one("norm"))


def go(events, start=0, steps=5, needs=(2, 4), stop=None, bad=None):
    """Runs the loop; what is done with a yielded state is an event, too."""
    found = run_steps(
        State({}, start),
        Numbers(events, start),
        start,
        steps,
        Model(events, bad),
        lambda batch: batch,
        lambda number: number / 10,
        lambda number: number in needs,
        stop,
    )
    for done in found:
        events.append(f"done {done.step}")
        yield done


def test_what_is_done_in_which_order():
    """The next batch is read and the next step begun before a step is reported, but for those
    whose state is needed: their buffers would be gone."""
    events: list[str] = []
    done = list(go(events))
    assert events == [
        "read 0",
        "step 1 of rows 0 with 0",
        "read 1",
        "step 2 of rows 10 with 0.1",
        "read 2",
        "done 1",
        "done 2",
        "step 3 of rows 20 with 0.2",
        "read 3",
        "step 4 of rows 30 with 0.3",
        "read 4",
        "done 3",
        "done 4",
        "step 5 of rows 40 with 0.4",
        "done 5",
    ]
    assert [x.step for x in done] == [1, 2, 3, 4, 5]
    # The position is that behind the step's own batch, however many were read ahead of it.
    assert [x.position for x in done] == [{"step": step} for step in range(1, 6)]
    states = [x.state and x.state.optimizer for x in done]
    assert states == [None, 2, None, 4, 5]


def test_what_a_step_reports():
    (done,) = go([], steps=1)
    # Sums over 4 labels become means.
    assert (done.loss, done.ce, done.kd, done.gradient_norm) == (2.0, 1.5, 0.5, 0.5)
    assert (done.labels, done.tokens, done.alpha) == (4, 4, 0.0)
    assert 0 <= done.waited <= done.seconds


def test_a_step_without_labels_reports_no_loss():
    """0 would look like the best of losses; the run goes on."""
    none = {"loss": 0.0, "ce": 0.0, "kd": 0.0, "norm": 0.0, "labels": 0.0}
    done = list(go([], steps=3, bad={2: none}))
    assert [x.labels for x in done] == [4, 0, 4]
    unknown = np.isnan([[x.loss, x.ce, x.kd] for x in done])
    assert unknown.tolist() == [[False] * 3, [True] * 3, [False] * 3]


def test_going_on_from_a_step():
    events: list[str] = []
    done = list(go(events, start=3))
    assert events[:2] == ["read 3", "step 4 of rows 30 with 0.3"]
    assert [(x.step, x.position["step"], x.alpha) for x in done] == [(4, 4, 0.3), (5, 5, 0.4)]


@pytest.mark.parametrize("asked_at", [1, 2, 3])
def test_a_request_to_stop(asked_at):
    """The step at hand is ended and yielded with its state; nothing is begun after it."""
    stop, events = StopRequest(), []
    done = []
    for each in go(events, stop=stop):
        done.append(each)
        if each.step == asked_at:
            stop.asked = True
    # Step 1 is reported while step 2 runs, which has its state yielded anyway.
    last = {1: 2, 2: 3, 3: 4}[asked_at]
    assert [x.step for x in done] == list(range(1, last + 1))
    assert done[-1].state is not None
    assert done[-1].state.optimizer == done[-1].position["step"] == last
    assert not any(event.startswith(f"step {last + 1}") for event in events)


def test_a_request_before_the_first_step():
    stop = StopRequest()
    stop.asked = True
    (done,) = go([], stop=stop, needs=())
    assert (done.step, done.state is not None) == (1, True)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"loss": np.nan}, "loss nan, cross-entropy 1.5"),
        ({"ce": np.inf}, "cross-entropy inf"),
        ({"kd": -np.inf}, "distillation -inf"),
        ({"norm": np.nan}, "gradient norm nan"),
    ],
)
@pytest.mark.parametrize("step", [2, 3, 5])
def test_numbers_that_are_not_finite(bad, text, step):
    """Step and rows are named, padding is not; the steps before are reported, this one is not."""
    events: list[str] = []
    reported: list[int] = []
    found = go(events, bad={step: bad})
    with pytest.raises(TrainingError) as error:
        reported.extend(done.step for done in found)
    assert reported == list(range(1, step))
    message = str(error.value)
    assert message.startswith(f"step {step} gave numbers that are not finite: ")
    assert text in message
    assert f"rows of the cache are {10 * step - 10}, {10 * step - 9}. " in message
    assert "the newest checkpoint is sound" in message
    assert "--learning-rate" in message


def test_many_rows_are_not_all_named():
    class Wide(Numbers):
        def __next__(self) -> Batch:
            return super().__next__()._replace(rows=np.arange(50, dtype=np.int32))

    found = run_steps(
        State({}, 0),
        Wide([]),
        0,
        1,
        Model([], {1: {"loss": np.nan}}),
        lambda batch: batch,
        lambda number: 0.0,
        lambda number: False,
    )
    with pytest.raises(TrainingError, match=r"18, 19 and 30 more\. Nothing"):
        next(found)


def test_an_error_of_the_source_goes_through():
    class Broken(Numbers):
        def __next__(self) -> Batch:
            if self.at == 2:
                raise OSError("the disk is gone")
            return super().__next__()

    found = run_steps(
        State({}, 0),
        Broken([]),
        0,
        5,
        Model([]),
        lambda batch: batch,
        lambda number: 0.0,
        lambda number: False,
    )
    with pytest.raises(OSError, match="the disk is gone"):
        list(found)


# Signals.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_and_the_second_stops(number):
    said: list[str] = []
    before = signal.getsignal(number)
    with StopRequest(said.append) as stop:
        assert not stop.asked
        signal.raise_signal(number)
        assert (stop.asked, stop.number) == (True, number)
        (line,) = said
        assert re.search("Stopping after this step, with a checkpoint", line)
        with pytest.raises(KeyboardInterrupt) as stopped:
            signal.raise_signal(number)
        assert stopped.value.args == (number,)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_so(number):
    """As `nohup` starts a command, and a shell one in the background."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(number)
            assert not stop.asked
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_elsewhere_than_in_the_main_thread_signals_keep_their_meaning():
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def work() -> None:
        with StopRequest() as stop:
            seen.append((stop.asked, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]
    assert signal.getsignal(signal.SIGINT) is before
