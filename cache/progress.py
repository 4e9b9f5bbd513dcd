"""Progress of long work, counted from what is done, so that it works wherever it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from cache.visible import one_line, say, unheard, visible

# Seconds between counts, and between lines where there is no terminal to draw on.
_COUNT, _LOG = 0.5, 10.0
# Counting takes at most one in so many seconds.
_SHARE = 50


def describe(
    done: int,
    total: int,
    since: tuple[int, float],
    now: float,
    tokens: float,
    unit: tuple[int, str] = (1, ""),
) -> str:
    """Rate and time left.

    Args:
      done, total: elements done, in earlier runs too, and in all.
      since: elements done, and the time, from which on the rate counts: the first that was
        done in this run, so that loading and compiling are no part of it.
      now: the time, seconds.
      tokens: mean tokens of an element, or 0 when that is no measure of the work.
      unit: elements in what the rate counts, and the name of that.
    """
    fresh, seconds = done - since[0], now - since[1]
    if fresh <= 0 or seconds <= 0:
        return "measuring the rate"
    rate = fresh / seconds
    counted = f"{rate / unit[0]:,.1f} {unit[1]}".rstrip()
    speed = f"{rate * tokens:,.0f} tokens/s" if tokens else f"{counted}/s"
    return f"{speed}, {clock((total - done) / rate)} left"


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    tail = f"{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
    return f"{hours}:{tail}" if hours else tail


class Line:
    """One line of progress on standard error; a context manager.

    A terminal shows it live; anything else gets a line every 10 s, and the last.
    """

    def __init__(self, title: str, done: int, total: int, text: str = "starting"):
        """Prepares the line.

        Args:
          title: what is being done.
          done, total: elements done when it starts, and in all.
          text: what to say at the start.
        """
        self._title, self._total = one_line(title), total
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[text]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(
            self._title, total=total, completed=done, text=one_line(text)
        )
        self._shown = time.monotonic()

    def __enter__(self) -> Line:
        with unheard():
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        with unheard():
            self._progress.stop()

    def show(self, done: int, text: str, last: bool = False) -> None:
        """Elements done, in earlier runs too, and what to say of it; the last is always shown."""
        text = one_line(text)
        with unheard():
            self._progress.update(self._task, completed=done, text=text)
        now = time.monotonic()
        if not self._console.is_terminal and (last or now - self._shown >= _LOG):
            self._shown = now
            say(f"{self._title}: {done}/{self._total}, {text}")

    def say(self, text: str) -> None:
        """Writes lines that stay; a live line goes on below them."""
        if self._console.is_terminal:
            # Text, in which no markup and no name of an emoji is replaced.
            with unheard():
                self._console.print(Text(visible(text)), soft_wrap=True)
        else:
            say(text)


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
    line = Line(title, before, total)
    stop = threading.Event()
    since = start = (before, time.monotonic())

    def report(last: bool = False) -> None:
        nonlocal since
        done, now = count(), time.monotonic()
        if since is start and done > before:
            since = (done, now)
        line.show(done, describe(done, total, start if last else since, now, tokens), last)

    def loop() -> None:
        pause = _COUNT
        while not stop.wait(pause):
            began = time.monotonic()
            report()
            # Counting lists a folder, which takes long on object storage.
            pause = max(_COUNT, _SHARE * (time.monotonic() - began))

    thread = threading.Thread(target=loop, name="progress", daemon=True)
    with line:
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            report(last=True)


@contextmanager
def counted(title: str, unit: tuple[int, str] = (1, "")) -> Iterator[Callable[[int, int], None]]:
    """A function to be called with (elements done, in all), which shows them on standard error.

    Where there is no terminal, work that takes less than 10 s shows nothing. `unit`: elements in
    what is shown, and the name of that, such as (1_000_000, "MB").
    """
    with ExitStack() as stack:
        line: Line | None = None
        since = (0, time.monotonic())

        def report(done: int, total: int) -> None:
            nonlocal line, since
            now = time.monotonic()
            if line is None:
                line = stack.enter_context(Line(title, done // unit[0], total // unit[0]))
                since = (done, now)
            line.show(done // unit[0], describe(done, total, since, now, 0.0, unit))

        yield report
