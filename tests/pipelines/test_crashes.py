"""A command that ends anywhere, by whatever: run again, it gives what an undisturbed one gives."""

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cache.errors import CacheError
from cache.format import RECEIPTS
from cache.storage import Store
from pipelines import transforms
from pipelines.errors import PipelineError
from tests.pipelines import small

# Small, for there is a run and a rerun for every operation.
SETTINGS = {"rows_per_shard": 5, "documents_per_part": 5}
DOCUMENTS = 11
# All that changes storage; `create` is a `replace`.
OPERATIONS = ("write", "replace", "delete", "delete_folder")


class Crash(BaseException):
    """The end of the process, where a real one would take the test along."""


class Full(Exception):
    """Marks the text of what TensorStore raises on a full disk."""


def fast_folder() -> Path:
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """A folder with teacher, corpus and an undisturbed cache; in memory, where writes are fast."""
    folder = fast_folder()
    small.options(folder)
    small.write_corpus(folder / "corpus.jsonl", small.texts(DOCUMENTS))
    with pytest.MonkeyPatch.context() as patch:
        small.share_teachers(patch)
        small.run_without_beam(patch)
        outcome = small.capture(folder, "whole", **SETTINGS)
        assert outcome.cache.manifest.shards >= 4
        assert outcome.cache.manifest.accounting["documents"] > 2 * 5
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def whole(made: Path) -> dict[str, bytes]:
    return small.stored(made / "whole")


@pytest.fixture
def with_beam() -> None:
    """Asks for Beam's own runner, and for teachers that are loaded each time."""


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    if "with_beam" not in request.fixturenames:
        small.share_teachers(monkeypatch)
        small.run_without_beam(monkeypatch)


class Operations:
    """Counts what changes storage, and can put an end to it.

    At the `last` operation the fault is raised, before it takes effect or after; no later
    operation takes effect either.
    """

    def __init__(self, patch: pytest.MonkeyPatch, last: int, when: str, fault: BaseException):
        self.count, self.last, self.fault = 0, last, fault
        for name in OPERATIONS:
            patch.setattr(Store, name, self._counted(getattr(Store, name), when))

    def _counted(self, real: Callable[..., Any], when: str) -> Callable[..., Any]:
        def operation(store: Store, *arguments: Any) -> Any:
            self.count += 1
            if self.count > self.last or (self.count == self.last and when == "before"):
                self._fail(store, str(arguments[0]))
            result = real(store, *arguments)
            if self.count == self.last:
                self._fail(store, str(arguments[0]))
            return result

        return operation

    def _fail(self, store: Store, key: str) -> None:
        if isinstance(self.fault, Full):
            error = ValueError(str(self.fault))
            raise store.refused("write", key, error) from error
        raise self.fault


def count_operations(made: Path, patch: pytest.MonkeyPatch, folder: Path) -> int:
    with patch.context() as inner:
        operations = Operations(inner, 10**9, "after", Crash())
        small.capture(made, folder / "counted", **SETTINGS)
        return operations.count


def receipts(out: Path) -> set[int]:
    return {int(path.stem) for path in (out / RECEIPTS).glob("[0-9]*.json")}


def check_rerun(made: Path, out: Path, whole: dict[str, bytes]) -> None:
    """Runs again; nothing that had a receipt is scored again, and all bytes are right."""
    complete = (out / "manifest.json").exists() and '"complete"' in (
        out / "manifest.json"
    ).read_text()
    done = receipts(out)
    before = set(small.runs(out)) if (out / "runs").exists() else set()
    outcome = small.capture(made, out, **SETTINGS)
    shards = range(outcome.cache.manifest.shards)
    if complete:
        assert outcome.scored == 0
    else:
        (run,) = set(small.runs(out)) - before
        assert small.scored_shards(out, run) == sorted(set(shards) - done)
    assert small.stored(out) == whole


