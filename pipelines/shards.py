"""Scoring the rows of a shard in micro-batches of one shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from cache.encoding import padding_rows
from cache.format import NO_DOCUMENT
from pipelines.errors import TeacherError

# Scores one micro-batch: tokens and segments [rows, length], row numbers [rows].
Score = Callable[[np.ndarray, np.ndarray, np.ndarray], Any]


def micro_batches(
    rows: Mapping[str, np.ndarray], first_row: int, size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Tokens, segments and row numbers in batches of one size; padding fills the last.

    Yields:
      tokens int32 [size, length], segments int32 [size, length], row numbers int32 [size].
    """
    count, length = rows["tokens"].shape
    for start in range(0, count, size):
        batch = {name: rows[name][start : start + size] for name in ("tokens", "segments")}
        missing = size - len(batch["tokens"])
        if missing:
            padding = padding_rows(missing, length)
            batch = {name: np.concatenate([batch[name], padding[name]]) for name in batch}
        numbers = first_row + start + np.arange(size)
        yield (
            batch["tokens"].astype(np.int32),
            batch["segments"].astype(np.int32),
            numbers.astype(np.int32),
        )


def score_rows(
    score: Score, rows: Mapping[str, np.ndarray], first_row: int, size: int
) -> dict[str, np.ndarray]:
    """The teacher's targets of some rows, scored in micro-batches of one size.

    A micro-batch is dispatched before the one before it is fetched, so that the device
    does not wait for the host.

    Args:
      score: dispatches one micro-batch and returns a pytree with the fields of `Targets`.
      rows: tokens, segments, documents, label_mask, each [row, position].
      first_row: number of the first row in the corpus.
      size: rows in a micro-batch, over all devices.

    Returns:
      The fields of `Targets` as numpy arrays [row, position, ...].

    Raises:
      TeacherError: logits that are not numbers, with row and position.
    """
    count = len(rows["tokens"])
    fetched: list[dict[str, np.ndarray]] = []
    waiting = None
    for batch in micro_batches(rows, first_row, size):
        dispatched = score(*batch)
        if waiting is not None:
            fetched.append(_fetch(waiting))
        waiting = dispatched
    if waiting is not None:
        fetched.append(_fetch(waiting))
    targets = {
        name: np.concatenate([piece[name] for piece in fetched])[:count] for name in fetched[0]
    }
    _check_finite(targets.pop("finite"), rows, first_row)
    return targets


def _fetch(targets: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in targets._asdict().items()}


def _check_finite(finite: np.ndarray, rows: Mapping[str, np.ndarray], first_row: int) -> None:
    wrong = np.argwhere(~finite & (rows["label_mask"] == 1))
    if not len(wrong):
        return
    row, position = wrong[0].tolist()
    document = int(rows["documents"][row, position])
    named = "no document" if document == NO_DOCUMENT else f"document {document}"
    raise TeacherError(
        f"the teacher's logits are not numbers at {len(wrong)} positions, first at row "
        f"{first_row + row}, position {position} ({named}). Check the teacher's weights, or "
        "capture with --precision float32; nothing was stored for this shard."
    )
