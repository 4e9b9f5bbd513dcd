"""The sampled tail: which ids, how often, and how many, against float64 arithmetic."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipelines import sampling
from pipelines.sampling import position_bits
from pipelines.targets import TargetSettings, select_targets

POSITIONS = 4096


@functools.partial(jax.jit, static_argnames="settings")
def sample(logits, row, settings):
    """Targets of `POSITIONS` positions of a row; `logits` [positions or 1, vocabulary]."""
    places = jnp.arange(POSITIONS, dtype=jnp.int32)
    logits = jnp.broadcast_to(logits, (POSITIONS, logits.shape[1]))
    labels = jnp.full((POSITIONS,), -1, jnp.int32)
    return select_targets(logits, labels, settings, position_bits(settings.seed, row, places))


def draws(logits, settings, rows=1, first_row=0):
    """(ids, exact counts, tail log-probs) of `rows` * POSITIONS positions, as numpy."""
    parts = []
    for row in range(first_row, first_row + rows):
        t = sample(jnp.asarray(logits, jnp.float32), jnp.int32(row), settings)
        parts.append(tuple(map(np.asarray, (t.ids, t.exact_counts, t.tail_logprobs[:, 0]))))
    return tuple(np.concatenate(x) for x in zip(*parts, strict=True))


def softmax(logits, temperature):
    x = np.asarray(logits, np.float32).astype(np.float64) / temperature
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def reference_heads(logits, temperature, k, exact):
    """(h, whether float32 may differ) for each row of logits, in float64."""
    p = softmax(logits, temperature)
    ordered = -np.sort(-p, axis=-1)
    rest = np.cumsum(ordered[:, ::-1], axis=-1)[:, ::-1]  # mass of this token and those behind
    h = np.arange(k)[None, :]
    left, right = ordered[:, :k] * (k - 1 - h), rest[:, 1 : k + 1]
    if p.shape[1] <= k:
        right = np.pad(right, ((0, 0), (0, k - right.shape[1])))
        left = np.pad(left, ((0, 0), (0, k - left.shape[1])))
    allowed = h >= exact
    enough = (left < right) & allowed
    unsure = (np.abs(left - right) <= 1e-5 * right) & (right > 0) & (h < k - 1) & allowed
    possible = (logits > -np.inf).sum(axis=1)
    heads = np.where(enough.any(axis=1), enough.argmax(axis=1), possible.clip(max=k))
    return heads, unsure.any(axis=1)


def check_legal(logits, ids, counts, settings):
    """Ids are distinct, possible, ascending behind the head, and k in number."""
    logits = np.asarray(logits, np.float32)
    slots = np.arange(settings.k)[None, :]
    possible = (logits > -np.inf).sum(axis=1)
    entries = np.minimum(possible, settings.k)
    np.testing.assert_array_equal(ids >= 0, slots < np.broadcast_to(entries, len(ids))[:, None])
    filled = ids >= 0
    assert ids.max() < logits.shape[1]
    chosen = np.take_along_axis(
        np.broadcast_to(logits, (len(ids), logits.shape[1])), np.maximum(ids, 0), axis=1
    )
    assert (chosen[filled] > -np.inf).all()
    in_order = np.sort(np.where(filled, ids, -1 - slots), axis=1)
    assert (np.diff(in_order, axis=1) > 0).all(), "an id is drawn twice"
    behind = (slots[:, 1:] > counts[:, None]) & filled[:, 1:]
    assert (np.diff(ids, axis=1)[behind] > 0).all(), "sampled ids do not ascend"
    assert (counts >= np.minimum(settings.exact, entries)).all()


def distributions(vocabulary):
    """Logits [vocabulary] of several shapes."""
    rng = np.random.default_rng(vocabulary)
    rank = np.arange(1, vocabulary + 1)
    shapes = {
        "normal": rng.normal(size=vocabulary) * 2,
        "zipf": -1.2 * np.log(rng.permutation(rank)),
        "flat": np.zeros(vocabulary),
        "peaked": np.where(rank == 9, 12.0, rng.normal(size=vocabulary)),
        "steps": (rng.integers(0, 3, vocabulary) * 2.0),
    }
    return shapes


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("shape", list(distributions(2)))
def test_weights_are_unbiased_and_of_the_stated_variance(shape, temperature):
    vocabulary, k, exact = 300, 12, 3
    logits = distributions(vocabulary)[shape][None, :].astype(np.float32)
    settings = TargetSettings(
        k=k, vocabulary=vocabulary, tail="sampled", exact=exact, temperatures=(temperature,)
    )
    ids, counts, tails = draws(logits, settings, rows=10)
    check_legal(logits, ids, counts, settings)
    p = softmax(logits, temperature)[0]
    heads, _ = reference_heads(logits, temperature, k, exact)
    h = counts[0]
    assert (counts == h).all()
    assert h == heads[0]
    head = ids[0, :h]
    assert (ids[:, :h] == head).all()
    tail = np.setdiff1d(np.arange(vocabulary), head)
    tau = p[tail].sum() / (k - h)
    np.testing.assert_allclose(np.exp(tails), p[tail].sum(), rtol=2e-6)

    n = len(ids)
    inclusion = p[tail] / tau
    assert (inclusion < 1 + 1e-9).all()
    hits = np.bincount(ids[:, h:].ravel(), minlength=vocabulary)[tail]
    sigma = np.sqrt(n * inclusion * (1 - inclusion).clip(0))
    assert (np.abs(hits - n * inclusion) <= 5 * sigma + 3).all()
    common = sigma > 3
    score = (((hits - n * inclusion) / np.maximum(sigma, 1))[common] ** 2).sum()
    # Draws without replacement: a little below one per token, and never far above.
    assert score < common.sum() + 6 * np.sqrt(2 * common.sum())

    square = (tau - p) ** 2 - p**2  # of an estimate's squared error: drawn less not drawn
    errors = square[ids[:, h:]].sum(axis=1) + (p[tail] ** 2).sum()
    expected = (p[tail] * (tau - p[tail])).sum()
    assert abs(errors.mean() - expected) <= 5 * errors.std() / np.sqrt(n) + 1e-6 * expected


def test_weights_read_back_sum_to_one():
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(POSITIONS, 300)) * rng.uniform(0.1, 8, size=(POSITIONS, 1))
    for temperature in (1.0, 2.0):
        settings = TargetSettings(
            k=16, vocabulary=300, tail="sampled", exact=4, temperatures=(temperature,)
        )
        t = jax.tree.map(np.asarray, sample(jnp.asarray(logits, jnp.float32), 0, settings))
        head = np.arange(16)[None, :] < t.exact_counts[:, None]
        tail = np.exp(t.tail_logprobs[:, 0].astype(np.float64))
        weights = np.where(head, np.exp(t.logprobs.astype(np.float64) / temperature), 0.0)
        if temperature == 1.0:
            np.testing.assert_allclose(weights.sum(axis=1) + tail, 1.0, atol=1e-6)
        weights *= ((1 - tail) / weights.sum(axis=1))[:, None]
        tau = tail / np.maximum(16 - t.exact_counts, 1)
        weights = np.where(head, weights, tau[:, None])
        np.testing.assert_allclose(weights.sum(axis=1), 1.0, atol=1e-6)
        p = softmax(logits, temperature)
        stored = np.take_along_axis(p, t.ids, axis=1)
        np.testing.assert_allclose(weights[head], stored[head], atol=2e-6)
        assert (stored <= tau[:, None] * (1 + 1e-5))[~head].all()


def adversarial(rng, vocabulary, k):
    """Logits on which rounding could draw a token twice, [POSITIONS, vocabulary]."""
    n = POSITIONS // 8
    rank = np.argsort(rng.random((POSITIONS, vocabulary)), axis=1)
    logits = np.empty((POSITIONS, vocabulary))
    part = [slice(i * n, (i + 1) * n) for i in range(8)]
    # The head holds nearly all mass, over a noisy floor.
    gap = rng.uniform(5, 60, size=(n, 1))
    logits[part[0]] = rng.normal(size=(n, vocabulary)) * 0.01
    logits[part[0]] += np.where(rank[part[0]] < 3, gap, 0.0)
    # A plateau of k - 2 ... k + 3 equal tokens, and next to nothing beyond.
    plateau = k + rng.integers(-2, 4, size=(n, 1))
    logits[part[1]] = np.where(rank[part[1]] < plateau, 0.0, -rng.uniform(8, 40, size=(n, 1)))
    # The same plateau with noise in the last bits.
    noise = rng.normal(size=(n, vocabulary)) * 1e-6
    logits[part[2]] = np.where(rank[part[2]] < plateau, noise, -rng.uniform(10, 25, size=(n, 1)))
    # Geometric decays.
    logits[part[3]] = -rank[part[3]] * rng.uniform(1e-4, 5, size=(n, 1))
    # Flat, up to the last bits.
    logits[part[4]] = rng.normal(size=(n, vocabulary)) * 10.0 ** rng.uniform(-8, -2, size=(n, 1))
    # Some tokens at the border between exact and sampled.
    many = rng.integers(1, k, size=(n, 1))
    rest = np.log((vocabulary - many) / np.maximum(k - 1 - many, 1))
    logits[part[5]] = np.where(rank[part[5]] < many, rest, 0.0)
    logits[part[5]] += rng.normal(size=(n, vocabulary)) * 10.0 ** rng.uniform(-8, -3, size=(n, 1))
    # Two equal tokens and 1e-7 left.
    logits[part[6]] = np.where(rank[part[6]] < 2, 0.0, np.log(1e-7 / vocabulary))
    # Few possible tokens.
    logits[part[7]] = np.where(
        rank[part[7]] < rng.integers(1, 2 * k, size=(n, 1)),
        rng.normal(size=(n, vocabulary)),
        -np.inf,
    )
    return logits.astype(np.float32)


@pytest.mark.parametrize(
    ("vocabulary", "k", "exact", "temperature", "rows"),
    [
        (200, 8, 1, 1.0, 16),
        (200, 64, 1, 2.0, 12),
        (400, 32, 8, 1.0, 10),
        (200, 2, 1, 1.0, 4),
        (200, 200, 1, 1.0, 1),
    ],
)
def test_ids_are_distinct_and_complete_on_adversarial_logits(
    vocabulary, k, exact, temperature, rows
):
    settings = TargetSettings(
        k=k, vocabulary=vocabulary, tail="sampled", exact=exact, temperatures=(temperature,)
    )
    for row in range(rows):
        logits = adversarial(np.random.default_rng(row), vocabulary, min(k, vocabulary // 2))
        ids, counts, _ = draws(logits, settings, first_row=row)
        check_legal(logits, ids, counts, settings)
        heads, unsure = reference_heads(logits, temperature, k, exact)
        assert (counts == heads)[~unsure].all()
        assert unsure.mean() < 0.5 or k == vocabulary


def test_many_draws_from_a_flat_vocabulary_are_distinct():
    rng = np.random.default_rng(0)
    settings = TargetSettings(k=2000, vocabulary=3000, tail="sampled", exact=1)
    places = jnp.arange(64, dtype=jnp.int32)
    for scale in (0.0, 1e-3, 0.3):
        logits = jnp.asarray(rng.normal(size=(64, 3000)) * scale, jnp.float32)
        t = jax.jit(select_targets, static_argnames="settings")(
            logits, places, settings=settings, bits=position_bits(0, jnp.int32(0), places)
        )
        check_legal(logits, np.asarray(t.ids), np.asarray(t.exact_counts), settings)


@pytest.mark.parametrize("vocabulary", [49_152, 262_144])
def test_groups_of_a_large_vocabulary_are_drawn_in_proportion(vocabulary):
    rng = np.random.default_rng(3)
    logits = (rng.normal(size=(1, vocabulary)) * 2.5).astype(np.float32)
    settings = TargetSettings(k=32, vocabulary=vocabulary, tail="sampled", exact=8)
    n = 64

    @jax.jit
    def ids_of(row):
        places = jnp.arange(n, dtype=jnp.int32)
        return select_targets(
            jnp.broadcast_to(logits, (n, vocabulary)),
            jnp.full((n,), -1, jnp.int32),
            settings,
            position_bits(settings.seed, row, places),
        )[:3]

    ids, _, counts = (
        np.concatenate(x)
        for x in zip(*(map(np.asarray, ids_of(jnp.int32(r))) for r in range(5)), strict=True)
    )
    check_legal(logits, ids, counts, settings)
    p = softmax(logits, 1.0)[0]
    h = counts[0]
    p[ids[0, :h]] = 0.0
    tau = p.sum() / (32 - h)
    sampled = ids[:, h:].ravel()
    for groups in (
        np.arange(vocabulary) * 48 // vocabulary,
        np.argsort(np.argsort(-p)) * 48 // vocabulary,
    ):
        expected = len(ids) * np.bincount(groups, weights=p, minlength=48) / tau
        found = np.bincount(groups[sampled], minlength=48)
        assert (np.abs(found - expected) <= 5 * np.sqrt(expected) + 3).all()


@pytest.mark.parametrize("vocabulary", [4, 5, 9, 300])
@pytest.mark.parametrize("exact", [1, 2, 3])
def test_something_is_drawn_wherever_the_tail_has_mass(vocabulary, exact):
    rng = np.random.default_rng(0)
    logits = np.stack([rng.normal(size=vocabulary) * scale for scale in (0, 1, 30, 300)])
    logits = np.concatenate([logits, logits]).astype(np.float32)
    logits[4:, 3:] = -np.inf
    settings = TargetSettings(k=4, vocabulary=vocabulary, tail="sampled", exact=exact)
    places = jnp.arange(8, dtype=jnp.int32)
    found = select_targets(
        jnp.asarray(logits), places, settings, position_bits(0, jnp.int32(0), places)
    )
    possible = (logits > -np.inf).sum(axis=1)
    beyond = possible > 4
    drawn = (np.asarray(found.ids) >= 0).sum(axis=1) - np.asarray(found.exact_counts)
    assert (drawn[beyond] >= 1).all()
    np.testing.assert_array_equal(np.asarray(found.exact_counts)[~beyond], possible[~beyond])
    np.testing.assert_array_equal(np.asarray(found.tail_logprobs)[:, 0] > -np.inf, beyond)


def test_bits_depend_on_seed_row_and_position_alone():
    places = jnp.arange(64, dtype=jnp.int32)
    bits = np.asarray(position_bits(7, jnp.int32(5), places))
    assert len(np.unique(bits, axis=0)) == 64
    order = np.random.default_rng(0).permutation(64)
    again = position_bits(7, jnp.int32(5), places[order])
    np.testing.assert_array_equal(np.asarray(again), bits[order])
    for seed, row in ((8, 5), (7, 6), (5, 7), (2**32 - 1, 5)):
        other = np.asarray(position_bits(seed, jnp.int32(row), places))
        assert (other != bits).any(axis=1).all()
    root = threefry((0, 7), (0, 5))
    expected = [threefry(root, (0, position)) for position in range(64)]
    np.testing.assert_array_equal(bits, expected)


def threefry(key, counter):
    """Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror, Shaw, SC 2011)."""
    word = 2**32 - 1
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (counter[0] + keys[0]) & word, (counter[1] + keys[1]) & word
    for step in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[step % 2]:
            x = (x + y) & word
            y = ((y << turn | y >> (32 - turn)) & word) ^ x
        x = (x + keys[(step + 1) % 3]) & word
        y = (y + keys[(step + 2) % 3] + step + 1) & word
    return x, y


def test_offsets_are_uniform():
    words = np.concatenate(
        [
            np.asarray(position_bits(0, jnp.int32(r), jnp.arange(4096, dtype=jnp.int32)))
            for r in range(8)
        ]
    )
    for word in words.T:
        counts = np.bincount(word >> 24, minlength=256)
        expected = len(words) / 256
        assert ((counts - expected) ** 2 / expected).sum() < 256 + 6 * np.sqrt(2 * 256)


def test_an_interval_of_the_top_k_holds_one_point_at_most():
    rng = np.random.default_rng(0)
    bits, n = 4, 6  # units small enough to try every offset
    unit = 2**bits
    wanted = rng.integers(1, n + 1, size=2000)
    lengths = rng.integers(0, unit + 4, size=(2000, n))  # rounding may have made some too long
    lengths[:1000] = unit - rng.integers(-1, 2, size=(1000, n))
    lengths = np.where(np.arange(n)[None, :] >= n - wanted[:, None], lengths, 0)
    beyond = rng.integers(0, 2 * unit, size=2000)
    total = (wanted * unit).astype(np.int32)
    ends, start = sampling._top_intervals(
        jnp.asarray(lengths, jnp.int32), jnp.asarray(beyond, jnp.int32), total, jnp.int32(unit)
    )
    ends, start = np.asarray(ends), np.asarray(start)
    in_head = np.arange(n)[None, :] < n - wanted[:, None]
    assert (ends[in_head] <= 0).all()
    steps = np.diff(np.maximum(ends, 0), axis=1, prepend=0)
    assert (steps >= 0).all()
    assert (steps <= unit).all()
    np.testing.assert_array_equal(start, np.maximum(total - beyond, 0))
    np.testing.assert_array_equal(ends[:, -1], start)
    hits = np.zeros_like(steps)
    for offset in range(unit):
        below = np.asarray(sampling._points_below(ends, np.int32(offset), bits))
        points = np.arange(n)[None, None, :] * unit + offset
        np.testing.assert_array_equal(below, (points < ends[:, :, None]).sum(axis=2))
        hits += np.diff(below, axis=1, prepend=0)
    np.testing.assert_array_equal(hits, steps)
