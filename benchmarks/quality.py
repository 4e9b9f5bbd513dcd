"""What a student loses when its teacher is kept in a few bytes: held-out KL and cross-entropy.

    python benchmarks/quality.py [labels full exact sampled replacement goals] [--quick]

Takes about half an hour on two cores. A small teacher is trained from scratch on source text of
the standard library, then smaller students of it, three seeds each, all on the same rows in the
same order. `goals` needs all the others; without them it says nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Finding, Goal, main
from dense import as_batch, kl_of_logits, make_dense_step
from flax import nnx
from quality_plot import Trained, draw_plot
from recipes import RECIPES, Recipe, Stored, Teacher, store
from small_text import Text, read_text

from decoder import Decoder, DecoderConfig
from student.functions import StudentFunctions, parameters_of, student_functions
from student.objectives import Objective
from student.optimiser import make_optimizer
from student.options import TrainOptions
from student.step import LossSettings, State, hidden_states, make_step, place, replicate

LENGTH = 128
# Weight of the labels in every student's loss but that of the hard labels: none, so that they do
# not make up for what the targets lack.
ALPHA = 0.0
PLOT = Path(__file__).with_name("quality.png")


@dataclass(frozen=True)
class Sizes:
    """How large everything is; `batch` rows a step."""

    vocabulary: int
    rows: dict[str, int]
    teacher: DecoderConfig
    student: DecoderConfig
    epochs: int
    seeds: int
    batch: int
    teacher_rate: float = 2e-3
    student_rate: float = 3e-3


def _decoder(vocabulary: int, width: int, layers: int) -> DecoderConfig:
    return DecoderConfig(
        vocabulary=vocabulary,
        width=width,
        layers=layers,
        heads=width // 32,
        kv_heads=width // 32,
        head_dim=32,
        mlp_width=8 * width // 3,
        max_positions=LENGTH,
        tied=True,
    )


def _sizes(quick: bool) -> Sizes:
    if quick:
        return Sizes(
            vocabulary=512,
            rows={"teacher": 128, "students": 32, "held_out": 16},
            teacher=_decoder(512, 64, 2),
            student=_decoder(512, 32, 1),
            epochs=1,
            seeds=1,
            batch=8,
        )
    return Sizes(
        vocabulary=2_048,
        rows={"teacher": 4_800, "students": 512, "held_out": 192},
        teacher=_decoder(2_048, 192, 4),
        student=_decoder(2_048, 96, 2),
        epochs=2,
        seeds=3,
        batch=4,
    )


@dataclass(frozen=True)
class World:
    """What all students share.

    Attributes:
      teacher: on the students' rows.
      judge: the teacher on the held-out rows.
      teacher_cross_entropy: held out, nats.
    """

    sizes: Sizes
    text: Text
    teacher: Teacher
    judge: Teacher
    teacher_cross_entropy: float


@cache
def world(quick: bool) -> World:
    sizes = _sizes(quick)
    text = read_text(sizes.vocabulary, LENGTH, sizes.rows)
    start = time.perf_counter()
    model = Decoder(sizes.teacher, rngs=nnx.Rngs(0))
    functions = student_functions(model)
    parameters = _fit(
        functions,
        parameters_of(model),
        text.teacher,
        Stored(None, Objective("labels"), 0.0),
        sizes,
        seed=0,
        epochs=1,
        rate=sizes.teacher_rate,
    )
    teacher, judge = (
        Teacher(rows, _hidden(functions, parameters, rows), parameters["embedding.weight"])
        for rows in (text.students, text.held_out)
    )
    ce, kl = _measure(functions, parameters, judge)
    assert abs(kl) < 1e-4, "the teacher's distance from itself"
    _tell(f"teacher: CE {ce:.4f}, {time.perf_counter() - start:.0f} s")
    return World(sizes, text, teacher, judge, ce)


def _fit(
    functions: StudentFunctions,
    parameters: Any,
    rows: np.ndarray,
    stored: Stored,
    sizes: Sizes,
    *,
    seed: int,
    epochs: int,
    rate: float,
    head: Any = None,
) -> Any:
    """Trains for some epochs; rows come in an order that depends on the seed alone."""
    devices = jax.local_devices()[:1]
    steps = epochs * len(rows) // sizes.batch
    step, optimizer = _step(functions, stored.objective, rate, steps)
    parameters = replicate(parameters, devices)
    state = State(parameters, replicate(optimizer.init(parameters), devices))
    alpha = np.float32(1.0 if stored.targets is None else ALPHA)
    for chosen in _order(len(rows), sizes.batch, epochs, seed):
        targets = jax.tree.map(lambda x: x[chosen], stored.targets)  # noqa: B023
        batch = place(as_batch(rows[chosen], targets), 1, devices)
        more = (head,) if stored.objective is None else ()
        state, _ = step(state, batch, alpha, *more)
    return state.parameters


@cache
def _step(
    functions: StudentFunctions, objective: Objective | None, rate: float, steps: int
) -> tuple[Any, Any]:
    """The step and its optimiser, compiled once for all seeds."""
    options = TrainOptions(cache="none", student="none", out="none", learning_rate=rate)
    optimizer = make_optimizer(options, steps)
    devices = jax.local_devices()[:1]
    if objective is None:
        return make_dense_step(functions, optimizer, devices, _teacher_logits), optimizer
    settings = LossSettings(objective, chunk=LENGTH)
    return make_step(functions, settings, optimizer, devices), optimizer


def _teacher_logits(head: Any, batch: Any) -> Any:
    """The targets of the full distribution are the teacher's hidden states."""
    hidden = batch.targets.reshape(-1, batch.targets.shape[-1])
    return jnp.dot(hidden, head.T, precision="highest")


