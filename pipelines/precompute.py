"""Precompute: corpus and teacher in, a finished cache out; resumes, and refuses what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from apache_beam.utils.shared import Shared

import cache
from cache.filling import work_under_way
from cache.finishing import finish
from cache.format import RUNS, WORK, receipt_key
from cache.progress import watch
from cache.runlog import FAILED, RunLog, read_events
from cache.shards import create_arrays, finished_shards
from cache.soundness import check_receipts, listed_receipts
from cache.storage import Store
from cache.visible import say
from pipelines.begin import begin, refuse_lacking
from pipelines.corpus import combine_digests, part_ranges
from pipelines.errors import CaptureError, CorpusError
from pipelines.options import PrecomputeOptions
from pipelines.parts import (
    PartReceipt,
    part_key,
    read_part_receipts,
    total_accounting,
)
from pipelines.plan import Plan
from pipelines.runner import RunnerSettings, check_runner, run_pipeline
from pipelines.transforms import LayPart, ScoreShard, _Stage, stage_pipeline


@dataclass(frozen=True)
class Outcome:
    """What `precompute` did.

    Attributes:
      cache: the finished cache.
      scored: shards scored in this run; 0 if the cache was already finished.
      notes: what its user should know, one sentence each.
    """

    cache: cache.Cache
    scored: int
    notes: tuple[str, ...]


def precompute(options: PrecomputeOptions) -> Outcome:
    """Runs a teacher over a corpus into a cache, or goes on with an unfinished one.

    Raises:
      PipelineError, CacheError, DecoderError: what is wrong and what to do; nothing that
        was captured is lost.
    """
    check_runner(options)
    started = begin(options)
    if isinstance(started, cache.Cache):
        return Outcome(started, 0, tuple(_work_of_others(Store(started.location))))
    return fill(started)


def _work_of_others(store: Store) -> Iterator[str]:
    work = work_under_way(store)
    if work is not None:
        yield (
            f"An append of {work.corpus.get('description')} is not finished; run it again to "
            "finish it."
        )


def fill(plan: Plan) -> Outcome:
    """Lays the parts of a plan, scores its shards and finishes the cache.

    Raises:
      PipelineError, CacheError, DecoderError: see `precompute`.
    """
    store, run = plan.store, plan.run
    store.write(
        f"{RUNS}/{run}/config.toml", plan.options.to_toml().encode(errors="surrogateescape")
    )
    log = RunLog(store, run)
    log.write("begin", software=plan.manifest.software)
    laid = _lay_parts(plan)
    plan = replace(
        plan,
        laid=tuple((receipt.rows, receipt.sha256) for receipt in laid),
        manifest=plan.manifest.with_corpus(
            digest=combine_digests([receipt.digest for receipt in laid]),
            parts=[receipt.digest for receipt in laid],
        ),
    )
    notes = _check_rows(plan, laid)
    _refuse_known_documents(plan)
    notes = (*notes, *_known_parts(plan))
    scored = _score_shards(plan)
    complete, changed, lacking = finish(store, plan.manifest, plan.rows, total_accounting(laid))
    if changed:
        notes = (
            *notes,
            "Shards that were made again have other bytes than before, for this is not the "
            "machine or the software that made them; the manifest lists the new ones.",
        )
    log.write("finish", scored=scored)
    if not plan.options.keep_parts:
        store.delete_folder(plan.parts_folder)
    refuse_lacking(complete, lacking)
    return Outcome(cache.open(store.location), scored, notes)


def _lay_parts(plan: Plan) -> list[PartReceipt]:
    documents = plan.manifest.corpus["documents"]
    total = len(part_ranges(documents, plan.parts.documents_per_part))
    folder = plan.parts_folder
    receipts = read_part_receipts(plan.store, total, folder)
    # A clean-up that was killed may have left receipts without rows.
    files = {f"{folder}/{name}" for name in plan.store.list(folder)}
    pending = [
        part for part in range(total) if part not in receipts or part_key(part, folder) not in files
    ]
    _run_stage(
        plan,
        LayPart,
        pending,
        title="Tokenising",
        count=lambda: sum(
            name.endswith(".json") and "/" not in name for name in plan.store.list(folder)
        ),
        total=total,
    )
    receipts = read_part_receipts(plan.store, total, folder)
    _refuse_failed(plan, "part", [part for part in range(total) if part not in receipts])
    laid = [receipts[part] for part in range(total)]
    before = plan.manifest.corpus.get("parts")
    if before is not None and before != [receipt.digest for receipt in laid]:
        changed = [r for r, old in zip(laid, before, strict=True) if r.digest != old]
        first, end = changed[0].documents
        raise CorpusError(
            f"documents {first}-{end - 1} are not those that the cache was made from. Restore "
            "the corpus, or capture into a new folder."
        )
    return laid


def _check_rows(plan: Plan, laid: Sequence[PartReceipt]) -> tuple[str, ...]:
    accounting = total_accounting(laid)
    if not accounting["labels"]:
        _give_up_addition(plan)
        raise CorpusError(
            f"the corpus has nothing to predict: {accounting['documents']:,} documents, of which "
            f"{accounting['empty_documents']:,} are empty and "
            f"{accounting['one_token_documents']:,} have one token. Check --dataset and --column."
        )
    notes = []
    if accounting["dropped_bytes"]:
        notes.append(
            f"The tokenizer has no token for {accounting['dropped_bytes']:,} bytes of "
            f"{accounting['documents_with_dropped_bytes']:,} documents and leaves them out."
        )
    if accounting["rows_without_labels"]:
        notes.append(f"{accounting['rows_without_labels']:,} rows have nothing to predict.")
    return tuple(notes)


def _other_corpora(plan: Plan) -> dict[int, dict[str, Any]]:
    """What is in the cache beside the extent that is filled, by the first shard."""
    if plan.finished is None:
        return {}
    pairs = zip(plan.finished.extents, plan.finished.corpora, strict=True)
    corpora = {extent.first_shard: corpus for extent, corpus in pairs}
    corpora.pop(plan.manifest.first_shard, None)
    return corpora


def _give_up_addition(plan: Plan) -> None:
    """Removes the work on documents that cannot be added, so that others can be."""
    if plan.finished is not None and plan.manifest.first_shard == plan.finished.shards:
        plan.store.delete(WORK)
        plan.store.delete_folder(plan.parts_folder)


def _refuse_known_documents(plan: Plan) -> None:
    """Refuses to append documents that the cache has already, and gives up the work on them."""
    for first_shard, corpus in _other_corpora(plan).items():
        if corpus.get("digest") == plan.manifest.corpus["digest"]:
            _give_up_addition(plan)
            raise CorpusError(
                f"these documents are in the cache already, from shard {first_shard} on "
                f"({corpus.get('description')}). Nothing was appended."
            )


def _known_parts(plan: Plan) -> Iterator[str]:
    """Says which added documents, by the part, are in the cache already."""
    others = _other_corpora(plan).values()
    listed = [corpus for corpus in others if isinstance(corpus.get("parts"), list)]
    known = {digest: corpus for corpus in listed for digest in corpus["parts"]}
    size = plan.parts.documents_per_part
    for part, digest in enumerate(plan.manifest.corpus["parts"]):
        if digest in known:
            yield (
                f"The documents from {part * size:,} on ({size:,} or fewer) are in the cache "
                f"already, of {known[digest].get('description')}: students see them more often."
            )


def _score_shards(plan: Plan) -> int:
    """Scores every shard without a sound receipt; returns how many there were."""
    encoding = plan.manifest.encoding
    shards, total = plan.shards, len(plan.shards)
    if plan.finished is None:
        create_arrays(plan.store, encoding, plan.rows)
    done = _sound_shards(plan)
    pending = [shard for shard in shards if shard not in done]
    if pending:
        say(
            f"Scoring {len(pending)} of {total} shards of {encoding.rows_per_shard} rows, "
            f"{len(done)} are done; processes that load the teacher: {plan.options.workers}."
        )
    _run_stage(
        plan,
        ScoreShard,
        pending,
        title="Scoring",
        count=lambda: len(finished_shards(plan.store).intersection(shards)),
        total=total,
        tokens=plan.rows * encoding.length / max(total, 1),
    )
    # A receipt that another run wrote late is none.
    have, _ = listed_receipts(plan.store, plan.manifest, pending, plan.stored_rows)
    _refuse_failed(plan, "shard", [shard for shard in pending if shard not in have])
    return len(pending)


def _sound_shards(plan: Plan) -> set[int]:
    """Shards whose receipt is of this capture and whose files have the right sizes.

    The receipts of others are removed, so that they are scored again; not those of other
    extents.
    """
    have = finished_shards(plan.store) - plan.elsewhere
    ours = sorted(have.intersection(plan.shards))
    sound, damage = check_receipts(plan.store, plan.manifest, ours, plan.stored_rows)
    for item in damage:
        say(f"Scored again: {item}.")
    for shard in sorted(have - set(sound)):
        plan.store.delete(receipt_key(shard))
    return set(sound)


def _run_stage(
    plan: Plan,
    stage: type[_Stage],
    pending: list[int],
    *,
    title: str,
    count: Callable[[], int],
    total: int,
    tokens: float = 0.0,
) -> None:
    if not pending:
        return
    with watch(title, count, total - len(pending), total, tokens):
        run_pipeline(
            lambda root: stage_pipeline(root, stage(plan, Shared()), pending),
            RunnerSettings(
                plan.options.runner,
                min(plan.options.workers, len(pending)),
                plan.options.beam_options,
            ),
        )


def _refuse_failed(plan: Plan, name: str, failed: list[int]) -> None:
    if not failed:
        return
    reasons = {
        event[name]: event["reason"]
        for event in read_events(plan.store, plan.run)
        if event["event"] == FAILED and name in event
    }
    lines = [
        f"  {name} {number}: {reasons.get(number, 'no reason is known')}" for number in failed[:10]
    ]
    more = f"\n  and {len(failed) - 10} more" if len(failed) > 10 else ""
    raise CaptureError(
        f"{len(failed)} {name}(s) could not be done; the others are finished:\n"
        + "\n".join(lines)
        + more
        + "\nRun the same command again when the cause is mended: it redoes only these. "
        f"Tracebacks are in {plan.store.location}/{RUNS}/{plan.run}/."
    )
