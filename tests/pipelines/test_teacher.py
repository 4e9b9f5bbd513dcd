"""The teacher of a worker: the right one, one shape, and no probability for what is no token."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import decoder
from pipelines.begin import begin
from pipelines.errors import TeacherError
from pipelines.plan import Plan
from pipelines.teacher import Teacher, loads
from tests.models import write_tiny_teacher
from tests.pipelines import small


def plan(folder: Path, **changes: Any) -> Plan:
    started = begin(small.options(folder, **changes))
    assert isinstance(started, Plan)
    return started


def score(teacher: Teacher, rows: np.ndarray) -> dict[str, np.ndarray]:
    padded = np.zeros((teacher.batch, rows.shape[1]), np.int32)
    padded[: len(rows)] = rows
    segments = np.zeros_like(padded)
    segments[: len(rows)] = 1
    targets = teacher.score(padded, segments, np.arange(teacher.batch, dtype=np.int32))
    return {name: np.asarray(x)[: len(rows)] for name, x in targets._asdict().items()}


def test_a_teacher_that_is_not_the_manifests_is_refused(tmp_path):
    made = plan(tmp_path)
    before = loads()
    write_tiny_teacher(tmp_path / "teacher", seed=1)
    with pytest.raises(TeacherError, match="is not the one the cache was begun with"):
        Teacher(made)
    assert loads() == before + 1


def test_a_micro_batch_has_its_rows_on_every_device(tmp_path):
    made = plan(tmp_path, micro_batch=3)
    assert Teacher(made).batch == 3 * jax.local_device_count()


def test_ids_that_no_token_has_get_no_probability(tmp_path):
    made = plan(tmp_path, tail="none", k=300, length=8)
    rows = np.random.default_rng(0).integers(3, 300, (2, 8)).astype(np.int32)
    whole = score(Teacher(made), rows)
    likely = np.bincount(whole["ids"][:, :, 0].ravel(), minlength=300).argmax()
    holes = (int(likely), 299)
    cut = score(Teacher(replace(made, holes=holes)), rows)
    assert not np.isin(cut["ids"], holes).any()
    assert (cut["exact_counts"] == 298).all()
    # The others share what was the holes', in the same proportions.
    for row, position in [(0, 0), (1, 7), (0, 3)]:
        before = dict(
            zip(whole["ids"][row, position], whole["logprobs"][row, position], strict=True)
        )
        after = dict(
            zip(cut["ids"][row, position, :298], cut["logprobs"][row, position, :298], strict=True)
        )
        lost = np.log1p(-sum(np.exp(np.float64(before[hole])) for hole in holes))
        for token, logprob in after.items():
            assert logprob == pytest.approx(before[token] - lost, abs=1e-5)


def test_a_teacher_spread_over_devices_scores_as_one_on_each(tmp_path):
    settings = {"tail": "none", "k": 20, "micro_batch": 2}
    rows = np.random.default_rng(1).integers(3, 300, (2, 16)).astype(np.int32)
    whole = score(Teacher(plan(tmp_path, **settings)), rows)
    spread = Teacher(plan(tmp_path, out="other", shard_teacher=True, **settings))
    assert spread.batch == 2
    held = [
        {shard.data.size for shard in leaf.addressable_shards}
        for leaf in jax.tree.leaves(spread._parameters)
    ]
    sizes = [leaf.size for leaf in jax.tree.leaves(spread._parameters)]
    # Each device holds an eighth of what is big.
    assert max(max(parts) for parts in held) <= max(sizes) / jax.local_device_count()
    parts = score(spread, rows)
    np.testing.assert_array_equal(parts["ids"], whole["ids"])
    np.testing.assert_allclose(parts["logprobs"], whole["logprobs"], atol=1e-5)
    np.testing.assert_allclose(parts["tail_logprobs"], whole["tail_logprobs"], atol=1e-5)


def test_a_spread_teacher_is_never_whole_anywhere(tmp_path, monkeypatch):
    """Each tensor is cut as it is read: what is put on devices is one tensor, in parts."""
    settings = {"tail": "none", "k": 20, "micro_batch": 2, "shard_teacher": True}
    made = plan(tmp_path, **settings)
    loaded = []
    real = decoder.load_model

    def load(*given: Any, **named: Any) -> Any:
        loaded.append(real(*given, **named))
        return loaded[-1]

    monkeypatch.setattr(decoder, "load_model", load)
    teacher = Teacher(made)
    devices = jax.local_device_count()
    for leaf in jax.tree.leaves(nnx.state(loaded[0].model)):
        if any(size % devices == 0 for size in leaf.shape):
            assert {part.data.size for part in leaf.addressable_shards} == {leaf.size // devices}
    for before, after in zip(
        jax.tree.leaves(nnx.state(loaded[0].model)),
        jax.tree.leaves(teacher._parameters),
        strict=True,
    ):
        assert before.sharding == after.sharding
