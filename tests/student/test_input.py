"""The order of rows, restoring anywhere, hosts, and errors that end the iteration."""

import json
import shutil
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cache
from cache.errors import DamageError
from student import input as student_input
from student.batches import Batch, BatchSettings, read_batch
from student.errors import ObjectiveError, StudentError
from student.input import InputSettings, TrainingInput, held_out_batches
from tests.cache.builder import Built, same, shard_file
from tests.student.small import labels_of, make_student_cache, reading

# Rows 3 and 5 are held out or empty: places in the list are not row numbers.
_ROWS = np.array([0, 1, 2, 4, *range(6, 22)], np.int64)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, cache.Cache]:
    return make_student_cache(tmp_path_factory.mktemp("input"))


@pytest.fixture(scope="module")
def opened(made: tuple[Built, cache.Cache]) -> cache.Cache:
    return made[1]


def _settings(**changes: Any) -> InputSettings:
    defaults: dict[str, Any] = {"reading": reading(), "batch": 6, "epochs": 3, "seed": 0}
    return InputSettings(**{**defaults, **changes})


def _input(made: tuple[Built, cache.Cache], **changes: Any) -> TrainingInput:
    return TrainingInput(made[1], _ROWS, _settings(**changes))


def _order(source: TrainingInput) -> list[list[int]]:
    return [source.rows_of(step).tolist() for step in range(source.steps)]


def _take(source: TrainingInput, count: int) -> list[Batch]:
    return [next(source) for _ in range(count)]


def _same(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        same(one, other)
        for pair in zip(left, right, strict=True)
        for one, other in zip(*map(jax.tree.leaves, pair), strict=True)
    )


