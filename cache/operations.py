"""What a derivation is asked for, made definite for its sources, and refused where impossible."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int64

from cache.derivation import Recipe, draw_key
from cache.errors import CacheError
from cache.format import Encoding
from cache.groups import DocumentGroups, fill_up, seeded_order
from cache.manifest import Manifest
from cache.options import DeriveOptions

# Mantissa bits of the roundings that say nothing of them.
_MANTISSA = {"float32": 23, "float16": 10}


def recipe_of(
    manifests: Sequence[Manifest], digests: Sequence[str], options: DeriveOptions
) -> Recipe:
    """How targets change.

    Args:
      manifests: of the sources, which fit together.
      digests: of their manifests.
      options: what is asked for.

    Raises:
      CacheError: it cannot be made from what the sources hold; says why.
    """
    first = manifests[0].as_read
    source = replace(first.encoding, sealed=True)
    sure = first.capture.get("exact")
    k, exact = _entries(source, sure if isinstance(sure, int) else source.k, options)
    logprobs, bits = _rounding(source, options)
    wanted = replace(
        source,
        k=k,
        tail="none" if options.tail == "drop" else source.tail,
        temperatures=_temperatures(source, options),
        logprobs=logprobs,
        mantissa_bits=bits,
        rows_per_shard=options.rows_per_shard or source.rows_per_shard,
    )
    error = max(manifest.relative_error for manifest in manifests)
    recipe = Recipe(
        source=source,
        wanted=wanted,
        exact=exact,
        source_error=error,
        error=_error(source, wanted, error),
        key=draw_key(options.draw_seed, digests),
    )
    if options.seed is not None and options.sample is None and not recipe.draws:
        raise CacheError(
            f"--seed {options.seed} does nothing here: nothing is drawn at random. Leave it out; "
            "it is of --sample, and of a smaller --k of a sampled tail."
        )
    return recipe


def _error(source: Encoding, wanted: Encoding, before: float) -> float:
    """Largest relative error of a log-prob: rounding twice may err twice."""
    if (wanted.logprobs, wanted.mantissa_bits) == (source.logprobs, source.mantissa_bits):
        return before
    # The teacher computes in float32: storing that rounds nothing.
    return wanted.relative_error + (0.0 if source.logprobs == "float32" else before)


def _entries(source: Encoding, sure: int, options: DeriveOptions) -> tuple[int, int]:
    """Entries per position, and how many of them every position is sure to have exact."""
    k, sampled = options.k, source.tail == "sampled"
    if k is not None and k > source.k:
        raise CacheError(
            f"--k {k} is more than the {source.k} entries that the cache has. Entries that were "
            "not captured cannot be derived; capture again."
        )
    if options.tail == "drop":
        if not sampled:
            raise CacheError("--tail drop: the cache has no sampled tail; all entries are exact.")
        if options.exact is not None:
            raise CacheError("--exact: with --tail drop all entries are exact; give --k alone.")
        if (k or 1) > sure:
            raise CacheError(
                f"--k {k} with --tail drop is more than the {sure} entries of which it is sure "
                f"that they are exact at every position. Ask for at most {sure}."
            )
        return k or sure, k or sure
    if not sampled:
        if options.exact is not None:
            raise CacheError(
                "--exact: all entries of the cache are exact, and a tail cannot be sampled from "
                "it, for the tokens outside the entries are not known. Give --k alone."
            )
        return k or source.k, k or source.k
    if k is None or k == source.k:
        if options.exact not in (None, sure):
            raise CacheError(
                "--exact needs a smaller --k: entries that stay keep their exact values."
            )
        return source.k, sure
    if k < 2:
        raise CacheError(
            "--k 1 leaves no entry for the sampled tail. Ask for at least 2, or --tail drop."
        )
    exact = min(sure, max(k // 2, 1)) if options.exact is None else options.exact
    if exact > min(sure, k - 1):
        raise CacheError(
            f"--exact {exact} should be at most {min(sure, k - 1)}: every position is sure to have "
            f"{sure} exact entries, and of --k {k} at least one stands for the tail."
        )
    return k, exact


def _temperatures(source: Encoding, options: DeriveOptions) -> tuple[float, ...]:
    if options.temperatures is None:
        return source.temperatures
    wanted = tuple(sorted(set(options.temperatures)))
    if not wanted or not set(wanted) <= set(source.temperatures):
        captured = ", ".join(f"{value:g}" for value in source.temperatures)
        asked = ", ".join(f"{value:g}" for value in wanted)
        raise CacheError(
            f"--temperatures should be some of {captured}, which were captured, found "
            f"{asked or 'none'}. The mass outside the entries at another temperature is not known."
        )
    return wanted


def _rounding(source: Encoding, options: DeriveOptions) -> tuple[Any, int]:
    logprobs = options.logprobs or source.logprobs
    bits = options.mantissa_bits or source.mantissa_bits
    if options.mantissa_bits is not None and logprobs != "rounded":
        raise CacheError(f"--mantissa-bits is of --logprobs rounded, not of {logprobs}.")
    before = _MANTISSA.get(source.logprobs, source.mantissa_bits)
    after = _MANTISSA.get(logprobs, bits)
    if after > before:
        raise CacheError(
            f"--logprobs {logprobs} keeps {after} mantissa bits, but the cache holds {before}. "
            "What rounding took away cannot be restored; ask for as many or fewer, or capture "
            "again."
        )
    if after == before:
        # float16 and `rounded` with 10 bits are the same numbers.
        return source.logprobs, source.mantissa_bits
    return logprobs, bits if logprobs == "rounded" else source.mantissa_bits


def row_range(options: DeriveOptions, total: int, per_example: int) -> tuple[int, int]:
    """First and one past the last row of --rows.

    Raises:
      CacheError: there are no such rows, or pairs would be separated.
    """
    first, end = (options.rows or ":").split(":")
    low, high = int(first or 0), int(end or total)
    if not low < high <= total:
        raise CacheError(f"--rows {options.rows} should be within 0:{total}, and not empty.")
    if low % per_example or high % per_example:
        raise CacheError(
            f"--rows {options.rows} would separate pairs of rows; both should be multiples of "
            f"{per_example}."
        )
    return low, high


def sample_rows(
    read: Callable[[int, int], dict[str, np.ndarray]],
    span: tuple[int, int],
    per_example: int,
    documents: int,
    options: DeriveOptions,
    progress: Callable[[int, int], None],
    slice_rows: int = 4096,
) -> Int64[np.ndarray, " row"]:
    """A random subset of rows: whole groups of rows that share documents (groups.py).

    Groups are taken in an order that the seed decides, each if it still fits. Rows without any
    document are left out.

    Args:
      read: documents and label_mask of rows, by first and one past the last.
      span: the rows to choose from.
      per_example: rows that stay together in any case, 1 or 2.
      documents: number of documents.
      options: --sample and --seed.
      progress: called with rows read, and rows in all.
      slice_rows: rows that are read at a time.

    Returns:
      The chosen rows, ascending, at most as many as asked for.

    Raises:
      CacheError: more are asked for than there are, or no group is small enough.
    """
    first, end = span
    examples = (end - first) // per_example
    groups = DocumentGroups(examples, documents)
    slice_rows -= slice_rows % per_example
    for start in range(first, end, slice_rows):
        stop = min(start + slice_rows, end)
        values = read(start, stop)
        # A pair is one row of twice the length: its documents hang together.
        both = (values[name].reshape((stop - start) // per_example, -1) for name in _GROUPED)
        groups.add((start - first) // per_example, *both)
        progress(stop - first, end - first)
    of_rows = groups.of_rows()
    usable = np.flatnonzero(of_rows >= 0)
    _, group, sizes = np.unique(of_rows[usable], return_inverse=True, return_counts=True)
    sizes = sizes * per_example
    wanted = _sampled(options.sample or 1.0, int(sizes.sum()), sizes)
    chosen = usable[fill_up(seeded_order(len(sizes), options.draw_seed), sizes, wanted)[group]]
    return (first + chosen[:, None] * per_example + np.arange(per_example)).ravel()


_GROUPED = ("documents", "label_mask")


def _sampled(sample: float, rows: int, sizes: np.ndarray) -> int:
    """How many rows to take at most."""
    wanted = max(1, math.floor(sample * rows + 1e-9)) if sample < 1 else int(sample)
    if wanted > rows:
        raise CacheError(f"--sample {wanted} is more than the {rows:,} rows that have documents.")
    if sizes.min(initial=rows) > wanted:
        raise CacheError(
            f"--sample {sample:g} asks for {wanted:,} of {rows:,} rows, but rows that share "
            f"documents stay together, and the smallest such group has {sizes.min():,}. Ask for "
            f"at least {sizes.min():,} rows."
        )
    return wanted
