"""Times and events of a run, kept beside the data and never part of it.

Each log writes files of its own, runs/<run>/<host>-<process>-<log>-<n>.jsonl: one JSON object
a line, with "time" in seconds since the epoch and "event". A process may have several logs.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import uuid
from typing import Any

from cache.format import RUNS
from cache.storage import Store

# The event of an element (a part or a shard) that could not be done.
FAILED = "failed"
# Lines in a file: object storage cannot append, so a file is written anew for every line.
_LINES = 100


class RunLog:
    """Writes events of one run; safe to use from threads."""

    def __init__(self, store: Store, run: str):
        self._store = store
        self._prefix = f"{RUNS}/{run}/{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._lines: list[str] = []
        self._files = 0
        self._lock = threading.Lock()

    def write(self, event: str, **details: Any) -> None:
        """Adds one event; it is on storage when this returns."""
        line = json.dumps({"time": round(time.time(), 3), "event": event, **details})
        with self._lock:
            self._lines.append(line)
            key = f"{self._prefix}-{self._files}.jsonl"
            self._store.write(key, ("\n".join(self._lines) + "\n").encode())
            if len(self._lines) >= _LINES:
                self._lines, self._files = [], self._files + 1


def read_events(store: Store, run: str | None = None) -> list[dict[str, Any]]:
    """Events of one run, or of all runs, by time. Lines that are no event are left out."""
    folder = RUNS if run is None else f"{RUNS}/{run}"
    keys = [f"{folder}/{name}" for name in store.list(folder) if name.endswith(".jsonl")]
    lines = [line for data in store.read_many(keys) for line in (data or b"").splitlines()]
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        known = isinstance(event, dict) and isinstance(event.get("event"), str)
        if known and isinstance(event.get("time"), int | float):
            events.append(event)
    return sorted(events, key=lambda event: event["time"])
