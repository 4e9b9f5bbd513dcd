"""Rounding against exact arithmetic, canonical bytes, and weights against the softmax."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.encoding import (
    encode_logprobs,
    encode_shard,
    padding_rows,
    round_mantissa,
    to_float16,
    weights,
)
from cache.errors import CacheError
from cache.format import NO_DOCUMENT, Encoding
from tests.cache.builder import (
    Built,
    log_softmax,
    make_encoding,
    make_rows,
    make_targets,
    position_targets,
    same,
)

# Normal float32 numbers that no rounding takes out of range.
_NORMAL = st.floats(2.0**-100, 2.0**100, width=32) | st.floats(-(2.0**100), -(2.0**-100), width=32)
_LOGPROB = st.floats(-32000.0, -(2.0**-14), width=32)
_BITS = st.integers(1, 10)


def _rounded(value: float, bits: int) -> float:
    return float(round_mantissa(np.array([value], np.float32), bits)[0])


def _exactly_rounded(value: float, bits: int) -> Fraction:
    """The nearest number with `bits` mantissa bits, ties to even, in rational arithmetic."""
    exact = Fraction(value)
    exponent = 0
    while abs(exact) / Fraction(2) ** exponent >= 2:
        exponent += 1
    while abs(exact) / Fraction(2) ** exponent < 1:
        exponent -= 1
    unit = Fraction(2) ** (exponent - bits)
    # Python rounds fractions half to even.
    return round(exact / unit) * unit


@given(_NORMAL, _BITS)
def test_rounding_is_to_nearest_even(value: float, bits: int) -> None:
    assert Fraction(_rounded(value, bits)) == _exactly_rounded(value, bits)


@given(st.integers(0, 2**10 - 1), _BITS, st.integers(-20, 20), st.sampled_from([-1, 1]))
def test_ties_go_to_even(mantissa: int, bits: int, exponent: int, sign: int) -> None:
    """Numbers exactly between two representable ones."""
    steps = mantissa % 2**bits
    value = sign * (1 + (Fraction(steps) + Fraction(1, 2)) / 2**bits) * Fraction(2) ** exponent
    assert Fraction(float(value)) == value
    even = steps + steps % 2
    expected = sign * (1 + Fraction(even, 2**bits)) * Fraction(2) ** exponent
    assert Fraction(_rounded(float(value), bits)) == expected


@given(_NORMAL, _NORMAL, _BITS)
def test_rounding_keeps_order(one: float, other: float, bits: int) -> None:
    low, high = sorted((one, other))
    assert _rounded(low, bits) <= _rounded(high, bits)


@given(_NORMAL, _BITS)
def test_rounding_is_within_half_a_unit_and_idempotent(value: float, bits: int) -> None:
    once = _rounded(value, bits)
    assert abs(Fraction(once) - Fraction(value)) <= abs(Fraction(value)) / 2 ** (bits + 1)
    assert _rounded(once, bits) == once
    assert _rounded(-value, bits) == -once


@given(_LOGPROB, _BITS)
def test_a_rounded_logprob_is_a_float16(value: float, bits: int) -> None:
    """Rounding to float16 after rounding the mantissa changes nothing more."""
    encoding = make_encoding(mantissa_bits=bits)
    stored = encode_logprobs(np.array([value], np.float32), encoding)
    assert stored.dtype == np.float16
    assert Fraction(float(stored[0])) == _exactly_rounded(value, bits)
    assert abs(float(stored[0]) - value) <= encoding.relative_error * abs(value)


@given(_LOGPROB)
def test_float16_and_float32_logprobs(value: float) -> None:
    array = np.array([value], np.float32)
    half = encode_logprobs(array, make_encoding(logprobs="float16"))
    assert Fraction(float(half[0])) == _exactly_rounded(value, 10)
    assert same(encode_logprobs(array, make_encoding(logprobs="float32")), array)


@pytest.mark.parametrize("bits", range(1, 11))
def test_no_numbers_stay(bits: int) -> None:
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, -np.nan], np.float32)
    found = round_mantissa(values, bits)
    np.testing.assert_array_equal(found, values)
    assert np.signbit(found[4])
    encoded = encode_logprobs(values, make_encoding(mantissa_bits=bits))
    np.testing.assert_array_equal(encoded.astype(np.float32), values)


def test_float16_keeps_finite_numbers_finite() -> None:
    values = np.array([-65504, -65519, -65520, -1e9, -3.4e38, -np.inf, np.nan, -1], np.float32)
    found = to_float16(values)
    expected = [-65504, -65504, -65504, -65504, -65504, -np.inf, np.nan, -1]
    np.testing.assert_array_equal(found, np.array(expected, np.float16))
    rounded = encode_logprobs(values[:4], make_encoding())
    assert np.isfinite(rounded).all()


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_rounding_keeps_any_shape(shape: tuple[int, ...]) -> None:
    values = np.full(shape, -1.2345, np.float32)
    found = encode_logprobs(values, make_encoding())
    assert found.size == values.size
    assert (found == np.float16(-1.234375)).all()


def test_where_there_is_no_label_the_bytes_are_the_fill() -> None:
    encoding = make_encoding()
    rows = make_rows(10, encoding)
    random = np.random.default_rng(0)
    logits = random.normal(size=(10, 8, 60))
    targets = make_targets(logits, rows, encoding)
    encoded = encode_shard(rows, targets, encoding)
    label = rows["label_mask"] == 1
    assert 0 < label.sum() < label.size
    for name, spec in encoding.arrays().items():
        assert encoded[name].flags.c_contiguous
        assert encoded[name].dtype == spec.dtype
        assert encoded[name].shape == (10, *spec.inner)
        if name in ("tokens", "segments", "documents", "label_mask"):
            np.testing.assert_array_equal(encoded[name], rows[name])
            continue
        fill = np.asarray(spec.fill, spec.dtype).tobytes()
        bare = encoded[name][~label]
        assert bare.tobytes() == fill * bare.size


def test_what_a_teacher_says_of_positions_without_a_label_is_lost() -> None:
    """C10's kind: garbage at pads, at segment ends and in NaN's bits changes no byte."""
    encoding = make_encoding(tail="sampled")
    rows = make_rows(6, encoding)
    logits = np.random.default_rng(0).normal(size=(6, 8, 60))
    targets = make_targets(logits, rows, encoding)
    garbage = {name: value.copy() for name, value in targets.items()}
    free = rows["label_mask"] == 0
    for name, value in garbage.items():
        value[free] = 10000 if name in ("ids", "exact_counts") else 1e4
    odd = np.array([0xFFC12345], np.uint32).view(np.float32)[0]
    logprobs = garbage["logprobs"]
    logprobs[np.isnan(logprobs)] = odd
    one, other = encode_shard(rows, targets, encoding), encode_shard(rows, garbage, encoding)
    for name in one:
        assert same(one[name], other[name])


@pytest.mark.parametrize("kind", ["rounded", "float16", "float32"])
def test_a_stored_nan_has_one_bit_pattern(kind: str) -> None:
    encoding = make_encoding(tail="sampled", logprobs=kind)
    rows = make_rows(6, encoding)
    targets = make_targets(np.random.default_rng(0).normal(size=(6, 8, 60)), rows, encoding)
    stored = encode_shard(rows, targets, encoding)["target_logprobs"]
    patterns = np.unique(stored[np.isnan(stored)].view(f"u{stored.itemsize}"))
    assert patterns.tolist() == [0x7FC00000 if kind == "float32" else 0x7E00]


@pytest.mark.parametrize(("vocabulary", "wrong"), [(20, 22), (20, 20), (60, 65541)])
@pytest.mark.parametrize("where", ["tokens", "ids"])
def test_an_id_beyond_the_vocabulary_is_refused_not_folded(
    vocabulary: int, wrong: int, where: str
) -> None:
    """C20, C23: 65541 in 16 bits would be the legal id 5."""
    encoding = make_encoding(vocabulary=vocabulary)
    rows = make_rows(2, encoding)
    targets = make_targets(np.zeros((2, 8, vocabulary)), rows, encoding)
    place = tuple(np.argwhere(rows["label_mask"] == 1)[0])
    (rows["tokens"] if where == "tokens" else targets["ids"])[place] = wrong
    with pytest.raises(CacheError, match=f"id {wrong}, expected ids below .* {vocabulary}"):
        encode_shard(rows, targets, encoding)


def test_a_tail_above_one_by_a_rounding_is_stored_as_all() -> None:
    encoding = make_encoding(temperatures=(1.0,))
    rows = make_rows(1, encoding)
    targets = make_targets(np.zeros((1, 8, 60)), rows, encoding)
    targets["tail_logprobs"][:] = 1e-6
    stored = encode_shard(rows, targets, encoding)["tail_logprobs"]
    assert (stored[rows["label_mask"] == 1] == 0).all()


def test_padding_rows_are_nothing() -> None:
    rows = padding_rows(3, 5)
    assert {name: value.dtype.name for name, value in rows.items()} == {
        "tokens": "uint32",
        "segments": "uint16",
        "documents": "uint32",
        "label_mask": "uint8",
    }
    assert all(value.shape == (3, 5) for value in rows.values())
    assert (rows["documents"] == NO_DOCUMENT).all()
    assert not any(rows[name].any() for name in ("tokens", "segments", "label_mask"))


# Weights.


def _stored(logits: Any, encoding: Encoding, exact: int = 1, uniform: float = 0.5) -> Any:
    """One row whose first position has a label, encoded from logits [vocabulary]."""
    logits = np.asarray(logits, np.float64)
    rows = padding_rows(1, encoding.length)
    rows["segments"][0, :2] = 1
    rows["documents"][0, :2] = 0
    rows["label_mask"][0, 0] = 1
    one = position_targets(logits, encoding, exact, uniform)
    shape = (1, encoding.length)
    targets: dict[str, Any] = {"label_logprobs": np.full(shape, log_softmax(logits)[0], np.float32)}
    for name, value in one.items():
        targets[name] = np.broadcast_to(np.asarray(value), (*shape, *np.shape(value))).copy()
    return encode_shard(rows, targets, encoding)


def test_another_temperature_is_exact_when_its_tail_was_captured() -> None:
    """C03: logits [4, 2, 0, 0], k = 2, T = 2."""
    encoding = make_encoding(
        vocabulary=4, k=2, temperatures=(1.0, 2.0), logprobs="float32", length=2
    )
    stored = _stored([4.0, 2.0, 0.0, 0.0], encoding)
    one = weights(stored, encoding, 1.0)[0, 0]
    two = weights(stored, encoding, 2.0)[0, 0]
    tail = np.exp(stored["tail_logprobs"][0, 0].astype(np.float64))
    # The tails are float16: 2^-11 of a log of 1.8 and 3.5.
    np.testing.assert_allclose(tail, [0.031256, 0.165189], rtol=2e-3)
    np.testing.assert_allclose(two, [0.610296, 0.224515], rtol=2e-4)
    np.testing.assert_allclose(one.sum(), 0.968744, rtol=1e-4)
    np.testing.assert_allclose(two / two.sum(), [0.731059, 0.268941], atol=1e-6)


def test_a_temperature_that_was_not_captured_is_refused() -> None:
    encoding = make_encoding(vocabulary=4, k=2, temperatures=(1.0, 4.0), length=2)
    stored = _stored([4.0, 2.0, 0.0, 0.0], encoding)
    with pytest.raises(CacheError, match=r"at temperature 1, 4, not at 2; .* capture again"):
        weights(stored, encoding, 2.0)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("logprobs", ["float32", "float16", "rounded"])
def test_exact_weights_against_the_softmax(
    logprobs: str, temperature: float, tmp_path_factory: Any
) -> None:
    encoding = make_encoding(logprobs=logprobs)
    random = np.random.default_rng(3)
    for scale in (0.1, 1.0, 5.0, 30.0):
        logits = random.normal(size=60) * scale
        found = weights(_stored(logits, encoding), encoding, temperature)[0, 0]
        order = np.argsort(-logits, kind="stable")[:6]
        expected = np.exp(log_softmax(logits / temperature))
        size = np.abs(log_softmax(logits)[order]) / temperature
        tail = np.abs(np.log(1 - expected[order].sum() + 1e-300))
        bound = 2 * encoding.relative_error * size.max() + 2.0**-11 * tail + 1e-6
        assert (np.abs(found - expected[order]) <= bound).all()


_LOGITS = st.lists(st.floats(-30, 30), min_size=8, max_size=40)


@settings(max_examples=50, deadline=None)
@given(
    _LOGITS, st.integers(2, 8), st.floats(0, 1, exclude_max=True), st.sampled_from([0.5, 1.0, 3.0])
)
def test_sampled_weights_sum_to_one(
    logits: list[float], k: int, uniform: float, temperature: float
) -> None:
    encoding = make_encoding(
        vocabulary=len(logits), k=k, tail="sampled", temperatures=(temperature,), length=2
    )
    for exact in {1, k - 1}:
        stored = _stored(logits, encoding, exact, uniform)
        found = weights(stored, encoding, temperature)[0, 0]
        assert (found >= 0).all()
        assert abs(found.astype(np.float64).sum() - 1) < 1e-6
        count = int(stored["exact_counts"][0, 0])
        assert len(set(found[count:].tolist())) <= 1


@pytest.mark.parametrize(
    "logits",
    [
        [0.0, 0.0, *[-np.inf] * 6],
        [0.0, 0.0, *[-30.0] * 6],
        [60.0, *[0.0] * 7],
        [700.0, *[0.0] * 7],
        [0.0] * 8,
        [17.0, 16.99, *[0.0] * 60000],
    ],
)
@pytest.mark.parametrize("k", [3, 4, 8])
def test_heads_of_extreme_mass(logits: list[float], k: int) -> None:
    encoding = make_encoding(vocabulary=len(logits), k=k, tail="sampled", length=2)
    stored = _stored(logits, encoding)
    found = weights(stored, encoding, 1.0)[0, 0].astype(np.float64)
    assert np.isfinite(found).all()
    assert abs(found.sum() - 1) < 1e-6
    p = np.exp(log_softmax(np.array(logits)))
    count = int(stored["exact_counts"][0, 0])
    np.testing.assert_allclose(found[:count], np.sort(p)[::-1][:count], rtol=0.02, atol=1e-9)


def test_two_tokens_of_one_half() -> None:
    encoding = make_encoding(vocabulary=8, k=4, tail="sampled", length=2)
    found = weights(_stored([0.0, 0.0, *[-np.inf] * 6], encoding), encoding, 1.0)[0, 0]
    assert found.tolist() == [0.5, 0.5, 0.0, 0.0]


def test_a_sampled_tail_that_is_never_drawn_from_leaves_its_mass_out() -> None:
    encoding = make_encoding(vocabulary=8, k=3, tail="sampled", length=2)
    found = weights(_stored([0.0] * 8, encoding, exact=3), encoding, 1.0)[0, 0]
    np.testing.assert_allclose(found, 1 / 8, rtol=2e-3)


def test_empty_slots_and_positions_without_a_label_weigh_nothing(sampled_cache: Built) -> None:
    encoding = sampled_cache.encoding
    found = weights(sampled_cache.arrays, encoding, 1.0)
    assert found.dtype == np.float32
    assert found.shape == (10, 8, 6)
    label = sampled_cache.arrays["label_mask"] == 1
    assert not found[~label].any()
    np.testing.assert_allclose(found[label].astype(np.float64).sum(axis=-1), 1, atol=1e-6)
    small = make_encoding(vocabulary=8, k=6, length=2, logprobs="float32")
    few = _stored([1.0, 0.5, *[-np.inf] * 6], small)
    assert (few["target_ids"][0, 0, 2:] == small.no_id).all()
    for temperature in small.temperatures:
        got = weights(few, small, temperature)[0, 0]
        ratio = np.exp(0.5 / temperature)
        np.testing.assert_allclose(got[:2], [ratio / (1 + ratio), 1 / (1 + ratio)], rtol=1e-6)
        assert not got[2:].any()


@pytest.mark.parametrize("tail", ["none", "sampled"])
def test_all_tokens_as_entries(tail: str) -> None:
    encoding = make_encoding(vocabulary=7, k=7, tail=tail, logprobs="float32", length=2)
    logits = np.random.default_rng(0).normal(size=7) * 3
    stored = _stored(logits, encoding)
    assert np.isneginf(stored["tail_logprobs"][0, 0]).all()
    for temperature in encoding.temperatures:
        expected = np.sort(np.exp(log_softmax(logits / temperature)))[::-1]
        found = weights(stored, encoding, temperature)[0, 0]
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_weights_of_one_position_of_many_and_of_none(sampled_cache: Built) -> None:
    encoding, arrays = sampled_cache.encoding, sampled_cache.arrays
    whole = weights(arrays, encoding, 1.0)
    one = weights({name: value[4, 1:2] for name, value in arrays.items()}, encoding, 1.0)
    np.testing.assert_array_equal(one, whole[4, 1:2])
    none = weights({name: value[:0] for name, value in arrays.items()}, encoding, 1.0)
    assert none.shape == (0, 8, 6)


@pytest.mark.parametrize("seed", range(3))
def test_the_estimate_is_unbiased(seed: int) -> None:
    """The mean over a fine grid of the sampler's uniform number is the distribution itself."""
    encoding = make_encoding(
        vocabulary=30, k=5, tail="sampled", logprobs="float32", temperatures=(2.0,), length=2
    )
    logits = np.random.default_rng(seed).normal(size=30) * 3
    total = np.zeros(30)
    points = 200
    for point in range(points):
        stored = _stored(logits, encoding, 1, (point + 0.5) / points)
        ids = stored["target_ids"][0, 0]
        np.add.at(total, ids, weights(stored, encoding, 2.0)[0, 0])
    expected = np.exp(log_softmax(logits / 2))
    # The grid is that fine; the tail is stored in float16.
    np.testing.assert_allclose(total / points, expected, atol=1.5 / points + 1e-3)
