"""Numbers of each step as JSON lines: every step is there, whatever happened to the process."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from student.errors import RunError

# JSON has no such numbers; they are written as these strings.
_STRINGS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsFile:
    """Appends lines, each of them flushed: {"step": 12, "loss": 3.4, …}.

    A step that the file has already, from a session that went on beyond the checkpoint it was
    resumed from, is written again, marked `"repeat": true`.
    """

    def __init__(self, path: str | Path):
        """Opens the file, made if there is none; a half-written end is cut off."""
        self._path = Path(path)
        self._file = self._path.open("ab")
        try:
            self._before = self._repair()
        except BaseException:
            self._file.close()
            raise

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds the line of a step; the operating system has it when this returns.

        Args:
          step: how many steps were done.
          values: JSON values or numpy scalars; numbers that are not finite become strings
            ("NaN", "Infinity", "-Infinity").
        """
        line: dict[str, Any] = {"step": step}
        line |= {name: _writable(value) for name, value in values.items()}
        if step in self._before:
            line["repeat"] = True
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repair(self) -> set[int]:
        """Cuts off what follows the last whole line; the steps that the file has."""
        data = self._path.read_bytes()
        steps, end, complete = set[int](), 0, True
        for start, line in _lines(data):
            value = _parse(line)
            if value is not None:
                steps.add(value["step"])
                end, complete = start + len(line), line.endswith(b"\n")
        if end < len(data):
            os.truncate(self._path, end)
        if not complete:
            self._file.write(b"\n")
            self._file.flush()
        return steps


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """One line for each step, by step; of a step that was repeated, the last.

    A half-written end, as a killed or a running process leaves it, is left out.

    Raises:
      RunError: a line before the end is no JSON object with a step. No file: no lines.
    """
    path = Path(path)
    if not path.exists():
        return []
    found: dict[int, dict[str, Any]] = {}
    bad: int | None = None
    for number, (_, line) in enumerate(_lines(path.read_bytes()), start=1):
        value = _parse(line)
        if value is None:
            bad = bad or number
        elif bad is not None:
            raise RunError(
                f"{path}, line {bad}: expected a JSON object with a step, found damaged text. "
                "Remove that line; the others are kept."
            )
        else:
            found[value["step"]] = {name: _readable(item) for name, item in value.items()}
    return [found[step] for step in sorted(found)]


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Lines with their newline, and where each begins."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end + 1
        yield start, data[start:end]
        start = end


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    step = value.get("step") if isinstance(value, dict) else None
    return value if isinstance(step, int) and not isinstance(step, bool) else None


def _writable(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _readable(value: Any) -> Any:
    return _STRINGS.get(value, value) if isinstance(value, str) else value
