"""Trackers: curves without holes or doubles, whatever happened to the process."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb
from tensorboardX.proto import event_pb2
from wandb.proto import wandb_internal_pb2

from student.errors import RunError, StudentError
from student.tracking import open_trackers


def crc32c(data: bytes) -> int:
    """The check sum of event files, bit by bit, and masked as they want it."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    value ^= 0xFFFFFFFF
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every point of the event files, in the order of their files and lines."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("tensorboard/*"), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while len(data) >= 12:
            length, check = struct.unpack("<QI", data[:12])
            assert check == crc32c(data[:8])
            record, data = data[12 : 12 + length], data[12 + length :]
            assert struct.unpack("<I", data[:4])[0] == crc32c(record)
            event = event_pb2.Event.FromString(record)
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
            data = data[4:]
    return found


_SESSION = """
import os, sys
from student.tracking import open_trackers
name, folder = sys.argv[1:3]
first, last, crash = map(int, sys.argv[3:])
past = [(step, {"step": step, "loss": 1 / step, "alpha": None}) for step in range(1, first)]
trackers = open_trackers((name,), folder, "p", {"batch": 64}, past)
for step in range(first, last + 1):
    trackers.log(step, {"loss": 1 / step, "rate": 2.0 * step})
    if step == 4:
        trackers.log(step, {"held-out": 0.5})
    if step == crash:
        os.kill(os.getpid(), 9)
trackers.close()
"""


def session(name: str, folder: Path, first: int, last: int, crash: int = 0) -> None:
    """Logs steps first to last in a process of its own, which is killed at step `crash`."""
    arguments = map(str, (name, folder, first, last, crash))
    done = subprocess.run(
        [sys.executable, "-c", _SESSION, *arguments],
        env={**os.environ, "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-9 if crash else 0, "", "")


def test_tensorboard_after_crashes(tmp_path):
    """Killed at 5 with a checkpoint of 3, again at once, and resumed to 6."""
    session("tensorboard", tmp_path, 1, 9, crash=5)
    session("tensorboard", tmp_path, 4, 9, crash=4)
    session("tensorboard", tmp_path, 4, 6)
    found = curves(tmp_path)
    assert found["loss"] == [(step, pytest.approx(1 / step)) for step in range(1, 7)]
    assert found["rate"] == [(step, 2.0 * step) for step in range(1, 7)]
    assert found["held-out"] == [(4, 0.5)]


def test_a_tracker_that_joins_later_gets_what_was_before(tmp_path):
    session("tensorboard", tmp_path, 4, 6)
    assert [step for step, _ in curves(tmp_path)["loss"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in curves(tmp_path)["rate"]] == [4, 5, 6]


def test_a_half_written_event_is_sent_again(tmp_path):
    with open_trackers(("tensorboard",), tmp_path, "p", {}) as trackers:
        trackers.log(1, {"loss": 1.0})
        trackers.log(2, {"loss": 2.0})
    (path,) = (tmp_path / "tensorboard").iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    with open_trackers(("tensorboard",), tmp_path, "p", {}) as trackers:
        trackers.log(1, {"loss": 9.0})
        trackers.log(2, {"loss": 2.0})
    path.unlink()
    assert curves(tmp_path) == {"loss": [(2, 2.0)]}


def records(data: bytes) -> Iterator[bytes]:
    """Records of a .wandb file: after 7 bytes a log of LevelDB, in blocks of 32 KiB."""
    assert data[:4] == b":W&B"
    start, parts = 7, b""
    while start + 7 <= len(data):
        if 32768 - start % 32768 < 7:
            start += 32768 - start % 32768
        _, length, kind = struct.unpack_from("<IHB", data, start)
        parts += data[start + 7 : start + 7 + length]
        start += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def history(folder: Path) -> tuple[set[str], list[dict[str, float]]]:
    """Ids of the offline runs, and the rows that they hold."""
    names, rows = set(), []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime):
        names.add(path.stem)
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                rows.append({key: items[key] for key in items if not key.startswith("_")})
    return names, rows


def test_weights_and_biases_offline_after_a_crash(tmp_path):
    """What is logged reaches the file with a delay, so the killed session's is lost."""
    session("wandb", tmp_path, 1, 9, crash=5)
    session("wandb", tmp_path, 4, 6)
    # As if the last session had been killed after steps that it could not hand over.
    state = json.loads((tmp_path / "wandb.json").read_text())
    assert state["closed"] is True
    assert state["sent"] == {"loss": 6, "rate": 6, "held-out": 4}
    state |= {"closed": False, "sent": {"loss": 9, "rate": 9, "held-out": 4}}
    (tmp_path / "wandb.json").write_text(json.dumps(state))
    session("wandb", tmp_path, 7, 7)
    names, rows = history(tmp_path)
    # One run, in several files, which `wandb sync` puts together.
    assert len(names) == 1
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert losses == [(step, 1 / step) for step in range(1, 8)]
    assert [row["step"] for row in rows if "held-out" in row] == [4]


class FakeRun:
    """What is used of a run that is online."""

    offline = False

    def __init__(self):
        self.rows, self.finished, self.summary = [], False, {}

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.finished = True


@pytest.fixture
def fake_wandb(monkeypatch):
    """Runs that were begun: what they were asked for, and the run."""
    begun = []

    def init(**options):
        run = FakeRun()
        if begun:  # what arrived of the run before: its first three rows
            for row in begun[-1][1].rows[:3]:
                run.summary |= row
        begun.append((options, run))
        return run

    monkeypatch.setattr(wandb, "init", init)
    return begun


def test_the_same_run_is_gone_on_with(tmp_path, fake_wandb):
    with open_trackers(("wandb",), tmp_path, "mine", {"batch": 64}) as trackers:
        trackers.log(1, {"loss": 1.0})
        trackers.log(2, {"loss": 2.0})
        trackers.log(2, {"held-out": 3.0})
    with open_trackers(("wandb",), tmp_path, "mine", {"batch": 64}) as trackers:
        for step in (1, 2, 3):
            trackers.log(step, {"loss": float(step), "held-out": 9.0})
    (first, run), (second, resumed) = fake_wandb
    assert first["id"] == second["id"]
    assert (first["project"], first["config"], first["resume"]) == ("mine", {"batch": 64}, "allow")
    assert first["dir"] == str(tmp_path)
    assert run.rows == [
        {"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 2, "held-out": 3.0}
    ]  # fmt: skip
    assert resumed.rows == [{"step": 3, "loss": 3.0, "held-out": 9.0}]
    assert run.finished
    assert resumed.finished


def test_what_did_not_arrive_before_a_crash_is_sent_again(tmp_path, fake_wandb):
    """Five steps, of which three arrived; a checkpoint of step 4."""
    trackers = open_trackers(("wandb",), tmp_path, "mine", {})
    for step in range(1, 6):
        trackers.log(step, {"loss": float(step)})
    past = [(step, {"loss": float(step), "repeat": True, "note": "x"}) for step in range(1, 5)]
    trackers = open_trackers(("wandb",), tmp_path, "mine", {}, past)
    (_, resumed) = fake_wandb[-1]
    assert resumed.rows == [{"step": 4, "loss": 4.0}]
    trackers.log(5, {"loss": 5.0})
    assert resumed.rows[1:] == [{"step": 5, "loss": 5.0}]


def test_a_damaged_state_is_named(tmp_path, fake_wandb):
    (tmp_path / "wandb.json").write_text('{"id": "a", "sent": {"loss"')
    with pytest.raises(RunError, match=r"wandb\.json is damaged .* Remove it"):
        open_trackers(("wandb",), tmp_path, "p", {})
    assert fake_wandb == []


def test_no_account(tmp_path, monkeypatch):
    def init(**_):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(StudentError, match=r"No API key configured\..*WANDB_MODE=offline"):
        open_trackers(("tensorboard", "wandb"), tmp_path, "p", {})


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_package_that_is_not_installed(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(StudentError, match=r'pip install "stillroom\[tracking\]"'):
        open_trackers((name,), tmp_path, "p", {})
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_imported_unless_it_is_asked_for(tmp_path):
    code = (
        "import sys; from student.tracking import open_trackers\n"
        "with open_trackers((), sys.argv[1], 'p', {}) as t: t.log(1, {'loss': 1.0})\n"
        "assert not {'wandb', 'tensorboardX'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert list(tmp_path.iterdir()) == []
