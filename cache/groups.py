"""Which rows hang together through documents or copies, and choosing among such groups."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import numpy as np
from jaxtyping import Bool, Integer, UInt8, UInt32, UInt64

from cache.errors import CacheError
from cache.format import NO_DOCUMENT


class DocumentGroups:
    """Collects which rows hang together through documents, from slices of rows in any order.

    Memory: one integer per document, two per row.

    Attributes:
      labels: uint32 [rows], labels of each row added.
    """

    def __init__(self, rows: int, documents: int):
        # A forest: each document points to a lower one of its group, or to itself.
        self._parent = np.arange(documents, dtype=np.uint32)
        self._document = np.full(rows, NO_DOCUMENT, np.uint32)
        self.labels = np.zeros(rows, np.uint32)

    def add(
        self,
        start: int,
        documents: UInt32[np.ndarray, "rows length"],
        label_mask: UInt8[np.ndarray, "rows length"],
    ) -> None:
        """Adds rows start, start + 1, …; arrays as stored.

        Raises:
          CacheError: a document that does not exist, or a label that has none.
        """
        real = documents != NO_DOCUMENT
        self._check(start, (documents >= len(self._parent)) & real, "has a document beyond")
        self._check(start, (label_mask == 1) & ~real, "has a label, but is of none of")
        first = documents[np.arange(len(documents)), real.argmax(axis=1)]
        rows = slice(start, start + len(documents))
        self._document[rows] = first
        self.labels[rows] = np.count_nonzero(label_mask == 1, axis=1)

        starts = _starts(documents)
        owner, _ = np.nonzero(starts)
        self._unite(first[owner], documents[starts])

    def unite_copies(self, copies: Copies) -> tuple[int, int]:
        """Makes what is a copy one group with what it copies; how many documents and rows are."""
        documents, rows = copies.documents(), copies.rows()
        self._unite(*(each.astype(np.uint32) for each in documents))
        self._unite(*(self._document[each] for each in rows))
        return len(documents[0]), len(rows[0])

    def _check(self, start: int, wrong: np.ndarray, what: str) -> None:
        if wrong.any():
            row, position = np.argwhere(wrong)[0].tolist()
            raise CacheError(
                f"row {start + row}, position {position} {what} the {len(self._parent):,} "
                "documents that the manifest lists: the cache is damaged. "
                "`stillroom verify --full` on it says where."
            )

    def _unite(
        self, left: UInt32[np.ndarray, " pairs"], right: UInt32[np.ndarray, " pairs"]
    ) -> None:
        """Makes the documents of each pair one group."""
        touched = np.unique(np.concatenate([left, right]))
        while len(left):
            left, right = self._roots(left), self._roots(right)
            apart = left != right
            left, right = left[apart], right[apart]
            # A root may be in many pairs: it goes to the lowest; the others come again.
            np.minimum.at(self._parent, np.maximum(left, right), np.minimum(left, right))
        self._parent[touched] = self._roots(touched)

    def _roots(self, documents: UInt32[np.ndarray, " n"]) -> UInt32[np.ndarray, " n"]:
        while True:
            above = self._parent[documents]
            if np.array_equal(above, documents):
                return documents
            documents = above

    def of_rows(self) -> Integer[np.ndarray, " rows"]:
        """int64 [rows]: a number for each row's group; -1 for a row without documents."""
        # Each pass halves the way to the root.
        while not np.array_equal(above := self._parent[self._parent], self._parent):
            self._parent = above
        known = self._document != NO_DOCUMENT
        groups = np.full(len(self._document), -1, np.int64)
        groups[known] = self._parent[self._document[known]]
        return groups


