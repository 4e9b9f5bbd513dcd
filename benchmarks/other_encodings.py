"""Targets in the encodings of other systems, written from their published descriptions.

Each takes the positions of a chunk, keeps what it would store, and says what a student can make
of it. Only what the descriptions name is stored; bytes are those of files really written, of
shards of 8 rows where nothing else is said.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from array_record.python.array_record_module import ArrayRecordWriter

from pipelines.compare_beyond import DenseBeyond
from pipelines.compare_measure import (
    Positions,
    Reconstruction,
    Tally,
    bucket,
    measure,
    renormalised,
)
from pipelines.compare_targets import Chunk

_ROWS = 8


@dataclass(frozen=True)
class Found:
    """What one encoding costs and loses; as `pipelines.compare_targets.Measured`."""

    name: str
    bytes: float
    bias2: float
    variance: float
    lasting: float
    total_variation: float
    kl: float


class Other(ABC):
    """One encoding. `store` keeps a row; `write` writes all of them and returns their bytes."""

    def __init__(self, name: str):
        self.name = name
        self._tallies: dict[str, Tally] = {}
        self._row, self._pending = -1, []

    def add(self, chunk: Chunk, vocabulary: int) -> None:
        """Measures a chunk and keeps what is stored of it."""
        if len(chunk.where):
            found = self.read(chunk)
            tallies = measure(chunk.positions, list(found.values()), vocabulary)
            for objective, tally in zip(found, tallies, strict=True):
                self._tallies.setdefault(objective, Tally()).add(tally)

    def finish(self, folder: Path, tokens: int) -> list[Found]:
        """Bytes per token, and errors by objective."""
        size = self.write(folder) / tokens
        return [
            Found(
                f"{self.name}{objective}",
                size,
                tally.bias2 / tally.labels,
                tally.variance / tally.labels,
                tally.lasting(),
                tally.total_variation / tally.labels,
                tally.kl / tally.labels,
            )
            for objective, tally in self._tallies.items()
        ]

    @abstractmethod
    def read(self, chunk: Chunk) -> dict[str, Reconstruction]:
        """Keeps a chunk (all its positions), and reads it back at those with a label."""

    @abstractmethod
    def write(self, folder: Path) -> int:
        """Bytes of the files."""


def _uses(positions: Positions, logprobs: np.ndarray) -> dict[str, Reconstruction]:
    """Top-k log-probs renormalised, as their systems use them, and with the rest as one class,
    which the same bytes allow; where they sum to more than 1, there is no rest."""
    weights = np.where(positions.p[:, : logprobs.shape[1]] > 0, np.exp(logprobs), 0.0)
    return {
        ", renormalised": renormalised(positions, logprobs),
        ", rest as a class": bucket(positions, weights, np.maximum(1 - weights.sum(axis=1), 0.0)),
    }


def _listed(chunk: Chunk, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and float32 log-probs of the k most likely tokens, [n, k], at all positions."""
    return chunk.exact["ids"][0, :, :k], chunk.exact["logprobs"][0, :, :k]


def pack_bits(values: np.ndarray, bits: int) -> bytes:
    """Whole numbers end to end, each in so many bits, the lowest first."""
    planes = (values.reshape(-1, 1).astype(np.uint64) >> np.arange(bits, dtype=np.uint64)) & 1
    return np.packbits(planes.astype(np.uint8), bitorder="little").tobytes()


def varints(values: np.ndarray) -> bytes:
    """Protocol buffers' variable-length integers: 7 bits a byte, the high bit says that more
    follow; what tf.Example stores of an int64 list."""
    values = values.reshape(-1, 1).astype(np.uint64)
    shifts = np.arange(0, 35, 7, dtype=np.uint64)
    pieces = (values >> shifts) & np.uint64(127)
    count = np.maximum((values >= (np.uint64(1) << shifts)).sum(axis=1), 1)
    place = np.arange(len(shifts))
    more = place[None, :] < count[:, None] - 1
    keep = place[None, :] < count[:, None]
    return (pieces + 128 * more.astype(np.uint64))[keep].astype(np.uint8).tobytes()


class ExampleRecords(Other):
    """A row as one tf.Example in an ArrayRecord: float32 log-probs, int64 ids, int64 tokens."""

    def __init__(self, k: int):
        super().__init__(f"ArrayRecord, float32 + int64, k = {k}")
        self._k = k
        self._rows: dict[int, list[tuple[bytes, ...]]] = {}

    def read(self, chunk: Chunk) -> dict[str, Reconstruction]:
        ids, logprobs = _listed(chunk, self._k)
        tokens = varints(chunk.rows["tokens"])
        self._rows.setdefault(chunk.row, []).append((tokens, logprobs.tobytes(), varints(ids)))
        return _uses(chunk.positions, logprobs[chunk.where].astype(np.float64))

    def write(self, folder: Path) -> int:
        path = folder / "examples.array_record"
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for pieces in self._rows.values():
            writer.write(b"".join(b"".join(values) for values in zip(*pieces, strict=True)))
        writer.close()
        return path.stat().st_size