def _no_threads_left() -> bool:
    """Whether all reading threads end by themselves."""
    mine = [each for each in threading.enumerate() if each.name.startswith("grain-prefetch")]
    for thread in mine:
        thread.join(timeout=20)
    return not any(thread.is_alive() for thread in mine)


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 20),
    each=st.integers(1, 7),
    hosts=st.integers(1, 4),
    epochs=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
    block=st.integers(1, 21),
)
def test_all_hosts_together_see_each_row_once_an_epoch(
    opened: cache.Cache, rows: int, each: int, hosts: int, epochs: int, seed: int, block: int
) -> None:
    batch = each * hosts
    how = _settings(batch=batch, epochs=epochs, seed=seed, block=block)
    inputs = [TrainingInput(opened, _ROWS[:rows], how, h, hosts) for h in range(hosts)]
    steps = -(-epochs * rows // batch)
    assert {source.steps for source in inputs} == {steps}
    orders = [_order(source) for source in inputs]
    assert all(len(taken) == each for order in orders for taken in order)
    # Dealt out in turns, so the whole order is the hosts' in turns.
    whole = np.array(orders).transpose(1, 2, 0).ravel().tolist()
    real, padding = whole[: epochs * rows], whole[epochs * rows :]
    assert set(padding) <= {-1}
    for epoch in range(epochs):
        assert sorted(real[epoch * rows : (epoch + 1) * rows]) == _ROWS[:rows].tolist()
    alone = _order(TrainingInput(opened, _ROWS[:rows], how))
    assert [row for taken in alone for row in taken] == whole


def test_the_order_of_a_seed_never_changes(made) -> None:
    """Golden numbers: an upgrade of Grain that shuffles differently breaks resumed runs."""
    orders = [
        _order(TrainingInput(made[1], _ROWS[:7], _settings(batch=4, epochs=2, seed=seed)))
        for seed in (0, 1)
    ]
    assert orders == [
        [[1, 2, 6, 7], [4, 8, 0, 7], [8, 1, 6, 2], [0, 4, -1, -1]],
        [[8, 7, 2, 4], [0, 6, 1, 2], [8, 6, 4, 7], [0, 1, -1, -1]],
    ]


@pytest.mark.parametrize("block", [2, 3, 7, 20])
def test_rows_of_a_block_stay_together_in_their_order(made, block: int) -> None:
    orders = set()
    for seed in range(3):
        order = _order(_input(made, seed=seed, block=block))
        whole = [row for taken in order for row in taken][: 3 * 20]
        for epoch in range(3):
            rows = whole[epoch * 20 : epoch * 20 + 20]
            blocks = [_ROWS[start : start + block].tolist() for start in range(0, 20, block)]
            turns = []
            while rows:
                (found,) = [each for each in blocks if each == rows[: len(each)]]
                turns.append(blocks.index(found))
                rows = rows[len(found) :]
            assert sorted(turns) == list(range(len(blocks)))
            orders.add(tuple(turns))
    assert len(orders) > (1 if block < 20 else 0)


def test_the_order_of_blocks_never_changes(made) -> None:
    """Golden numbers, as above."""
    settings = _settings(batch=4, epochs=2, seed=1, block=3)
    assert _order(TrainingInput(made[1], _ROWS[:7], settings)) == [
        [4, 6, 7, 0],
        [1, 2, 8, 8],
        [4, 6, 7, 0],
        [1, 2, -1, -1],
    ]


def test_an_input_of_blocks_goes_on_where_it_stopped(made) -> None:
    whole = list(_input(made, block=4))
    source = _input(made, block=4)
    first = _take(source, 4)
    again = _input(made, block=4)
    again.restore(source.state())
    source.close()
    assert _same(first + list(again), whole)


def test_another_epoch_and_another_seed_is_another_order(made) -> None:
    orders = set()
    for seed in range(10):
        whole = [row for taken in _order(_input(made, seed=seed)) for row in taken]
        orders |= {tuple(whole[epoch * 20 : epoch * 20 + 20]) for epoch in range(3)}
    assert len(orders) == 30
    assert tuple(_ROWS.tolist()) not in orders


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_row_comes_with_its_own_targets(made, seed: int) -> None:
    built, _ = made
    source = _input(made, seed=seed)
    batches = list(source)
    assert len(batches) == source.steps == 10
    seen: Counter[int] = Counter()
    for step, batch in enumerate(batches):
        assert batch.rows.tolist() == source.rows_of(step).tolist()
        assert batch.targets is not None
        for place, row in enumerate(batch.rows.tolist()):
            seen[row] += 1
            assert same(batch.tokens[place], built.arrays["tokens"][row].astype(np.int32))
            assert same(batch.labels[place], labels_of(built)[row].astype(np.int32))
            assert same(batch.targets.ids[place], built.arrays["target_ids"][row])
    assert seen == dict.fromkeys(_ROWS.tolist(), 3)


def test_the_last_batch_is_padded(made) -> None:
    *_, last = _input(made, batch=8, epochs=1)
    assert last.rows.tolist()[4:] == [-1] * 4
    assert last.label_mask.any(axis=1).tolist() == [True] * 4 + [False] * 4


def test_a_host_of_padding_alone(made) -> None:
    """9 rows in batches of 8 on 4 hosts: three of the hosts have no row in the last step."""
    settings = _settings(batch=8, epochs=1)
    lasts = [list(TrainingInput(made[1], _ROWS[:9], settings, host, 4))[-1] for host in range(4)]
    assert [int(np.sum(last.rows >= 0)) for last in lasts] == [1, 0, 0, 0]
    assert {last.tokens.shape for last in lasts} == {(2, 8)}


@pytest.mark.parametrize("threads", [1, 4])
def test_restoring_at_every_step(made, threads: int) -> None:
    whole = list(_input(made, threads=threads, batch=7))
    assert len(whole) == 9
    running = _input(made, threads=threads, batch=7)
    for step in range(len(whole) + 1):
        state = json.loads(json.dumps(running.state()))
        fresh = _input(made, threads=threads, batch=7)
        fresh.restore(state)
        assert fresh.state() == state
        assert _same(list(fresh), whole[step:])
        # Again, on the same input, that is at its end now.
        fresh.restore(state)
        assert _same(list(fresh), whole[step:])
        if step < len(whole):
            assert _same([next(running)], whole[step : step + 1])
    with pytest.raises(StopIteration):
        next(running)


def test_two_resumes_one_after_the_other(made) -> None:
    """Steps of 7 of 20 rows: both stops are in the middle of an epoch's last batch."""
    whole = list(_input(made, batch=7))
    state, taken = _input(made, batch=7).state(), []
    for _ in range(3):
        source = _input(made, batch=7)
        source.restore(state)
        taken += _take(source, 3)
        state = source.state()
        source.close()
    assert _same(taken, whole)


def test_resuming_on_another_number_of_hosts(made) -> None:
    settings = _settings(batch=6)
    whole = _order(TrainingInput(made[1], _ROWS, settings))
    source = TrainingInput(made[1], _ROWS, settings)
    _take(source, 4)
    rest = []
    for host in range(3):
        resumed = TrainingInput(made[1], _ROWS, settings, host, 3)
        resumed.restore(source.state())
        rest.append([batch.rows.tolist() for batch in resumed])
    source.close()
    assert np.stack(rest, axis=-1).reshape(-1, 6).tolist() == whole[4:]


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        7,
        {"step": 11},
        {"step": -1},
        {"step": 2.0},
        {"step": True},
        {"step": "2"},
        {"next_index": 2},
        {"step": 2, "epoch": 0},
    ],
)
def test_a_state_that_does_not_fit_is_refused(made, state: Any) -> None:
    source = _input(made)
    _take(source, 2)
    with pytest.raises(StudentError, match=r"should be a step from 0 to 10, found .*another run"):
        source.restore(state)
    assert source.state() == {"step": 2}
    assert next(source).rows.tolist() == source.rows_of(2).tolist()
    source.close()


