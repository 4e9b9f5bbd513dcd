"""What differs between a derivation that is asked for and the one whose result is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from cache.differences import field_differences, setting_differences
from cache.manifest import Manifest
from cache.provenance import DERIVED

# What follows from the sources, the rows and the encoding: said only if nothing else differs.
_FOLLOWS = ("rows_held", "relative_error")


def differences(found: Manifest, wanted: Manifest, sources: Sequence[str]) -> list[str]:
    """What differs, a line each; none if the two are the same derivation.

    Args:
      found: the manifest that is there.
      wanted: the open manifest of what is asked for.
      sources: the places of its sources.
    """
    before, now = (each.capture.get(DERIVED) for each in (found, wanted))
    lines = list(setting_differences(_without(found), _without(wanted)))
    if before is None or now is None:
        if before != now:
            lines.insert(0, "derived: the cache was captured, you ask for one that is derived")
    else:
        lines += _of_derivation(before, now, sources)
    if not lines and found.corpus.get("digest") != wanted.corpus["digest"]:
        lines.append(
            f"corpus: the cache is of {found.corpus.get('description')}, yours of "
            f"{wanted.corpus['description']}"
        )
    return lines


def _without(manifest: Manifest) -> Manifest:
    manifest = manifest.as_read
    capture = {name: value for name, value in manifest.capture.items() if name != DERIVED}
    return replace(manifest, capture=capture)


def _of_derivation(
    found: dict[str, Any], wanted: dict[str, Any], places: Sequence[str]
) -> Iterator[str]:
    if found == wanted:
        return
    lines = list(_sources(found["sources"], wanted["sources"], places))
    if found["rows"] != wanted["rows"]:
        lines.append(f"rows: the cache has {_rows(found)}, you ask for {_rows(wanted)}")
    apart = ("sources", "rows", *_FOLLOWS)
    # The seed is there where something was drawn.
    apart += () if "seed" in found and "seed" in wanted else ("seed",)
    one, other = (
        {name: x for name, x in each.items() if name not in apart} for each in (found, wanted)
    )
    lines += field_differences(one, other)
    if not lines:
        names = [
            name
            for name in sorted(found.keys() | wanted.keys())
            if found.get(name) != wanted.get(name)
        ]
        lines.append(f"{', '.join(names)}: other than in the cache")
    yield from lines


def _rows(derived: dict[str, Any]) -> str:
    rows = derived["rows"]
    return "all" if rows is None else f"{rows[0]}:{rows[1]}"


def _sources(
    found: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]], places: Sequence[str]
) -> Iterator[str]:
    digests = [[source["manifest_sha256"] for source in each] for each in (found, wanted)]
    if digests[0] == digests[1]:
        return
    if sorted(digests[0]) == sorted(digests[1]):
        yield "sources: they are the same caches in another order"
        return
    if len(found) != len(wanted):
        yield f"sources: the cache was derived from {len(found)}, you give {len(wanted)}"
        return
    for number, (before, now) in enumerate(zip(found, wanted, strict=True), 1):
        if before["manifest_sha256"] != now["manifest_sha256"]:
            yield f"source {number} ({places[number - 1]}) {_changed(before, now)}"


def _changed(before: dict[str, Any], now: dict[str, Any]) -> str:
    known = before["identities"]
    if now["identities"][: len(known)] != known:
        return (
            f"is another cache: it has {_told(now)}; the one that this was derived from had "
            f"{_told(before)}"
        )
    if before["rows"] == now["rows"]:
        return (
            "has another manifest since, though its settings, teacher and documents are the same: "
            "it was made again, or shards of it were"
        )
    if before["rows"] < now["rows"]:
        return f"has grown from {before['rows']:,} to {now['rows']:,} rows since"
    return f"had {before['rows']:,} rows, and now has {now['rows']:,} rows"


def _told(source: dict[str, Any]) -> str:
    identity = source["identities"][0][:12]
    return f"{source['rows']:,} rows, k {source['k']}, and the identity {identity}…"
