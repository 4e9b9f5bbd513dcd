"""Append: more documents, scored by the same teacher, as a new extent of a finished cache."""

from __future__ import annotations

from dataclasses import asdict, replace

from cache.filling import begin_work, unfinished
from cache.format import WORK
from cache.manifest import Manifest, read_manifest
from cache.provenance import DERIVED
from cache.storage import Store
from pipelines.agreement import settings_apart, work_differences
from pipelines.begin import (
    Wanted,
    again,
    finished,
    refuse_damaged,
    what_is_wanted,
    write_tokenizer,
)
from pipelines.errors import CaptureError
from pipelines.options import AppendOptions
from pipelines.parts import parts_folder
from pipelines.plan import options_of
from pipelines.precompute import Outcome, fill
from pipelines.runner import check_runner
from pipelines.teacher import named_by_manifest

_OWN = ("cache", "teacher")


def append(options: AppendOptions) -> Outcome:
    """Adds documents to a cache, or goes on with an unfinished addition.

    The settings are those in the manifest. The complete manifest stays until all new shards are
    done and is then replaced by one that lists them as well.

    Raises:
      PipelineError, CacheError, DecoderError: what is wrong and what to do; nothing that
        was captured is lost.
    """
    store = Store(options.cache)
    complete, _ = read_manifest(store)
    if complete.state != "complete":
        raise CaptureError(
            f"the cache {store.location} is not finished. Run the command that began it again "
            "first."
        )
    if DERIVED in complete.capture:
        raise CaptureError(
            f"the cache {store.location} was derived from others: no teacher can add to it. Append "
            "to its source and derive again, or capture the new documents and derive a joined one."
        )
    given = {name: value for name, value in asdict(options).items() if name not in _OWN}
    asked = options_of(
        complete,
        out=options.cache,
        teacher=options.teacher or complete.teacher["source"],
        teacher_revision=None if options.teacher else complete.teacher.get("revision"),
        **given,
    )
    check_runner(asked)
    with named_by_manifest(options.teacher is None and options.tokenizer is None):
        wanted = what_is_wanted(asked)
    differences = list(settings_apart(complete, wanted.manifest))
    if differences:
        lines = "\n".join(f"  {line}" for line in differences)
        raise CaptureError(
            f"these documents cannot be added to {store.location} as it was made:\n{lines}\n"
            "Use the same teacher on the same kind of device. Nothing was changed."
        )
    opened = replace(
        wanted.manifest,
        encoding=complete.encoding,
        capture=complete.capture,
        first_shard=complete.shards,
        first_document=complete.documents or 0,
    )
    extent = _extent_with(complete, wanted)
    if extent is None:
        if store.read(WORK) is None:
            refuse_damaged(store)
            # Of work that was given up: rows of other documents, which must not pass for ours.
            store.delete_folder(parts_folder(opened.first_shard))
        manifest = begin_work(store, opened, lambda found: work_differences(found, opened))
        return fill(replace(wanted.plan, manifest=manifest, finished=complete))
    return _known(wanted, complete, extent)


def _extent_with(complete: Manifest, wanted: Wanted) -> int | None:
    """The extent that was made from these documents, as far as can be told without reading them."""
    identities = [corpus.get("identity") for corpus in complete.corpora]
    identity = wanted.manifest.corpus["identity"]
    return identities.index(identity) if identity in identities else None


def _known(wanted: Wanted, complete: Manifest, extent: int) -> Outcome:
    if extent == 0:
        raise CaptureError(
            f"these are the documents that {wanted.store.location} was made from. Nothing was "
            "appended."
        )
    write_tokenizer(wanted, complete)
    if unfinished(wanted.store, complete, extent):
        return fill(again(wanted, complete, extent))
    note = "These documents are in the cache already; nothing was appended."
    return Outcome(finished(wanted, complete), 0, (note,))
