"""Parts: contiguous pieces of the corpus, tokenised and laid into rows.

A part is a file of rows and a receipt, both under the cache's parts/ folder while a
capture is under way. Its size in documents is a setting, so that rows depend on the corpus
and the settings alone.
"""

from __future__ import annotations

import hashlib
import io
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache.errors import CacheError
from cache.format import PARTS
from cache.jsonfields import Fields, canonical, parse_object
from cache.storage import Store
from pipelines.corpus import Corpus, digest_documents, part_ranges
from pipelines.encode import Tokenizer, encode_documents
from pipelines.errors import CaptureError
from pipelines.layout import Accounting, LayoutSettings, lay_rows

# Counts of what encoding left out.
_LEFT_OUT = ("dropped_bytes", "documents_with_dropped_bytes", "doubled_specials")
_ROW_ARRAYS = ("tokens", "segments", "documents", "label_mask")
# Parts whose rows a process keeps: shards go through parts in order.
_KEPT = 2


@dataclass(frozen=True)
class PartReceipt:
    """What a laid part holds.

    Attributes:
      part: its number.
      documents: first and one past the last of its documents.
      rows: number of its rows.
      digest: of its documents (`corpus.digest_documents`).
      sha256: of its file of rows.
      accounting: where every token went.
      dropped_bytes: bytes of text that the tokenizer has no token for.
      documents_with_dropped_bytes: documents that have such bytes.
      doubled_specials: start and end tokens left out because a text brought its own.
    """

    part: int
    documents: tuple[int, int]
    rows: int
    digest: str
    sha256: str
    accounting: Accounting
    dropped_bytes: int
    documents_with_dropped_bytes: int
    doubled_specials: int

    def to_bytes(self) -> bytes:
        return canonical(
            {
                "part": self.part,
                "documents": list(self.documents),
                "rows": self.rows,
                "digest": self.digest,
                "sha256": self.sha256,
                "accounting": self.accounting.to_json(),
                **{name: getattr(self, name) for name in _LEFT_OUT},
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> PartReceipt:
        """Reads `to_bytes`; raises CacheError if it is something else."""
        fields = Fields(parse_object(data, what), what)
        documents = fields.span("documents")
        if documents is None:
            raise CacheError(f"{what}: field 'documents' should be two integers, found null")
        return cls(
            part=fields.integer("part"),
            documents=documents,
            rows=fields.integer("rows"),
            digest=fields.text("digest"),
            sha256=fields.text("sha256"),
            accounting=Accounting.from_json(fields.object("accounting")),
            **{name: fields.integer(name) for name in _LEFT_OUT},
        )


@dataclass(frozen=True)
class PartSettings:
    """How a part's documents become rows.

    Attributes:
      layout: rows.
      bos, eos: whether each document gets a start and an end token.
      vocabulary: ids must be below this.
      documents_per_part: documents in each part but the last.
    """

    layout: LayoutSettings
    bos: bool
    eos: bool
    vocabulary: int
    documents_per_part: int


def parts_folder(first_shard: int) -> str:
    """Where the parts are of the extent that begins with a shard; apart from those of others."""
    return f"{PARTS}/from-{first_shard:06d}" if first_shard else PARTS


def part_key(part: int, folder: str = PARTS) -> str:
    return f"{folder}/{part:06d}.npz"


def part_receipt_key(part: int, folder: str = PARTS) -> str:
    return f"{folder}/{part:06d}.json"


def lay_part(
    store: Store,
    corpus: Corpus,
    tokenizer: Tokenizer,
    settings: PartSettings,
    part: int,
    folder: str = PARTS,
) -> PartReceipt:
    """Tokenises one part's documents, lays them into rows, and stores rows, then receipt.

    Raises:
      CorpusError: a document that is no text, or holds an id beyond the vocabulary.
      StorageError: storage refused a write.
    """
    documents = part_ranges(len(corpus), settings.documents_per_part)[part]
    texts = corpus.texts(documents.start, documents.stop)
    encoded = encode_documents(
        texts,
        tokenizer,
        bos=settings.bos,
        eos=settings.eos,
        first_document=documents.start,
        column=corpus.settings.column,
        vocabulary=settings.vocabulary,
    )
    rows = lay_rows(encoded.ids, documents.start, settings.layout)
    buffer = io.BytesIO()
    np.savez(buffer, **{name: getattr(rows, name) for name in _ROW_ARRAYS})
    data = buffer.getvalue()
    receipt = PartReceipt(
        part=part,
        documents=(documents.start, documents.stop),
        rows=len(rows.tokens),
        digest=digest_documents(texts),
        sha256=hashlib.sha256(data).hexdigest(),
        accounting=rows.accounting,
        **{name: getattr(encoded, name) for name in _LEFT_OUT},
    )
    store.write(part_key(part, folder), data)
    store.write(part_receipt_key(part, folder), receipt.to_bytes())
    return receipt


def read_part_receipts(store: Store, parts: int, folder: str = PARTS) -> dict[int, PartReceipt]:
    """The receipts of the parts that are laid, by number."""
    keys = [part_receipt_key(part, folder) for part in range(parts)]
    found = zip(keys, store.read_many(keys), strict=True)
    receipts = (PartReceipt.from_bytes(data, key) for key, data in found if data is not None)
    return {receipt.part: receipt for receipt in receipts}


class PartRows:
    """Reads rows of the corpus from the files of its parts.

    Rows of all parts are numbered through, in the order of the parts.

    Args:
      store: the cache.
      parts: number of rows and sha256 of each part's file, in order.
      folder: where the files are.
    """

    def __init__(self, store: Store, parts: Sequence[tuple[int, str]], folder: str = PARTS):
        self._store = store
        self._folder = folder
        self._parts = parts
        self._ends = np.cumsum([rows for rows, _ in parts]) if parts else np.zeros(0, np.int64)
        self._kept: OrderedDict[int, dict[str, np.ndarray]] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, first: int, end: int) -> dict[str, np.ndarray]:
        """Rows first … end - 1: tokens, segments, documents, label_mask, each [row, position].

        Raises:
          CaptureError: a part's file is missing, or not the one its receipt tells of.
        """
        pieces = []
        part = int(np.searchsorted(self._ends, first, side="right"))
        while first < end:
            start = int(self._ends[part]) - self._parts[part][0]
            stop = min(end, int(self._ends[part]))
            if stop > first:
                rows = self._load(part)
                pieces.append({name: rows[name][first - start : stop - start] for name in rows})
            first, part = max(first, stop), part + 1
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in _ROW_ARRAYS}

    def _load(self, part: int) -> dict[str, np.ndarray]:
        if part in self._kept:
            self._kept.move_to_end(part)
            return self._kept[part]
        key = part_key(part, self._folder)
        data = self._store.read(key)
        if data is None or hashlib.sha256(data).hexdigest() != self._parts[part][1]:
            state = "is missing" if data is None else "is not what its receipt says"
            raise CaptureError(
                f"{self._store.location}/{key} {state}. Delete "
                f"{part_receipt_key(part, self._folder)} and run the same command again: it lays "
                "that part anew."
            )
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            rows = {name: file[name] for name in _ROW_ARRAYS}
        self._kept[part] = rows
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return rows


def total_accounting(receipts: Sequence[PartReceipt]) -> dict[str, Any]:
    """Where every token of the corpus went, and what its tokenizer dropped; JSON-able."""
    total = sum((receipt.accounting for receipt in receipts), Accounting())
    return {
        **total.to_json(),
        **{name: sum(getattr(receipt, name) for receipt in receipts) for name in _LEFT_OUT},
    }
