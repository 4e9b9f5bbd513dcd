"""Audit: a teacher scores some rows of a cache again, and both are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro
from jaxtyping import Int64

import cache
import decoder
from cache.errors import CacheError
from cache.manifest import Manifest
from cache.provenance import DERIVED, recomputed
from cache.storage import Store
from decoder.devices import check_backend
from pipelines.audit_measure import (
    BOUNDS,
    LEAST_DRAWS,
    Difference,
    Ids,
    compare_ids,
    compare_log_probs,
)
from pipelines.errors import CaptureError, TeacherError
from pipelines.parts import PartSettings
from pipelines.plan import Plan, corpus_settings, layout_settings, options_of
from pipelines.shards import score_rows
from pipelines.teacher import Teacher, named_by_manifest

# Libraries whose release decides last bits.
_DECIDING = ("jax", "jaxlib")


@dataclass(frozen=True)
class AuditOptions:
    """Scores some rows of a cache again with its teacher and compares.

    Finds a cache that another checkpoint made, or another precision, library or device than
    the manifest says. Exits with 1 if anything is further apart than the bounds: for a capture in
    float32 0.001 nats, on average 0.0001; in bfloat16 2 nats, on average 0.05. What storing
    rounded, and in a derived cache what was recomputed from rounded numbers, is allowed on top.

    Example: stillroom audit cache --teacher models/teacher --rows 64
    """

    cache: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CACHE")]
    """The cache: a local path, gs://…, s3://… or http://…."""
    teacher: Annotated[str | None, tyro.conf.arg(metavar="NAME|PATH|MODULE:FUNCTION")] = None
    """The teacher. Unset: where the manifest says it was."""
    teacher_revision: str | None = None
    """Revision of a hub teacher; resolved to a commit. Unset: that of the capture, or the newest
    of a --teacher."""
    rows: int = 32
    """Rows to score, chosen by the seed; all of them if there are fewer."""
    seed: int = 0
    """Of the choice of rows."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Of the teacher now. Unset: that of the capture."""
    other_files: bool = False
    """Accept a teacher whose fingerprint is another if its numbers are the same: the same
    weights in other files."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise CaptureError(f"--rows should be at least 1, found {self.rows}.")
        if not 0 <= self.seed < 2**32:
            raise CaptureError(f"--seed should be between 0 and 2^32 - 1, found {self.seed}.")


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
      location: the cache.
      rows: the rows that were scored again.
      labels: positions compared.
      precision: of the capture; its bounds hold.
      largest_bound, mean_bound: how far log-probs may be apart, nats.
      differences: of quantities in nats.
      ids: of entries.
      findings: what is wrong, a sentence each; empty if all is as it should be.
      notes: what may explain differences.
    """

    location: str
    rows: tuple[int, ...]
    labels: int
    precision: str
    largest_bound: float
    mean_bound: float
    differences: tuple[Difference, ...]
    ids: tuple[Ids, ...]
    findings: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def sound(self) -> bool:
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        ids = [{**asdict(each), "share": each.share} for each in self.ids]
        return {**asdict(self), "ids": ids, "sound": self.sound}


def audit(options: AuditOptions, progress: Callable[[int, int], None] | None = None) -> Audit:
    """Scores some rows of a cache again and compares them with what it holds.

    Args:
      options: see there.
      progress: called with (rows done, rows in all).

    Raises:
      CacheError, PipelineError, DecoderError: it could not be done.
    """
    opened = cache.open(options.cache)
    check_backend()
    manifest, encoding = opened.manifest, opened.encoding
    source = options.teacher or manifest.teacher["source"]
    revision = options.teacher_revision
    if options.teacher is None and revision is None:
        revision = manifest.teacher.get("revision")
    with named_by_manifest(options.teacher is None):
        described = decoder.describe_model(source, revision)
    if described.vocabulary_rows < encoding.vocabulary:
        raise TeacherError(
            f"the teacher {source} has {described.vocabulary_rows:,} rows in its head, the cache "
            f"{encoding.vocabulary:,} tokens: it is not this cache's teacher."
        )
    plan = _plan(opened, options, source, revision, described.fingerprint)
    teacher = Teacher(plan)
    chosen = choose_rows(len(opened), options.rows, options.seed)
    pieces = []
    for start in range(0, len(chosen), teacher.batch):
        rows = chosen[start : start + teacher.batch]
        stored = opened.rows(rows)
        fresh = _score(teacher, stored, opened.stored_rows(rows))
        pieces.append((stored, fresh))
        if progress is not None:
            progress(start + len(rows), len(chosen))
    stored, fresh = (
        {name: np.concatenate([piece[side][name] for piece in pieces]) for name in pieces[0][side]}
        for side in (0, 1)
    )
    precision = manifest.capture["precision"]
    largest, mean = BOUNDS[precision]
    comparable = DERIVED not in manifest.capture
    error = manifest.relative_error
    history = recomputed(encoding, manifest.capture)
    differences = compare_log_probs(stored, fresh, encoding, error, history)
    ids = compare_ids(stored, fresh, encoding, error, largest, comparable)
    fingerprint = _fingerprint_finding(manifest, described.fingerprint, options.other_files)
    return Audit(
        location=opened.location,
        rows=tuple(chosen.tolist()),
        labels=int((stored["label_mask"] == 1).sum()),
        precision=precision,
        largest_bound=largest,
        mean_bound=mean,
        differences=tuple(differences),
        ids=tuple(ids),
        findings=(*fingerprint, *findings(differences, ids, precision)),
        notes=tuple(_notes(manifest, options, comparable)),
    )


