"""Rows of a cache as one batch of arrays, ready for the devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Integer

from cache import Cache, Encoding
from student.errors import ObjectiveError, StudentError

PADDING = -1
"""Stands for a row of padding where row numbers are asked for."""

_LABELS = ("tokens", "segments", "label_mask", "label_logprobs")
_TARGETS = ("target_ids", "target_logprobs", "exact_counts", "tail_logprobs", "entropy")


class Targets(NamedTuple):
    """What the cache keeps of the teacher, as stored, at one temperature.

    Attributes:
      ids: uint16 or uint32 [rows, length, k]; exact entries first.
      logprobs: float16 or float32 [rows, length, k], natural log, temperature 1.
      exact_counts: int32 [rows, length].
      tail_logprobs: float32 [rows, length], log of the mass outside the exact entries.
      entropy: float32 [rows, length], nats, temperature 1.

    Arrays are numpy's on the host and JAX's on devices.
    Values where there is no label mean nothing (NaN, illegal ids).
    """

    ids: Any
    logprobs: Any
    exact_counts: Any
    tail_logprobs: Any
    entropy: Any


class Batch(NamedTuple):
    """Rows to train on or to evaluate. A pytree.

    Attributes:
      rows: int32 [rows]: their numbers in the cache; -1 for padding, a row without tokens.
      tokens: int32 [rows, length]; 0 in padding.
      segments: int32 [rows, length]; 0 in padding.
      labels: int32 [rows, length]: the token that each position predicts; 0 without a label.
      label_mask: bool [rows, length].
      label_logprobs: float32 [rows, length]: the teacher's log-prob of the label, nats.
      targets: None when only labels are trained on.
    """

    rows: Any
    tokens: Any
    segments: Any
    labels: Any
    label_mask: Any
    label_logprobs: Any
    targets: Targets | None


@dataclass(frozen=True)
class BatchSettings:
    """What a batch holds of the rows of a cache.

    Attributes:
      most_id: logits that the student gives; ids should be below it.
      length: keep the first so many positions of each row; all of them if None.
      targets: whether the teacher's targets are read, or the labels alone.
      temperature: of the tail's mass, a captured one; the capture's first if None.
    """

    most_id: int
    length: int | None = None
    targets: bool = True
    temperature: float | None = None

    def __post_init__(self) -> None:
        if self.most_id < 1:
            raise StudentError(f"a student gives at least 1 logit, found {self.most_id}")
        if self.length is not None and self.length < 1:
            raise StudentError(f"--length should be at least 1, found {self.length}.")


def check_settings(cache: Cache, settings: BatchSettings) -> None:
    """Checks that a cache can give batches with these settings; reads nothing.

    Raises:
      ObjectiveError: the temperature was not captured.
      StudentError: rows are shorter than is asked for, or are halves of preference pairs.
    """
    encoding = cache.encoding
    check_single_rows(cache)
    if settings.length is not None and settings.length > encoding.length:
        raise StudentError(
            f"--length {settings.length} is more than the {encoding.length} positions of a row "
            "in the cache. Use at most that, or capture again with longer rows."
        )
    if settings.targets:
        _temperature_index(encoding, settings.temperature)


def check_single_rows(cache: Cache) -> None:
    """Refuses a cache of preference pairs, whose two rows nothing may separate.

    Raises:
      StudentError: an example takes more than one row.
    """
    if cache.encoding.rows_per_example != 1:
        raise StudentError(
            f"the cache holds examples of {cache.encoding.rows_per_example} rows (preference "
            "pairs), which cannot be trained on yet. Capture with a layout of one row each."
        )


def read_batch(
    cache: Cache, settings: BatchSettings, indices: Integer[np.ndarray, " rows"]
) -> Batch:
    """Reads rows of a cache in one batched read per array.

    Args:
      cache: the cache.
      settings: what to read of it.
      indices: row numbers in any order; -1 gives a row of padding.

    Returns:
      The batch, [rows, length], in the order asked for.

    Raises:
      StudentError: an id that the student cannot predict, or a label without its token; and
        what `check_settings` refuses.
      CacheError: a row that does not exist.
      DamageError: data is missing or damaged.
    """
    check_settings(cache, settings)
    encoding = cache.encoding
    stored = _rows_and_padding(cache, settings, indices)
    length = encoding.length if settings.length is None else settings.length

    label_mask = stored["label_mask"] == 1
    if label_mask[:, -1].any():
        row = indices[label_mask[:, -1]][0]
        raise StudentError(
            f"row {row}: its last position has a label, but there is no token after it. "
            f"Run `stillroom verify {cache.location} --full`."
        )
    tokens = stored["tokens"]
    following = np.concatenate([tokens[:, 1:], np.zeros_like(tokens[:, :1])], axis=1)
    tokens, following, label_mask = (
        values[:, :length] for values in (tokens, following, label_mask)
    )
    labels = np.where(label_mask, following, 0)
    limit = min(encoding.vocabulary, settings.most_id)
    for what, ids in (("token", tokens), ("label", labels)):
        _check_ids(what, ids, ids >= limit, cache, settings, indices)
    return Batch(
        rows=indices.astype(np.int32),
        tokens=tokens.astype(np.int32),
        segments=stored["segments"][:, :length].astype(np.int32),
        labels=labels.astype(np.int32),
        label_mask=label_mask,
        label_logprobs=stored["label_logprobs"][:, :length],
        targets=_targets(stored, cache, settings, indices) if settings.targets else None,
    )


def _targets(
    stored: dict[str, np.ndarray],
    cache: Cache,
    settings: BatchSettings,
    indices: Integer[np.ndarray, " rows"],
) -> Targets:
    encoding = cache.encoding
    cut = {name: stored[name][:, : settings.length] for name in (*_TARGETS, "label_mask")}
    ids = cut["target_ids"]
    wrong = (ids >= min(encoding.vocabulary, settings.most_id)) & (ids != encoding.no_id)
    # Where there is no label, ids mean nothing.
    wrong &= (cut["label_mask"] == 1)[..., None]
    _check_ids("target", ids, wrong, cache, settings, indices)
    tails = cut["tail_logprobs"][..., _temperature_index(encoding, settings.temperature)]
    return Targets(
        ids=ids,
        logprobs=cut["target_logprobs"],
        exact_counts=cut["exact_counts"].astype(np.int32),
        tail_logprobs=tails.astype(np.float32),
        entropy=cut["entropy"].astype(np.float32),
    )


def _rows_and_padding(
    cache: Cache, settings: BatchSettings, indices: Integer[np.ndarray, " rows"]
) -> dict[str, np.ndarray]:
    """Stored arrays by name; in rows of padding no labels, and the arrays' fill elsewhere."""
    fields = _LABELS + (_TARGETS if settings.targets else ())
    real = indices != PADDING
    read = cache.rows(indices[real], fields)
    if real.all():
        return read
    empty = {"tokens": 0, "segments": 0, "label_mask": 0}
    specs = cache.encoding.arrays()
    whole = {}
    for name, values in read.items():
        fill = empty.get(name, specs[name].fill)
        whole[name] = np.full((len(indices), *values.shape[1:]), fill, values.dtype)
        whole[name][real] = values
    return whole


