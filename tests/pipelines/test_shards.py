"""Micro-batches of one shape, their order on the device, and a teacher that gives no numbers."""

from collections import namedtuple

import numpy as np
import pytest

from cache.encoding import padding_rows
from cache.format import NO_DOCUMENT
from pipelines.errors import TeacherError
from pipelines.shards import micro_batches, score_rows

Fake = namedtuple("Fake", ["ids", "finite"])


def rows(count: int, length: int = 3) -> dict[str, np.ndarray]:
    tokens = np.arange(count * length, dtype=np.uint32).reshape(count, length)
    return {
        "tokens": tokens,
        "segments": np.ones((count, length), np.uint16),
        "documents": np.arange(count, dtype=np.uint32)[:, None] + np.zeros((1, length), np.uint32),
        "label_mask": np.tile(np.array([1] * (length - 1) + [0], np.uint8), (count, 1)),
    }


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8])
def test_micro_batches_have_one_shape_and_all_rows_in_order(count):
    batches = list(micro_batches(rows(count), 10, 4))
    assert len(batches) == -(-count // 4)
    for batch in batches:
        assert [(x.shape, x.dtype) for x in batch] == [
            ((4, 3), np.int32), ((4, 3), np.int32), ((4,), np.int32)
        ]  # fmt: skip
    tokens, segments, numbers = (np.concatenate(x) for x in zip(*batches, strict=True))
    np.testing.assert_array_equal(tokens[:count], rows(count)["tokens"])
    np.testing.assert_array_equal(segments[:count], 1)
    assert not segments[count:].any()
    assert not tokens[count:].any()
    assert numbers.tolist() == list(range(10, 10 + len(tokens)))


def test_padding_to_a_micro_batch_is_the_caches_padding():
    (batch,) = micro_batches(rows(1), 0, 2)
    np.testing.assert_array_equal(batch[0][1:], padding_rows(1, 3)["tokens"])
    np.testing.assert_array_equal(batch[1][1:], padding_rows(1, 3)["segments"])


class Device:
    """Gives each row's own tokens as its targets, and notes when results are asked for."""

    def __init__(self):
        self.events: list[str] = []

    def score(self, tokens, segments, numbers):
        number = len([event for event in self.events if event.startswith("dispatch")])
        self.events.append(f"dispatch {number}")
        device = self

        class Waiting:
            def __array__(self, dtype=None, copy=None):
                device.events.append(f"fetch {number}")
                return tokens.astype(np.int32)

        return Fake(Waiting(), np.ones(tokens.shape, bool))


def test_a_batch_is_dispatched_before_the_one_before_it_is_fetched():
    device = Device()
    targets = score_rows(device.score, rows(6), 0, 2)
    assert device.events == [
        "dispatch 0", "dispatch 1", "fetch 0", "dispatch 2", "fetch 1", "fetch 2"
    ]  # fmt: skip
    np.testing.assert_array_equal(targets["ids"], rows(6)["tokens"])
    assert set(targets) == {"ids"}


def test_padding_rows_are_cut_off_the_targets():
    targets = score_rows(Device().score, rows(5), 0, 4)
    np.testing.assert_array_equal(targets["ids"], rows(5)["tokens"])


def score_with(finite: np.ndarray):
    def score(tokens, segments, numbers):
        whole = np.ones((len(tokens), tokens.shape[1]), bool)
        inside = [place for place, number in enumerate(numbers) if number - 7 < len(finite)]
        whole[inside] = finite[[numbers[place] - 7 for place in inside]]
        return Fake(tokens, whole)

    return score


def test_a_row_that_is_not_numbers_is_named_with_position_and_document():
    finite = np.ones((5, 3), bool)
    finite[3, 1] = finite[4, 0] = False
    with pytest.raises(
        TeacherError, match=r"not numbers at 2 positions, first at row 10, position 1 \(document 3"
    ):
        score_rows(score_with(finite), rows(5), 7, 2)


def test_positions_without_a_label_need_no_numbers():
    finite = np.ones((5, 3), bool)
    finite[:, 2] = False  # the last position of each row has no label
    score_rows(score_with(finite), rows(5), 7, 2)


def test_a_label_of_no_document_is_said_to_be_so():
    strange = rows(1)
    strange["documents"][:] = NO_DOCUMENT
    with pytest.raises(TeacherError, match="no document"):
        score_rows(score_with(np.zeros((1, 3), bool)), strange, 7, 2)
