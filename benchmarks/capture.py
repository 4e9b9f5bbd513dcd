"""How fast a capture is, and how large its cache: SmolLM2 on the standard library's source.

    python benchmarks/capture.py [overhead tail vmap head bytes] [--quick] [--json FILE]

Takes about a quarter of an hour on two cores. Both sides of every comparison run in turn,
in one process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import Finding, Goal, in_turn, library_corpus, main, ratio, smollm2
from flax import nnx

import decoder
import stillroom
from cache.runlog import read_events
from cache.storage import Store
from decoder.precision import project
from pipelines.begin import begin
from pipelines.plan import Plan
from pipelines.scoring import TeacherFunctions, make_scorer, replicate, score_row, teacher_functions
from pipelines.shards import micro_batches
from pipelines.targets import TargetSettings
from pipelines.teacher import Teacher

Batch = tuple[np.ndarray, np.ndarray, np.ndarray]

# Of overhead and tail: tokens in a row, rows in a micro-batch, rows in a shard.
LENGTH, MICRO_BATCH, SHARD = 256, 4, 8


def overhead(quick: bool, folder: Path) -> list[Finding]:
    """The whole of `precompute` against a loop that scores the same micro-batches.

    Counted from the first shard's receipt on, when the teacher is loaded and compiled, to
    the end of the run, the manifest included.
    """
    tokens, rounds = (3_000, 1) if quick else (12_000, 3)
    options = stillroom.PrecomputeOptions(
        dataset=library_corpus(folder, tokens),
        teacher=smollm2(),
        out=str(folder / "plan"),
        length=LENGTH,
        micro_batch=MICRO_BATCH,
        rows_per_shard=SHARD,
    )
    teacher = Teacher(_plan(options))
    ours, written, bare, counted = [], [], [], 0
    for turn in range(rounds):
        outcome = stillroom.precompute(replace(options, out=str(folder / f"cache-{turn}")))
        shards, end = _commits(outcome.cache.location)
        ours.append(end - shards[0][1])
        written.append(shards[-1][1] - shards[0][1])
        batches, counted = _batches(outcome.cache, [shard for shard, _ in shards[1:]])
        _loop(teacher.score, batches[:1])
        start = time.perf_counter()
        _loop(teacher.score, batches)
        bare.append(time.perf_counter() - start)
    return [
        Finding(
            "overhead",
            f"`precompute`, k = 32 sampled, from the first receipt to the end; {counted:,} tokens",
            f"{counted / statistics.median(ours):,.0f} tokens/s",
            f"bare jitted loop {counted / statistics.median(bare):,.0f} tokens/s",
            ratio(bare, ours),
            goal=Goal("at least", 0.95),
            details={"seconds": ours, "to_last_receipt": written, "bare": bare, "tokens": counted},
        )
    ]


def _plan(options: stillroom.PrecomputeOptions) -> Plan:
    plan = begin(options)
    assert isinstance(plan, Plan)  # the folder is new
    return plan


def _commits(location: str) -> tuple[list[tuple[int, float]], float]:
    """Shards with the times of their receipts, in order of time, and the end of the run."""
    events = read_events(Store(location))
    shards = [(event["shard"], event["time"]) for event in events if event["event"] == "shard"]
    (end,) = (event["time"] for event in events if event["event"] == "finish")
    return shards, end


def _batches(cache: stillroom.Cache, shards: list[int]) -> tuple[list[Batch], int]:
    """The micro-batches of some shards as `precompute` scored them, and their tokens."""
    batches, tokens = [], 0
    for shard in shards:
        first, end = cache.manifest.shard_rows(shard)
        rows = cache.rows(range(first, end), ("tokens", "segments"))
        batches += micro_batches(rows, first, MICRO_BATCH)
        tokens += int(np.count_nonzero(rows["segments"]))
    return batches, tokens


def _loop(score: Callable[..., Any], batches: list[Batch]) -> None:
    """Scores micro-batches and fetches the results, one dispatched ahead; nothing else."""
    waiting = None
    for batch in batches:
        dispatched = score(*batch)
        if waiting is not None:
            jax.tree.map(np.asarray, waiting)
        waiting = dispatched
    jax.tree.map(np.asarray, waiting)


def tail(quick: bool, folder: Path) -> list[Finding]:
    """What the sampled tail costs: the same rows scored with three settings."""
    rounds = 1 if quick else 9
    devices = jax.local_devices()[:1]
    functions, params = teacher_functions(decoder.load_model(smollm2()).model)
    params = replicate(params, devices)
    tokenizer = decoder.load_tokenizer(smollm2())
    batch = _text_batch(tokenizer, MICRO_BATCH, LENGTH)
    vocabulary = tokenizer.vocabulary
    settings = {
        "none": TargetSettings(64, vocabulary, "none", temperatures=(1.0, 2.0, 4.0)),
        "sampled, k = 32": TargetSettings(32, vocabulary, "sampled", exact=8),
        "sampled, k = 64": TargetSettings(64, vocabulary, "sampled", exact=8),
    }
    sides = {}
    for name, chosen in settings.items():
        score = make_scorer(functions, chosen, LENGTH, MICRO_BATCH, devices)
        sides[name] = _fetching(score, params, *batch)
    seconds = in_turn(sides, rounds)
    none = seconds.pop("none")
    return [
        Finding(
            "tail",
            f"scorer with `--tail {name}`, exact 8; {MICRO_BATCH} rows of {LENGTH}",
            f"{statistics.median(times):.3f} s",
            f"`--tail none`, k = 64, T = 1, 2, 4: {statistics.median(none):.3f} s",
            ratio(times, none),
            goal=Goal("at most", 1.10),
            details={"seconds": times, "none": none},
        )
        for name, times in seconds.items()
    ]


def _fetching(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: jax.tree.map(np.asarray, function(*arguments))


def _text_batch(tokenizer: decoder.Tokenizer, rows: int, length: int) -> Batch:
    """Rows of source code, each one document."""
    text = Path(decoder.__file__).with_name("loading.py").read_text()
    ids = np.resize(tokenizer.encode(text), rows * length)
    tokens = ids.astype(np.int32).reshape(rows, length)
    return tokens, np.ones_like(tokens), np.arange(rows, dtype=np.int32)


def vmap(quick: bool, folder: Path) -> list[Finding]:
    """A micro-batch through `jax.vmap` against a Python loop over the same rows.

    With it, what explains the factor: the time of dispatching one call that does nothing
    with the same parameters, and the arithmetic done per second (2 operations per parameter
    and token; attention and selection not counted).
    """
    rounds = 1 if quick else 7
    findings = []
    for name, model, vocabulary, shapes in _teachers(quick):
        functions, params = teacher_functions(model)
        settings = TargetSettings(k=32, tail="sampled", exact=8, vocabulary=vocabulary)
        score = _row_scorer(functions, settings)
        one, many = jax.jit(score), jax.jit(jax.vmap(score, in_axes=(None, 0, 0, 0)))
        dispatch = _dispatch_seconds(params)
        for rows, length in shapes:
            batch = _random_batch(rows, length, vocabulary)
            sides = {"vmap": _fetching(many, params, *batch), "loop": _each(one, params, batch)}
            seconds = in_turn(sides, rounds)
            work = 2 * sum(leaf.size for leaf in jax.tree.leaves(params)) * length
            told = {
                side: f"{row * 1e3:.2f} ms/row, {work / row / 1e9:.1f} GFLOP/s"
                for side, times in seconds.items()
                for row in (statistics.median(times) / rows,)
            }
            findings.append(
                Finding(
                    "vmap",
                    f"{name}: {rows} rows of {length} at once "
                    f"(a call that does nothing: {dispatch * 1e6:.0f} µs)",
                    told["vmap"],
                    f"Python loop {told['loop']}",
                    ratio(seconds["loop"], seconds["vmap"]),
                    unit="× as fast",
                    details={"seconds": seconds, "dispatch": dispatch},
                )
            )
    return findings


def _teachers(quick: bool) -> Iterator[tuple[str, nnx.Module, int, list[tuple[int, int]]]]:
    """Name, model, vocabulary and shapes (rows, length): short rows, and rows as captured."""
    tiny = decoder.DecoderConfig(
        vocabulary=2_000,
        width=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        mlp_width=128,
        max_positions=1024,
    )
    model = decoder.Decoder(tiny, rngs=nnx.Rngs(0))
    yield "tiny (2 layers of 64, V = 2,000)", model, tiny.vocabulary, [(32, 16), (32, LENGTH)]
    loaded = decoder.load_model(smollm2())
    shapes = [(2, 16)] if quick else [(16, 16), (MICRO_BATCH, LENGTH)]
    yield "SmolLM2", loaded.model, loaded.vocabulary_rows, shapes


def _row_scorer(functions: TeacherFunctions, settings: TargetSettings) -> Callable[..., Any]:
    def score(params, tokens, segments, row):
        return score_row(functions, params, tokens, segments, row, settings)

    return score


def _each(score: Callable[..., Any], params: Any, batch: Batch) -> Callable[[], Any]:
    """Scores row by row; all are dispatched before the first is fetched."""
    return lambda: jax.tree.map(
        np.asarray, [score(params, *row) for row in zip(*batch, strict=True)]
    )


def _random_batch(rows: int, length: int, vocabulary: int) -> Batch:
    tokens = np.random.default_rng(0).integers(vocabulary, size=(rows, length), dtype=np.int32)
    return tokens, np.ones_like(tokens), np.arange(rows, dtype=np.int32)


def _dispatch_seconds(params: Any) -> float:
    """Seconds of one jitted call that takes the parameters and computes next to nothing."""
    nothing = jax.jit(lambda params, row: (row + 1, jax.tree.leaves(params)[0].ravel()[0]))
    call = _fetching(nothing, params, np.int32(0))
    calls = 100

    def run() -> None:
        for _ in range(calls):
            call()

    return statistics.median(in_turn({"nothing": run}, 5)["nothing"]) / calls


def head(quick: bool, folder: Path) -> list[Finding]:
    """The head in chunks of 64 positions against the whole row's logits at one time."""
    vocabulary, length, width = (20_000, 512, 64) if quick else (151_936, 2_048, 896)
    rounds = 1 if quick else 3
    random = np.random.default_rng(0)
    params = {
        "hidden": jnp.asarray(random.standard_normal((length, width), np.float32)),
        "head": jnp.asarray(random.standard_normal((vocabulary, width), np.float32) / width**0.5),
    }
    functions = TeacherFunctions(
        hidden=lambda params, tokens, segments, positions: params["hidden"],
        unembed=lambda params, hidden: project(hidden, params["head"]),
    )
    tokens, segments, rows = _random_batch(1, length, vocabulary)
    row = (tokens[0], segments[0], rows[0])
    sides, memory = {}, {}
    for name, chunk in (("chunked", 64), ("plain", length)):
        settings = TargetSettings(k=32, tail="sampled", exact=8, vocabulary=vocabulary, chunk=chunk)
        compiled = jax.jit(_row_scorer(functions, settings)).lower(params, *row).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None  # every backend we run on has one
        memory[name] = analysis.temp_size_in_bytes
        sides[name] = _fetching(compiled, params, *row)
    seconds = in_turn(sides, rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    what = f"head in chunks of 64, V = {vocabulary:,}, one row of {length:,}, width {width}"
    details = {"seconds": seconds, "temporary_bytes": memory}
    return [
        Finding(
            "head",
            f"{what}: peak temporary memory",
            f"{memory['chunked'] / 2**20:,.0f} MiB",
            f"plain {memory['plain'] / 2**20:,.0f} MiB",
            memory["chunked"] / memory["plain"],
            goal=Goal("at most", 0.25),
            details=details,
        ),
        Finding(
            "head",
            f"{what}: speed",
            f"{length / medians['chunked']:,.0f} tokens/s",
            f"plain {length / medians['plain']:,.0f} tokens/s",
            ratio(seconds["plain"], seconds["chunked"]),
            goal=Goal("at least", 0.9),
            details=details,
        ),
    ]


def bytes_per_token(quick: bool, folder: Path) -> list[Finding]:
    """The size of caches of the same text with different settings, all arrays included."""
    corpus = library_corpus(folder, 1_500 if quick else 16_000)
    captures: list[tuple[str, Goal | None, dict[str, Any]]] = [
        ("k = 64 exact, T = 1, 2, 4", Goal("at most", 172), {"k": 64, "tail": "none"}),
        ("k = 16 sampled, exact 4", Goal("at most", 48), {"k": 16, "exact": 4}),
        ("k = 16 sampled, exact 8", Goal("at most", 48), {"k": 16, "exact": 8}),
        ("defaults: k = 32 sampled, exact 8", None, {}),
    ]
    findings = []
    for number, (name, goal, settings) in enumerate(captures[:2] if quick else captures):
        out = str(folder / f"cache-{number}")
        options = stillroom.PrecomputeOptions(
            dataset=corpus, teacher=smollm2(), out=out, rows_per_shard=8, **settings
        )
        stillroom.precompute(options)
        view = stillroom.inspect(stillroom.InspectOptions(out))
        arrays = {key: value["per_token"] for key, value in view["bytes"]["arrays"].items()}
        largest = sorted(arrays, key=lambda key: -arrays[key])[:3]
        findings.append(
            Finding(
                "bytes",
                f"{name}; {view['tokens']:,} tokens in rows of {options.length}",
                f"{view['bytes']['total']:,} bytes",
                "of which " + ", ".join(f"{key} {arrays[key]:.1f}" for key in largest),
                view["bytes"]["per_token"],
                unit="bytes/token",
                goal=goal,
                details={"arrays": arrays, "tokens": view["tokens"]},
            )
        )
    return findings


if __name__ == "__main__":
    main(
        "capture",
        {
            "overhead": overhead,
            "tail": tail,
            "vmap": vmap,
            "head": head,
            "bytes": bytes_per_token,
        },
    )
