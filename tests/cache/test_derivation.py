"""Other targets from stored ones, against dense distributions and direct captures."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cache.derivation as derivation
from cache.consistency import SLACK, exact_mass, inconsistencies
from cache.derivation import (
    Recipe,
    derive_rows,
    draw_key,
    fewer_entries,
    log_weights,
    position_bits,
    tail_beyond,
    within,
)
from cache.encoding import encode_shard, weights
from cache.errors import CacheError
from cache.format import Encoding
from tests.cache.builder import (
    Built,
    log_softmax,
    make_cache,
    make_encoding,
    make_rows,
    make_targets,
    position_targets,
    same,
)


def _captured(encoding: Encoding, seed: int = 0, scale: float = 2.0, rows: int = 8) -> Any:
    """Stored arrays of a direct capture, and its logits; equal rows and logits for equal seeds."""
    laid = make_rows(rows, encoding, seed)
    logits = np.random.default_rng(seed).normal(size=(rows, encoding.length, encoding.vocabulary))
    targets = make_targets(logits * scale, laid, encoding)
    return encode_shard(laid, targets, encoding), logits * scale


def _recipe(source: Encoding, wanted: Encoding, exact: int = 1) -> Recipe:
    error = wanted.relative_error
    if (wanted.logprobs, wanted.mantissa_bits) != (source.logprobs, source.mantissa_bits):
        error += source.relative_error
    return Recipe(source, wanted, exact, source.relative_error, error, draw_key(0, ["source"]))


def _derived(arrays: Any, source: Encoding, wanted: Encoding, exact: int = 1) -> Any:
    rows = np.arange(len(arrays["tokens"]))
    return derive_rows(arrays, rows, _recipe(source, wanted, exact))


def _sound(arrays: Any, source: Encoding, wanted: Encoding) -> bool:
    return not list(inconsistencies(arrays, wanted, relative_error=_recipe(source, wanted).error))


# Fewer exact entries.


@pytest.mark.parametrize("logprobs", ["float32", "float16", "rounded"])
@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("scale", [0.3, 2.0, 8.0])
def test_fewer_exact_entries_are_a_direct_capture(logprobs: Any, k: int, scale: float) -> None:
    source = make_encoding(k=6, logprobs=logprobs)
    wanted = make_encoding(k=k, logprobs=logprobs)
    arrays, logits = _captured(source, scale=scale)
    direct, _ = _captured(wanted, scale=scale)
    found = _derived(arrays, source, wanted)
    for name in wanted.arrays():
        if name != "tail_logprobs":
            assert same(found[name], direct[name])
    assert _sound(found, source, wanted)
    label = found["label_mask"] == 1
    for column, temperature in enumerate(wanted.temperatures):
        probabilities = np.sort(np.exp(log_softmax(logits / temperature)), axis=-1)[label]
        truth = probabilities[:, :-k].sum(axis=-1)
        tail = found["tail_logprobs"][label][:, column].astype(np.float64)
        size = np.abs(arrays["target_logprobs"][label].astype(np.float64)).max(axis=-1)
        # Two log-probs may err against each other; then the rounding of the tails themselves.
        bound = 2 * source.relative_error * size / temperature * (1 - truth)
        rounding = 2 * 2.0**-11 * np.abs(tail) * truth + 1e-6
        assert (np.abs(np.exp(tail) - truth) <= 1.1 * bound + rounding).all()
    assert same(found["tail_logprobs"], direct["tail_logprobs"]) == (k == 6)


def test_float32_gives_the_tails_of_a_direct_capture_to_the_last_step() -> None:
    source, wanted = make_encoding(logprobs="float32"), make_encoding(logprobs="float32", k=2)
    arrays, _ = _captured(source)
    found, (direct, _) = _derived(arrays, source, wanted), _captured(wanted)
    label = found["label_mask"] == 1
    step = np.spacing(np.abs(direct["tail_logprobs"][label])).astype(np.float64)
    apart = found["tail_logprobs"][label].astype(np.float64) - direct["tail_logprobs"][label]
    assert (np.abs(apart) <= 2 * step).all()


def test_a_position_with_few_possible_tokens_keeps_what_it_has() -> None:
    """Three tokens possible: nothing lies outside, and its tail is what it was."""
    source, wanted = make_encoding(k=6), make_encoding(k=4)
    laid = make_rows(2, source)
    logits = np.full((2, source.length, source.vocabulary), -np.inf)
    logits[..., 7:10] = [1.0, 3.0, 2.0]
    arrays = encode_shard(laid, make_targets(logits, laid, source), source)
    found = _derived(arrays, source, wanted)
    label = found["label_mask"] == 1
    assert found["target_ids"][label].tolist() == [[8, 9, 7, wanted.no_id]] * label.sum()
    assert (found["exact_counts"][label] == 3).all()
    assert same(found["tail_logprobs"], arrays["tail_logprobs"])
    assert np.isneginf(found["tail_logprobs"][label]).all()


def test_masses_too_small_for_a_float_are_kept() -> None:
    logprobs = np.array([[0.0, -900.0, -1000.0]])
    count, tail = np.array([3]), np.array([-2000.0])
    assert tail_beyond(logprobs, count, tail, np.array([2]), 1.0) == pytest.approx(-1000)
    assert tail_beyond(logprobs, count, tail, np.array([1]), 2.0) == pytest.approx(-450)
    assert tail_beyond(logprobs, count, tail, np.array([3]), 1.0) == -2000


def test_a_tail_that_holds_everything_stays_everything() -> None:
    logprobs = np.array([[-1.0, -2.0]])
    assert tail_beyond(logprobs, np.array([2]), np.array([0.0]), np.array([1]), 4.0) == 0


# The range that rounded entries leave for the tail.


@given(st.floats(-30, 0), st.floats(0, 1.2), st.floats(1e-6, 0.3), st.floats(-1, 1))
def test_within_never_makes_an_estimate_worse(
    tail: float, mass: float, bound: float, truth: float
) -> None:
    """The true mass outside is somewhere within the bound, and possible."""
    outside = 1 - mass + truth * bound
    if not 0 < outside <= 1:
        return
    found = np.exp(within(np.array([tail]), np.array([mass]), np.array([bound])))[0]
    assert abs(found - outside) <= abs(np.exp(tail) - outside) + 1e-12
    assert 1 - mass - bound - 1e-12 <= found <= 1 - mass + bound + 1e-12


def test_coarse_rounding_stays_consistent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four entries that all round up leave the first too little; clipped, it is what it was."""
    source = make_encoding(k=5, mantissa_bits=1, temperatures=(1.0,))
    wanted = make_encoding(k=1, mantissa_bits=1, temperatures=(1.0,))
    laid = make_rows(4, source)
    p = np.full(source.vocabulary, 1e-3)
    p[:5] = [0.6, 0.0835, 0.0834, 0.0833, 0.0832]
    logits = np.log(np.broadcast_to(p, (4, source.length, source.vocabulary)))
    arrays = encode_shard(laid, make_targets(logits, laid, source), source)
    found = _derived(arrays, source, wanted)
    assert _sound(found, source, wanted)
    monkeypatch.setattr(derivation, "within", lambda tail, mass, bound: tail)
    loose = _derived(arrays, source, wanted)
    assert not _sound(loose, source, wanted)
    label = found["label_mask"] == 1
    truth = 1 - p[0] / p.sum()
    clipped, free = (np.exp(each["tail_logprobs"][label].astype(float)) for each in (found, loose))
    assert (np.abs(clipped - truth) < np.abs(free - truth)).all()


