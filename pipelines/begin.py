"""Beginning a capture: what is asked for, what is there already, and whether they agree."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import cache
import decoder
from cache.errors import Damage, DamageError
from cache.filling import (
    begin_work,
    check_place,
    makers,
    missing_shards,
    new_run,
    reopened,
    unfinished,
    work_under_way,
)
from cache.finishing import settle_contents
from cache.format import PARTS, TOKENIZER, Encoding, receipt_key
from cache.manifest import Manifest
from cache.reader import repair
from cache.storage import Store
from cache.verify import WORK_UNFINISHED
from decoder.devices import check_backend, missing_backend
from pipelines.agreement import agree, work_differences
from pipelines.corpus import Corpus, open_corpus
from pipelines.encode import resolve_bos, resolve_eos
from pipelines.errors import CaptureError, TeacherError
from pipelines.options import PrecomputeOptions
from pipelines.parts import PartSettings
from pipelines.plan import Plan, corpus_settings, layout_settings
from pipelines.sampling import MAX_DRAWS

# Raised when the same settings begin to mean other targets.
TARGETS_VERSION = 1
# Opens JAX's devices in a process of its own. No exit code of Python's.
_NOT_THERE = 64
_OPEN = f"""
import sys, jax
try:
    print(jax.default_backend(), jax.local_device_count())
except (RuntimeError, AssertionError) as error:
    print(error)
    sys.exit({_NOT_THERE})