def _order(rows: int, batch: int, epochs: int, seed: int) -> Iterator[np.ndarray]:
    random = np.random.default_rng(seed)
    for _ in range(epochs):
        yield from random.permutation(rows)[: rows // batch * batch].reshape(-1, batch)


def _hidden(functions: StudentFunctions, parameters: Any, rows: np.ndarray) -> np.ndarray:
    """Hidden states [rows, length, width]."""
    run = jax.jit(partial(hidden_states, functions, precision="float32"))
    found = [np.asarray(run(parameters, as_batch(rows[part]))) for part in _eighths(len(rows))]
    return np.concatenate(found).reshape(*rows.shape, -1)


def _eighths(rows: int) -> list[slice]:
    return [slice(start, start + 8) for start in range(0, rows, 8)]


def _measure(functions: StudentFunctions, parameters: Any, judge: Teacher) -> tuple[float, float]:
    """Held-out cross-entropy of the labels, and KL to the teacher over the whole vocabulary."""
    run = _measuring(functions)
    found = [
        run(parameters, judge.head, as_batch(judge.tokens[part]), judge.hidden[part])
        for part in _eighths(len(judge.tokens))
    ]
    ce, kl = np.sum(np.asarray(found, np.float64), axis=0)
    assert np.isfinite(ce + kl), "the loss is not finite"
    labels = judge.tokens[:, 1:].size
    return float(ce / labels), float(kl / labels)


@cache
def _measuring(functions: StudentFunctions) -> Any:
    @jax.jit
    def run(parameters: Any, head: Any, batch: Any, theirs: Any) -> Any:
        hidden = hidden_states(functions, parameters, batch, "float32")
        logits = functions.unembed({name: parameters[name] for name in functions.head}, hidden)
        mask, labels = batch.label_mask.reshape(-1), batch.labels.reshape(-1)
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        kl = kl_of_logits(_teacher_logits(head, batch._replace(targets=theirs)), logits)
        return jnp.stack([jnp.where(mask, x, 0.0).sum() for x in (ce, kl)])

    return run


@cache
def _student_functions(config: DecoderConfig) -> StudentFunctions:
    return student_functions(nnx.eval_shape(lambda: Decoder(config, rngs=None)))


# What was trained in this process, by the recipe's name.
_TRAINED: dict[str, Trained] = {}


def students(group: str, quick: bool, folder: Path) -> list[Finding]:
    """Trains and measures the students of a group."""
    found = [_train(recipe, world(quick)) for recipe in RECIPES if recipe.group == group]
    _TRAINED.update({trained.recipe.name: trained for trained in found})
    return [
        Finding(
            group,
            trained.recipe.name + (f", n = {trained.draws}" if trained.draws else ""),
            f"KL {_spread(trained.kl)}",
            f"CE {_spread(trained.ce)}",
            trained.bytes,
            unit="bytes/token",
            details={"kl": trained.kl, "ce": trained.ce, "alpha": _alpha_of(trained.recipe)},
        )
        for trained in found
    ]


def _train(recipe: Recipe, shared: World) -> Trained:
    sizes = shared.sizes
    functions = _student_functions(sizes.student)
    stored, found, size = None, [], []
    for seed in range(sizes.seeds):
        start = time.perf_counter()
        if stored is None or recipe.tail != "none":  # the others draw nothing
            stored = store(recipe, shared.teacher, seed)
        middle = time.perf_counter()
        parameters = _fit(
            functions,
            parameters_of(Decoder(sizes.student, rngs=nnx.Rngs(seed + 1))),
            shared.text.students,
            stored,
            sizes,
            seed=seed,
            epochs=sizes.epochs,
            rate=sizes.student_rate,
            head=shared.teacher.head,
        )
        found.append(_measure(functions, parameters, shared.judge))
        size.append(stored.bytes)
        ce, kl = found[-1]
        _tell(
            f"{recipe.name}, seed {seed}: KL {kl:.4f}, CE {ce:.4f}; targets "
            f"{middle - start:.0f} s, training {time.perf_counter() - middle:.0f} s"
        )
    assert stored is not None  # there is at least one seed
    kls, ces = [kl for _, kl in found], [ce for ce, _ in found]
    return Trained(recipe, statistics.mean(size), stored.draws, kls, ces)


def _alpha_of(recipe: Recipe) -> float:
    return 1.0 if recipe.objective == "labels" else ALPHA


def _tell(text: str) -> None:
    sys.stderr.write(f"quality: {text}\n")


def _spread(values: list[float]) -> str:
    """Mean and, of several seeds, standard deviation."""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"


def goals(quick: bool, folder: Path) -> list[Finding]:
    """Shares of the full distribution's gain over hard labels, and the plot."""
    if len(_TRAINED) < len(RECIPES):
        _tell("goals: left out, since some students are")
        return []
    hard, full = _TRAINED["hard labels"].kl, _TRAINED["full distribution"].kl
    gain = statistics.mean(hard) - statistics.mean(full)
    findings = []
    for trained in list(_TRAINED.values())[2:]:
        recipe = trained.recipe
        least = {64: 0.98, 16: 0.92}.get(recipe.k) if recipe.group == "sampled" else None
        # Of a seed: against the hard labels and the full distribution of the same seed.
        shares = [(h - ours) / (h - f) for h, ours, f in zip(hard, trained.kl, full, strict=True)]
        findings.append(
            Finding(
                "goals",
                f"{recipe.name}: share of the full distribution's gain in KL",
                f"{statistics.mean(hard) - statistics.mean(trained.kl):.4f}",
                f"full distribution {gain:.4f}; by seed {', '.join(f'{x:.3f}' for x in shares)}",
                (statistics.mean(hard) - statistics.mean(trained.kl)) / gain,
                goal=None if least is None else Goal("at least", least),
                details={"shares": shares},
            )
        )
    findings += [_beside_replacement(k) for k in sorted({x.k for x in RECIPES if x.exact})]
    draw_plot(_TRAINED, folder / PLOT.name if quick else PLOT)
    return findings


def _beside_replacement(k: int) -> Finding:
    ours, theirs = (
        next(x for x in _TRAINED.values() if x.recipe.group == group and x.recipe.k == k)
        for group in ("sampled", "replacement")
    )
    ratios = [a / b for a, b in zip(ours.kl, theirs.kl, strict=True)]
    return Finding(
        "goals",
        f"{ours.recipe.name}: KL over that of {theirs.draws} draws with replacement; by seed "
        + ", ".join(f"{x:.3f}" for x in ratios),
        f"{_spread(ours.kl)}, {ours.bytes:.1f} bytes",
        f"{_spread(theirs.kl)}, {theirs.bytes:.1f} bytes",
        statistics.mean(ours.kl) / statistics.mean(theirs.kl),
        goal=Goal("at most", 1.0),
        details={"ratios": ratios},
    )


if __name__ == "__main__":
    groups = dict.fromkeys(recipe.group for recipe in RECIPES)
    main("quality", {**{group: partial(students, group) for group in groups}, "goals": goals})