# Rounding.


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"logprobs": "float32"}, {"logprobs": "float16"}),
        ({"logprobs": "float32"}, {"logprobs": "rounded", "mantissa_bits": 3}),
        ({"logprobs": "float16"}, {"logprobs": "rounded", "mantissa_bits": 6}),
        ({"mantissa_bits": 7}, {"mantissa_bits": 6}),
        ({"mantissa_bits": 9}, {"mantissa_bits": 2}),
    ],
)
def test_coarser_rounding(before: dict[str, Any], after: dict[str, Any]) -> None:
    source, wanted = make_encoding(**before, length=32), make_encoding(**after, length=32)
    arrays, _ = _captured(source, rows=20)
    found, (direct, _) = _derived(arrays, source, wanted), _captured(wanted, rows=20)
    for name in wanted.arrays():
        if name != "target_logprobs" or source.logprobs == "float32":
            assert same(found[name], direct[name])
    assert found["target_logprobs"].dtype == direct["target_logprobs"].dtype
    exact = ~np.isnan(found["target_logprobs"])
    truth = _captured(make_encoding(logprobs="float32", length=32), rows=20)[0]["target_logprobs"]
    apart = np.abs(found["target_logprobs"].astype(np.float64) - truth)[exact]
    error = _recipe(source, wanted).error
    assert (apart <= error * np.abs(truth[exact]) + 1e-7).all()
    assert _sound(found, source, wanted)