def _temperature_index(encoding: Encoding, temperature: float | None) -> int:
    """Which captured temperature it is.

    Raises:
      ObjectiveError: it was not captured.
    """
    if temperature is None:
        return 0
    if temperature not in encoding.temperatures:
        captured = ", ".join(f"{value:g}" for value in encoding.temperatures)
        raise ObjectiveError(
            f"--temperature {temperature:g}: the cache was captured at {captured}, and what it "
            "holds cannot be turned into the teacher's distribution at another temperature. "
            "Use a captured one, or capture again with this one."
        )
    return encoding.temperatures.index(temperature)


def _check_ids(
    what: str,
    ids: np.ndarray,
    wrong: Bool[np.ndarray, "..."],
    cache: Cache,
    settings: BatchSettings,
    indices: Integer[np.ndarray, " rows"],
) -> None:
    if not wrong.any():
        return
    place = tuple(np.argwhere(wrong)[0].tolist())
    found = (
        f"row {indices[place[0]]}, position {place[1]}: the {what} id {ids[place]} "
        f"({np.count_nonzero(wrong)} such places in this batch)"
    )
    if ids[place] >= cache.encoding.vocabulary:
        raise StudentError(
            f"{found} is not below the cache's vocabulary of {cache.encoding.vocabulary:,}. "
            f"Run `stillroom verify {cache.location} --full`."
        )
    raise StudentError(
        f"{found} is beyond the student's {settings.most_id:,} logits; the cache's vocabulary "
        f"is {cache.encoding.vocabulary:,}. Train a student that has a row for every id."
    )
