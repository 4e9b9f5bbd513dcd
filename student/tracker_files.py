"""Records in the files of TensorBoard and of Weights & Biases.

Both may end in half a record, or in half a block of records, if a process was killed; such an end
is left out. Damage elsewhere is not looked for: these files are copies of RUN/metrics.jsonl.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

# A .wandb file: a header of 7 bytes, then a log as LevelDB's (its "log format"): blocks of 32 KiB
# with parts of records, each with check sum (4), length (2) and kind (1: a whole record; 2, 3, 4:
# first, middle and last part).
_WANDB_HEADER, _BLOCK, _PART = 7, 32768, struct.Struct("<IHB")
_WHOLE, _FIRST, _LAST = 1, 2, 4


def tensorboard_records(data: bytes) -> Iterator[bytes]:
    """Records of an event file (TFRecord): length (8), check sum (4), data, check sum (4)."""
    start = 0
    while start + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        end = start + 12 + length + 4
        if end > len(data):
            return
        yield data[start + 12 : end - 4]
        start = end


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Records of a .wandb file."""
    start, record = _WANDB_HEADER, b""
    while start + _PART.size <= len(data):
        left = _BLOCK - start % _BLOCK
        if left < _PART.size:  # too little for a part: filled up with zeros
            start += left
            continue
        _, length, kind = _PART.unpack_from(data, start)
        end = start + _PART.size + length
        if kind == 0 or end > len(data):
            return
        part = data[start + _PART.size : end]
        record = part if kind in (_WHOLE, _FIRST) else record + part
        if kind in (_WHOLE, _LAST):
            yield record
        start = end


def last_steps(rows: Iterable[tuple[int, Sequence[str]]]) -> dict[str, int]:
    """The highest step of each name, of rows of (step, names)."""
    found: dict[str, int] = {}
    for step, names in rows:
        for name in names:
            found[name] = max(step, found.get(name, step))
    return found
