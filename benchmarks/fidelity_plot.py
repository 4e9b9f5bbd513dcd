"""The plot of fidelity.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot


@dataclass(frozen=True)
class Point:
    """One encoding: bytes per token, squared error of one label's and of a step's gradient."""

    bytes: float
    label: float
    step: float


def draw_plot(lines: Mapping[str, Sequence[Point]], batch: int, path: Path) -> None:
    """Both errors over bytes per token; names that begin with "ours" are drawn strongly."""
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    titles = ("one label", f"mean of {batch:,} labels")
    for axes, title in zip(panels, titles, strict=True):
        for name, points in lines.items():
            ordered = sorted(points, key=lambda point: point.bytes)
            ours = name.startswith("ours")
            axes.plot(
                [point.bytes for point in ordered],
                [point.label if title == titles[0] else point.step for point in ordered],
                marker="o",
                markersize=4 if ours else 3,
                linewidth=2 if ours else 1,
                linestyle="-" if ours else "--",
                label=name,
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("bytes per token, as stored")
        axes.set_title(title, fontsize="medium")
    panels[0].set_ylabel("squared error of the gradient")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right", fontsize="x-small")
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
