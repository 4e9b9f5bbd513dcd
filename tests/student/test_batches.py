"""Batches against the stored arrays, place by place; padding, cuts, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

import cache
from cache.errors import CacheError
from student.batches import Batch, BatchSettings, check_settings, read_batch
from student.errors import ObjectiveError, StudentError
from tests.cache.builder import Built, make_cache, same
from tests.student.small import LENGTH, VOCABULARY, labels_of, make_student_cache, reading

_ROWS = np.array([7, 0, 3, 5, 21, 7], np.int64)

Change = Callable[[dict[str, np.ndarray]], None]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, cache.Cache]:
    return make_student_cache(tmp_path_factory.mktemp("sampled"))


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, cache.Cache]:
    """float32 log-probs, temperatures 1, 2 and 4."""
    return make_student_cache(tmp_path_factory.mktemp("exact"), tail="none", logprobs="float32")


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """Changes what is read of a cache, as another writer than ours may have stored it."""

    def change_with(change: Change) -> None:
        rows = cache.Cache.rows

        def changed_rows(self, indices, fields=None):
            read = rows(self, indices, fields)
            change(read)
            return read

        monkeypatch.setattr(cache.Cache, "rows", changed_rows)

    return change_with


def assert_same(found: Batch, expected: Batch) -> None:
    left, right = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(left, right, strict=True):
        assert same(one, other)


@pytest.mark.parametrize("kind", ["sampled", "exact"])
def test_a_batch_is_what_is_stored(kind: str, request: pytest.FixtureRequest) -> None:
    built, opened = request.getfixturevalue(kind)
    batch = read_batch(opened, reading(), _ROWS)
    stored = {name: values[_ROWS] for name, values in built.arrays.items()}
    assert same(batch.rows, _ROWS.astype(np.int32))
    assert same(batch.tokens, stored["tokens"].astype(np.int32))
    assert same(batch.segments, stored["segments"].astype(np.int32))
    assert same(batch.labels, labels_of(built)[_ROWS].astype(np.int32))
    assert same(batch.label_mask, stored["label_mask"] == 1)
    assert same(batch.label_logprobs, stored["label_logprobs"])
    assert batch.targets is not None
    assert same(batch.targets.ids, stored["target_ids"])
    assert batch.targets.ids.dtype == np.uint16
    assert same(batch.targets.logprobs, stored["target_logprobs"])
    assert batch.targets.logprobs.dtype == (np.float32 if kind == "exact" else np.float16)
    assert same(batch.targets.exact_counts, stored["exact_counts"].astype(np.int32))
    assert same(batch.targets.tail_logprobs, stored["tail_logprobs"][..., 0].astype(np.float32))
    assert same(batch.targets.entropy, stored["entropy"].astype(np.float32))


def test_labels_stay_in_their_documents(sampled) -> None:
    built, opened = sampled
    batch = read_batch(opened, reading(), np.arange(22))
    documents = built.arrays["documents"]
    predicted = 0
    for row, position in np.argwhere(batch.label_mask):
        assert documents[row, position] == documents[row, position + 1]
        assert batch.labels[row, position] == batch.tokens[row, position + 1]
        predicted += 1
    # Every token but the first of each segment.
    tokens = np.count_nonzero(batch.segments)
    assert predicted == tokens - sum(len(set(row) - {0}) for row in batch.segments.tolist())


@pytest.mark.parametrize(("temperature", "index"), [(None, 0), (1.0, 0), (2.0, 1), (4.0, 2)])
def test_the_tail_at_a_captured_temperature(exact, temperature: float | None, index: int) -> None:
    built, opened = exact
    batch = read_batch(opened, reading(temperature=temperature), _ROWS)
    expected = built.arrays["tail_logprobs"][_ROWS, :, index].astype(np.float32)
    assert batch.targets is not None
    assert same(batch.targets.tail_logprobs, expected)


def test_a_temperature_that_was_not_captured_is_refused(exact) -> None:
    _, opened = exact
    with pytest.raises(ObjectiveError, match=r"--temperature 3: the cache was captured at 1, 2, 4"):
        check_settings(opened, reading(temperature=3.0))
    with pytest.raises(ObjectiveError, match="Use a captured one, or capture again"):
        read_batch(opened, reading(temperature=3.0), _ROWS)
    # Labels have no temperature.
    assert read_batch(opened, reading(temperature=3.0, targets=False), _ROWS).targets is None


@pytest.mark.parametrize("targets", [True, False])
def test_one_read_of_the_arrays_needed(
    sampled, monkeypatch: pytest.MonkeyPatch, targets: bool
) -> None:
    _, opened = sampled
    whole = read_batch(opened, reading(), _ROWS)
    reads = []
    rows = cache.Cache.rows
    monkeypatch.setattr(
        cache.Cache, "rows", lambda self, *read: (reads.append(read), rows(self, *read))[1]
    )
    batch = read_batch(opened, reading(targets=targets), _ROWS)
    assert_same(batch, whole if targets else whole._replace(targets=None))
    ((indices, fields),) = reads
    assert same(indices, _ROWS)
    labels = {"tokens", "segments", "label_mask", "label_logprobs"}
    unread = {"documents"} if targets else set(opened.fields) - labels
    assert sorted(fields) == sorted(set(opened.fields) - unread)


@pytest.mark.parametrize("places", [[0], [6], [1, 4], list(range(6))])
def test_padding_rows(sampled, places: list[int]) -> None:
    _, opened = sampled
    without = read_batch(opened, reading(), _ROWS)
    indices = np.insert(_ROWS, places, -1)
    batch = read_batch(opened, reading(), indices)
    padding = indices == -1
    assert_same(jax.tree.map(lambda values: values[~padding], batch), without)
    assert padding.sum() == len(places)
    assert (batch.rows[padding] == -1).all()
    assert not batch.tokens[padding].any()
    assert not batch.segments[padding].any()
    assert not batch.labels[padding].any()
    assert not batch.label_mask[padding].any()


def test_nothing_but_padding(sampled) -> None:
    _, opened = sampled
    rows = read_batch(opened, reading(), np.array([0, 1]))
    batch = read_batch(opened, reading(), np.array([-1, -1]))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), batch) == jax.tree.map(
        lambda x: (x.shape, x.dtype), rows
    )
    assert not batch.label_mask.any()
    assert batch.targets is not None
    # As unusable as where there is no label: what reads it in spite of the mask shows.
    assert (batch.targets.ids == 65535).all()
    assert np.isnan(batch.label_logprobs).all()


@pytest.mark.parametrize("length", [1, 3, LENGTH - 1, LENGTH])
def test_a_cut_keeps_the_last_label(sampled, length: int) -> None:
    built, opened = sampled
    rows = np.arange(22)
    whole = read_batch(opened, reading(), rows)
    batch = read_batch(opened, reading(length=length), rows)
    cut = jax.tree.map(lambda values: values[:, :length] if values.ndim > 1 else values, whole)
    assert_same(batch, cut)
    last = batch.label_mask[:, -1]
    assert last.any() == (length < LENGTH)
    if length < LENGTH:
        following = built.arrays["tokens"][:, length].astype(np.int32)
        assert same(batch.labels[last, -1], following[last])


def _first_place(wrong: np.ndarray) -> tuple[int, ...]:
    return next(place for place in np.ndindex(*wrong.shape) if wrong[place])


def test_a_token_that_the_student_cannot_predict(sampled) -> None:
    built, opened = sampled
    tokens = built.arrays["tokens"]
    row, position = _first_place(tokens[4:] >= 50)
    expected = (
        rf"row {row + 4}, position {position}: the token id {tokens[row + 4, position]} .* is "
        r"beyond the student's 50 logits; the cache's vocabulary is 60"
    )
    with pytest.raises(StudentError, match=expected):
        read_batch(opened, reading(most_id=50), np.arange(4, 22))


def test_a_label_that_the_student_cannot_predict(sampled) -> None:
    """The label of the last position that a cut keeps is a token that the cut leaves out."""
    built, opened = sampled
    tokens, mask = built.arrays["tokens"], built.arrays["label_mask"]
    row, length = next(
        (row, length)
        for row in range(22)
        for length in range(1, LENGTH)
        if mask[row, length - 1] and tokens[row, length] > tokens[row, :length].max()
    )
    limit = int(tokens[row, length])
    settings = reading(length=length, targets=False, most_id=limit)
    with pytest.raises(StudentError, match=rf"row {row}, position {length - 1}: the label id"):
        read_batch(opened, settings, np.array([row]))
    settings = reading(length=length, targets=False, most_id=limit + 1)
    assert read_batch(opened, settings, np.array([row])).labels[0, -1] == limit


def test_a_target_that_the_student_cannot_predict(sampled) -> None:
    built, opened = sampled
    tokens, ids = built.arrays["tokens"], built.arrays["target_ids"]
    label = built.arrays["label_mask"] == 1
    limits = tokens.max(axis=1) + 1
    wrong = (ids >= limits[:, None, None]) & (ids != 65535) & label[..., None]
    row, position, _ = _first_place(wrong)
    settings = reading(most_id=int(limits[row]))
    with pytest.raises(StudentError, match=rf"row {row}, position {position}: the target id"):
        read_batch(opened, settings, np.array([-1, row]))
    assert not read_batch(opened, reading(targets=False), np.array([row])).targets


@pytest.mark.parametrize("name", ["tokens", "target_ids"])
def test_an_id_beyond_the_vocabulary_is_damage(sampled, changed, name: str) -> None:
    def change(read: dict[str, np.ndarray]) -> None:
        read[name][1, 0] = VOCABULARY

    changed(change)
    _, opened = sampled
    with pytest.raises(StudentError, match=r"row 6, position 0: .* 60 .* vocabulary of 60\. Run"):
        read_batch(opened, reading(most_id=100), np.array([4, 6]))


def test_what_stands_where_there_is_no_label_decides_nothing(sampled, changed) -> None:
    _, opened = sampled
    before = read_batch(opened, reading(), _ROWS)

    def change(read: dict[str, np.ndarray]) -> None:
        nowhere = read["label_mask"] != 1
        assert nowhere.any()
        read["target_ids"][nowhere] = 1000
        read["label_mask"][nowhere] = 255

    changed(change)
    after = read_batch(opened, reading(), _ROWS)
    assert_same(after._replace(targets=None), before._replace(targets=None))


def test_a_label_without_its_token_is_refused(sampled, changed) -> None:
    def change(read: dict[str, np.ndarray]) -> None:
        read["label_mask"][1, -1] = 1

    changed(change)
    _, opened = sampled
    with pytest.raises(StudentError, match="row 3: its last position has a label, but there is no"):
        read_batch(opened, reading(), np.array([-1, 1, 3]))


def test_what_cannot_be_asked_for(sampled, tmp_path: Path) -> None:
    _, opened = sampled
    with pytest.raises(StudentError, match="--length 9 is more than the 8 positions of a row"):
        read_batch(opened, reading(length=9), _ROWS)
    with pytest.raises(StudentError, match="--length should be at least 1, found 0"):
        reading(length=0)
    with pytest.raises(StudentError, match="at least 1 logit, found 0"):
        BatchSettings(most_id=0)
    with pytest.raises(CacheError, match="rows 0 to 21, not -2"):
        read_batch(opened, reading(), np.array([-2]))
    pairs = make_cache(tmp_path / "pairs", rows=4, rows_per_example=2)
    with pytest.raises(StudentError, match=r"examples of 2 rows \(preference pairs\)"):
        check_settings(cache.open(pairs.path), reading())
