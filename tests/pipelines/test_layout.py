"""Rows hold every token and every label exactly once."""

import dataclasses
import itertools
import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.layout import (
    NO_DOCUMENT,
    Accounting,
    LayoutSettings,
    Rows,
    cut,
    lay_rows,
)


def documents_of(sizes: list[int], first_id: int = 1000) -> list[np.ndarray]:
    """Documents of the given sizes in which no token id occurs twice."""
    ends = np.cumsum([0, *sizes]) + first_id
    return [np.arange(a, b, dtype=np.uint32) for a, b in itertools.pairwise(ends)]


def pieces_of(rows: Rows) -> list[tuple[int, int, np.ndarray, np.ndarray]]:
    """(document, row, tokens, label mask) of every segment, by plain loops over cells."""
    found = []
    for row in range(len(rows.tokens)):
        for segment in range(1, int(rows.segments[row].max(initial=0)) + 1):
            cells = np.flatnonzero(rows.segments[row] == segment)
            (document,) = set(rows.documents[row, cells].tolist())
            found.append((document, row, rows.tokens[row, cells], rows.label_mask[row, cells]))
    return found


def groups_of(rows: Rows) -> list[tuple[set[int], set[int]]]:
    """(rows, documents) of the groups of rows connected by shared documents."""
    groups: list[tuple[set[int], set[int]]] = []
    for document, row, _, _ in pieces_of(rows):
        rows_, documents = {row}, {document}
        rest = []
        for group in groups:
            if group[0] & rows_ or group[1] & documents:
                rows_, documents = rows_ | group[0], documents | group[1]
            else:
                rest.append(group)
        groups = [*rest, (rows_, documents)]
    return groups


sizes_strategy = st.lists(st.integers(0, 40), max_size=25)


@st.composite
def layouts(draw: st.DrawFn) -> LayoutSettings:
    length = draw(st.integers(2, 17))
    kind = draw(st.sampled_from(["pack", "pad"]))
    return LayoutSettings(kind, length, draw(st.integers(1, length - 1)))


@given(sizes_strategy, layouts(), st.integers(0, 1000))
@settings(max_examples=300, deadline=None)
def test_every_token_and_every_label_once(sizes, layout, first):
    documents = documents_of(sizes)
    rows = lay_rows(documents, first, layout)
    pieces: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for document, _, tokens, mask in pieces_of(rows):
        pieces.setdefault(document, []).append((tokens, mask))
    for index, expected in enumerate(documents, first):
        # Full-length pieces come in row order, the short one may lie before them.
        parts = sorted(pieces.pop(index, []), key=lambda part: len(part[0]) < layout.length)
        rebuilt: list[int] = []
        bigrams: Counter[tuple[int, int]] = Counter()
        for number, (tokens, mask) in enumerate(parts):
            repeated = layout.overlap if number else 0
            if number:
                assert tokens[:repeated].tolist() == rebuilt[-repeated:]
                assert len(tokens) > repeated
            rebuilt += tokens[repeated:].tolist()
            bigrams.update(
                (int(tokens[t]), int(tokens[t + 1])) for t in np.flatnonzero(mask).tolist()
            )
        assert rebuilt == expected.tolist()
        pairs = zip(expected[:-1].tolist(), expected[1:].tolist(), strict=True)
        assert bigrams == Counter(pairs)
    assert not pieces


@given(sizes_strategy, layouts())
@settings(max_examples=200, deadline=None)
def test_cells(sizes, layout):
    rows = lay_rows(documents_of(sizes), 5, layout)
    padding = rows.segments == 0
    assert (np.diff(padding.astype(int), axis=1) >= 0).all()
    steps = np.diff(rows.segments.astype(int), axis=1)[~padding[:, 1:]]
    assert set(steps.tolist()) <= {0, 1}
    assert set(rows.segments[:, 0].tolist()) <= ({1} if layout.kind == "pack" else {0, 1})
    assert (rows.tokens[padding] == 0).all()
    assert (rows.documents[padding] == NO_DOCUMENT).all()
    assert (rows.documents[~padding] != NO_DOCUMENT).all()
    assert (rows.label_mask[padding] == 0).all()
    assert (rows.label_mask[:, -1] == 0).all()
    labelled = rows.label_mask[:, :-1] == 1
    assert (rows.segments[:, :-1] == rows.segments[:, 1:])[labelled].all()
    assert rows.label_mask.max(initial=0) <= 1
    assert rows.tokens.shape == (rows.accounting.rows, layout.length)