def test_reading_ahead_is_bounded(made, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _no_threads_left()
    started: Counter[bool] = Counter()

    def counted(opened: cache.Cache, settings: BatchSettings, indices: np.ndarray) -> Batch:
        started[settings.targets] += 1
        return read_batch(opened, settings, indices)

    monkeypatch.setattr(student_input, "read_batch", counted)
    batches = held_out_batches(made[1], _ROWS, reading(targets=False), 1)
    with _input(made, batch=1, epochs=5, ahead=3) as source:
        for taken in range(1, 6):
            next(source)
            assert taken <= started[True] <= taken + 3
            next(batches)
            assert taken <= started[False] <= taken + 1


@pytest.fixture
def damaged(made, tmp_path: Path) -> tuple[Built, cache.Cache]:
    """The file of one array of rows 12-15 is gone."""
    shutil.copytree(made[0].path, tmp_path / "cache")
    built = replace(made[0], path=tmp_path / "cache")
    shard_file(built, "target_logprobs", 3).rename(tmp_path / "away")
    return built, cache.open(built.path)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_read_error_ends_the_iteration(made, damaged, tmp_path: Path, threads: int) -> None:
    sound = list(_input(made, threads=threads, batch=2))
    source = _input(damaged, threads=threads, batch=2)
    gone = {12, 13, 14, 15}
    first = next(step for step, batch in enumerate(sound) if gone & set(batch.rows.tolist()))
    assert 0 < first < len(sound) - 10
    assert _same(_take(source, first), sound[:first])
    for _ in range(3):
        with pytest.raises(DamageError, match=r"shard 3, rows 12-15, .*array target_logprobs"):
            next(source)
        assert source.state() == {"step": first}
    assert _no_threads_left()
    source.restore({"step": first})
    with pytest.raises(DamageError):
        next(source)
    (tmp_path / "away").rename(shard_file(damaged[0], "target_logprobs", 3))
    repaired = _input((damaged[0], cache.open(damaged[0].path)), threads=threads, batch=2)
    repaired.restore(source.state())
    assert _same(list(repaired), sound[first:])


def test_labels_alone_need_no_targets(made, damaged) -> None:
    settings = reading(targets=False)
    sound = list(_input(made, reading=settings))
    assert _same(list(_input(damaged, reading=settings)), sound)
    assert all(batch.targets is None for batch in sound)


def test_an_interrupt_skips_nothing(made, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(_input(made))
    pending = [KeyboardInterrupt()]

    def interrupted(opened: cache.Cache, settings: Any, indices: np.ndarray) -> Batch:
        if pending and indices.tolist() == whole[4].rows.tolist():
            raise pending.pop()
        return read_batch(opened, settings, indices)

    monkeypatch.setattr(student_input, "read_batch", interrupted)
    source = _input(made)
    taken = _take(source, 4)
    with pytest.raises(KeyboardInterrupt):
        next(source)
    assert not pending
    assert source.state() == {"step": 4}
    assert _same(taken + list(source), whole)


def test_threads_end(made) -> None:
    with _input(made) as source:
        _take(source, 2)
    assert _no_threads_left()
    # Closed is not over: the next batch starts new ones.
    assert next(source).rows.tolist() == source.rows_of(2).tolist()
    list(source)
    assert _no_threads_left()
    batches = held_out_batches(made[1], _ROWS, reading(), 3)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert _no_threads_left()


_LEFT_OPEN = """
import sys
import numpy as np
import cache
from student.batches import BatchSettings
from student.input import InputSettings, TrainingInput, held_out_batches

opened = cache.open(sys.argv[1])
reading = BatchSettings(most_id=60)
source = TrainingInput(opened, np.arange(22), InputSettings(reading, 2, 50, 0))
evaluated = held_out_batches(opened, np.arange(22), reading, 2)
print(next(source).rows.tolist(), next(evaluated).rows.tolist())
"""


def test_a_process_ends_with_batches_read_ahead(made) -> None:
    command = [sys.executable, "-W", "error", "-c", _LEFT_OPEN, str(made[0].path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    source = TrainingInput(made[1], np.arange(22), _settings(batch=2, epochs=50))
    assert done.stdout == f"{source.rows_of(0).tolist()} [0, 1]\n"


@pytest.mark.parametrize("batch", [1, 3, 20, 64])
def test_held_out_rows_in_order(made, batch: int) -> None:
    batches = list(held_out_batches(made[1], _ROWS, reading(length=5), batch))
    rows = np.concatenate([each.rows for each in batches])
    assert rows[:20].tolist() == _ROWS.tolist()
    assert rows[20:].tolist() == [-1] * (-20 % batch)
    for each in batches:
        assert _same([each], [read_batch(made[1], reading(length=5), each.rows.astype(np.int64))])
        assert each.tokens.shape == (batch, 5)


def test_damage_ends_an_evaluation(damaged) -> None:
    batches = held_out_batches(damaged[1], _ROWS, reading(), 4)
    assert [next(batches).rows.tolist() for _ in range(2)] == [[0, 1, 2, 4], [6, 7, 8, 9]]
    with pytest.raises(DamageError, match="rows 12-15"):
        next(batches)
    assert list(batches) == []
    assert _no_threads_left()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch should be at least 1, found 0"),
        ({"epochs": 0}, "epochs should be at least 1, found 0"),
        ({"threads": 0}, "threads should be at least 1, found 0"),
        ({"ahead": 0}, "ahead should be at least 1, found 0"),
        ({"seed": 2**32}, "--seed should be between 0 and"),
        ({"seed": -1}, "--seed should be between 0 and"),
    ],
)
def test_settings_that_make_no_sense(changes: dict[str, int], message: str) -> None:
    with pytest.raises(StudentError, match=message):
        _settings(**changes)


def test_what_cannot_be_read(made) -> None:
    opened = made[1]
    for rows in ([3, 2], [2, 2], [0, 22], [-1, 0]):
        for make in (
            lambda rows: TrainingInput(opened, rows, _settings()),
            lambda rows: held_out_batches(opened, rows, reading(), 2),
        ):
            with pytest.raises(StudentError, match="ascending numbers from 0 to 21"):
                make(np.array(rows))
    with pytest.raises(StudentError, match="there are no rows"):
        TrainingInput(opened, _ROWS[:0], _settings())
    with pytest.raises(StudentError, match="a batch has at least 1 row, found 0"):
        held_out_batches(opened, _ROWS, reading(), 0)
    with pytest.raises(StudentError, match="--batch 6 cannot be shared equally by 4 hosts"):
        TrainingInput(opened, _ROWS, _settings(), 0, 4)
    with pytest.raises(StudentError, match="there is no host 2"):
        TrainingInput(opened, _ROWS, _settings(), 2, 2)
    with pytest.raises(ObjectiveError, match="--temperature 2"):
        TrainingInput(opened, _ROWS, _settings(reading=reading(temperature=2.0)))
    with pytest.raises(StudentError, match="--length 9"):
        held_out_batches(opened, _ROWS, reading(length=9), 2)
    with pytest.raises(StudentError, match="steps 0 to 9, not 10"):
        _input(made).rows_of(10)