def choose_rows(total: int, wanted: int, seed: int) -> Int64[np.ndarray, " rows"]:
    """Different rows of a cache, ascending, chosen by the seed alone; all if there are fewer."""
    # The bits of a named generator, not its methods: those may change with numpy.
    keys = np.random.PCG64(seed).random_raw(total)
    return np.sort(np.argsort(keys, kind="stable")[:wanted]).astype(np.int64)


def findings(differences: list[Difference], ids: list[Ids], precision: str) -> list[str]:
    """What is further apart than the bounds of a precision allow, a sentence each."""
    largest, mean = BOUNDS[precision]
    found = [
        f"{each.name}: largest difference {each.largest:.3g} nats, mean {each.mean:.3g}; "
        f"expected at most {largest:g} and {mean:g}"
        for each in differences
        if not (each.largest <= largest and each.mean <= mean)
    ]
    for each in ids:
        if each.unexplained:
            found.append(
                f"{each.name}: {each.unexplained:,} of {each.count:,} are not there again, though "
                "their log-probs are no ties"
            )
        least = LEAST_DRAWS[precision]
        if each.name == "sampled entries" and each.share < least:
            found.append(
                f"{each.name}: {each.share:.1%} are drawn again, expected at least {least:.0%}"
            )
    return found


def _score(teacher: Teacher, stored: dict[str, Any], numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Targets of rows that do not follow one another; `numbers` key their random numbers."""
    rows = {name: stored[name] for name in ("tokens", "segments", "documents", "label_mask")}
    padded = np.zeros(teacher.batch, np.int32)
    padded[: len(numbers)] = numbers

    def score(tokens: np.ndarray, segments: np.ndarray, places: np.ndarray) -> Any:
        return teacher.score(tokens, segments, padded[places])

    return score_rows(score, rows, 0, teacher.batch)


def _plan(
    opened: cache.Cache, options: AuditOptions, source: str, revision: str | None, fingerprint: str
) -> Plan:
    """A plan with the capture's settings and the teacher that is there now."""
    manifest = opened.manifest
    given = {} if options.precision is None else {"precision": options.precision}
    try:
        capture = options_of(
            manifest,
            dataset=str(manifest.corpus.get("description") or "the cache"),
            teacher=source,
            teacher_revision=revision,
            out=options.cache,
            **given,
        )
    except KeyError as error:
        raise CacheError(
            f"the manifest of {opened.location} does not say how it was captured: it lacks {error}."
        ) from error
    tokenizer = decoder.tokenizer_from_files(opened.tokenizer_files())
    return Plan(
        store=Store(options.cache),
        options=capture,
        manifest=replace(manifest, teacher={**manifest.teacher, "fingerprint": fingerprint}),
        corpus=corpus_settings(capture),
        parts=PartSettings(
            layout=layout_settings(capture),
            bos=manifest.capture["bos"],
            eos=manifest.capture["eos"],
            vocabulary=opened.encoding.vocabulary,
            documents_per_part=capture.documents_per_part,
        ),
        holes=tuple(hole for hole in tokenizer.holes if hole < opened.encoding.vocabulary),
    )


def _fingerprint_finding(manifest: Manifest, fingerprint: str, accepted: bool) -> list[str]:
    expected = manifest.teacher["fingerprint"]
    if fingerprint == expected or accepted:
        return []
    return [
        f"the teacher has fingerprint {fingerprint[:12]}…, the cache's had {expected[:12]}…: "
        "config or weights are others (--other-files accepts it if the numbers are the same)"
    ]


def _notes(manifest: Manifest, options: AuditOptions, comparable: bool) -> list[str]:
    notes = []
    backend = jax.default_backend()
    if backend != manifest.capture["backend"]:
        notes.append(f"The capture ran on {manifest.capture['backend']}, this is {backend}.")
    if options.precision not in (None, manifest.capture["precision"]):
        notes.append(
            f"The capture ran in {manifest.capture['precision']}, this is {options.precision}."
        )
    for name in _DECIDING:
        before, now = manifest.software.get(name), metadata.version(name)
        if before not in (None, now):
            notes.append(f"The capture ran with {name} {before}, this is {now}.")
    if manifest.as_read.encoding.tail == "sampled" and not comparable:
        notes.append("The sampled entries are not compared: they were drawn from another cache.")
    return notes


def render(found: Audit) -> str:
    """An audit as text."""
    lines = [
        f"{found.location}: {len(found.rows):,} rows scored again, {found.labels:,} labels; bounds "
        f"for {found.precision}: {found.largest_bound:g} nats, mean {found.mean_bound:g}"
    ]
    width = max(len(each.name) for each in (*found.differences, *found.ids))
    lines += [
        f"  {each.name:<{width}}  {each.count:>12,}  largest {each.largest:.3g}, "
        f"mean {each.mean:.3g}"
        for each in found.differences
    ]
    lines += [
        f"  {each.name:<{width}}  {each.count:>12,}  {each.share:.2%} are there again"
        for each in found.ids
    ]
    lines += found.notes
    if found.sound:
        return "\n".join([*lines, "sound"])
    return "\n".join([*lines, "not what this teacher gives:", *(f"  {x}" for x in found.findings)])
