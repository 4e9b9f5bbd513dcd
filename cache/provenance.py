"""What the manifest of a derived cache says of where it is from: the object capture.derived."""

from __future__ import annotations

from typing import Any

from cache.errors import CacheError
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
