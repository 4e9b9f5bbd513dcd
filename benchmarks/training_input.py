"""Sections of read.py: the Grain input of training, on files and on object storage.

The readers run in processes of their own; each prints one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import synthetic
from common import Finding, Goal, ratio

import cache
from cache.format import Encoding
from student.batches import BatchSettings
from student.input import InputSettings, TrainingInput

BATCH = 32
_HERE = Path(__file__).resolve().parent

# Each script gets the cache and its numbers as words.
_START = """
import json, sys, time
import numpy as np, psutil
import cache
from student.batches import BatchSettings, read_batch
from student.input import InputSettings, TrainingInput

location, *numbers = sys.argv[1:]
numbers = [int(number) for number in numbers]

def settings(opened, batch, block=1):
    reading = BatchSettings(most_id=opened.encoding.vocabulary)
    return InputSettings(reading, batch, 1, 0, block=block)

"""
_LOADER = (
    _START
    + """
batch, rounds = numbers
opened = cache.open(location)
rows = np.arange(len(opened))
fields = ("tokens", "segments", "label_mask", "label_logprobs", "target_ids", "target_logprobs",
          "exact_counts", "tail_logprobs", "entropy")
process = psutil.Process()
before = process.memory_info().rss
most, ours, bare = 0, [], []

def loader():
    global most
    with TrainingInput(opened, rows, settings(opened, batch)) as source:
        for each in source:
            most = max(most, process.memory_info().rss)

def read():
    with TrainingInput(opened, rows, settings(opened, batch)) as source:
        order = [source.rows_of(step) for step in range(source.steps)]
    for indices in order:
        opened.rows(indices, fields)

one = read_batch(opened, settings(opened, batch).reading, rows[:batch])
held = sum(np.asarray(x).nbytes for x in [*one[:-1], *one.targets])
loader(), read()
for turn in range(rounds):
    sides = [(loader, ours), (read, bare)]
    for side, seconds in sides if turn % 2 == 0 else sides[::-1]:
        start = time.perf_counter()
        side()
        seconds.append(time.perf_counter() - start)
print(json.dumps({"loader": ours, "bare": bare, "above": most - before, "batch": held,
                  "rows": len(opened)}))
"""
)
_FIRST = (
    _START
    + """
from cache.summary import summary
(batch,) = numbers
start = time.perf_counter()
opened = cache.open(location)
done = time.perf_counter()
view = summary(location, files=False)
seen = time.perf_counter()
with TrainingInput(opened, np.arange(len(opened)), settings(opened, batch)) as source:
    first = next(source)
end = time.perf_counter()
assert len(first.rows) == batch and view["shards"]["total"] == opened.manifest.shards
print(json.dumps({"open": done - start, "summary": seen - done, "batch": end - seen}))
"""
)
_REMOTE = (
    _START
    + """
batch, block, steps = numbers
opened = cache.open(location)
with TrainingInput(opened, np.arange(len(opened)), settings(opened, batch, block)) as source:
    # Not those that were read ahead while the threads started.
    for _ in range(8):
        next(source)
    start = time.perf_counter()
    for _ in range(steps):
        next(source)
    seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "rows": steps * batch}))
