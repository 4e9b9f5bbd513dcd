"""Groups of rows through documents, and choosing among groups (more in student/test_split.py)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import CacheError
from cache.format import NO_DOCUMENT
from cache.groups import DocumentGroups, fill_up, seeded_order


def test_rows_hang_together_through_documents() -> None:
    documents = np.array([[0, 1], [2, 2], [1, 3], [NO_DOCUMENT] * 2, [3, 3]], np.uint32)
    groups = DocumentGroups(5, 4)
    for row in reversed(range(5)):
        groups.add(row, documents[row : row + 1], np.array([[1, 0]], np.uint8) * (row != 3))
    found = groups.of_rows().tolist()
    assert found[0] == found[2] == found[4] != found[1]
    assert found[3] == -1
    assert groups.labels.tolist() == [1, 1, 1, 0, 1]


def test_documents_that_are_not_the_manifests() -> None:
    documents = np.array([[0, 1], [2, 3]], np.uint32)
    labels = np.array([[1, 0], [1, 0]], np.uint8)
    groups = DocumentGroups(7, 3)
    with pytest.raises(CacheError, match="row 6, position 1 has a document beyond the 3 doc"):
        groups.add(5, documents, labels)
    documents[1] = NO_DOCUMENT
    with pytest.raises(CacheError, match="row 6, position 0 has a label, but is of none of the"):
        groups.add(5, documents, labels)


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(0, 60), st.integers(0, 9))
def test_filling_up_takes_each_that_fits(sizes: list[int], room: int, seed: int) -> None:
    order = seeded_order(len(sizes), seed)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    left, expected = room, []
    for group in order.tolist():
        if sizes[group] <= left:
            left -= sizes[group]
            expected.append(group)
    taken = fill_up(order, np.array(sizes, np.int64), room)
    assert np.flatnonzero(taken).tolist() == sorted(expected)


def test_an_order_is_the_seeds() -> None:
    assert seeded_order(6, 0).tolist() == [3, 2, 1, 0, 4, 5]
    assert seeded_order(6, 1).tolist() != seeded_order(6, 0).tolist()
