"""Sums over positions: what a summary needs, computed from stored arrays.

Sums of floats are exactly rounded (`math.fsum`), so that equal arrays give equal
statistics on any machine, and combining shards in order is reproducible.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache.errors import CacheError
from cache.format import NO_DOCUMENT, Encoding
from cache.jsonfields import Fields

# Bins of the histogram of the exact entries' mass, for its percentiles.
BINS = 100

_COUNTS = (
    "rows",
    "tokens",
    "labels",
    "impossible_labels",
    "exact_entries",
    "sampled_entries",
    "rows_without_labels",
)


@dataclass(frozen=True)
class Statistics:
    """Sums over some rows.

    Attributes:
      rows, tokens, labels: counts; tokens are positions that are not padding.
      impossible_labels: labels that the teacher gives probability 0.
      exact_entries, sampled_entries: entries of each kind, over labels.
      rows_without_labels: rows that train nothing.
      label_logprobs, entropy: sums over labels, nats at temperature 1; the impossible ones
        are left out of the first.
      exact_mass: per captured temperature, the sum over labels of the exact entries' mass.
      exact_mass_histogram: per captured temperature, counts of labels in `BINS` equal bins
        of that mass.
    """

    rows: int
    tokens: int
    labels: int
    impossible_labels: int
    exact_entries: int
    sampled_entries: int
    rows_without_labels: int
    label_logprobs: float
    entropy: float
    exact_mass: tuple[float, ...]
    exact_mass_histogram: tuple[tuple[int, ...], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "label_logprobs": self.label_logprobs,
            "entropy": self.entropy,
            "exact_mass": list(self.exact_mass),
            "exact_mass_histogram": [list(counts) for counts in self.exact_mass_histogram],
        }

    @classmethod
    def from_json(cls, value: Any, what: str) -> Statistics:
        """Reads `to_json`.

        Raises:
          CacheError: a field is missing or of a wrong type.
        """
        fields = Fields(value, what)
        histogram = fields.list_of("exact_mass_histogram", list)
        for counts in histogram:
            if len(counts) != BINS or not all(type(item) is int for item in counts):
                raise CacheError(f"{what}: exact_mass_histogram should be lists of {BINS} integers")
        return cls(
            **{name: fields.integer(name) for name in _COUNTS},
            label_logprobs=fields.number("label_logprobs"),
            entropy=fields.number("entropy"),
            exact_mass=fields.numbers("exact_mass"),
            exact_mass_histogram=tuple(tuple(counts) for counts in histogram),
        )

    @property
    def perplexity(self) -> float:
        """The teacher's perplexity on the labels; NaN without labels, inf if one is impossible."""
        if self.impossible_labels:
            return math.inf
        return perplexity(self.label_logprobs, self.labels)

    @property
    def mean_entropy(self) -> float:
        """Mean entropy of the teacher's distribution over labels, nats; NaN without labels."""
        return self.entropy / self.labels if self.labels else math.nan

    def mean_exact_mass(self, index: int) -> float:
        """Mean mass of the exact entries at the index-th captured temperature."""
        return self.exact_mass[index] / self.labels if self.labels else math.nan

    def exact_mass_percentile(self, index: int, percent: float) -> float:
        """A percentile of the exact entries' mass, linear within a bin of 1 / BINS."""
        if not self.labels:
            return math.nan
        wanted = self.labels * percent / 100
        below = 0
        for bin_index, count in enumerate(self.exact_mass_histogram[index]):
            if count and below + count >= wanted:
                return (bin_index + (wanted - below) / count) / BINS
            below += count
        return 1.0


def perplexity(logprobs: float, labels: int) -> float:
    """exp of the mean negative log-prob (nats) of labels; NaN without any, inf if too large."""
    if not labels:
        return math.nan
    mean = -float(logprobs) / labels
    return math.exp(mean) if mean < math.log(sys.float_info.max) else math.inf


def statistics_of(arrays: Mapping[str, np.ndarray], encoding: Encoding) -> Statistics:
    """Statistics of stored arrays, each [row, position, ...]."""
    label = arrays["label_mask"] == 1
    tail = arrays["tail_logprobs"][label].astype(np.float64)
    # Rounded, so that another machine's last bit of expm1 changes nothing.
    mass = np.round(-np.expm1(tail), 9)
    bins = np.clip((mass * BINS).astype(np.int64), 0, BINS - 1)
    counts = arrays["exact_counts"][label].astype(np.int64)
    used = arrays["target_ids"][label] != encoding.no_id
    logprobs = arrays["label_logprobs"][label]
    possible = logprobs > -np.inf
    return Statistics(
        rows=len(label),
        tokens=int(np.count_nonzero(arrays["segments"])),
        labels=int(label.sum()),
        impossible_labels=int(np.sum(~possible)),
        exact_entries=int(counts.sum()),
        sampled_entries=int(used.sum()) - int(counts.sum()),
        rows_without_labels=int(np.sum(~label.any(axis=1))),
        label_logprobs=math.fsum(logprobs[possible].tolist()),
        entropy=math.fsum(arrays["entropy"][label].tolist()),
        exact_mass=tuple(math.fsum(column.tolist()) for column in mass.T),
        exact_mass_histogram=tuple(
            tuple(np.bincount(column, minlength=BINS).tolist()) for column in bins.T
        ),
    )


def combine(parts: Iterable[Statistics], temperatures: int) -> Statistics:
    """Statistics of several shards together; the order of the parts does not matter."""
    parts = list(parts)
    return Statistics(
        **{name: sum(getattr(part, name) for part in parts) for name in _COUNTS},
        label_logprobs=math.fsum(part.label_logprobs for part in parts),
        entropy=math.fsum(part.entropy for part in parts),
        exact_mass=tuple(
            math.fsum(part.exact_mass[index] for part in parts) for index in range(temperatures)
        ),
        exact_mass_histogram=tuple(
            tuple(
                np.sum(
                    [part.exact_mass_histogram[index] for part in parts] or [[0] * BINS], axis=0
                ).tolist()
            )
            for index in range(temperatures)
        ),
    )


def document_range(documents: np.ndarray) -> tuple[int, int] | None:
    """First and last document in an array of document numbers; None if there is none."""
    real = documents[documents != NO_DOCUMENT]
    return (int(real.min()), int(real.max())) if real.size else None