"""
)


def _run(script: str, location: Path | str, *numbers: int, **environment: str) -> dict[str, Any]:
    words = [sys.executable, "-c", script, str(location), *map(str, numbers)]
    done = subprocess.run(
        words, check=True, capture_output=True, text=True, env={**os.environ, **environment}
    )
    return json.loads(done.stdout)


def loader(quick: bool, folder: Path) -> list[Finding]:
    """The Grain input of training beside reading the same rows in the same order, no Grain."""
    location = folder / "cache"
    synthetic.write_cache(location, 1 if quick else 8)
    found = _run(_LOADER, location, BATCH, 1 if quick else 5)
    rates = [found["rows"] / statistics.median(found[side]) for side in ("loader", "bare")]
    # What the input holds: batches read ahead, those being read, the one handed out.
    held = 7 * found["batch"]
    above = (found["above"] - held) / 2**20
    return [
        Finding(
            "loader",
            f"an epoch in batches of {BATCH} shuffled rows, all that training needs",
            f"`TrainingInput` {rates[0]:,.0f} rows/s",
            f"`cache.rows` in a loop {rates[1]:,.0f} rows/s",
            ratio(found["bare"], found["loader"]),
            unit="× as fast",
            goal=Goal("at least", 0.85),
            details=found,
        ),
        Finding(
            "loader",
            "resident memory of its process, at most",
            f"{found['above'] / 2**20:.0f} MiB above an open cache",
            f"seven batches {held / 2**20:.0f} MiB",
            above,
            unit="MiB more",
            goal=Goal("at most", 300),
        ),
    ]


def first(quick: bool, folder: Path) -> list[Finding]:
    """From nothing to the first batch of a cache of 10,000 shards: files, and an S3 server."""
    shards = 200 if quick else 10_000
    encoding = replace(synthetic.ENCODING, rows_per_shard=8)
    location = folder / "cache"
    _write_first_shards(location, shards, encoding)
    findings = []
    rounds = 2 if quick else 5
    for title, goal, address, environment in _places(location):
        with environment as variables:
            found = [_run(_FIRST, address, BATCH, **variables) for _ in range(rounds)]
        seconds = [sum(each.values()) for each in found]
        parts = {
            name: statistics.median(each[name] for each in found)
            for name in ("open", "summary", "batch")
        }
        findings.append(
            Finding(
                "first",
                f"{shards:,} shards, {title}: open, summary, first batch of {BATCH} random rows",
                ", ".join(f"{name} {value:.2f} s" for name, value in parts.items()),
                "",
                statistics.median(seconds),
                unit="s",
                goal=Goal("at most", goal),
                details={"runs": found},
            )
        )
    return findings


def remote(quick: bool, folder: Path) -> list[Finding]:
    """Training's input from an S3 server 30 ms away: random rows, blocks of rows, a local copy."""
    encoding = replace(synthetic.ENCODING, rows_per_shard=64)
    location = folder / "cache"
    synthetic.write_cache(location, 8 if quick else 32, encoding)
    steps = 4 if quick else 40
    findings = []
    base = 0.0
    for block in (1, 8, 32):
        with _slow_server(location, 30) as (variables, requests):
            found = _run(_REMOTE, "s3://bucket", BATCH, block, steps, **variables)
            asked = requests()
        rate = found["rows"] / found["seconds"]
        base = base or rate
        per_batch = asked / (steps + 8)
        findings.append(
            Finding(
                "remote",
                f"batches of {BATCH} rows, 30 ms away, "
                + ("single rows" if block == 1 else f"--shuffle-block {block}"),
                f"{rate:,.0f} rows/s, {per_batch:.0f} requests a batch",
                "" if block == 1 else f"single rows {base:,.0f} rows/s",
                rate / base,
                unit="× as fast",
                details={**found, "requests": asked},
            )
        )
    return findings


def _places(
    location: Path,
) -> Iterator[tuple[str, float, str, AbstractContextManager[dict[str, str]]]]:
    yield "files", 1.0, str(location), nullcontext({})
    yield "S3 server on this machine", 3.0, "s3://bucket", _server_alone(location, 0)
    yield "S3 server 30 ms away", 3.0, "s3://bucket", _server_alone(location, 30)


@contextmanager
def _server_alone(location: Path, milliseconds: int) -> Iterator[dict[str, str]]:
    with _slow_server(location, milliseconds) as (variables, _):
        yield variables


@contextmanager
def _slow_server(
    location: Path, milliseconds: int
) -> Iterator[tuple[dict[str, str], Callable[[], int]]]:
    """An S3 server of a folder: what points a process to it, and a counter of requests."""
    words = [sys.executable, str(_HERE / "slow_s3.py"), str(location), str(milliseconds)]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"

        def requests() -> int:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"{endpoint}/_requests") as response:
                return int(response.read())

        yield (
            {
                "AWS_ENDPOINT_URL_S3": endpoint,
                "AWS_REGION": "us-east-1",
                "AWS_NO_SIGN_REQUEST": "1",
                "no_proxy": "127.0.0.1",
                "NO_PROXY": "127.0.0.1",
            },
            requests,
        )
    finally:
        server.terminate()
        server.wait()


def _write_first_shards(location: Path, shards: int, encoding: Encoding) -> None:
    """A cache of many shards, of which those are there that the first batches lie in."""

    def needed(opened: cache.Cache) -> list[int]:
        settings = InputSettings(BatchSettings(most_id=encoding.vocabulary), BATCH, 1, 0)
        with TrainingInput(opened, np.arange(len(opened)), settings) as source:
            # Batches that are read ahead included.
            rows = np.concatenate([source.rows_of(step) for step in range(min(12, source.steps))])
        return np.unique(rows // encoding.rows_per_shard).tolist()

    synthetic.write_some_shards(location, shards, encoding, needed)
