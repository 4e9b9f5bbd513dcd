"""Compare from end to end: the choice for a budget, the command line, a cache."""

import json
import sys

import numpy as np
import pytest

import cache
import stillroom
from pipelines.compare import compare, recommend
from pipelines.compare_options import CompareOptions, Setting
from pipelines.compare_targets import Measured
from pipelines.errors import CaptureError
from tests.cache.builder import make_cache
from tests.pipelines import small

FEW = ("--settings", "exact:4", "exact:12", "sampled:6/2", "--roundings", "rounded:6", "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A teacher, a corpus, and caches of 12 exact entries, as they are and rounded."""
    folder = tmp_path_factory.mktemp("work")
    small.options(folder)
    make_cache(folder / "cache", k=12, rows=40, logprobs="float32")
    make_cache(folder / "rounded", k=12, rows=40)
    return folder


def run(capsys, *words: str) -> tuple[int, str, str]:
    try:
        code = stillroom.main(["compare", *words])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def sources(folder) -> tuple[str, ...]:
    named = ("--teacher", str(folder / "teacher"), "--dataset", str(folder / "corpus.jsonl"))
    return (*named, "--rows", "4", "--length", "24")


def item(name: int, size: float, bias2: float, variance: float, lasting: float) -> Measured:
    return Measured(
        setting=Setting("none", name, name),
        objective="bucket",
        arrays={"target_ids": size - 1, "tokens": 1.0},
        labels=100,
        bias2=bias2,
        variance=variance,
        lasting=lasting,
        total_variation=0.0,
        kl=0.0,
        draw_distance=float("nan"),
        mass={1.0: 1.0},
    )


# A large error of one label that averages out, a small one that stays, and dearer ones.
TABLE = (
    item(1, 40.0, 0.0, 4e-2, 0.0),
    item(2, 45.0, 1e-3, 0.0, 5e-4),
    item(3, 90.0, 0.0, 1e-2, 0.0),
    item(4, 95.0, 0.0, 1e-2, 0.0),
    item(5, 200.0, 1e-4, 0.0, 9e-5),
)


@pytest.mark.parametrize(
    ("budget", "batch", "step", "label"),
    [
        (39.9, 1000, None, None),
        (40.0, 1000, 1, 1),
        (50.0, 1000, 1, 2),
        (50.0, 1, 2, 2),
        (50.0, 60, 2, 2),  # 4e-2 / 60 is above what the bias leaves
        (90.0, 1000, 3, 2),
        (100.0, 1000, 3, 2),  # equal errors: the cheaper one
        (500.0, 1000, 3, 5),
        (500.0, 100, 5, 5),
    ],
)
def test_the_recommendation_on_a_table_made_by_hand(budget, batch, step, label):
    found = recommend(TABLE, budget, batch)
    assert (found.step and found.step.setting.k) == step
    assert (found.label and found.label.setting.k) == label
    assert found.least.setting.k == 1


def test_the_command_prints_a_table_and_a_recommendation(folder, capsys, tmp_path):
    plot = tmp_path / "errors.png"
    budget = ("--budget", "5000", "--plot", str(plot), "--renormalise")
    code, out, err = run(capsys, *sources(folder), *FEW, *budget)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].split()[:4] == ["setting", "bytes", "bias²", "variance"]
    names = [line.split("  ")[0] for line in lines[1:11]]
    assert sorted(set(names)) == sorted(
        [
            *(
                f"exact {k}, {r}{end}"
                for k in (4, 12)
                for r in ("6 bits", "float32")
                for end in ("", ", renormalised")
            ),
            "sampled 6, exact 2, 6 bits",
            "sampled 6, exact 2, float32",
        ]
    )
    assert "4 rows" in out
    assert "For at most 5000 bytes per token: " in out
    assert "  stillroom precompute … --k " in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "Traceback" not in err


def test_json_holds_everything(folder, capsys):
    code, out, _ = run(capsys, *sources(folder), *FEW, "--json", "--budget", "5000")
    assert code == 0
    found = json.loads(out)
    assert found["rows"] == 4
    assert found["batch"] == 4096
    kinds = [(x["setting"]["name"], x["objective"]) for x in found["settings"]]
    assert len(set(kinds)) == len(kinds) == 10
    sizes = [x["bytes_per_token"] for x in found["settings"]]
    assert sizes == sorted(sizes)
    for each in found["settings"]:
        assert each["bytes_per_token"] == pytest.approx(sum(each["arrays"].values()))
        assert set(each["exact_mass"]) == {"1", "2", "4"}
        assert (each["variance"] > 0) == (each["objective"] == "sampled")
        assert (each["kl"] is None) == (each["objective"] == "renormalise")
        assert (each["draw_total_variation"] is None) == (each["objective"] != "sampled")
    by_name = {
        x["setting"]["name"]: x for x in found["settings"] if x["objective"] != "renormalise"
    }
    assert by_name["exact 12, float32"]["label_error"] < by_name["exact 4, float32"]["label_error"]
    assert by_name["sampled 6, exact 2, float32"]["bias2"] < 1e-7
    best = min(found["settings"], key=lambda x: x["step_error"])
    assert found["recommendation"]["step"]["setting"] == best["setting"]


def test_a_budget_below_everything(folder, capsys):
    words = ("--settings", "exact:4", "--roundings", "rounded:6", "--budget", "3")
    code, out, _ = run(capsys, *sources(folder), *words)
    assert code == 1
    assert "No setting takes at most 3 bytes per token: the smallest, exact 4, 6 bits, takes" in out


