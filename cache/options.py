"""Options of the commands that look at a cache: one definition for command line and Python."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from cache.errors import CacheError


@dataclass(frozen=True)
class InspectOptions:
    """Looks into a cache: a summary, or one shard, row or position of it.

    Example: stillroom inspect cache --row 3 --position 17
    """

    cache: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CACHE")]
    """The cache: a local path, gs://…, s3://… or http://…."""
    row: Annotated[int | None, tyro.conf.arg(metavar="ROW")] = None
    """Show one row: its documents and its text. Unset: the summary."""
    position: Annotated[int | None, tyro.conf.arg(metavar="POSITION")] = None
    """With --row: show the teacher's prediction at one position of it. Unset: the whole row."""
    shard: Annotated[int | None, tyro.conf.arg(metavar="SHARD")] = None
    """Show one shard: its receipt, rows, documents, timings and statistics. Unset: the summary."""
    temperature: float | None = None
    """With --position: the captured temperature of the probabilities. Unset: the lowest."""
    files: bool = True
    """Look for missing files. Without, the summary of a finished cache reads one object alone."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        if self.position is not None and self.row is None:
            raise CacheError("--position needs --row: say which row it is in.")
        if self.shard is not None and self.row is not None:
            raise CacheError("--shard and --row exclude each other: ask for one of them.")
        if self.temperature is not None and self.position is None:
            raise CacheError("--temperature needs --position: it is of the probabilities there.")
        if not self.files and (self.row is not None or self.shard is not None):
            raise CacheError(
                "--no-files is of the summary: leave it out, or --row, --position and --shard."
            )


@dataclass(frozen=True)
class VerifyOptions:
    """Checks a cache. Exits with 1 if anything is missing, damaged or unfinished.

    Example: stillroom verify cache --full
    """

    cache: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CACHE")]
    """The cache: a local path, gs://…, s3://… or http://…."""
    full: bool = False
    """Read every byte: checksums, digests, and whether the values make sense together."""
    repair: bool = False
    """Restore what follows from the rest, and remove the receipts of what is broken, so that the
    command that made the cache redoes exactly that. Exits with 1 if there was damage, even if it is
    all mended; the next check tells."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class CopyOptions:
    """Copies a cache to another storage, every byte checked. Goes on where it was stopped.

    Example: stillroom copy cache s3://bucket/cache
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SRC")]
    """The cache: a local path, gs://…, s3://… or http://…."""
    destination: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DST")]
    """Where the copy goes: a local path, gs://… or s3://…."""


@dataclass(frozen=True)
class DeriveOptions:
    """Cuts, thins, rounds or joins finished caches into a new one, without the teacher.

    What is not given stays as it is. Run the same command again after any interruption: it goes
    on where it stopped, and a finished cache is left as it is.

    Example: stillroom derive cache smaller --k 16 --sample 0.1
    """

    places: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="SRC [SRC …] OUT", help_behavior_hint="(required)"),
    ]
    """The caches to derive from, several are joined; and, last, where the new one goes. Folders,
    s3:// or gs:// addresses; sources also http://."""

    k: int | None = None
    """Entries per position, fewer than there are. Unset: as many as there are."""
    exact: int | None = None
    """With a sampled tail and a smaller --k: at least so many entries stay exact. Unset:
    those sure to be exact, at most half of --k."""
    tail: Literal["keep", "drop"] = "keep"
    """drop: only the exact entries, as `precompute --tail none` captures them; their number, --k,
    is by default that which every position is sure to have."""
    temperatures: tuple[float, ...] | None = None
    """Temperatures to keep, of those that were captured. Unset: all of them."""
    logprobs: Literal["rounded", "float16", "float32"] | None = None
    """How log-probs are stored: as they are or coarser. Unset: as they are."""
    mantissa_bits: int | None = None
    """Kept by `rounded`: as many as there are or fewer. Unset: as many as there are."""
    rows: Annotated[str | None, tyro.conf.arg(metavar="FIRST:END")] = None
    """Only the rows FIRST to END - 1, numbered through all sources. Unset: all rows."""
    sample: Annotated[float | None, tyro.conf.arg(metavar="SHARE|ROWS")] = None
    """Only a random share of the rows (below 1), or so many rows at most. Rows that share
    documents stay together. Unset: all rows."""
    seed: int | None = None
    """Of --sample, and of the entries that a smaller --k keeps of a sampled tail. Unset: 0."""
    rows_per_shard: int | None = None
    """The unit of work, of retry and of checking: one file per array. Unset: as in the sources."""

    def __post_init__(self) -> None:
        def demand(holds: bool, name: str, expected: str) -> None:
            if not holds:
                option = name.replace("_", "-")
                raise CacheError(f"--{option} should be {expected}, found {getattr(self, name)!r}.")

        if len(self.places) < 2 or not all(place.strip() for place in self.places):
            raise CacheError(
                "derive needs at least one cache to derive from, and the place of the new one: "
                "stillroom derive SRC OUT."
            )
        for name in ("k", "exact", "rows_per_shard"):
            value = getattr(self, name)
            demand(value is None or value >= 1, name, "at least 1")
        demand(
            self.mantissa_bits is None or 1 <= self.mantissa_bits <= 10,
            "mantissa_bits",
            "between 1 and 10",
        )
        demand(0 <= self.draw_seed < 2**32, "seed", "between 0 and 2^32 - 1")
        demand(
            self.rows is None or re.fullmatch(r"[0-9]{0,18}:[0-9]{0,18}", self.rows) is not None,
            "rows",
            "two row numbers, such as 0:1000",
        )
        sample = self.sample
        demand(
            sample is None
            or 0 < sample < 1
            or (math.isfinite(sample) and sample >= 1 and sample == int(sample)),
            "sample",
            "a share below 1, or a whole number of rows",
        )

    @property
    def draw_seed(self) -> int:
        """The seed of what is drawn at random."""
        return 0 if self.seed is None else self.seed

    @property
    def sources(self) -> tuple[str, ...]:
        return self.places[:-1]

    @property
    def out(self) -> str:
        return self.places[-1]
