"""Several caches as one: whether they fit together, and how their documents are numbered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from jaxtyping import UInt32

from cache.differences import field_differences, fingerprint_differences
from cache.errors import CacheError
from cache.format import NO_DOCUMENT
from cache.jsonfields import digest
from cache.manifest import Manifest
from cache.operations import recipe_of
from cache.options import DeriveOptions
from cache.provenance import DERIVED
from cache.reader import Cache

# Rows of one corpus: its digest, the first, and one past the last.
Rows = tuple[str, int, int]

_OTHERWISE = "Join caches of one teacher that were made with the same settings. "


def check_joinable(sources: Sequence[Cache], rows_per_shard: int | None) -> list[str]:
    """Checks that caches can be one: same encoding, capture, teacher and tokenizer; other rows.

    Args:
      sources: the caches.
      rows_per_shard: of the joined cache; if None, that of the sources must be the same.

    Returns:
      What their user should know, one sentence each.

    Raises:
      CacheError: they differ, names the fields; or hold the same rows, as far as can be seen.
    """
    first = sources[0]
    for other in sources[1:]:
        who = (f"{first.location} has", f"{other.location} has")
        lines = [
            *field_differences(
                _settings(first, rows_per_shard), _settings(other, rows_per_shard), who
            ),
            *fingerprint_differences(
                first.manifest, other.manifest, (first.location, other.location)
            ),
        ]
        if lines:
            listed = "\n".join(f"  {line}" for line in lines)
            raise CacheError(
                f"{first.location} and {other.location} cannot be joined:\n{listed}\n"
                f"{_advice(sources, rows_per_shard)}Nothing was written."
            )
    pairs = list(combinations(sources, 2))
    for before, source in pairs:
        _check_disjoint(before, source)
    return [
        f"{before.location} and {source.location} have documents of one corpus, and may hold the "
        "same rows, which are then there twice: which rows --sample took is not recorded."
        for before, source in pairs
        if _may_share(before.manifest, source.manifest)
    ]


def _advice(sources: Sequence[Cache], rows_per_shard: int | None) -> str:
    """How caches that differ can be joined after all, if they can."""
    first = sources[0].encoding
    joined = first.rows_per_shard if rows_per_shard is None else rows_per_shard
    if not _differ([_settings(source, joined) for source in sources]):
        return f"Say how the joined cache is cut into shards: --rows-per-shard {joined}. "
    coarsest = max((source.encoding for source in sources), key=lambda each: each.relative_error)
    k = min(source.encoding.k for source in sources)
    exact = min(source.manifest.capture.get("exact") or k for source in sources)
    commands, made = [], []
    for source in sources:
        encoding = source.encoding
        changes: dict[str, Any] = {}
        if encoding.k != k:
            changes["k"] = k
            if encoding.tail == "sampled":
                changes["exact"] = exact
        if encoding.relative_error != coarsest.relative_error:
            changes["logprobs"] = coarsest.logprobs
            if coarsest.logprobs == "rounded":
                changes["mantissa_bits"] = coarsest.mantissa_bits
        if encoding.rows_per_shard != joined and rows_per_shard is None:
            changes["rows_per_shard"] = joined
        place = f"{source.location}-same"
        options = DeriveOptions((source.location, place), **changes)
        try:
            recipe = recipe_of([source.manifest], [""], options)
        except CacheError:
            return _OTHERWISE
        manifest = replace(
            source.manifest,
            encoding=recipe.wanted,
            capture={**source.manifest.as_read.capture, "exact": recipe.exact},
            state="open",
            run="x",
        )
        made.append((manifest, rows_per_shard))
        if changes:
            words = " ".join(f"--{name.replace('_', '-')} {x}" for name, x in changes.items())
            commands.append(f"  stillroom derive {source.location} {place} {words}")
    fingerprints = [
        (each.manifest.teacher["fingerprint"], each.manifest.tokenizer["fingerprint"])
        for each in sources
    ]
    if _differ(fingerprints) or _differ([_settings_of(*each) for each in made]):
        return _OTHERWISE
    listed = "\n".join(commands)
    return f"Derive each to the same settings first, then join what that makes:\n{listed}\n"


def _differ(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values)


def _settings(source: Cache, rows_per_shard: int | None) -> dict[str, Any]:
    """What has to be equal; where rows are from, and how they are cut, does not."""
    return _settings_of(source.manifest, rows_per_shard)


def _settings_of(manifest: Manifest, rows_per_shard: int | None) -> dict[str, Any]:
    manifest = manifest.as_read
    encoding = replace(manifest.encoding, sealed=True)
    if rows_per_shard is not None:
        encoding = replace(encoding, rows_per_shard=rows_per_shard)
    # Where all entries are exact, k says how many.
    apart = (DERIVED,) if encoding.tail == "sampled" else (DERIVED, "exact")
    capture = {name: value for name, value in manifest.capture.items() if name not in apart}
    return {**encoding.to_json(), **capture}


def _check_disjoint(one: Cache, other: Cache) -> None:
    both = f"{one.location} and {other.location}"
    if one.manifest.receipts == other.manifest.receipts:
        raise CacheError(f"{both} are the same cache. Name each cache once. Nothing was written.")
    for corpus, first, end in rows_held(one.manifest) or ():
        for same, start, stop in rows_held(other.manifest) or ():
            if same == corpus and first < stop and start < end:
                raise CacheError(
                    f"{both} both hold the rows {max(first, start)}-{min(end, stop) - 1} of one "
                    "capture, and joined they would be there twice. Cut one with --rows first. "
                    "Nothing was written."
                )


def _may_share(one: Manifest, other: Manifest) -> bool:
    """Whether two caches may hold the same rows of a corpus, where that cannot be seen."""
    if rows_held(one) is not None and rows_held(other) is not None:
        return False
    digests = [{corpus["digest"] for corpus in _corpora(manifest)} for manifest in (one, other)]
    return not digests[0].isdisjoint(digests[1])


def rows_held(manifest: Manifest) -> list[Rows] | None:
    """Which rows of which corpora a finished cache holds, in its order; None if not known.

    Rows of two caches with the same capture settings and corpus are the same where their numbers
    are.
    """
    derived = manifest.capture.get(DERIVED)
    if derived is None:
        return [
            (corpus["digest"], 0, extent.rows)
            for corpus, extent in zip(manifest.corpora, manifest.extents, strict=True)
        ]
    held = derived["rows_held"]
    return None if held is None else [(digest, first, end) for digest, first, end in held]


def cut(held: Sequence[Rows], first: int, end: int) -> list[Rows]:
    """The rows `first` to `end` - 1 of a cache that holds some rows."""
    found, start = [], 0
    for corpus, begin, stop in held:
        low, high = max(first - start, 0), min(end - start, stop - begin)
        if low < high:
            found.append((corpus, begin + low, begin + high))
        start += stop - begin
    return found


@dataclass(frozen=True)
class Numbering:
    """New numbers for the documents of one cache.

    Attributes:
      starts: where the documents of each of its corpora begin, ascending.
      shifts: what is added to the numbers of each.
    """

    starts: tuple[int, ...]
    shifts: tuple[int, ...]

    def of(
        self, documents: UInt32[np.ndarray, "row position"]
    ) -> UInt32[np.ndarray, "row position"]:
        """Document numbers of the joined cache; padding stays padding."""
        if not any(self.shifts):
            return documents
        real = documents != NO_DOCUMENT
        corpus = np.searchsorted(self.starts, documents[real], side="right") - 1
        renumbered = documents.copy()
        renumbered[real] = documents[real].astype(np.int64) + np.array(self.shifts)[corpus]
        return renumbered


def join_corpora(
    manifests: Sequence[Manifest],
) -> tuple[dict[str, Any], list[Numbering]]:
    """The corpus of a joined cache, and how the documents of each of the caches are numbered.

    Caches with the same corpus share its document numbers; the documents of another corpus come
    behind. One cache alone keeps its numbers.

    Raises:
      CacheError: a cache does not know its documents, or there are too many.
    """
    firsts: dict[tuple[str, int], int] = {}
    joined: list[dict[str, Any]] = []
    numberings, total = [], 0
    for manifest in manifests:
        starts, shifts, start = [], [], 0
        times: Counter[str] = Counter()
        for corpus in _corpora(manifest):
            # A cache may hold one corpus twice, under two numberings.
            key = (corpus["digest"], times[corpus["digest"]])
            times[corpus["digest"]] += 1
            if key not in firsts:
                firsts[key] = total
                joined.append(corpus)
                total += corpus["documents"]
            starts.append(start)
            shifts.append(firsts[key] - start)
            start += corpus["documents"]
        numberings.append(Numbering(tuple(starts), tuple(shifts)))
    if total >= NO_DOCUMENT:
        raise CacheError(f"a cache can number {NO_DOCUMENT:,} documents; these are {total:,}")
    if len(joined) == 1:
        return joined[0], numberings
    description = " + ".join(str(corpus["description"]) for corpus in joined)
    whole = {
        "description": description,
        "documents": total,
        "digest": digest([corpus["digest"] for corpus in joined]),
        "joined": joined,
    }
    return whole, numberings


def _corpora(manifest: Manifest) -> list[dict[str, Any]]:
    """The corpora that a cache's documents are of, in the order of their numbers."""
    lists = [corpus.get("joined", [corpus]) for corpus in manifest.corpora]
    parts = [part for each in lists for part in (each if isinstance(each, list) else [each])]
    if not all(
        isinstance(part, dict)
        and isinstance(part.get("documents"), int)
        and isinstance(part.get("digest"), str)
        for part in parts
    ):
        raise CacheError(
            "the manifest does not say how many documents its corpus has; nothing can be derived "
            "from such a cache."
        )
    kept = ("description", "documents", "digest")
    return [{name: part.get(name) for name in kept} for part in parts]
