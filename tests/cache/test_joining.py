"""Caches as one: what has to be equal, which rows overlap, how documents are numbered."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cache.errors import CacheError
from cache.format import NO_DOCUMENT
from cache.joining import Numbering, check_joinable, cut, join_corpora, rows_held
from cache.manifest import Extent, Manifest, ReceiptEntry
from cache.reader import Cache
from cache.storage import Store
from tests.cache.builder import Built


def _other(manifest: Manifest, digest: str = "a", documents: int = 7, **changes: Any) -> Manifest:
    """A cache of another corpus."""
    corpus = {"description": f"text {digest}", "documents": documents, "digest": digest * 64}
    receipts = tuple(ReceiptEntry(digest * 64, None) for _ in manifest.receipts)
    return replace(manifest, **{"corpus": corpus, "receipts": receipts, **changes})


def _check(*manifests: Manifest, rows_per_shard: int | None = None) -> list[str]:
    caches = [Cache(Store(f"place-{n}"), each) for n, each in enumerate(manifests)]
    return check_joinable(caches, rows_per_shard)


def _with_history(manifest: Manifest, held: Sequence[Any] | None) -> Manifest:
    source = {
        "identities": [],
        "manifest_sha256": "",
        "rows": 10,
        "k": 6,
        "tail": "none",
        "logprobs": "rounded",
        "mantissa_bits": 6,
    }
    derived = {"version": 1, "sources": [source], "rows": None, "rows_held": held}
    return replace(manifest, capture={**manifest.capture, "derived": derived})


def test_other_corpora_can_be_joined(exact_cache: Built) -> None:
    one = exact_cache.manifest
    _check(one)
    _check(one, _other(one))
    _check(one, _other(one, encoding=replace(one.encoding, sealed=False)))


def test_what_differs_is_named(exact_cache: Built) -> None:
    one = exact_cache.manifest
    other = _other(
        one,
        encoding=replace(one.encoding, k=5, mantissa_bits=4),
        capture={**one.capture, "precision": "bfloat16"},
        teacher={"fingerprint": "0" * 64},
    )
    with pytest.raises(CacheError) as caught:
        _check(one, other)
    text = str(caught.value)
    assert text.startswith("place-0 and place-1 cannot be joined:\n")
    for line in (
        "k: place-0 has 6, place-1 has 5",
        "mantissa-bits: place-0 has 6, place-1 has 4",
        'precision: place-0 has "float32", place-1 has "bfloat16"',
        "teacher: place-0 has fingerprint ffffffffffff…, place-1 000000000000… (",
    ):
        assert f"  {line}" in text
    assert "tokenizer" not in text.split("Join caches")[0]


def test_the_commands_that_make_caches_joinable(exact_cache: Built) -> None:
    one = exact_cache.manifest
    fewer = _other(one, encoding=replace(one.encoding, k=5))
    coarser = _other(one, encoding=replace(one.encoding, mantissa_bits=4))
    with pytest.raises(CacheError) as caught:
        _check(one, fewer, coarser)
    assert str(caught.value).endswith(
        "Derive each to the same settings first, then join what that makes:\n"
        "  stillroom derive place-0 place-0-same --k 5 --logprobs rounded --mantissa-bits 4\n"
        "  stillroom derive place-1 place-1-same --logprobs rounded --mantissa-bits 4\n"
        "  stillroom derive place-2 place-2-same --k 5\n"
        "Nothing was written."
    )
    other = _other(one, encoding=replace(one.encoding, k=5), teacher={"fingerprint": "0" * 64})
    with pytest.raises(CacheError, match="Join caches of one teacher that were made with the same"):
        _check(one, other)


def test_shards_of_another_size_are_cut_anew_only_on_request(exact_cache: Built) -> None:
    one = exact_cache.manifest
    encoding = replace(one.encoding, rows_per_shard=5)
    other = _other(one, encoding=encoding, extents=(Extent(0, 2, 10),), receipts=one.receipts[:2])
    with pytest.raises(CacheError, match="rows-per-shard: place-0 has 4, place-1 has 5"):
        _check(one, other)
    with pytest.raises(
        CacheError, match=r"joined cache is cut into shards: --rows-per-shard 4\. N"
    ):
        _check(one, other)
    _check(one, other, rows_per_shard=2)


def test_the_same_cache_twice(exact_cache: Built) -> None:
    one = exact_cache.manifest
    with pytest.raises(CacheError, match="place-0 and place-2 are the same cache"):
        _check(one, _other(one), one)


def test_the_same_rows_twice(exact_cache: Built) -> None:
    one = exact_cache.manifest
    digest = one.corpus["digest"]
    again = _other(one, corpus=one.corpus)
    with pytest.raises(CacheError, match="place-0 and place-1 both hold the rows 0-9 of one cap"):
        _check(one, again)
    _check(
        _with_history(one, [[digest, 0, 4]]),
        _with_history(_other(one), [["other", 0, 9], [digest, 4, 10]]),
    )
    # Not known which.
    [note] = _check(_with_history(one, None), again)
    assert note.startswith("place-0 and place-1 have documents of one corpus, and may hold")
    assert _check(_with_history(one, None), _other(one)) == []
    with pytest.raises(CacheError, match="both hold the rows 3-3 of one"):
        _check(_with_history(one, [[digest, 0, 4]]), _with_history(again, [[digest, 3, 10]]))


def test_rows_held(exact_cache: Built) -> None:
    one = exact_cache.manifest
    digest = one.corpus["digest"]
    assert rows_held(one) == [(digest, 0, 10)]
    extents = (
        Extent(0, 2, 6),
        Extent(2, 1, 4, {"digest": "b", "documents": 3}, {}),
    )
    held = rows_held(replace(one, extents=extents))
    assert held == [(digest, 0, 6), ("b", 0, 4)]
    assert cut(held, 0, 10) == held
    assert cut(held, 2, 5) == [(digest, 2, 5)]
    assert cut(held, 5, 8) == [(digest, 5, 6), ("b", 0, 2)]
    assert cut([("x", 10, 20), ("y", 5, 9)], 8, 12) == [("x", 18, 20), ("y", 5, 7)]
    assert rows_held(_with_history(one, [["x", 1, 2]])) == [("x", 1, 2)]
    assert rows_held(_with_history(one, None)) is None


def test_one_cache_keeps_its_numbers(exact_cache: Built) -> None:
    one = exact_cache.manifest
    corpus, (numbering,) = join_corpora([one])
    assert corpus == {name: one.corpus[name] for name in ("description", "documents", "digest")}
    documents = exact_cache.arrays["documents"]
    assert numbering.of(documents) is documents


def test_documents_of_other_corpora_come_behind(exact_cache: Built) -> None:
    one = exact_cache.manifest
    count = one.corpus["documents"]
    corpus, (first, second, third) = join_corpora(
        [one, _other(one), _other(one, corpus=one.corpus)]
    )
    assert (first.shifts, second.shifts, third.shifts) == ((0,), (count,), (0,))
    assert corpus["documents"] == count + 7
    assert corpus["description"] == "made-up text + text a"
    assert [part["digest"] for part in corpus["joined"]] == ["d" * 64, "a" * 64]
    padded = np.array([[0, 6, NO_DOCUMENT]], np.uint32)
    assert second.of(padded).tolist() == [[count, count + 6, NO_DOCUMENT]]
    assert padded.tolist() == [[0, 6, NO_DOCUMENT]]

    # A joined cache knows its parts, in whatever order they are met.
    joined = replace(one, corpus=corpus)
    whole, (other, both) = join_corpora([_other(one), joined])
    assert other.shifts == (0,)
    assert both == Numbering((0, count), (7, -count))
    assert [part["digest"] for part in whole["joined"]] == ["a" * 64, "d" * 64]
    numbers = np.array([[0, count - 1, count, count + 6]], np.uint32)
    assert both.of(numbers).tolist() == [[7, count + 6, 0, 6]]
    assert both.of(numbers).dtype == np.uint32


def test_documents_of_extents(exact_cache: Built) -> None:
    one = exact_cache.manifest
    count = one.corpus["documents"]
    more = {"digest": "a" * 64, "documents": 7, "description": "text a"}
    grown = replace(one, extents=(Extent(0, 2, 6), Extent(2, 1, 4, more, {})))
    corpus, (numbering,) = join_corpora([grown])
    assert (corpus["documents"], numbering.shifts) == (count + 7, (0, 0))
    twice = replace(one, extents=(Extent(0, 2, 6), Extent(2, 1, 4, one.corpus, {})))
    corpus, (numbering,) = join_corpora([twice])
    assert (corpus["documents"], numbering.shifts) == (2 * count, (0, 0))
    _, (first, second) = join_corpora([_other(one), grown])
    assert (first.shifts, second) == ((0,), Numbering((0, count), (7, -count)))


@pytest.mark.parametrize(
    "corpus",
    [
        {"digest": "d"},
        {"digest": "d", "documents": "9"},
        {"digest": "d", "documents": 9, "joined": 3},
        {"digest": "d", "documents": 9, "joined": [{"documents": 3}]},
    ],
)
def test_a_corpus_without_numbers(exact_cache: Built, corpus: dict[str, Any]) -> None:
    with pytest.raises(CacheError, match="does not say how many documents"):
        join_corpora([replace(exact_cache.manifest, corpus=corpus)])


def test_too_many_documents(exact_cache: Built) -> None:
    one = exact_cache.manifest
    with pytest.raises(CacheError, match="can number 4,294,967,295 documents; these are"):
        join_corpora([one, _other(one, documents=NO_DOCUMENT - 1)])
