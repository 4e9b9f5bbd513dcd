"""The decoder's forward pass against transformers in torch, on the CPU of this machine.

    .venv-parity/bin/python benchmarks/forward.py

Needs torch and transformers, which `make parity` installs. Both sides compute float32 logits of
every position of the same rows from the same files, with as many threads as they take by
themselves (torch in one thread as well; the better counts), and agree to 1e-3 before they are
timed. Speed: in one process, in turn. Memory: each side in a process of its own, its highest
resident size above what it was after the imports.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import Finding, Goal, in_turn, main, ratio, smollm2
from flax import nnx

from decoder import rope
from decoder.attention import segment_mask
from decoder.config import DecoderConfig
from decoder.loading import load_model
from decoder.model import Decoder
from decoder.saving import save_folder

_SMALL = DecoderConfig(
    vocabulary=8192,
    width=256,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=64,
    mlp_width=704,
    max_positions=2048,
    tied=True,
)
_GEMMA = DecoderConfig(
    vocabulary=16384,
    width=512,
    layers=8,
    heads=4,
    kv_heads=2,
    head_dim=128,
    mlp_width=1536,
    max_positions=2048,
    family="gemma2",
    norm="offset",
    norm_places="both",
    scaled_embedding=True,
    activation="gelu_tanh",
    tied=True,
    query_scalar=128.0,
    attention_cap=50.0,
    output_cap=30.0,
    windows=(128, 0) * 4,
)


@dataclass(frozen=True)
class Case:
    """A model and the shape of its input; config None: SmolLM2-135M from its GGUF file."""

    name: str
    config: DecoderConfig | None
    rows: int
    length: int


CASES = (
    Case("Llama, 4 layers of 256", _SMALL, 8, 128),
    Case("Gemma 2, 8 layers of 512", _GEMMA, 2, 256),
    Case("SmolLM2-135M", None, 2, 256),
    Case("SmolLM2-135M", None, 1, 1024),
)
_QUICK = (Case("Llama, 4 layers of 256", _SMALL, 2, 32),)


def _write(case: Case, folder: Path) -> Path:
    """The case's model as a folder that both sides read."""
    if not folder.exists():
        if case.config is None:
            model = load_model(smollm2()).model
        else:
            model = Decoder(case.config, rngs=nnx.Rngs(0))
        assert isinstance(model, Decoder)
        save_folder(model, folder, None)
    return folder


def _tokens(case: Case, vocabulary: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocabulary, (case.rows, case.length))


def _vocabulary(folder: Path) -> int:
    from decoder.checkpoint import read_json

    return read_json(folder / "config.json")["vocab_size"]


def _ours(folder: Path, case: Case) -> Callable[[], np.ndarray]:
    model = load_model(str(folder)).model
    graphdef, state = nnx.split(model)
    tokens = jnp.asarray(_tokens(case, _vocabulary(folder)), jnp.int32)
    order = jnp.arange(case.length, dtype=jnp.int32)

    @jax.jit
    def score(state: nnx.State, tokens: jax.Array) -> jax.Array:
        def row(tokens: jax.Array) -> jax.Array:
            whole: Any = nnx.merge(graphdef, state)
            return whole.unembed(whole(tokens, jnp.ones_like(tokens), order))

        return jax.vmap(row)(tokens)

    return lambda: np.asarray(score(state, tokens))


def _theirs(folder: Path, case: Case, threads: int | None = None) -> Callable[[], np.ndarray]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor(_tokens(case, _vocabulary(folder)))
    usual = torch.get_num_threads()

    def run() -> np.ndarray:
        torch.set_num_threads(threads or usual)
        with torch.inference_mode():
            return model(tokens, use_cache=False).logits.numpy()

    return run


def _theirs_in_one_thread(folder: Path, case: Case) -> Callable[[], np.ndarray]:
    """Faster where other work takes a core: torch's threads wait for each other at every step."""
    return _theirs(folder, case, threads=1)


_SIDES = {"ours": _ours, "transformers": _theirs, "one thread": _theirs_in_one_thread}


