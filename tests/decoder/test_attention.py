"""Masking, head sharing and softmax of attention against loops in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from decoder.attention import attend, segment_mask


def loops(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, segments: np.ndarray
) -> np.ndarray:
    """One position and head at a time: softmax over what it sees."""
    length, heads, head_dim = queries.shape
    shared = heads // keys.shape[1]
    out = np.zeros((length, heads, head_dim))
    for t in range(length):
        seen = [s for s in range(t + 1) if segments[s] == segments[t]]
        for head in range(heads):
            scores = np.asarray(
                [queries[t, head] @ keys[s, head // shared] / np.sqrt(head_dim) for s in seen]
            )
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[t, head] = sum(
                weight * values[s, head // shared] for weight, s in zip(weights, seen, strict=True)
            )
    return out


def random_inputs(heads: int, kv_heads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(heads * 10 + kv_heads)
    return (
        random.normal(size=(12, heads, 8)),
        random.normal(size=(12, kv_heads, 8)),
        random.normal(size=(12, kv_heads, 8)),
    )


def run(inputs: tuple[np.ndarray, ...], segments: list[int], dtype=jnp.float32) -> np.ndarray:
    mask = segment_mask(jnp.asarray(segments, jnp.int32))
    return np.asarray(attend(*(jnp.asarray(one, dtype) for one in inputs), mask), np.float32)


SEGMENTS = [1, 1, 1, 1, 2, 2, 2, 3, 0, 0, 0, 0]


def test_mask() -> None:
    mask = np.asarray(segment_mask(jnp.asarray([1, 1, 2, 2, 0, 0], jnp.uint16)))
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
    np.testing.assert_array_equal(mask, np.asarray(expected, bool))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_against_loops(heads: int, kv_heads: int) -> None:
    inputs = random_inputs(heads, kv_heads)
    expected = loops(*inputs, np.asarray(SEGMENTS))
    np.testing.assert_allclose(run(inputs, SEGMENTS), expected, atol=2e-6)


def test_head_mapping_matters() -> None:
    """Interleaved sharing (head h reads key head h mod n) is far off."""
    queries, keys, values = random_inputs(6, 2)
    interleaved = np.argsort([0, 2, 4, 1, 3, 5])
    wrong = run((queries[:, np.argsort(interleaved)], keys, values), SEGMENTS)[:, interleaved]
    expected = loops(queries, keys, values, np.asarray(SEGMENTS))
    assert np.abs(wrong - expected).max() > 0.1


def test_large_scores_do_not_overflow() -> None:
    queries, keys, values = random_inputs(2, 2)
    inputs = (queries * 1e3, keys * 1e3, values)
    np.testing.assert_allclose(
        run(inputs, SEGMENTS), loops(*inputs, np.asarray(SEGMENTS)), atol=2e-6
    )


def test_bfloat16_has_a_float32_softmax() -> None:
    """Only the rounding of inputs, weights and outputs remains: far below a bfloat16 softmax."""
    inputs = tuple(
        np.asarray(jnp.asarray(one, jnp.bfloat16), np.float64) for one in random_inputs(4, 2)
    )
    got = run(inputs, SEGMENTS, jnp.bfloat16)
    np.testing.assert_allclose(got, loops(*inputs, np.asarray(SEGMENTS)), atol=2e-2)
