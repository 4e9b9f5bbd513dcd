"""What may be asked of which cache, and which rows that means."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cache.derivation import Recipe
from cache.errors import CacheError
from cache.format import NO_DOCUMENT
from cache.manifest import Manifest
from cache.operations import recipe_of, row_range, sample_rows
from cache.options import DeriveOptions
from tests.cache.builder import Built


def _recipe(manifest: Manifest, **asked: Any) -> Recipe:
    return recipe_of([manifest], ["digest"], DeriveOptions(("a", "b"), **asked))


def _sampled(built: Built, k: int, exact: int) -> Manifest:
    return replace(
        built.manifest,
        encoding=replace(built.encoding, k=k),
        capture={**built.manifest.capture, "exact": exact},
    )


def test_nothing_asked_changes_nothing(exact_cache: Built, sampled_cache: Built) -> None:
    for built in (exact_cache, sampled_cache):
        recipe = _recipe(built.manifest)
        assert recipe.wanted == recipe.source == built.encoding
        assert recipe.keeps_targets
        assert recipe.error == recipe.source_error == built.encoding.relative_error
    unsealed = replace(exact_cache.manifest, encoding=replace(exact_cache.encoding, sealed=False))
    assert _recipe(unsealed).wanted.sealed


@pytest.mark.parametrize(
    ("asked", "changed"),
    [
        ({"k": 3}, {"k": 3}),
        ({"temperatures": (4.0, 1.0)}, {"temperatures": (1.0, 4.0)}),
        ({"mantissa_bits": 4}, {"mantissa_bits": 4}),
        ({"logprobs": "rounded", "mantissa_bits": 6}, {}),
        ({"rows_per_shard": 7}, {"rows_per_shard": 7}),
    ],
)
def test_what_is_asked_of_exact_entries(
    exact_cache: Built, asked: dict[str, Any], changed: dict[str, Any]
) -> None:
    recipe = _recipe(exact_cache.manifest, **asked)
    assert recipe.wanted == replace(exact_cache.encoding, **changed)
    assert recipe.exact == recipe.wanted.k


@pytest.mark.parametrize(
    ("k", "sure", "asked", "wanted"),
    [
        (32, 8, {"k": 16}, (16, 8, "sampled")),
        (32, 8, {"k": 8}, (8, 4, "sampled")),
        (32, 8, {"k": 3}, (3, 1, "sampled")),
        (32, 8, {"k": 8, "exact": 7}, (8, 7, "sampled")),
        (32, 8, {"k": 32, "exact": 8}, (32, 8, "sampled")),
        (32, 8, {"tail": "drop"}, (8, 8, "none")),
        (32, 8, {"tail": "drop", "k": 3}, (3, 3, "none")),
        (8, 7, {"k": 7}, (7, 3, "sampled")),
        (8, 7, {"k": 2}, (2, 1, "sampled")),
        (8, 8, {}, (8, 8, "none")),
        (8, 8, {"k": 3}, (3, 3, "none")),
    ],
)
def test_what_is_asked_of_a_sampled_tail(
    sampled_cache: Built, k: int, sure: int, asked: dict[str, Any], wanted: tuple[int, int, str]
) -> None:
    recipe = _recipe(_sampled(sampled_cache, k, sure), **asked)
    assert (recipe.wanted.k, recipe.exact, recipe.wanted.tail) == wanted
    assert recipe.wanted.temperatures == (1.0,)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"k": 7}, "--k 7 is more than the 6 entries"),
        ({"exact": 2, "k": 3}, "a tail cannot be sampled from it, for the tokens outside"),
        ({"tail": "drop"}, "the cache has no sampled tail"),
        ({"temperatures": (3.0,)}, "--temperatures should be some of 1, 2, 4.* found 3"),
        ({"temperatures": ()}, "found none"),
        ({"logprobs": "float16"}, "keeps 10 mantissa bits, but the cache holds 6. What rounding"),
        ({"logprobs": "float32"}, "keeps 23 mantissa bits"),
        ({"mantissa_bits": 7}, "keeps 7 mantissa bits"),
        ({"mantissa_bits": 3, "logprobs": "float16"}, "--mantissa-bits is of --logprobs rounded"),
    ],
)
def test_what_exact_entries_cannot_give(
    exact_cache: Built, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(CacheError, match=message):
        _recipe(exact_cache.manifest, **asked)


@pytest.mark.parametrize(
    ("k", "sure", "asked", "message"),
    [
        (32, 8, {"k": 1}, "--k 1 leaves no entry for the sampled tail"),
        (32, 8, {"k": 8, "exact": 8}, "--exact 8 should be at most 7"),
        (32, 8, {"k": 16, "exact": 9}, "--exact 9 should be at most 8"),
        (32, 8, {"exact": 4}, "--exact needs a smaller --k"),
        (32, 8, {"tail": "drop", "k": 9}, "more than the 8 entries of which it is sure"),
        (32, 8, {"tail": "drop", "exact": 2}, "with --tail drop all entries are exact"),
        (8, 8, {"tail": "drop"}, "the cache has no sampled tail; all entries are exact"),
        (8, 8, {"exact": 4, "k": 6}, "all entries of the cache are exact"),
        (32, 8, {"seed": 3}, "--seed 3 does nothing here"),
        (32, 8, {"seed": 0, "tail": "drop", "k": 3}, "--seed 0 does nothing here"),
        (8, 8, {"seed": 0, "k": 4}, "--seed 0 does nothing here"),
        (32, 8, {"temperatures": (2.0,)}, "should be some of 1"),
    ],
)
def test_what_a_sampled_tail_cannot_give(
    sampled_cache: Built, k: int, sure: int, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(CacheError, match=message):
        _recipe(_sampled(sampled_cache, k, sure), **asked)


@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        (("float32", 6), {"logprobs": "float16"}, 2.0**-11),
        (("float32", 6), {"logprobs": "rounded"}, 2.0**-7),
        (("float16", 6), {"logprobs": "rounded"}, 2.0**-7 + 2.0**-11),
        (("float16", 6), {"logprobs": "rounded", "mantissa_bits": 10}, 2.0**-11),
        (("rounded", 10), {"logprobs": "float16"}, 2.0**-11),
        (("rounded", 7), {"mantissa_bits": 6}, 2.0**-7 + 2.0**-8),
        (("rounded", 7), {}, 2.0**-8),
    ],
)
def test_the_error_of_rounding_again(
    exact_cache: Built, before: tuple[Any, int], after: dict[str, Any], error: float
) -> None:
    logprobs, bits = before
    encoding = replace(exact_cache.encoding, logprobs=logprobs, mantissa_bits=bits)
    recipe = _recipe(replace(exact_cache.manifest, encoding=encoding), **after)
    assert recipe.error == error
    assert recipe.source_error == encoding.relative_error
    assert recipe.keeps_targets == (error == encoding.relative_error)


def test_the_worst_of_several_sources_counts(exact_cache: Built) -> None:
    history = {
        "version": 1,
        "rows": None,
        "rows_held": None,
        "relative_error": 0.02,
        "sources": [
            {
                "identities": [],
                "manifest_sha256": "",
                "rows": 1,
                "k": 1,
                "tail": "none",
                "logprobs": "rounded",
                "mantissa_bits": 9,
            }
        ],
    }
    manifest = exact_cache.manifest
    worse = replace(manifest, capture={**manifest.capture, "derived": history})
    recipe = recipe_of([manifest, worse], ["a", "b"], DeriveOptions(("a", "b", "c")))
    assert recipe.error == 0.02


# Rows.


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(None, (0, 10)), ("2:8", (2, 8)), (":4", (0, 4)), ("4:", (4, 10)), ("0:10", (0, 10))],
)
def test_row_ranges(rows: str | None, expected: tuple[int, int]) -> None:
    assert row_range(DeriveOptions(("a", "b"), rows=rows), 10, 2) == expected


@pytest.mark.parametrize(
    ("rows", "message"),
    [("4:4", "within 0:10"), ("5:4", "within"), ("0:11", "within"), ("1:4", "multiples of 2")],
)
def test_row_ranges_that_are_none(rows: str, message: str) -> None:
    with pytest.raises(CacheError, match=message):
        row_range(DeriveOptions(("a", "b"), rows=rows), 10, 2)


# Row by row, the documents it holds: rows 1-3 hang together, row 6 has none.
_DOCUMENTS = [[0, 0], [1, 2], [2, 3], [3, 3], [4, 4], [5, 5], [], [6, 6], [7, 7], [8, 8]]


def _chosen(sample: float, seed: int = 0, span: tuple[int, int] = (0, 10), **more: Any) -> Any:
    documents = np.array([row or [NO_DOCUMENT] * 2 for row in _DOCUMENTS], np.uint32)
    arrays = {"documents": documents, "label_mask": (documents != NO_DOCUMENT).astype(np.uint8)}
    seen: list[tuple[int, int]] = []
    found = sample_rows(
        lambda start, stop: {name: values[start:stop] for name, values in arrays.items()},
        span,
        more.pop("per_example", 1),
        9,
        DeriveOptions(("a", "b"), sample=sample, seed=seed),
        lambda *counts: seen.append(counts),
        **more,
    )
    assert seen[-1] == (span[1] - span[0],) * 2
    return found.tolist()


def test_samples_are_whole_groups() -> None:
    chosen = [_chosen(0.45, seed) for seed in range(40)]
    for rows in chosen:
        # 45 % of the nine rows with documents: always as many as fit, never the empty row.
        assert len(rows) == 4
        assert rows == sorted(set(rows))
        assert 6 not in rows
        assert len({1, 2, 3} & set(rows)) in (0, 3)
    assert len({tuple(rows) for rows in chosen}) > 10
    assert {row for rows in chosen for row in rows} == set(range(10)) - {6}
    assert chosen[3] == _chosen(0.45, 3, slice_rows=3)


def test_samples_by_number_and_within_a_range() -> None:
    assert _chosen(9.0) == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    assert len(_chosen(5.0)) == 5
    assert len(_chosen(0.001)) == 1
    assert set(_chosen(2.0, span=(7, 10))) < {7, 8, 9}
    assert _chosen(3.0, span=(1, 4)) == [1, 2, 3]


def test_pairs_stay_together() -> None:
    for seed in range(10):
        rows = _chosen(2.0, seed, per_example=2)
        assert rows in ([4, 5], [6, 7], [8, 9])
    # Rows 0-1 and 2-3 share document 2.
    assert _chosen(4.0, 0, span=(0, 4), per_example=2, slice_rows=3) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("sample", "span", "message"),
    [
        (10.0, (0, 10), "--sample 10 is more than the 9 rows that have documents"),
        (0.5, (1, 4), "asks for 1 of 3 rows.* smallest such group has 3. Ask for at least 3"),
    ],
)
def test_samples_that_cannot_be(sample: float, span: tuple[int, int], message: str) -> None:
    with pytest.raises(CacheError, match=message):
        _chosen(sample, span=span)
