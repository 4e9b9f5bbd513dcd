"""Seals: which cache and which row stored data is of, for every row of every array.

Checksums tell whether a file is whole, not whether it is the right one: a shard's file put in
the place of another's, or taken from another cache, passes them all. A seal is a hash of one
row of one array, keyed by the identity of the capture, the array's name and the row's number.
Seals are stored as an array of their own, beside the others; a reader that reads a row of any
array reads its seals too, and compares. They guard against mistakes and accidents, not against
somebody who forges data and seals: that is what the digests in receipts and manifest are for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash
from jaxtyping import Bool, Integer, UInt64

from cache.format import SEALS, Encoding

_MASK = 2**64 - 1


def seal_rows(
    arrays: Mapping[str, np.ndarray],
    encoding: Encoding,
    identities: Sequence[str],
    rows: Integer[np.ndarray, " row"],
) -> UInt64[np.ndarray, "row array"]:
    """The seals of some rows: XXH3 (64 bits) of each row's little-endian C-order data.

    Args:
      arrays: some or all of `encoding.arrays()`, each [row, ...] as stored.
      encoding: the cache's encoding.
      identities: `Manifest.identity` of the capture that each row is of, or one for all.
      rows: numbers of the rows on the arrays' row axis.

    Returns:
      In the order of `encoding.arrays()`; 0 for arrays that were not given.
    """
    seals = np.zeros((len(rows), len(encoding.arrays())), np.uint64)
    if not len(rows):
        return seals
    if len(identities) == 1:
        identities = [identities[0]] * len(rows)
    for column, name in enumerate(encoding.arrays()):
        if name not in arrays:
            continue
        values = arrays[name]
        little = values.astype(values.dtype.newbyteorder("<"), copy=False)
        data = np.ascontiguousarray(little).reshape(len(rows), -1).view(np.uint8)
        keys = {identity: _key(identity, name) for identity in set(identities)}
        for place, (identity, row) in enumerate(zip(identities, rows.tolist(), strict=True)):
            seed = (keys[identity] + row) & _MASK
            seals[place, column] = xxhash.xxh3_64_intdigest(data[place], seed=seed)
    return seals


def broken_seals(
    arrays: Mapping[str, np.ndarray],
    encoding: Encoding,
    identities: Sequence[str],
    rows: Integer[np.ndarray, " row"],
) -> dict[str, Bool[np.ndarray, " row"]]:
    """Which rows of which arrays are not what their seals say, by name of the array.

    Where no array of several fits its seal, it is the seals that are wrong: named so.

    Args: as `seal_rows`, `arrays` with the stored seals.
    """
    columns = [place for place, name in enumerate(encoding.arrays()) if name in arrays]
    names = [name for name in encoding.arrays() if name in arrays]
    found = seal_rows(arrays, encoding, identities, rows)
    wrong = (found != arrays[SEALS])[:, columns]
    seals = wrong.all(axis=1) if len(names) > 1 else np.zeros(len(rows), bool)
    broken = {SEALS: seals, **dict(zip(names, (wrong & ~seals[:, None]).T, strict=True))}
    return {name: places for name, places in broken.items() if places.any()}


def _key(identity: str, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{identity}/{name}".encode()).digest()[:8], "little")