@given(sizes_strategy, layouts())
@settings(max_examples=200, deadline=None)
def test_accounting_against_the_rows_and_the_documents(sizes, layout):
    rows = lay_rows(documents_of(sizes), 0, layout)
    count = rows.accounting
    assert count.documents == len(sizes)
    assert count.empty_documents == sum(size == 0 for size in sizes)
    assert count.one_token_documents == sum(size == 1 for size in sizes)
    assert count.tokens == sum(sizes)
    assert count.stored == sum(len(tokens) for _, _, tokens, _ in pieces_of(rows))
    # No id occurs twice in the documents, so what occurs twice in rows is repeated.
    unique = set(rows.tokens[rows.segments > 0].tolist())
    assert count.stored - count.repeated == len(unique) == sum(sizes)
    assert count.labels == sum(max(0, size - 1) for size in sizes)
    assert count.padding == rows.tokens.size - count.stored
    assert count.rows_without_labels == sum(not any(mask) for mask in rows.label_mask.tolist())
    assert count.dropped == ()


@given(sizes_strategy, st.integers(2, 17))
@settings(max_examples=200, deadline=None)
def test_pack_needs_no_more_rows_than_pad(sizes, length):
    documents = documents_of(sizes)
    packed = lay_rows(documents, 0, LayoutSettings("pack", length)).accounting
    padded = lay_rows(documents, 0, LayoutSettings("pad", length)).accounting
    assert packed.rows <= padded.rows
    assert (packed.tokens, packed.labels) == (padded.tokens, padded.labels)


@given(sizes_strategy, st.integers(2, 17), st.data())
@settings(max_examples=200, deadline=None)
def test_pack_keeps_document_groups_small(sizes, length, data):
    overlap = data.draw(st.integers(1, length - 1))
    rows = lay_rows(documents_of(sizes), 0, LayoutSettings("pack", length, overlap))
    shared = {row for row in range(len(rows.segments)) if rows.segments[row].max() > 1}
    pieces = pieces_of(rows)
    for index, size in enumerate(sizes):
        mine = [piece for piece in pieces if piece[0] == index]
        assert len(mine) == len(cut(size, length, overlap))
        if size <= length:
            assert len(mine) == (size > 0)
        assert sum(row in shared for _, row, _, _ in mine) <= 1
    for group_rows, group_documents in groups_of(rows):
        assert len(group_rows & shared) <= 1
        if not group_rows & shared:
            assert len(group_documents) == 1


@given(sizes_strategy, st.integers(2, 17))
@settings(max_examples=100, deadline=None)
def test_pack_is_best_fit(sizes, length):
    """Against a search of all rows for each piece."""
    rows = lay_rows(documents_of(sizes), 0, LayoutSettings("pack", length))
    used: list[int] = []
    expected = []
    for document, size in enumerate(sizes):
        for start, stop in cut(size, length, 1):
            fitting = [row for row, cells in enumerate(used) if length - cells >= stop - start]
            row = min(fitting, key=lambda row: (length - used[row], row), default=len(used))
            used += [0] * (row == len(used))
            used[row] += stop - start
            expected.append((document, row, stop - start))
    found = [(document, row, len(tokens)) for document, row, tokens, _ in pieces_of(rows)]
    assert sorted(found) == sorted(expected)


@given(st.integers(0, 200), st.integers(2, 20), st.data())
@settings(deadline=None)
def test_cut(tokens, length, data):
    overlap = data.draw(st.integers(1, length - 1))
    pieces = cut(tokens, length, overlap)
    if tokens == 0:
        assert pieces == []
        return
    assert pieces[0][0] == 0
    assert pieces[-1][1] == tokens
    assert all(stop - start == length for start, stop in pieces[:-1])
    for (_, stop), (start, next_stop) in itertools.pairwise(pieces):
        assert stop - start == overlap
        assert next_stop > stop


def test_no_label_at_the_border_of_two_documents():
    # C13: 2 + 1 labels, not 4.
    rows = lay_rows(documents_of([3, 2]), 0, LayoutSettings("pack", 5))
    assert rows.segments.tolist() == [[1, 1, 1, 2, 2]]
    assert rows.documents.tolist() == [[0, 0, 0, 1, 1]]
    assert rows.label_mask.tolist() == [[1, 1, 0, 1, 0]]
    assert rows.accounting.labels == 3


