"""Receipts: round trips, bytes, and every edit of a field."""

import hashlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import CacheError
from cache.receipt import Receipt, data_digest
from cache.seals import seal_rows
from tests.cache.builder import Built


@pytest.fixture
def data(exact_cache: Built) -> bytes:
    return (exact_cache.path / "receipts" / "000001.json").read_bytes()


def test_round_trip(data: bytes) -> None:
    receipt = Receipt.from_bytes(data, "it")
    assert (receipt.shard, receipt.rows) == (1, (4, 8))
    assert receipt.to_bytes() == data
    assert receipt.digest == hashlib.sha256(data).hexdigest()
    assert Receipt.from_bytes(json.dumps(json.loads(data), indent=2).encode(), "it") == receipt


def test_a_receipt_says_what_is_on_storage(exact_cache: Built) -> None:
    receipts = sorted((exact_cache.path / "receipts").iterdir())
    assert [path.name for path in receipts] == ["000000.json", "000001.json", "000002.json"]
    for shard, path in enumerate(receipts):
        receipt = Receipt.from_bytes(path.read_bytes(), "it")
        rows = slice(*receipt.rows)
        assert receipt.identity == exact_cache.manifest.identity
        assert set(receipt.arrays) == set(exact_cache.encoding.stored_arrays())
        real = exact_cache.arrays["documents"][rows]
        real = real[real != 2**32 - 1]
        assert receipt.documents == (real.min(), real.max())
        shown = {name: values[rows] for name, values in exact_cache.arrays.items()}
        numbers = np.arange(*receipt.rows)
        shown["seals"] = seal_rows(shown, exact_cache.encoding, [receipt.identity], numbers)
        for name, stored in receipt.arrays.items():
            values = shown[name]
            zeros = ".0" * (values.ndim - 1)
            file = exact_cache.path / "arrays" / name / f"c.{shard}{zeros}"
            assert stored.bytes == file.stat().st_size
            assert stored.sha256 == hashlib.sha256(values.tobytes()).hexdigest()


def test_a_receipt_holds_no_time_and_no_place(data: bytes) -> None:
    assert set(json.loads(data)) == {
        "shard",
        "rows",
        "documents",
        "identity",
        "arrays",
        "statistics",
    }


def _paths(value: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(value, dict):
        return []
    return [
        path
        for key, inner in value.items()
        for path in [(*prefix, key), *_paths(inner, (*prefix, key))]
    ]


def _changed(value: Any, path: tuple[str, ...], change: Any) -> Any:
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return copy


def test_every_field_is_needed_and_typed(data: bytes) -> None:
    good = json.loads(data)
    paths = [path for path in _paths(good) if len(path) != 2 or path[0] != "arrays"]
    assert len(paths) > 30
    for path in paths:
        gone = _changed(good, path, lambda inner, key: inner.pop(key))
        with pytest.raises(CacheError, match=path[-1]):
            Receipt.from_bytes(json.dumps(gone).encode(), "it")
        for wrong in (True, 1.5, "?", -1, [[-1]], {"x": []}, None):
            text = isinstance(_at(good, path), str)
            if (wrong is None and path == ("documents",)) or (text and wrong == "?"):
                continue
            number = isinstance(_at(good, path), float)
            if number and isinstance(wrong, int | float) and not isinstance(wrong, bool):
                continue
            bad = _changed(good, path, lambda inner, key, wrong=wrong: inner.update({key: wrong}))
            # "array x" where an array is meant, else the field's name.
            with pytest.raises(CacheError, match=path[-1].removesuffix("s")):
                Receipt.from_bytes(json.dumps(bad).encode(), "it")


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def test_any_change_of_a_value_changes_the_digest(data: bytes) -> None:
    receipt = Receipt.from_bytes(data, "it")
    good = json.loads(data)
    digests = {receipt.digest}
    changes: dict[type, Any] = {
        int: lambda value: value + 1,
        float: lambda value: value * (1 + 2**-52),
        str: lambda value: value + "0",
    }
    count = 0
    for path in _paths(good):
        value = _at(good, path)
        if type(value) in changes:
            new = changes[type(value)](value)
            changed = _changed(good, path, lambda inner, key, new=new: inner.update({key: new}))
            digests.add(Receipt.from_bytes(json.dumps(changed).encode(), "it").digest)
            count += 1
    assert len(digests) == count + 1


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,0123456789truefalsn ', max_size=60))
def test_any_bytes_are_refused_as_such(noise: bytes | str) -> None:
    with pytest.raises(CacheError):
        Receipt.from_bytes(noise if isinstance(noise, bytes) else noise.encode(), "it")


@settings(max_examples=200, deadline=None)
@given(cut=st.integers(0, 5000), where=st.integers(0, 5000), byte=st.integers(0, 255))
def test_a_cut_or_changed_receipt_never_fails_otherwise(
    cut: int, where: int, byte: int, exact_cache: Built
) -> None:
    data = (exact_cache.path / "receipts" / "000000.json").read_bytes()
    changed = bytearray(data)
    changed[where % len(data)] = byte
    for attempt in (data[: cut % len(data)], bytes(changed)):
        try:
            receipt = Receipt.from_bytes(attempt, "it")
        except CacheError:
            continue
        assert (
            attempt == data
            or receipt.digest != hashlib.sha256(data).hexdigest()
            or (json.loads(attempt) == json.loads(data))
        )


def test_the_data_digest_is_of_little_endian_rows() -> None:
    values = np.arange(12, dtype=np.uint16).reshape(3, 4)
    expected = hashlib.sha256(np.arange(12, dtype="<u2").tobytes()).hexdigest()
    assert data_digest(values) == expected
    assert data_digest(values.astype(">u2")) == expected
    assert data_digest(np.asfortranarray(values)) == expected
    assert data_digest(values.T) != expected
    assert data_digest(np.zeros((0, 4), np.uint16)) == hashlib.sha256(b"").hexdigest()