class Copies:
    """Finds documents, and rows, that hold the same tokens, from slices of rows in any order.

    A document is all its tokens in all its rows; what has no label is nobody's copy, for nothing
    is learnt of it. Memory: 17 bytes per document, 16 per row.
    """

    def __init__(self, rows: int, documents: int):
        # Of a document the sum over its pieces, which come in any order: a document that goes on
        # may end in a row before those that it fills. Zero: without labels.
        self._documents = np.zeros((documents, 2), np.uint64)
        self._labelled = np.zeros(documents, bool)
        self._rows = np.zeros((rows, 2), np.uint64)

    def add(
        self, start: int, rows: Mapping[str, np.ndarray], length: int | None, labels: np.ndarray
    ) -> None:
        """Adds rows start, start + 1, ….

        Args:
          start: number of the first.
          rows: their `tokens`, `segments` and `documents` as stored, [rows, length]; documents
            that exist.
          length: positions of a row that are trained on; all of them if None. Rows that are the
            same up to there are copies.
          labels: bool [rows, length]: positions with a label that is trained on.
        """
        tokens, segments, documents = rows["tokens"], rows["segments"], rows["documents"]
        self._labelled[documents[labels]] = True
        whole = np.concatenate([tokens[:, :length], segments[:, :length]], axis=1)
        for row in np.flatnonzero(labels.any(axis=1)).tolist():
            self._rows[start + row] = _digest(whole[row])
        starts = _starts(documents)
        places = np.argwhere(starts)
        pieces = np.zeros((len(places), 2), np.uint64)
        for piece, (row, first) in enumerate(places.tolist()):
            other = documents[row, first:] != documents[row, first]
            end = first + int(other.argmax()) if other.any() else None
            pieces[piece] = _digest(tokens[row, first:end])
        np.add.at(self._documents, documents[starts], pieces)

    def documents(self) -> tuple[np.ndarray, np.ndarray]:
        """Each document that is a copy of one before it, beside the first of these."""
        return _equal_pairs(self._documents, np.flatnonzero(self._labelled))

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Each row that is a copy of one before it, beside the first of these."""
        return _equal_pairs(self._rows, np.flatnonzero(self._rows.any(axis=1)))


def _starts(documents: UInt32[np.ndarray, "rows length"]) -> Bool[np.ndarray, "rows length"]:
    """Where a document starts or goes on in a row."""
    starts = documents != NO_DOCUMENT
    starts[:, 1:] &= documents[:, 1:] != documents[:, :-1]
    return starts


def _digest(values: np.ndarray) -> UInt64[np.ndarray, "2"]:
    """128 bits: in a corpus of 10^12 documents, two are taken for the same once in 10^14 times."""
    return np.frombuffer(blake2b(values.tobytes(), digest_size=16).digest(), "<u8")


def _equal_pairs(
    digests: UInt64[np.ndarray, "n 2"], chosen: Integer[np.ndarray, " chosen"]
) -> tuple[Integer[np.ndarray, " pairs"], Integer[np.ndarray, " pairs"]]:
    """Of the chosen, each that is the same as one before it, beside the first of these."""
    order = chosen[np.lexsort(digests[chosen].T)]
    same = np.zeros(len(order), bool)
    same[1:] = (digests[order[1:]] == digests[order[:-1]]).all(axis=1)
    first = np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))
    return order[first[same]], order[same]


def seeded_order(count: int, seed: int) -> Integer[np.ndarray, " groups"]:
    """The numbers 0 … count - 1 in an order that a seed decides, on any machine."""
    # The bits of a named generator, not its methods: those may change with numpy.
    keys = np.random.PCG64(seed).random_raw(count)
    return np.argsort(keys, kind="stable")


def fill_up(
    order: Integer[np.ndarray, " groups"], sizes: Integer[np.ndarray, " groups"], room: int
) -> Bool[np.ndarray, " groups"]:
    """Takes groups in an order, each if there is still room for it.

    Args:
      order: numbers of the groups, in the order in which they are tried.
      sizes: of each group, above 0.
      room: how much may be taken in all.

    Returns:
      Which groups were taken.
    """
    taken = np.zeros(len(sizes), bool)
    while len(order := order[sizes[order] <= room]):
        # Those that fit one after the other; the next one does not, and falls out above.
        total = np.cumsum(sizes[order])
        fits = int(np.searchsorted(total, room, side="right"))
        taken[order[:fits]] = True
        room -= int(total[fits - 1])
        order = order[fits:]
    return taken