class PackedTensors(Other):
    """float16 log-probs and ids in 17 bits, one zstd stream of each for 8 rows; no tokens."""

    def __init__(self, k: int):
        super().__init__(f"float16 + 17-bit ids, zstd, k = {k}")
        self._k = k
        self._shards: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}

    def read(self, chunk: Chunk) -> dict[str, Reconstruction]:
        ids, logprobs = _listed(chunk, self._k)
        stored = logprobs.astype(np.float16)
        self._shards.setdefault(chunk.row // _ROWS, []).append((ids, stored))
        return _uses(chunk.positions, stored[chunk.where].astype(np.float64))

    def write(self, folder: Path) -> int:
        size = 0
        for number, pieces in self._shards.items():
            ids, stored = (np.concatenate(each) for each in zip(*pieces, strict=True))
            data = _zstd(pack_bits(ids, 17)) + _zstd(stored.tobytes())
            path = folder / f"packed-{self._k}-{number}.zst"
            path.write_bytes(data)
            size += path.stat().st_size
        return size


class PolynomialFit(Other):
    """The sorted log-probs as a few bfloat16 heads and a least-squares fit in float32, ids in
    the fewest bits; byte vectors in Parquet with zstd. x runs from 0 to 1 over what is fitted."""

    def __init__(self, k: int, exact: int, powers: tuple[float, ...], bits: int):
        super().__init__(f"polynomial fit, k = {k}, {exact} exact")
        self._k, self._exact, self._bits = k, exact, bits
        x = np.linspace(0.0, 1.0, k - exact)
        self._terms = np.stack([x**power for power in powers], axis=1)
        self._solve = np.linalg.pinv(self._terms)
        self._stored: list[bytes] = []

    def read(self, chunk: Chunk) -> dict[str, Reconstruction]:
        ids, logprobs = _listed(chunk, self._k)
        heads = logprobs[:, : self._exact].astype(ml_dtypes.bfloat16)
        tails = logprobs[:, self._exact :].astype(np.float64)
        coefficients = (tails @ self._solve.T).astype(np.float32)
        fitted = coefficients.astype(np.float64) @ self._terms.T
        for place in range(len(ids)):
            packed = pack_bits(ids[place], self._bits)
            self._stored.append(packed + heads[place].tobytes() + coefficients[place].tobytes())
        read = np.concatenate([heads.astype(np.float64), fitted], axis=1)
        return _uses(chunk.positions, read[chunk.where])

    def write(self, folder: Path) -> int:
        path = folder / f"polynomial-{self._k}.parquet"
        table = pa.table({"targets": pa.array(self._stored, pa.binary())})
        parquet.write_table(table, path, compression="zstd")
        return path.stat().st_size


class Counts(Other):
    """Ids drawn with replacement, each with how often it was drawn (Sparse Logit Sampling,
    Anshumann et al., 2025): 17 bits an id, 7 a count or as many as n needs, a byte for the number
    of distinct ids (two if n is above 255); one zstd stream for 8 rows."""

    def __init__(self, draws: int, seed: int = 0):
        super().__init__(f"with replacement, {draws} draws")
        self._draws = draws
        self._random = np.random.default_rng([seed, draws])
        self._shards: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}

    def read(self, chunk: Chunk) -> dict[str, Reconstruction]:
        positions = chunk.positions
        ids, counts, distinct = draw_counts(self._random, whole(chunk), self._draws)
        self._shards.setdefault(chunk.row // _ROWS, []).append((ids, counts, distinct))
        zero = np.zeros(len(positions.p))
        squares = positions.beyond.mass.pp + (positions.p**2).sum(axis=1)
        # One draw of n has the variance of a multinomial: sum of p (1 - p) / n.
        mean = Reconstruction(positions.p, zero + 1, zero, (1 - squares) / self._draws, zero)
        return {"": replace(mean, draw_distance=np.full(len(zero), np.nan))}

    def write(self, folder: Path) -> int:
        size = 0
        bits = max(7, self._draws.bit_length())
        width = np.uint8 if self._draws <= 255 else np.uint16
        for number, pieces in self._shards.items():
            ids, counts, distinct = (np.concatenate(each) for each in zip(*pieces, strict=True))
            parts = (pack_bits(ids, 17), pack_bits(counts, bits), distinct.astype(width).tobytes())
            path = folder / f"counts-{self._draws}-{number}.zst"
            path.write_bytes(b"".join(_zstd(part) for part in parts))
            size += path.stat().st_size
        return size


def whole(chunk: Chunk) -> np.ndarray:
    """The teacher's distribution at the positions with a label, float64 [m, vocabulary]."""
    beyond = chunk.positions.beyond
    assert isinstance(beyond, DenseBeyond)
    p = np.asarray(beyond.p)[chunk.where].astype(np.float64)
    place = np.arange(len(p))[:, None]
    p[place, chunk.positions.ids] += chunk.positions.p
    return p


def draw_counts(
    random: np.random.Generator, p: np.ndarray, draws: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct ids and their counts, end to end, and how many each position has."""
    ends = np.cumsum(p, axis=1)
    ends /= ends[:, -1:]
    found_ids, found_counts, distinct = [], [], []
    for row in ends:
        drawn = np.searchsorted(row, random.random(draws), side="right")
        ids, counts = np.unique(drawn, return_counts=True)
        found_ids.append(ids)
        found_counts.append(counts)
        distinct.append(len(ids))
    return np.concatenate(found_ids), np.concatenate(found_counts), np.array(distinct)


def _zstd(data: bytes) -> bytes:
    return pa.Codec("zstd", 3).compress(data).to_pybytes()


def others(vocabulary: int) -> list[Other]:
    """All encodings that stand beside ours."""
    bits = (vocabulary - 1).bit_length()
    return [
        ExampleRecords(128),
        *(PackedTensors(k) for k in (16, 32, 64, 128)),
        PolynomialFit(50, 1, (0, 1, 0.5), bits),
        PolynomialFit(128, 16, (0, 1, 2, 3, 4, 0.5), bits),
        *(Counts(draws) for draws in (12, 25, 40, 50, 70, 100, 140, 200, 280, 400, 560, 800)),
    ]