def test_rounding_twice_errs_more_than_rounding_once() -> None:
    """Why the error of a derived cache is stated: the wanted encoding's own is too small."""
    source, wanted = make_encoding(mantissa_bits=7, length=32), make_encoding(length=32)
    arrays, _ = _captured(source, rows=20)
    found = _derived(arrays, source, wanted)
    assert list(inconsistencies(found, wanted))
    assert _sound(found, source, wanted)


def test_what_needs_no_change_is_not_touched() -> None:
    source = make_encoding(logprobs="float16", mantissa_bits=6)
    wanted = make_encoding(logprobs="float16", mantissa_bits=3, rows_per_shard=2)
    arrays, _ = _captured(source)
    found = _derived(arrays, source, wanted)
    assert all(found[name] is values for name, values in arrays.items())
    fewer = make_encoding(temperatures=(2.0, 4.0), logprobs="float16")
    found = _derived(arrays, source, fewer)
    for name, values in arrays.items():
        kept = values[..., 1:] if name == "tail_logprobs" else values
        assert same(found[name], kept)


# Samples of samples.


def _uniforms(count: int) -> np.ndarray:
    """Bits whose uniform numbers lie evenly in [0, 1)."""
    return (((np.arange(count) + 0.5) / count) * 2.0**64).astype(np.uint64)


def _stored(logits: np.ndarray, k: int, exact: int, uniform: float) -> Any:
    """Log-weights, exact entries, and ids of a sampled capture of one position."""
    encoding = make_encoding(tail="sampled", k=k, vocabulary=len(logits))
    one = position_targets(logits, encoding, exact, uniform)
    used, count = np.array([one["ids"] >= 0]), np.array([one["exact_counts"]])
    logprobs, tail = one["logprobs"][None].astype(np.float64), one["tail_logprobs"]
    return log_weights(logprobs, used, count, tail.astype(np.float64), 1.0), count, one["ids"]


def _least_head(weight: np.ndarray, count: int, k: int, exact: int) -> int:
    """The rule, word for word."""
    for h in range(exact, k):
        if h == min(count, k - 1) or weight[h:].max() <= weight[h:].sum() / (k - h):
            return h
    raise AssertionError


_LOGITS = st.lists(st.floats(-8, 8), min_size=14, max_size=14, unique=True)


@settings(deadline=None, max_examples=60)
@given(_LOGITS, st.integers(3, 9), st.integers(1, 3), st.integers(2, 8), st.floats(0, 0.999))
def test_a_sample_of_a_sample_is_unbiased(
    logits: list[float], k: int, exact: int, fewer: int, uniform: float
) -> None:
    fewer, exact = min(fewer, k - 1), min(exact, k - 1, fewer)
    log_weight, count, _ = _stored(np.array(logits), k, exact, uniform)
    weight = np.exp(log_weight[0])
    assert weight.sum() == pytest.approx(1, abs=1e-6)
    wanted = max(1, min(exact, fewer - 1))
    draws = 1000
    repeated = np.repeat(log_weight, draws, axis=0)
    heads, slots = fewer_entries(
        repeated,
        np.repeat(count, draws),
        np.full(draws, k),
        fewer,
        wanted,
        _uniforms(draws),
    )
    head = int(heads[0])
    assert (heads == head).all()
    assert head == _least_head(weight, int(count[0]), fewer, wanted)
    assert (slots >= 0).all()
    assert (np.diff(slots, axis=1) > 0).all()
    assert (slots[:, :head] == np.arange(head)).all()
    threshold = weight[head:].sum() / (fewer - head)
    mean = np.zeros(k)
    mean[:head] = weight[:head]
    mean += threshold * np.bincount(slots[:, head:].ravel(), minlength=k) / draws
    assert np.abs(mean - weight).max() <= 3 * threshold / draws + 1e-9


