"""How fast a cache is read, beside other stores of the same rows; one process, warm page cache.

    python benchmarks/read.py [rows loader open first memory remote] [--quick] [--json FILE]

Takes about eight minutes and 3 GB in the temporary folder. No teacher is needed: the cache is
synthetic, with values spread as a real one's.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import stores
import synthetic
import training_input
from common import Finding, Goal, in_turn, main, ratio

import cache
from cache.summary import summary

BATCH = 32
# Batches read by a side in one round.
BATCHES = 16


def rows(quick: bool, folder: Path) -> list[Finding]:
    """Shuffled batches: `Cache.rows` and other readers of the same rows, in turn."""
    shards, rounds = (1, 2) if quick else (16, 15)
    location = folder / "cache"
    synthetic.write_cache(location, shards)
    opened = cache.open(location)
    readers: dict[str, stores.Reader] = {
        "cache.rows": opened.rows,
        "TensorStore": stores.tensorstore(location, opened.fields),
    }
    sizes = {"cache.rows": stores.bytes_on_disk(location)}
    decoded = opened.rows(slice(None))
    for name, write in _OTHERS.items():
        place = folder / name
        place.mkdir()
        readers[name] = write(place, decoded)
        sizes[name] = stores.bytes_on_disk(place)
    batches = _shuffled(len(opened), 64)
    for name, read in readers.items():
        _check_equal(name, read(batches[0]), decoded, batches[0])
    del decoded

    counts = {name: 1 if name in _SLOW else BATCHES for name in readers}
    sides = {name: _reading(read, batches, counts[name]) for name, read in readers.items()}
    seconds = {
        name: [value / counts[name] for value in times]
        for name, times in in_turn(sides, rounds).items()
    }
    per_batch = {name: statistics.median(times) for name, times in seconds.items()}
    encoding, tokens = opened.encoding, BATCH * opened.encoding.length
    ours = per_batch["cache.rows"]
    what = f"{BATCH} shuffled rows of {encoding.length}, k = {encoding.k}, of {len(opened):,}"
    findings = []
    for name in list(readers)[1:]:
        size = sizes.get(name, sizes["cache.rows"]) / (len(opened) * encoding.length)
        findings.append(
            Finding(
                "rows",
                what,
                f"`cache.rows` {BATCH / ours:,.0f} rows/s, {tokens / ours / 1e6:.2f} M tokens/s",
                f"{name} {BATCH / per_batch[name]:,.0f} rows/s, {size:.0f} bytes/token",
                ratio(seconds[name], seconds["cache.rows"]),
                unit="× as fast",
                goal=Goal("at least", 0.9) if name == "TensorStore" else None,
                details={"seconds_per_batch": seconds[name], "ours": seconds["cache.rows"]},
            )
        )
    return findings


_OTHERS = {
    "np.memmap": stores.memory_map,
    "ArrayRecord, zstd": lambda place, arrays: stores.array_record(place, arrays, "zstd:1"),
    "ArrayRecord, raw": lambda place, arrays: stores.array_record(place, arrays, "uncompressed"),
    "Parquet, row groups of 1": lambda place, arrays: stores.parquet_rows(place, arrays, 1),
    "Parquet, row groups of 256": lambda place, arrays: stores.parquet_rows(place, arrays, 256),
}
# Sides that read one batch a round: each decodes nearly the whole file for it.
_SLOW = ("Parquet, row groups of 256",)


def _shuffled(rows: int, least: int) -> list[np.ndarray]:
    """At least so many batches of row numbers: epochs in random order, the last batch dropped."""
    random = np.random.default_rng(0)
    batches: list[np.ndarray] = []
    while len(batches) < least:
        order = random.permutation(rows)
        batches += np.split(order[: rows // BATCH * BATCH], rows // BATCH)
    return batches


def _check_equal(
    name: str, found: stores.Arrays, decoded: stores.Arrays, indices: np.ndarray
) -> None:
    """Every store must give the same bytes, or the comparison says nothing."""
    for field, values in decoded.items():
        expected = values[indices]
        if found[field].dtype != expected.dtype or found[field].tobytes() != expected.tobytes():
            raise SystemExit(f"{name} reads other values of {field} than were written")


def _reading(read: stores.Reader, batches: list[np.ndarray], count: int) -> Callable[[], None]:
    """Reads the next `count` batches each time it is called."""
    following = itertools.cycle(batches)

    def run() -> None:
        for batch in itertools.islice(following, count):
            read(batch)

    return run


def open_manifest(quick: bool, folder: Path) -> list[Finding]:
    """Opening and summarising a cache of 10,000 shards."""
    shards = 200 if quick else 10_000
    location = folder / "cache"
    synthetic.write_manifest_alone(location, shards)
    code = (
        "import sys, time, cache; start = time.perf_counter(); cache.open(sys.argv[1]); "
        "print(time.perf_counter() - start)"
    )
    words = [sys.executable, "-c", code, str(location)]
    fresh = [
        float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        for _ in range(2 if quick else 5)
    ]
    within = in_turn({"open": lambda: cache.open(location)}, 5)["open"]
    looked = in_turn({"summary": lambda: summary(str(location))}, 2 if quick else 3)["summary"]
    size = (location / "manifest.json").stat().st_size / 2**20
    what = f"manifest of {shards:,} shards ({size:.1f} MiB)"
    return [
        Finding(
            "open",
            f"{what}: `cache.open`, {title}",
            f"{statistics.median(seconds):.3f} s",
            "",
            statistics.median(seconds),
            unit="s",
            goal=Goal("at most", 1.0),
            details={"seconds": seconds},
        )
        for title, seconds in (("first in a process", fresh), ("again", within))
    ] + [
        Finding(
            "open",
            f"{what}: `stillroom inspect`, with a listing of {shards * 11:,} files",
            f"{statistics.median(looked):.2f} s",
            "",
            statistics.median(looked),
            unit="s",
            details={"seconds": looked},
        )
    ]


_READ_AND_WATCH = """
import json, sys
import numpy as np, psutil
import cache

process, location, batch, count = psutil.Process(), sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
opened = cache.open(location)
random = np.random.default_rng(0)
before = process.memory_info().rss
most = held = 0
for _ in range(count):
    values = opened.rows(random.choice(len(opened), batch, replace=False))
    most = max(most, process.memory_info().rss)
    held = sum(array.nbytes for array in values.values())
    del values
print(json.dumps({"above": most - before, "batch": held}))
"""


def memory(quick: bool, folder: Path) -> list[Finding]:
    """Resident memory of a process while it reads shuffled batches."""
    location = folder / "cache"
    synthetic.write_cache(location, 1 if quick else 4)
    words = [sys.executable, "-c", _READ_AND_WATCH, str(location), str(BATCH)]
    words.append("20" if quick else "300")
    result = subprocess.run(words, check=True, capture_output=True, text=True)
    found = json.loads(result.stdout)
    return [
        Finding(
            "memory",
            f"resident memory of a process that reads and drops batches of {BATCH}",
            f"{found['above'] / 2**20:.0f} MiB above an open cache",
            f"a batch itself {found['batch'] / 2**20:.1f} MiB",
            (found["above"] - found["batch"]) / 2**20,
            unit="MiB more",
            details=found,
        )
    ]


if __name__ == "__main__":
    sections = {
        "rows": rows,
        "loader": training_input.loader,
        "open": open_manifest,
        "first": training_input.first,
        "memory": memory,
        "remote": training_input.remote,
    }
    main("read", sections)
