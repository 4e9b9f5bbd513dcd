"""A distilled step beside the plain cross-entropy step of one student; a section of train.py."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Finding, Goal, ratio
from dense import as_batch, make_dense_step
from flax import nnx

import decoder
from student.batches import Targets
from student.functions import StudentFunctions, parameters_of, student_functions
from student.losses import fused_loss
from student.objectives import Objective
from student.optimiser import make_optimizer
from student.options import TrainOptions
from student.step import (
    LossSettings,
    State,
    flat_positions,
    hidden_states,
    make_step,
    place,
    replicate,
)

LENGTH = 256
NO_ID = 2**32 - 1
CHUNK = LossSettings.chunk
ALPHA = np.float32(0.5)
MIB = 2**20
# Of the student that is timed.
LAYERS = 2


@dataclass(frozen=True)
class Side:
    """A compiled step and what it takes beside the state."""

    step: Any  # callable; before it is compiled, with a method `lower`
    arguments: tuple[Any, ...]


def step(quick: bool, folder: Path) -> list[Finding]:
    """The distilled step against the plain cross-entropy step of the same student."""
    findings = []
    for vocabulary in (2_048,) if quick else (49_152, 151_936):
        findings += _steps(vocabulary, rows=2 if quick else 8, rounds=1 if quick else 5)
        gc.collect()
    return findings


def _steps(vocabulary: int, rows: int, rounds: int) -> list[Finding]:
    functions, state, optimizer = _student(vocabulary, LAYERS)
    devices = jax.local_devices()[:1]
    compiled, memory = {}, {}
    for name, side in _sides(functions, optimizer, devices, vocabulary, rows).items():
        made = side.step.lower(state, *side.arguments).compile()
        memory[name] = _temporary(made)
        compiled[name] = Side(made, side.arguments)
    seconds = states_in_turn(compiled, state, rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    what = f"V = {vocabulary:,}, {rows} rows of {LENGTH}, {LAYERS} layers"
    findings = []

    def time_of(name: str, told: str, goal: Goal | None = None) -> None:
        findings.append(
            Finding(
                "step",
                f"{what}: {told}: time",
                f"{medians[name]:.3f} s",
                f"plain cross-entropy {medians['plain']:.3f} s",
                ratio(seconds[name], seconds["plain"]),
                goal=goal,
                details={"seconds": seconds[name], "plain": seconds["plain"]},
            )
        )

    def memory_of(told: str, ours: int, plain: int, goal: Goal | None = None) -> None:
        findings.append(
            Finding(
                "step",
                f"{told}: temporary memory",
                f"{ours / MIB:,.0f} MiB",
                f"plain {plain / MIB:,.0f} MiB",
                ours / plain,
                goal=goal,
                details={"bytes": ours, "plain": plain},
            )
        )

    for name, told in _TOLD.items():
        goal = None if name == "labels" else Goal("at most", 1.10)
        time_of(name, told, goal)
        if goal is not None:
            memory_of(f"{what}: {told}", memory[name], memory["plain"], Goal("at most", 0.3))
    for chunk in _CHUNKS:
        time_of(f"chunk {chunk}", f"{_TOLD['sampled']}, chunks of {chunk} instead of {CHUNK}")
        told = f"{what}: sampled, chunks of {chunk}"
        memory_of(told, memory[f"chunk {chunk}"], memory["plain"])
    # Where more of a step is not the head: the ratio rises with it.
    for layers, some in ((LAYERS, 2), (2 * LAYERS, rows)):
        found = _step_memory(vocabulary, layers, some)
        told = f"V = {vocabulary:,}, {some} rows of {LENGTH}, {layers} layers: sampled"
        memory_of(told, found["sampled"], found["plain"])
    told = f"{what}: sampled, unembedding and loss with their gradients alone"
    memory_of(told, *_loss_memory(functions, state, vocabulary, rows))
    return findings


def _step_memory(vocabulary: int, layers: int, rows: int) -> dict[str, int]:
    """Temporary bytes of the sampled and the plain step of another size; nothing is run."""
    functions, state, optimizer = _student(vocabulary, layers)
    sides = _sides(functions, optimizer, jax.local_devices()[:1], vocabulary, rows)
    return {
        name: _temporary(sides[name].step.lower(state, *sides[name].arguments).compile())
        for name in ("sampled", "plain")
    }


_TOLD = {
    "sampled": "sampled, k = 32, exact 8",
    "bucket": "bucket, k = 64",
    "labels": "labels alone, fused",
}
# In place of the default.
_CHUNKS = (64, 256, 512)


def _student(vocabulary: int, layers: int) -> tuple[StudentFunctions, State, Any]:
    """A student whose head is most of its work, as a large vocabulary makes it."""
    config = decoder.DecoderConfig(
        vocabulary=vocabulary,
        width=256,
        layers=layers,
        heads=4,
        kv_heads=4,
        head_dim=64,
        mlp_width=688,
        max_positions=LENGTH,
        tied=True,
    )
    model = decoder.Decoder(config, rngs=nnx.Rngs(0))
    return (student_functions(model), *state_of(parameters_of(model)))


def state_of(parameters: Any) -> tuple[State, Any]:
    """Parameters and optimiser as a run has them, and the optimiser."""
    optimizer = make_optimizer(TrainOptions(cache="none", student="none", out="none"), 1_000)
    devices = jax.local_devices()[:1]
    parameters = replicate(parameters, devices)
    return State(parameters, replicate(optimizer.init(parameters), devices)), optimizer


def _sides(
    functions: StudentFunctions, optimizer: Any, devices: Any, vocabulary: int, rows: int
) -> dict[str, Side]:
    random = np.random.default_rng(0)
    tokens = random.integers(vocabulary, size=(rows, LENGTH), dtype=np.int32)
    put = lambda targets: place(as_batch(tokens, targets), 1, devices)  # noqa: E731
    batches = {
        "labels": put(None),
        "sampled": put(_random_targets(random, tokens.shape, vocabulary, k=32, exact=8)),
        "bucket": put(_random_targets(random, tokens.shape, vocabulary, k=64, exact=64)),
    }
    plain = make_dense_step(functions, optimizer, devices)
    sides = {"plain": Side(plain, (batches["labels"], ALPHA, None))}

    def fused(name: str, kind: Any, chunk: int) -> None:
        settings = LossSettings(Objective(kind, no_id=NO_ID), chunk=chunk)
        made = make_step(functions, settings, optimizer, devices)
        sides[name] = Side(made, (batches[kind], ALPHA))

    for kind in _TOLD:
        fused(kind, kind, CHUNK)
    for chunk in _CHUNKS:
        fused(f"chunk {chunk}", "sampled", chunk)
    return sides


def _random_targets(
    random: np.random.Generator, shape: tuple[int, ...], vocabulary: int, k: int, exact: int
) -> Targets:
    """Distinct ids; the exact ones share 0.7 of the mass."""
    first = random.integers(vocabulary, size=(*shape, 1))
    ids = (first + np.arange(k) * (vocabulary // k)) % vocabulary
    logprobs = np.full((*shape, k), np.nan, np.float16)
    logprobs[..., :exact] = np.log(0.7 / exact)
    return Targets(
        ids=ids.astype(np.uint32),
        logprobs=logprobs,
        exact_counts=np.full(shape, exact, np.int32),
        tail_logprobs=np.full(shape, np.log(0.3), np.float32),
        entropy=np.full(shape, 2.0, np.float32),
    )


def _temporary(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    assert analysis is not None  # every backend we run on has one
    return analysis.temp_size_in_bytes


def _loss_memory(
    functions: StudentFunctions, state: State, vocabulary: int, rows: int
) -> tuple[int, int]:
    """Temporary bytes of value and gradients from hidden states on: fused, and plain."""
    random = np.random.default_rng(0)
    tokens = random.integers(vocabulary, size=(rows, LENGTH), dtype=np.int32)
    batch = as_batch(tokens, _random_targets(random, tokens.shape, vocabulary, k=32, exact=8))
    batch = jax.tree.map(jnp.asarray, batch)
    hidden = jax.eval_shape(
        partial(hidden_states, functions, precision="float32"), state.parameters, batch
    )
    head = {name: state.parameters[name] for name in functions.head}
    loss = fused_loss(functions.unembed, Objective("sampled", no_id=NO_ID))

    def ours(head: Any, hidden: Any, positions: Any) -> Any:
        return loss(head, hidden, positions, ALPHA).loss

    def plain(head: Any, hidden: Any, positions: Any) -> Any:
        logits = functions.unembed(head, hidden)
        found = optax.softmax_cross_entropy_with_integer_labels(logits, positions.labels)
        return jnp.where(positions.label_mask, found, 0.0).sum()

    positions = flat_positions(batch)
    found = [
        jax.jit(jax.value_and_grad(side, argnums=(0, 1))).lower(head, hidden, positions).compile()
        for side in (ours, plain)
    ]
    return _temporary(found[0]), _temporary(found[1])


def states_in_turn(sides: dict[str, Side], state: State, rounds: int) -> dict[str, list[float]]:
    """`common.in_turn` for steps: each takes the state that the one before it gave.

    A step donates its state, and one state serves all sides: they do the same to it.
    """
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-2, rounds):
        for name in names if turn % 2 == 0 else names[::-1]:
            gc.collect()
            start = time.perf_counter()
            state, metrics = sides[name].step(state, *sides[name].arguments)
            jax.block_until_ready((state, metrics))
            if turn >= 0:  # those before warm up: one compiles, one has the state of the other
                seconds[name].append(time.perf_counter() - start)
    return seconds
