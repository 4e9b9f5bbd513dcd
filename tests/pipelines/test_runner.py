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
from apache_beam.runners.dataflow.dataflow_runner import DataflowRunner
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from pipelines.errors import CaptureError
from pipelines.options import AppendOptions, PrecomputeOptions
from pipelines.precompute import precompute
from pipelines.runner import RunnerSettings, check_runner, find_runner, run_pipeline
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


# Which runner, and what it needs.


@pytest.mark.parametrize(
    ("name", "runner"),
    [
        ("FnApiRunner", FnApiRunner),
        ("fnapi", FnApiRunner),
        ("apache_beam.runners.portability.fn_api_runner.FnApiRunner", FnApiRunner),
        ("DataflowRunner", DataflowRunner),
    ],
)
def test_names_of_runners(name, runner):
    assert find_runner(name) is runner


def test_a_runner_of_another_name_runs(tmp_path):
    folder = str(tmp_path)

    def note(element: int) -> None:
        open(f"{folder}/{element}", "wb").close()

    run_pipeline(do_each(note), RunnerSettings(name="FnApiRunner"))
    assert sorted(os.listdir(folder)) == ["0", "1", "2", "3"]


def asked(tmp_path, runner: str, **changes: Any) -> PrecomputeOptions:
    (tmp_path / "corpus.jsonl").write_bytes(b"{}")
    given = {"dataset": "owner/data", "teacher": "owner/teacher", "out": "gs://b/c", **changes}
    given = {name: value.replace("HERE", str(tmp_path)) for name, value in given.items()}
    return PrecomputeOptions(runner=runner, **given)


def test_names_that_are_no_runners(tmp_path):
    for name, told in (
        ("Sisyphus", "there is no such runner. There are local, BundleBased.*, DaskRunner, Dataf"),
        ("no.such.Runner", "cannot be imported .ModuleNotFoundError"),
        ("os.path.join", "should be a Beam runner, but os.path.join is none"),
        ("os.path.nothing", "should be a Beam runner"),
        ("../x", "there is no such runner"),
    ):
        with pytest.raises(CaptureError, match=f"--runner {name}.*{told}"):
            check_runner(asked(tmp_path, name))


def test_a_runner_whose_packages_are_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, extra in (("DaskRunner", "dask"), ("dask", "dask"), ("dataflow", "gcp")):
        with pytest.raises(CaptureError, match=rf"pip install 'stillroom\[{extra}\]'"):
            check_runner(asked(tmp_path, name))


_CLOUD = "--project=p --region=r --temp_location=gs://b/t"


def test_what_dataflow_lacks_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    here = {"dataset": "HERE/corpus.jsonl", "teacher": "HERE", "out": "cache", "tokenizer": "./t"}
    with pytest.raises(CaptureError) as error:
        check_runner(asked(tmp_path, "DataflowRunner", **here))
    lines = str(error.value).splitlines()
    starts = [f"  --dataset {tmp_path}/corpus.jsonl is on", f"  --teacher {tmp_path} is on"]
    starts += ["  --tokenizer ./t is on", "  --out cache is on", "  --beam-options lacks"]
    for line, start in zip(lines[1:], starts, strict=True):
        assert line.startswith(start)
    assert lines[-1] == "  --beam-options lacks --project, --region, --temp_location=gs://…"
    for beam_options, lacking in (
        ("--project p", "--region, --temp_location=gs://…"),
        ("--project=p --region=r --temp_location=/tmp", "--temp_location=gs://…"),
    ):
        with pytest.raises(CaptureError) as error:
            check_runner(asked(tmp_path, "DataflowRunner", beam_options=beam_options))
        assert str(error.value).endswith(f"lacks {lacking}")
    for pattern in ("HERE/*.jsonl", "file:///x.jsonl", "~/x"):
        with pytest.raises(CaptureError, match=r"--dataset .* is on this machine"):
            check_runner(asked(tmp_path, "dataflow", dataset=pattern, beam_options=_CLOUD))
    check_runner(asked(tmp_path, "DataflowRunner", beam_options=_CLOUD))
    check_runner(
        asked(tmp_path, "dataflow", dataset="gs://b/*.jsonl", beam_options=f"--x {_CLOUD}")
    )


def test_options_that_beam_does_not_understand(tmp_path, capfd):
    options = asked(tmp_path, "FlinkRunner", beam_options="--x --num_workers=many")
    with pytest.raises(CaptureError, match="argument --num_workers: invalid int value: 'many'"):
        check_runner(options)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("options", [PrecomputeOptions, AppendOptions])
def test_options_without_effect_on_the_runner(options):
    place = ("a", "b", "c") if options is PrecomputeOptions else ("a", "b")
    for changes, told in (
        ({"beam_options": "--x"}, "--beam-options has no effect with the local runner"),
        ({"runner": "DaskRunner", "workers": 2}, "--workers 2 has no effect with --runner Dask"),
        ({"runner": "DaskRunner", "beam_options": "'"}, "as on a command line"),
        ({"runner": " "}, "--runner should be local or the name"),
    ):
        with pytest.raises(CaptureError, match=told):
            options(*place, **changes)


def test_nothing_is_loaded_for_a_runner_that_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.precompute.begin", lambda options: pytest.fail("it began"))
    with pytest.raises(CaptureError, match="there is no such runner"):
        precompute(asked(tmp_path, "Sisyphus"))


def test_another_runner_that_fails_says_so():
    with pytest.raises(CaptureError, match=r"--runner PortableRunner failed .*job_endpoint"):
        run_pipeline(do_each(lambda element: None), RunnerSettings(name="PortableRunner"))
