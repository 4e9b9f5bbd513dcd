"""Beginning a capture: what is asked for, what is there already, and whether they agree."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import uuid
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import cache
import decoder
from cache.errors import DamageError
from cache.format import MANIFEST, PARTS, TOKENIZER, Encoding
from cache.manifest import Manifest
from cache.reader import REPAIR
from cache.storage import Store
from pipelines.agreement import agree
from pipelines.corpus import open_corpus
from pipelines.encode import resolve_bos, resolve_eos
from pipelines.errors import CaptureError, TeacherError
from pipelines.options import PrecomputeOptions
from pipelines.parts import PartSettings
from pipelines.plan import Plan, corpus_settings, layout_settings
from pipelines.sampling import MAX_DRAWS

# Raised when the same settings begin to mean other targets.
TARGETS_VERSION = 1
# Libraries that the manifest names the releases of.
_SOFTWARE = ("jax", "jaxlib", "flax", "numpy", "tensorstore")


def begin(options: PrecomputeOptions) -> Plan | cache.Cache:
    """Opens the corpus, teacher and cache of a capture, and refuses what does not agree.

    Returns:
      The plan of the work, its open manifest written; or the cache, if it is finished and
      holds exactly what is asked for.

    Raises:
      PipelineError, CacheError, DecoderError: what is wrong and what to do.
    """
    store = Store(options.out)
    _check_place(store)
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
        capture=_capture(options, parts),
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
        run=f"{uuid.uuid4().hex[:12]}",
    )
    manifest = agree(store, wanted, corpus)
    if manifest.state == "complete":
        return _finished(store, options)
    for name, data in files.items():
        store.write(f"{TOKENIZER}/{name}", data)
    return Plan(
        store=store,
        options=_absolute(options),
        manifest=manifest,
        corpus=corpus_settings(_absolute(options)),
        parts=parts,
        holes=tuple(hole for hole in tokenizer.holes if hole < vocabulary),
    )


def _check_place(store: Store) -> None:
    """Refuses a folder that holds something else than a cache."""
    place = store.local
    if place is None or not place.exists():
        return
    if not place.is_dir():
        raise CaptureError(f"--out {place} is a file. A cache is a folder; choose another path.")
    # A write that was killed leaves its lock behind, perhaps that of the very first object.
    names = sorted(path.name for path in place.iterdir() if "__lock" not in path.name)
    if names and MANIFEST not in names:
        raise CaptureError(
            f"--out {place} is not a cache and not empty: it holds {', '.join(names[:5])}. "
            "Choose another path."
        )


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
    if options.tail == "sampled" and options.k - options.exact > MAX_DRAWS:
        raise CaptureError(
            f"--k {options.k} with --exact {options.exact} leaves {options.k - options.exact} "
            f"sampled entries; at most {MAX_DRAWS} are possible. Lower --k or raise --exact."
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
        mantissa_bits=options.mantissa_bits,
        rows_per_shard=options.rows_per_shard,
    )


def _capture(options: PrecomputeOptions, parts: PartSettings) -> dict[str, Any]:
    """Every setting beside the encoding that decides the bytes of a cache."""
    sampled = options.tail == "sampled"
    backend, devices = _backend(options)
    return {
        "layout": parts.layout.kind,
        "overlap": parts.layout.overlap,
        "bos": parts.bos,
        "eos": parts.eos,
        "documents_per_part": parts.documents_per_part,
        "exact": options.exact if sampled else options.k,
        "seed": options.seed if sampled else 0,
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
        return jax.default_backend(), jax.local_device_count()
    code = "import jax; print(jax.default_backend(), jax.local_device_count())"
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
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


def _finished(store: Store, options: PrecomputeOptions) -> cache.Cache:
    report = cache.verify(store.location)
    if not report.sound:
        raise DamageError(report.damage, REPAIR)
    if not options.keep_parts and store.list(PARTS):
        store.delete_folder(PARTS)
    return cache.open(store.location)
