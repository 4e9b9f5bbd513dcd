"""What `compare` found: a table, a plot, JSON, and a recommendation in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelines.compare import Comparison, Recommendation
from pipelines.compare_targets import Measured
from pipelines.errors import CaptureError

_EXPLAINED = """\
bias², variance: squared error of one label's gradient with respect to the student's logits.
step: of the mean gradient of {batch:,} labels; variance averages out, the bias that labels share
does not. TV, KL: of the mean reconstruction; one draw: expected TV of a single sample.
mass: of the exact entries at the temperature."""
# Longer tables show only settings that nothing cheaper beats.
_MOST = 20


def render(found: Comparison, renormalise: bool = False, whole: bool = False) -> str:
    """The table and its notes.

    Args:
      renormalise: whether to show that objective too.
      whole: whether to show every setting, and not only the `best` where there are many.
    """
    possible = [x for x in found.measured if renormalise or x.objective != "renormalise"]
    shown, left = possible, []
    if not whole and len(possible) > _MOST:
        kept = {item.setting for item in best(possible, found.batch)}
        shown = [item for item in possible if item.setting in kept]
        left = [
            f"{len(possible) - len(shown)} more lines are left out: others have no more bytes and "
            "less error, of one label and of a step. --all shows them."
        ]
    temperatures = list(found.measured[0].mass)
    head = ["setting", "bytes", "bias²", "variance", f"step of {found.batch:,}"]
    head += ["TV", "KL", "one draw", *(f"mass T={t:g}" for t in temperatures)]
    lines = [head]
    for item in shown:
        name = item.setting.name
        lines.append(
            [
                f"{name}, renormalised" if item.objective == "renormalise" else name,
                f"{item.bytes:.1f}",
                _small(item.bias2),
                _small(item.variance),
                _small(item.step_error(found.batch)),
                _percent(item.total_variation),
                "infinite" if math.isinf(item.kl) else f"{item.kl:.4f}",
                "–" if math.isnan(item.draw_distance) else _percent(item.draw_distance),
                *(_percent(item.mass[t]) for t in temperatures),
            ]
        )
    widths = [max(len(cells[place]) for cells in lines) for place in range(len(head))]
    table = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in lines
    ]
    sample = (
        f"{found.rows:,} rows, {found.tokens:,} tokens, {found.labels:,} labels; student: "
        f"{found.student}."
    )
    explained = _EXPLAINED.format(batch=found.batch)
    return "\n".join([*table, *left, "", sample, explained, *found.notes])


def best(measured: Sequence[Measured], batch: int) -> list[Measured]:
    """Those that none of as few bytes beats, be it in a label's or in a step's gradient error.

    Whatever `compare.recommend` takes for any budget is among them. Cheapest first.
    """
    kept: list[Measured] = []
    label = step = math.inf
    for item in sorted(measured, key=lambda x: (x.bytes, x.step_error(batch), x.error)):
        if item.error < label or item.step_error(batch) < step:
            kept.append(item)
        label, step = min(label, item.error), min(step, item.step_error(batch))
    return kept


def render_recommendation(found: Recommendation, batch: int) -> str:
    """The recommendation in words, with the options that capture so."""
    budget = f"{found.budget:g} bytes per token"
    if found.step is None or found.label is None:
        return (
            f"No setting takes at most {budget}: the smallest, {found.least.setting.name}, takes "
            f"{found.least.bytes:.1f}."
        )
    lines = [
        f"For at most {budget}: {_told(found.step, batch)}.",
        f"  stillroom precompute … {found.step.setting.words}",
    ]
    if found.label != found.step:
        lines += [
            f"A single label's gradient has the least error with {_told(found.label, batch)};",
            "but a step takes the mean over many labels, in which variance shrinks and the bias "
            "that labels share stays.",
        ]
    return "\n".join(lines)


def _told(item: Measured, batch: int) -> str:
    return (
        f"{item.setting.name} ({item.bytes:.1f} bytes; bias² {_small(item.bias2)}, variance "
        f"{_small(item.variance)}; step of {batch:,}: {_small(item.step_error(batch))})"
    )


def to_json(found: Comparison, recommendation: Recommendation | None) -> dict[str, Any]:
    """Everything measured as JSON values; what is infinite or not known is null."""
    value = {
        "rows": found.rows,
        "tokens": found.tokens,
        "labels": found.labels,
        "student": found.student,
        "batch": found.batch,
        "notes": list(found.notes),
        "settings": [_item(item, found.batch) for item in found.measured],
    }
    if recommendation is not None:
        value["recommendation"] = {
            "budget": recommendation.budget,
            "step": _item_or_none(recommendation.step, found.batch),
            "label": _item_or_none(recommendation.label, found.batch),
        }
    return value


def _item_or_none(item: Measured | None, batch: int) -> dict[str, Any] | None:
    return None if item is None else _item(item, batch)


def _item(item: Measured, batch: int) -> dict[str, Any]:
    values = {
        "setting": {**asdict(item.setting), "name": item.setting.name},
        "options": item.setting.words,
        "objective": item.objective,
        "bytes_per_token": item.bytes,
        "arrays": item.arrays,
        "bias2": item.bias2,
        "variance": item.variance,
        "lasting_bias2": item.lasting,
        "label_error": item.error,
        "step_error": item.step_error(batch),
        "total_variation": item.total_variation,
        "kl": item.kl,
        "draw_total_variation": item.draw_distance,
        "exact_mass": {f"{t:g}": mass for t, mass in item.mass.items()},
    }
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


def check_plot(path: Path) -> None:
    """Refuses a plot that cannot be drawn, before any work is done.

    Raises:
      CaptureError: matplotlib is not installed, or draws no such kind of file.
    """
    figure = _pyplot().figure()
    kinds = sorted(figure.canvas.get_supported_filetypes())
    _pyplot().close(figure)
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise CaptureError(
            f"--plot {path}: the file's name should end with one of {', '.join(kinds)}."
        )


def _pyplot() -> Any:
    """matplotlib's pyplot, drawing into files only."""
    try:
        import matplotlib
    except ImportError as error:
        raise CaptureError(
            "--plot needs matplotlib, which is not installed: `pip install matplotlib`, or leave "
            "out --plot."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(found: Comparison, path: Path) -> None:
    """Error of one label's and of a step's gradient against bytes per token, into a file.

    Raises:
      CaptureError: matplotlib is not installed.
      OSError: the file cannot be written.
    """
    plot = _pyplot()
    figure, panels = plot.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    titles = ("one label's gradient", f"mean gradient of {found.batch:,} labels")
    for axes, title, batch in zip(panels, titles, (1, found.batch), strict=True):
        for name, items in _lines(found.measured).items():
            axes.plot(
                [item.bytes for item in items],
                [item.step_error(batch) for item in items],
                marker="o",
                markersize=3,
                linestyle="-" if name.startswith("sampled") else "--",
                label=name,
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("bytes per token, as stored")
        axes.set_title(title, fontsize="medium")
    panels[0].set_ylabel("squared error (bias² + variance)")
    panels[1].legend(fontsize="x-small")
    figure.savefig(path, dpi=120)
    plot.close(figure)


def _lines(measured: Sequence[Measured]) -> dict[str, list[Measured]]:
    """Settings by objective and rounding, cheapest first."""
    lines: dict[str, list[Measured]] = {}
    for item in sorted(measured, key=lambda item: item.bytes):
        if item.objective != "renormalise":
            kind = "sampled" if item.objective == "sampled" else "exact"
            lines.setdefault(f"{kind}, {item.setting.rounding}", []).append(item)
    return lines


def _small(value: float) -> str:
    return "0" if value == 0 else f"{value:.2e}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"