def test_two_stages_are_unbiased_over_seeds() -> None:
    """Capture and derivation with random numbers of their own: the mean weight is p."""
    random = np.random.default_rng(5)
    logits = random.normal(size=40) * 1.5
    p = np.exp(log_softmax(logits))
    k, fewer, seeds = 12, 6, 2000
    encoding = make_encoding(tail="sampled", k=k, vocabulary=40)
    stored = [position_targets(logits, encoding, 3, random.random()) for _ in range(seeds)]
    ids, logprobs, count, tail = (
        np.array([one[name] for one in stored])
        for name in ("ids", "logprobs", "exact_counts", "tail_logprobs")
    )
    log_weight = log_weights(
        logprobs.astype(np.float64), ids >= 0, count, tail[:, 0].astype(np.float64), 1.0
    )
    bits = [position_bits(draw_key(seed, ["a"]), np.array([7]), 1)[0, 0] for seed in range(seeds)]
    heads, slots = fewer_entries(
        log_weight, count, np.full(seeds, k), fewer, 2, np.array(bits, np.uint64)
    )
    # Where all captures have the same head, so have all derivations.
    head = int(heads[0])
    assert (heads == head).all()
    weight = np.exp(log_weight)
    drawn = np.zeros((seeds, 40))
    rest = weight[:, head:].sum(axis=1, keepdims=True) / (fewer - head)
    kept = np.take_along_axis(ids, slots, axis=1)
    np.put_along_axis(drawn, kept[:, :head], weight[:, :head], axis=1)
    np.put_along_axis(drawn, kept[:, head:], rest, axis=1)
    assert (np.count_nonzero(drawn, axis=1) == fewer).all()
    assert drawn.sum(axis=1) == pytest.approx(1, abs=1e-6)
    deviation = drawn.std(axis=0) / np.sqrt(seeds)
    assert (np.abs(drawn.mean(axis=0) - p) <= 5 * deviation + 1e-6).all()
    # It is random indeed, but for the head.
    assert np.count_nonzero(deviation > 1e-4) >= 30


def test_extreme_weights_are_drawn_once() -> None:
    """Entries that hold all, equal ones, and ones too small for a float."""
    table = np.log(
        np.array(
            [
                [0.9, 0.02, 0.02, 0.02, 0.02, 0.02],
                [1 / 6] * 6,
                [0.5, 0.5, 1e-300, 1e-300, 1e-300, 1e-300],
            ]
        )
    )
    far = np.array([[-0.1, -900.0, -900.0, -900.0, -900.0, -900.0]])
    weight = np.repeat(np.concatenate([table, far]), 500, axis=0)
    bits = np.tile(_uniforms(500), 4)
    six = np.full(len(weight), 6)
    for k in range(2, 6):
        heads, slots = fewer_entries(weight, six, six, k, 1, bits)
        assert (np.diff(slots, axis=1) > 0).all()
        assert slots.min() == 0
        assert slots.max() == 5
        # Two tokens that hold all are both exact as soon as there is room.
        assert heads[::500].tolist() == [1, 1, min(2, k - 1), 1]


