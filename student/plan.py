"""What a run is to do, found out before anything is loaded or written: cache, objective, rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool

import cache as caches
from cache import Cache
from cache.jsonfields import digest
from decoder.devices import check_backend
from student.batches import (
    Batch,
    BatchSettings,
    Targets,
    check_settings,
    read_batch,
)
from student.errors import ObjectiveError, StudentError
from student.evaluation import Measures, kl_objective
from student.input import InputSettings, held_out_batches
from student.objectives import Objective, choose
from student.options import TrainOptions
from student.split import Split, split_rows
from student.step import LossSettings, check_batch

# Below this mean mass, an objective of exact entries teaches a truncated teacher.
LOW_MASS = 0.7


@dataclass(frozen=True)
class Plan:
    """Everything about a run but the student itself.

    Attributes:
      objective: what is trained on.
      precision: "float32" or "bfloat16".
      steps: of the whole run.
      devices: those of this process.
      appended: rows that the cache has grown by since the run began; they are not used.
    """

    options: TrainOptions
    cache: Cache
    objective: Objective
    precision: str
    split: Split
    steps: int
    devices: tuple[Any, ...]
    appended: int = 0

    @property
    def length(self) -> int:
        return self.options.length or self.cache.encoding.length

    def input_settings(self, rows: int) -> InputSettings:
        """Of the training rows, for a student that gives so many logits."""
        options, temperature = self.options, self.objective.temperature
        captured = temperature in self.cache.encoding.temperatures
        reading = BatchSettings(
            most_id=rows,
            length=options.length,
            targets=self.objective.kind != "labels",
            # Renormalising needs no tail, and so does with any temperature.
            temperature=temperature if captured else None,
        )
        return InputSettings(
            reading, options.batch, options.epochs, options.seed, block=options.shuffle_block
        )

    def loss_settings(self, legal: Bool[np.ndarray, " rows"] | None) -> LossSettings:
        return LossSettings(self.objective, self.precision, legal, self.options.chunk)

    def measures(self, legal: Bool[np.ndarray, " rows"] | None) -> Measures:
        encoding = self.cache.encoding
        kl = kl_objective(encoding)[0]
        return Measures(self.loss_settings(legal), kl, encoding.vocabulary)

    def held_out(self, rows: int, batch: int) -> Iterator[tuple[Batch, Targets | None]]:
        """Held-out batches as `evaluation.mean_over` takes them."""
        kl = kl_objective(self.cache.encoding)[0]
        settings = BatchSettings(rows, self.options.length, True, kl.temperature)
        other = self.objective != kl and self.objective.kind != "labels"
        soft = BatchSettings(rows, self.options.length, True, self.objective.temperature)
        # One reading serves both where the tail's mass of one temperature does.
        again = other and self.objective.temperature != kl.temperature
        can_differ = again and self.objective.temperature in self.cache.encoding.temperatures
        for each in held_out_batches(self.cache, self.split.held_out, settings, batch):
            if not other:
                yield each, None
            elif can_differ:
                yield each, read_batch(self.cache, soft, each.rows).targets
            else:
                yield each, each.targets

    @property
    def epoch_ends(self) -> tuple[int, ...]:
        """The steps after which each epoch is complete."""
        rows, batch = len(self.split.training), self.options.batch
        return tuple(math.ceil(e * rows / batch) for e in range(1, self.options.epochs + 1))

    def epoch_of(self, step: int) -> int:
        """The epoch that a step, counted from 1, belongs to, counted from 1."""
        seen = (step - 1) * self.options.batch
        return min(seen // len(self.split.training) + 1, self.options.epochs)

    def evaluates_after(self, step: int) -> bool:
        if not len(self.split.held_out):
            return False
        every = self.options.evaluate_every
        return step == self.steps or (
            step in self.epoch_ends if every is None else step % every == 0
        )

    def checkpoints_after(self, step: int) -> bool:
        due = step % self.options.checkpoint_every == 0 or step == self.steps
        return due or self.evaluates_after(step)


def make_plan(
    options: TrainOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
    training: bool = True,
    identity: str | None = None,
) -> Plan:
    """Opens the cache, chooses the objective and splits the rows.

    Args:
      options: of the run.
      progress: of the split; called with (rows read, in all).
      training: whether the batch has to fit the rows and the devices.
      identity: of the cache that the run began with, if it has begun; see `as_it_was`.

    Raises:
      StudentError: the options do not fit the cache or the devices.
      CacheError: there is no finished cache, or it is damaged.
    """
    check_backend()
    if jax.process_count() > 1:
        raise StudentError(
            f"this is one of {jax.process_count()} JAX processes; training runs in one process, "
            "on all of its local devices. Start it without jax.distributed."
        )
    now = caches.open(options.cache, local_copy=options.local_copy)
    cache = as_it_was(now, identity)
    objective = objective_of(options, cache)
    check_settings(cache, BatchSettings(cache.encoding.vocabulary, options.length, targets=False))
    devices = tuple(jax.local_devices())
    if training:
        _check_teaches(objective, cache)
        check_batch(options.batch, options.accumulation, len(devices))
    split = split_rows(
        cache,
        options.held_out,
        options.seed,
        lambda done: progress(done, len(cache)),
        length=options.length,
    )
    rows = len(split.training)
    if training and options.batch > rows * options.epochs:
        raise StudentError(
            f"--batch {options.batch} is more than the {rows:,} training rows in {options.epochs} "
            f"epochs: there would be no whole step. Use a smaller batch, at most {rows:,}."
        )
    return Plan(
        options=options,
        cache=cache,
        objective=objective,
        precision=resolve_precision(options.precision, devices),
        split=split,
        steps=math.ceil(rows * options.epochs / options.batch),
        devices=devices,
        appended=len(now) - len(cache),
    )


def objective_of(options: TrainOptions, cache: Cache) -> Objective:
    """The objective; cross-entropy alone if α is 1 all the time.

    Raises:
      ObjectiveError: the cache cannot serve it.
    """
    chosen = choose(
        cache.encoding,
        options.objective,
        options.divergence or "forward",
        options.mixture,
        options.temperature,
    )
    return Objective("labels", no_id=chosen.no_id) if options.labels_alone else chosen


def _check_teaches(objective: Objective, cache: Cache) -> None:
    """Refuses an objective without a gradient: renormalised, one entry alone is always all.

    Raises:
      ObjectiveError: every position has one exact entry.
    """
    statistics = cache.manifest.statistics
    if objective.kind != "renormalise" or statistics is None or not statistics.labels:
        return
    if statistics.exact_entries <= statistics.labels:
        better = "sampled" if cache.encoding.tail == "sampled" else "bucket"
        raise ObjectiveError(
            "--objective renormalise learns nothing from this cache: every position has one exact "
            f"entry, which renormalised has all the probability. Use --objective {better}."
        )


def resolve_precision(precision: str, devices: Iterable[Any]) -> str:
    if precision != "auto":
        return precision
    on_cpu = all(device.platform == "cpu" for device in devices)
    return "float32" if on_cpu else "bfloat16"


def cache_identity(cache: Cache, extents: int | None = None) -> str:
    """Digest of all that a cache holds, or of its first extents; the same wherever it lies."""
    manifest = cache.manifest
    shards = sum(extent.shards for extent in manifest.extents[:extents])
    return digest([manifest.identity, [entry.sha256 for entry in manifest.receipts[:shards]]])


def as_it_was(cache: Cache, identity: str | None) -> Cache:
    """The cache that a run began with: without the documents that were appended since.

    Args:
      cache: as it is now.
      identity: the `cache_identity` of the run's; None for a run that begins.

    Returns:
      That cache; the one given where it is another one altogether.

    Raises:
      CacheError: a receipt is missing.
    """
    for extents in range(1, len(cache.manifest.extents)):
        if cache_identity(cache, extents) == identity:
            return cache.before(extents)
    return cache


def decides(plan: Plan) -> dict[str, Any]:
    """What decides a run's parameters after each step, but for the student's own record.

    Accumulation, chunks, rematerialisation and the number of devices are not among it: they
    change the last bits of a gradient, and neither the order of the data nor what is learnt.
    """
    options = plan.options
    same = "student student_revision drop_layers trim_vocabulary epochs length seed batch"
    # 1 and 1.0 are the same, and the command line gives the latter.
    real = "held_out alpha alpha_end learning_rate warmup final_learning_rate weight_decay clip"
    numbers = {name: getattr(options, name) for name in real.split()}
    # Runs from before there were blocks go on.
    block = {} if options.shuffle_block == 1 else {"shuffle_block": options.shuffle_block}
    # And so do those whose split is as it was before copies were kept on one side.
    split = {"split": plan.split.digest} if plan.split.other else {}
    return {
        "cache": {"identity": cache_identity(plan.cache)},
        **block,
        **split,
        **{name: getattr(options, name) for name in same.split()},
        "student": _student_place(options.student),
        **{name: None if value is None else float(value) for name, value in numbers.items()},
        "objective": plan.objective.kind,
        "divergence": plan.objective.divergence,
        "beta": plan.objective.beta,
        "temperature": plan.objective.temperature,
        "precision": plan.precision,
    }


def _student_place(student: str) -> str:
    """A student's name; one that is a path, as it is known from any folder."""
    path = Path(student).expanduser()
    return str(path.resolve()) if path.exists() else student


