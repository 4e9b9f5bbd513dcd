"""Learning rates, alpha and updates against their formulas in plain numpy."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from student.optimiser import alpha, learning_rate, make_optimizer
from student.options import TrainOptions


def options(**changes: Any) -> TrainOptions:
    settings = {"cache": "c", "student": "s", "out": "o", "learning_rate": 2.0, "warmup": 0.3}
    return TrainOptions(**{**settings, **changes})


def rates(steps: int, **changes: Any) -> list[float]:
    schedule = learning_rate(options(**changes), steps)
    return [np.asarray(schedule(step)).item() for step in range(steps)]


def test_the_learning_rate_rises_and_falls():
    """10 steps, 3 of them warm-up: quarters of the highest, then half a cosine over 6 steps."""
    found = rates(10)
    np.testing.assert_allclose(found[:4], [0.5, 1.0, 1.5, 2.0], rtol=1e-6)
    cosine = [2 * (0.1 + 0.9 * (1 + math.cos(math.pi * i / 6)) / 2) for i in range(7)]
    np.testing.assert_allclose(found[3:], cosine, rtol=1e-6)
    assert found[-1] == pytest.approx(0.2)
    assert max(found) == found[3]


@pytest.mark.parametrize(
    ("steps", "changes", "expected"),
    [
        (5, {"warmup": 0.0}, [2.0, 1.736396, 1.1, 0.463604, 0.2]),
        # All of it is warm-up: the last step has the highest.
        (4, {"warmup": 1.0}, [0.5, 1.0, 1.5, 2.0]),
        (1, {"warmup": 0.0}, [2.0]),
        (1, {"warmup": 1.0}, [2.0]),
        (2, {"warmup": 0.0}, [2.0, 0.2]),
        (2, {"warmup": 0.05}, [1.0, 2.0]),
        (3, {"final_learning_rate": 0.0}, [1.0, 2.0, 0.0]),
        (3, {"final_learning_rate": 1.0, "warmup": 0.0}, [2.0, 2.0, 2.0]),
    ],
)
def test_learning_rates_of_short_runs_and_extreme_settings(steps, changes, expected):
    found = rates(steps, **changes)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    assert found[0] > 0


def test_alpha_goes_in_a_line_from_the_first_step_to_the_last():
    assert [alpha(options(alpha=0.3), step, 4) for step in range(4)] == [0.3] * 4
    moving = options(alpha=1.0, alpha_end=0.25)
    found = [alpha(moving, step, 4) for step in range(4)]
    np.testing.assert_allclose(found, [1.0, 0.75, 0.5, 0.25])
    assert alpha(moving, 0, 1) == 1.0
    assert [alpha(moving, step, 2) for step in range(2)] == [1.0, 0.25]


def by_hand(asked: TrainOptions, parameters, gradients, steps: int):
    """AdamW of Loshchilov and Hutter, 2019 (algorithm 2, decay times the learning rate)."""
    x = {name: np.array(value, np.float64) for name, value in parameters.items()}
    m = {name: np.zeros_like(value) for name, value in x.items()}
    v = {name: np.zeros_like(value) for name, value in x.items()}
    for step in range(steps):
        norm = math.sqrt(sum((each[step] ** 2).sum() for each in gradients.values()))
        short = min(1.0, asked.clip / norm) if asked.clip else 1.0
        rate = rates(steps, learning_rate=asked.learning_rate)[step]
        for name in x:
            gradient = gradients[name][step] * short
            m[name] = 0.9 * m[name] + 0.1 * gradient
            v[name] = 0.999 * v[name] + 0.001 * gradient**2
            first, second = m[name] / (1 - 0.9 ** (step + 1)), v[name] / (1 - 0.999 ** (step + 1))
            decay = asked.weight_decay * x[name] if x[name].ndim >= 2 else 0.0
            x[name] = x[name] - rate * (first / (np.sqrt(second) + 1e-8) + decay)
    return x


@pytest.fixture(scope="module")
def case():
    random = np.random.default_rng(0)
    shapes = {"matrix": (3, 2), "vector": (4,)}
    parameters = {name: random.normal(size=shape) for name, shape in shapes.items()}
    # Of very different lengths, so that clipping changes the direction of the moments.
    sizes = np.array([0.1, 5.0, 1.0, 30.0])
    gradients = {
        name: random.normal(size=(4, *shape)) * sizes.reshape(-1, *[1] * len(shape))
        for name, shape in shapes.items()
    }
    return parameters, gradients


def updated(asked: TrainOptions, case):
    parameters, gradients = case
    optimizer = make_optimizer(asked, 4)
    x = {name: jnp.asarray(value, jnp.float32) for name, value in parameters.items()}
    state = optimizer.init(x)
    update = jax.jit(optimizer.update)
    for step in range(4):
        here = {name: jnp.asarray(each[step], jnp.float32) for name, each in gradients.items()}
        updates, state = update(here, state, x)
        x = {name: x[name] + updates[name] for name in x}
    return {name: np.asarray(value) for name, value in x.items()}


@pytest.mark.parametrize(("clip", "decay"), [(1.0, 0.5), (0.0, 0.5), (1.0, 0.0)])
def test_updates_are_those_of_adamw(case, clip, decay):
    asked = options(learning_rate=0.1, clip=clip, weight_decay=decay)
    found, expected = updated(asked, case), by_hand(asked, *case, steps=4)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)


def test_decay_hits_matrices_alone_and_clipping_changes_all(case):
    plain = updated(options(clip=0.0, weight_decay=0.0), case)
    decayed = updated(options(clip=0.0, weight_decay=0.5), case)
    clipped = updated(options(clip=1.0, weight_decay=0.0), case)
    np.testing.assert_array_equal(decayed["vector"], plain["vector"])
    assert np.abs(decayed["matrix"] - plain["matrix"]).min() > 1e-3
    for name in plain:
        assert np.abs(clipped[name] - plain[name]).max() > 1e-3
