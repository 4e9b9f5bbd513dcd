"""The format of a cache: its names, its arrays, their types, fills and Zarr metadata.

This is the only definition of the format. Layout on storage:

    manifest.json            what the cache is (manifest.py)
    manifest.backup.json     the same bytes again, for `verify --repair`
    work.json                while shards are added to a finished cache, or made again (filling.py)
    tokenizer/               the tokenizer, so that the cache stands alone
    receipts/000000.json     one per finished shard (receipt.py)
    arrays/                  a Zarr v3 group, one array per field below
    runs/*.jsonl             times and events of the runs; never part of the data
    parts/                   tokenised rows while a capture is under way

Everything but tokens, segments and documents is indexed by the *predicting*
position t: position t has a label (`label_mask` = 1) iff token t + 1 belongs to
the same segment and counts; the target is the teacher's prediction of it.
Positions without a label hold the array's fill value. The array `seals` says of every
row of every other array which cache and row it is of (seals.py).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from cache.errors import CacheError
from cache.jsonfields import Fields

FORMAT = "stillroom-cache"
VERSION = (1, 1)

MANIFEST = "manifest.json"
BACKUP = "manifest.backup.json"
WORK = "work.json"
COPY_RUN = "copy-"  # how the id of a run begins that copies
# The index of an array's file takes 16 bytes for each of them, whether or not the row exists.
MAX_ROWS_PER_SHARD = 2**20
TOKENIZER = "tokenizer"
RECEIPTS = "receipts"
ARRAYS = "arrays"
RUNS = "runs"
PARTS = "parts"
SEALS = "seals"

NO_DOCUMENT = 0xFFFFFFFF
# What a reader of a cache with float32 tails must know of; others would take them for float16.
WIDE_TAILS = "float32_tails"
# uint32 ids with the largest kept free; a limit far above any tokenizer's.
MOST_VOCABULARY = 2**31

# Of blosc's zstd. Measured on SmolLM2: 3 stores 4 % less than 1 and decodes as fast.
_LEVEL = 3
# Shuffling bytes makes ids larger: whole ids repeat, their bytes alone tell less.
_UNSHUFFLED = ("tokens", "target_ids")

Logprobs = Literal["float32", "float16", "rounded"]
Tail = Literal["none", "sampled"]


@dataclass(frozen=True)
class ArraySpec:
    """One array of the cache.

    Attributes:
      name: the array's name and folder.
      dtype: numpy's name of the element type.
      inner: sizes of the axes after the row axis.
      dimensions: names of all axes, the first being "row".
      fill: the fill value: what no valid element holds (NaN, an illegal id, 255).
    """

    name: str
    dtype: str
    inner: tuple[int, ...]
    dimensions: tuple[str, ...]
    fill: int | float

    def zarr(self, rows: int, rows_per_shard: int) -> dict[str, Any]:
        """The array's zarr.json for a number of rows (Zarr v3 with the sharding codec)."""
        fill: Any = self.fill
        if isinstance(fill, float) and math.isnan(fill):
            fill = "NaN"
        itemsize = np.dtype(self.dtype).itemsize
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        if itemsize == 1:
            little = {"name": "bytes"}
        unshuffled = itemsize == 1 or self.name in _UNSHUFFLED
        blosc = {
            "cname": "zstd",
            "clevel": _LEVEL,
            "shuffle": "noshuffle" if unshuffled else "shuffle",
            "typesize": itemsize,
            "blocksize": 0,
        }
        sharding = {
            "chunk_shape": [1, *self.inner],
            "codecs": [little, {"name": "blosc", "configuration": blosc}, {"name": "crc32c"}],
            "index_codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
            "index_location": "end",
        }
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [rows, *self.inner],
            "data_type": self.dtype,
            "dimension_names": list(self.dimensions),
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [rows_per_shard, *self.inner]},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": fill,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": {},
        }


