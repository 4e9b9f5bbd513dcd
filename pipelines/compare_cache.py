"""Rows of a cache of exact entries, for `stillroom compare`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

import cache
from cache.encoding import entry_weights
from pipelines.compare_beyond import ModelBeyond
from pipelines.compare_measure import Positions
from pipelines.compare_targets import Chunk
from pipelines.errors import CaptureError

_ROW_ARRAYS = ("tokens", "segments", "documents", "label_mask")


class CacheSample:
    """Rows of a cache of exact entries; see `Sample`.

    The cache's entries count as the teacher's, rounding and all. Beyond them only the mass is
    known; it is taken to be spread as the student spreads it, who predicts the mean of the
    sample's distributions (and the unknown evenly).
    """

    def __init__(self, opened: cache.Cache, rows: int, seed: int):
        """Reads rows chosen by the seed.

        Raises:
          CaptureError: the cache has no exact entries alone, none at temperature 1, or no label.
          CacheError: the cache is damaged.
        """
        encoding = opened.encoding
        if encoding.tail != "none":
            raise CaptureError(
                f"the cache {opened.location} has a sampled tail, which does not tell the "
                "probabilities that a comparison needs. Compare with --teacher and --dataset, or "
                "give a cache of exact entries (--tail none)."
            )
        if 1.0 not in encoding.temperatures:
            captured = ", ".join(f"{value:g}" for value in encoding.temperatures)
            raise CaptureError(
                f"the cache {opened.location} has the mass beyond its entries at temperature "
                f"{captured}, and a comparison needs it at 1. Compare with --teacher and --dataset."
            )
        count = min(rows, len(opened))
        chosen = np.random.default_rng(seed).choice(len(opened), count, replace=False)
        self._arrays = opened.rows(np.sort(chosen))
        self._label = self._arrays["label_mask"] == 1
        if not self._label.any():
            raise CaptureError(
                f"the {count} rows chosen of {opened.location} have no label. Take more --rows, "
                "or another --seed."
            )
        self.encoding = encoding
        self.vocabulary, self.length, self.rows = encoding.vocabulary, encoding.length, count
        self.temperatures = encoding.temperatures
        self.tokens = int(np.count_nonzero(self._arrays["segments"]))
        self._q = self._mean()

    def chunks(self, k: int, tails: Sequence[tuple[int, int]]) -> Iterator[Chunk]:
        """See `Sample.chunks`; lists all entries of the cache, and has no sampled tails.

        Raises:
          ValueError: tails were asked for.
        """
        if tails or k > self.encoding.k:
            raise ValueError(f"a cache of k = {self.encoding.k} exact entries has no more")
        for row in range(self.rows):
            arrays = {name: values[row : row + 1] for name, values in self._arrays.items()}
            where = np.flatnonzero(self._label[row])
            weights, exact, tail = self._weights(row, where)
            ids = np.where(exact, arrays["target_ids"][0, where], 0).astype(np.int64)
            with np.errstate(divide="ignore"):
                log_q = np.where(exact, np.log(self._q[ids]), 0.0)
            beyond = ModelBeyond(self._q, ids, exact, np.exp(tail))
            positions = Positions(ids, weights, log_q, beyond)
            rows = {name: arrays[name] for name in _ROW_ARRAYS}
            yield Chunk(row, rows, self._targets(arrays), {}, where, positions)

    def _weights(self, row: int, where: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Weights and whether exact, [n, k], and the log of the mass beyond, [n]; float64."""
        arrays = {name: values[row, where] for name, values in self._arrays.items()}
        place = self.temperatures.index(1.0)
        tail = arrays["tail_logprobs"][:, place].astype(np.float64)
        weights, exact = entry_weights(
            self._label[row, where],
            arrays["target_ids"],
            arrays["target_logprobs"].astype(np.float64),
            arrays["exact_counts"],
            tail,
            1.0,
            self.encoding.no_id,
        )
        return weights, exact, tail

    def _mean(self) -> np.ndarray:
        """The mean distribution, float64 [vocabulary], the unknown spread evenly."""
        total, unknown = np.zeros(self.vocabulary), 0.0
        for row in range(self.rows):
            where = np.flatnonzero(self._label[row])
            weights, exact, tail = self._weights(row, where)
            ids = self._arrays["target_ids"][row, where][exact].astype(np.int64)
            total += np.bincount(ids, weights[exact], minlength=self.vocabulary)
            unknown += float(np.exp(tail).sum())
        total += unknown / self.vocabulary
        return total / total.sum()

    def _targets(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What is stored, as `encode_shard` takes it."""
        empty = arrays["target_ids"] == self.encoding.no_id
        label = arrays["label_mask"] == 1
        return {
            "ids": np.where(empty, -1, arrays["target_ids"].astype(np.int64)).astype(np.int32),
            "logprobs": arrays["target_logprobs"].astype(np.float32),
            "exact_counts": np.where(label, arrays["exact_counts"], 0).astype(np.int32),
            "tail_logprobs": arrays["tail_logprobs"].astype(np.float32),
            "label_logprobs": arrays["label_logprobs"],
            "entropy": arrays["entropy"].astype(np.float32),
        }
