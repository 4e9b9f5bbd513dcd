"""Statistics against naive float64, their combination, and percentiles."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import CacheError
from cache.format import NO_DOCUMENT
from cache.statistics import (
    BINS,
    Statistics,
    combine,
    document_range,
    perplexity,
    statistics_of,
)
from tests.cache.builder import Built, make_encoding


@pytest.mark.parametrize("kind", ["exact", "sampled"])
def test_against_naive_sums(kind: str, exact_cache: Built, sampled_cache: Built) -> None:
    built = exact_cache if kind == "exact" else sampled_cache
    arrays, encoding = built.arrays, built.encoding
    found = statistics_of(arrays, encoding)
    rows, length = arrays["tokens"].shape
    counts = dict.fromkeys(("tokens", "labels", "exact", "sampled", "without"), 0)
    sums = {"label": 0.0, "entropy": 0.0}
    masses = np.zeros(len(encoding.temperatures))
    for row in range(rows):
        counts["without"] += not (arrays["label_mask"][row] == 1).any()
        for position in range(length):
            counts["tokens"] += int(arrays["segments"][row, position] > 0)
            if arrays["label_mask"][row, position] != 1:
                continue
            counts["labels"] += 1
            exact = int(arrays["exact_counts"][row, position])
            used = int((arrays["target_ids"][row, position] != encoding.no_id).sum())
            counts["exact"] += exact
            counts["sampled"] += used - exact
            sums["label"] += float(arrays["label_logprobs"][row, position])
            sums["entropy"] += float(arrays["entropy"][row, position])
            masses += 1 - np.exp(arrays["tail_logprobs"][row, position].astype(np.float64))
    assert found.rows == rows
    assert (found.tokens, found.labels) == (counts["tokens"], counts["labels"])
    assert (found.exact_entries, found.sampled_entries) == (counts["exact"], counts["sampled"])
    assert found.rows_without_labels == counts["without"] > 0
    assert found.label_logprobs == pytest.approx(sums["label"], rel=1e-12)
    assert found.entropy == pytest.approx(sums["entropy"], rel=1e-12)
    assert found.exact_mass == pytest.approx(masses, abs=1e-7)
    assert [sum(bins) for bins in found.exact_mass_histogram] == [found.labels] * len(masses)


def test_against_the_teacher_itself(exact_cache: Built) -> None:
    """Perplexity, entropy and masses, from the logits in float64."""
    found = statistics_of(exact_cache.arrays, exact_cache.encoding)
    label = exact_cache.arrays["label_mask"] == 1
    tokens = exact_cache.arrays["tokens"].astype(np.int64)
    labels = np.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)[..., None]
    logp = exact_cache.log_probabilities()
    true = np.take_along_axis(logp, labels, axis=-1)[..., 0][label]
    assert found.perplexity == pytest.approx(np.exp(-true.mean()), rel=1e-6)
    entropy = -(np.exp(logp) * logp).sum(axis=-1)[label].mean()
    assert found.mean_entropy == pytest.approx(entropy, rel=1e-3)
    for index, temperature in enumerate(exact_cache.encoding.temperatures):
        p = np.sort(np.exp(exact_cache.log_probabilities(temperature)), axis=-1)[..., -6:]
        mass = p.sum(axis=-1)[label]
        assert found.mean_exact_mass(index) == pytest.approx(mass.mean(), abs=1e-3)
        tenth = np.quantile(mass, 0.1, method="inverted_cdf")
        assert found.exact_mass_percentile(index, 10.0) == pytest.approx(tenth, abs=2 / BINS)


def _random(seed: int, temperatures: int = 2) -> Statistics:
    random = np.random.default_rng(seed)
    return Statistics(
        **{
            name: int(random.integers(0, 10**9))
            for name in (
                "rows",
                "tokens",
                "labels",
                "impossible_labels",
                "exact_entries",
                "sampled_entries",
                "rows_without_labels",
            )
        },
        label_logprobs=float(-random.random() * 10.0 ** random.integers(-8, 12)),
        entropy=float(random.random() * 10.0 ** random.integers(-8, 12)),
        exact_mass=tuple(float(x) for x in random.random(temperatures) * 1e9),
        exact_mass_histogram=tuple(
            tuple(int(x) for x in random.integers(0, 10**9, BINS)) for _ in range(temperatures)
        ),
    )


@given(st.lists(st.integers(0, 50), max_size=8), st.randoms())
def test_combining_in_any_order_is_equal(seeds: list[int], random: Any) -> None:
    parts = [_random(seed) for seed in seeds]
    shuffled = random.sample(parts, len(parts))
    total = combine(parts, 2)
    assert combine(shuffled, 2) == total
    assert combine(iter(parts), 2) == total
    assert total.tokens == sum(part.tokens for part in parts)
    assert total.label_logprobs == math.fsum(part.label_logprobs for part in parts)
    if parts:
        expected = np.sum([part.exact_mass_histogram for part in parts], axis=0)
        np.testing.assert_array_equal(total.exact_mass_histogram, expected)


def test_shards_together_are_the_whole(exact_cache: Built) -> None:
    whole = statistics_of(exact_cache.arrays, exact_cache.encoding)
    parts = [
        statistics_of(
            {name: value[first : first + 3] for name, value in exact_cache.arrays.items()},
            exact_cache.encoding,
        )
        for first in range(0, 10, 3)
    ]
    total = combine(parts, 3)
    assert total.exact_mass == pytest.approx(whole.exact_mass, rel=1e-14)
    blank: dict[str, Any] = {"label_logprobs": 0.0, "entropy": 0.0, "exact_mass": ()}
    assert replace(total, **blank) == replace(whole, **blank)
    assert total.label_logprobs == pytest.approx(whole.label_logprobs, rel=1e-14)


def test_nothing_has_no_means() -> None:
    nothing = combine([], 2)
    assert (nothing.rows, nothing.labels, nothing.exact_mass) == (0, 0, (0.0, 0.0))
    assert nothing.exact_mass_histogram == ((0,) * BINS,) * 2
    for value in (
        nothing.perplexity,
        nothing.mean_entropy,
        nothing.mean_exact_mass(1),
        nothing.exact_mass_percentile(1, 10.0),
    ):
        assert math.isnan(value)


def _with_histogram(counts: dict[int, int]) -> Statistics:
    bins = tuple(counts.get(index, 0) for index in range(BINS))
    labels = sum(bins)
    return replace(combine([], 1), labels=labels, exact_mass=(1.0,), exact_mass_histogram=(bins,))


@pytest.mark.parametrize(
    ("counts", "percent", "expected"),
    [
        ({0: 10}, 10, 0.001),
        ({0: 10}, 100, 0.01),
        ({0: 10}, 0, 0.0),
        ({99: 10}, 10, 0.991),
        ({99: 10}, 100, 1.0),
        ({20: 1, 80: 9}, 10, 0.21),
        ({20: 2, 80: 8}, 10, 0.205),
        ({20: 1, 80: 9}, 55, 0.805),
    ],
)
def test_percentiles(counts: dict[int, int], percent: float, expected: float) -> None:
    found = _with_histogram(counts).exact_mass_percentile(0, float(percent))
    assert found == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=300), st.integers(1, 99))
def test_a_percentile_is_within_a_bin(masses: list[float], percent: int) -> None:
    bins = np.clip((np.array(masses) * BINS).astype(int), 0, BINS - 1)
    counts = {
        int(index): int(count)
        for index, count in zip(*np.unique(bins, return_counts=True), strict=True)
    }
    found = _with_histogram(counts).exact_mass_percentile(0, float(percent))
    expected = np.percentile(masses, percent, method="inverted_cdf")
    assert abs(found - expected) <= 1 / BINS + 1e-9


def test_masses_of_none_and_of_all() -> None:
    """The ends of the histogram: a tail of log 0 and of log 1."""
    arrays = {
        "label_mask": np.ones((1, 2), np.uint8),
        "segments": np.ones((1, 2), np.uint16),
        "tail_logprobs": np.array([[[-np.inf], [0.0]]], np.float16),
        "exact_counts": np.ones((1, 2), np.uint8),
        "target_ids": np.zeros((1, 2, 1), np.uint16),
        "label_logprobs": np.zeros((1, 2), np.float32),
        "entropy": np.zeros((1, 2), np.float16),
    }
    found = statistics_of(arrays, make_encoding(k=1, length=2, temperatures=(1.0,)))
    assert found.exact_mass == (1.0,)
    (bins,) = found.exact_mass_histogram
    assert (bins[0], bins[-1], sum(bins)) == (1, 1, 2)


@pytest.mark.parametrize(
    ("logprobs", "labels", "expected"),
    [(0.0, 5, 1.0), (-math.log(10) * 4, 4, 10.0), (-1e6, 2, math.inf), (-math.inf, 2, math.inf)],
)
def test_perplexity(logprobs: float, labels: int, expected: float) -> None:
    assert perplexity(logprobs, labels) == pytest.approx(expected)


def test_json_round_trip(exact_cache: Built) -> None:
    found = statistics_of(exact_cache.arrays, exact_cache.encoding)
    assert Statistics.from_json(json.loads(json.dumps(found.to_json())), "it") == found


@pytest.mark.parametrize("name", list(combine([], 1).to_json()))
def test_wrong_fields_are_named(name: str) -> None:
    good = _random(0).to_json()
    for wrong in (None, "x", [None], [[1]], [["x"] * BINS], {}, True, 10**400, [10**400]):
        if isinstance(good[name], int) and type(wrong) is int:
            continue
        with pytest.raises(CacheError, match=name):
            Statistics.from_json({**good, name: wrong}, "it")
    with pytest.raises(CacheError, match=f"it has no field '{name}'"):
        Statistics.from_json({key: good[key] for key in good if key != name}, "it")


def test_document_range() -> None:
    none = NO_DOCUMENT
    assert document_range(np.array([[none, 7], [3, none]], np.uint32)) == (3, 7)
    assert document_range(np.array([[0]], np.uint32)) == (0, 0)
    assert document_range(np.full((2, 3), none, np.uint32)) is None
