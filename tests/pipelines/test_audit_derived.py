"""Audits of derived caches: what recomputing from rounded numbers explains, and no more."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cache
from cache.derivation import tail_beyond
from cache.encoding import round_mantissa
from cache.options import DeriveOptions
from cache.provenance import Recomputed, recomputed
from pipelines.audit import Audit, AuditOptions, audit
from pipelines.audit_measure import BOUNDS, tail_error
from tests.models import write_tiny_teacher
from tests.pipelines import small


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Captures of exact and of sampled entries, in three roundings."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        small.quick(patch)
        small.capture(folder, "float32", tail="none", k=24, logprobs="float32")
        small.capture(folder, "rounded", tail="none", k=24, mantissa_bits=4)
        small.capture(folder, "sampled", k=24, exact=12, mantissa_bits=5)
    return folder


# The source, and what each derivation asks for.
_CHAINS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "fewer entries": ("rounded", [{"k": 4}]),
    "one entry": ("rounded", [{"k": 1}]),
    "nothing but rounding": ("float32", [{"logprobs": "rounded", "mantissa_bits": 2}]),
    "of float32": ("float32", [{"k": 6, "logprobs": "rounded", "mantissa_bits": 2}]),
    "chain of one rounding": ("rounded", [{"k": 16}, {"k": 8}, {"k": 3}]),
    "chain of roundings": (
        "float32",
        [
            {"k": 16, "logprobs": "rounded", "mantissa_bits": 5},
            {"k": 8, "mantissa_bits": 3},
            {"k": 4, "mantissa_bits": 2},
            {"k": 2},
        ],
    ),
    "drawn again": ("sampled", [{"k": 12, "exact": 4}]),
    "drawn twice": ("sampled", [{"k": 16, "exact": 6}, {"k": 5, "exact": 2, "mantissa_bits": 2}]),
    "tail dropped": ("sampled", [{"tail": "drop"}, {"k": 3}]),
}


def _derived(made: Path, folder: Path, chain: str) -> Path:
    source, steps = _CHAINS[chain]
    place = made / source
    for number, asked in enumerate(steps):
        out = folder / f"{number}"
        cache.derive(DeriveOptions((str(place), str(out)), **asked))
        place = out
    return place


def _audit(made: Path, place: Path, **changes: Any) -> Audit:
    given = {"teacher": str(made / "teacher"), "rows": 100, **changes}
    return audit(AuditOptions(str(place), **given))


@pytest.mark.parametrize("chain", _CHAINS)
def test_a_derived_cache_is_sound(made: Path, tmp_path: Path, chain: str) -> None:
    found = _audit(made, _derived(made, tmp_path, chain))
    assert found.findings == ()
    # Rounding explains all of it: it is the same teacher on the same machine.
    assert max(each.largest for each in found.differences) < 1e-5
    assert sum(each.count for each in found.differences if "tail" in each.name) > 100


@pytest.mark.parametrize("chain", ["fewer entries", "chain of one rounding", "drawn again"])
def test_another_teacher_is_found_by_entries_and_tail(
    made: Path, tmp_path: Path, chain: str
) -> None:
    place = _derived(made, tmp_path, chain)
    write_tiny_teacher(tmp_path / "other", seed=7)
    found = _audit(made, place, teacher=str(tmp_path / "other"), other_files=True)
    assert any(finding.startswith("tail log-mass") for finding in found.findings)
    assert any(finding.startswith("entry log-prob") for finding in found.findings)


def test_the_help_states_the_bounds() -> None:
    text = " ".join((AuditOptions.__doc__ or "").split())
    (largest, mean), (coarse, coarse_mean) = BOUNDS["float32"], BOUNDS["bfloat16"]
    assert f"float32 {largest:g} nats, on average {mean:.4f};" in text
    assert f"bfloat16 {coarse:g} nats, on average {coarse_mean:g}." in text


def test_what_the_manifest_says_of_the_history(made: Path, tmp_path: Path) -> None:
    def history(place: Path) -> Recomputed:
        manifest = cache.open(place).manifest
        return recomputed(manifest.encoding, manifest.capture)

    assert history(made / "rounded") == Recomputed()
    assert history(_derived(made, tmp_path / "a", "nothing but rounding")) == Recomputed()
    assert history(_derived(made, tmp_path / "b", "of float32")) == Recomputed(1, 1, 24, 2.0**-24)
    one = history(_derived(made, tmp_path / "c", "chain of one rounding"))
    assert one == Recomputed(3, 1, 24, 2.0**-5)
    many = history(_derived(made, tmp_path / "d", "chain of roundings"))
    assert many == Recomputed(4, 4, 24, 2.0**-6 + 2.0**-4 + 2.0**-3)


# The bound, on distributions made by hand.


def _positions(seed: int, temperature: float, spread: float) -> tuple[np.ndarray, np.ndarray]:
    """log p of 24 of 300 tokens, descending, and the log-mass of the others at a temperature."""
    logits = np.random.default_rng(seed).normal(size=(200, 300)) * spread
    logits = -np.sort(-logits, axis=-1)
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    scaled = logprobs / temperature
    total = np.logaddexp.reduce(scaled, axis=-1)
    return logprobs[:, :24], np.logaddexp.reduce(scaled[:, 24:], axis=-1) - total


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("spread", [0.1, 2.0, 6.0])
@pytest.mark.parametrize("bits", [1, 3, 6])
def test_no_rounding_is_off_by_more(temperature: float, spread: float, bits: int) -> None:
    """Real rounding, and the worst there is: all kept entries up, all dropped ones down."""
    full = np.full(200, 24)
    error = 2.0 ** -(bits + 1)
    for k in (1, 4, 20):
        logprobs, tail = _positions(bits, temperature, spread)
        kept = np.full(200, k)
        true = tail_beyond(logprobs, full, tail, kept, temperature)
        history = Recomputed(1, 1, 24, error)
        bound = tail_error(logprobs[:, :k], kept, true, temperature, history)
        sign = np.where(np.arange(24) < k, 1.0, -1.0)
        rounded = round_mantissa(logprobs.astype(np.float32), bits).astype(np.float64)
        for off in (rounded, logprobs * (1 + error * sign), logprobs * (1 - error * sign)):
            for stored in (tail, tail * (1 + 2.0**-11), tail * (1 - 2.0**-11)):
                found = tail_beyond(off, full, stored, kept, temperature)
                assert (np.abs(found - true) <= bound * (1 + 1e-9) + 1e-7).all()


def test_the_bound_is_of_the_size_of_the_worst_rounding() -> None:
    logprobs, tail = _positions(0, 1.0, 2.0)
    kept, full, error = np.full(200, 8), np.full(200, 24), 2.0**-7
    true = tail_beyond(logprobs, full, tail, kept, 1.0)
    sign = np.where(np.arange(24) < 8, 1.0, -1.0)
    worst = np.abs(tail_beyond(logprobs * (1 - error * sign), full, tail, kept, 1.0) - true)
    bound = tail_error(logprobs[:, :8], kept, true, 1.0, Recomputed(1, 1, 24, error))
    assert (bound < 4 * worst + 2e-3).all()
    # Entries that were not rounded, and none that were dropped, explain nothing but the tail's.
    for history in (Recomputed(1, 1, 24, 2.0**-24), Recomputed(1, 1, 8, error)):
        exact = tail_error(logprobs[:, :8], kept, true, 1.0, history)
        assert (exact <= 2.0**-11 * np.abs(true) + 1e-5).all()
