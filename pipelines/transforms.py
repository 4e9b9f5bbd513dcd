"""The Beam transforms: thin wrappers over `parts.lay_part`, `shards.score_rows`, `write_shard`."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import apache_beam as beam
from apache_beam.utils.shared import Shared

from cache.encoding import encode_shard, numbered_from
from cache.errors import CacheError
from cache.runlog import FAILED, RunLog
from cache.shards import TakenOverError, write_shard
from cache.storage import StorageError
from decoder.errors import DecoderError
from decoder.tokenizer import load_tokenizer
from pipelines.corpus import open_corpus
from pipelines.errors import PipelineError, TeacherError
from pipelines.parts import PartRows, lay_part
from pipelines.plan import Plan
from pipelines.shards import score_rows
from pipelines.teacher import Teacher

# Errors that every further element would meet as well: the run ends at once.
_FATAL = (StorageError, TakenOverError)
# Errors whose text is for the user. Beam hands on the text of an exception, not its type.
USER_ERRORS = (PipelineError, CacheError, DecoderError)
_MARK = "\x1estillroom:"


class WorkerError(Exception):
    """A user's error on its way through Beam; `user_text` finds its text again."""

    def __init__(self, text: str):
        # Beam makes an exception anew from its own text and where it was raised.
        marked = _MARK in text
        super().__init__(text if marked else f"{_MARK}{json.dumps(text)}{_MARK}")


def user_text(error: BaseException) -> str | None:
    """The text of the user's error in what Beam raised, or None if it is not one."""
    pieces = str(error).split(_MARK)
    return json.loads(pieces[1]) if len(pieces) >= 3 else None


class _Stage(beam.DoFn):
    """One element is one number: of a part or of a shard. Emits it when it is done.

    An exception concerns its element alone: it is logged, the others go on, and the command
    reports what has no receipt in the end. What every element would meet ends the run.
    """

    name = "element"

    def __init__(self, plan: Plan, shared: Shared):
        self._plan = plan
        self._shared = shared

    def setup(self) -> None:
        self._log = RunLog(self._plan.store, self._plan.run)
        try:
            self._prepare()
        except USER_ERRORS as error:
            raise WorkerError(str(error)) from error

    def process(self, element: int) -> Iterator[int]:
        self._attempt(element, lambda: self._work(element))
        yield element

    def _attempt(self, element: int, work: Callable[[], None]) -> None:
        try:
            try:
                work()
            except (WorkerError, *_FATAL):
                raise
            except Exception as error:  # noqa: BLE001  (logged; the command names it and fails)
                reason = str(error) if isinstance(error, USER_ERRORS) else repr(error)
                self._log.write(
                    FAILED,
                    **{self.name: element},
                    reason=reason,
                    trace=traceback.format_exc(),
                )
        except _FATAL as error:
            raise WorkerError(str(error)) from error

    def _prepare(self) -> None: ...

    def _work(self, element: int) -> None: ...


class LayPart(_Stage):
    """Lays a part of the corpus: see `parts.lay_part`."""

    name = "part"

    def _prepare(self) -> None:
        options = self._plan.options
        # A revision is the teacher's, not that of a tokenizer from elsewhere.
        revision = None if options.tokenizer else options.teacher_revision
        self._tokenizer = self._shared.acquire(
            lambda: load_tokenizer(options.tokenizer or options.teacher, revision),
            tag="tokenizer",
        )
        expected = self._plan.manifest.tokenizer["fingerprint"]
        if self._tokenizer.fingerprint != expected:
            raise TeacherError(
                f"the tokenizer that this worker loaded has fingerprint "
                f"{self._tokenizer.fingerprint[:12]}…, the cache was begun with "
                f"{expected[:12]}…. Every worker needs the same files."
            )
        self._corpus = open_corpus(self._plan.corpus)

    def _work(self, element: int) -> None:
        start = time.monotonic()
        plan = self._plan
        receipt = lay_part(
            plan.store, self._corpus, self._tokenizer, plan.parts, element, plan.parts_folder
        )
        self._log.write(
            "part", part=element, rows=receipt.rows, seconds=round(time.monotonic() - start, 3)
        )


class ScoreShard(_Stage):
    """Scores, encodes and stores a shard: see `shards.score_rows` and `cache.write_shard`.

    Encoding and writing run in a thread of their own while the next shard is scored.
    """

    name = "shard"

    def _prepare(self) -> None:
        plan = self._plan
        self._rows = PartRows(plan.store, plan.laid, plan.parts_folder)
        self._teacher = self._shared.acquire(lambda: Teacher(plan), tag=plan.run)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="write-shard")
        self._writing: Future[None] | None = None

    def _work(self, element: int) -> None:
        plan = self._plan
        first, end = plan.manifest.encoding.shard_rows(element, plan.stored_rows)
        start = time.monotonic()
        rows = self._rows.read(first - plan.first_row, end - plan.first_row)
        rows["documents"] = numbered_from(rows["documents"], plan.manifest.first_document)
        targets = score_rows(self._teacher.score, rows, first, self._teacher.batch)
        seconds = time.monotonic() - start
        self._wait()
        self._writing = self._writer.submit(
            self._attempt, element, lambda: self._store(element, rows, targets, seconds)
        )

    def _store(self, shard: int, rows: Any, targets: Any, seconds: float) -> None:
        plan = self._plan
        start = time.monotonic()
        arrays = encode_shard(rows, targets, plan.manifest.encoding)
        receipt = write_shard(plan.store, plan.manifest, shard, plan.stored_rows, arrays)
        self._log.write(
            "shard",
            shard=shard,
            tokens=receipt.statistics.tokens,
            scoring_seconds=round(seconds, 3),
            writing_seconds=round(time.monotonic() - start, 3),
        )

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def finish_bundle(self) -> None:
        self._wait()

    def teardown(self) -> None:
        if hasattr(self, "_writer"):
            self._writer.shutdown()


def stage_pipeline(root: Any, dofn: _Stage, elements: list[int]) -> Any:
    """Adds one stage to a pipeline: a single chain, which every runner can execute.

    Args:
      root: a Beam pipeline.
      dofn: what is done with each element.
      elements: numbers of parts or shards.
    """
    return (
        root
        | f"Create {dofn.name}s" >> beam.Create(elements)
        | f"Spread {dofn.name}s" >> beam.Reshuffle()
        | f"Do each {dofn.name}" >> beam.ParDo(dofn)
        | f"Count {dofn.name}s" >> beam.combiners.Count.Globally()
    )
