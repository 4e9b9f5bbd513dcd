"""Compare: what capture settings cost and what they lose, measured on a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cache
import decoder
from cache.progress import counted
from decoder.devices import check_backend
from pipelines.compare_cache import CacheSample
from pipelines.compare_options import CompareOptions, Setting
from pipelines.compare_sources import Predictions, TeacherSample, check_student, fresh_rows
from pipelines.compare_targets import Comparing, Measured, Sample
from pipelines.errors import CaptureError
from pipelines.sampling import MAX_DRAWS


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
      measured: every setting with every objective it serves; cheapest first.
      rows, tokens, labels: of the sample.
      student: at whose predictions gradients were measured, in words.
      batch: labels of a training step.
      notes: what its user should know, one sentence each.
    """

    measured: tuple[Measured, ...]
    rows: int
    tokens: int
    labels: int
    student: str
    batch: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Recommendation:
    """The best settings for a budget; None where nothing is as small.

    Attributes:
      budget: bytes per token.
      step: of least error of a training step's mean gradient: the one to take.
      label: of least error of a single label's gradient.
      least: the cheapest setting of all.
    """

    budget: float
    step: Measured | None
    label: Measured | None
    least: Measured


def compare(options: CompareOptions) -> Comparison:
    """Measures capture settings on fresh rows with a teacher, or on rows of a cache.

    Shows progress on standard error. Nothing is written.

    Raises:
      PipelineError, CacheError, DecoderError: what is wrong and what to do.
    """
    check_backend()
    if options.cache is not None:
        return _from_cache(options, options.cache)
    return _from_teacher(options)


def recommend(measured: Sequence[Measured], budget: float, batch: int) -> Recommendation:
    """The settings of least gradient error that take at most `budget` bytes per token.

    A cache trains students through many steps of many labels, and what is the same in every
    label's bias is not averaged out by any number of them, so `step` is the one to take; see
    `compare_measure`. Ties go to the cheaper setting.

    Args:
      measured: at least one.
      batch: labels of a training step.
    """
    fitting = [item for item in measured if item.bytes <= budget]
    step = min(fitting, key=lambda item: (item.step_error(batch), item.bytes), default=None)
    label = min(fitting, key=lambda item: (item.error, item.bytes), default=None)
    return Recommendation(budget, step, label, min(measured, key=lambda item: item.bytes))


def measure_sample(sample: Sample, settings: Sequence[Setting]) -> list[Measured]:
    """Every setting with every objective it serves, measured on a sample; cheapest first."""
    comparing = Comparing(sample, settings)
    with counted("Measuring") as progress:
        for chunk in sample.chunks(comparing.k, comparing.tails):
            comparing.add(chunk)
            progress(chunk.row + 1, sample.rows)
    return sorted(comparing.finish(), key=lambda item: item.bytes)


def _from_teacher(options: CompareOptions) -> Comparison:
    rows, vocabulary, holes = fresh_rows(options)
    settings, notes = _possible(options, vocabulary)
    assert options.teacher is not None
    precision = options.capture("none").precision
    loaded = {"teacher": decoder.load_model(options.teacher, options.teacher_revision, precision)}
    if options.student is not None:
        loaded["student"] = decoder.load_model(options.student, dtype=precision)
        check_student(options, loaded["student"].vocabulary_rows, vocabulary)
    predictions = {}
    for name, model in loaded.items():
        with counted(f"Scoring ({name})") as progress:
            predictions[name] = Predictions(model.model, rows, vocabulary, holes, progress)
    sample = TeacherSample(
        predictions["teacher"],
        rows,
        vocabulary,
        options.measured_temperatures,
        options.seed,
        predictions.get("student"),
    )
    if sample.rows < options.rows:
        notes.append(f"The dataset has text for {sample.rows} rows only.")
    student = options.student or "one that knows how frequent tokens are and nothing else"
    return _comparison(options, sample, settings, student, notes)


def _possible(options: CompareOptions, vocabulary: int) -> tuple[list[Setting], list[str]]:
    """The settings that a vocabulary allows; refuses others if they were asked for."""
    settings, left_out = [], []
    for setting in options.wanted():
        if setting.k > vocabulary:
            reason = f"more entries than the vocabulary's {vocabulary} tokens"
        elif setting.tail == "sampled" and setting.k - setting.exact > MAX_DRAWS:
            reason = f"more than {MAX_DRAWS} sampled entries"
        else:
            settings.append(setting)
            continue
        left_out.append((setting, reason))
    return _kept(options, settings, left_out)


def _from_cache(options: CompareOptions, location: str) -> Comparison:
    opened = cache.open(location)
    encoding = opened.encoding
    sample = CacheSample(opened, options.rows, options.seed)
    settings, left_out = [], []
    for setting in options.wanted():
        if setting.tail == "sampled":
            reason = (
                "which tokens a sample holds is not known without the teacher; give --teacher "
                "and --dataset"
            )
        elif setting.k > encoding.k:
            reason = f"the cache has only {encoding.k} entries"
        elif setting.relative_error < encoding.relative_error:
            reason = "its rounding is finer than the cache's own"
        else:
            settings.append(setting)
            continue
        left_out.append((setting, reason))
    settings, notes = _kept(options, settings, left_out)
    notes.append(
        f"Errors are against what the cache holds: its {encoding.k} entries as stored, and the "
        "rest as the student would spread it. Those of settings close to the cache's own are "
        "therefore too small: compare with --teacher and --dataset to choose among them."
    )
    student = "one that predicts the mean of the sample's distributions"
    return _comparison(options, sample, settings, student, notes)


def _kept(
    options: CompareOptions, settings: list[Setting], left_out: list[tuple[Setting, str]]
) -> tuple[list[Setting], list[str]]:
    """The settings and notes on what was left out; refuses to leave out what was asked for."""
    names: dict[str, list[str]] = {}
    for setting, reason in left_out:
        names.setdefault(reason, []).append(setting.name)
    lines = [f"{'; '.join(found)}: {reason}" for reason, found in names.items()]
    if lines and (options.settings is not None or not settings):
        listed = "".join(f"\n  {line}" for line in lines)
        raise CaptureError(f"these settings cannot be compared here:{listed}")
    counts = [f"{len(found)} settings: {reason}" for reason, found in names.items()]
    return settings, [f"Left out {line}." for line in counts]


def _comparison(
    options: CompareOptions,
    sample: Sample,
    settings: Sequence[Setting],
    student: str,
    notes: Sequence[str],
) -> Comparison:
    measured = measure_sample(sample, settings)
    return Comparison(
        measured=tuple(measured),
        rows=sample.rows,
        tokens=sample.tokens,
        labels=measured[0].labels,
        student=student,
        batch=options.batch,
        notes=tuple(notes),
    )