def cache_place(cache: Cache) -> str:
    """Where a cache is, as it can be opened from any folder."""
    here = Path(cache.location)
    return str(here.resolve()) if here.exists() else cache.location


def mass(plan: Plan) -> float | None:
    """Mean share of the teacher's probability that the exact entries hold at the objective's
    temperature, over the whole cache; None where it was not captured."""
    encoding, statistics = plan.cache.encoding, plan.cache.manifest.statistics
    if statistics is None or plan.objective.temperature not in encoding.temperatures:
        return None
    return statistics.mean_exact_mass(encoding.temperatures.index(plan.objective.temperature))


def notes(plan: Plan) -> list[str]:
    """What is trained on, and what is dubious about it; a sentence or two each."""
    objective, split = plan.objective, plan.split
    found = [
        f"{len(split.training):,} rows with {split.training_labels:,} labels to train on, "
        f"{len(split.held_out):,} with {split.held_out_labels:,} held out, of "
        f"{split.groups:,} groups of documents."
    ]
    if split.copied_documents or split.copied_rows:
        found.append(
            f"{split.copied_documents:,} documents and {split.copied_rows:,} rows are exact copies "
            "of others: copies stay on one side."
        )
        rows = len(split.training) + len(split.held_out)
        if len(split.held_out) and 2 * split.largest_group > rows:
            found.append(
                f"Warning: {split.largest_group:,} of {rows:,} rows hang together through copies "
                "and shared rows, and are on one side. What is held out may be unlike the rest; "
                "a corpus without copies, or a capture with --layout pad, gives a fairer sample."
            )
    if plan.appended:
        found.append(
            f"The cache has grown by {plan.appended:,} rows since this run began: it goes on with "
            f"the {len(plan.cache):,} that it began with. A run with another --out trains on all."
        )
    empty = split.rows_without_labels - split.emptied_rows
    if empty:
        found.append(f"{empty:,} rows have nothing to predict: left out.")
    if plan.options.length is not None:
        cut = f"--length {plan.options.length} of {plan.cache.encoding.length}: "
        whole = split.training_labels + split.cut_labels
        found.append(f"{cut}{split.cut_labels:,} of {whole:,} training labels are left out.")
        if split.emptied_rows:
            found.append(f"{cut}{split.emptied_rows:,} rows have no label left: left out.")
    return found + _objective_notes(objective, mass(plan), plan.cache.encoding.tail)


