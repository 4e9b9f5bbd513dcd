"""Stored tensors block by block, and fingerprints of whole checkpoints."""

import hashlib
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

import decoder.checkpoint
from decoder.checkpoint import StoredTensor, aligned_empty, canonical_digest, canonical_json
from decoder.errors import DecoderError


def stored(path: Path, values: np.ndarray, order: tuple[int, ...] | None = None) -> StoredTensor:
    path.write_bytes(b"head" + values.tobytes() + b"tail")
    return StoredTensor(
        name="a",
        parameter="a",
        shape=values.shape,
        dtype="F32",
        file=path,
        offset=4,
        size=values.nbytes,
        decode=lambda raw: raw.view(np.float32),
        row_order=order,
    )


@pytest.mark.parametrize("block", [1, 100, 1 << 24])
def test_values_do_not_depend_on_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(decoder.checkpoint, "_BLOCK_BYTES", block)
    values = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    order = (3, 0, 5, 1, 2, 4)
    tensor = stored(tmp_path / "a", values, order)
    for dtype in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
        found, digest = tensor.load(dtype)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, values[list(order)].astype(dtype))
        assert digest == tensor.digest() == hashlib.sha256(values.tobytes()).hexdigest()


def test_a_vector_in_another_order(tmp_path: Path) -> None:
    values = np.asarray([1.0, 2.0, 3.0], np.float32)
    tensor = stored(tmp_path / "a", values, (2, 0, 1))
    np.testing.assert_array_equal(tensor.load(values.dtype)[0], [3.0, 1.0, 2.0])


@pytest.mark.parametrize("block", [1, 40, 1 << 24])
def test_equal_numbers_in_two_dtypes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(decoder.checkpoint, "_BLOCK_BYTES", block)
    values = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float16)
    wide = stored(tmp_path / "a", values.astype(np.float32))
    narrow = replace(
        stored(tmp_path / "b", values),
        decode=lambda raw: raw.view(np.float16).astype(np.float32),
    )
    assert wide.equals(narrow)
    assert narrow.equals(wide)
    other = values.astype(np.float32)
    other[5, 3] += 1
    assert not stored(tmp_path / "c", other).equals(narrow)
    assert not stored(tmp_path / "d", other[:5]).equals(narrow)


@pytest.mark.parametrize("shape", [(), (3,), (5, 7)])
def test_memory_that_a_device_array_takes_over(shape: tuple[int, ...]) -> None:
    dtype = np.dtype(ml_dtypes.bfloat16)
    array = aligned_empty(shape, dtype)
    assert (array.shape, array.dtype, array.ctypes.data % 64) == (shape, dtype, 0)
    array[...] = 1
    assert jax.device_put(array).unsafe_buffer_pointer() == array.ctypes.data


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path: Path) -> None:
    tensor = stored(tmp_path / "a", np.ones((4, 4), np.float32))
    (tmp_path / "a").write_bytes(b"head" + bytes(10))
    with pytest.raises(DecoderError, match="ends within the tensor a: 10 of 64 bytes"):
        tensor.load(np.dtype(np.float32))
    with pytest.raises(DecoderError, match="ends within the tensor a"):
        tensor.digest()


def test_canonical_json() -> None:
    assert canonical_json({"b": [1, 2.5], "a": "é"}) == '{"a":"é","b":[1,2.5]}'.encode()
    assert canonical_digest({"a": 1, "b": 2}) == canonical_digest({"b": 2, "a": 1})
    assert canonical_digest([1, 2]) != canonical_digest([2, 1])
