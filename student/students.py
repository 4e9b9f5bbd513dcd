"""The student that a run asks for: built once, then rebuilt from the run's record alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Bool

import decoder
from cache import Cache
from decoder import Decoder, DecoderConfig, OwnSettings, Tokenizer
from student.batches import Batch
from student.configs import config_from_json, config_to_json, is_scratch, scratch_config
from student.errors import RunError, StudentError
from student.functions import parameters_of
from student.options import TrainOptions
from student.prune import Search, best_block, drop, trim
from student.vocabulary import check_tokenizers, legal_ids, softmax_ids


@dataclass(frozen=True)
class Student:
    """A student before its first step.

    Attributes:
      model: float32 parameters; see `functions.student_functions`.
      config: None for a function's own kind of model.
      record: JSON-able: where the student comes from, and all that `rebuild` and `legal_of` need.
      vocabulary: ids that the softmax is over; the rest of the rows are illegal.
      legal: bool [rows]: ids that may be predicted; None when all may.
      tokenizer: the student's own, or else the cache's.
      files: of the tokenizer, and of the student's settings; to be kept, and exported with it.
      parameters: numbers in the model; shared ones count once.
      layers: None for a function's own kind of model.
      search: how the dropped block was found, if it was.
    """

    model: nnx.Module
    config: DecoderConfig | None
    record: dict[str, Any]
    vocabulary: int
    legal: Bool[np.ndarray, " rows"] | None
    tokenizer: Tokenizer
    files: Mapping[str, bytes]
    parameters: int
    layers: int | None
    search: Search | None = None


@dataclass(frozen=True)
class _Start:
    """A model before anything is cut from it, and its part of the record."""

    model: nnx.Module
    rows: int
    tokenizer: Tokenizer | None
    settings: OwnSettings | None
    record: Mapping[str, Any]


def build(
    options: TrainOptions,
    cache: Cache,
    held_out_batches: Callable[[], Iterable[Batch]],
    progress: Callable[[int, int], None] | None = None,
) -> Student:
    """Builds the student: from scratch or a checkpoint, trimmed and pruned as asked.

    Args:
      options: student, student_revision, drop_layers, trim_vocabulary, length, seed, chunk.
      cache: what it will be trained on; decides the vocabulary, and must be of its tokenizer.
      held_out_batches: called only to find the block to drop; targets are not used.
      progress: of that search, called with (measurements done, in all).

    Raises:
      StudentError: what is asked for does not fit the cache, or itself.
      DecoderError: the checkpoint cannot be loaded.
      DamageError: the cache's tokenizer is damaged.
    """
    cached = decoder.tokenizer_from_files(cache.tokenizer_files())
    scratch = is_scratch(options.student)
    start = _scratch(options, cache) if scratch else _load(options, cache, cached)
    model, own, rows = start.model, start.tokenizer, start.rows
    vocabulary = softmax_ids(rows, cache.encoding.vocabulary, own, options.student)
    layers, dropped, search = None, None, None
    if options.drop_layers is not None:
        layers = parse_layers(options.drop_layers, _decoder(model, options).config.layers)
    settings = _settings(start, cache, cached)
    if options.trim_vocabulary:
        _check_trim(settings, rows, vocabulary)
        model, rows = trim(_decoder(model, options), vocabulary), vocabulary
    legal = legal_ids(rows, vocabulary, [cached] if own is None else [cached, own])
    if isinstance(layers, int):
        search = best_block(
            _decoder(model, options),
            layers,
            held_out_batches(),
            legal=legal,
            chunk=options.chunk,
            progress=progress,
        )
        layers = (search.first, search.last)
    if layers is not None:
        whole = _decoder(model, options)
        dropped = {"first": layers[0], "last": layers[1], "of": whole.config.layers}
        model = drop(whole, *layers)
    # By type: what a class of its own adds to a decoder would be lost when it is rebuilt.
    config = model.config if type(model) is Decoder else None
    tokenizer = cached if own is None else own
    illegal = [] if legal is None else np.flatnonzero(~legal[:vocabulary]).tolist()
    return Student(
        model=model,
        config=config,
        record={
            **start.record,
            "dropped": dropped,
            "rows": rows,
            "vocabulary": vocabulary,
            "illegal": illegal,
            "tokenizer": {
                "own": own is not None,
                "fingerprint": tokenizer.fingerprint,
                "files": {
                    name: hashlib.sha256(data).hexdigest() for name, data in settings.files.items()
                },
            },
            "settings": dict(settings.config),
            "config": None if config is None else config_to_json(config),
        },
        vocabulary=vocabulary,
        legal=legal,
        tokenizer=tokenizer,
        files=settings.files,
        parameters=sum(value.size for value in parameters_of(model).values()),
        layers=None if config is None else config.layers,
        search=search,
    )


def rebuild(record: Mapping[str, Any]) -> nnx.Module:
    """The model of a `Student.record`, for parameters to be filled in; reads no checkpoint.

    A decoder is abstract (shapes alone). A function is called again, and its model returned.

    Raises:
      RunError: the record is damaged, or the function gives another model than it did.
      DecoderError: the function is not there any more.
    """
    kind, config = _field(record, "kind"), _field(record, "config")
    if config is not None:
        found = config_from_json(config)
        return nnx.eval_shape(lambda: Decoder(found, rngs=None))
    if kind != "function":
        raise RunError(f"the run's record of its student is damaged: kind {kind!r}, no config.")
    loaded = decoder.load_model(_field(record, "source"))
    if loaded.fingerprint != _field(record, "fingerprint"):
        raise RunError(
            f"{loaded.source} gives another model than when the run began: its source file or "
            "its initial values have changed. Bring back the code of that time."
        )
    return loaded.model


def legal_of(record: Mapping[str, Any]) -> Bool[np.ndarray, " rows"] | None:
    """`Student.legal`, from its record.

    Raises:
      RunError: the record is damaged.
    """
    rows, vocabulary = _field(record, "rows"), _field(record, "vocabulary")
    legal = np.arange(rows) < vocabulary
    legal[np.asarray(_field(record, "illegal"), np.int64)] = False
    return None if legal.all() else legal


def parse_layers(text: str, layers: int) -> tuple[int, int] | int:
    """--drop-layers for a model of so many layers: FIRST-LAST, counted from 0, or a COUNT.

    Raises:
      StudentError: it is neither, or the model has no such layers, or no others.
    """
    found = re.fullmatch(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?", text)
    has = f"the student has {layers} layers, 0 to {layers - 1}, and must keep one"
    if found is None:
        raise StudentError(
            f"--drop-layers {text!r} should be FIRST-LAST, such as 9-18, or a number of layers; "
            f"{has}."
        )
    if found[2] is None:
        count = int(found[1])
        if not 1 <= count < layers:
            raise StudentError(f"--drop-layers {text} cannot drop {count} layers: {has}.")
        return count
    first, last = int(found[1]), int(found[2])
    if first > last:
        raise StudentError(
            f"--drop-layers {text} ends before it begins. Did you mean {last}-{first}? {has}."
        )
    if last >= layers or last - first + 1 == layers:
        raise StudentError(f"--drop-layers {text} cannot drop layers {first} to {last}: {has}.")
    return first, last


def _scratch(options: TrainOptions, cache: Cache) -> _Start:
    for option, given in (
        ("--student-revision", options.student_revision is not None),
        ("--drop-layers", options.drop_layers is not None),
        # One from scratch has as many rows as the cache has ids.
        ("--trim-vocabulary", options.trim_vocabulary),
    ):
        if given:
            raise StudentError(
                f"{option} is for students from a checkpoint; {options.student} starts from "
                "scratch. Leave it out."
            )
    encoding = cache.encoding
    config = scratch_config(options.student, encoding.vocabulary, encoding.length)
    model = Decoder(config, rngs=nnx.Rngs(options.seed))
    record = {
        "kind": "scratch",
        "source": options.student,
        "revision": None,
        "fingerprint": None,
        "seed": options.seed,
    }
    return _Start(model, config.vocabulary, None, None, record)


def _load(options: TrainOptions, cache: Cache, cached: Tokenizer) -> _Start:
    source, revision = options.student, options.student_revision
    # Before the weights, which may be large.
    tokenizer = _own_tokenizer(source, revision)
    if tokenizer is not None:
        check_tokenizers(tokenizer, cached)
    loaded = decoder.load_model(source, revision, "float32")
    length = options.length or cache.encoding.length
    if loaded.max_positions is not None and length > loaded.max_positions:
        raise StudentError(
            f"rows of {length} positions are beyond the {loaded.max_positions} that the student "
            f"{source} was made for. Train on less of each row: --length {loaded.max_positions}."
        )
    for name, value in parameters_of(loaded.model).items():
        if value.dtype != np.float32:
            raise StudentError(
                f"the student {source} has the parameter {name} in {value.dtype}; parameters are "
                "trained in float32. Make them float32 in the function; --precision is that of "
                "the computation."
            )
    kind = loaded.description["kind"]
    record = {
        "kind": "function" if kind == "function" else "checkpoint",
        "source": source,
        "revision": loaded.revision,
        "fingerprint": loaded.fingerprint,
        "seed": None,
    }
    settings = decoder.own_settings(source, loaded.revision)
    return _Start(loaded.model, loaded.vocabulary_rows, tokenizer, settings, record)


def _settings(start: _Start, cache: Cache, cached: Tokenizer) -> OwnSettings:
    """The student's own settings; where it has no tokenizer, that of the cache."""
    if start.settings is None:
        return OwnSettings(decoder.special_ids(cached), cache.tokenizer_files())
    if start.tokenizer is not None:
        return start.settings
    return OwnSettings(start.settings.config, {**start.settings.files, **cache.tokenizer_files()})