"""
# Libraries that the manifest names the releases of.
_SOFTWARE = ("jax", "jaxlib", "flax", "numpy", "tensorstore")


@dataclass(frozen=True)
class Wanted:
    """A capture as it is asked for.

    Attributes:
      store: where the cache is or will be.
      manifest: the open manifest of it, with a run id of its own.
      corpus: the documents.
      files: of the tokenizer, by name.
      plan: what workers need.
    """

    store: Store
    manifest: Manifest
    corpus: Corpus
    files: dict[str, bytes]
    plan: Plan


def begin(options: PrecomputeOptions) -> Plan | cache.Cache:
    """Opens the corpus, teacher and cache of a capture, and refuses what does not agree.

    Returns:
      The plan of the work, its open manifest written; or the cache, if it is finished and
      holds exactly what is asked for.

    Raises:
      PipelineError, CacheError, DecoderError: what is wrong and what to do.
    """
    wanted = what_is_wanted(options)
    manifest = agree(wanted.store, wanted.manifest, wanted.corpus)
    write_tokenizer(wanted, manifest)
    if manifest.state == "open":
        return replace(wanted.plan, manifest=manifest)
    if unfinished(wanted.store, manifest, 0):
        return again(wanted, manifest, 0)
    return finished(wanted, manifest)


def what_is_wanted(options: PrecomputeOptions) -> Wanted:
    """Opens the corpus and looks at the teacher; writes nothing.

    Raises:
      PipelineError, DecoderError: what is wrong and what to do.
    """
    store = Store(options.out)
    check_place(store, CaptureError)
    backend = _backend(options)
    tokenizer = decoder.load_tokenizer(
        options.tokenizer or options.teacher,
        None if options.tokenizer else options.teacher_revision,
    )
    teacher = decoder.describe_model(options.teacher, options.teacher_revision)
    vocabulary = _vocabulary(options, tokenizer, teacher)
    if teacher.max_positions is not None and options.length > teacher.max_positions:
        raise TeacherError(
            f"--length {options.length} is beyond the {teacher.max_positions} positions that the "
            "teacher was made for. Use a smaller --length."
        )
    corpus = open_corpus(corpus_settings(options))
    files = tokenizer.files()
    parts = PartSettings(
        layout=layout_settings(options),
        bos=resolve_bos(options.bos, tokenizer),
        eos=resolve_eos(options.eos, tokenizer),
        vocabulary=vocabulary,
        documents_per_part=options.documents_per_part,
    )
    wanted = Manifest(
        encoding=_encoding(options, vocabulary),
        capture=_capture(options, parts, backend),
        teacher={
            "source": options.teacher,
            "revision": teacher.revision,
            "fingerprint": teacher.fingerprint,
            "parameters": teacher.parameters,
            "vocabulary_rows": teacher.vocabulary_rows,
            "description": dict(teacher.description),
        },
        tokenizer={
            "fingerprint": tokenizer.fingerprint,
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        },
        corpus={
            "description": corpus.description,
            "identity": corpus.identity,
            "documents": len(corpus),
        },
        software={name: metadata.version(name) for name in _SOFTWARE},
        run=new_run(),
    )
    plan = Plan(
        store=store,
        options=_absolute(options),
        manifest=wanted,
        corpus=corpus_settings(_absolute(options)),
        parts=parts,
        holes=tuple(hole for hole in tokenizer.holes if hole < vocabulary),
    )
    return Wanted(store, wanted, corpus, files, plan)


def write_tokenizer(wanted: Wanted, manifest: Manifest) -> None:
    """Stores the files of the tokenizer that the manifest lists, where they are not there."""
    listed = manifest.tokenizer.get("files", {})
    for name, data in wanted.files.items():
        key = f"{TOKENIZER}/{name}"
        # An equal tokenizer may come in other files: those that are there stay.
        if listed.get(name) == hashlib.sha256(data).hexdigest() and wanted.store.read(key) != data:
            wanted.store.write(key, data)


def again(wanted: Wanted, complete: Manifest, extent: int) -> Plan:
    """The plan of making shards of a finished cache again, where receipts are missing, and of
    ending such work.

    Raises:
      CacheError: other work is under way there.
    """
    opened = replace(
        reopened(complete, extent, wanted.manifest.run), software=wanted.manifest.software
    )
    manifest = begin_work(wanted.store, opened, lambda found: work_differences(found, opened))
    return replace(wanted.plan, manifest=manifest, finished=complete)


def _vocabulary(
    options: PrecomputeOptions, tokenizer: decoder.Tokenizer, teacher: decoder.ModelDescription
) -> int:
    """The number of ids that get probability; refuses a tokenizer that is not the teacher's."""
    if options.tokenizer and decoder.has_tokenizer(options.teacher, options.teacher_revision):
        own = decoder.load_tokenizer(options.teacher, options.teacher_revision)
        difference = tokenizer.mapping_difference(own)
        if difference:
            raise TeacherError(
                f"the tokenizer {options.tokenizer} is not the teacher's: {difference}. The "
                "teacher would read other tokens than were meant; use its own tokenizer."
            )
    rows = teacher.vocabulary_rows
    vocabulary = options.vocabulary or tokenizer.vocabulary
    if vocabulary > tokenizer.vocabulary:
        raise CaptureError(
            f"--vocabulary {vocabulary} is more than the tokenizer's {tokenizer.vocabulary} ids."
        )
    if vocabulary > rows:
        raise TeacherError(
            f"the tokenizer has {vocabulary} ids, but the teacher's head only {rows} rows. Use "
            f"the teacher's own tokenizer, or keep only ids that it has: --vocabulary {rows}."
        )
    if options.k > vocabulary:
        raise CaptureError(f"--k {options.k} is more than the vocabulary of {vocabulary} tokens.")
    draws = options.k - options.captured_exact
    if draws > MAX_DRAWS:
        raise CaptureError(
            f"--k {options.k} with --exact {options.captured_exact} leaves {draws} sampled "
            f"entries; at most {MAX_DRAWS} are possible. Lower --k or raise --exact."
        )
    return vocabulary


def _encoding(options: PrecomputeOptions, vocabulary: int) -> Encoding:
    return Encoding(
        length=options.length,
        vocabulary=vocabulary,
        k=options.k,
        tail=options.tail,
        temperatures=options.captured_temperatures,
        logprobs=options.logprobs,
        mantissa_bits=options.captured_mantissa_bits,
        rows_per_shard=options.rows_per_shard,
    )


