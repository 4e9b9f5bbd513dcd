"""Splits against a search through shared documents; what a seed decides; what is refused."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cache
from cache.errors import DamageError
from cache.format import NO_DOCUMENT
from cache.groups import DocumentGroups
from student.errors import StudentError
from student.split import Split, choose, split_rows
from tests.cache.builder import Built, make_cache, same, shard_file
from tests.student.small import make_student_cache

_LENGTH, _DOCUMENTS = 4, 12

# Per row: documents in any order, with gaps, and which positions have labels.
_PLACES = st.lists(
    st.tuples(st.integers(-1, _DOCUMENTS - 1), st.booleans()), min_size=_LENGTH, max_size=_LENGTH
)
_TABLES = st.lists(_PLACES, min_size=1, max_size=14)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, cache.Cache]:
    return make_student_cache(tmp_path_factory.mktemp("split"))


def _arrays(table: list[list[tuple[int, bool]]]) -> tuple[np.ndarray, np.ndarray]:
    documents = np.array([[document for document, _ in row] for row in table])
    labels = np.array([[document >= 0 and label for document, label in row] for row in table])
    return np.where(documents < 0, NO_DOCUMENT, documents).astype(np.uint32), labels.astype("uint8")


def _grouped(documents: np.ndarray, labels: np.ndarray, size: int = 100) -> DocumentGroups:
    groups = DocumentGroups(len(documents), _DOCUMENTS)
    for start in range(0, len(documents), size):
        groups.add(start, documents[start : start + size], labels[start : start + size])
    return groups


def _reachable(documents: np.ndarray, row: int) -> set[int]:
    """Rows that hang together with one, by search."""
    holds = [set(each.tolist()) - {NO_DOCUMENT} for each in documents]
    found, todo = {row}, [row]
    while todo:
        here = todo.pop()
        near = {other for other, held in enumerate(holds) if held & holds[here]} - found
        found |= near
        todo += near
    return found


@settings(deadline=None)
@given(_TABLES, st.integers(1, 5))
def test_groups_are_what_a_search_finds(table, size: int) -> None:
    documents, labels = _arrays(table)
    collected = _grouped(documents, labels, size)
    groups = collected.of_rows()
    for row, group in enumerate(groups.tolist()):
        if (documents[row] == NO_DOCUMENT).all():
            assert group == -1
        else:
            assert set(np.flatnonzero(groups == group).tolist()) == _reachable(documents, row)
    assert collected.labels.tolist() == labels.sum(axis=1).tolist()
    assert same(groups, _grouped(documents, labels).of_rows())


@settings(deadline=None)
@given(_TABLES, st.integers(1, 5), st.sampled_from([0, 0.01, 0.3, 0.5, 1, 3]), st.integers(0, 9))
def test_a_document_is_on_one_side(table, size: int, held_out: int | float, seed: int) -> None:
    documents, labels = _arrays(table)
    collected = _grouped(documents, labels, size)
    try:
        split = choose(collected.of_rows(), collected.labels, held_out, seed)
    except StudentError:
        assert held_out > 0 or not labels.any()
        return
    sides = [set(documents[rows].ravel().tolist()) for rows in (split.training, split.held_out)]
    assert sides[0] & sides[1] <= {NO_DOCUMENT}
    both = np.concatenate([split.training, split.held_out])
    assert sorted(both.tolist()) == np.flatnonzero(labels.any(axis=1)).tolist()
    assert split.rows_without_labels == len(table) - len(both)
    assert split.training_labels == labels[split.training].sum()
    assert split.held_out_labels == labels[split.held_out].sum()
    assert (len(split.held_out) > 0) == (held_out > 0)
    if held_out:
        wanted = held_out if held_out >= 1 else round(held_out * len(both))
        assert len(split.held_out) <= max(1, wanted)
    whole = _grouped(documents, labels)
    assert _equal(split, choose(whole.of_rows(), whole.labels, held_out, seed))


def _equal(left: Split, right: Split) -> bool:
    numbers = [
        (each.training_labels, each.held_out_labels, each.groups, each.rows_without_labels)
        for each in (left, right)
    ]
    arrays = (left.training, right.training), (left.held_out, right.held_out)
    return numbers[0] == numbers[1] and all(same(*pair) for pair in arrays)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=12), st.integers(1, 30), st.integers(0, 50))
def test_groups_are_taken_while_they_fit(sizes: list[int], wanted: int, seed: int) -> None:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    wanted = min(wanted, len(groups) - 1)
    labels = np.ones(len(groups), np.uint32)
    if min(sizes) > wanted:
        with pytest.raises(StudentError, match=f"The smallest such group has {min(sizes)} rows"):
            choose(groups, labels, wanted, seed)
        return
    split = choose(groups, labels, wanted, seed)
    taken = set(groups[split.held_out].tolist())
    keys = np.random.PCG64(seed).random_raw(len(sizes)).tolist()
    expected, room = set(), wanted
    for _, group in sorted(zip(keys, range(len(sizes)), strict=True)):
        if sizes[group] <= room:
            expected.add(group)
            room -= sizes[group]
    assert taken == expected
    assert len(split.held_out) == wanted - room
    assert split.groups == len(sizes)


def test_the_split_of_a_seed_never_changes() -> None:
    """Golden numbers: runs go on after an upgrade of numpy, with the same rows held out."""
    groups, labels = np.arange(20), np.ones(20, np.uint32)
    held_out = [choose(groups, labels, 5, seed).held_out.tolist() for seed in (0, 1, 2)]
    assert held_out == [[2, 3, 11, 13, 15], [2, 9, 16, 18, 19], [3, 6, 7, 11, 19]]
    assert same(choose(groups, labels, 0.25, 1).held_out, np.array(held_out[1]))


def test_a_share_is_of_the_rows_with_labels() -> None:
    labels = np.ones(100, np.uint32)
    labels[:50] = 0
    for share, rows in [(0.1, 5), (0.29, 14), (0.5, 25), (0.001, 1), (0.98, 49), (0, 0)]:
        split = choose(np.arange(100), labels, share, 0)
        assert len(split.held_out) == rows
        assert len(split.training) == 50 - rows
        assert split.held_out.min(initial=50) >= 50


def test_a_chain_through_every_row_is_one_group() -> None:
    """Each row shares a document with the next; added from the last to the first, one by one."""
    rows = 500
    documents = np.stack([np.arange(rows), np.arange(rows) + 1], axis=1).astype(np.uint32)
    labels = np.ones((rows, 2), np.uint8)
    groups = DocumentGroups(rows, rows + 1)
    for row in reversed(range(rows)):
        groups.add(row, documents[row : row + 1], labels[row : row + 1])
    assert set(groups.of_rows().tolist()) == {0}


def test_a_cache(made) -> None:
    built, opened = made
    labels = (built.arrays["label_mask"] == 1).sum(axis=1)
    documents = built.arrays["documents"]
    assert set(documents[1]) & set(documents[2])
    together = 0
    for seed in range(20):
        read: list[int] = []
        split = split_rows(opened, 0.4, seed, read.append, slice_rows=5)
        assert read == [5, 10, 15, 20, 22]
        assert _equal(split, split_rows(opened, 0.4, seed))
        out = set(split.held_out.tolist())
        assert ({1, 2} <= out) or not ({1, 2} & out)
        together += {1, 2} <= out
        both = np.concatenate([split.training, split.held_out])
        assert sorted(both.tolist()) == [row for row in range(22) if row != 5]
        assert (split.training.dtype, split.held_out.dtype) == (np.int64, np.int64)
        assert (np.diff(split.training) > 0).all()
        assert (np.diff(split.held_out) > 0).all()
        assert split.training_labels == labels[split.training].sum()
        assert split.held_out_labels == labels[split.held_out].sum()
        assert (split.groups, split.rows_without_labels) == (20, 1)
    assert 0 < together < 20


def test_another_seed_is_another_split(made) -> None:
    _, opened = made
    splits = {tuple(split_rows(opened, 5, seed).held_out.tolist()) for seed in range(10)}
    assert len(splits) == 10


@pytest.mark.parametrize(
    ("held_out", "message"),
    [
        (22, "--held-out 22 is more than the 21 rows with labels in the cache. Ask for fewer"),
        (21, "takes all 21 rows with labels, and nothing is left to train on"),
        (0.99, "takes all 21 rows with labels, and nothing is left to train on"),
        (-0.1, "a share below 1, or a whole number of rows, found -0.1"),
        (1.5, "a share below 1, or a whole number of rows, found 1.5"),
        (float("nan"), "found nan"),
        (float("inf"), "found inf"),
    ],
)
def test_what_cannot_be_held_out(made, held_out: int | float, message: str) -> None:
    _, opened = made
    with pytest.raises(StudentError, match=message):
        split_rows(opened, held_out, 0)


def test_no_group_fits() -> None:
    groups = np.array([0, 0, 0, 1, 1])
    with pytest.raises(StudentError, match=r"asks for 1 of 5 rows .* Ask for at least 2 rows, or"):
        choose(groups, np.ones(5, np.uint32), 0.1, 0)
    assert choose(groups, np.ones(5, np.uint32), 2, 0).held_out.tolist() == [3, 4]
    one = np.zeros(5, np.int64)
    with pytest.raises(StudentError, match="All of them are one such group"):
        choose(one, np.ones(5, np.uint32), 2, 0)
    assert len(choose(one, np.ones(5, np.uint32), 0, 0).training) == 5


def test_no_labels() -> None:
    with pytest.raises(StudentError, match="no row of the cache has a label"):
        choose(np.arange(3), np.zeros(3, np.uint32), 0, 0)


def test_pairs_are_refused(tmp_path: Path) -> None:
    pairs = make_cache(tmp_path / "pairs", rows=4, rows_per_example=2)
    with pytest.raises(StudentError, match="preference pairs"):
        split_rows(cache.open(pairs.path), 0, 0)


def test_damage_ends_it(tmp_path: Path) -> None:
    built, opened = make_student_cache(tmp_path)
    shard_file(built, "documents", 2).unlink()
    with pytest.raises(DamageError, match=r"shard 2, rows 8-11"):
        split_rows(opened, 0.2, 0)
