"""What is done with a trained student: measuring it and writing it as a Hugging Face folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import jax
from flax import nnx

import decoder
from cache.errors import CacheError, DamageError
from cache.manifest import read_manifest
from cache.storage import Store
from decoder import Decoder, OwnSettings
from decoder.devices import check_backend
from student.checkpoints import Checkpoints
from student.errors import RunError, StudentError
from student.evaluation import Evaluation, kl_objective, make_row_sums, mean_over
from student.functions import fill, parameters_of, student_functions
from student.options import EvaluateOptions, ExportOptions, TrainOptions
from student.plan import Plan, cache_identity, decides, make_plan
from student.run import CHECKPOINTS, TOKENIZER, last_options, local_path, read_run
from student.step import replicate
from student.students import legal_of, rebuild


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a run.

    Attributes:
      record: what decided the run; see `run.open_run`.
      options: what decided the run, and where its cache is; others have their defaults.
      step: the checkpoint's.
      parameters: by dotted path.
      model: with the shapes of the parameters; its own values mean nothing.
      warnings: newer checkpoints that are damaged.
    """

    record: dict[str, Any]
    options: TrainOptions
    step: int
    parameters: dict[str, Any]
    model: nnx.Module
    warnings: tuple[str, ...]


def open_checkpoint(
    run: str | Path,
    checkpoint: str = "last",
    cache: str | None = None,
    local_copy: str | None = None,
) -> Checkpoint:
    """Reads a checkpoint of a run, which may still be in training.

    Args:
      run: the run's folder.
      checkpoint: "last", "best" or a step.
      cache: where the run's cache is now, if it was moved.
      local_copy: of the cache, see `cache.open`.

    Raises:
      RunError: there is no such run or checkpoint, or it is damaged.
    """
    check_backend()
    folder = local_path(run)
    record = read_run(folder)
    options = replace(_options(folder, record, cache), local_copy=local_copy)
    model = rebuild(record["model"])
    abstract = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in parameters_of(model).items()
    }
    which = int(checkpoint) if checkpoint.isdecimal() else checkpoint
    found = Checkpoints(folder / CHECKPOINTS).restore_parameters(abstract, which)
    return Checkpoint(record, options, found.step, found.state, model, found.warnings)


def _options(folder: Path, record: dict[str, Any], cache: str | None) -> TrainOptions:
    """The run's options: what decided it from its record; of sessions/ only the cache's place."""
    known = {field.name for field in fields(TrainOptions)} - {"cache"}
    given = {name: value for name, value in record.items() if name in known}
    # What the record holds of options that did nothing is not given.
    if given.get("objective") == "labels":
        given |= {"objective": "auto", "divergence": None, "temperature": None}
    if given.get("divergence") != "js":
        given["beta"] = None
    place = last_options(folder).get("cache") if cache is None else cache
    if not isinstance(place, str):
        raise RunError(
            f"the newest file in {folder}/sessions does not say where the run's cache is. Put it "
            "back from a copy, give the cache with --cache, or run `stillroom train` again."
        )
    return TrainOptions(**{**given, "cache": place, "out": str(folder), "accumulation": 1})


