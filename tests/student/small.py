"""Small caches to train students from; the teacher's logits are known (`built.logits`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cache
from pipelines.layout import LayoutSettings, lay_rows
from student.batches import BatchSettings
from tests.cache.builder import Built, make_cache

# Of the small caches: 8 positions, 60 tokens, k = 6.
LENGTH, VOCABULARY, K = 8, 60, 6


def make_student_cache(folder: Path, **settings: Any) -> tuple[Built, cache.Cache]:
    """A complete cache in `folder`/cache, and the same opened; `settings` are `make_cache`'s.

    22 rows, 4 a shard, a sampled tail at temperature 1 unless told otherwise. Rows 1 and 2 share
    a document. Row 3 is half padding. Row 5 has no label.
    """
    built = make_cache(folder / "cache", **{"rows": 22, "tail": "sampled", **settings})
    return built, cache.open(built.path)


def laid_rows(
    documents: Sequence[Sequence[int]], kind: Any = "pad", length: int = LENGTH, overlap: int = 1
) -> dict[str, np.ndarray]:
    """Token ids of documents in rows, as a capture lays them; `make_cache` takes them."""
    tokens = [np.asarray(each, np.uint32) for each in documents]
    rows = lay_rows(tokens, 0, LayoutSettings(kind, length, overlap))
    return {name: getattr(rows, name) for name in _LAID}


_LAID = ("tokens", "segments", "documents", "label_mask")


def reading(**changes: Any) -> BatchSettings:
    """Settings that fit the small caches."""
    return BatchSettings(**{"most_id": VOCABULARY, **changes})


def labels_of(built: Built) -> np.ndarray:
    """The token that each position predicts, int64 [row, position]; 0 without a label."""
    labels = np.zeros(built.arrays["tokens"].shape, np.int64)
    for row, position in np.argwhere(built.arrays["label_mask"] == 1):
        labels[row, position] = built.arrays["tokens"][row, position + 1]
    return labels
