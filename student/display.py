"""What training shows: a live line on standard error, and tables of evaluations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from cache.progress import Line, describe

_MISSING = "–"


@dataclass(frozen=True)
class Moment:
    """A step that was just done.

    Attributes:
      step: counted from 1.
      epoch: counted from 1.
      loss: what was minimised.
      cross_entropy: of the labels, nats.
      distillation: the teacher's part, nats; None if only labels are trained on.
      learning_rate: of this step.
      tokens: labels trained on in this step.
    """

    step: int
    epoch: int
    loss: float
    cross_entropy: float
    distillation: float | None
    learning_rate: float
    tokens: int


def line(moment: Moment, epochs: int, rate: str) -> str:
    """One step in words; `rate` ends it: tokens/s and time left."""
    parts = [f"CE {moment.cross_entropy:.3f}"]
    if moment.distillation is not None:
        parts.append(f"KD {moment.distillation:.3f}")
    return (
        f"epoch {moment.epoch}/{epochs}, loss {moment.loss:.3f} ({', '.join(parts)}), "
        f"learning rate {moment.learning_rate:.2g}, {rate}"
    )


class Display:
    """Progress of training on standard error; a context manager.

    The rate counts from the end of the session's first step, so that compiling is no part of
    it; evaluations and checkpoints are.
    """

    def __init__(self, total: int, epochs: int, before: int = 0, title: str = "Training"):
        """Prepares the line.

        Args:
          total: steps of the whole run.
          epochs: of the whole run.
          before: steps done in earlier sessions.
          title: what is being done.
        """
        self._line = Line(title, before, total)
        self._total, self._epochs = total, epochs
        self._since: tuple[int, float] | None = None
        self._tokens = 0
        self._last: tuple[int, str] | None = None

    def __enter__(self) -> Display:
        self._line.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._last is not None:
            self._line.show(*self._last, last=True)
        self._line.__exit__(kind, error, trace)

    def update(self, moment: Moment) -> None:
        """Shows a step, if it is time for it."""
        now = time.monotonic()
        if self._since is None:
            self._since = (moment.step, now)
        else:
            self._tokens += moment.tokens
        mean = self._tokens / max(moment.step - self._since[0], 1)
        rate = describe(moment.step, self._total, self._since, now, mean)
        self._last = (moment.step, line(moment, self._epochs, rate))
        self._line.show(*self._last)

    def say(self, text: str) -> None:
        """Writes lines that stay, such as a warning or a table."""
        self._line.say(text)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Evaluations side by side, one a line.

    Args:
      rows: any of name, epoch, step, cross_entropy (nats), perplexity, kl (nats), top1, top5,
        ece (shares), tokens_per_second. Other fields are left out, and so are columns that no
        row has; a value that only some rows lack, None or not finite, is a dash.
    """
    columns = [column for column in _COLUMNS if any(row.get(column[0]) is not None for row in rows)]
    lines = [[title for _, title, _ in columns]]
    for row in rows:
        lines.append([_cell(row.get(key), form) for key, _, form in columns])
    widths = [max(len(cells[i]) for cells in lines) for i in range(len(columns))]
    # Names to the left, numbers to the right.
    left = [key == "name" for key, _, _ in columns]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(cells, widths, left, strict=True)
        ).rstrip()
        for cells in lines
    )


def _cell(value: Any, form: Callable[[Any], str]) -> str:
    missing = value is None or (isinstance(value, float) and not math.isfinite(value))
    return _MISSING if missing else form(value)


def _nats(value: int | float) -> str:
    return f"{value:.3f}"


def _percent(value: int | float) -> str:
    return f"{100 * value:.1f} %"


def _whole(value: int | float) -> str:
    return f"{value:,.0f}"


def _perplexity(value: int | float) -> str:
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("name", "student", str),
    ("epoch", "epoch", lambda value: f"{value:g}"),
    ("step", "step", _whole),
    ("cross_entropy", "cross-entropy", _nats),
    ("perplexity", "perplexity", _perplexity),
    ("kl", "KL", _nats),
    ("top1", "top-1", _percent),
    ("top5", "top-5", _percent),
    ("ece", "ECE", _percent),
    ("tokens_per_second", "tokens/s", _whole),
)
