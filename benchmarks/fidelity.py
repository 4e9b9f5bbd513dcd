"""What encodings of a teacher's distribution lose, by the bytes that they take: SmolLM2.

    python benchmarks/fidelity.py [frequencies pruned head] [--quick] [--json FILE]

Takes about ten minutes on two cores. Ours and those of others are measured on the same rows, as
`stillroom compare` does; `pipelines/compare_measure.py` defines the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import Finding, Goal, library_corpus, main, smollm2
from fidelity_plot import Point, draw_plot
from other_encodings import Found, others, whole

import decoder
from cache.encoding import encode_shard, weights
from cache.progress import counted
from decoder.rows import positions_from_segments
from pipelines.compare_measure import Reconstruction, step_error
from pipelines.compare_options import CompareOptions, Setting, parse_settings
from pipelines.compare_sources import Predictions, TeacherSample, fresh_rows
from pipelines.compare_targets import Chunk, Comparing, Measured, fewer, reconstruct
from student.prune import drop

BATCH = 4096
BUDGETS = (30, 40, 50, 60, 80, 100, 130, 160, 200, 250, 300, 400)
# The student: SmolLM2 without these layers, whose cross-entropy is twice the teacher's.
DROPPED = (9, 18)
TEMPERATURES = (1.0, 2.0, 4.0)
PLOT = Path(__file__).with_name("fidelity.png")
# Ours, finely enough that a budget is not missed by the choice of k alone.
SAMPLED = (7, 8, 9, 10, 11, 12, 14, 16, 18, 20, 24, 32, 48, 64, 96, 128, 160)
EXACT = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160)
SETTINGS = (
    *parse_settings(tuple(f"sampled:{k}/1" for k in SAMPLED), ("rounded:6", "rounded:4")),
    *parse_settings(("sampled:32/8",), ("rounded:6",)),
    *parse_settings(tuple(f"exact:{k}" for k in EXACT), ("float16", "rounded:6", "rounded:4")),
)
# What the sampled and bucket objectives train on; the other arrays are for reports and checks.
TARGETS = ("target_ids", "target_logprobs", "exact_counts", "tail_logprobs")


@dataclass(frozen=True)
class Errors:
    """One encoding, ours or not, with the objective that it is used with."""

    name: str
    bytes: float
    bias2: float
    variance: float
    lasting: float
    total_variation: float
    targets: float  # bytes per token of the targets alone

    def error(self, batch: int) -> float:
        return step_error(self.bias2, self.variance, self.lasting, batch)


@dataclass(frozen=True, eq=False)
class World:
    """The rows, and what teacher and student predict there."""

    rows: dict[str, np.ndarray]
    vocabulary: int
    student_model: Any
    teacher: Predictions
    student: Predictions

    def sample(self, student: bool) -> TeacherSample:
        return TeacherSample(
            self.teacher,
            self.rows,
            self.vocabulary,
            TEMPERATURES,
            student=self.student if student else None,
        )


@cache
def world(quick: bool, folder: Path) -> World:
    options = CompareOptions(
        dataset=library_corpus(folder, 4_000 if quick else 40_000),
        teacher=smollm2(),
        rows=2 if quick else 16,
        length=64 if quick else 512,
    )
    rows, vocabulary, holes = fresh_rows(options)
    model = decoder.load_model(smollm2()).model
    smaller = drop(model, *DROPPED)  # type: ignore[arg-type]
    predictions = []
    for each in (model, smaller):
        with counted("Scoring") as progress:
            predictions.append(Predictions(each, rows, vocabulary, holes, progress))
    return World(dict(rows), vocabulary, smaller, *predictions)


def encodings(student: bool, quick: bool, folder: Path) -> list[Finding]:
    """Ours and others' beside each other, at one reference student."""
    shared = world(quick, folder.parent)
    ours, theirs = _measured(shared, quick, folder.parent)[student]
    section = "pruned" if student else "frequencies"
    findings = [_beside(section, item, ours) for item in theirs]
    findings += [_at_budget(section, budget, ours, theirs) for budget in BUDGETS]
    alone = [replace(item, bytes=item.targets) for item in ours]
    for batch in (BATCH, 1):
        findings.append(_worst(section, batch, "all arrays of ours", ours, theirs))
        findings.append(_worst(section, batch, "targets alone of ours", alone, theirs))
    if student:
        draw_plot(_lines(ours, theirs), BATCH, folder / PLOT.name if quick else PLOT)
    return findings