def test_settings_beyond_the_vocabulary(folder, capsys):
    code, _, err = run(capsys, *sources(folder), "--settings", "exact:4", "exact:301")
    assert code == 1
    assert "exact 301, float32; exact 301, float16" in err
    assert "more entries than the vocabulary's 300 tokens" in err
    code, _, err = run(capsys, *sources(folder), "--settings", "sampled:0/0")
    assert code == 2
    assert "expected exact:K" in " ".join(err.replace("│", " ").split())


def test_a_plot_that_cannot_be_drawn_is_refused_before_any_work(folder, capsys, tmp_path):
    words = ("--teacher", "no/such", "--dataset", "no/such")
    code, _, err = run(capsys, *words, "--plot", str(tmp_path / "errors.xyz"))
    assert code == 1
    assert "name should end with one of" in err


def test_without_matplotlib_the_plot_says_what_to_install(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ("--teacher", "no/such", "--dataset", "no/such")
    code, _, err = run(capsys, *words, "--plot", str(tmp_path / "errors.png"))
    assert code == 1
    assert "--plot needs matplotlib" in err
    assert "pip install matplotlib" in err


# From a cache.


def test_a_cache_is_compared_without_the_teacher(folder, capsys):
    opened = cache.open(folder / "cache")
    code, out, err = run(capsys, str(folder / "cache"), "--rows", "1000", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["rows"] == len(opened)
    kinds = {(x["setting"]["k"], x["setting"]["tail"]) for x in found["settings"]}
    assert kinds == {(8, "none"), (12, "none")}
    notes = " ".join(found["notes"])
    assert "the cache has only 12 entries" in notes
    assert "which tokens a sample holds is not known without the teacher" in notes
    assert "Errors are against what the cache holds" in notes

    # The mass of the first 8 entries at the captured temperatures, from the cache's own weights.
    arrays = opened.rows(slice(None))
    label = arrays["label_mask"] == 1
    eight = next(x for x in found["settings"] if x["setting"]["k"] == 8)
    for temperature in (1.0, 2.0, 4.0):
        expected = opened.weights(arrays, temperature)[label][:, :8].sum(axis=-1).mean()
        assert eight["exact_mass"][f"{temperature:g}"] == pytest.approx(expected, rel=1e-4)
    # At the cache's own k and rounding nothing is lost, as far as the cache can tell.
    own = [x for x in found["settings"] if x["setting"]["k"] == 12 and x["objective"] == "bucket"]
    exact = next(x for x in own if x["setting"]["logprobs"] == "float32")
    assert exact["bias2"] < 1e-9 < eight["bias2"]
    stored = sum(opened.manifest.bytes.values()) / opened.manifest.statistics.tokens
    assert exact["bytes_per_token"] == pytest.approx(stored, rel=0.05)


def test_the_error_from_a_cache_is_that_of_its_entries(folder):
    """Brute force: the entries, and the rest as the student spreads it."""
    opened = cache.open(folder / "cache")
    asked = CompareOptions(
        cache=str(folder / "cache"), rows=1000, settings=("exact:5",), roundings=("float32",)
    )
    found = {x.objective: x for x in compare(asked).measured}["bucket"]
    arrays = opened.rows(slice(None))
    label = arrays["label_mask"] == 1
    ids = arrays["target_ids"][label].astype(np.int64)
    w = opened.weights(arrays)[label].astype(np.float64)
    n, vocabulary = len(ids), opened.encoding.vocabulary
    p = np.zeros((n, vocabulary))
    np.put_along_axis(p, ids, w, axis=1)
    unknown = 1 - w.sum(axis=1)
    q = p.mean(axis=0) + unknown.mean() / vocabulary
    listed = p > 0
    outside = np.where(listed, 0.0, q)
    p = p + np.where(listed, 0.0, unknown[:, None] * outside / outside.sum(axis=1, keepdims=True))
    first = np.zeros_like(listed)
    np.put_along_axis(first, ids[:, :5], True, axis=1)
    rest = np.where(first, 0.0, q)
    mass = np.where(first, 0.0, p).sum(axis=1, keepdims=True)
    r = np.where(first, p, mass * rest / rest.sum(axis=1, keepdims=True))
    assert found.labels == n
    assert found.bias2 == pytest.approx(((p - r) ** 2).sum(axis=1).mean(), rel=2e-3)
    assert found.total_variation == pytest.approx(np.abs(p - r).sum(axis=1).mean() / 2, rel=2e-3)


@pytest.mark.parametrize(
    ("place", "settings", "message"),
    [
        ("cache", ("exact:13",), "the cache has only 12 entries"),
        ("cache", ("sampled:8/2",), "which tokens a sample holds is not known"),
    ],
)
def test_what_a_cache_cannot_tell_is_refused_by_name(folder, place, settings, message):
    with pytest.raises(CaptureError, match=message):
        compare(CompareOptions(cache=str(folder / place), settings=settings))


def test_a_finer_rounding_than_the_caches_is_refused(folder):
    asked = CompareOptions(cache=str(folder / "rounded"), settings=("exact:2",))
    with pytest.raises(CaptureError, match="exact 2, float32; exact 2, float16: its rounding is"):
        compare(asked)
    kept = CompareOptions(
        cache=str(folder / "rounded"), settings=("exact:2",), roundings=("rounded:6", "rounded:3")
    )
    errors = {x.setting.mantissa_bits: x for x in compare(kept).measured if x.objective == "bucket"}
    assert errors[3].total_variation > errors[6].total_variation