def evaluate(
    options: EvaluateOptions,
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[int, Evaluation]:
    """Measures a checkpoint on the run's held-out rows; returns its step and the result.

    Args:
      options: which run and checkpoint.
      say: takes warnings.
      progress: called with (rows done, in all).

    Raises:
      StudentError, CacheError, DecoderError: what is wrong and what to do.
    """
    trained = open_checkpoint(options.run, options.checkpoint, options.cache, options.local_copy)
    for warning in trained.warnings:
        say(f"Warning: {warning}.")
    plan = _plan(trained)
    if not len(plan.split.held_out):
        raise StudentError(
            f"the run {options.run} held no rows out (--held-out 0), so there is nothing that it "
            "was not trained on to evaluate it with. Train with --held-out."
        )
    functions = student_functions(trained.model)
    teacher, theirs = None, None
    if options.teacher is not None:
        loaded = decoder.load_model(options.teacher, options.teacher_revision, "float32")
        expected = plan.cache.manifest.teacher["fingerprint"]
        if loaded.fingerprint != expected:
            raise StudentError(
                f"{options.teacher} is not the teacher of the cache: its fingerprint is "
                f"{loaded.fingerprint[:12]}…, the cache's {expected[:12]}…. Give the same model."
            )
        teacher = student_functions(loaded.model, trained=False)
        theirs = replicate(parameters_of(loaded.model), plan.devices)
    measures = plan.measures(legal_of(trained.record["model"]))
    row_sums = make_row_sums(functions, measures, plan.devices, teacher)
    batch = options.batch * len(plan.devices)
    rows = len(plan.split.held_out)
    found = mean_over(
        row_sums,
        replicate(trained.parameters, plan.devices),
        plan.held_out(functions.rows, batch),
        plan.objective,
        plan.options.alpha if plan.options.alpha_end is None else plan.options.alpha_end,
        kl_objective(plan.cache.encoding)[1],
        plan.devices,
        theirs,
        lambda done: progress(done, rows),
    )
    return trained.step, found


def _plan(trained: Checkpoint) -> Plan:
    try:
        identity = trained.record["cache"]["identity"]
        options = trained.options
        manifest, _ = read_manifest(Store(options.cache))
        if options.objective == "sampled" and manifest.nothing_drawn:
            # A run from when such a cache passed for a sampled one: measured by what it holds.
            options = replace(options, objective="auto")
        plan = make_plan(options, training=False, identity=identity)
    except DamageError:
        raise
    except CacheError as error:
        raise RunError(f"{error} If the run's cache was moved, say where with --cache.") from error
    if cache_identity(plan.cache) != identity:
        raise RunError(
            f"the cache {plan.cache.location} is not the one that the run was trained from. Give "
            "that with --cache."
        )
    if decides(plan).get("split") != trained.record.get("split"):
        raise RunError(
            f"the run {trained.options.out} held other rows out, for when it began, neither copies "
            "of documents nor rows that --length empties were looked for: it was trained on some "
            "of the rows that would be measured. Train again with another --out."
        )
    return replace(plan, precision=trained.record["precision"])


def export(options: ExportOptions) -> Checkpoint:
    """Writes a checkpoint as a folder that `transformers` loads; returns what was written.

    Raises:
      StudentError, CacheError, DecoderError: what is wrong and what to do.
    """
    trained = open_checkpoint(options.run, options.checkpoint)
    if not isinstance(trained.model, Decoder) or trained.record["model"]["config"] is None:
        raise StudentError(
            f"the student of {options.run} is a {type(trained.model).__name__} that the function "
            f"{trained.options.student} returns, and Hugging Face has no such model. Read its "
            "parameters with student.trained.open_checkpoint instead."
        )
    kept, model = trained.record["model"], cast(Decoder, filled(trained))
    folder = local_path(options.run) / TOKENIZER
    if "settings" in kept:
        settings = OwnSettings(kept["settings"], _files(folder, kept["tokenizer"]["files"]))
        decoder.save_folder(model, options.out, None, options.dtype, settings=settings)
    else:
        tokenizer = _tokenizer(folder, kept["tokenizer"]["fingerprint"])
        decoder.save_folder(model, options.out, tokenizer, options.dtype)
    return trained


def filled(trained: Checkpoint) -> nnx.Module:
    """The model with the checkpoint's parameters."""
    return fill(trained.model, trained.parameters)


def _files(folder: Path, digests: Mapping[str, str]) -> dict[str, bytes]:
    """What the run keeps of where its student started, checked."""
    files = {}
    for name, digest in digests.items():
        if not (folder / name).is_file():
            raise RunError(f"{folder} has lost its {name}. Put it back from a copy.")
        files[name] = (folder / name).read_bytes()
        if hashlib.sha256(files[name]).hexdigest() != digest:
            raise RunError(
                f"{folder / name} is another file than when the run began. Put it back from a copy."
            )
    return files


def _tokenizer(folder: Path, fingerprint: str) -> decoder.Tokenizer:
    """That of a run which an older Stillroom began, and which keeps no other settings."""
    if not (folder / "tokenizer.json").is_file():
        raise RunError(f"{folder} has lost its tokenizer.json. Put it back from a copy.")
    found = decoder.load_tokenizer(str(folder))
    if found.fingerprint != fingerprint:
        raise RunError(
            f"{folder} is another tokenizer than when the run began. Put it back from a copy."
        )
    return found
