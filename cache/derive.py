"""`stillroom derive`: a new cache from finished ones, without the teacher.

Fewer entries, coarser rounding, some rows, another cut into shards, several caches as one: the
result is a cache like any other, with receipts and provenance of its own. Equal commands give
equal bytes, whatever was interrupted.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
from jaxtyping import Int64

from cache.derivation import Recipe, derive_rows
from cache.derive_differences import differences
from cache.errors import DamageError
from cache.filling import begin_fill, begin_work, check_place, new_run, reopened, unfinished
from cache.finishing import finish, settle
from cache.format import MANIFEST, TOKENIZER, WORK, receipt_key
from cache.joining import Numbering, check_joinable, cut, join_corpora, rows_held
from cache.manifest import Manifest
from cache.operations import recipe_of, row_range, sample_rows
from cache.options import DeriveOptions
from cache.places import check_apart
from cache.progress import counted, watch
from cache.provenance import DERIVED
from cache.reader import Cache, repair
from cache.reader import open as open_cache
from cache.receipt import Receipt
from cache.runlog import RunLog
from cache.shards import create_arrays, finished_shards, read_receipts, write_shard
from cache.soundness import check_receipts
from cache.statistics import combine
from cache.storage import Store
from cache.verify import WORK_UNFINISHED, verify
from cache.visible import say

# Entries that are worked on at a time: some tens of megabytes in float64.
_BATCH_ENTRIES = 2**19
# Raised when the same options begin to mean other bytes.
_VERSION = 1


@dataclass(frozen=True)
class Derived:
    """What `derive` did.

    Attributes:
      cache: the finished cache.
      made: shards made in this run; 0 if the cache was already finished.
    """

    cache: Cache
    made: int


@dataclass(frozen=True)
class _Plan:
    """What a derivation is.

    Attributes:
      sources: the caches.
      numberings: of the documents of each.
      recipe: how targets change.
      rows: the rows to take, numbered through all sources, ascending.
      manifest: the open manifest.
    """

    sources: tuple[Cache, ...]
    numberings: tuple[Numbering, ...]
    recipe: Recipe
    rows: Int64[np.ndarray, " row"]
    manifest: Manifest


def derive(options: DeriveOptions) -> Derived:
    """Derives a cache, or goes on with an unfinished one. Safe to stop at any time.

    Raises:
      CacheError: it cannot be derived as asked, or something else is at the place for it.
      DamageError: a source is damaged; what was derived so far stays.
      TakenOverError: another run began to write there.
      StorageError: storage refused to read or write.
    """
    _check_outside(options)
    store = Store(options.out)
    check_place(store)
    plan = _plan(options, _recorded(store))
    manifest = begin_fill(
        store, plan.manifest, lambda found: differences(found, plan.manifest, options.sources)
    )
    finished = manifest if manifest.state == "complete" else None
    _copy_tokenizer(plan.sources[0], store)
    if finished is not None:
        if not unfinished(store, finished, 0):
            return Derived(_checked(store, finished), 0)
        opened = reopened(finished)
        manifest = begin_work(
            store, opened, lambda found: differences(found, opened, options.sources)
        )
    plan = replace(plan, manifest=manifest)
    made = _fill(plan, store, finished)
    finish(store, manifest, len(plan.rows), _accounting(plan, store))
    return Derived(open_cache(store.location), made)


def _check_outside(options: DeriveOptions) -> None:
    """Refuses to write into a source."""
    for source in options.sources:
        check_apart(options.out, source, "which it would be derived from")


def _recorded(store: Store) -> list[dict[str, Any]]:
    """What a derived cache says of its sources; nothing if there is none."""
    data = store.read(MANIFEST)
    manifest = None if data is None else Manifest.from_bytes(data, store.location)
    return [] if manifest is None else manifest.capture.get(DERIVED, {}).get("sources", [])


def _plan(options: DeriveOptions, recorded: list[dict[str, Any]]) -> _Plan:
    opened = [
        _as_it_was(*_open(location), known)
        for location, known in zip_longest(options.sources, recorded[: len(options.sources)])
    ]
    sources = tuple(source for source, _ in opened)
    digests = [sha256 for _, sha256 in opened]
    for note in check_joinable(sources, options.rows_per_shard):
        say(note)
    manifests = [source.manifest for source in sources]
    recipe = recipe_of(manifests, digests, options)
    corpus, numberings = join_corpora(manifests)
    total = sum(len(source) for source in sources)
    per_example = recipe.source.rows_per_example
    first, end = row_range(options, total, per_example)
    rows = np.arange(first, end)
    if options.sample is not None:
        with counted("Grouping rows by document") as progress:
            rows = sample_rows(
                lambda start, stop: _read(
                    sources, numberings, np.arange(start, stop), ("documents", "label_mask")
                ),
                (first, end),
                per_example,
                corpus["documents"],
                options,
                progress,
            )
    taken = None if options.sample is not None else _rows_held(sources, first, end)
    first_one = manifests[0]
    manifest = Manifest(
        encoding=recipe.wanted,
        capture={
            **first_one.as_read.capture,
            "exact": recipe.exact,
            DERIVED: {
                "version": _VERSION,
                "sources": [
                    _source(manifest, sha) for manifest, sha in zip(manifests, digests, strict=True)
                ],
                "rows": None if options.rows is None else [first, end],
                "rows_held": taken,
                **_operations(recipe, options),
            },
        },
        teacher=first_one.teacher,
        tokenizer=first_one.tokenizer,
        corpus=corpus,
        software=first_one.software,
        run=new_run(),
    )
    return _Plan(sources, tuple(numberings), recipe, rows, manifest)


def _open(location: str) -> tuple[Cache, str]:
    """A finished cache, and the sha256 of its manifest as stored."""
    # Says what is wrong if it is not finished.
    open_cache(location)
    store = Store(location)
    data = store.read(MANIFEST) or b""
    manifest = Manifest.from_bytes(data, store.location)
    return Cache(store, manifest), hashlib.sha256(data).hexdigest()


def _as_it_was(now: Cache, sha256: str, known: dict[str, Any] | None) -> tuple[Cache, str]:
    """A source without the documents that were appended since the derivation began.

    Args:
      now: the source.
      sha256: of its manifest.
      known: what the output records of it, if it is there.

    Returns:
      The source with the recorded rows, and the sha256 of its manifest then; those given where
      it has not grown from that.
    """
    if known is None or known["manifest_sha256"] == sha256:
        return now, sha256
    extents = now.manifest.extents
    for count in range(1, len(extents)):
        if sum(extent.rows for extent in extents[:count]) == known["rows"]:
            before = now.before(count)
            then = hashlib.sha256(before.manifest.to_bytes()).hexdigest()
            if then == known["manifest_sha256"]:
                say(
                    f"{now.location} has grown to {len(now):,} rows since: its first "
                    f"{known['rows']:,} are taken, as before. For all of them derive into another "
                    "folder."
                )
                return before, then
    return now, sha256


def _source(manifest: Manifest, sha256: str) -> dict[str, Any]:
    """What the output says of one source; of one that was derived itself, all of its history."""
    known = {
        "identities": manifest.identities(),
        "manifest_sha256": sha256,
        "rows": manifest.rows,
        "k": manifest.encoding.k,
        "tail": manifest.encoding.tail,
        "logprobs": manifest.encoding.logprobs,
        "mantissa_bits": manifest.encoding.mantissa_bits,
    }
    derived = manifest.capture.get(DERIVED)
    return known if derived is None else {**known, DERIVED: derived}


def _operations(recipe: Recipe, options: DeriveOptions) -> dict[str, Any]:
    """What was drawn at random, and how far log-probs may be off; the encoding says the rest."""
    found: dict[str, Any] = {}
    if options.sample is not None:
        found["sample"] = options.sample
    if recipe.draws or options.sample is not None:
        found["seed"] = options.draw_seed
    if recipe.error != recipe.wanted.relative_error:
        found["relative_error"] = recipe.error
    return found


def _rows_held(sources: tuple[Cache, ...], first: int, end: int) -> list[list[Any]] | None:
    held = [rows_held(source.manifest) for source in sources]
    if any(each is None for each in held):
        return None
    return [list(rows) for rows in cut([rows for each in held for rows in each or ()], first, end)]


def _copy_tokenizer(source: Cache, store: Store) -> None:
    try:
        files = source.tokenizer_files()
    except DamageError as error:
        raise _of_source(source, error) from error
    for name, data in files.items():
        key = f"{TOKENIZER}/{name}"
        if store.read(key) != data:
            store.write(key, data)


def _of_source(source: Cache, error: DamageError) -> DamageError:
    return DamageError(
        error.damage,
        f"That is in the source {source.location}. {repair(source.location)} Then derive again.",
    )


def _checked(store: Store, complete: Manifest) -> Cache:
    """A finished cache that needs no work.

    Raises:
      DamageError: it is damaged.
    """
    if store.read(WORK) is None:
        settle(store, complete)
    damage = [item for item in verify(store.location).damage if item != WORK_UNFINISHED]
    if damage:
        raise DamageError(damage, repair(store.location))
    return open_cache(store.location)


def _fill(plan: _Plan, store: Store, finished: Manifest | None) -> int:
    """Makes every shard without a sound receipt; returns how many there were."""
    manifest, total = plan.manifest, len(plan.rows)
    encoding = manifest.encoding
    shards = encoding.shards(total)
    log = RunLog(store, manifest.run)
    log.write("begin", command="derive", software={"numpy": np.__version__})
    if finished is None:
        create_arrays(store, encoding, total)
    have = finished_shards(store)
    if finished is not None:
        have -= set(range(shards, finished.shards))
    sound, damage = check_receipts(store, manifest, sorted(have.intersection(range(shards))), total)
    for item in damage:
        say(f"Made again: {item}.")
    for shard in sorted(have - set(sound)):
        store.delete(receipt_key(shard))
    pending = [shard for shard in range(shards) if shard not in sound]
    done = shards - len(pending)
    tokens = total * encoding.length / max(shards, 1)
    with watch("Deriving", lambda: done, done, shards, tokens):
        for shard in pending:
            start = time.monotonic()
            first, end = encoding.shard_rows(shard, total)
            arrays = _make(plan, first, end)
            seconds = time.monotonic() - start
            receipt = write_shard(store, manifest, shard, total, arrays)
            log.write(
                "shard",
                shard=shard,
                tokens=receipt.statistics.tokens,
                deriving_seconds=round(seconds, 3),
                writing_seconds=round(time.monotonic() - start - seconds, 3),
            )
            done += 1
    log.write("finish", made=len(pending))
    return len(pending)


def _make(plan: _Plan, first: int, end: int) -> dict[str, np.ndarray]:
    """The arrays of some rows of the output."""
    source = plan.recipe.source
    step = max(1, _BATCH_ENTRIES // (source.length * source.k))
    encoding = plan.recipe.wanted
    made = {
        name: np.empty((end - first, *spec.inner), spec.dtype)
        for name, spec in encoding.arrays().items()
    }
    for start in range(first, end, step):
        stop = min(start + step, end)
        arrays = _read(plan.sources, plan.numberings, plan.rows[start:stop], None)
        derived = derive_rows(arrays, np.arange(start, stop), plan.recipe)
        for name, values in derived.items():
            made[name][start - first : stop - first] = values
    return made


def _read(
    sources: tuple[Cache, ...],
    numberings: tuple[Numbering, ...] | list[Numbering],
    rows: np.ndarray,
    fields: tuple[str, ...] | None,
) -> dict[str, np.ndarray]:
    """Rows, ascending, numbered through all sources, with the documents' numbers of the output.

    Raises:
      DamageError: they are damaged; names the source.
    """
    ends = np.cumsum([len(source) for source in sources])
    parts = []
    for source, numbering, end in zip(sources, numberings, ends, strict=True):
        here = rows[(rows >= end - len(source)) & (rows < end)]
        if not len(here):
            continue
        try:
            values = source.rows(here - (end - len(source)), fields)
        except DamageError as error:
            raise _of_source(source, error) from error
        values["documents"] = numbering.of(values["documents"])
        parts.append(values)
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _accounting(plan: _Plan, store: Store) -> dict[str, Any]:
    """What is kept of the sources, and what is not."""
    shards = range(plan.manifest.encoding.shards(len(plan.rows)))
    receipts = [
        Receipt.from_bytes(data, receipt_key(shard)).statistics
        for shard, data in read_receipts(store, shards).items()
        if data is not None
    ]
    kept = combine(receipts, len(plan.manifest.encoding.temperatures))
    before = [source.manifest.statistics for source in plan.sources]
    names = ("rows", "tokens", "labels")
    return {
        **{name: getattr(kept, name) for name in names},
        "left_out": {
            name: sum(getattr(each, name) for each in before if each) - getattr(kept, name)
            for name in names
        },
    }