def _capture(
    options: PrecomputeOptions, parts: PartSettings, opened: tuple[str, int]
) -> dict[str, Any]:
    """Every setting beside the encoding that decides the bytes of a cache."""
    backend, devices = opened
    return {
        "layout": parts.layout.kind,
        "overlap": parts.layout.overlap,
        "bos": parts.bos,
        "eos": parts.eos,
        "documents_per_part": parts.documents_per_part,
        "exact": options.captured_exact,
        "seed": options.captured_seed,
        "precision": options.precision,
        "micro_batch": options.micro_batch,
        "chunk": options.chunk,
        "teacher_devices": devices if options.shard_teacher else 1,
        "backend": backend,
        "targets_version": TARGETS_VERSION,
    }


def _backend(options: PrecomputeOptions) -> tuple[str, int]:
    """JAX's backend and number of local devices, as the workers will find them.

    With several workers this process must not open the devices itself: it would take their
    memory from the workers.
    """
    if options.workers == 1:
        check_backend()
        return jax.default_backend(), jax.local_device_count()
    found = subprocess.run(
        [sys.executable, "-P", "-c", _OPEN],
        capture_output=True,
        encoding="utf-8",
        errors="backslashreplace",
    )
    if found.returncode == _NOT_THERE:
        raise missing_backend(found.stdout)
    if found.returncode != 0:
        raise CaptureError(f"JAX finds no device in a process of its own:\n{found.stderr[-1000:]}")
    backend, devices = found.stdout.split()[-2:]
    return backend, int(devices)


def _absolute(options: PrecomputeOptions) -> PrecomputeOptions:
    """The options with local paths made absolute, for workers that start elsewhere."""

    def absolute(name: str | None) -> str | None:
        return str(Path(name).absolute()) if name and Path(name).exists() else name

    return replace(
        options,
        dataset=absolute(options.dataset) or options.dataset,
        teacher=absolute(options.teacher) or options.teacher,
        tokenizer=absolute(options.tokenizer),
    )


def finished(wanted: Wanted, complete: Manifest) -> cache.Cache:
    """A finished cache that needs no work of the command that asks.

    Raises:
      DamageError: it is damaged.
    """
    store = wanted.store
    work = work_under_way(store)
    # Work on shards that are in the manifest leaves the arrays' sizes as they are; an addition
    # does not.
    if work is None or work.first_shard in [extent.first_shard for extent in complete.extents]:
        settle_contents(store, complete)
    refuse_lacking(complete, missing_shards(store, complete))
    refuse_damaged(store)
    if not wanted.plan.options.keep_parts and work is None and store.list(PARTS):
        store.delete_folder(PARTS)
    return cache.open(store.location)


def refuse_damaged(store: Store) -> None:
    """A quick check of a finished cache: every object, receipt and size.

    Raises:
      DamageError: something is missing or not what it should be.
    """
    damage = [item for item in cache.verify(store.location).damage if item != WORK_UNFINISHED]
    if damage:
        raise DamageError(damage, repair(store.location))


def refuse_lacking(complete: Manifest, shards: Sequence[int]) -> None:
    """Says which commands make shards of other extents again, where their receipts are lost.

    Raises:
      DamageError: there are such shards.
    """
    if not shards:
        return
    damage = [
        Damage(
            f"{receipt_key(shard)} is lost",
            shard=shard,
            rows=complete.shard_rows(shard),
            documents=complete.receipts[shard].documents,
        )
        for shard in shards
    ]
    commands = "\n".join(f"  {line}" for line in makers(complete, shards))
    raise DamageError(
        damage,
        "The shards of these documents are all there. For the others, run the commands again "
        f"that made them:\n{commands}",
    )
