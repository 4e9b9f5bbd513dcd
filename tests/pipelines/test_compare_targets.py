"""What settings store and lose: through the real selection, encoding and compression."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cache.encoding import encode_shard, weights
from cache.format import SEALS
from pipelines.compare_beyond import DenseBeyond
from pipelines.compare_measure import Positions, measure
from pipelines.compare_options import Setting
from pipelines.compare_targets import (
    Chunk,
    Comparing,
    entry_masses,
    fewer,
    reconstruct,
    stored_bytes,
)
from pipelines.sampling import position_bits
from pipelines.targets import TargetSettings, select_targets
from tests.cache.builder import make_cache

V, LENGTH = 90, 12
TEMPERATURES = (1.0, 2.0, 4.0)


def log_softmax(x):
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def logits():
    random = np.random.default_rng(0)
    return (random.normal(size=(LENGTH, V)) * 2).astype(np.float32)


_select = jax.jit(select_targets, static_argnames="settings")


def select(logits, settings, row=0):
    """Real targets of one row as `encode_shard` takes them, [1, n, …]."""
    places = jnp.arange(len(logits), dtype=jnp.int32)
    bits = position_bits(settings.seed, jnp.int32(row), places)
    labels = jnp.zeros(len(logits), jnp.int32)
    found = _select(jnp.asarray(logits), labels, settings=settings, bits=bits)
    values = {name: np.asarray(value)[None] for name, value in found._asdict().items()}
    del values["finite"]
    return values


def exact_targets(logits, k):
    """Exact targets of one row in float64, rounded once at the end, [1, n, …]."""
    x = logits.astype(np.float64)
    log_p = log_softmax(x)
    ids = np.argsort(-x, axis=1, kind="stable")[:, :k]
    outside = np.ones(x.shape, bool)
    np.put_along_axis(outside, ids, False, axis=1)
    with np.errstate(divide="ignore"):
        tails = [
            np.log(np.where(outside, np.exp(log_softmax(x / t)), 0.0).sum(axis=1))
            for t in TEMPERATURES
        ]
    values = {
        "ids": ids.astype(np.int32),
        "logprobs": np.take_along_axis(log_p, ids, axis=1).astype(np.float32),
        "exact_counts": np.full(len(x), k, np.int32),
        "tail_logprobs": np.stack(tails, axis=1).astype(np.float32),
        "label_logprobs": log_p[:, 0].astype(np.float32),
        "entropy": -(np.exp(log_p) * log_p).sum(axis=1).astype(np.float32),
    }
    return {name: value[None] for name, value in values.items()}


def rows_of(n):
    mask = np.ones((1, n), np.uint8)
    mask[:, -1] = 0
    one = np.ones((1, n), np.uint32)
    return {"tokens": one, "segments": one, "documents": one, "label_mask": mask}


def positions_of(logits, log_q, exact, where):
    log_p = log_softmax(logits.astype(np.float64))
    ids = exact["ids"][0].astype(np.int32)
    dense = (jnp.asarray(log_p, jnp.float32), jnp.asarray(log_q, jnp.float32))
    return Positions(
        ids=ids[where],
        p=np.exp(np.take_along_axis(log_p, ids, axis=1))[where],
        log_q=np.take_along_axis(log_q, ids, axis=1)[where],
        beyond=DenseBeyond(*dense, ids, where),
    )


def test_fewer_entries_are_what_a_capture_of_fewer_would_keep(logits):
    many = exact_targets(logits, 20)
    for k in (1, 6, 20):
        expected = exact_targets(logits, k)
        found = fewer(many, k, TEMPERATURES)
        assert found.keys() == expected.keys()
        for name in expected:
            assert found[name].dtype == expected[name].dtype
            np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, atol=2e-6)


def test_fewer_entries_of_a_whole_vocabulary(logits):
    """With k = V the tail is empty: its log is -inf."""
    every = exact_targets(logits, V)
    assert np.isneginf(every["tail_logprobs"]).all()
    expected = exact_targets(logits, 3)
    found = fewer(every, 3, TEMPERATURES)
    np.testing.assert_allclose(
        found["tail_logprobs"], expected["tail_logprobs"], rtol=2e-5, atol=2e-6
    )


def test_masses_of_entries_at_every_temperature(logits):
    targets = exact_targets(logits, 7)
    for place, temperature in enumerate(TEMPERATURES):
        p = np.exp(log_softmax(logits.astype(np.float64) / temperature))
        expected = np.take_along_axis(p, targets["ids"][0], axis=1)
        tail = targets["tail_logprobs"][..., place]
        found = entry_masses(targets["logprobs"], tail, temperature)
        np.testing.assert_allclose(found[0], expected, rtol=2e-5)


@pytest.mark.parametrize("rounding", [("float32", 6), ("rounded", 4)])
def test_bias_and_variance_are_those_of_many_real_draws(logits, rounding):
    """Weights as a student gets them, through selection, encoding and rounding."""
    setting = Setting("sampled", 8, 2, *rounding)
    encoding = setting.encoding(LENGTH, V, (1.0,), 1)
    settings = TargetSettings(8, V, "sampled", exact=2, seed=5)
    draws = 3000
    places = jnp.arange(LENGTH, dtype=jnp.int32)

    @jax.jit
    def every(rows):
        labels = jnp.zeros(LENGTH, jnp.int32)
        chosen = jnp.asarray(logits)
        return jax.lax.map(
            lambda row: select_targets(chosen, labels, settings, position_bits(5, row, places)),
            rows,
        )

    found = every(jnp.arange(draws, dtype=jnp.int32))._asdict()
    targets = {name: np.asarray(value) for name, value in found.items() if name != "finite"}
    rows = {name: np.repeat(value, draws, axis=0) for name, value in rows_of(LENGTH).items()}
    arrays = encode_shard(rows, targets, encoding)
    drawn = weights(arrays, encoding, 1.0)
    where = np.arange(LENGTH - 1)
    assert (drawn[:, where] > 0).all()
    dense = np.zeros((draws, len(where), V))
    ids = arrays["target_ids"][:, where].astype(np.int64)
    np.put_along_axis(dense, ids, drawn[:, where], axis=2)
    p = np.exp(log_softmax(logits.astype(np.float64)))
    mean = dense.mean(axis=0)
    variance = dense.var(axis=0).sum()

    exact = exact_targets(logits, 10)
    positions = positions_of(logits, np.full((LENGTH, V), -np.log(V)), exact, where)
    one = {name: values[:1] for name, values in arrays.items()}
    (made,) = reconstruct(positions, one, encoding, where).values()
    (tally,) = measure(positions, [made], V)
    assert tally.variance == pytest.approx(variance, rel=0.03)
    bias = tally.bias2 / len(where)
    noise = variance / draws / len(where)
    found_bias = ((mean - p[where]) ** 2).sum() / len(where)
    if rounding[0] == "float32":
        assert bias < 1e-8  # the tail's mass is float16 in any case
        assert found_bias == pytest.approx(noise, rel=0.3)
    else:
        assert bias > 10 * noise / draws**0.5
        assert found_bias - noise == pytest.approx(bias, abs=0.3 * noise)
    np.testing.assert_allclose(mean.sum(axis=1), 1.0, atol=2e-3)


def test_bytes_are_those_of_a_written_cache(tmp_path):
    built = make_cache(tmp_path / "cache", rows=4, rows_per_shard=4)
    sizes = stored_bytes(built.arrays, built.encoding)
    assert set(sizes) == set(built.encoding.stored_arrays())
    # Seals are hashes: their size hardly depends on what they are of.
    data = dict(built.manifest.bytes)
    assert sizes.pop(SEALS) == pytest.approx(data.pop(SEALS), abs=40)
    assert sizes == data


class Rows:
    """A sample of rows that are all the same one."""

    vocabulary, length, temperatures = V, LENGTH, TEMPERATURES

    def __init__(self, logits, rows):
        self.rows, self._logits = rows, logits
        self.tokens = rows * LENGTH

    def chunks(self, k, tails):
        log_q = np.full((LENGTH, V), -np.log(V))
        for row in range(self.rows):
            for part in (slice(0, 8), slice(8, LENGTH)):
                laid = {name: value[:, part] for name, value in rows_of(LENGTH).items()}
                exact = exact_targets(self._logits, k)
                exact = {name: value[:, part] for name, value in exact.items()}
                drawn = {}
                for key in tails:
                    settings = TargetSettings(key[0], V, "sampled", exact=key[1])
                    found = select(self._logits, settings, row)
                    drawn[key] = {name: value[:, part] for name, value in found.items()}
                where = np.flatnonzero(laid["label_mask"][0])
                positions = positions_of(self._logits[part], log_q[part], exact, where)
                yield Chunk(row, laid, exact, drawn, where, positions)


def test_comparing_joins_chunks_rows_and_shards(logits):
    settings = [Setting("none", 5, 5), Setting("sampled", 6, 2), Setting("none", 5, 5, "float32")]
    sample = Rows(logits, 9)  # more rows than a shard
    comparing = Comparing(sample, settings)
    assert (comparing.k, comparing.tails) == (6, ((6, 2),))
    for chunk in sample.chunks(comparing.k, comparing.tails):
        comparing.add(chunk)
    found = {(x.setting, x.objective): x for x in comparing.finish()}
    kinds = [(settings[0], "bucket"), (settings[0], "renormalise"), (settings[1], "sampled")]
    assert set(found) == {*kinds, (settings[2], "bucket"), (settings[2], "renormalise")}

    p = np.exp(log_softmax(logits.astype(np.float64)))[:-1]
    ranked = -np.sort(-p, axis=1)
    item = found[settings[2], "bucket"]
    tail = 1 - ranked[:, :5].sum(axis=1)
    spread = np.where(np.arange(V) < 5, ranked, tail[:, None] / (V - 5))
    assert item.labels == 9 * (LENGTH - 1)
    assert item.bias2 == pytest.approx(((ranked - spread) ** 2).sum(axis=1).mean(), rel=1e-3)
    assert item.mass[1.0] == pytest.approx(1 - tail.mean(), rel=1e-4)
    softened = np.exp(log_softmax(logits.astype(np.float64) / 4))[:-1]
    expected = np.sort(softened, axis=1)[:, -5:].sum(axis=1).mean()
    assert item.mass[4.0] == pytest.approx(expected, rel=1e-4)

    # The nine rows as shards of eight and one, stored at once.
    whole = [
        {name: np.repeat(value, count, axis=0) for name, value in rows_of(LENGTH).items()}
        for count in (8, 1)
    ]
    encoding = settings[2].encoding(LENGTH, V, TEMPERATURES, 8)
    targets = exact_targets(logits, 5)
    total = 0
    for rows in whole:
        count = len(rows["tokens"])
        repeated = {name: np.repeat(value, count, axis=0) for name, value in targets.items()}
        total += sum(stored_bytes(encode_shard(rows, repeated, encoding), encoding).values())
    assert item.bytes == pytest.approx(total / sample.tokens, rel=1e-3)
    assert found[settings[0], "bucket"].bytes < item.bytes
    sampled = found[settings[1], "sampled"]
    assert sampled.variance > 0
    assert sampled.error == sampled.bias2 + sampled.variance
    assert sampled.step_error(1) == pytest.approx(sampled.error)
    assert sampled.step_error(10**9) == pytest.approx(sampled.lasting, abs=1e-9)
