"""Progress of a capture, counted from receipts, so that it works on every runner."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

# Seconds between counts, on a terminal and elsewhere (where each one is a line of a log).
_TERMINAL, _LOG = 0.5, 10.0


def describe(done: int, before: int, total: int, seconds: float, tokens: float) -> str:
    """Rate and time left, from the elements done in this run.

    Args:
      done: elements done, in earlier runs too.
      before: elements that were done when this run began.
      total: elements in all.
      seconds: since this run began.
      tokens: mean tokens of an element, or 0 when that is no measure of the work.
    """
    fresh = done - before
    if not fresh or seconds <= 0:
        return "measuring the rate"
    rate = fresh / seconds
    left = clock((total - done) / rate)
    speed = f"{rate * tokens:,.0f} tokens/s" if tokens else f"{rate:,.1f}/s"
    return f"{speed}, {left} left"


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    tail = f"{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
    return f"{hours}:{tail}" if hours else tail


@contextmanager
def watch(
    title: str, count: Callable[[], int], before: int, total: int, tokens: float = 0.0
) -> Iterator[None]:
    """Shows progress on standard error while the body runs.

    Args:
      title: what is being done.
      count: number of elements done so far, in earlier runs too; called from a thread.
      before: elements done when the body starts.
      total: elements in all.
      tokens: mean tokens of an element, for the rate.
    """
    console = Console(stderr=True)
    start = time.monotonic()
    stop = threading.Event()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    task = progress.add_task(title, total=total, completed=before, rate="starting")

    def report() -> None:
        done = count()
        rate = describe(done, before, total, time.monotonic() - start, tokens)
        progress.update(task, completed=done, rate=rate)
        if not console.is_terminal:
            sys.stderr.write(f"{title}: {done}/{total}, {rate}\n")
            sys.stderr.flush()

    def loop() -> None:
        while not stop.wait(_TERMINAL if console.is_terminal else _LOG):
            report()

    thread = threading.Thread(target=loop, name="progress", daemon=True)
    with progress:
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            report()