@cache
def _measured(
    shared: World, quick: bool, folder: Path
) -> tuple[tuple[list[Errors], list[Errors]], tuple[list[Errors], list[Errors]]]:
    """Ours and theirs with both students in turn; drawn once, since draws do not depend on them."""
    samples = [shared.sample(student) for student in (False, True)]
    settings = SETTINGS[::5] if quick else SETTINGS
    comparing = [Comparing(sample, settings) for sample in samples]
    beside = [others(shared.vocabulary) for _ in samples]
    k, tails = comparing[0].k, comparing[0].tails
    with counted("Measuring") as progress:
        for first, second in zip(
            samples[0].chunks(k, tails), samples[1].chunks(k, ()), strict=True
        ):
            for chunk, ours, theirs in zip(
                (first, replace(second, sampled=first.sampled)), comparing, beside, strict=True
            ):
                ours.add(chunk)
                for other in theirs:
                    other.add(chunk, shared.vocabulary)
            progress(first.row + 1, samples[0].rows)
    frequencies, pruned = (
        (
            [_errors(item) for item in ours.finish()],
            [_errors(item) for other in theirs for item in other.finish(folder, samples[0].tokens)],
        )
        for ours, theirs in zip(comparing, beside, strict=True)
    )
    return frequencies, pruned


def _errors(item: Measured | Found) -> Errors:
    name, targets = (
        (item.setting.name, sum(item.arrays[array] for array in TARGETS))
        if isinstance(item, Measured)
        else (item.name, item.bytes)
    )
    if isinstance(item, Measured) and item.objective == "renormalise":
        name = f"{name}, renormalised"
    return Errors(
        name,
        item.bytes,
        item.bias2,
        item.variance,
        item.lasting,
        item.total_variation,
        targets,
    )


def _best(items: Sequence[Errors], budget: float, batch: int) -> Errors | None:
    fitting = [item for item in items if item.bytes <= budget]
    return min(fitting, key=lambda item: item.error(batch), default=None)


def _beside(section: str, theirs: Errors, ours: Sequence[Errors]) -> Finding:
    """One encoding of others, and our best that takes at most as many bytes."""
    best = _best(ours, theirs.bytes, BATCH)
    single = _best(ours, theirs.bytes, 1)
    return Finding(
        section,
        f"{theirs.name}: {theirs.bytes:.1f} bytes/token, TV {100 * theirs.total_variation:.1f} %",
        "none as small" if best is None else f"{best.error(BATCH):.2e}: {_told(best)}",
        f"{theirs.error(BATCH):.2e} (one label: bias² {theirs.bias2:.1e}, variance "
        f"{theirs.variance:.1e})",
        float("nan") if best is None else best.error(BATCH) / theirs.error(BATCH),
        goal=None if best is None else Goal("at most", 1.0),
        details={
            "theirs": vars(theirs),
            "ours": best and vars(best),
            "ours_one_label": single and vars(single),
        },
    )


def _told(item: Errors) -> str:
    return f"{item.name}, {item.bytes:.1f} bytes"


