"""Running a Beam pipeline on this machine, in this process or in several."""

from __future__ import annotations

import importlib
import importlib.util
import io
import shlex
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import (
    PipelineOptions,
    StandardOptions,
)
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner
from apache_beam.runners.runner import PipelineRunner

from pipelines.errors import CaptureError
from pipelines.options import LOCAL, PrecomputeOptions
from pipelines.processes import ProcessEnvironment, worker_deaths
from pipelines.transforms import user_text
from pipelines.worker import quiet_beam

_DASK = "apache_beam.runners.dask.dask_runner.DaskRunner"
# Full names of runners by the name of the class, in small letters.
_RUNNERS = {
    path.rpartition(".")[2].lower(): path for path in (*StandardOptions.ALL_KNOWN_RUNNERS, _DASK)
}
# By the module of a runner: a package that it needs, and the extra that installs it.
_NEEDS = {
    "apache_beam.runners.dask": ("distributed", "dask"),
    "apache_beam.runners.dataflow": ("apitools", "gcp"),
}


@dataclass(frozen=True)
class RunnerSettings:
    """What runs a pipeline.

    Attributes:
      name: "local", or a Beam runner; see `find_runner`.
      workers: processes of the local runner.
      beam_options: Beam's own command-line options, for the other runners.
    """

    name: str = LOCAL
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
    local = settings.name == LOCAL
    runner = _local(settings.workers) if local else find_runner(settings.name)()
    options = _options(settings)
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
            if text is None and not local:
                text = (
                    f"--runner {settings.name} failed ({type(error).__name__}: {error}). What is "
                    "finished stays; the same command goes on from there. --debug shows more."
                )
            if text is None:
                raise
            raise CaptureError(text) from error


def check_runner(options: PrecomputeOptions) -> None:
    """Refuses what the runner cannot do, before anything is loaded or sent anywhere.

    Raises:
      CaptureError: no such runner; its packages are not installed; Beam does not understand its
        options; or it runs elsewhere, where local paths are not.
    """
    if options.runner == LOCAL:
        return
    path = _full_name(options.runner)
    lacks = list(_lacking(path, options))
    if lacks:
        lines = "\n".join(f"  {line}" for line in lacks)
        raise CaptureError(f"--runner {options.runner} cannot be used as it is asked for:\n{lines}")
    find_runner(options.runner)


def find_runner(name: str) -> type[PipelineRunner]:
    """The class of a Beam runner.

    Args:
      name: the name of its class ("DaskRunner"), in any letters and with or without "Runner"; or
        its full name ("package.module.Runner").

    Raises:
      CaptureError: there is none, or it cannot be imported.
    """
    path = _full_name(name)
    module, _, member = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), member, None)
    except Exception as error:
        # Importing runs whatever the module is made of.
        raise CaptureError(
            f"--runner {name} cannot be imported ({type(error).__name__}: {error}). Install what "
            "it needs, or use another runner."
        ) from error
    if not (isinstance(found, type) and issubclass(found, PipelineRunner)):
        raise CaptureError(f"--runner {name} should be a Beam runner, but {path} is none.")
    return found


def _full_name(name: str) -> str:
    path = _RUNNERS.get(name.lower()) or _RUNNERS.get(f"{name.lower()}runner") or name
    if not all(part.isidentifier() for part in path.split(".")) or "." not in path:
        names = ", ".join(sorted(path.rpartition(".")[2] for path in _RUNNERS.values()))
        raise CaptureError(
            f"--runner {name}: there is no such runner. There are local, {names}, and others by "
            "the full name of their class (package.module.Runner)."
        )
    return path


def _lacking(path: str, options: PrecomputeOptions) -> Iterator[str]:
    """What a runner still needs, one sentence each."""
    for module, (package, extra) in _NEEDS.items():
        if path.startswith(f"{module}.") and importlib.util.find_spec(package) is None:
            yield f"its packages are not installed: pip install 'stillroom[{extra}]'"
    given = _given(options.beam_options)
    if not path.startswith("apache_beam.runners.dataflow."):
        return
    for name, advice in (
        ("dataset", "a hub name or a gs:// address"),
        ("teacher", "a hub name or package.module:function"),
        ("tokenizer", "a hub name"),
        ("out", "a gs:// address"),
    ):
        value = getattr(options, name)
        if value is not None and _is_local(value, name == "out"):
            yield f"--{name} {value} is on this machine, its workers are not: give {advice}"
    missing = [f"--{name}" for name in ("project", "region") if not given.get(name)]
    if not str(given.get("temp_location") or given.get("staging_location")).startswith("gs://"):
        missing.append("--temp_location=gs://…")
    if missing:
        yield f"--beam-options lacks {', '.join(missing)}"


def _is_local(value: str, place: bool) -> bool:
    """Whether a name stands for something on this machine; a place to write to need not exist."""
    if "://" in value:
        return value.startswith("file://")
    pattern = value.startswith((".", "/", "~")) or any(char in value for char in "*?[")
    return place or pattern or Path(value).exists()


def _given(beam_options: str) -> dict[str, Any]:
    """Beam's options as Beam understands them.

    Raises:
      CaptureError: it does not.
    """
    told = io.StringIO()
    try:
        # Beam's parser prints what is wrong, and ends the process.
        with redirect_stderr(told), redirect_stdout(io.StringIO()):
            parsed = PipelineOptions(flags=shlex.split(beam_options))
            return parsed.get_all_options()
    except SystemExit as error:
        reason = told.getvalue().strip().rpartition("error: ")[2] or "they ask for help"
        raise CaptureError(
            f"--beam-options {beam_options!r} are not understood by Beam: {reason}."
        ) from error


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
