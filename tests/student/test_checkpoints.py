"""Checkpoints: bit for bit, on any device count, and whole whenever the process ends."""

import json
import logging
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from student import checkpoints
from student.checkpoints import Checkpoints
from student.errors import RunError
from tests.student.states import abstract, assert_same, make_state, save_two, sharding


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of steps 3 and 5, and their states."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    return folder, save_two(folder)


@pytest.fixture
def copy(saved, tmp_path):
    """The same, to be damaged."""
    shutil.copytree(saved[0], tmp_path / "checkpoints")
    return tmp_path / "checkpoints", saved[1]


def test_a_round_trip_changes_no_bit(saved):
    folder, states = saved
    found = Checkpoints(folder).restore(abstract(states[5]))
    assert found is not None
    assert_same(found.state, states[5])
    assert (found.step, found.position) == (5, {"step": 5, "reader": {"next": 40}})
    assert (found.metrics, found.warnings) == ({"loss": 1.0}, ())
    earlier = Checkpoints(folder).restore(abstract(states[3]), step=3)
    assert earlier is not None
    assert_same(earlier.state, states[3])


def test_two_devices_one_device_and_back(tmp_path):
    state = make_state(1, devices=2)
    assert len(state["parameters"]["table"].sharding.device_set) == 2
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {})
    on_one = checkpoints.restore(abstract(state, devices=1))
    assert on_one is not None
    assert_same(on_one.state, state)
    leaves = jax.tree.leaves(on_one.state)
    assert {leaf.sharding for leaf in leaves} == {sharding(1)}
    checkpoints.save(2, on_one.state, {})
    back = checkpoints.restore(abstract(state, devices=8))
    assert back is not None
    assert back.step == 2
    assert_same(back.state, state)
    assert {leaf.sharding for leaf in jax.tree.leaves(back.state)} == {sharding(8)}
    # What is on disk is the array itself, and the same whatever it was saved from.
    records = [json.loads((tmp_path / f"{n}/checkpoint.json").read_text()) for n in (1, 2)]
    leaves = [record["content"]["leaves"] for record in records]
    assert leaves[0] == leaves[1]
    assert leaves[0]["parameters/layers.0.weight"]["shape"] == [5, 3]


def test_no_checkpoints_is_no_error(tmp_path):
    assert Checkpoints(tmp_path / "none").restore(abstract(make_state(1))) is None
    assert not (tmp_path / "none").exists()
    (tmp_path / "7.unfinished/state").mkdir(parents=True)
    assert Checkpoints(tmp_path).restore(abstract(make_state(1))) is None


def test_a_restored_state_can_be_donated_and_saved_again(tmp_path, saved):
    folder, states = saved
    found = Checkpoints(folder).restore(abstract(states[5]))
    assert found is not None
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), tree),
                   donate_argnums=0)  # fmt: skip
    expected = step(jax.tree.map(jnp.copy, states[5]))
    later = step(found.state)
    assert_same(later, expected)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, later, {})
    assert_same(step(later), step(expected))
    again = checkpoints.restore(abstract(states[5]))
    assert again is not None
    assert_same(again.state, step(jax.tree.map(jnp.copy, states[5])))


# --- keeping ------------------------------------------------------------------------------------


def test_the_newest_and_the_best_are_kept(tmp_path):
    state = make_state(1)
    checkpoints = Checkpoints(tmp_path, keep=2)
    kept = []
    for step, loss in enumerate([3.0, 1.0, None, 2.0, float("nan"), 1.0, 5.0, 4.0], start=1):
        checkpoints.save(step, state, {}, None if loss is None else {"loss": loss})
        kept.append(checkpoints.steps())
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [5, 6], [6, 7], [6, 7, 8]]
    parameters = abstract(state)["parameters"]
    assert checkpoints.restore_parameters(parameters, "best").step == 6
    assert checkpoints.restore_parameters(parameters, "last").step == 8
    without = Checkpoints(tmp_path, keep=1, keep_best=False)
    without.save(9, state, {}, {"loss": float("inf")})
    assert without.steps() == [9]
    found = without.restore_parameters(parameters)
    assert found.metrics == {"loss": None}
    with pytest.raises(RunError, match=r"has a held-out loss.* of steps 9"):
        without.restore_parameters(parameters, "best")


def test_parameters_alone(saved):
    folder, states = saved
    found = Checkpoints(folder).restore_parameters(abstract(states[3])["parameters"], "3")
    assert_same(found.state, states[3]["parameters"])
    assert (found.step, found.position["step"]) == (3, 3)
    with pytest.raises(RunError, match=r"no checkpoint of step 4; .* of steps 3, 5\."):
        Checkpoints(folder).restore_parameters(abstract(states[3])["parameters"], 4)
    with pytest.raises(RunError, match="no checkpoint yet"):
        Checkpoints(folder / "none").restore_parameters(abstract(states[3])["parameters"])