def _at_budget(
    section: str, budget: int, ours: Sequence[Errors], theirs: Sequence[Errors]
) -> Finding:
    best, rival = _best(ours, budget, BATCH), _best(theirs, budget, BATCH)
    both = best is not None and rival is not None
    ratio = best.error(BATCH) / rival.error(BATCH) if best and rival else float("nan")
    one, one_rival = _best(ours, budget, 1), _best(theirs, budget, 1)
    return Finding(
        section,
        f"at most {budget} bytes/token, mean of {BATCH:,} labels",
        "nothing" if best is None else f"{best.error(BATCH):.2e}: {_told(best)}",
        "nothing" if rival is None else f"{rival.error(BATCH):.2e}: {_told(rival)}",
        ratio,
        goal=Goal("at most", 1.0) if both else None,
        details={
            "one_label": {
                "ours": one and {**vars(one), "error": one.error(1)},
                "theirs": one_rival and {**vars(one_rival), "error": one_rival.error(1)},
            }
        },
    )


def _worst(
    section: str, batch: int, what: str, ours: Sequence[Errors], theirs: Sequence[Errors]
) -> Finding:
    """Our best over others' best at the budget where we do worst, of all from 30 to 400."""
    found = []
    for budget in range(BUDGETS[0], BUDGETS[-1] + 1):
        best, rival = _best(ours, budget, batch), _best(theirs, budget, batch)
        if rival is not None:
            ratio = float("inf") if best is None else best.error(batch) / rival.error(batch)
            found.append((ratio, budget, best, rival))
    ratio, budget, best, rival = max(found, key=lambda item: item[0])
    lost = [item[1] for item in found if item[0] > 1]
    mean = "one label" if batch == 1 else f"mean of {batch:,} labels"
    beaten = f"; not best at {_ranges(lost)}" if lost else "; best at all"
    return Finding(
        section,
        f"worst of all budgets from 30 to 400, {what}, {mean}{beaten}",
        "nothing" if best is None else f"{best.error(batch):.2e}: {_told(best)}",
        f"{rival.error(batch):.2e}: {_told(rival)} (budget {budget})",
        ratio,
        goal=Goal("at most", 1.0),
        details={"lost": lost, "ratios": {item[1]: item[0] for item in found}},
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending whole numbers, neighbours joined: 30-33, 50."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _lines(ours: Sequence[Errors], theirs: Sequence[Errors]) -> dict[str, list[Point]]:
    """Points of the plot: ours with the default rounding, others by kind."""
    lines: dict[str, list[Point]] = {}
    kinds: dict[str, Callable[[str], bool]] = {
        "ours: sampled tail": lambda x: x.startswith("sampled") and x.endswith("6 bits"),
        "ours: exact, rest as a class": lambda x: x.startswith("exact") and x.endswith("6 bits"),
        "with replacement": lambda x: x.startswith("with replacement"),
        "float16 + 17 bits, rest as a class": lambda x: (
            x.startswith("float16") and x.endswith("class")
        ),
        "float16 + 17 bits, renormalised": lambda x: (
            x.startswith("float16") and x.endswith("renormalised")
        ),
        "polynomial fit, rest as a class": lambda x: x.startswith("poly") and x.endswith("class"),
        "polynomial fit, renormalised": lambda x: (
            x.startswith("poly") and x.endswith("renormalised")
        ),
        "float32 + int64, renormalised": lambda x: (
            x.startswith("Array") and x.endswith("renormalised")
        ),
    }
    for name, belongs in kinds.items():
        chosen = [item for item in (*ours, *theirs) if belongs(item.name)]
        lines[name] = [Point(x.bytes, x.error(1), x.error(BATCH)) for x in chosen]
    return lines


def head(quick: bool, folder: Path) -> list[Finding]:
    """The gradient of the head's weights, mean of all labels, from one real draw.

    No model of how errors add up: the error of every label times the student's hidden state
    there, summed.
    """
    shared = world(quick, folder.parent)
    sample = shared.sample(student=True)
    kept = parse_settings(("sampled:16/4", "sampled:32/8", "exact:16", "exact:64"), ("rounded:6",))
    settings = {setting.name: setting for setting in kept}
    comparing = Comparing(sample, kept)
    gradients: dict[str, Any] = {}
    hidden = _hidden(shared)
    add = jax.jit(lambda total, error, states: total + error.T @ states)
    starts = dict.fromkeys(range(sample.rows), 0)
    with counted("Head") as progress:
        for chunk in sample.chunks(comparing.k, comparing.tails):
            comparing.add(chunk)
            n = chunk.rows["tokens"].shape[1]
            states = hidden[chunk.row][starts[chunk.row] :][chunk.where]
            starts[chunk.row] += n
            for name, error in _label_errors(chunk, settings, sample).items():
                # All chunks have one shape: what has no label is 0.
                padded = np.zeros((64, sample.vocabulary), np.float32)
                padded[: len(error)] = error
                held = np.zeros((64, states.shape[1]), np.float32)
                held[: len(states)] = states
                before = gradients.get(name)
                if before is None:
                    before = np.zeros((sample.vocabulary, states.shape[1]), np.float32)
                gradients[name] = add(before, padded, held)
            progress(chunk.row + 1, sample.rows)
    sums = {name: float(np.sum(np.square(np.asarray(x)))) for name, x in gradients.items()}
    whole_gradient = sums.pop("the whole distribution")
    measured = {
        f"{x.setting.name}{', renormalised' if x.objective == 'renormalise' else ''}": x
        for x in comparing.finish()
    }
    labels = next(iter(measured.values())).labels
    return [
        Finding(
            "head",
            f"{name}: squared error of the head's mean gradient over its squared length, "
            f"{labels:,} labels",
            f"{measured[name].bytes:.1f} bytes/token",
            f"logits: {measured[name].step_error(labels):.2e}",
            value / whole_gradient,
            details={"labels": labels},
        )
        for name, value in sums.items()
    ]


def _hidden(shared: World) -> list[np.ndarray]:
    """The student's hidden states of every row."""
    run = jax.jit(lambda *row: shared.student_model(*row))
    found = []
    for tokens, segments in zip(shared.rows["tokens"], shared.rows["segments"], strict=True):
        segments = segments.astype(np.int32)
        places = positions_from_segments(segments)
        found.append(np.asarray(run(tokens.astype(np.int32), segments, places)))
    return found


def _label_errors(
    chunk: Chunk, settings: dict[str, Setting], sample: TeacherSample
) -> dict[str, np.ndarray]:
    """The gradient of the whole distribution, and every setting's error, [labels, vocabulary]."""
    if not len(chunk.where):
        return {}
    p = whole(chunk)
    beyond: Any = chunk.positions.beyond
    place = np.arange(len(p))[:, None]
    beyond_q = np.asarray(beyond.q)[chunk.where].astype(np.float64)
    beyond_p = np.asarray(beyond.p)[chunk.where].astype(np.float64)
    q = beyond_q.copy()
    q[place, chunk.positions.ids] += chunk.positions.q
    found = {"the whole distribution": q - p}

    def dense(item: Reconstruction) -> np.ndarray:
        r = item.alpha[:, None] * beyond_p + item.beta[:, None] * beyond_q
        r[place, chunk.positions.ids] += item.listed
        return r

    for name, setting in settings.items():
        encoding = setting.encoding(sample.length, sample.vocabulary, TEMPERATURES, 1)
        if setting.tail == "sampled":
            targets = chunk.sampled[setting.k, setting.exact]
            arrays = encode_shard(chunk.rows, targets, encoding)
            drawn = weights(arrays, encoding, 1.0)[0, chunk.where]
            r = np.zeros_like(p)
            r[place, arrays["target_ids"][0, chunk.where].astype(np.int64)] = drawn
            found[name] = p - r
            continue
        targets = fewer(chunk.exact, setting.k, TEMPERATURES)
        arrays = encode_shard(chunk.rows, targets, encoding)
        both = reconstruct(chunk.positions, arrays, encoding, chunk.where)
        found[name] = p - dense(both["bucket"])
        found[f"{name}, renormalised"] = p - dense(both["renormalise"])
    return found


if __name__ == "__main__":
    main(
        "fidelity",
        {
            "frequencies": partial(encodings, False),
            "pruned": partial(encodings, True),
            "head": head,
        },
    )
