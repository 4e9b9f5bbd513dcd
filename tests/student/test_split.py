"""Splits against a search through shared documents; what a seed decides; what is refused."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cache
from cache.errors import DamageError
from cache.format import NO_DOCUMENT
from cache.groups import Copies, DocumentGroups
from student.errors import StudentError
from student.split import Split, choose, split_rows
from tests.cache.builder import Built, make_cache, same, shard_file
from tests.student.small import VOCABULARY, laid_rows, make_student_cache

_LENGTH, _DOCUMENTS = 4, 12

# Per row: documents in any order, with gaps, and which positions have labels.
_PLACES = st.lists(
    st.tuples(st.integers(-1, _DOCUMENTS - 1), st.booleans()), min_size=_LENGTH, max_size=_LENGTH
)
_TABLES = st.lists(_PLACES, min_size=1, max_size=14)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, cache.Cache]:
    return make_student_cache(tmp_path_factory.mktemp("split"))


def _arrays(table: list[list[tuple[int, bool]]]) -> tuple[np.ndarray, np.ndarray]:
    documents = np.array([[document for document, _ in row] for row in table])
    labels = np.array([[document >= 0 and label for document, label in row] for row in table])
    return np.where(documents < 0, NO_DOCUMENT, documents).astype(np.uint32), labels.astype("uint8")


def _grouped(documents: np.ndarray, labels: np.ndarray, size: int = 100) -> DocumentGroups:
    groups = DocumentGroups(len(documents), _DOCUMENTS)
    for start in range(0, len(documents), size):
        groups.add(start, documents[start : start + size], labels[start : start + size])
    return groups


def _reachable(documents: np.ndarray, row: int) -> set[int]:
    """Rows that hang together with one, by search."""
    holds = [set(each.tolist()) - {NO_DOCUMENT} for each in documents]
    found, todo = {row}, [row]
    while todo:
        here = todo.pop()
        near = {other for other, held in enumerate(holds) if held & holds[here]} - found
        found |= near
        todo += near
    return found


@settings(deadline=None)
@given(_TABLES, st.integers(1, 5))
def test_groups_are_what_a_search_finds(table, size: int) -> None:
    documents, labels = _arrays(table)
    collected = _grouped(documents, labels, size)
    groups = collected.of_rows()
    for row, group in enumerate(groups.tolist()):
        if (documents[row] == NO_DOCUMENT).all():
            assert group == -1
        else:
            assert set(np.flatnonzero(groups == group).tolist()) == _reachable(documents, row)
    assert collected.labels.tolist() == labels.sum(axis=1).tolist()
    assert same(groups, _grouped(documents, labels).of_rows())


@settings(deadline=None)
@given(_TABLES, st.integers(1, 5), st.sampled_from([0, 0.01, 0.3, 0.5, 1, 3]), st.integers(0, 9))
def test_a_document_is_on_one_side(table, size: int, held_out: int | float, seed: int) -> None:
    documents, labels = _arrays(table)
    collected = _grouped(documents, labels, size)
    try:
        split = choose(collected.of_rows(), collected.labels, held_out, seed)
    except StudentError:
        assert held_out > 0 or not labels.any()
        return
    sides = [set(documents[rows].ravel().tolist()) for rows in (split.training, split.held_out)]
    assert sides[0] & sides[1] <= {NO_DOCUMENT}
    both = np.concatenate([split.training, split.held_out])
    assert sorted(both.tolist()) == np.flatnonzero(labels.any(axis=1)).tolist()
    assert split.rows_without_labels == len(table) - len(both)
    assert split.training_labels == labels[split.training].sum()
    assert split.held_out_labels == labels[split.held_out].sum()
    assert (len(split.held_out) > 0) == (held_out > 0)
    if held_out:
        wanted = held_out if held_out >= 1 else round(held_out * len(both))
        assert len(split.held_out) <= max(1, wanted)
    whole = _grouped(documents, labels)
    assert _equal(split, choose(whole.of_rows(), whole.labels, held_out, seed))


def _equal(left: Split, right: Split) -> bool:
    numbers = [
        (each.training_labels, each.held_out_labels, each.groups, each.rows_without_labels)
        for each in (left, right)
    ]
    arrays = (left.training, right.training), (left.held_out, right.held_out)
    return numbers[0] == numbers[1] and all(same(*pair) for pair in arrays)


# Documents of few tokens, so that many are the same, and some go on in a second row or a third.
_CORPORA = st.lists(st.lists(st.integers(1, 2), max_size=9), min_size=1, max_size=10)


def _pieces(laid: dict[str, np.ndarray]) -> list[list[tuple[int, list[int]]]]:
    """The documents of each row, and their tokens in it."""
    found = []
    for tokens, documents in zip(laid["tokens"], laid["documents"], strict=True):
        here: dict[int, list[int]] = {}
        for token, document in zip(tokens.tolist(), documents.tolist(), strict=True):
            if document != NO_DOCUMENT:
                here.setdefault(document, []).append(token)
        found.append(list(here.items()))
    return found


def _tied(laid: dict[str, np.ndarray], corpus: list[list[int]], length: int) -> list[set[int]]:
    """The rows that hang together with each row, by merging sets until nothing changes."""
    pieces = _pieces(laid)
    labelled = {
        document
        for documents, mask in zip(laid["documents"].tolist(), laid["label_mask"], strict=True)
        for document, label in zip(documents[:length], mask[:length], strict=True)
        if label
    }
    keys = []
    for row, here in enumerate(pieces):
        key: set[object] = {("document", document) for document, _ in here}
        key |= {("text", *corpus[document]) for document, _ in here if document in labelled}
        if laid["label_mask"][row, :length].any():
            kept = [tuple(laid[name][row, :length].tolist()) for name in ("tokens", "segments")]
            key.add(("row", *kept))
        keys.append(key)
    tied = []
    for row, key in enumerate(keys):
        reached, size = set(key), -1
        while len(reached) != size:
            size = len(reached)
            for other in keys:
                if other & reached:
                    reached |= other
        tied.append({other for other in range(len(keys)) if keys[other] & reached} | {row})
    return tied


@settings(deadline=None)
@given(_CORPORA, st.sampled_from(["pad", "pack"]), st.integers(1, 3), st.integers(1, 4), st.data())
def test_copies_hang_together(corpus, kind: str, overlap: int, length: int, data) -> None:
    laid = laid_rows(corpus, kind, _LENGTH, overlap)
    rows = len(laid["tokens"])
    groups, copies = DocumentGroups(rows, len(corpus)), Copies(rows, len(corpus))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(rows - 1, 1)), max_size=2)) | {0, rows})
    spans = list(pairwise(cuts))
    for first, end in data.draw(st.permutations(spans)):
        part = {name: values[first:end] for name, values in laid.items()}
        labels = part["label_mask"] == 1
        labels[:, length:] = False
        groups.add(first, part["documents"], part["label_mask"])
        copies.add(first, part, length, labels)
    copied = groups.unite_copies(copies)
    found = groups.of_rows()
    for row, tied in enumerate(_tied(laid, corpus, length)):
        if found[row] == -1:
            assert (laid["segments"][row] == 0).all()
        else:
            assert set(np.flatnonzero(found == found[row]).tolist()) == tied
    with_labels = np.unique(laid["documents"][:, :length][laid["label_mask"][:, :length] == 1])
    assert copied[0] == len(with_labels) - len({tuple(corpus[each]) for each in with_labels})


_TEXTS = [[60 - text - 2 * place for place in range(3 + text % 3)] for text in range(20)]


@pytest.mark.parametrize("kind", ["pad", "pack"])
@pytest.mark.parametrize("size", [8, 3])
def test_the_same_text_is_on_one_side(tmp_path: Path, kind: str, size: int) -> None:
    """Each text four times, whole in a row, or continued in a second row."""
    corpus = [text for text in _TEXTS for _ in range(4)]
    laid = laid_rows(corpus, kind, size)
    made = make_cache(
        tmp_path / "cache", laid=laid, length=size, vocabulary=VOCABULARY + 1, rows_per_shard=200
    )
    split = split_rows(cache.open(made.path), 0.2, 0)
    assert len(split.held_out) > 0 < len(split.training)
    sides = [
        {tuple(corpus[document]) for row in rows for document, _ in _pieces(laid)[row]}
        for rows in (split.training, split.held_out)
    ]
    assert sides[0]
    assert sides[1]
    assert not sides[0] & sides[1]
    assert (split.copied_documents, split.other) == (60, True)
    if kind == "pad":
        assert split.copied_rows >= 60


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=12), st.integers(1, 30), st.integers(0, 50))
def test_groups_are_taken_while_they_fit(sizes: list[int], wanted: int, seed: int) -> None:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    wanted = min(wanted, len(groups) - 1)
    labels = np.ones(len(groups), np.uint32)
    if min(sizes) > wanted:
        with pytest.raises(StudentError, match=f"The smallest such group has {min(sizes)} rows"):
            choose(groups, labels, wanted, seed)
        return
    split = choose(groups, labels, wanted, seed)
    taken = set(groups[split.held_out].tolist())
    keys = np.random.PCG64(seed).random_raw(len(sizes)).tolist()
    expected, room = set(), wanted
    for _, group in sorted(zip(keys, range(len(sizes)), strict=True)):
        if sizes[group] <= room:
            expected.add(group)
            room -= sizes[group]
    assert taken == expected
    assert len(split.held_out) == wanted - room
    assert split.groups == len(sizes)


def test_the_split_of_a_seed_never_changes() -> None:
    """Golden numbers: runs go on after an upgrade of numpy, with the same rows held out."""
    groups, labels = np.arange(20), np.ones(20, np.uint32)
    held_out = [choose(groups, labels, 5, seed).held_out.tolist() for seed in (0, 1, 2)]
    assert held_out == [[2, 3, 11, 13, 15], [2, 9, 16, 18, 19], [3, 6, 7, 11, 19]]
    assert same(choose(groups, labels, 0.25, 1).held_out, np.array(held_out[1]))


def test_a_share_is_of_the_rows_with_labels() -> None:
    labels = np.ones(100, np.uint32)
    labels[:50] = 0
    for share, rows in [(0.1, 5), (0.29, 14), (0.5, 25), (0.001, 1), (0.98, 49), (0, 0)]:
        split = choose(np.arange(100), labels, share, 0)
        assert len(split.held_out) == rows
        assert len(split.training) == 50 - rows
        assert split.held_out.min(initial=50) >= 50


def test_a_chain_through_every_row_is_one_group() -> None:
    """Each row shares a document with the next; added from the last to the first, one by one."""
    rows = 500
    documents = np.stack([np.arange(rows), np.arange(rows) + 1], axis=1).astype(np.uint32)
    labels = np.ones((rows, 2), np.uint8)
    groups = DocumentGroups(rows, rows + 1)
    for row in reversed(range(rows)):
        groups.add(row, documents[row : row + 1], labels[row : row + 1])
    assert set(groups.of_rows().tolist()) == {0}


def test_a_cache(made) -> None:
    built, opened = made
    labels = (built.arrays["label_mask"] == 1).sum(axis=1)
    documents = built.arrays["documents"]
    assert set(documents[1]) & set(documents[2])
    together = 0
    for seed in range(20):
        read: list[int] = []
        split = split_rows(opened, 0.4, seed, read.append, slice_rows=5)
        assert read == [5, 10, 15, 20, 22]
        assert _equal(split, split_rows(opened, 0.4, seed))
        out = set(split.held_out.tolist())
        assert ({1, 2} <= out) or not ({1, 2} & out)
        together += {1, 2} <= out
        both = np.concatenate([split.training, split.held_out])
        assert sorted(both.tolist()) == [row for row in range(22) if row != 5]
        assert (split.training.dtype, split.held_out.dtype) == (np.int64, np.int64)
        assert (np.diff(split.training) > 0).all()
        assert (np.diff(split.held_out) > 0).all()
        assert split.training_labels == labels[split.training].sum()
        assert split.held_out_labels == labels[split.held_out].sum()
        assert (split.groups, split.rows_without_labels) == (20, 1)
    assert 0 < together < 20


def test_another_seed_is_another_split(made) -> None:
    _, opened = made
    splits = {tuple(split_rows(opened, 5, seed).held_out.tolist()) for seed in range(10)}
    assert len(splits) == 10


@pytest.mark.parametrize(
    ("held_out", "message"),
    [
        (22, "--held-out 22 is more than the 21 rows with labels in the cache. Ask for fewer"),
        (21, "takes all 21 rows with labels, and nothing is left to train on"),
        (0.99, "takes all 21 rows with labels, and nothing is left to train on"),
        (-0.1, "a share below 1, or a whole number of rows, found -0.1"),
        (1.5, "a share below 1, or a whole number of rows, found 1.5"),
        (float("nan"), "found nan"),
        (float("inf"), "found inf"),
    ],
)
def test_what_cannot_be_held_out(made, held_out: int | float, message: str) -> None:
    _, opened = made
    with pytest.raises(StudentError, match=message):
        split_rows(opened, held_out, 0)


def test_no_group_fits() -> None:
    groups = np.array([0, 0, 0, 1, 1])
    with pytest.raises(StudentError, match=r"asks for 1 of 5 rows .* Ask for at least 2 rows, or"):
        choose(groups, np.ones(5, np.uint32), 0.1, 0)
    assert choose(groups, np.ones(5, np.uint32), 2, 0).held_out.tolist() == [3, 4]
    one = np.zeros(5, np.int64)
    with pytest.raises(StudentError, match="All of them are one such group"):
        choose(one, np.ones(5, np.uint32), 2, 0)
    assert len(choose(one, np.ones(5, np.uint32), 0, 0).training) == 5


def test_copies_that_tie_everything_are_named(tmp_path: Path) -> None:
    """Packed beside one text that is everywhere: one group. Padded, its own rows alone are."""
    corpus = [document for text in range(8) for document in ([50, 51, 52], [text, 20, 21, 22, 23])]
    for kind in ("pack", "pad"):
        make_cache(tmp_path / kind, laid=laid_rows(corpus, kind), rows_per_shard=20)
    with pytest.raises(
        StudentError,
        match=r"asks for 2 of 8 rows .* 7 documents and 0 rows are exact copies of others. All of "
        "them are one such group: .* Ask for 0. Or take the copies out .* --layout pad",
    ):
        split_rows(cache.open(tmp_path / "pack"), 2, 0)
    split = split_rows(cache.open(tmp_path / "pad"), 2, 0)
    assert (len(split.held_out), split.groups, split.copied_rows) == (2, 9, 7)


def test_what_has_no_label_ties_nothing(tmp_path: Path) -> None:
    """One-token documents are the same everywhere, and so is padding."""
    corpus = [document for text in range(8) for document in ([text, 20, 21], [50], [])]
    made = make_cache(tmp_path / "cache", laid=laid_rows(corpus, "pack", 4), length=4)
    split = split_rows(cache.open(made.path), 0.25, 0)
    assert (split.groups, split.copied_documents, split.copied_rows) == (8, 0, 0)
    assert not split.other


def test_rows_that_are_the_same_as_far_as_they_are_used(tmp_path: Path) -> None:
    corpus = [[1, 2, 3, 4, text] for text in range(10, 16)] + [[5, 6, text] for text in (7, 8)]
    made = make_cache(tmp_path / "cache", laid=laid_rows(corpus))
    opened = cache.open(made.path)
    found = [split_rows(opened, 1, 0, length=length) for length in (None, 5, 3)]
    assert [(each.groups, each.copied_rows) for each in found] == [(8, 0), (8, 0), (3, 5)]
    assert [each.copied_documents for each in found] == [0, 0, 0]
    assert [each.cut_labels for each in found] == [0, 0, 6]
    assert [each.other for each in found] == [False, False, True]


def test_rows_that_the_length_empties(tmp_path: Path) -> None:
    """A continued document repeats 5 tokens: its first 4 positions have no label."""
    corpus = [[6 * text + place % 6 for place in range(20)] for text in range(10)]
    laid = laid_rows(corpus, "pad", 8, overlap=6)
    made = make_cache(tmp_path / "cache", laid=laid, rows_per_shard=100)
    opened = cache.open(made.path)
    rows = len(laid["tokens"])
    first = np.flatnonzero(laid["label_mask"][:, 0] == 1)
    assert len(first) == 10 < rows
    split = split_rows(opened, 3, 0, length=4)
    both = np.sort(np.concatenate([split.training, split.held_out]))
    assert both.tolist() == first.tolist()
    assert (split.emptied_rows, split.rows_without_labels) == (rows - 10, rows - 10)
    assert (split.training_labels, split.held_out_labels) == (7 * 4, 3 * 4)
    assert split.other
    whole = split_rows(opened, 3 * rows // 10, 0)
    assert (whole.emptied_rows, whole.rows_without_labels, whole.other) == (0, 0, False)
    continued = {name: values[laid["label_mask"][:, 0] == 0] for name, values in laid.items()}
    made = make_cache(tmp_path / "continued", laid=continued, rows_per_shard=100)
    with pytest.raises(StudentError, match="--length 4 leaves no label of any row"):
        split_rows(cache.open(made.path), 0, 0, length=4)


def test_no_labels() -> None:
    with pytest.raises(StudentError, match="no row of the cache has a label"):
        choose(np.arange(3), np.zeros(3, np.uint32), 0, 0)


def test_pairs_are_refused(tmp_path: Path) -> None:
    pairs = make_cache(tmp_path / "pairs", rows=4, rows_per_example=2)
    with pytest.raises(StudentError, match="preference pairs"):
        split_rows(cache.open(pairs.path), 0, 0)


def test_damage_ends_it(tmp_path: Path) -> None:
    built, opened = make_student_cache(tmp_path)
    shard_file(built, "documents", 2).unlink()
    with pytest.raises(DamageError, match=r"shard 2, rows 8-11"):
        split_rows(opened, 0.2, 0)