def test_positions_with_few_entries_keep_them() -> None:
    weight = np.log([[0.6, 0.4, 1.0, 1.0]])
    weight[0, 2:] = -np.inf
    bits = np.zeros(1, np.uint64)
    heads, slots = fewer_entries(weight, np.array([2]), np.array([2]), 3, 1, bits)
    assert (heads.tolist(), slots.tolist()) == ([2], [[0, 1, -1]])


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_smaller_sampled_cache(temperature: float) -> None:
    source = make_encoding(tail="sampled", k=9, temperatures=(temperature,))
    wanted = make_encoding(tail="sampled", k=4, temperatures=(temperature,))
    arrays, _ = _captured(source)
    found = _derived(arrays, source, wanted, exact=2)
    assert _sound(found, source, wanted)
    label = found["label_mask"] == 1
    before, after = (
        weights(each, encoding, temperature).astype(np.float64)
        for each, encoding in ((arrays, source), (found, wanted))
    )
    assert after[label].sum(axis=-1) == pytest.approx(1, abs=1e-6)
    assert (found["exact_counts"][label] >= 2).all()
    assert (found["exact_counts"][label] <= 3).all()
    for row, position in np.argwhere(label):
        ids = found["target_ids"][row, position]
        held = arrays["target_ids"][row, position].tolist()
        head = int(found["exact_counts"][row, position])
        assert set(ids.tolist()) <= set(held)
        assert ids[:head].tolist() == held[:head]
        assert (np.diff(ids[head:].astype(int)) > 0).all()
        # To the rounding of a float16 tail.
        assert after[row, position, :head] == pytest.approx(before[row, position, :head], rel=5e-3)
    unchanged = set(wanted.arrays()) - {
        "target_ids",
        "target_logprobs",
        "exact_counts",
        "tail_logprobs",
    }
    assert all(same(found[name], arrays[name]) for name in unchanged)


def test_dropping_a_sampled_tail_is_a_direct_capture() -> None:
    source = make_encoding(tail="sampled", k=8, logprobs="float32")
    for k in (1, 2):
        wanted = make_encoding(k=k, temperatures=(1.0,), logprobs="float32")
        found = _derived(_captured(source)[0], source, wanted, exact=k)
        direct, _ = _captured(wanted)
        for name in set(wanted.arrays()) - {"tail_logprobs"}:
            assert same(found[name], direct[name])
        label = found["label_mask"] == 1
        assert found["tail_logprobs"][label] == pytest.approx(
            direct["tail_logprobs"][label], rel=2.0**-10
        )
        assert _sound(found, source, wanted)


def test_a_promise_of_exact_entries_that_does_not_hold() -> None:
    source, wanted = make_encoding(tail="sampled", k=8), make_encoding(k=7, temperatures=(1.0,))
    with pytest.raises(CacheError, match="yet every position is sure to have 7 exact ones"):
        _derived(_captured(source)[0], source, wanted)


# Random numbers.


def test_bits_depend_on_key_row_and_position_alone() -> None:
    whole = position_bits(1, np.arange(10), 9)
    assert whole.dtype == np.uint64
    assert same(position_bits(1, np.array([7, 3]), 9), whole[[7, 3]])
    assert same(position_bits(1, np.arange(10), 5), np.ascontiguousarray(whole[:, :5]))
    assert len(np.unique(whole)) == 90
    assert not np.isin(position_bits(2, np.arange(10), 9), whole).any()
    assert position_bits(1, np.arange(0), 9).shape == (0, 9)
    # The values themselves: another numpy must give the same.
    assert whole[3, :2].tolist() == [10454881192440828320, 17534340874233221580]


def test_the_key_is_of_the_seed_and_of_every_source() -> None:
    keys = {draw_key(0, ["a"]), draw_key(1, ["a"]), draw_key(0, ["b"]), draw_key(0, ["a", "b"])}
    assert len(keys) == 4
    assert all(0 <= key < 2**128 for key in keys)


def test_exact_mass_is_what_consistency_checks(exact_cache: Built) -> None:
    label = exact_cache.arrays["label_mask"] == 1
    logprobs = exact_cache.arrays["target_logprobs"][label].astype(np.float64)
    mass, bound = exact_mass(logprobs, np.ones(logprobs.shape, bool), 2.0**-7)
    top = np.sort(np.exp(exact_cache.log_probabilities()), axis=-1)[label][:, -6:]
    assert (np.abs(mass - top.sum(axis=-1)) <= bound).all()
    assert (bound > SLACK).all()


def test_a_capture_is_its_own_reference(tmp_path: Path) -> None:
    """What these tests compare with is what `make_cache` stores."""
    built = make_cache(tmp_path / "cache", rows=8)
    direct, logits = _captured(built.encoding)
    assert same(direct["tokens"], built.arrays["tokens"])
    assert logits.shape == built.logits.shape