def _objective_notes(objective: Objective, mass: float | None, tail: str) -> list[str]:
    at = f"temperature {objective.temperature:g}"
    share = "an unknown share" if mass is None else f"{mass:.1%}"
    if objective.kind == "labels":
        return ["Objective: cross-entropy on the labels alone; the teacher is not used."]
    if objective.kind == "sampled":
        return [
            f"Objective: sampled, {at}. The entries stand for all of the teacher's probability, "
            f"on average over the draws; the exact ones hold {share} of it."
        ]
    if objective.kind == "bucket":
        found = [
            f"Objective: bucket ({objective.divergence}), {at}. The exact entries hold {share} of "
            "the teacher's probability; the rest is one class."
        ]
        if mass is not None and mass < LOW_MASS:
            found.append(
                f"Warning: that is little; the student learns next to nothing of the other "
                f"{1 - mass:.0%}. "
                + (
                    "--objective sampled learns all of it from this cache."
                    if tail == "sampled"
                    else "A lower --temperature has more, or a cache with --tail sampled."
                )
            )
        return found
    better = "sampled" if tail == "sampled" else "bucket"
    return [
        f"Objective: renormalise ({objective.divergence}), {at}. The exact entries hold {share} "
        "of the teacher's probability.",
        "Warning: renormalise teaches that the exact entries are all there is; in our "
        "measurements such students were worse than without a teacher when the mass was low. "
        f"--objective {better} does not have this fault.",
    ]