@pytest.mark.parametrize("kind", ["pack", "pad"])
def test_a_document_longer_than_many_rows(kind):
    # C16: every token stored, the last stored token is the document's last.
    (document,) = documents_of([10], first_id=1)
    rows = lay_rows([document], 0, LayoutSettings(kind, 4))
    assert rows.tokens.tolist() == [[1, 2, 3, 4], [4, 5, 6, 7], [7, 8, 9, 10]]
    assert rows.label_mask.tolist() == [[1, 1, 1, 0]] * 3
    count = rows.accounting
    assert (count.stored, count.repeated, count.dropped) == (12, 2, ())
    assert count.stored - count.repeated == 10


def test_more_overlap_gives_context_and_no_second_label():
    (document,) = documents_of([9], first_id=1)
    rows = lay_rows([document], 0, LayoutSettings("pad", 5, overlap=3))
    assert rows.tokens.tolist() == [[1, 2, 3, 4, 5], [3, 4, 5, 6, 7], [5, 6, 7, 8, 9]]
    assert rows.label_mask.tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 0]]
    assert rows.accounting.labels == 8
    assert rows.accounting.repeated == 6


def test_documents_packed_at_three():
    # C16: documents of 4, 2, 3 and 1 tokens.
    rows = lay_rows(documents_of([4, 2, 3, 1], first_id=1), 0, LayoutSettings("pack", 3))
    assert rows.tokens.tolist() == [[1, 2, 3], [3, 4, 10], [5, 6, 0], [7, 8, 9]]
    assert rows.documents.tolist() == [[0, 0, 0], [0, 0, 3], [1, 1, NO_DOCUMENT], [2, 2, 2]]
    count = rows.accounting
    assert count.tokens == 10
    assert count.stored - count.repeated + sum(n for _, n in count.dropped) == 10
    assert count.labels == 3 + 1 + 2 + 0


def test_empty_and_one_token_documents_keep_their_rows_when_padded():
    # C35: ["ab", "", "c", "de"], a token a letter.
    letters = [[1, 2], [], [3], [4, 5]]
    documents = [np.array(ids, np.uint32) for ids in letters]
    rows = lay_rows(documents, 0, LayoutSettings("pad", 4))
    assert rows.tokens.tolist() == [[1, 2, 0, 0], [0, 0, 0, 0], [3, 0, 0, 0], [4, 5, 0, 0]]
    assert rows.label_mask.sum(axis=1).tolist() == [1, 0, 0, 1]
    assert rows.accounting.rows_without_labels == 2
    assert rows.accounting.empty_documents == 1
    assert rows.accounting.one_token_documents == 1
    alone = lay_rows([documents[0], documents[3]], 0, LayoutSettings("pad", 4))
    np.testing.assert_array_equal(rows.tokens[[0, 3]], alone.tokens)
    np.testing.assert_array_equal(rows.label_mask[[0, 3]], alone.label_mask)


def test_one_token_documents_are_stored_when_packed():
    rows = lay_rows(documents_of([1, 0, 1], first_id=7), 40, LayoutSettings("pack", 4))
    assert rows.tokens.tolist() == [[7, 8, 0, 0]]
    assert rows.documents.tolist() == [[40, 42, NO_DOCUMENT, NO_DOCUMENT]]
    assert rows.segments.tolist() == [[1, 2, 0, 0]]
    assert rows.accounting.labels == 0
    assert rows.accounting.rows_without_labels == 1


@pytest.mark.parametrize("kind", ["pack", "pad"])
def test_no_documents_and_only_empty_documents(kind):
    assert lay_rows([], 0, LayoutSettings(kind, 4)).tokens.shape == (0, 4)
    rows = lay_rows(documents_of([0, 0]), 0, LayoutSettings(kind, 4))
    assert rows.accounting.rows == (0 if kind == "pack" else 2)
    assert rows.accounting.empty_documents == 2
    assert rows.accounting.labels == 0


def test_ids_of_large_vocabularies_survive():
    # C23: beyond 16 bits, and beyond 17.
    ids = np.array([65_541, 151_935, 262_143], np.uint32)
    rows = lay_rows([ids], 0, LayoutSettings("pack", 4))
    assert rows.tokens.tolist() == [[65_541, 151_935, 262_143, 0]]