def test_other_files_in_the_folder_stay(tmp_path):
    (tmp_path / "notes").mkdir(parents=True)
    (tmp_path / "notes/a.txt").write_text("mine")
    (tmp_path / "7.unfinished").mkdir()
    state = make_state(1)
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=False)
    checkpoints.save(1, state, {})
    checkpoints.save(2, state, {})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["2", "notes"]


# --- interruptions ------------------------------------------------------------------------------


class Stopped(BaseException):
    """The process ends here."""


def stop_at(monkeypatch, moment: int) -> list[str]:
    """Lets only so many folders be renamed or removed; those that were."""
    done: list[str] = []

    def counted(name, function):
        def call(*arguments, **options):
            if len(done) == moment:
                raise Stopped
            done.append(name)
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(Path, "rename", counted("rename", Path.rename))
    monkeypatch.setattr(shutil, "rmtree", counted("rmtree", shutil.rmtree))
    return done


@pytest.mark.parametrize("again", [False, True])
def test_stopped_between_any_two_changes_on_disk(saved, tmp_path, again):
    """Saving step 7, or step 5 again, with one checkpoint to keep."""
    source, states = saved
    step = 5 if again else 7
    moment = 0
    while True:
        folder = tmp_path / str(moment)
        shutil.copytree(source, folder)
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, moment)
            try:
                Checkpoints(folder, keep=1, keep_best=False).save(step, states[3], {})
                break
            except Stopped:
                pass
        found = Checkpoints(folder).restore(abstract(states[5]))
        assert found is not None
        assert found.warnings == ()
        assert found.step in (5, step)
        whole = states[3] if found.position == {} else states[5]
        assert_same(found.state, whole)
        # And the next save finds its way.
        Checkpoints(folder, keep=1, keep_best=False).save(8, states[5], {})
        assert [entry.name for entry in folder.iterdir()] == ["8"]
        moment += 1
    assert moment >= 4


_KILLED = """
import os, signal, sys
import numpy as np
from student import checkpoints
state = {"parameters": {"w": np.full((4, 4), 1.0, np.float32)}, "optimizer": {}}
saver = checkpoints.Checkpoints(sys.argv[1])
saver.save(1, state, {"step": 1})
# In the middle of Orbax's work on the second one.
def killed(handler, directory):
    print(sorted(os.listdir(sys.argv[1])), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
checkpoints.ocp.PyTreeCheckpointHandler.finalize = killed
saver.save(2, state, {"step": 2})
"""


def test_killed_while_saving(tmp_path):
    killed = subprocess.run(
        [sys.executable, "-W", "error", "-c", _KILLED, str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # It was under way, and nothing was said on the screen.
    assert (killed.stdout, killed.stderr) == ("['1', '2.unfinished']\n", "")
    state = {"parameters": {"w": jnp.full((4, 4), 1.0, jnp.float32)}, "optimizer": {}}
    checkpoints = Checkpoints(tmp_path)
    found = checkpoints.restore(abstract(state))
    assert found is not None
    assert (found.step, found.position, found.warnings) == (1, {"step": 1}, ())
    assert_same(found.state, state)
    checkpoints.save(2, state, {})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["1", "2"]


def test_a_full_disk_is_said_and_loses_nothing(copy, monkeypatch):
    folder, states = copy
    kept = Checkpoints(folder)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "write_record", full)
    with pytest.raises(RunError, match=r"step 9 could not be saved.*No space left.*same command"):
        kept.save(9, states[5], {})
    assert sorted(path.name for path in folder.iterdir()) == ["3", "5"]
    assert_same(kept.restore(abstract(states[5])).state, states[5])


def test_nothing_is_left_on_the_screen_or_running(copy, capfd, caplog):
    folder, states = copy
    caplog.set_level(logging.DEBUG)
    before = set(threading.enumerate())
    checkpoints = Checkpoints(folder)
    (folder / "5/state/manifest.ocdbt").write_bytes(b"")
    checkpoints.restore(abstract(states[5]))
    checkpoints.save(6, states[5], {})
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert [entry for entry in caplog.records if entry.name == "absl"] == []
    running = [thread for thread in set(threading.enumerate()) - before if not thread.daemon]
    assert running == []


def test_names_that_would_fall_together_are_refused(tmp_path):
    one = jnp.ones(1)
    with pytest.raises(ValueError, match="two arrays of the optimizer are named a/b"):
        Checkpoints(tmp_path).save(
            1, {"parameters": {}, "optimizer": {"a": {"b": one}, "a/b": one}}, {}
        )
    assert list(tmp_path.iterdir()) == []