def test_a_stop_before_and_after_every_operation(made, whole, monkeypatch):
    """What is on storage before the first operation and after each; a stop before one is a stop
    after the one before it, for whatever the command still held in memory is gone."""
    folder = fast_folder()
    try:
        stops = 0
        (folder / "stop-0").mkdir()

        def keep(real: Callable[..., Any]) -> Callable[..., Any]:
            def operation(store: Store, *arguments: Any) -> Any:
                nonlocal stops
                result = real(store, *arguments)
                stops += 1
                shutil.copytree(folder / "made", folder / f"stop-{stops}")
                return result

            return operation

        with monkeypatch.context() as patch:
            for name in OPERATIONS:
                patch.setattr(Store, name, keep(getattr(Store, name)))
            small.capture(made, folder / "made", **SETTINGS)
        assert stops > 60
        assert small.stored(folder / "made") == whole
        for stop in range(stops + 1):
            check_rerun(made, folder / f"stop-{stop}", whole)
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("when", "first", "fault"),
    [
        ("before", 1, Crash()),
        ("after", 3, Crash()),
        ("before", 2, Full("RESOURCE_EXHAUSTED: No space left on device")),
    ],
    ids=["crash before", "crash after", "full disk"],
)
def test_a_fault_at_every_third_operation(made, whole, monkeypatch, when, first, fault):
    """The command itself meets the fault, with its threads, and cannot do anything any more."""
    folder = fast_folder()
    try:
        total = count_operations(made, monkeypatch, folder)
        for last in range(first, total + 1, 3):
            out = folder / f"cache-{last}"
            with monkeypatch.context() as patch:
                Operations(patch, last, when, fault)
                with pytest.raises((Crash, CacheError, PipelineError)) as error:
                    small.capture(made, out, **SETTINGS)
            assert isinstance(error.value, Crash) or "Free some space there" in str(error.value)
            check_rerun(made, out, whole)
            shutil.rmtree(out)
    finally:
        shutil.rmtree(folder)


def test_a_crash_amid_the_removal_of_the_parts(made, whole, monkeypatch, tmp_path):
    for index in range(6):
        out = tmp_path / f"cache-{index}"

        def half(store: Store, folder: str, keep: int = index) -> None:
            names = store.list(folder)
            random.Random(keep).shuffle(names)
            for name in names[: keep % len(names)]:
                store.delete(f"{folder}/{name}")
            raise Crash

        with monkeypatch.context() as patch:
            patch.setattr(Store, "delete_folder", half)
            with pytest.raises(Crash):
                small.capture(made, out, **SETTINGS)
        check_rerun(made, out, whole)


def test_crash_upon_crash(made, whole, monkeypatch, tmp_path):
    """A run that comes only one operation further than the one before, again and again."""
    out, chance = tmp_path / "cache", random.Random(2)
    for _ in range(12):
        with monkeypatch.context() as patch:
            Operations(patch, chance.randrange(6, 24), "after", Crash())
            try:
                small.capture(made, out, **SETTINGS)
            except Crash:
                continue
            break
    small.capture(made, out, **SETTINGS)
    assert small.stored(out) == whole
    scored = small.scored_shards(out)
    assert scored == sorted(set(scored))


@pytest.mark.usefixtures("with_beam")
def test_a_crash_inside_of_beam(made, whole, monkeypatch, tmp_path):
    """The same with Beam's own runner, at some of the operations."""
    small.share_teachers(monkeypatch)
    out = tmp_path / "cache"
    for last in (9, 40):
        with monkeypatch.context() as patch:
            Operations(patch, last, "after", Crash())
            with pytest.raises((Crash, RuntimeError)):
                small.capture(made, out, **SETTINGS)
        assert json.loads((out / "manifest.json").read_text())["state"] == "open"
    check_rerun(made, out, whole)


def test_a_failed_write_after_the_forward_pass_names_the_object(made, monkeypatch, tmp_path):
    out = tmp_path / "cache"
    real = transforms.write_shard

    def write(store: Store, *arguments: Any) -> Any:
        if arguments[1] == 2:
            error = ValueError("RESOURCE_EXHAUSTED: No space left on device")
            raise store.refused("write", "arrays/tokens/c.2.0", error)
        return real(store, *arguments)

    monkeypatch.setattr(transforms, "write_shard", write)
    with pytest.raises(
        PipelineError, match=r"cannot write .*c\.2\.0: RESOURCE_EXHAUSTED: No space"
    ):
        small.capture(made, out, **SETTINGS)
    assert receipts(out) == {0, 1}


