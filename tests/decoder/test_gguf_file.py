"""The GGUF header against the `gguf` package's own reader, and damaged files."""

import math
from pathlib import Path

import gguf
import numpy as np
import pytest

from decoder.errors import DecoderError
from decoder.gguf_file import read_header
from tests.models import smollm2_path


def write(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int16("a.i16", -300)
    writer.add_uint64("a.u64", 2**40)
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", math.pi)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "Grüße 😀")
    writer.add_array("a.strings", ["one", "", "three"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 1.5])
    writer.add_tensor("first", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("second", np.arange(4, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_of_every_type(tmp_path: Path) -> None:
    metadata = read_header(write(tmp_path / "a.gguf")).metadata
    expected = {
        "general.architecture": "llama",
        "a.u8": 200,
        "a.i16": -300,
        "a.u64": 2**40,
        "a.f32": 0.5,
        "a.f64": math.pi,
        "a.bool": True,
        "a.string": "Grüße 😀",
        "a.strings": ["one", "", "three"],
        "a.numbers": [1, -2, 3],
        "a.floats": [0.5, 1.5],
    }
    assert metadata == expected


def test_tensors(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "a.gguf"))
    first = header.tensors["first"]
    assert (first.shape, first.type.name, first.size) == ((2, 3), "F32", 24)
    data = header.path.read_bytes()
    np.testing.assert_array_equal(
        np.frombuffer(data[first.offset : first.offset + first.size], np.float32), np.arange(6)
    )


def test_agrees_with_the_package_on_the_real_file() -> None:
    header = read_header(smollm2_path())
    reader = gguf.GGUFReader(smollm2_path())
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert header.metadata == {k: v for k, v in fields.items() if not k.startswith("GGUF.")}
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        mine = header.tensors[tensor.name]
        assert mine.shape == tuple(int(size) for size in tensor.shape[::-1])
        assert (mine.type, mine.offset, mine.size) == (
            tensor.tensor_type,
            tensor.data_offset,
            tensor.n_bytes,
        )


@pytest.mark.parametrize("kept", [24, 40, 200, 400])
def test_truncated_within_the_header(tmp_path: Path, kept: int) -> None:
    path = write(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DecoderError, match=r"a.gguf is truncated or damaged"):
        read_header(path)


def test_truncated_within_a_tensor(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    end = read_header(path).tensors["second"]
    path.write_bytes(path.read_bytes()[: end.offset + end.size - 1])
    with pytest.raises(DecoderError, match=r"is truncated: the tensor second ends at byte"):
        read_header(path)


@pytest.mark.parametrize(
    ("start", "text"),
    [
        (b"", "is no GGUF file"),
        (b"NOPE" + bytes(40), "is no GGUF file"),
        (b"GGUF\x01\0\0\0" + bytes(40), "is of GGUF version 1; supported are 2 and 3"),
        (b"GGUF\0\0\0\x03" + bytes(40), "is of GGUF version 50331648"),
    ],
)
def test_no_gguf(tmp_path: Path, start: bytes, text: str) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(start)
    with pytest.raises(DecoderError, match=text):
        read_header(path)


def test_absurd_counts_end_quickly(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    data = bytearray(path.read_bytes())
    place = data.index(b"a.strings") + len(b"a.strings") + 8
    data[place : place + 8] = (2**60).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(DecoderError, match="truncated or damaged"):
        read_header(path)
