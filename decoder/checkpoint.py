"""A checkpoint as both file formats give it: named tensors that can be read one by one."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from decoder.config import DecoderConfig
from decoder.errors import DecoderError
from decoder.stand_ins import refuse_stand_in

_BLOCK_BYTES = 1 << 21  # of stored bytes: what is hashed or converted at a time
_ALIGNMENT = 64  # bytes: arrays that start at a multiple of it are taken over by XLA, not copied


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies and how its bytes become numbers.

    `parameter` is the tensor's name in Hugging Face's naming, `name` the file's own.
    `decode` takes the bytes of any number of whole rows.
    `row_order`, where the file's rows lie in another order, has the stored place of each.
    `added` is what the file's numbers are above the model's.
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    size: int
    decode: Callable[[UInt8[np.ndarray, "..."]], Float32[np.ndarray, "..."]] = field(repr=False)
    row_order: tuple[int, ...] | None = field(default=None, repr=False)
    added: float = 0.0

    @property
    def row_bytes(self) -> int:
        """Stored bytes of a row; a vector counts as one row."""
        return self.size // self.shape[0] if len(self.shape) > 1 else self.size

    def blocks(self, rows: int | None = None) -> Iterator[UInt8[np.ndarray, "rows row_bytes"]]:
        """The stored bytes, `rows` at a time, or what fits a few MB.

        Reads the file: no page of it stays mapped.
        """
        count, width = self.size // self.row_bytes, self.row_bytes
        step = rows or max(1, _BLOCK_BYTES // width)
        with self.file.open("rb") as file:
            file.seek(self.offset)
            for first in range(0, count, step):
                wanted = width * min(step, count - first)
                raw = np.frombuffer(file.read(wanted), np.uint8)
                if raw.size != wanted:
                    raise DecoderError(
                        f"{self.file} ends within the tensor {self.name}: {raw.size} of {wanted} "
                        f"bytes from row {first} are there. Copy or download the file again"
                    )
                yield raw.reshape(-1, width)

    def digest(self) -> str:
        """sha256 of the stored bytes."""
        digest = hashlib.sha256()
        for raw in self.blocks():
            digest.update(raw.data)
        return digest.hexdigest()

    def load(self, dtype: np.dtype) -> tuple[np.ndarray, str]:
        """The tensor in `dtype`, in the row order of the model, all of it finite; and its digest.

        Read and converted block by block, so that beside the result only a few MB are held.
        Raises `DecoderError` for a number that is not finite in `dtype`.
        """
        digest = hashlib.sha256()
        out = aligned_empty(self.shape, dtype)
        table = out if len(self.shape) > 1 else out[None]
        # The row of the model of each stored row, where those differ.
        ordered = len(self.shape) > 1 and self.row_order is not None
        places = np.argsort(np.asarray(self.row_order)) if ordered else None
        first = 0
        for raw in self.blocks():
            digest.update(raw.data)
            rows = slice(first, first + len(raw))
            block = self._block(raw, dtype).reshape(-1, *table.shape[1:])
            table[rows if places is None else places[rows]] = block
            first += len(raw)
        if len(self.shape) == 1 and self.row_order is not None:
            out[:] = out[np.asarray(self.row_order)]
        return out, digest.hexdigest()

    def equals(self, other: "StoredTensor") -> bool:
        """Whether both hold the same numbers, whatever their dtypes; block by block."""
        if self.shape != other.shape:
            return False
        wide = np.dtype(np.float32)
        rows = max(1, _BLOCK_BYTES // max(self.row_bytes, other.row_bytes))
        return all(
            np.array_equal(self._block(mine, wide), other._block(theirs, wide))
            for mine, theirs in zip(self.blocks(rows), other.blocks(rows), strict=True)
        )

    def _block(self, raw: UInt8[np.ndarray, "..."], dtype: np.dtype) -> np.ndarray:
        with np.errstate(over="ignore"):
            decoded = self.decode(raw)
            values = (decoded - np.float32(self.added) if self.added else decoded).astype(dtype)
        if not np.isfinite(values.astype(np.float32)).all():
            raise DecoderError(
                f"{self.file}: the tensor {self.name} holds numbers that are not finite in "
                f"{dtype}: the checkpoint is damaged, or made for a wider dtype"
            )
        return values


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array whose memory a device array on the CPU can take over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


@dataclass(frozen=True)
class Checkpoint:
    """A configuration and every tensor of the files, keyed by parameter name.

    `identity` is what, beside the tensors, can change the model's numbers (JSON-able).
    """

    kind: str
    place: Path
    config: DecoderConfig
    identity: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    def fingerprint(self, digests: Mapping[str, str]) -> str:
        """sha256 over configuration and tensors, given each tensor's digest by parameter name.

        Independent of how tensors are spread over files and where those lie.
        """
        tensors = sorted(
            [tensor.name, list(tensor.shape), tensor.dtype, digests[parameter]]
            for parameter, tensor in self.tensors.items()
        )
        return canonical_digest({"config": dict(self.identity), "tensors": tensors})


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and without spaces; equal values give equal bytes."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


def canonical_digest(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; `DecoderError` if it is none."""
    refuse_stand_in(path)
    try:
        value = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DecoderError(f"{path} is not valid JSON ({error})") from error
    except RecursionError as error:
        raise DecoderError(f"{path} is not understood: its JSON is nested too deep") from error
    if not isinstance(value, dict):
        raise DecoderError(f"{path} holds a JSON {type(value).__name__}; expected an object")
    return value
