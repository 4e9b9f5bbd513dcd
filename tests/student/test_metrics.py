"""JSON lines of each step: none missing, repeats marked, whatever happened to the process."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from student.errors import RunError
from student.metrics import MetricsFile, read_metrics


def lines(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_bytes().splitlines()]


_CRASH = """
import os, sys
from student.metrics import MetricsFile
metrics = MetricsFile(sys.argv[1])
for step in range(1, 6):
    metrics.write(step, {"loss": 1 / step})
os.kill(os.getpid(), 9)
"""


def test_a_crash_at_5_a_checkpoint_at_3_resumed_to_6(tmp_path):
    path = tmp_path / "metrics.jsonl"
    crashed = subprocess.run([sys.executable, "-c", _CRASH, str(path)], check=False)
    assert crashed.returncode == -9
    with MetricsFile(path) as metrics:
        for step in range(4, 7):
            metrics.write(step, {"loss": 10 / step})
    written = lines(path)
    assert [line["step"] for line in written] == [1, 2, 3, 4, 5, 4, 5, 6]
    assert [line.get("repeat", False) for line in written] == [False] * 5 + [True, True, False]
    read = read_metrics(path)
    assert [line["step"] for line in read] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in read] == [1, 1 / 2, 1 / 3, 10 / 4, 10 / 5, 10 / 6]


def test_a_line_is_there_when_write_returns(tmp_path):
    with MetricsFile(tmp_path / "m.jsonl") as metrics:
        metrics.write(1, {"loss": 2.0})
        assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "loss": 2.0}]


def test_numbers_that_json_has_not(tmp_path):
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32(np.nan), "e": 1e-40}
    with MetricsFile(tmp_path / "m.jsonl") as metrics:
        metrics.write(1, {**values, "f": np.float32(0.5), "g": np.int32(3), "h": None})
    assert lines(tmp_path / "m.jsonl") == [
        {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": "NaN", "e": 1e-40,
         "f": 0.5, "g": 3, "h": None}
    ]  # fmt: skip
    (read,) = read_metrics(tmp_path / "m.jsonl")
    assert math.isnan(read["a"])
    assert math.isnan(read["d"])
    assert (read["b"], read["c"]) == (math.inf, -math.inf)


@pytest.mark.parametrize(
    "tail", [b'{"step": 3, "lo', b'{"step": 3, "loss": 1.0', b"\0" * 50, b"\0\0\n\0\n", b"3\n"]
)
def test_a_half_written_end_is_cut_off(tmp_path, tail):
    path = tmp_path / "m.jsonl"
    with MetricsFile(path) as metrics:
        metrics.write(1, {"loss": 1.0})
        metrics.write(2, {"loss": 2.0})
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    with MetricsFile(path) as metrics:
        assert path.read_bytes() == whole
        metrics.write(3, {"loss": 3.0})
    assert lines(path) == [{"step": step, "loss": float(step)} for step in (1, 2, 3)]


def test_a_whole_line_without_its_newline_is_kept(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 1.0}')
    with MetricsFile(path) as metrics:
        metrics.write(1, {"loss": 1.0})
    assert lines(path) == [
        {"step": 1, "loss": 1.0},
        {"step": 1, "loss": 1.0, "repeat": True},
    ]


def test_damage_in_the_middle_is_named_and_hinders_no_training(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st\xff\xff: 2}\n{"step": 3}\n')
    with pytest.raises(RunError, match=r"m\.jsonl, line 2: expected a JSON object"):
        read_metrics(path)
    with MetricsFile(path) as metrics:
        metrics.write(3, {})
    assert path.read_bytes().endswith(b'{"step": 3}\n{"step": 3, "repeat": true}\n')


def test_no_file_has_no_lines(tmp_path):
    assert read_metrics(tmp_path / "none.jsonl") == []
