"""Rows of a cache as a sample: what is listed, what is assumed, what is refused."""

import numpy as np
import pytest

import cache
from pipelines.compare_cache import CacheSample
from pipelines.errors import CaptureError
from tests.cache.builder import make_cache


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return make_cache(tmp_path_factory.mktemp("c") / "cache", rows=9, logprobs="float32")


def test_listed_tokens_are_the_entries_and_the_student_their_mean(built):
    sample = CacheSample(cache.open(built.path), 100, 0)
    assert (sample.rows, sample.length, sample.vocabulary) == (9, 8, 60)
    assert sample.tokens == np.count_nonzero(built.arrays["segments"])
    log_p = built.log_probabilities()
    label = built.arrays["label_mask"] == 1
    mean, count = np.zeros(60), 0
    for row, position in np.argwhere(label):
        ids = built.arrays["target_ids"][row, position].astype(np.int64)
        p = np.exp(log_p[row, position])
        mean += (1 - p[ids].sum()) / 60
        mean[ids] += p[ids]
        count += 1
    mean /= count
    seen = 0
    for row, chunk in enumerate(sample.chunks(6, [])):
        assert chunk.row == row
        np.testing.assert_array_equal(chunk.where, np.flatnonzero(label[row]))
        ids = built.arrays["target_ids"][row, chunk.where].astype(np.int64)
        np.testing.assert_array_equal(chunk.positions.ids, ids)
        expected = np.take_along_axis(np.exp(log_p[row, chunk.where]), ids, axis=1)
        # The tail's mass is float16, and the entries share the rest.
        np.testing.assert_allclose(chunk.positions.p, expected, rtol=2e-3)
        np.testing.assert_allclose(chunk.positions.q, mean[ids], rtol=2e-3)
        np.testing.assert_allclose(
            chunk.positions.beyond.mass.p, 1 - expected.sum(axis=1), rtol=2e-3
        )
        total = chunk.positions.beyond.mass.q + chunk.positions.q.sum(axis=1)
        np.testing.assert_allclose(total, 1.0, rtol=1e-9)
        seen += len(chunk.where)
    assert seen == count


def test_rows_are_chosen_by_the_seed(built):
    opened = cache.open(built.path)
    rows = {
        seed: np.concatenate([x.rows["tokens"] for x in CacheSample(opened, 3, seed).chunks(6, [])])
        for seed in (0, 1)
    }
    assert rows[0].shape == (3, 8)
    assert (rows[0] != rows[1]).any()
    every = built.arrays["tokens"].tolist()
    places = [every.index(row) for row in rows[0].tolist()]
    assert places == sorted(places)


def test_more_than_the_cache_holds_is_refused(built):
    sample = CacheSample(cache.open(built.path), 3, 0)
    with pytest.raises(ValueError, match="k = 6 exact entries has no more"):
        next(sample.chunks(7, []))
    with pytest.raises(ValueError, match="has no more"):
        next(sample.chunks(6, [(4, 1)]))


def test_a_sampled_tail_or_another_temperature_is_refused(tmp_path):
    sampled = make_cache(tmp_path / "sampled", tail="sampled")
    with pytest.raises(CaptureError, match="has a sampled tail"):
        CacheSample(cache.open(sampled.path), 3, 0)
    hot = make_cache(tmp_path / "hot", temperatures=(2.0, 4.0))
    with pytest.raises(CaptureError, match="at temperature 2, 4, and a comparison needs it at 1"):
        CacheSample(cache.open(hot.path), 3, 0)


def test_rows_without_a_label_are_refused(tmp_path):
    # Row 5 of the builder's rows holds one token alone.
    built = make_cache(tmp_path / "cache", rows=6)
    opened = cache.open(built.path)
    assert not (built.arrays["label_mask"][5] == 1).any()
    for seed in range(50):
        if np.random.default_rng(seed).choice(6, 1, replace=False) == 5:
            break
    with pytest.raises(CaptureError, match=r"the 1 rows chosen .* have no label"):
        CacheSample(opened, 1, seed)
