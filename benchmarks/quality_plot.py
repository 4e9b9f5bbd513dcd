"""The plot of quality.py."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from recipes import Recipe

matplotlib.use("Agg")

from matplotlib import pyplot


@dataclass(frozen=True)
class Trained:
    """One recipe's students: a held-out KL and cross-entropy for each seed, nats."""

    recipe: Recipe
    bytes: float
    draws: int
    kl: list[float]
    ce: list[float]


def draw_plot(trained: dict[str, Trained], path: Path) -> None:
    """Held-out KL over bytes per token: mean and standard deviation over seeds."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    lines = {
        "sampled tail": lambda x: x.group == "sampled",
        "with replacement": lambda x: x.group == "replacement",
        "exact, rest as one class (bucket)": lambda x: x.objective == "bucket",
        "exact, renormalised": lambda x: x.objective == "renormalise",
    }
    for name, belongs in lines.items():
        chosen = [x for x in trained.values() if belongs(x.recipe)]
        axes.errorbar(
            [x.bytes for x in chosen],
            [statistics.mean(x.kl) for x in chosen],
            yerr=[statistics.stdev(x.kl) if len(x.kl) > 1 else 0.0 for x in chosen],
            marker="o",
            markersize=4,
            capsize=3,
            label=name,
        )
    for name, style in (("hard labels", ":"), ("full distribution", "--")):
        level = statistics.mean(trained[name].kl)
        axes.axhline(level, color="black", linewidth=1, linestyle=style, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("bytes per token, before compression")
    axes.set_ylabel("held-out KL to the teacher, nats")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
