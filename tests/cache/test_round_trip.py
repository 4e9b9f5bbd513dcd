"""Any encoding, any rows: what is written is what every reader gets, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cache
from tests.cache.builder import Built, make_cache, same


@st.composite
def _settings(draw: st.DrawFn) -> dict[str, Any]:
    tail = draw(st.sampled_from(["none", "sampled"]))
    k = draw(st.integers(3, 9))
    captured = [(1.0,), (2.0,)] if tail == "sampled" else [(1.0,), (1.0, 3.5), (0.5, 1.0, 4.0)]
    return {
        "tail": tail,
        "k": k,
        "exact": draw(st.integers(1, k - 1)),
        "temperatures": draw(st.sampled_from(captured)),
        "logprobs": draw(st.sampled_from(["float32", "float16", "rounded"])),
        "mantissa_bits": draw(st.sampled_from([1, 6, 10])),
        "length": draw(st.integers(2, 11)),
        "vocabulary": draw(st.sampled_from([40, 255, 300])),
        "rows_per_shard": draw(st.integers(1, 5)),
        "rows": draw(st.integers(1, 9)),
        "seed": draw(st.integers(0, 99)),
        "scale": draw(st.sampled_from([0.0, 0.1, 3.0, 40.0])),
    }


@settings(max_examples=40, deadline=None)
@given(chosen=_settings(), data=st.data())
def test_what_is_written_is_what_is_read(
    chosen: dict[str, Any], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = tmp_path_factory.mktemp("round") / "cache"
    built = make_cache(folder, **chosen)
    report = cache.verify(folder, full=True)
    assert (report.sound, report.damage) == (True, ())
    opened = cache.open(folder)
    assert opened.encoding == built.encoding
    rows = data.draw(st.lists(st.integers(0, chosen["rows"] - 1), max_size=7))
    for name, values in opened.rows(rows).items():
        assert same(values, built.arrays[name][rows])
    _check_decoded(opened, built, chosen["temperatures"][0])


def _check_decoded(opened: cache.Cache, built: Built, temperature: float) -> None:
    """The decoded weights are the teacher's probabilities, to the rounding of the encoding."""
    rows = opened.rows(slice(None))
    weights = opened.weights(rows, temperature)
    labelled = rows["label_mask"] == 1
    sums = weights.sum(axis=-1)[labelled]
    if opened.encoding.tail == "sampled":
        np.testing.assert_allclose(sums, 1, atol=1e-5)
    else:
        assert (sums <= 1 + 1e-5).all()
    exact = np.arange(opened.encoding.k) < rows["exact_counts"][..., None].astype(np.int64)
    exact &= labelled[..., None]
    ids = np.where(exact, rows["target_ids"], 0).astype(np.int64)
    logp = np.take_along_axis(built.log_probabilities(), ids, axis=-1)
    expected = np.exp(np.take_along_axis(built.log_probabilities(temperature), ids, axis=-1))
    # Of each entry's log-prob, and of the sum over the exact ones that it is divided by.
    rounding = np.where(exact, np.abs(logp), 0.0).max(axis=-1, keepdims=True, initial=0.0)
    error = np.expm1(2 * opened.encoding.relative_error * rounding / temperature) + 2e-3
    assert (np.abs(weights - expected) <= error * expected + 1e-7)[exact].all()
