"""What a training step costs, what waits for input, and when a cache has paid for itself.

    python benchmarks/train.py [step wait online] [--quick] [--json FILE]

Takes about a quarter of an hour on two cores. Both sides of every comparison run in turn,
in one process.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import Finding, Goal, library_corpus, main, ratio, smollm2
from dense import make_dense_step
from steps import ALPHA, LENGTH, Side, state_of, states_in_turn, step

import cache
import decoder
import stillroom
from cache.runlog import read_events
from cache.storage import Store
from student.batches import Batch, BatchSettings, read_batch
from student.functions import parameters_of, student_functions
from student.metrics import read_metrics
from student.objectives import choose
from student.options import TrainOptions
from student.prune import drop
from student.step import LossSettings, hidden_states, make_step, place, replicate

# Of SmolLM2's 30 layers, what the student of `wait` and `online` is without.
DROPPED = (9, 18)


def _capture(base: Path, quick: bool) -> cache.Cache:
    """A real cache of SmolLM2's, captured once for all sections."""
    out = base / "cache"
    if not out.exists():
        stillroom.precompute(
            stillroom.PrecomputeOptions(
                dataset=library_corpus(base, 3_000 if quick else 16_000),
                teacher=smollm2(),
                out=str(out),
                length=LENGTH,
                micro_batch=4,
                rows_per_shard=4 if quick else 8,
            )
        )
    return cache.open(out)


def _capture_seconds(opened: cache.Cache) -> tuple[float, float, int]:
    """Seconds of a capture from its first receipt to its end, in all, and tokens of the former."""
    events = read_events(Store(opened.location))
    times = [event["time"] for event in events]
    shards = [event for event in events if event["event"] == "shard"]
    first = min(shards, key=lambda event: event["time"])
    begin, end = opened.manifest.shard_rows(first["shard"])
    segments = opened.rows(slice(None), "segments")["segments"]
    tokens = np.count_nonzero(segments) - np.count_nonzero(segments[begin:end])
    return max(times) - first["time"], max(times) - min(times), int(tokens)


def wait(quick: bool, folder: Path) -> list[Finding]:
    """How long the loop of `train` waits for input, from metrics.jsonl; compiling left out."""
    opened = _capture(folder.parent, quick)
    layers = f"{DROPPED[0]}-{DROPPED[1]}"
    students: list[tuple[str, dict[str, Any]]] = [
        ("preset:nano from scratch", {"student": "preset:nano", "epochs": 1 if quick else 6}),
        (
            f"SmolLM2 without layers {layers}",
            {"student": smollm2(), "drop_layers": layers, "epochs": 1},
        ),
    ]
    findings = []
    for number, (name, chosen) in enumerate(students):
        options = TrainOptions(
            cache=str(opened.location),
            out=str(folder / f"run-{number}"),
            batch=2,
            accumulation=1,
            held_out=2,
            keep=1,
            keep_best=False,
            **chosen,
        )
        trained = stillroom.train(options, say=lambda text: None)
        lines = read_metrics(trained.run / "metrics.jsonl")[1:]
        seconds = [line["tokens"] / line["tokens_per_second"] for line in lines]
        waited = sum(line["input_wait"] * each for line, each in zip(lines, seconds, strict=True))
        findings.append(
            Finding(
                "wait",
                f"`train`, {name}, {len(lines)} steps of 2 rows of {LENGTH}",
                f"{waited * 1e3:.1f} ms waiting for input",
                f"{sum(seconds):.1f} s in all",
                100 * waited / sum(seconds),
                unit="%",
                goal=Goal("at most", 1),
                details={"lines": lines},
            )
        )
    return findings


def online(quick: bool, folder: Path) -> list[Finding]:
    """Distilling from the cache against running the teacher in every step."""
    opened = _capture(folder.parent, quick)
    devices = jax.local_devices()[:1]
    teacher = decoder.load_model(smollm2()).model
    assert isinstance(teacher, decoder.Decoder)
    pruned = drop(teacher, *DROPPED)
    functions, theirs = student_functions(pruned), student_functions(teacher)
    # The student shares arrays with the teacher, and its step donates them.
    state, optimizer = state_of(jax.tree.map(lambda x: x.copy(), parameters_of(pruned)))
    teacher_parameters = replicate(parameters_of(teacher), devices)
    rows = np.arange(2)
    batch = read_batch(opened, BatchSettings(functions.rows), rows)
    objective = choose(opened.encoding, "sampled")

    def teacher_logits(parameters: Any, batch: Batch) -> Any:
        hidden = hidden_states(theirs, parameters, batch, "float32")
        return theirs.unembed({name: parameters[name] for name in theirs.head}, hidden)

    placed = place(batch, 1, devices)
    with_teacher = make_dense_step(functions, optimizer, devices, teacher_logits)
    sides = {
        "cached": Side(
            make_step(functions, LossSettings(objective), optimizer, devices), (placed, ALPHA)
        ),
        "online": Side(with_teacher, (placed._replace(targets=None), ALPHA, teacher_parameters)),
    }
    seconds = states_in_turn(sides, state, 1 if quick else 5)
    cached, run = (statistics.median(seconds[name]) for name in ("cached", "online"))
    tokens = int((batch.segments > 0).sum())
    scoring, whole, counted = _capture_seconds(opened)
    capture = scoring / counted
    saved = (run - cached) / tokens
    what = f"student of {pruned.config.layers} layers, {len(rows)} rows of {LENGTH}"
    details = {"seconds": seconds, "capture": scoring, "tokens": counted, "whole": whole}
    return [
        Finding(
            "online",
            f"{what}: a step",
            f"from the cache {cached:.3f} s",
            f"teacher in the step, full KL {run:.3f} s",
            ratio(seconds["online"], seconds["cached"]),
            unit="× as fast",
            details=details,
        ),
        Finding(
            "online",
            f"capture of {counted:,} tokens, writing included",
            f"{capture * 1e3:.2f} ms/token",
            f"saved in training {saved * 1e3:.2f} ms/token",
            capture / saved if saved > 0 else math.inf,
            unit="epochs or students until the cache has paid for itself",
            details=details,
        ),
        _after(3, 1, capture, cached / tokens, run / tokens, details),
        _after(3, 5, capture, cached / tokens, run / tokens, details),
    ]


def _after(
    epochs: int, students: int, capture: float, cached: float, run: float, details: Any
) -> Finding:
    passes = epochs * students
    ours, theirs = capture + passes * cached, passes * run
    return Finding(
        "online",
        f"{students} student{'s' if students > 1 else ''}, {epochs} epochs each, all in all",
        f"capture and training {ours * 1e3:.1f} ms/token",
        f"online {theirs * 1e3:.1f} ms/token",
        theirs / ours,
        unit="× as fast",
        details=details,
    )


if __name__ == "__main__":
    main("train", {"step": step, "wait": wait, "online": online})
