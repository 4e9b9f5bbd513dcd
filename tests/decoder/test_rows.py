"""Places of tokens in their documents, against counting them one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoder.rows import positions_from_segments


def counted(segments: list[int]) -> list[int]:
    found: list[int] = []
    for place, segment in enumerate(segments):
        same = place > 0 and segments[place - 1] == segment
        found.append(found[-1] + 1 if same else 0)
    return found


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ([1, 1, 1, 2, 2, 3, 0, 0], [0, 1, 2, 0, 1, 0, 0, 1]),
        ([4, 4, 4], [0, 1, 2]),
        ([7], [0]),
        ([0, 0], [0, 1]),
    ],
)
def test_each_document_begins_at_0(segments, expected):
    assert counted(segments) == expected
    found = positions_from_segments(jnp.asarray(segments, jnp.int32))
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, expected)


def test_many_rows_at_once():
    random = np.random.default_rng(0)
    rows = np.cumsum(random.random((40, 31)) < 0.3, axis=1, dtype=np.int32)
    rows[:, 25:] = 0
    assert len({tuple(row) for row in rows.tolist()}) == 40
    found = jax.jit(jax.vmap(positions_from_segments))(jnp.asarray(rows))
    np.testing.assert_array_equal(found, [counted(row) for row in rows.tolist()])