@pytest.fixture
def tiny_disk(tmp_path) -> Iterator[Path]:
    """A file system of its own, of one MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root; full disks are also tested without")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_real_disk_that_is_full(made, whole, tiny_disk):
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(b"\1" * 850_000)
    with pytest.raises((CacheError, PipelineError)) as error:
        small.capture(made, tiny_disk / "cache", **SETTINGS)
    text = str(error.value)
    assert text.startswith("cannot write ")
    assert "No space left on device" in text
    assert "Free some space there, then run the same command again" in text
    ballast.unlink()
    done = receipts(tiny_disk / "cache")
    small.capture(made, tiny_disk / "cache", **SETTINGS)
    last = small.runs(tiny_disk / "cache")[-1]
    assert not done & set(small.scored_shards(tiny_disk / "cache", last))
    assert small.stored(tiny_disk / "cache") == whole


# Real commands.


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with a bigger corpus, and what a command with one worker makes of it."""
    folder = tmp_path_factory.mktemp("work")
    small.options(folder)
    small.write_corpus(folder / "corpus.jsonl", small.texts(90))
    finish(start(folder, "whole", workers=1))
    return folder


def start(work: Path, out: str, workers: int = 2) -> subprocess.Popen[str]:
    # One part: laid by the command itself, so that its workers are started once.
    words = small.command_words(small.options(work, out), workers=workers, documents_per_part=90)
    return small.command(words)


def finish(command: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    output, errors = command.communicate(timeout=300)
    assert command.returncode == code, errors
    return output, errors


def processes(command: subprocess.Popen[str]) -> list[psutil.Process]:
    """The command and all it started."""
    try:
        main = psutil.Process(command.pid)
        return [main, *main.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def worker_processes(command: subprocess.Popen[str]) -> list[psutil.Process]:
    found = []
    for process in processes(command)[1:]:
        try:
            if "pipelines.worker" in process.cmdline():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_for(command: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    while not reached():
        assert command.poll() is None, command.communicate()
        time.sleep(0.02)


def assert_gone(left: list[psutil.Process]) -> None:
    """Within seconds: a worker looks once a second whether its command is there."""
    _, alive = psutil.wait_procs(left, timeout=30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.usefixtures("with_beam")
def test_a_command_that_is_killed_twice(work):
    """While workers load, and at a moment by chance."""
    out = work / "killed"
    moments: list[Callable[[subprocess.Popen[str]], bool]] = [
        lambda command: (out / "arrays/zarr.json").exists() and len(worker_processes(command)) == 2,
        lambda command: len(receipts(out)) >= random.randrange(5, 15),
    ]
    for reached in moments:
        command = start(work, "killed")
        wait_for(command, lambda command=command, reached=reached: reached(command))
        everyone = processes(command)
        os.kill(command.pid, signal.SIGKILL)
        command.communicate(timeout=60)
        assert_gone(everyone)
        assert json.loads((out / "manifest.json").read_text())["state"] == "open"
    done = receipts(out)
    assert len(done) >= 5
    finish(start(work, "killed"))
    last = small.runs(out)[-1]
    assert not done & set(small.scored_shards(out, last))
    assert small.stored(out) == small.stored(work / "whole")


@pytest.mark.slow
@pytest.mark.usefixtures("with_beam")
def test_a_command_whose_worker_is_killed_and_that_is_then_interrupted(work):
    out = work / "stopped"
    command = start(work, "stopped")
    wait_for(command, lambda: len(receipts(out)) >= 1)
    everyone = processes(command)
    os.kill(worker_processes(command)[0].pid, signal.SIGKILL)
    _, errors = finish(command, code=1)
    assert "stillroom precompute: a worker process died (exit code -9)" in errors
    assert "Run the same command again, with fewer --workers" in errors
    assert "Traceback" not in errors
    assert_gone(everyone)

    before = len(receipts(out))
    interrupt(start(work, "stopped"), lambda: len(receipts(out)) > before)
    done = receipts(out)
    finish(start(work, "stopped"))
    assert not done & set(small.scored_shards(out, small.runs(out)[-1]))
    assert small.stored(out) == small.stored(work / "whole")


@pytest.mark.usefixtures("with_beam")
def test_a_command_without_workers_that_is_interrupted(work):
    out = work / "interrupted"
    interrupt(start(work, out.name, workers=1), lambda: len(receipts(out)) >= 1)
    done = receipts(out)
    finish(start(work, out.name, workers=1))
    assert not done & set(small.scored_shards(out, small.runs(out)[-1]))
    assert small.stored(out) == small.stored(work / "whole")


def interrupt(command: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    """Ctrl-C, which reaches the whole process group of the terminal."""
    wait_for(command, reached)
    everyone = processes(command)
    os.killpg(command.pid, signal.SIGINT)
    _, errors = finish(command, code=130)
    assert "Stopped. Run the same command again: it goes on where it stopped." in errors
    assert "Traceback" not in errors
    assert_gone(everyone)
