"""Exact entries, tails, entropy and label log-probs against float64 arithmetic."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipelines.sampling import position_bits
from pipelines.targets import TargetSettings, select_targets

select = jax.jit(select_targets, static_argnames="settings")


def run(logits, settings, labels=None, row=0, first=0, legal=None):
    """`select_targets` as numpy, for positions `first`, `first` + 1, … of one row."""
    logits = np.asarray(logits, np.float32)
    if labels is None:
        labels = np.full(len(logits), -1)
    places = jnp.arange(first, first + len(logits), dtype=jnp.int32)
    bits = position_bits(settings.seed, jnp.int32(row), places)
    targets = select(
        jnp.asarray(logits),
        jnp.asarray(labels, jnp.int32),
        settings=settings,
        bits=bits,
        legal=None if legal is None else jnp.asarray(legal),
    )
    return jax.tree.map(np.asarray, targets)


def log_softmax(logits, temperature=1.0):
    """float64, of the float32 logits that the code under test gets."""
    x = np.asarray(logits, np.float32).astype(np.float64) / temperature
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def log_mass(logprobs, keep):
    """float64 log of the mass of the tokens where `keep`; -inf for none."""
    x = np.where(keep, logprobs, -np.inf)
    top = x.max(axis=-1, keepdims=True)
    safe = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return (np.log(np.exp(x - safe).sum(axis=-1, keepdims=True)) + safe)[..., 0]


def best_ids(logits, k):
    """The k most likely ids, ties by lower id; -1 behind the last possible one."""
    logits = np.asarray(logits, np.float32)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    return np.where(np.take_along_axis(logits, order, axis=-1) > -np.inf, order, -1)


def check_exact(logits, targets, settings, labels):
    """Everything about exact entries that does not depend on how many there are."""
    logits = np.asarray(logits, np.float32)
    positions, vocabulary = logits.shape
    logprobs = log_softmax(logits)
    is_exact = np.arange(settings.k)[None, :] < targets.exact_counts[:, None]
    best = best_ids(logits, settings.k)
    np.testing.assert_array_equal(targets.ids[is_exact], best[is_exact])
    expected = np.take_along_axis(logprobs, np.maximum(best, 0), axis=-1)
    np.testing.assert_allclose(targets.logprobs[is_exact], expected[is_exact], rtol=3e-7, atol=3e-6)
    assert np.isnan(targets.logprobs[~is_exact]).all()

    outside = np.ones((positions, vocabulary), bool)
    for n in range(positions):
        outside[n, best[n, : targets.exact_counts[n]]] = False
    for column, temperature in enumerate(settings.temperatures):
        expected = log_mass(log_softmax(logits, temperature), outside)
        np.testing.assert_allclose(targets.tail_logprobs[:, column], expected, rtol=3e-7, atol=4e-6)

    with np.errstate(invalid="ignore"):
        terms = np.where(logprobs > -np.inf, np.exp(logprobs) * logprobs, 0.0)
    np.testing.assert_allclose(targets.entropy, -terms.sum(axis=-1), rtol=1e-6, atol=2e-6)
    has_label = (labels >= 0) & (labels < vocabulary)
    expected = logprobs[np.arange(positions), np.clip(labels, 0, vocabulary - 1)]
    np.testing.assert_allclose(
        targets.label_logprobs[has_label], expected[has_label], rtol=3e-7, atol=4e-6
    )
    assert np.isnan(targets.label_logprobs[~has_label]).all()
    assert targets.finite.all()


SIZES = [
    (1, 1, "none"),
    (2, 2, "sampled"),
    (2, 1, "none"),
    (5, 3, "sampled"),
    (64, 64, "none"),
    (64, 64, "sampled"),
    (65, 64, "none"),
    (65, 64, "sampled"),
    (1000, 7, "none"),
    (1000, 7, "sampled"),
    (1000, 1000, "none"),
    (49_152, 64, "none"),
    (49_152, 64, "sampled"),
    (70_000, 16, "none"),
    (131_072, 64, "none"),
    (151_936, 32, "sampled"),
    (262_144, 64, "none"),
    (262_144, 32, "sampled"),
]


@pytest.mark.parametrize(("vocabulary", "k", "tail"), SIZES)
def test_against_float64(vocabulary, k, tail):
    rng = np.random.default_rng(vocabulary + k)
    positions = 6 if vocabulary <= 1000 else 3
    logits = rng.normal(size=(positions, vocabulary)) * np.array([0.1, 3, 20] * 2)[:positions, None]
    logits[0, vocabulary - 1] = 12.0  # the last id, beyond 16 bits in large vocabularies
    labels = np.append(rng.integers(0, vocabulary, positions - 1), -1)
    temperatures = (0.5, 1.0, 2.0, 4.0) if tail == "none" else (2.0,)
    settings = TargetSettings(
        k=k,
        vocabulary=vocabulary,
        tail=tail,
        exact=min(4, max(k - 1, 1)),
        temperatures=temperatures,
    )
    targets = run(logits, settings, labels)
    check_exact(logits, targets, settings, labels)
    if tail == "none" or k == vocabulary:
        assert (targets.exact_counts == k).all()
    else:
        assert (targets.exact_counts >= min(4, k - 1)).all()
        assert (targets.exact_counts < k).all()
    assert targets.ids[0, 0] == vocabulary - 1
    assert (targets.ids >= 0).all()
    assert (targets.ids < vocabulary).all()


def test_exact_entries_at_another_temperature_follow_from_the_tail():
    settings = TargetSettings(k=2, vocabulary=4, temperatures=(1.0, 2.0))
    targets = run([[4.0, 2.0, 0.0, 0.0]], settings)
    np.testing.assert_array_equal(targets.ids, [[0, 1]])
    tail = np.exp(targets.tail_logprobs[0, 1])
    weights = np.exp(targets.logprobs[0] / 2)
    at_two = (1 - tail) * weights / weights.sum()
    np.testing.assert_allclose(at_two, [0.610296, 0.224515], atol=1e-6)
    np.testing.assert_allclose(tail, 0.165189, atol=1e-6)
    np.testing.assert_allclose(np.exp(targets.logprobs[0]).sum(), 0.968744, atol=1e-6)


def test_log_probs_of_a_large_flat_vocabulary_keep_float32_accuracy():
    vocabulary = 151_936
    settings = TargetSettings(k=4, vocabulary=vocabulary, temperatures=(1.0,))
    targets = run(np.full((1, vocabulary), 3.7), settings)
    np.testing.assert_allclose(targets.logprobs, -11.93121, atol=5e-6)
    np.testing.assert_array_equal(targets.ids, [[0, 1, 2, 3]])
    mass = np.exp(targets.logprobs.astype(np.float64)).sum() + np.exp(
        targets.tail_logprobs[0, 0].astype(np.float64)
    )
    np.testing.assert_allclose(mass, 1.0, atol=1e-6)
    np.testing.assert_allclose(targets.entropy, np.log(vocabulary), atol=5e-6)


def test_a_label_outside_the_vocabulary_is_no_label():
    settings = TargetSettings(k=2, vocabulary=3)
    labels = [2, -1, -100, 3, 2**31 - 1, -(2**31)]
    targets = run([[1.0, 2.0, 3.0]] * len(labels), settings, labels)
    np.testing.assert_allclose(-targets.label_logprobs[0], 0.407606, atol=1e-6)
    assert np.isnan(targets.label_logprobs[1:]).all()
    np.testing.assert_array_equal(targets.logprobs[1:], targets.logprobs[:1].repeat(5, axis=0))


@pytest.mark.parametrize("tail", ["none", "sampled"])
def test_ids_without_a_token_take_no_part(tail):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(50, 18))
    logits[:, [3, 11]] = 50.0
    legal = np.ones(18, bool)
    legal[[3, 11]] = False
    settings = TargetSettings(k=16, vocabulary=18, tail=tail, exact=4)
    targets = run(logits, settings, legal=legal)
    assert not np.isin(targets.ids, [3, 11]).any()
    if tail == "none":
        mass = np.exp(targets.logprobs.astype(np.float64)).sum(axis=-1)
        np.testing.assert_allclose(mass, 1.0, atol=1e-6)
        assert (targets.tail_logprobs == -np.inf).all()


@pytest.mark.parametrize(("vocabulary", "k"), [(100, 5), (3000, 64), (20_000, 1), (20_000, 64)])
def test_ties_go_to_the_lower_id_whatever_block_they_lie_in(vocabulary, k):
    rng = np.random.default_rng(1)
    logits = rng.integers(-3, 4, size=(40, vocabulary)).astype(np.float32)
    logits[20:] = rng.integers(-40, 41, size=(20, vocabulary))
    logits[:, ::7] *= -1.0  # makes -0 of some zeros, which equals 0
    logits[10:20] = np.minimum(logits[10:20], 0.0)
    targets = run(logits, TargetSettings(k=k, vocabulary=vocabulary))
    np.testing.assert_array_equal(targets.ids, best_ids(logits, k))


@pytest.mark.parametrize("tail", ["none", "sampled"])
def test_impossible_tokens_leave_empty_slots(tail):
    logits = np.full((3, 300), -np.inf)
    logits[0, [7, 250]] = [1.0, 2.0]
    logits[1, 299] = -3.0e5
    logits[2, :8] = 0.0
    settings = TargetSettings(k=8, vocabulary=300, tail=tail, exact=1)
    targets = run(logits, settings, [7, 0, 299])
    np.testing.assert_array_equal(targets.exact_counts, [2, 1, 8])
    np.testing.assert_array_equal(targets.ids[0], [250, 7] + [-1] * 6)
    np.testing.assert_array_equal(targets.ids[1], [299] + [-1] * 7)
    np.testing.assert_array_equal(targets.ids[2], range(8))
    assert (targets.tail_logprobs == -np.inf).all()
    np.testing.assert_allclose(targets.label_logprobs, [-1.313262, -np.inf, -np.inf], atol=1e-6)
    np.testing.assert_allclose(targets.entropy, [0.582203, 0.0, np.log(8)], atol=1e-6)
    assert np.isnan(targets.logprobs[0, 2:]).all()


def test_masses_far_below_the_smallest_float_stay_numbers():
    settings = TargetSettings(k=2, vocabulary=200, temperatures=(1.0, 2.0))
    logits = np.full((2, 200), -1000.0)
    logits[:, 5] = 0.0
    logits[0, 9] = -200.0
    targets = run(logits, settings)
    np.testing.assert_array_equal(targets.ids, [[5, 9], [5, 0]])
    np.testing.assert_array_equal(targets.logprobs, [[0.0, -200.0], [0.0, -1000.0]])
    np.testing.assert_array_equal(targets.exact_counts, [2, 2])
    expected = np.array([[-1000, -500], [-1000, -500]]) + np.log(198)
    np.testing.assert_allclose(targets.tail_logprobs, expected, rtol=1e-6)
    sampled = dataclasses.replace(settings, k=5, tail="sampled", temperatures=(1.0,), exact=1)
    targets = run(logits, sampled)
    assert (targets.ids >= 0).all()
    np.testing.assert_array_equal(targets.exact_counts, [2, 1])
    np.testing.assert_allclose(targets.tail_logprobs[:, 0], -1000 + np.log([198, 199]), rtol=1e-6)


def test_logits_near_the_largest_float():
    settings = TargetSettings(k=3, vocabulary=4, temperatures=(0.001, 1.0))
    targets = run([[3.0e38, -3.0e38, 3.0e38, 2.9e38]], settings)
    np.testing.assert_array_equal(targets.ids[0], [0, 2, 3])
    np.testing.assert_allclose(targets.logprobs[0, :2], -np.log(2), rtol=1e-6)
    np.testing.assert_allclose(targets.entropy, np.log(2), rtol=1e-6)
    assert (targets.tail_logprobs == -np.inf).all()


@pytest.mark.parametrize(("vocabulary", "tail"), [(6, "none"), (6, "sampled"), (9000, "none")])
def test_positions_without_a_distribution_are_marked_and_hold_fixed_values(tail, vocabulary):
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(8, vocabulary)).astype(np.float32)
    whole = logits.copy()
    logits[1, 3] = np.nan
    logits[2, vocabulary - 1] = -np.nan  # the other sign: sorts last instead of first
    logits[3, 0] = np.inf
    logits[4] = -np.inf
    logits[5] = np.nan
    logits[6, [1, 2]] = np.inf
    bad = np.isin(np.arange(8), [1, 2, 3, 4, 5, 6])
    settings = TargetSettings(k=4, vocabulary=vocabulary, tail=tail, exact=2)
    targets = run(logits, settings, np.zeros(8))
    np.testing.assert_array_equal(targets.finite, ~bad)
    assert (targets.ids[bad] == -1).all()
    assert (targets.exact_counts[bad] == 0).all()
    for values in (targets.logprobs, targets.tail_logprobs, targets.entropy):
        assert np.isnan(values[bad]).all()
    assert np.isnan(targets.label_logprobs[bad]).all()
    good = run(whole, settings, np.zeros(8))
    assert good.finite.all()
    np.testing.assert_array_equal(targets.ids[~bad], good.ids[~bad])
    np.testing.assert_array_equal(targets.entropy[~bad], good.entropy[~bad])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("k", 0, "k is 0; allowed are whole numbers from 1 to 50 .the vocabulary."),
        ("k", 51, "k is 51; allowed are whole numbers from 1 to 50 .the vocabulary."),
        ("k", 4.0, "k is 4.0; allowed are whole numbers"),
        ("vocabulary", 0, "vocabulary is 0; allowed are whole numbers from 1"),
        ("chunk", 0, "chunk is 0; allowed are whole numbers from 1"),
        ("seed", -1, "seed is -1; allowed are whole numbers from 0 to 4294967295"),
        ("seed", True, "seed is True"),
        ("k", 1, "k is 1; allowed are whole numbers from 2 to 50 .the vocabulary."),
        ("exact", 0, r"exact is 0; allowed are whole numbers from 1 to 7 \(k - 1\)"),
        ("exact", 8, r"exact is 8; allowed are whole numbers from 1 to 7 \(k - 1\)"),
        ("tail", "bucket", 'tail is \'bucket\'; allowed are "none" and "sampled"'),
        ("temperatures", (), r"temperatures is \(\); expected a tuple of at least one"),
        ("temperatures", (0.0,), "temperatures holds 0.0; allowed are finite numbers above 0"),
        ("temperatures", (float("nan"),), "temperatures holds nan"),
        ("temperatures", (float("inf"),), "temperatures holds inf"),
        ("temperatures", (1.0, 2.0), "a sampled tail allows exactly one, the capture temperature"),
        ("temperatures", (2.0, 1.0), r"temperatures is \(2.0, 1.0\).*strictly ascending"),
        ("temperatures", (1.0, 1.0), "strictly ascending"),
    ],
)
def test_settings_say_what_is_allowed(field, value, message):
    settings = TargetSettings(k=8, vocabulary=50, tail="sampled", exact=2)
    object.__setattr__(settings, field, value)  # past the type checker that tests run under
    with pytest.raises(ValueError, match=message):
        settings.__post_init__()


def test_settings_ignore_exact_without_a_sampled_tail():
    assert TargetSettings(k=2, vocabulary=9, exact=8).k == 2


def test_settings_refuse_more_draws_than_can_be_kept_apart():
    with pytest.raises(ValueError, match="k - exact is 9999 sampled entries per position"):
        TargetSettings(k=10_000, vocabulary=49_152, tail="sampled", exact=1)


def test_logits_of_another_width_are_refused():
    with pytest.raises(ValueError, match="logits have 24 columns; expected the 18"):
        run(np.zeros((2, 24)), TargetSettings(k=2, vocabulary=18))


def test_a_sampled_tail_needs_random_bits():
    settings = TargetSettings(k=2, vocabulary=18, tail="sampled")
    with pytest.raises(ValueError, match="a sampled tail needs bits"):
        select_targets(jnp.zeros((1, 18)), jnp.zeros((1,), jnp.int32), settings)
