"""States of training to save, and two checkpoints of them."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from student.checkpoints import Checkpoints

MOST = np.finfo(np.float32).max


def sharding(devices: int) -> jax.sharding.Sharding:
    """Replicated over so many devices."""
    mesh = jax.make_mesh(
        (devices,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:devices],
    )  # fmt: skip
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def make_state(seed: int, devices: int = 1) -> dict:
    """Parameters of several dtypes with every kind of number, and AdamW's state, not zero."""
    rng = np.random.default_rng(seed)
    parameters = {
        "layers.0.weight": rng.standard_normal((5, 3)).astype(np.float32),
        "layers.0.scale": jnp.asarray(rng.standard_normal(7), jnp.bfloat16),
        "odd/name with spaces": np.array([0.0, -0.0, 1e-45, MOST, -MOST], np.float32),
        "table": rng.integers(-9, 9, (2, 2)).astype(np.int32),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1)))
    trained = {name: jnp.asarray(x) for name, x in parameters.items() if name != "table"}
    state = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape) * 9, x.dtype), optimizer.init(trained)
    )
    return jax.device_put({"parameters": parameters, "optimizer": state}, sharding(devices))


def abstract(state: dict, devices: int = 1) -> dict:
    where = sharding(devices)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), state)


def assert_same(found, expected) -> None:
    """The same structure, dtypes, shapes and bytes."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save_two(folder: Path) -> dict[int, dict]:
    """Saves checkpoints of steps 3 and 5; their states."""
    states = {step: make_state(step) for step in (3, 5)}
    checkpoints = Checkpoints(folder)
    for step, state in states.items():
        checkpoints.save(step, state, {"step": step, "reader": {"next": step * 8}}, {"loss": 1.0})
    return states
