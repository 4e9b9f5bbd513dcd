"""Running a pipeline: in this process, in several, and what becomes of errors and deaths."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import apache_beam as beam
import cloudpickle
import psutil
import pytest

from pipelines.errors import CaptureError
from pipelines.runner import RunnerSettings, run_pipeline
from pipelines.transforms import WorkerError


def do_each(work: Callable[[int], None]) -> Callable[[Any], Any]:
    """A pipeline that does something with 0, 1, 2, 3; sent to workers by value."""

    class Do(beam.DoFn):
        def process(self, element: int):
            work(element)
            yield element

    return lambda root: root | beam.Create(range(4)) | beam.Reshuffle() | beam.ParDo(Do())


@pytest.fixture(autouse=True)
def by_value():
    import tests.pipelines.test_runner as module

    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


def children() -> set[int]:
    found = psutil.Process().children(recursive=True)
    return {child.pid for child in found if child.status() != psutil.STATUS_ZOMBIE}


def test_one_worker_is_this_process():
    done = []
    run_pipeline(do_each(_note), RunnerSettings(workers=1))
    done = sorted(_NOTED)
    assert done == [(0, os.getpid()), (1, os.getpid()), (2, os.getpid()), (3, os.getpid())]


_NOTED: list[tuple[int, int]] = []


def _note(element: int) -> None:
    import tests.pipelines.test_runner as module

    module._NOTED.append((element, os.getpid()))


def test_several_workers_are_processes_of_their_own(tmp_path):
    folder = str(tmp_path)

    def note(element: int) -> None:
        with open(f"{folder}/{element}", "w") as file:
            file.write(f"{os.getpid()} {os.getsid(0)}")

    before = children()
    run_pipeline(do_each(note), RunnerSettings(workers=2))
    found = {path.name: path.read_text().split() for path in tmp_path.iterdir()}
    assert sorted(found) == ["0", "1", "2", "3"]
    assert str(os.getpid()) not in {pid for pid, _ in found.values()}
    # A session of their own: Ctrl-C in a terminal reaches the command alone.
    assert str(os.getsid(0)) not in {session for _, session in found.values()}
    assert children() <= before


@pytest.mark.parametrize("workers", [1, 2])
def test_a_users_error_keeps_its_text_alone(workers):
    def refuse(element: int) -> None:
        raise WorkerError('disk "full" at\n' + "x")

    with pytest.raises(CaptureError) as error:
        run_pipeline(do_each(refuse), RunnerSettings(workers=workers))
    assert str(error.value) == 'disk "full" at\nx'


def test_another_error_is_not_hidden():
    def fail(element: int) -> None:
        raise ZeroDivisionError("by accident")

    with pytest.raises(Exception, match="by accident") as error:
        run_pipeline(do_each(fail), RunnerSettings(workers=1))
    assert not isinstance(error.value, CaptureError)


def test_a_worker_process_that_is_killed_ends_the_run(capfd):
    owner = os.getpid()

    def die(element: int) -> None:
        if os.getpid() != owner:
            os.kill(os.getpid(), signal.SIGKILL)

    before, hook = children(), threading.excepthook
    with pytest.raises(CaptureError, match=r"a worker process died \(exit code -9\).*fewer --work"):
        run_pipeline(do_each(die), RunnerSettings(workers=2))
    assert children() <= before
    assert "Traceback" not in capfd.readouterr().err
    assert threading.excepthook is hook


def test_a_worker_that_cannot_start_ends_the_run(monkeypatch, capfd):
    monkeypatch.setattr("pipelines.processes.sys.executable", "/bin/false")
    with pytest.raises(CaptureError, match=r"a worker process died \(exit code 1\)"):
        run_pipeline(do_each(lambda element: None), RunnerSettings(workers=2))


def test_a_runner_that_there_is_not():
    with pytest.raises(CaptureError, match="--runner Sisyphus cannot be used"):
        run_pipeline(do_each(lambda element: None), RunnerSettings(name="Sisyphus"))
