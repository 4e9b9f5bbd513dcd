"""Seals: what they are of, and that any change of it changes them."""

import hashlib
import shutil
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import cache
from cache.errors import DamageError
from cache.format import SEALS
from cache.seals import broken_seals, seal_rows
from tests.cache.builder import Built, make_cache, make_encoding, shard_file

ENCODING = make_encoding(length=3, k=2, temperatures=(1.0,), vocabulary=9)
NAMES = list(ENCODING.arrays())


def _arrays(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays of the format with any bytes at all."""
    random = np.random.default_rng(seed)
    made = {}
    for name, spec in ENCODING.arrays().items():
        data = random.bytes(rows * int(np.prod(spec.inner)) * np.dtype(spec.dtype).itemsize)
        made[name] = np.frombuffer(data, spec.dtype).reshape(rows, *spec.inner).copy()
    return made


def test_a_seal_is_the_hash_that_the_format_says() -> None:
    arrays = _arrays(2)
    seals = seal_rows(arrays, ENCODING, ["one"], np.array([7, 2**40]))
    assert (seals.dtype, seals.shape) == (np.uint64, (2, len(NAMES)))
    for place, row in enumerate((7, 2**40)):
        for column, name in enumerate(NAMES):
            key = hashlib.sha256(f"one/{name}".encode()).digest()[:8]
            seed = (int.from_bytes(key, "little") + row) % 2**64
            data = arrays[name][place].tobytes()
            assert seals[place, column] == xxhash.xxh3_64(data, seed=seed).intdigest()


def test_seals_do_not_depend_on_the_batch_or_on_memory() -> None:
    arrays = _arrays(6)
    rows = np.array([5, 6, 7, 8, 9, 10])
    whole = seal_rows(arrays, ENCODING, ["one"], rows)
    order = [4, 0, 0, 2]
    picked = {name: values[order] for name, values in arrays.items()}
    np.testing.assert_array_equal(
        seal_rows(picked, ENCODING, ["one"] * 4, rows[order]), whole[order]
    )
    for other in (
        {name: np.asfortranarray(values) for name, values in arrays.items()},
        {name: values.astype(values.dtype.newbyteorder(">")) for name, values in arrays.items()},
        {name: np.repeat(values, 2, axis=0)[::2] for name, values in arrays.items()},
    ):
        np.testing.assert_array_equal(seal_rows(other, ENCODING, ["one"], rows), whole)


def test_rows_may_be_of_different_captures() -> None:
    arrays, rows = _arrays(3), np.arange(3)
    one, two = (seal_rows(arrays, ENCODING, [identity], rows) for identity in ("one", "two"))
    mixed = seal_rows(arrays, ENCODING, ["one", "two", "one"], rows)
    np.testing.assert_array_equal(mixed, np.stack([one[0], two[1], one[2]]))
    with pytest.raises(ValueError, match="argument"):
        seal_rows(arrays, ENCODING, ["one", "two"], rows)


def test_arrays_that_are_not_given_are_zero() -> None:
    arrays, rows = _arrays(3), np.arange(3)
    whole = seal_rows(arrays, ENCODING, ["one"], rows)
    some = seal_rows({"entropy": arrays["entropy"]}, ENCODING, ["one"], rows)
    column = NAMES.index("entropy")
    np.testing.assert_array_equal(some[:, column], whole[:, column])
    assert not np.delete(some, column, axis=1).any()


def test_no_rows_no_seals() -> None:
    arrays = _arrays(0)
    none = seal_rows(arrays, ENCODING, ["one"], np.zeros(0, np.int64))
    assert (none.shape, none.dtype) == ((0, len(NAMES)), np.uint64)
    empty = {**arrays, SEALS: none}
    assert broken_seals(empty, ENCODING, ["one"], np.zeros(0, np.int64)) == {}
    assert broken_seals(empty, ENCODING, [], np.zeros(0, np.int64)) == {}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_change_changes_the_seal_and_is_found(data: st.DataObject) -> None:
    """One bit of one byte, the row's number, the array's name, the capture."""
    seed = data.draw(st.integers(0, 2**16))
    first = data.draw(st.integers(0, 2**48))
    arrays, rows = _arrays(3, seed), first + np.arange(3)
    seals = seal_rows(arrays, ENCODING, ["one"], rows)
    assert broken_seals({**arrays, SEALS: seals}, ENCODING, ["one"], rows) == {}
    place = data.draw(st.integers(0, 2))
    name = data.draw(st.sampled_from(NAMES))
    kind = data.draw(st.sampled_from(["bit", "row", "identity", "seal", "name"]))
    changed, shown, found = dict(arrays), seals.copy(), ["one"]
    numbers = rows.copy()
    if kind == "bit":
        values = arrays[name].copy()
        row = values[place].reshape(-1).view(np.uint8)
        row[data.draw(st.integers(0, row.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
        changed[name] = values
        expected = {name}
    elif kind == "row":
        numbers[place] += data.draw(st.integers(1, 2**20))
        expected = {SEALS}
    elif kind == "identity":
        found = ["one", "one", "one"]
        found[place] = data.draw(st.text(max_size=8).filter(lambda text: text != "one"))
        expected = {SEALS}
    elif kind == "seal":
        shown[place, NAMES.index(name)] ^= np.uint64(1 << data.draw(st.integers(0, 63)))
        expected = {name}
    else:
        other = data.draw(st.sampled_from([n for n in NAMES if n != name]))
        columns = [NAMES.index(name), NAMES.index(other)]
        shown[place, columns] = shown[place, columns[::-1]]
        expected = {name, other}
    broken = broken_seals({**changed, SEALS: shown}, ENCODING, found, numbers)
    assert set(broken) == expected
    for places in broken.values():
        np.testing.assert_array_equal(places, np.arange(3) == place)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(NAMES))
def test_one_array_read_alone_is_checked(seed: int, name: str) -> None:
    arrays, rows = _arrays(2, seed), np.arange(2)
    seals = seal_rows(arrays, ENCODING, ["one"], rows)
    alone = {name: arrays[name], SEALS: seals}
    assert broken_seals(alone, ENCODING, ["one"], rows) == {}
    swapped = {name: arrays[name][::-1], SEALS: seals}
    same = arrays[name][0].tobytes() == arrays[name][1].tobytes()
    assert set(broken_seals(swapped, ENCODING, ["one"], rows)) >= (set() if same else {name})
    # Even where both rows hold the same, each is only where it belongs.
    assert set(broken_seals(alone, ENCODING, ["one"], rows[::-1])) == {name}


def test_a_cache_without_seals_reads_as_before(tmp_path: Any) -> None:
    """Format 1.0: no array of seals, no check of them, the same identity as then."""
    built: Built = make_cache(tmp_path / "c", sealed=False)
    assert not (built.path / "arrays" / SEALS).exists()
    assert b'"sealed"' not in (built.path / "manifest.json").read_bytes()
    assert cache.verify(built.path, full=True).sound
    opened = cache.open(built.path)
    for name, values in opened.rows(slice(None)).items():
        np.testing.assert_array_equal(values, built.arrays[name])
    sealed = make_cache(tmp_path / "sealed")
    assert sealed.manifest.identity != built.manifest.identity


def test_rows_of_other_rows_are_refused_whatever_is_read(exact_cache: Built, copy: Any) -> None:
    """A shard's files under another's name, seals and all."""
    built = copy(exact_cache)
    for name in built.encoding.stored_arrays():
        shutil.copy(shard_file(exact_cache, name, 0), shard_file(built, name, 1))
    opened = cache.open(built.path)
    for fields in (None, *((name,) for name in opened.fields)):
        with pytest.raises(DamageError, match="of another shard or of another cache") as raised:
            opened.rows([1, 5, 9], fields)
        assert {item.shard for item in raised.value.damage} == {1}