def test_best_fit_prefers_the_least_sufficient_space_and_the_oldest_row():
    # Rows with 3, 2 and 2 free cells: 2 tokens go to the older of the last two.
    rows = lay_rows(documents_of([5, 6, 6, 2]), 0, LayoutSettings("pack", 8))
    assert [row for document, row, _, _ in pieces_of(rows) if document == 3] == [1]


def test_a_row_never_numbers_more_documents_than_uint16_holds():
    rows = lay_rows([np.zeros(1, np.uint32)] * 65_540, 0, LayoutSettings("pack", 70_000))
    assert rows.segments.max() == 65_535
    assert np.count_nonzero(rows.segments, axis=1).tolist() == [65_535, 5]
    assert rows.documents[1, 0] == 65_535


def test_rows_do_not_depend_on_the_place_in_the_corpus():
    documents = documents_of([3, 9, 1, 4])
    first, later = (lay_rows(documents, n, LayoutSettings("pack", 5)) for n in (0, 100))
    np.testing.assert_array_equal(first.tokens, later.tokens)
    held = first.documents != NO_DOCUMENT
    np.testing.assert_array_equal(first.documents[held] + np.uint32(100), later.documents[held])


def test_accountings_add_in_any_order():
    layout = LayoutSettings("pack", 4)
    parts = [
        lay_rows(documents_of(sizes), 0, layout).accounting
        for sizes in ([3, 9, 0], [1, 1], [], [17])
    ]
    total = sum(parts, Accounting())
    assert total == sum(reversed(parts), Accounting())
    assert total.documents == 6
    assert total.tokens == 31
    assert total.labels == 2 + 8 + 16


def test_accountings_add_reasons():
    first = Accounting(tokens=5, stored=2, dropped=(("cut", 3),))
    second = Accounting(tokens=4, stored=1, dropped=(("cut", 1), ("x", 2)))
    assert (first + second).dropped == (("cut", 4), ("x", 2))
    assert (first + second).stored == 3


def test_accounting_survives_json():
    count = Accounting(documents=2, tokens=5, stored=3, dropped=(("a", 1), ("b", 1)), padding=7)
    text = json.dumps(count.to_json())
    assert Accounting.from_json(json.loads(text)) == count
    assert json.loads(text)["dropped"] == {"a": 1, "b": 1}
    with pytest.raises(ValueError, match="An accounting has the names"):
        Accounting.from_json({"tokens": 1})


def test_accounting_refuses_lost_tokens():
    with pytest.raises(ValueError, match=r"10 tokens - 0 dropped \+ 1 repeated is not 10 stored"):
        Accounting(tokens=10, stored=10, repeated=1)
    with pytest.raises(ValueError, match="cannot be negative, but padding is -1"):
        Accounting(padding=-1)
    with pytest.raises(ValueError, match="ordered and distinct"):
        Accounting(tokens=2, dropped=(("b", 1), ("a", 1)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pack", 1, 1), "at least 2 tokens.*length is 1"),
        (("pack", 8, 0), "at least 1 and less than the length 8, but it is 0"),
        (("pack", 8, 8), "at least 1 and less than the length 8, but it is 8"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        LayoutSettings(*arguments)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("chat", "The layout 'chat' is not yet available: use one of pack, pad."),
        ("preference", "The layout 'preference' is not yet available: use one of pack, pad."),
        ("stack", "There is no layout 'stack': use one of pack, pad."),
    ],
)
def test_other_layouts_are_refused_by_name(kind, message):
    # In a process of its own: here the type checker would refuse them first.
    program = f"from pipelines.layout import LayoutSettings; LayoutSettings({kind!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == f"pipelines.errors.PipelineError: {message}"


def test_bad_documents():
    layout = LayoutSettings("pack", 4)
    with pytest.raises(TypeError):
        lay_rows([np.zeros(2, np.int64)], 0, layout)
    with pytest.raises(TypeError):
        lay_rows([np.zeros((2, 2), np.uint32)], 0, layout)
    with pytest.raises(ValueError, match="numbered from 0 to 4294967294"):
        lay_rows(documents_of([1, 1]), NO_DOCUMENT - 1, layout)


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LayoutSettings("pack", 4).length = 8  # pyright: ignore[reportAttributeAccessIssue]
