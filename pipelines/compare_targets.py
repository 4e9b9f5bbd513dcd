"""From a sample's targets to what each capture setting would store, and what that tells.

Nothing is simulated: targets are encoded, rounded and compressed by the functions of a capture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float64, Int

from cache.encoding import encode_shard, entry_weights
from cache.format import SEALS, Encoding
from cache.seals import seal_rows
from cache.storage import encode_chunk
from pipelines.compare_measure import (
    Positions,
    Reconstruction,
    Tally,
    bucket,
    measure,
    renormalised,
    sampled,
    step_error,
)
from pipelines.compare_options import Setting

Objective = Literal["sampled", "bucket", "renormalise"]
# Rows that are stored as one shard: a shard's own few bytes count as little as in a capture.
_ROWS = 8


@dataclass(frozen=True)
class Chunk:
    """Neighbouring positions of one row of the sample.

    Attributes:
      row: the row's number in the sample.
      rows: tokens, segments, documents, label_mask, each [1, n].
      exact: targets as `encode_shard` takes them, all entries exact, [1, n, …].
      sampled: targets with a sampled tail, by (k, exact).
      where: int [m]: positions with a label.
      positions: teacher and student there, the listed tokens being those of `exact`.
    """

    row: int
    rows: Mapping[str, np.ndarray]
    exact: Mapping[str, np.ndarray]
    sampled: Mapping[tuple[int, int], Mapping[str, np.ndarray]]
    where: Int[np.ndarray, " m"]
    positions: Positions


@runtime_checkable
class Sample(Protocol):
    """Rows whose distributions are known.

    Attributes:
      vocabulary: number of token ids.
      length: positions in a row.
      rows: how many rows.
      tokens: how many tokens in them, padding not counted.
      temperatures: where the mass beyond the entries is known, ascending, 1 among them.
    """

    vocabulary: int
    length: int
    rows: int
    tokens: int
    temperatures: tuple[float, ...]

    def chunks(self, k: int, tails: Sequence[tuple[int, int]]) -> Iterator[Chunk]:
        """The rows in order, each in chunks.

        Args:
          k: exact entries to list.
          tails: (k, exact) of the sampled tails that are needed.
        """
        ...


@dataclass(frozen=True)
class Measured:
    """What one setting costs and loses, per label unless it says otherwise.

    Attributes:
      setting: of the capture.
      objective: of the student.
      arrays: stored bytes per token of each array, seals included.
      labels: how many were measured.
      bias2, variance: of the gradient with respect to the student's logits.
      lasting: squared length of the mean bias: what no number of labels averages out.
      total_variation, kl: of the mean reconstruction; KL(teacher, reconstruction) in nats.
      draw_distance: expected total variation of one draw; NaN where nothing is drawn.
      mass: of the exact entries, by temperature.
    """

    setting: Setting
    objective: Objective
    arrays: dict[str, float]
    labels: int
    bias2: float
    variance: float
    lasting: float
    total_variation: float
    kl: float
    draw_distance: float
    mass: dict[float, float]

    @property
    def bytes(self) -> float:
        """Stored bytes per token."""
        return sum(self.arrays.values())

    @property
    def error(self) -> float:
        """Squared error of the gradient of one label."""
        return self.bias2 + self.variance

    def step_error(self, batch: int) -> float:
        """Squared error of the mean gradient of so many labels."""
        return step_error(self.bias2, self.variance, self.lasting, batch)


def entry_masses(
    logprobs: Float[np.ndarray, "*n k"], tail: Float[np.ndarray, "*n"], temperature: float
) -> Float64[np.ndarray, "*n k"]:
    """The probability of each entry at a temperature.

    Args:
      logprobs: natural log, temperature 1; -inf in empty slots.
      tail: log of the mass outside the entries at that temperature.
    """
    scaled = logprobs.astype(np.float64) / temperature
    top = np.maximum(scaled.max(axis=-1, keepdims=True), -1e300)
    weight = np.exp(scaled - top)
    total = weight.sum(axis=-1, keepdims=True)
    share = np.divide(weight, total, out=np.zeros_like(weight), where=total > 0)
    return -np.expm1(tail.astype(np.float64))[..., None] * share


def fewer(
    targets: Mapping[str, np.ndarray], k: int, temperatures: tuple[float, ...]
) -> dict[str, np.ndarray]:
    """Exact targets with only the first k entries; the rest's mass joins the tail's.

    Args:
      targets: as `encode_shard` takes them, all entries exact.
      temperatures: of the tails.
    """
    logprobs = present_logprobs(targets)
    tails = []
    for place, temperature in enumerate(temperatures):
        tail = targets["tail_logprobs"][..., place]
        dropped = entry_masses(logprobs, tail, temperature)[..., k:].sum(axis=-1)
        with np.errstate(divide="ignore"):
            tails.append(np.log(np.exp(tail.astype(np.float64)) + dropped))
    return {
        **targets,
        "ids": targets["ids"][..., :k],
        "logprobs": targets["logprobs"][..., :k],
        "exact_counts": np.minimum(targets["exact_counts"], k),
        "tail_logprobs": np.minimum(np.stack(tails, axis=-1), 0.0).astype(np.float32),
    }


def present_logprobs(targets: Mapping[str, np.ndarray]) -> Float[np.ndarray, "*n k"]:
    """Log-probs of the exact entries, -inf in the other slots."""
    slot = np.arange(targets["ids"].shape[-1])
    exact = slot < targets["exact_counts"][..., None]
    return np.where(exact, targets["logprobs"], -np.inf)


def stored_bytes(arrays: Mapping[str, np.ndarray], encoding: Encoding) -> dict[str, int]:
    """Bytes of the files of one shard, by array: all of the format, seals included."""
    rows = len(arrays["tokens"])
    every = dict(arrays)
    if encoding.sealed:
        every[SEALS] = seal_rows(arrays, encoding, ["compare"], np.arange(rows))
    return {
        name: len(encode_chunk(spec.zarr(rows, rows), 0, every[name]))
        for name, spec in encoding.stored_arrays().items()
    }


class Comparing:
    """Measures settings chunk by chunk; memory does not grow with the sample."""

    def __init__(self, sample: Sample, settings: Sequence[Setting]):
        self._sample, self._settings = sample, tuple(settings)
        self.tails = tuple(
            dict.fromkeys((s.k, s.exact) for s in self._settings if s.tail == "sampled")
        )
        self.k = max(setting.k for setting in self._settings)
        self._encodings = [
            setting.encoding(sample.length, sample.vocabulary, sample.temperatures, _ROWS)
            for setting in self._settings
        ]
        self._pending: list[list[tuple[int, dict[str, np.ndarray]]]] = [[] for _ in settings]
        self._bytes: list[Counter[str]] = [Counter() for _ in self._settings]
        self._tallies: dict[tuple[int, Objective], Tally] = {}
        self._mass = np.zeros((len(self._settings), len(sample.temperatures)))

    def add(self, chunk: Chunk) -> None:
        """Measures a chunk; the chunks of a row come in order, one row after the other."""
        keys, reconstructions = [], []
        for number, setting in enumerate(self._settings):
            encoding = self._encodings[number]
            if setting.tail == "sampled":
                targets: Mapping[str, Any] = chunk.sampled[setting.k, setting.exact]
            else:
                targets = fewer(chunk.exact, setting.k, self._sample.temperatures)
            arrays = encode_shard(chunk.rows, targets, encoding)
            self._store(number, chunk.row, arrays)
            self._mass[number] += self._exact_mass(chunk, targets["exact_counts"])
            if len(chunk.where):
                found = reconstruct(chunk.positions, arrays, encoding, chunk.where)
                keys += [(number, objective) for objective in found]
                reconstructions += found.values()
        if reconstructions:
            tallies = measure(chunk.positions, reconstructions, self._sample.vocabulary)
            for key, tally in zip(keys, tallies, strict=True):
                self._tallies.setdefault(key, Tally()).add(tally)

    def finish(self) -> list[Measured]:
        """What was measured, in the order of the settings."""
        for number in range(len(self._settings)):
            self._flush(number)
        return [self._measured(*key, tally) for key, tally in sorted(self._tallies.items())]

    def _measured(self, number: int, objective: Objective, tally: Tally) -> Measured:
        n = tally.labels
        mass = self._mass[number] / n
        return Measured(
            setting=self._settings[number],
            objective=objective,
            arrays={x: size / self._sample.tokens for x, size in self._bytes[number].items()},
            labels=n,
            bias2=tally.bias2 / n,
            variance=tally.variance / n,
            lasting=tally.lasting(),
            total_variation=tally.total_variation / n,
            kl=tally.kl / n,
            draw_distance=tally.draw_distance / n,
            mass=dict(zip(self._sample.temperatures, mass.tolist(), strict=True)),
        )

    def _exact_mass(self, chunk: Chunk, counts: np.ndarray) -> np.ndarray:
        """Sum over labels of the exact entries' mass at each temperature."""
        logprobs = present_logprobs(chunk.exact)[0, chunk.where]
        exact = np.arange(logprobs.shape[-1]) < counts[0, chunk.where, None]
        tails = chunk.exact["tail_logprobs"][0, chunk.where]
        return np.array(
            [
                entry_masses(logprobs, tails[:, place], t).sum(where=exact)
                for place, t in enumerate(self._sample.temperatures)
            ]
        )

    def _store(self, number: int, row: int, arrays: dict[str, np.ndarray]) -> None:
        pending = self._pending[number]
        if pending and pending[-1][0] != row and len({each for each, _ in pending}) == _ROWS:
            self._flush(number)
        self._pending[number].append((row, arrays))

    def _flush(self, number: int) -> None:
        """Stores the pending rows as one shard, and forgets all of it but the size."""
        pending = self._pending[number]
        if not pending:
            return
        whole = []
        for row in dict.fromkeys(row for row, _ in pending):
            pieces = [arrays for each, arrays in pending if each == row]
            whole.append({n: np.concatenate([p[n] for p in pieces], axis=1) for n in pieces[0]})
        arrays = {name: np.concatenate([row[name] for row in whole]) for name in whole[0]}
        self._bytes[number].update(stored_bytes(arrays, self._encodings[number]))
        self._pending[number] = []


def reconstruct(
    positions: Positions,
    arrays: Mapping[str, np.ndarray],
    encoding: Encoding,
    where: Int[np.ndarray, " m"],
) -> dict[Objective, Reconstruction]:
    """What stored arrays [1, n, …] tell a student, by its objective.

    Args:
      positions: the teacher at `where`; its first listed tokens are the exact entries.
      arrays: as `encode_shard` gives them.
      where: positions with a label.
    """
    stored = {name: values[0, where] for name, values in arrays.items()}
    counts = stored["exact_counts"].astype(np.int64)
    logprobs = stored["target_logprobs"].astype(np.float64)
    tail = stored["tail_logprobs"][:, encoding.temperatures.index(1.0)].astype(np.float64)
    ids = stored["target_ids"]
    weights, exact = entry_weights(
        np.ones(len(where), bool), ids, logprobs, counts, tail, 1.0, encoding.no_id
    )
    if encoding.tail == "sampled":
        drawn = (ids != encoding.no_id).sum(axis=1) - counts
        return {"sampled": sampled(positions, weights, counts, drawn, np.exp(tail))}
    return {
        "bucket": bucket(positions, weights, np.exp(tail)),
        "renormalise": renormalised(positions, np.where(exact, logprobs, -np.inf)),
    }