@dataclass(frozen=True)
class Encoding:
    """How a cache lays out and rounds what it stores.

    Attributes:
      length: positions in a row.
      vocabulary: number of real token ids, added tokens included.
      k: entries per position.
      tail: "none" (all entries exact) or "sampled".
      temperatures: where the mass outside the exact entries is kept, ascending.
      logprobs: "float32", "float16", or "rounded" (float16 with fewer mantissa bits).
      mantissa_bits: mantissa bits that "rounded" keeps, 1 to 10.
      rows_per_shard: rows of a shard, the unit of work, retry and checking.
      rows_per_example: 1, or 2 for preference pairs, which nothing may separate.
      sealed: whether there are seals; caches of format 1.0 have none.
      wide_tails: whether tails and entropy are float32 where log-probs are; not so in caches from
        before there was this field.
    """

    length: int
    vocabulary: int
    k: int
    tail: Tail
    temperatures: tuple[float, ...]
    logprobs: Logprobs = "rounded"
    mantissa_bits: int = 6
    rows_per_shard: int = 256
    rows_per_example: int = 1
    sealed: bool = True
    wide_tails: bool = True

    def __post_init__(self) -> None:
        def demand(holds: bool, name: str, expected: str) -> None:
            if not holds:
                raise CacheError(f"{name} should be {expected}, found {getattr(self, name)!r}")

        demand(self.length >= 2, "length", "at least 2")
        demand(
            1 <= self.vocabulary <= MOST_VOCABULARY,
            "vocabulary",
            f"between 1 and {MOST_VOCABULARY:,}",
        )
        demand(1 <= self.k <= self.vocabulary, "k", f"between 1 and the {self.vocabulary:,} tokens")
        demand(self.tail in ("none", "sampled"), "tail", "none or sampled")
        demand(len(self.temperatures) >= 1, "temperatures", "at least one temperature")
        demand(
            all(math.isfinite(value) and value > 0 for value in self.temperatures),
            "temperatures",
            "finite and above 0",
        )
        demand(
            list(self.temperatures) == sorted(set(self.temperatures)),
            "temperatures",
            "ascending and distinct",
        )
        demand(
            self.tail == "none" or len(self.temperatures) == 1,
            "temperatures",
            "the one capture temperature when the tail is sampled",
        )
        demand(
            self.logprobs in ("float32", "float16", "rounded"),
            "logprobs",
            "float32, float16 or rounded",
        )
        demand(1 <= self.mantissa_bits <= 10, "mantissa_bits", "between 1 and 10")
        demand(self.rows_per_example in (1, 2), "rows_per_example", "1 or 2")
        demand(
            1 <= self.rows_per_shard <= MAX_ROWS_PER_SHARD
            and self.rows_per_shard % self.rows_per_example == 0,
            "rows_per_shard",
            f"a positive multiple of rows_per_example ({self.rows_per_example}), at most "
            f"{MAX_ROWS_PER_SHARD:,}",
        )

    @property
    def id_dtype(self) -> str:
        """The narrowest id type that leaves its largest value free for "no token"."""
        return "uint16" if self.vocabulary <= 65535 else "uint32"

    @property
    def no_id(self) -> int:
        """The illegal id that marks an empty slot."""
        return int(np.iinfo(self.id_dtype).max)

    @property
    def logprob_dtype(self) -> str:
        return "float32" if self.logprobs == "float32" else "float16"

    @property
    def tail_dtype(self) -> str:
        """Of the tails' log-masses and of entropy."""
        return self.logprob_dtype if self.wide_tails else "float16"

    @property
    def tail_error(self) -> float:
        """Largest relative rounding error of a stored tail's log-mass, and of entropy."""
        return 2.0**-24 if self.tail_dtype == "float32" else 2.0**-11

    @property
    def features(self) -> tuple[str, ...]:
        """What a reader must know of, beyond the first version of the format."""
        return (WIDE_TAILS,) if self.tail_dtype == "float32" else ()

    def in_format_of(self, other: Encoding) -> Encoding:
        """This encoding as a cache has it that was begun as `other`.

        Its format stays, and so do mantissa bits that its rounding does not use.
        """
        same = self.logprobs == other.logprobs != "rounded"
        bits = other.mantissa_bits if same else self.mantissa_bits
        return replace(self, sealed=other.sealed, wide_tails=other.wide_tails, mantissa_bits=bits)

    @property
    def relative_error(self) -> float:
        """Largest relative rounding error of a stored log-prob of an entry."""
        return {"float32": 2.0**-24, "float16": 2.0**-11}.get(
            self.logprobs, 2.0 ** -(self.mantissa_bits + 1)
        )

    def arrays(self) -> dict[str, ArraySpec]:
        """The arrays of a cache with this encoding, seals aside, by name."""
        ids = (self.id_dtype, self.no_id)
        count = ("uint8", 255) if self.k < 255 else ("uint16", 65535)
        nan = math.nan
        rows = {
            "tokens": (*ids, ()),
            "segments": ("uint16", 65535, ()),
            "documents": ("uint32", NO_DOCUMENT, ()),
            "label_mask": ("uint8", 255, ()),
            "target_ids": (*ids, ("k",)),
            "target_logprobs": (self.logprob_dtype, nan, ("k",)),
            "exact_counts": (*count, ()),
            "tail_logprobs": (self.tail_dtype, nan, ("temperature",)),
            "label_logprobs": ("float32", nan, ()),
            "entropy": (self.tail_dtype, nan, ()),
        }
        sizes = {"k": self.k, "temperature": len(self.temperatures)}
        return {
            name: ArraySpec(
                name=name,
                dtype=dtype,
                inner=(self.length, *(sizes[axis] for axis in axes)),
                dimensions=("row", "position", *axes),
                fill=fill,
            )
            for name, (dtype, fill, axes) in rows.items()
        }

    def stored_arrays(self) -> dict[str, ArraySpec]:
        """All arrays of a cache with this encoding, by name: `arrays` and the seals of them."""
        arrays = self.arrays()
        if not self.sealed:
            return arrays
        seals = ArraySpec(SEALS, "uint64", (len(arrays),), ("row", "array"), 2**64 - 1)
        return {**arrays, SEALS: seals}

    def shards(self, rows: int) -> int:
        """Number of shards that hold a number of rows."""
        return -(-rows // self.rows_per_shard)

    def shard_rows(self, shard: int, rows: int) -> tuple[int, int]:
        """First and one past the last of a shard's rows, of `rows` in all."""
        first = shard * self.rows_per_shard
        return first, min(first + self.rows_per_shard, rows)

    def to_json(self) -> dict[str, Any]:
        value = {**asdict(self), "temperatures": [float(value) for value in self.temperatures]}
        if not self.sealed:
            # Says nothing where format 1.0 said nothing: the identity of such a cache stays.
            del value["sealed"]
        if self.tail_dtype == "float16":
            del value["wide_tails"]
        return value

    @classmethod
    def from_json(cls, value: Any, what: str = "encoding") -> Encoding:
        """Reads `to_json`'s object.

        Raises:
          CacheError: a field is missing, of a wrong type or out of range.
        """
        fields = Fields(value, what)
        return cls(
            length=fields.integer("length"),
            vocabulary=fields.integer("vocabulary"),
            k=fields.integer("k"),
            tail=fields.choice("tail", ("none", "sampled")),  # type: ignore[arg-type]
            temperatures=fields.numbers("temperatures"),
            logprobs=fields.choice("logprobs", ("float32", "float16", "rounded")),  # type: ignore[arg-type]
            mantissa_bits=fields.integer("mantissa_bits"),
            rows_per_shard=fields.integer("rows_per_shard"),
            rows_per_example=fields.integer("rows_per_example"),
            sealed=fields.flag("sealed", False),
            # Where log-probs are float16 it says nothing, and is not there.
            wide_tails=fields.flag("wide_tails", value["logprobs"] != "float32"),
        )


def group_metadata(arrays: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The zarr.json of the group, with its arrays' metadata inline (consolidated)."""
    return {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {},
        "consolidated_metadata": {
            "kind": "inline",
            "must_understand": False,
            "metadata": arrays,
        },
    }


def receipt_key(shard: int) -> str:
    return f"{RECEIPTS}/{shard:06d}.json"
