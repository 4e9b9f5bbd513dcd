"""Progress of a capture, counted from receipts, so that it works on every runner."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

# Seconds between counts, and between lines where there is no terminal to draw on.
_COUNT, _LOG = 0.5, 10.0


def describe(done: int, total: int, since: tuple[int, float], now: float, tokens: float) -> str:
    """Rate and time left.

    Args:
      done, total: elements done, in earlier runs too, and in all.
      since: elements done, and the time, from which on the rate counts: the first that was
        done in this run, so that loading and compiling are no part of it.
      now: the time, seconds.
      tokens: mean tokens of an element, or 0 when that is no measure of the work.
    """
    fresh, seconds = done - since[0], now - since[1]
    if fresh <= 0 or seconds <= 0:
        return "measuring the rate"
    rate = fresh / seconds
    speed = f"{rate * tokens:,.0f} tokens/s" if tokens else f"{rate:,.1f}/s"
    return f"{speed}, {clock((total - done) / rate)} left"


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

    since = start = (before, time.monotonic())
    shown = start[1]

    def report(now: float, last: bool = False) -> None:
        nonlocal since, shown
        done = count()
        if since is start and done > before:
            since = (done, now)
        rate = describe(done, total, start if last else since, now, tokens)
        progress.update(task, completed=done, rate=rate)
        if not console.is_terminal and (last or now - shown >= _LOG):
            shown = now
            sys.stderr.write(f"{title}: {done}/{total}, {rate}\n")
            sys.stderr.flush()

    def loop() -> None:
        while not stop.wait(_COUNT):
            report(time.monotonic())

    thread = threading.Thread(target=loop, name="progress", daemon=True)
    with progress:
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            report(time.monotonic(), last=True)