def _check_trim(settings: OwnSettings, rows: int, kept: int) -> None:
    lost = sorted(one for one in settings.ids() if kept <= one < rows)
    if lost:
        raise StudentError(
            f"--trim-vocabulary would leave {kept:,} of {rows:,} rows, but the student's "
            f"config.json or generation_config.json names the special tokens {lost}, which no "
            "tokenizer has. Leave it out."
        )


def _decoder(model: nnx.Module, options: TrainOptions) -> Decoder:
    """The model, which is about to be cut; by type, for a cut would lose what a class adds."""
    if type(model) is Decoder:
        return model
    option = "--trim-vocabulary" if options.drop_layers is None else "--drop-layers"
    raise StudentError(
        f"{option} is for models of the Llama family; {options.student} gives a "
        f"{type(model).__name__}. Leave it out, and cut the model in the function."
    )


def _own_tokenizer(source: str, revision: str | None) -> Tokenizer | None:
    """The student's tokenizer; None if it brings none. Raises for one that cannot be read."""
    folder = Path(source).expanduser()
    other_kinds = [name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()]
    if decoder.has_tokenizer(source, revision) or other_kinds:
        return decoder.load_tokenizer(source, revision)
    return None


def _field(record: Mapping[str, Any], name: str) -> Any:
    if name not in record:
        raise RunError(f"the run's record of its student is damaged: the field {name} is missing.")
    return record[name]