def _status(key: str) -> int:
    """Bytes of one line of Linux's record of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def _peak(side: str, folder: Path, case: Case) -> int:
    """Bytes above those after the imports; in a process of its own."""
    import torch  # noqa: F401 so that both sides start from the same imports
    from transformers import AutoModelForCausalLM  # noqa: F401

    jnp.zeros(()).block_until_ready()
    before = _status("VmRSS")
    run = _SIDES[side](folder, case)
    for _ in range(3):
        run()
    return _status("VmHWM") - before


def _peak_apart(side: str, folder: Path, case: Case) -> int:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (side, folder, case))


def speed(quick: bool, folder: Path) -> list[Finding]:
    found = []
    for case in _QUICK if quick else CASES:
        place = _write(case, folder / case.name.replace(" ", "-").replace(",", ""))
        sides = {name: make(place, case) for name, make in _SIDES.items()}
        logits = {name: run() for name, run in sides.items()}
        apart = max(float(np.abs(logits["ours"] - other).max()) for other in logits.values())
        if apart > 1e-3:
            raise SystemExit(f"{case.name}: the logits differ by {apart:.1e}")
        del logits
        seconds = in_turn(sides, rounds=3 if quick else 7)
        count = case.rows * case.length
        rates = {name: count / statistics.median(times) for name, times in seconds.items()}
        peaks = {name: _peak_apart(name, place, case) for name in ("ours", "transformers")}
        best = max(("transformers", "one thread"), key=lambda name: rates[name])
        what = f"{case.name}, {case.rows} × {case.length} tokens"
        details = {"seconds": seconds, "peaks": peaks, "largest difference": apart}
        found.append(
            Finding(
                "speed",
                what,
                f"{rates['ours']:,.0f} tokens/s",
                f"transformers {metadata.version('transformers')}, torch "
                f"{metadata.version('torch')}: {rates['transformers']:,.0f}, in one thread "
                f"{rates['one thread']:,.0f} tokens/s",
                ratio(seconds[best], seconds["ours"]),
                goal=Goal("at least", 1),
                details=details,
            )
        )
        found.append(
            Finding(
                "speed",
                f"{what}: highest memory",
                f"{peaks['ours'] / 2**20:,.0f} MiB",
                f"{peaks['transformers'] / 2**20:,.0f} MiB",
                peaks["ours"] / peaks["transformers"],
                goal=Goal("at most", 1),
            )
        )
    return found


def _scanned(model: Decoder, length: int) -> tuple[Callable[..., jax.Array], Any]:
    """Hidden states with one compiled layer for all, and the parameters stacked for it."""
    graphdefs, states = zip(*(nnx.split(layer) for layer in model.layers), strict=True)
    stacked = jax.tree.map(lambda *values: jnp.stack(values), *states)
    order = jnp.arange(length, dtype=jnp.int32)

    def hidden(stacked: Any, tokens: jax.Array) -> jax.Array:
        mask = segment_mask(jnp.ones_like(tokens))
        angles = rope.angles(order, model.config)

        def layer(hidden: jax.Array, state: Any) -> tuple[jax.Array, None]:
            return nnx.merge(graphdefs[0], state)(hidden, mask, angles), None

        return model.norm(jax.lax.scan(layer, model.embedding(tokens), stacked)[0])

    return hidden, stacked


def layers(quick: bool, folder: Path) -> list[Finding]:
    """Scan over the layers against layers one after the other: forward, and with a gradient."""
    case = _QUICK[0] if quick else CASES[2]
    loaded = load_model(str(_write(case, folder / "model"))).model
    assert isinstance(loaded, Decoder)
    model = loaded
    graphdef, state = nnx.split(model)
    tokens = jnp.asarray(_tokens(case, model.config.vocabulary), jnp.int32)
    order = jnp.arange(case.length, dtype=jnp.int32)
    scanned, stacked = _scanned(model, case.length)

    def unrolled(state: Any, tokens: jax.Array) -> jax.Array:
        whole: Any = nnx.merge(graphdef, state)
        return whole(tokens, jnp.ones_like(tokens), order)

    sides = {"unrolled": (unrolled, state), "scan": (scanned, stacked)}
    found = []
    for kind in ("forward", "gradient"):
        compile_seconds, runs, results = {}, {}, {}
        for name, (hidden, parameters) in sides.items():
            batched = jax.vmap(hidden, in_axes=(None, 0))
            if kind == "forward":
                function = lambda parameters, tokens, f=batched: f(parameters, tokens)  # noqa: E731
            else:
                function = jax.grad(
                    lambda parameters, tokens, f=batched: f(parameters, tokens).sum()
                )
            start = time.perf_counter()
            compiled = jax.jit(function).lower(parameters, tokens).compile()
            compile_seconds[name] = time.perf_counter() - start
            runs[name] = lambda c=compiled, p=parameters: jax.block_until_ready(c(p, tokens))
            results[name] = runs[name]()
        if kind == "forward":
            apart = float(jnp.abs(results["unrolled"] - results["scan"]).max())
            if apart > 1e-3:
                raise SystemExit(f"the hidden states differ by {apart:.1e}")
        seconds = in_turn(runs, rounds=3 if quick else 5)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        details = {"seconds": seconds, "compile": compile_seconds}
        what = f"{case.name}, {case.rows} × {case.length} tokens, {kind}"
        for title, table, better in (
            ("compiling", compile_seconds, compile_seconds["scan"] / compile_seconds["unrolled"]),
            ("running", medians, ratio(seconds["scan"], seconds["unrolled"])),
        ):
            found.append(
                Finding(
                    "layers",
                    f"{what}: {title} one layer after the other, beside a scan",
                    f"{table['unrolled']:.2f} s",
                    f"{table['scan']:.2f} s",
                    better,
                    details=details,
                )
            )
    return found


if __name__ == "__main__":
    main("forward", {"speed": speed, "layers": layers})
