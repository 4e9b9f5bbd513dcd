"""Which rows are trained on and which are held out; no document, nor its copy, is on both sides."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np
from jaxtyping import Integer

from cache import Cache
from cache.groups import Copies, DocumentGroups, fill_up, seeded_order
from student.batches import check_single_rows
from student.errors import StudentError

# Rows that are read at a time: a few megabytes.
_SLICE = 4096


@dataclass(frozen=True)
class Split:
    """Rows of a cache on two sides.

    Attributes:
      training, held_out: int64 row numbers, ascending.
      training_labels, held_out_labels: labels of each side that are within the length.
      groups: sets of rows that stay together, over both sides; rows with labels alone count.
      largest_group: rows of the largest of them.
      rows_without_labels: rows on neither side, for they train and measure nothing.
      emptied_rows: of these, the ones that have labels, but beyond the length.
      cut_labels: labels of the training rows that are beyond the length.
      copied_documents, copied_rows: how many are exact copies of others before them.
      other: whether the split is another one than by documents' numbers alone, as it was made
        before copies and emptied rows were looked for.
    """

    training: np.ndarray
    held_out: np.ndarray
    training_labels: int
    held_out_labels: int
    groups: int
    largest_group: int
    rows_without_labels: int
    emptied_rows: int = 0
    cut_labels: int = 0
    copied_documents: int = 0
    copied_rows: int = 0
    other: bool = False

    @property
    def digest(self) -> str:
        """sha256 of which rows are on which side."""
        sides = [self.training.astype("<i8").tobytes(), self.held_out.astype("<i8").tobytes()]
        return sha256(b"%d:" % len(self.training) + b"".join(sides)).hexdigest()


def split_rows(
    cache: Cache,
    held_out: int | float,
    seed: int,
    progress: Callable[[int], None] | None = None,
    slice_rows: int = _SLICE,
    length: int | None = None,
) -> Split:
    """Splits a cache's rows by document: rows that share a document, or a copy, stay together.

    Rows that share a document, documents that share a row, and documents or rows of the same
    tokens (`cache.groups.Copies`) are one group, transitively. A side holds whole groups. Depends
    on the cache, `held_out`, `seed` and `length` alone. Documents that are nearly the same may be
    on both sides.

    Args:
      cache: the cache.
      held_out: below 1 a share of the rows with labels (at least one row, unless it is 0), else
        a number of rows. As many are held out as whole groups allow, never more.
      seed: decides which groups are held out; at least 0.
      progress: called with the number of rows read so far.
      slice_rows: rows that are read at a time.
      length: positions of a row that are used; all of them if None. Labels beyond do not count.

    Raises:
      StudentError: more rows are asked for than there are, nothing is left to train on, no
        group is small enough, or no label is within the length.
      CacheError: documents are not what the manifest says.
      DamageError: data is missing or damaged.
    """
    check_single_rows(cache)
    ranges = [entry.documents for entry in cache.manifest.receipts if entry.documents]
    documents = max((last + 1 for _, last in ranges), default=0)
    groups, copies = DocumentGroups(len(cache), documents), Copies(len(cache), documents)
    kept = np.zeros(len(cache), np.uint32)
    for start in range(0, len(cache), slice_rows):
        rows = slice(start, min(start + slice_rows, len(cache)))
        read = cache.rows(rows, ("tokens", "segments", "documents", "label_mask"))
        groups.add(start, read["documents"], read["label_mask"])
        labels = read["label_mask"] == 1
        if length is not None:
            labels[:, length:] = False
        kept[rows] = np.count_nonzero(labels, axis=1)
        copies.add(start, read, length, labels)
        if progress is not None:
            progress(rows.stop)
    emptied = (groups.labels > 0) & (kept == 0)
    if emptied.any() and not kept.any():
        raise StudentError(f"--length {length} leaves no label of any row. Use a larger one.")
    by_number = groups.of_rows()
    copied = groups.unite_copies(copies)
    found = choose(groups.of_rows(), kept, held_out, seed, copied)
    other = (any(copied) or emptied.any()) and _differs(
        found, by_number, groups.labels, held_out, seed
    )
    return replace(
        found,
        emptied_rows=int(np.count_nonzero(emptied)),
        cut_labels=int((groups.labels - kept)[found.training].sum(dtype=np.int64)),
        copied_documents=copied[0],
        copied_rows=copied[1],
        other=bool(other),
    )


def _differs(
    found: Split, groups: np.ndarray, labels: np.ndarray, held_out: int | float, seed: int
) -> bool:
    try:
        before = choose(groups, labels, held_out, seed)
    except StudentError:
        return True
    return found.digest != before.digest


def choose(
    groups: Integer[np.ndarray, " rows"],
    labels: Integer[np.ndarray, " rows"],
    held_out: int | float,
    seed: int,
    copied: tuple[int, int] = (0, 0),
) -> Split:
    """Takes whole groups, in an order that the seed decides, while they fit.

    Args:
      groups: the number of each row's group.
      labels: labels of each row; rows without any are on neither side.
      held_out, seed: see `split_rows`.
      copied: how many documents and rows are copies; the groups hold them together.

    Raises:
      StudentError: see `split_rows`.
    """
    rows = np.flatnonzero(labels)
    wanted = _wanted(held_out, len(rows))
    numbers, group, sizes = np.unique(groups[rows], return_inverse=True, return_counts=True)
    taken = np.zeros(len(numbers), bool)
    if wanted:
        if sizes.min() > wanted:
            raise StudentError(_no_group_fits(held_out, wanted, sizes, copied))
        taken = fill_up(seeded_order(len(numbers), seed), sizes, wanted)
    out = taken[group]
    if out.all():
        raise StudentError(
            f"--held-out {held_out:g} takes all {len(rows):,} rows with labels, and nothing is "
            "left to train on. Ask for fewer."
        )
    return Split(
        training=rows[~out],
        held_out=rows[out],
        training_labels=int(labels[rows[~out]].sum(dtype=np.int64)),
        held_out_labels=int(labels[rows[out]].sum(dtype=np.int64)),
        groups=len(numbers),
        largest_group=int(sizes.max()),
        rows_without_labels=len(labels) - len(rows),
    )


def _wanted(held_out: int | float, rows: int) -> int:
    """How many of the rows with labels to hold out."""
    if not (0 <= held_out < math.inf) or (held_out >= 1 and held_out != int(held_out)):
        raise StudentError(
            f"--held-out should be a share below 1, or a whole number of rows, found {held_out!r}."
        )
    if not rows:
        raise StudentError("no row of the cache has a label: there is nothing to train on.")
    if 0 < held_out < 1:
        return max(1, round(held_out * rows))
    if held_out > rows:
        raise StudentError(
            f"--held-out {held_out:g} is more than the {rows:,} rows with labels in the cache. "
            "Ask for fewer, or for a share below 1."
        )
    return int(held_out)


def _no_group_fits(
    held_out: int | float,
    wanted: int,
    sizes: Integer[np.ndarray, " groups"],
    copied: tuple[int, int],
) -> str:
    found = (
        f"--held-out {held_out:g} asks for {wanted:,} of {sizes.sum():,} rows with labels, but "
        "rows that share documents stay together"
    )
    otherwise = ""
    if any(copied):
        found += (
            f", and so do copies: {copied[0]:,} documents and {copied[1]:,} rows are exact copies "
            "of others"
        )
        otherwise = (
            " Or take the copies out of the corpus and capture again; if the cache is packed, "
            "--layout pad helps as well: its rows hold one document each, and no copy ties others."
        )
    if len(sizes) == 1:
        return (
            f"{found}. All of them are one such group: nothing can be held out. Ask for 0."
            f"{otherwise}"
        )
    least = f"{sizes.min():,} rows"
    return (
        f"{found}. The smallest such group has {least}. Ask for at least {least}, or for 0."
        f"{otherwise}"
    )
