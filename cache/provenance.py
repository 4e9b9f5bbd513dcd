"""What the manifest of a derived cache says of where it is from: the object capture.derived."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cache.errors import CacheError
from cache.format import Encoding
from cache.jsonfields import Fields

DERIVED = "derived"


def check_derived(capture: dict[str, Any]) -> None:
    """Checks the object that says what a cache was derived from, sources of sources included.

    Its fields: "version"; "sources", each with "identities" and "manifest_sha256" of the cache,
    its "rows", "k", "tail", "logprobs", "mantissa_bits", and its own "derived" if it has one;
    "rows", those taken of all sources (null: all); "rows_held", which rows of which corpora are
    there ([corpus digest, first, end], null: not known); and where they apply "sample", "seed"
    and "relative_error" (`Manifest.relative_error`).

    Raises:
      CacheError: a field is missing or of a wrong type.
    """
    pending = [capture]
    while pending:
        holder = pending.pop()
        if DERIVED not in holder:
            continue
        fields = Fields(holder[DERIVED], "manifest, derived")
        fields.span("rows")
        _check_held(fields)
        for name in ("sample", "relative_error"):
            if name in fields.value:
                fields.number(name)
        for name in ("version", *(["seed"] if "seed" in fields.value else [])):
            fields.integer(name)
        sources = fields.list_of("sources", dict)
        if not sources:
            raise CacheError("manifest, derived: there should be at least one source")
        for value in sources:
            source = Fields(value, "manifest, derived, source")
            source.text("manifest_sha256")
            source.list_of("identities", str)
            for name in ("tail", "logprobs"):
                source.text(name)
            for name in ("rows", "k", "mantissa_bits"):
                source.integer(name)
            pending.append(value)


@dataclass(frozen=True)
class Recomputed:
    """How often the tails of a cache were recomputed, and from what; of sources, the worst.

    Attributes:
      times: derivations that kept fewer exact entries: each recomputes the tails (`derivation.
        tail_beyond`) from stored numbers and rounds them again.
      roundings: how many different roundings of log-probs these read.
      k: entries per position before the first of them.
      relative_error: largest relative error of the log-probs that they read.
    """

    times: int = 0
    roundings: int = 0
    k: int = 0
    relative_error: float = 0.0


def recomputed(encoding: Encoding, capture: dict[str, Any]) -> Recomputed:
    """How the tails of a cache with this encoding and capture came about."""
    paths = list(_paths(encoding, capture))
    steps = [step for path in paths for step in path]
    return Recomputed(
        times=max(len(path) for path in paths),
        roundings=max(len({error for _, error in path}) for path in paths),
        k=max((k for k, _ in steps), default=0),
        relative_error=max((error for _, error in steps), default=0.0),
    )


def _paths(encoding: Encoding, holder: dict[str, Any]) -> Iterator[list[tuple[int, float]]]:
    """Entries and error of log-probs before each step that dropped some; for every source."""
    if DERIVED not in holder:
        yield []
        return
    for source in holder[DERIVED]["sources"]:
        before = replace(
            encoding,
            k=source["k"],
            tail="none",
            logprobs=source["logprobs"],
            mantissa_bits=source["mantissa_bits"],
        )
        error = source.get(DERIVED, {}).get("relative_error", before.relative_error)
        dropped = [(before.k, float(error))] if before.k > encoding.k else []
        for path in _paths(before, source):
            yield [*path, *dropped]


def _check_held(fields: Fields) -> None:
    if fields.value.get("rows_held", 0) is None:
        return
    for item in fields.list_of("rows_held", list):
        good = len(item) == 3 and isinstance(item[0], str) and all(type(n) is int for n in item[1:])
        if not good:
            raise CacheError(
                "manifest, derived: rows_held should list corpus digests with two row numbers, "
                f"found {item!r}"
            )
