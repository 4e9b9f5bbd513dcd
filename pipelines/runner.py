"""Running a Beam pipeline on this machine, in this process or in several."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner
from apache_beam.runners.runner import create_runner

from pipelines.errors import CaptureError
from pipelines.processes import ProcessEnvironment, worker_deaths
from pipelines.transforms import user_text
from pipelines.worker import quiet_beam


@dataclass(frozen=True)
class RunnerSettings:
    """What runs a pipeline.

    Attributes:
      name: "local", or a Beam runner by the name that Beam gives it ("DaskRunner").
      workers: processes of the local runner.
      beam_options: Beam's own command-line options, for the other runners.
    """

    name: str = "local"
    workers: int = 1
    beam_options: str = ""


def run_pipeline(build: Callable[[Any], Any], settings: RunnerSettings) -> None:
    """Builds a pipeline with `build(root)` and runs it to its end.

    Beam's DirectRunner would first try to download another runner, so the runner it falls
    back on is named: FnApiRunner, in this process for one worker, in processes of our own
    (processes.py) for more.

    Raises:
      CaptureError: what a worker says is wrong, or a worker process that died.
    """
    runner, options = _local(settings.workers), _options(settings)
    if settings.name != "local":
        try:
            runner = create_runner(settings.name)
        except (ValueError, ImportError, AttributeError) as error:
            raise CaptureError(
                f"--runner {settings.name} cannot be used: {error}. Use local, or a Beam runner "
                "whose packages are installed (pip install 'stillroom[dask]' or [gcp])."
            ) from error
    with quiet_beam(), worker_deaths() as deaths:
        try:
            with beam.Pipeline(runner=runner, options=options) as root:
                build(root)
        except Exception as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                # In this process, Beam makes an error of its own of it.
                raise KeyboardInterrupt from error
            text = user_text(error)
            if deaths:
                text = (
                    f"a worker process died (exit code {next(iter(deaths.values()))}); it may have "
                    "run out of memory. Run the same command again, with fewer --workers: it goes "
                    "on where it stopped."
                )
            if text is None:
                raise
            raise CaptureError(text) from error


def _options(settings: RunnerSettings) -> PipelineOptions:
    return PipelineOptions(
        # Flags must be given: else Beam reads this process's command line.
        flags=shlex.split(settings.beam_options),
        direct_num_workers=settings.workers,
        pickle_library="cloudpickle",
        save_main_session=False,
    )


def _local(workers: int) -> FnApiRunner:
    if workers == 1:
        return FnApiRunner()
    return FnApiRunner(default_environment=ProcessEnvironment.default())
