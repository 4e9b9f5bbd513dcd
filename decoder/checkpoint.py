"""A checkpoint as both file formats give it: named tensors that can be read one by one."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from decoder.config import DecoderConfig
from decoder.errors import DecoderError

_BLOCK_BYTES = 1 << 22  # of stored bytes: what is hashed or converted at a time


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

    def read(self) -> UInt8[np.ndarray, "size"]:
        """The stored bytes. Reads the file: no page of it stays mapped."""
        raw = np.fromfile(self.file, np.uint8, self.size, offset=self.offset)
        if raw.size != self.size:
            raise DecoderError(
                f"{self.file} ends within the tensor {self.name}: {raw.size} of {self.size} "
                "bytes are there. Copy or download the file again"
            )
        return raw

    def digest(self) -> str:
        """sha256 of the stored bytes, read block by block."""
        digest = hashlib.sha256()
        left = self.size
        with self.file.open("rb") as file:
            file.seek(self.offset)
            while left:
                block = file.read(min(left, _BLOCK_BYTES))
                if not block:
                    raise DecoderError(
                        f"{self.file} ends within the tensor {self.name}. "
                        "Copy or download the file again"
                    )
                digest.update(block)
                left -= len(block)
        return digest.hexdigest()

    def values(self, raw: UInt8[np.ndarray, "size"], dtype: np.dtype) -> np.ndarray:
        """The tensor in `dtype`, in the row order of the model, all of it finite.

        Converted row block by row block, so that no second copy of it is held.
        Raises `DecoderError` for a number that is not finite in `dtype`.
        """
        if len(self.shape) == 1:
            out = self._block(raw, dtype)
            return out if self.row_order is None else out[np.asarray(self.row_order)]
        rows = self.shape[0]
        stored = raw.reshape(rows, -1)
        order = np.arange(rows) if self.row_order is None else np.asarray(self.row_order)
        out = np.empty((rows, math.prod(self.shape[1:])), dtype)
        step = max(1, _BLOCK_BYTES // stored.shape[1])
        for start in range(0, rows, step):
            block = slice(start, start + step)
            out[block] = self._block(stored[order[block]], dtype).reshape(out[block].shape)
        return out.reshape(self.shape)

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
    try:
        value = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DecoderError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise DecoderError(f"{path} holds a JSON {type(value).__name__}; expected an object")
    return value
