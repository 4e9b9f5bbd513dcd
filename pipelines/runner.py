"""Running a Beam pipeline on this machine, in this process or in several."""

from __future__ import annotations

import _thread
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner
from apache_beam.transforms.environments import SubprocessSDKEnvironment

from pipelines.errors import CaptureError
from pipelines.transforms import user_text


def run_pipeline(build: Callable[[Any], Any], workers: int) -> None:
    """Builds a pipeline with `build(root)` and runs it to its end.

    Beam's DirectRunner would first try to download another runner, so the runner it falls
    back on is named: FnApiRunner, in this process for one worker, in processes of our own
    (worker.py) for more.

    Raises:
      CaptureError: what a worker says is wrong, or a worker process that died.
    """
    options = PipelineOptions(
        flags=[],  # else Beam reads this process's command line
        direct_num_workers=workers,
        pickle_library="cloudpickle",
        save_main_session=False,
    )
    environment = None
    if workers > 1:
        command = f"exec {shlex.quote(sys.executable)} -m pipelines.worker {os.getpid()}"
        environment = SubprocessSDKEnvironment.from_command_string(command)
    runner = FnApiRunner(default_environment=environment)
    with _worker_deaths() as deaths:
        try:
            with beam.Pipeline(runner=runner, options=options) as root:
                build(root)
        except KeyboardInterrupt:
            if deaths:
                raise CaptureError(
                    f"a worker process died ({deaths[0]}); it may have run out of memory. Run "
                    "the same command again, with fewer --workers: it goes on where it stopped."
                ) from None
            raise
        except Exception as error:
            text = user_text(error)
            if text is None:
                raise
            raise CaptureError(text) from error


@contextmanager
def _worker_deaths() -> Iterator[list[str]]:
    """Turns the death of a worker process into an interrupt of this thread.

    Beam's runner starts each worker from a thread of its own that raises when the worker
    dies, while the runner itself goes on waiting for an answer.
    """
    deaths: list[str] = []
    before = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if arguments.thread is not None and arguments.thread.name == "run_worker":
            deaths.append(str(arguments.exc_value))
            _thread.interrupt_main()
        else:
            before(arguments)

    threading.excepthook = hook
    try:
        yield deaths
    finally:
        threading.excepthook = before
