"""Options of the commands that look at a cache: one definition for command line and Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from cache.errors import CacheError


@dataclass(frozen=True)
class InspectOptions:
    """Looks into a cache: a summary, or one shard, row or position of it.

    Example: stillroom inspect cache --row 3 --position 17
    """

    cache: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CACHE")]
    """The cache: a local path, gs://…, s3://… or http://…."""
    row: int | None = None
    """Show one row: its documents and its text."""
    position: int | None = None
    """With --row: show the teacher's prediction at one position of it."""
    shard: int | None = None
    """Show one shard: its receipt, rows, documents, timings and statistics."""
    temperature: float | None = None
    """With --position: the captured temperature of the probabilities; the lowest if unset."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        if self.position is not None and self.row is None:
            raise CacheError("--position needs --row: say which row it is in.")
        if self.shard is not None and self.row is not None:
            raise CacheError("--shard and --row exclude each other: ask for one of them.")
        if self.temperature is not None and self.position is None:
            raise CacheError("--temperature needs --position: it is of the probabilities there.")


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
    """Remove the receipts of what is broken, so that the same precompute redoes exactly that."""
    json: bool = False
    """Print JSON."""
