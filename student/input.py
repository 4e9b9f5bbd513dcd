"""Batches of a cache, in an order that the seed decides, from threads that read ahead.

The pipeline is Grain's. Three things of it need care, and get it here. A batch that could not be
read is skipped silently if one asks for the next: so an error ends the iteration. Its state is a
counter and says nothing of what it counts: so does ours, and a run's settings are kept beside it.
Hosts that each repeat a slice of the rows drift apart when the rows do not divide: so the epochs
are strung together first, padded to whole batches, and then dealt out to the hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
from jaxtyping import Int64

from cache import Cache
from student.batches import PADDING, Batch, BatchSettings, check_settings, read_batch
from student.errors import StudentError


@dataclass(frozen=True)
class InputSettings:
    """How rows become batches.

    Attributes:
      reading: what a batch holds.
      batch: rows of a step, over all hosts.
      epochs: passes over the rows.
      seed: of the order, 0 … 2^32 - 1. Each epoch has another order.
      threads: that read. Two were fastest: each reads all arrays at once.
      ahead: batches that are read ahead. They are what the input holds in memory.
      block: rows that stay together, in their order, when the order is drawn; see `_Blocks`.
    """

    reading: BatchSettings
    batch: int
    epochs: int
    seed: int
    threads: int = 2
    ahead: int = 4
    block: int = 1

    def __post_init__(self) -> None:
        for name in ("batch", "epochs", "threads", "ahead", "block"):
            if getattr(self, name) < 1:
                raise StudentError(f"{name} should be at least 1, found {getattr(self, name)}.")
        if not 0 <= self.seed < 2**32:
            raise StudentError(f"--seed should be between 0 and 2^32 - 1, found {self.seed}.")


class TrainingInput(Iterator[Batch]):
    """The batches of a training run, from any position on. An iterator; close it when done.

    All hosts together see every row once per epoch, in the same steps for any number of hosts:
    host h gets the rows h, h + hosts, … of each step. Only the last step is padded.

    Attributes:
      steps: batches in all.
      rows_per_host: rows of a batch here, padding included.
    """

    def __init__(
        self,
        cache: Cache,
        rows: Int64[np.ndarray, " rows"],
        settings: InputSettings,
        host: int = 0,
        hosts: int = 1,
    ):
        """Reads nothing yet.

        Args:
          cache: the cache.
          rows: the rows to train on, ascending.
          settings: batch size, epochs, order and what to read.
          host: which of the hosts this is.
          hosts: number of hosts.

        Raises:
          StudentError: rows that are not ascending rows of the cache, or a batch that the hosts
            do not divide.
          ObjectiveError: the temperature was not captured.
        """
        check_settings(cache, settings.reading)
        _check_rows(cache, rows)
        if not 0 <= host < hosts:
            raise StudentError(f"{hosts} hosts are numbered from 0; there is no host {host}.")
        if settings.batch % hosts:
            raise StudentError(
                f"--batch {settings.batch} cannot be shared equally by {hosts} hosts. "
                f"Use a multiple of {hosts}."
            )
        self._cache, self._rows, self._settings = cache, rows, settings
        self.rows_per_host = settings.batch // hosts
        self._places = _order(len(rows), settings, host, hosts)
        self.steps = len(self._places)
        self._step = 0
        self._reader: grain.DatasetIterator[Batch] | None = None
        self._failure: Exception | None = None

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
          DamageError, StorageError: a batch could not be read. So does every later call, until
            `restore`: the batch is never skipped. After a repair, open the cache again.
          StudentError: see `read_batch`; the same holds.
        """
        if self._failure is not None:
            raise self._failure
        if self._step == self.steps:
            self.close()
            raise StopIteration
        if self._reader is None:
            self._reader = _reader(
                self._places[self._step :], self._read, self._settings.threads, self._settings.ahead
            )
        try:
            batch = next(self._reader)
        except BaseException as error:
            # Grain would go on with the batch after the failed one.
            self.close()
            if isinstance(error, Exception):
                self._failure = error
            raise
        self._step += 1
        return batch

    def state(self) -> dict[str, int]:
        """The position after the last batch taken, for `restore`; can be written as JSON."""
        return {"step": self._step}

    def restore(self, state: Any) -> None:
        """Goes to a position that `state` gave, for the same rows and settings, any hosts.

        Raises:
          StudentError: it is no such position.
        """
        step = state.get("step") if isinstance(state, dict) and len(state) == 1 else None
        if type(step) is not int or not 0 <= step <= self.steps:
            raise StudentError(
                f"the position of the input should be a step from 0 to {self.steps}, found "
                f"{state!r}. Is the checkpoint of another run?"
            )
        self.close()
        self._failure = None
        self._step = step

    def rows_of(self, step: int) -> Int64[np.ndarray, " rows"]:
        """Row numbers of a step's batch on this host, -1 for padding; reads nothing.

        Raises:
          StudentError: there is no such step.
        """
        if not 0 <= step < self.steps:
            raise StudentError(f"the input has steps 0 to {self.steps - 1}, not {step}.")
        places = self._places[step]
        assert places is not None
        return _numbers(self._rows, places)

    def close(self) -> None:
        """Ends the threads; batches read ahead are dropped. The next batch starts new ones."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def __enter__(self) -> TrainingInput:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, places: np.ndarray) -> Batch:
        return read_batch(self._cache, self._settings.reading, _numbers(self._rows, places))


def held_out_batches(
    cache: Cache, rows: Int64[np.ndarray, " rows"], settings: BatchSettings, batch: int
) -> Iterator[Batch]:
    """Rows in order, `batch` at a time, the last batch padded; the next one is read ahead.

    Raises:
      StudentError: rows that are not ascending rows of the cache; see `read_batch`.
      DamageError: data is missing or damaged.
    """
    check_settings(cache, settings)
    _check_rows(cache, rows)
    if batch < 1:
        raise StudentError(f"a batch has at least 1 row, found {batch}.")
    padded = _followed_by_padding(grain.MapDataset.range(len(rows)), batch)
    places = padded.batch(batch, batch_fn=_stack)
    return _closing(
        _reader(places, lambda each: read_batch(cache, settings, _numbers(rows, each)), 1, 1)
    )


def _order(
    rows: int, settings: InputSettings, host: int, hosts: int
) -> grain.MapDataset[np.ndarray]:
    """Per step, the places in the list of rows of this host's batch."""
    if settings.block == 1:
        epochs = _epochs(rows, settings)
    else:
        epochs = grain.MapDataset.source(_Blocks(rows, settings))
    dealt = _followed_by_padding(epochs, settings.batch)[host::hosts]
    return dealt.batch(settings.batch // hosts, batch_fn=_stack)


def _epochs(count: int, settings: InputSettings) -> grain.MapDataset[Any]:
    """0 … count - 1 in another order for each epoch, one epoch after the other."""
    return grain.MapDataset.range(count).seed(settings.seed).shuffle().repeat(settings.epochs)


class _Blocks:
    """Places in the list of rows, epoch after epoch: blocks in random order, rows in theirs.

    A block is a run of rows that follow one another in the list (the last one may be shorter).
    Runs of rows lie in few files, so that a batch takes few requests; a batch of many blocks is
    still a mixture of the whole corpus. A random-access source for Grain.
    """

    def __init__(self, rows: int, settings: InputSettings):
        self._rows, self._block = rows, settings.block
        self._count = -(-rows // settings.block)
        self._epochs = settings.epochs
        self._order = _epochs(self._count, settings)
        self._known: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __len__(self) -> int:
        return self._rows * self._epochs

    def __getitem__(self, index: int) -> int:
        epoch, place = divmod(int(index), self._rows)
        blocks, ends = self._epoch(epoch)
        turn = int(np.searchsorted(ends, place, side="right"))
        start = int(ends[turn - 1]) if turn else 0
        return int(blocks[turn]) * self._block + place - start

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The blocks of an epoch in order, and the places where each ends."""
        known = self._known.get(epoch)
        if known is None:
            first = epoch * self._count
            blocks = np.array([self._order[first + turn] for turn in range(self._count)], np.int64)
            sizes = np.minimum(self._block, self._rows - blocks * self._block)
            known = blocks, np.cumsum(sizes)
            # Readers ahead may be in the next epoch already; no more are needed.
            self._known = {epoch: known, **{e: v for e, v in self._known.items() if e == epoch - 1}}
        return known


def _followed_by_padding(rows: grain.MapDataset[Any], batch: int) -> grain.MapDataset[Any]:
    """The same, with padding up to whole batches."""
    missing = -len(rows) % batch
    if not missing:
        return rows
    return grain.MapDataset.concatenate([rows, grain.MapDataset.source([PADDING] * missing)])


def _stack(places: Any) -> np.ndarray:
    return np.array(places, np.int64)


def _numbers(
    rows: Int64[np.ndarray, " rows"], places: Int64[np.ndarray, " batch"]
) -> Int64[np.ndarray, " batch"]:
    """Row numbers of places in the list of rows; padding stays padding."""
    return np.where(places == PADDING, PADDING, rows[places])


def _reader(
    places: grain.MapDataset[np.ndarray],
    read: Callable[[np.ndarray], Batch],
    threads: int,
    ahead: int,
) -> grain.DatasetIterator[Batch]:
    """Reads batches in threads, a few ahead of the one asked for."""
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
    return iter(places.map(read).to_iter_dataset(options))


def _closing(reader: grain.DatasetIterator[Batch]) -> Iterator[Batch]:
    """All batches; ends the threads at the end, at an error, or when it is left."""
    try:
        yield from reader
    finally:
        reader.close()


def _check_rows(cache: Cache, rows: np.ndarray) -> None:
    if not len(rows):
        raise StudentError("there are no rows to read.")
    if rows[0] < 0 or rows[-1] >= len(cache) or (np.diff(rows) <= 0).any():
        raise StudentError(
            f"rows should be ascending numbers from 0 to {len(cache) - 1}. "
            "Was the split made from this cache?"
        )
