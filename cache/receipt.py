"""Receipts: the small JSON object written after a shard's arrays are on storage.

A shard without a receipt does not exist. A receipt holds nothing that depends on
when, where or by whom the shard was made: equal shards have equal receipts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from cache.errors import CacheError
from cache.jsonfields import Fields, canonical, parse_object
from cache.statistics import Statistics


@dataclass(frozen=True)
class StoredArray:
    """One array of one shard: sha256 of its decoded little-endian C-order data, file size."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Receipt:
    """What a finished shard holds.

    Attributes:
      shard: its number.
      rows: first and one past the last of its stored rows.
      documents: first and last document in it, or None if it is all padding.
      identity: the digest of the capture it belongs to (`Manifest.identity`).
      arrays: per array, digest of the data and size of the file.
      statistics: sums over the shard's positions.
    """

    shard: int
    rows: tuple[int, int]
    documents: tuple[int, int] | None
    identity: str
    arrays: dict[str, StoredArray]
    statistics: Statistics

    def to_bytes(self) -> bytes:
        return canonical(
            {
                "shard": self.shard,
                "rows": list(self.rows),
                "documents": None if self.documents is None else list(self.documents),
                "identity": self.identity,
                "arrays": {
                    name: {"sha256": stored.sha256, "bytes": stored.bytes}
                    for name, stored in self.arrays.items()
                },
                "statistics": self.statistics.to_json(),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> Receipt:
        """Reads `to_bytes`.

        Raises:
          CacheError: not a receipt; names the field.
        """
        fields = Fields(parse_object(data, what), what)
        rows = fields.span("rows")
        if rows is None:
            raise CacheError(f"{what}: field 'rows' should be two integers, found null")
        arrays = fields.object("arrays")
        stored = {}
        for name in arrays:
            entry = Fields(arrays[name], f"{what}, array {name}")
            stored[name] = StoredArray(entry.text("sha256"), entry.integer("bytes"))
        return cls(
            shard=fields.integer("shard"),
            rows=rows,
            documents=fields.span("documents"),
            identity=fields.text("identity"),
            arrays=stored,
            statistics=Statistics.from_json(fields.object("statistics"), f"{what}, statistics"),
        )

    @property
    def digest(self) -> str:
        """sha256 (hex) of the receipt's bytes."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


def data_digest(values: np.ndarray) -> str:
    """sha256 (hex) of an array's data: little-endian, C order."""
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return hashlib.sha256(np.ascontiguousarray(little).data).hexdigest()
