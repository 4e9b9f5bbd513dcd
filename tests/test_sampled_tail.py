"""From a capture to a student: what is drawn of a distribution teaches all of it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cache
from cache.encoding import encode_shard, padding_rows
from cache.format import Encoding
from pipelines.options import PrecomputeOptions
from pipelines.sampling import position_bits
from pipelines.targets import TargetSettings, select_targets
from student.batches import Targets
from student.objectives import choose, divergence, teacher_side
from tests.pipelines import small

P = np.array([0.5, 0.3, 0.2])
POSITIONS = 4096


def drawn(settings: TargetSettings, p: np.ndarray) -> tuple[dict[str, np.ndarray], Encoding]:
    """Stored arrays [1, position, …] of one distribution, drawn anew at every position."""
    places = jnp.arange(POSITIONS, dtype=jnp.int32)
    found = jax.jit(select_targets, static_argnames="settings")(
        jnp.asarray(np.broadcast_to(np.log(p), (POSITIONS, len(p))), jnp.float32),
        jnp.zeros(POSITIONS, jnp.int32),
        settings=settings,
        bits=position_bits(settings.seed, jnp.int32(0), places),
    )
    encoding = Encoding(
        POSITIONS, settings.vocabulary, settings.k, "sampled", (1.0,), logprobs="float32"
    )
    rows = padding_rows(1, POSITIONS)
    rows["label_mask"][:] = 1
    targets = {name: np.asarray(values)[None] for name, values in found._asdict().items()}
    return encode_shard(rows, targets, encoding), encoding


def mean_weights(arrays: dict[str, np.ndarray], encoding: Encoding) -> np.ndarray:
    weights = cache.weights(arrays, encoding, 1.0)
    total = np.zeros(encoding.vocabulary)
    np.add.at(total, np.minimum(arrays["target_ids"], encoding.vocabulary - 1), weights)
    return total / POSITIONS


@pytest.mark.parametrize("k", [2, 8])
def test_weights_are_on_average_the_distribution(k: int) -> None:
    """With what --exact is if it is not given."""
    p = P if k < 8 else np.random.default_rng(0).dirichlet(np.ones(30))
    exact = PrecomputeOptions("dataset", "teacher", "out", k=k).captured_exact
    settings = TargetSettings(k, len(p), "sampled", exact)
    arrays, encoding = drawn(settings, p)
    np.testing.assert_allclose(mean_weights(arrays, encoding), p, atol=0.02)
    assert cache.weights(arrays, encoding, 1.0).sum(-1) == pytest.approx(1, abs=1e-6)


def test_a_student_converges_to_the_teacher_and_its_kl_is_right() -> None:
    arrays, encoding = drawn(TargetSettings(2, 3, "sampled", 1), P)
    objective = choose(encoding)
    assert objective.kind == "sampled"
    stored = [arrays[name][0] for name in ("target_ids", "target_logprobs", "exact_counts")]
    tail, entropy = arrays["tail_logprobs"][0, :, 0], arrays["entropy"][0]
    targets = Targets(*map(jnp.asarray, (stored[0], stored[1], stored[2].astype(np.int32), tail)),
                      jnp.asarray(entropy))  # fmt: skip
    teacher = teacher_side(targets, jnp.ones(POSITIONS, bool), objective)

    def loss(z: jax.Array) -> jax.Array:
        total = jnp.full((POSITIONS,), 1.0, jnp.float32) * jax.nn.logsumexp(z)
        return divergence(objective, teacher, z[teacher.ids], total, total).mean()

    step = jax.jit(jax.value_and_grad(loss))
    z = jnp.log(jnp.asarray([0.2, 0.3, 0.5], jnp.float32))
    # 0.5 log(0.5 / 0.2) + 0.2 log(0.2 / 0.5)
    assert float(step(z)[0]) == pytest.approx(0.27489, abs=0.02)
    for _ in range(300):
        z = z - step(z)[1]
    value, gradient = step(z)
    assert float(jnp.abs(gradient).max()) < 1e-5
    np.testing.assert_allclose(np.asarray(jax.nn.softmax(z)), P, atol=0.02)
    assert float(value) == pytest.approx(0, abs=0.02)


def test_a_small_k_alone_gives_an_unbiased_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.quick(monkeypatch)
    opened = small.capture(tmp_path, k=8, exact=None).cache
    assert opened.manifest.capture["exact"] == 4
    assert opened.encoding.tail == "sampled"
    rows = opened.rows(slice(None))
    label = rows["label_mask"] == 1
    assert (rows["exact_counts"][label] < 8).all()
    assert (rows["target_ids"][label] != opened.encoding.no_id).all()
    assert opened.weights(rows)[label].sum(-1) == pytest.approx(1, abs=1e-5)
    report = cache.verify(opened.location, full=True)
    assert report.sound
    assert report.notes == ()
