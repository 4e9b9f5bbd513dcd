"""Damage to a checkpoint is found, wherever it is, and the checkpoint before is used."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from student.checkpoints import Checkpoints
from student.errors import RunError
from tests.student.states import abstract, assert_same, make_state, save_two


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


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


def assert_previous(folder: Path, states, reason: str) -> None:
    checkpoints = Checkpoints(folder)
    found = checkpoints.restore(abstract(states[5]))
    assert found is not None
    assert found.step == 3
    assert_same(found.state, states[3])
    (warning,) = found.warnings
    assert warning.startswith("the checkpoint of step 5 is damaged (")
    assert warning.endswith(") and left out; that of step 3 is used")
    assert reason in warning
    # It hinders nobody from saving that step again.
    checkpoints.save(5, states[5], {"again": True})
    again = Checkpoints(folder).restore(abstract(states[5]))
    assert again is not None
    assert (again.step, again.position, again.warnings) == (5, {"again": True}, ())
    assert_same(again.state, states[5])


@pytest.mark.parametrize("name", ["checkpoint.json", "state/commit_success.txt", "state/_METADATA"])
def test_a_missing_file(copy, name):
    folder, states = copy
    (folder / "5" / name).unlink()
    assert_previous(folder, states, f"{name} is missing")


def test_an_empty_folder_of_a_step(copy):
    folder, states = copy
    shutil.rmtree(folder / "5")
    (folder / "5").mkdir()
    assert_previous(folder, states, "checkpoint.json is missing")


def test_every_byte_matters(copy):
    """Each file in turn loses its last byte, and has single bits flipped from start to end."""
    folder, states = copy
    checkpoints = Checkpoints(folder)
    files = sorted(file for file in (folder / "5").rglob("*") if file.is_file())
    assert len(files) > 8
    for file in files:
        whole = file.read_bytes()
        places = np.linspace(0, len(whole) - 1, 4, dtype=int)
        flipped = [whole[:i] + bytes([whole[i] ^ 0x10]) + whole[i + 1 :] for i in places]
        for damaged in (whole[:-1], b"", *flipped):
            file.write_bytes(damaged)
            found = checkpoints.restore(abstract(states[5]))
            assert found is not None
            assert (found.step, len(found.warnings)) == (3, 1)
        assert_same(found.state, states[3])
        file.write_bytes(whole)
    found = checkpoints.restore(abstract(states[5]))
    assert found is not None
    assert (found.step, found.warnings) == (5, ())


def test_what_was_read_is_compared_with_what_was_saved(copy, monkeypatch):
    """Sound files, and yet other arrays: a fault of what reads them."""
    folder, states = copy
    restore = ocp.Checkpointer.restore

    def faulty(self, path, *arguments, **options):
        found = restore(self, path, *arguments, **options)
        if path.parent.name == "5":
            found["optimizer"]["1/0/count"] = found["optimizer"]["1/0/count"].copy()
            found["optimizer"]["1/0/count"][...] += 1
        return found

    monkeypatch.setattr(ocp.Checkpointer, "restore", faulty)
    found = Checkpoints(folder).restore(abstract(states[5]))
    assert found is not None
    assert found.step == 3
    assert "the bytes of optimizer/1/0/count are not those that were saved" in found.warnings[0]


def test_a_checkpoint_of_another_step_is_not_taken(copy):
    folder, states = copy
    shutil.copytree(folder / "3", folder / "9")
    found = Checkpoints(folder).restore(abstract(states[5]))
    assert found is not None
    assert (found.step, len(found.warnings)) == (5, 1)
    assert "step 9 is damaged (it is of step 3)" in found.warnings[0]


def test_another_state_is_named(saved):
    folder, states = saved
    wider = abstract(states[5])
    wider["parameters"]["layers.0.weight"] = jax.ShapeDtypeStruct((5, 4), jnp.float32)
    with pytest.raises(RunError) as error:
        Checkpoints(folder).restore(wider)
    lines = str(error.value).splitlines()
    expected = "the shape of parameters/layers.0.weight is [5, 3], expected [5, 4]"
    assert lines[1:3] == [f"  step 5: {expected}", f"  step 3: {expected}"]
    for change, reason in (
        ({"extra": jax.ShapeDtypeStruct((1,), jnp.float32)}, "it does not hold parameters/extra"),
        (
            {"table": jax.ShapeDtypeStruct((2, 2), jnp.float32)},
            "dtype of parameters/table is int32",
        ),
    ):
        other = {**abstract(states[5])["parameters"], **change}
        with pytest.raises(RunError, match=reason):
            Checkpoints(folder).restore_parameters(other)
    fewer = abstract(states[5])["parameters"]
    del fewer["table"]
    with pytest.raises(RunError, match="holds parameters/table, which this student has not"):
        Checkpoints(folder).restore_parameters(fewer)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite(tmp_path, value):
    good, bad = make_state(1), make_state(2)
    weight = bad["parameters"]["layers.0.weight"]
    bad["parameters"]["layers.0.weight"] = weight.at[1, 1].set(value)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, good, {})
    checkpoints.save(2, bad, {})
    found = checkpoints.restore(abstract(good))
    assert found is not None
    assert found.step == 1
    assert "parameters/layers.0.weight holds numbers that are not finite" in found.warnings[0]
    with pytest.raises(RunError, match=r"step 2 .* not finite.*steps 1, 2"):
        checkpoints.restore_parameters(abstract(good)["parameters"], 2)


def test_no_sound_checkpoint_is_never_a_fresh_start(copy):
    folder, states = copy
    for step in (3, 5):
        (folder / str(step) / "checkpoint.json").unlink()
    before = snapshot(folder)
    with pytest.raises(RunError, match=r"none of the checkpoints .* can be used:\n  step 5: .*\n"):
        Checkpoints(folder).restore(abstract(states[5]))
    assert snapshot(folder) == before


def test_damaged_ones_do_not_push_out_sound_ones(copy):
    folder, states = copy
    checkpoints = Checkpoints(folder, keep=1, keep_best=False)
    checkpoints.save(7, states[5], {})
    (folder / "7/state/_METADATA").unlink()
    shutil.copytree(folder / "7", folder / "6")
    checkpoints.save(5, states[5], {})
    # Nobody has been told of them yet.
    assert checkpoints.steps() == [5, 6, 7]
    checkpoints = Checkpoints(folder, keep=1, keep_best=False)
    found = checkpoints.restore(abstract(states[5]))
    assert found is not None
    assert (found.step, len(found.warnings)) == (5, 2)
    checkpoints.save(6, states[5], {})
    assert checkpoints.steps() == [6]
