"""A capture small enough to be made hundreds of times: teacher, corpus, options, comparisons."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import cache
from cache.manifest import Manifest
from cache.runlog import read_events
from cache.storage import Store
from pipelines import precompute as precompute_module
from pipelines import transforms
from pipelines.errors import CaptureError
from pipelines.options import PrecomputeOptions
from pipelines.precompute import Outcome, precompute
from pipelines.teacher import Teacher
from tests.models import write_tiny_teacher

# Compiled programs, for this process and those it starts: compiling is most of the time.
_COMPILED = tempfile.mkdtemp(prefix="stillroom-compiled-")
atexit.register(shutil.rmtree, _COMPILED, ignore_errors=True)
_COMPILATION = {
    "jax_compilation_cache_dir": _COMPILED,
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}
for _name, _value in _COMPILATION.items():
    jax.config.update(_name, _value)

_PHRASES = (
    "the teacher reads the corpus once and the student reads what it kept",
    "def score(rows): return [row for row in rows if row]",
    "one two three four five",
    "Zwölf Boxkämpfer jagen Viktor",
    "x = 1\n\ny = 2\n",
    "a",
    "and then the rest of the tail is in the sum of the other entries",
)

# Several parts, at least four shards, a shard that several parts share, a short last one.
SETTINGS: dict[str, Any] = {
    "k": 4,
    "exact": 2,
    "length": 16,
    "micro_batch": 1,
    "chunk": 8,
    "rows_per_shard": 6,
    "documents_per_part": 6,
}


def texts(count: int = 20) -> list[str]:
    """Documents of various lengths, all different; none is empty."""
    return [f"{index} {_PHRASES[index % len(_PHRASES)]}" for index in range(count)]


def write_corpus(path: Path, documents: Iterable[str], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": place, column: text}) for place, text in enumerate(documents)]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def options(folder: Path, out: str | Path = "cache", **changes: Any) -> PrecomputeOptions:
    """Options of a small capture in a folder, whose teacher and corpus are made when missing."""
    if not (folder / "teacher").exists():
        write_tiny_teacher(folder / "teacher")
    if not (folder / "corpus.jsonl").exists():
        write_corpus(folder / "corpus.jsonl", texts())
    settings = dict(SETTINGS)
    if changes.get("tail") == "none":
        del settings["exact"]
    given = {
        "dataset": str(folder / "corpus.jsonl"),
        "teacher": str(folder / "teacher"),
        "out": str(folder / out),
        **settings,
        **changes,
    }
    return PrecomputeOptions(**given)


def capture(folder: Path, out: str | Path = "cache", **changes: Any) -> Outcome:
    return precompute(options(folder, out, **changes))


def share_teachers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Teacher]:
    """Makes captures of this process share compiled teachers, by what decides their targets.

    Compiling takes a hundred times longer than scoring these rows.
    """

    def shared(plan: Any) -> Teacher:
        settings = plan.options
        key = json.dumps(
            [
                plan.manifest.teacher["fingerprint"],
                repr(plan.targets),
                settings.length,
                settings.micro_batch,
                settings.precision,
                settings.shard_teacher,
                plan.holes,
            ]
        )
        if key not in _TEACHERS:
            _TEACHERS[key] = Teacher(plan)
        return _TEACHERS[key]

    monkeypatch.setattr(transforms, "Teacher", shared)
    return _TEACHERS


_TEACHERS: dict[str, Teacher] = {}


def run_without_beam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes captures of this process do their elements one after the other, without Beam.

    Beam takes a second to set up a stage; what a stage does is the same.
    """

    def stage(root: None, dofn: Any, elements: list[int]) -> Any:
        return dofn, elements

    def run(build: Any, settings: Any) -> None:
        dofn, elements = build(None)
        try:
            dofn.setup()
            for element in elements:
                assert list(dofn.process(element)) == [element]
            dofn.finish_bundle()
        except transforms.WorkerError as error:
            raise CaptureError(transforms.user_text(error)) from error
        finally:
            dofn.teardown()

    monkeypatch.setattr(precompute_module, "stage_pipeline", stage)
    monkeypatch.setattr(precompute_module, "run_pipeline", run)


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes captures of this process fast; see the two functions."""
    share_teachers(monkeypatch)
    run_without_beam(monkeypatch)


def captured(folder: Path, out: str = "cache") -> Path:
    """The folder, with a teacher, a corpus and a complete cache."""
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        capture(folder, out)
    return folder


def copy(made: Path, folder: Path) -> Path:
    """A copy, times and all, that a test may change."""
    shutil.copytree(made, folder, copy_function=shutil.copy2)
    return folder


def stored(folder: str | Path, *, data_only: bool = False) -> dict[str, bytes]:
    """Every object of a cache that must be the same in every run, by key.

    With `data_only`, only arrays and receipts: a manifest also says where teacher and
    corpus were found.
    """
    store = Store(folder)
    keys = [key for key in store.list() if not key.startswith("runs/")]
    if data_only:
        keys = [key for key in keys if key.startswith(("arrays/", "receipts/"))]
    return {key: store.read(key) or b"" for key in keys}


def everything(folder: str | Path) -> dict[str, tuple[bytes, int]]:
    """Every file of a folder with its content and time of change."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def scored_shards(folder: str | Path, run: str | None = None) -> list[int]:
    """Shards that were scored and stored, as the logs of the runs tell, sorted."""
    events = read_events(Store(folder), run)
    return sorted(event["shard"] for event in events if event["event"] == "shard")


def runs(folder: str | Path) -> list[str]:
    """Ids of a cache's runs, the oldest first."""
    found = [path for path in (Path(folder) / "runs").iterdir() if path.is_dir()]
    return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)]


def per_document(opened: cache.Cache, field: str) -> dict[int, np.ndarray]:
    """A field's values at the positions with a label, by document, in the document's order.

    The rows that a document fills come in order; what is left over may be in an earlier row.
    """
    rows = opened.rows(slice(None), (field, "documents", "label_mask"))
    full: dict[int, list[np.ndarray]] = {}
    rest: dict[int, list[np.ndarray]] = {}
    for row, mask in enumerate(rows["label_mask"] == 1):
        for document in np.unique(rows["documents"][row][mask]).tolist():
            inside = rows["documents"][row] == document
            pieces = full if inside.all() else rest
            pieces.setdefault(document, []).append(rows[field][row][inside & mask])
    return {
        document: np.concatenate(full.get(document, []) + rest.get(document, []))
        for document in sorted(full.keys() | rest.keys())
    }


def environment(devices: int = 1, **more: str) -> dict[str, str]:
    """What a command is started with: its devices, and what other runs have compiled."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    compiled = {name.upper(): str(value) for name, value in _COMPILATION.items()}
    return {**os.environ, **compiled, "XLA_FLAGS": flags, **more}


def command(words: Sequence[str], devices: int = 1, **more: str) -> subprocess.Popen[str]:
    """Starts the `stillroom` command in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "stillroom", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment(devices, **more),
    )


def command_words(settings: PrecomputeOptions, **changes: Any) -> list[str]:
    """The command line of a capture."""
    words = ["precompute"]
    given = {"dataset": settings.dataset, "teacher": settings.teacher, "out": settings.out}
    names = {**given, **{name: getattr(settings, name) for name in SETTINGS}, **changes}
    for name, value in names.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def with_changes(manifest: Manifest, **changes: Any) -> Manifest:
    """A manifest with other fields."""
    return replace(manifest, **changes)
