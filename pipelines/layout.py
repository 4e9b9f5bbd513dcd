"""How documents become rows of fixed length. Pure numpy, no input or output.

A document longer than a row is cut into *pieces*: a piece that is not the
first repeats the last `overlap` tokens of the one before, so that every token
but a document's first is predicted exactly once, from as much context as the
row allows. Nothing is invented at a cut. A document's full-length pieces lie
in rows of their own, in order; its one remaining piece may share a row.

`pack` places the remaining pieces whole, best fit in document order. So no
document is cut unless it is longer than a row, and no document shares more
than one row. Documents that share rows, transitively, therefore form small
*groups*: one shared row and its members' own rows. A split by group keeps a
document on one side without tying the whole corpus together.

Rows depend on the documents given, their order and the settings alone.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import UInt8, UInt16, UInt32

from cache.format import NO_DOCUMENT
from pipelines.errors import PipelineError

MAX_SEGMENTS = 0xFFFF
"""Documents that one row can number in uint16, 0 being padding."""


@dataclass(frozen=True)
class LayoutSettings:
    """How documents are laid into rows.

    Attributes:
      kind: `pack` lays several documents into a row; `pad` one.
      length: positions per row, at least 2 (one label).
      overlap: tokens that a continued document repeats, 1 <= overlap < length.
    """

    kind: Literal["pack", "pad"] = "pack"
    length: int = 512  # positions
    overlap: int = 1  # tokens; 1 loses no label, more gives more context after a cut

    def __post_init__(self) -> None:
        if self.kind in _PLANNED_LAYOUTS:
            raise PipelineError(
                f"The layout {self.kind!r} is not yet available: use one of {', '.join(_LAYOUTS)}."
            )
        if self.kind not in _LAYOUTS:
            raise PipelineError(
                f"There is no layout {self.kind!r}: use one of {', '.join(_LAYOUTS)}."
            )
        if self.length < 2:
            raise PipelineError(
                f"A row must hold at least 2 tokens, one to predict from and one to predict, "
                f"but the length is {self.length}."
            )
        if not 1 <= self.overlap < self.length:
            raise PipelineError(
                f"The overlap must be at least 1 and less than the length {self.length}, "
                f"but it is {self.overlap}."
            )


@dataclass(frozen=True)
class Accounting:
    """Where every token of some documents went. Counts; parts add up with `+`.

    `stored == tokens - dropped + repeated` holds by construction.

    Attributes:
      documents: documents, the empty and one-token ones included.
      tokens: tokens of the documents as tokenised.
      stored: cells of rows that hold a token, repeated ones included.
      repeated: of those, tokens that a continuation holds again.
      dropped: (reason, tokens) of tokens in no row, ordered by reason.
      labels: positions with a label.
      padding: cells that hold no token.
    """

    documents: int = 0
    empty_documents: int = 0
    one_token_documents: int = 0
    tokens: int = 0
    stored: int = 0
    repeated: int = 0
    dropped: tuple[tuple[str, int], ...] = ()
    labels: int = 0
    rows: int = 0
    rows_without_labels: int = 0
    padding: int = 0

    def __post_init__(self) -> None:
        counts = {name: count for name, count in asdict(self).items() if name != "dropped"}
        for name, count in [*counts.items(), *self.dropped]:
            if count < 0:
                raise ValueError(f"A count cannot be negative, but {name} is {count}.")
        reasons = [reason for reason, _ in self.dropped]
        if reasons != sorted(set(reasons)):
            raise ValueError(f"Reasons must be ordered and distinct, but they are {reasons}.")
        dropped = sum(count for _, count in self.dropped)
        if self.stored != self.tokens - dropped + self.repeated:
            raise ValueError(
                f"Tokens went missing: {self.tokens} tokens - {dropped} dropped + "
                f"{self.repeated} repeated is not {self.stored} stored."
            )

    def __add__(self, other: "Accounting") -> "Accounting":
        dropped = dict(self.dropped)
        for reason, count in other.dropped:
            dropped[reason] = dropped.get(reason, 0) + count
        counts = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in fields(self)
            if field.name != "dropped"
        }
        return Accounting(**counts, dropped=tuple(sorted(dropped.items())))

    def to_json(self) -> dict[str, Any]:
        """As JSON values: integers, and `dropped` as an object."""
        return {**asdict(self), "dropped": dict(self.dropped)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Accounting":
        """The inverse of `to_json`; raises ValueError if a name is missing or unknown."""
        expected = {field.name for field in fields(cls)}
        if set(value) != expected:
            raise ValueError(
                f"An accounting has the names {sorted(expected)}, but found {sorted(value)}."
            )
        return cls(**{**value, "dropped": tuple(sorted(value["dropped"].items()))})


@dataclass(frozen=True)
class Rows:
    """Rows of a part of the corpus, and where every one of its tokens went.

    Attributes:
      tokens: token ids; 0 at padding.
      segments: 1, 2, ... by order within the row; 0 at padding, which comes last.
      documents: index of the document in the corpus; `NO_DOCUMENT` at padding.
      label_mask: 1 where position t has a label, tokens[t + 1] of the same segment.
    """

    tokens: UInt32[np.ndarray, "rows length"]
    segments: UInt16[np.ndarray, "rows length"]
    documents: UInt32[np.ndarray, "rows length"]
    label_mask: UInt8[np.ndarray, "rows length"]
    accounting: Accounting


class _Placed(NamedTuple):
    """tokens[start:stop] of a document of the part, put into a row at a column."""

    document: int
    start: int
    stop: int
    row: int
    column: int
    segment: int


def cut(tokens: int, length: int, overlap: int) -> list[tuple[int, int]]:
    """The pieces (start, stop) of a document of `tokens` tokens, in order.

    All but the last are `length` long; the last holds at least one token that
    no other piece holds. A document that fits gives one piece, an empty one none.
    """
    if tokens == 0:
        return []
    stride = length - overlap
    continuations = max(0, -(-(tokens - length) // stride))
    return [(i * stride, min(i * stride + length, tokens)) for i in range(continuations + 1)]


def lay_rows(
    documents: Sequence[UInt32[np.ndarray, "_"]], first_document: int, settings: LayoutSettings
) -> Rows:
    """Lays a part of the corpus into rows.

    Args:
      documents: the token ids of each document of the part, in corpus order.
      first_document: index in the corpus of documents[0].
      settings: the layout.

    An empty document takes no row with `pack` and a row of padding with `pad`;
    a document of one token is stored and has no label. Both are counted.
    """
    _check_documents(documents, first_document)
    sizes = [len(document) for document in documents]
    placed, row_count = _LAYOUTS[settings.kind](sizes, settings)
    shape = (row_count, settings.length)
    tokens = np.zeros(shape, np.uint32)
    segments = np.zeros(shape, np.uint16)
    owners = np.full(shape, NO_DOCUMENT, np.uint32)
    label_mask = np.zeros(shape, np.uint8)
    repeated = 0
    for document, start, stop, row, column, segment in placed:
        end = column + stop - start
        tokens[row, column:end] = documents[document][start:stop]
        segments[row, column:end] = segment
        owners[row, column:end] = first_document + document
        # A continuation's first overlap - 1 labels are those of the piece before.
        seen = settings.overlap if start else 0
        label_mask[row, column + max(seen - 1, 0) : end - 1] = 1
        repeated += seen
    stored = int(np.count_nonzero(segments))
    accounting = Accounting(
        documents=len(sizes),
        empty_documents=sizes.count(0),
        one_token_documents=sizes.count(1),
        tokens=sum(sizes),
        stored=stored,
        repeated=repeated,
        labels=int(np.count_nonzero(label_mask)),
        rows=row_count,
        rows_without_labels=row_count - int(np.count_nonzero(label_mask.any(axis=1))),
        padding=segments.size - stored,
    )
    return Rows(tokens, segments, owners, label_mask, accounting)


def _check_documents(documents: Sequence[np.ndarray], first_document: int) -> None:
    if not 0 <= first_document <= NO_DOCUMENT - len(documents):
        raise ValueError(
            f"Documents are numbered from 0 to {NO_DOCUMENT - 1}, but this part runs "
            f"from {first_document} to {first_document + len(documents) - 1}."
        )
    for index, document in enumerate(documents, first_document):
        if document.dtype != np.uint32 or document.ndim != 1:
            raise TypeError(
                f"Document {index} must be a vector of uint32 token ids, but it is "
                f"{document.dtype} of shape {document.shape}."
            )


def _pad(sizes: Sequence[int], settings: LayoutSettings) -> tuple[list[_Placed], int]:
    placed, row = [], 0
    for document, size in enumerate(sizes):
        for start, stop in cut(size, settings.length, settings.overlap):
            placed.append(_Placed(document, start, stop, row, 0, 1))
            row += 1
        if size == 0:
            row += 1  # of padding: rows and documents stay aligned
    return placed, row


def _pack(sizes: Sequence[int], settings: LayoutSettings) -> tuple[list[_Placed], int]:
    placed: list[_Placed] = []
    shelf = _Shelf(settings.length)
    for document, size in enumerate(sizes):
        for start, stop in cut(size, settings.length, settings.overlap):
            placed.append(_Placed(document, start, stop, *shelf.place(stop - start)))
    return placed, len(shelf.rows)


class _Shelf:
    """Rows being filled by online best fit, in O(log rows) a piece.

    A piece goes to the row with the least free space that suffices (among
    equals the oldest row), or else to a new row.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.rows: list[tuple[int, int]] = []  # (cells used, segments used)
        self._free: list[int] = []  # the distinct free spaces of open rows, ascending
        self._open: dict[int, list[int]] = {}  # free space -> heap of rows

    def place(self, size: int) -> tuple[int, int, int]:
        """Gives a piece its (row, column, segment)."""
        row = self._take(size)
        column, segments = self.rows[row]
        self.rows[row] = (column + size, segments + 1)
        free = self.length - column - size
        if free and segments + 1 < MAX_SEGMENTS:
            if free not in self._open:
                insort(self._free, free)
                self._open[free] = []
            heapq.heappush(self._open[free], row)
        return row, column, segments + 1

    def _take(self, size: int) -> int:
        index = bisect_left(self._free, size)
        if index == len(self._free):
            self.rows.append((0, 0))
            return len(self.rows) - 1
        free = self._free[index]
        row = heapq.heappop(self._open[free])
        if not self._open[free]:
            del self._open[free], self._free[index]
        return row


_LAYOUTS: dict[str, Callable[[Sequence[int], LayoutSettings], tuple[list[_Placed], int]]] = {
    "pack": _pack,
    "pad": _pad,
}
# Their place is `_LAYOUTS`; a preference pair takes two rows that stay together.
_PLANNED_LAYOUTS = ("chat", "preference")
