"""The header of a GGUF file: metadata and tensor table.

The header is parsed here (a tokenizer's 100,000 strings in a tenth of a second);
the `gguf` package knows the quantised types.
The layout is that of the published GGUF specification, versions 2 and 3.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from decoder.errors import DecoderError
from decoder.stand_ins import refuse_stand_in

MAGIC = b"GGUF"

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the tensor table; `shape` has the slowest axis first, as numpy has it."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int  # from the start of the file
    size: int  # bytes


@dataclass(frozen=True)
class GGUFHeader:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class _Reader:
    """Little-endian values one after the other; running out of file is a `DecoderError`."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file, self.size = path, file, path.stat().st_size

    def take(self, count: int) -> bytes:
        data = self.file.read(count) if count <= self.size else b""
        if len(data) != count:
            raise self._damaged()
        return data

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode(errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise DecoderError(f"{self.path}: metadata of the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[kind]) if kind != 7 else np.dtype(bool)
            return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        if count > self.size:
            raise self._damaged()
        if kind == _STRING:
            return self._strings(count)
        return [self.value(kind) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """As `string` gives them, without a call for each of a vocabulary's 100,000."""
        read, strings = self.file.read, []
        for _ in range(count):
            length = int.from_bytes(read(8), "little")
            data = read(length) if length <= self.size else b""
            if len(data) != length:
                raise self._damaged()
            strings.append(data.decode(errors="replace"))
        return strings

    def _damaged(self) -> DecoderError:
        return DecoderError(f"{self.path} is truncated or damaged. Copy or download it again")


def read_header(path: Path) -> GGUFHeader:
    """Metadata and tensor table of a GGUF file, checked against the file's size."""
    refuse_stand_in(path)
    with path.open("rb") as file:
        reader = _Reader(path, file)
        if reader.size < 24 or reader.take(4) != MAGIC:
            raise DecoderError(f"{path} is no GGUF file (it does not start with 'GGUF')")
        version = reader.scalar("I")
        if version not in (2, 3):
            raise DecoderError(f"{path} is of GGUF version {version}; supported are 2 and 3")
        tensors, entries = reader.scalar("Q"), reader.scalar("Q")
        metadata = {}
        for _ in range(entries):
            key = reader.string()
            metadata[key] = reader.value(reader.scalar("I"))
        table = [_tensor_entry(reader) for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        start = -(-file.tell() // alignment) * alignment
    return GGUFHeader(path, metadata, _place(path, table, start, reader.size))


def _tensor_entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.string()
    shape = tuple(reader.scalar("Q") for _ in range(reader.scalar("I")))
    return name, shape[::-1], reader.scalar("I"), reader.scalar("Q")


def _place(
    path: Path, table: list[tuple[str, tuple[int, ...], int, int]], start: int, file_size: int
) -> dict[str, GGUFTensor]:
    tensors = {}
    for name, shape, kind, offset in table:
        if kind not in {int(known) for known in GGMLQuantizationType}:
            raise DecoderError(f"{path}: the tensor {name} has the unknown type {kind}")
        quantisation = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[quantisation]
        if not shape or shape[-1] % block or math.prod(shape) == 0:
            raise DecoderError(
                f"{path}: the tensor {name} of shape {list(shape)} does not divide into "
                f"blocks of {block} ({quantisation.name})"
            )
        size = math.prod(shape) // block * block_bytes
        if start + offset + size > file_size:
            raise DecoderError(
                f"{path} is truncated: the tensor {name} ends at byte {start + offset + size}, "
                f"the file at {file_size}. Copy or download it again"
            )
        if name in tensors:
            raise DecoderError(f"{path} holds the tensor {name} twice")
        tensors[name] = GGUFTensor(name, shape, quantisation, start + offset, size)
    return tensors
