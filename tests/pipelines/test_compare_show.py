"""Tables, recommendations and JSON of a comparison made by hand."""

import json
import math

import numpy as np
import pytest

from pipelines.compare import Comparison, Recommendation, recommend
from pipelines.compare_options import Setting
from pipelines.compare_show import best, check_plot, draw, render, render_recommendation, to_json
from pipelines.compare_targets import Measured, Objective
from pipelines.errors import CaptureError


def item(tail, k: int, objective: Objective, size: float, **errors) -> Measured:
    given = {"bias2": 0.0, "variance": 0.0, "lasting": 0.0, "total_variation": 0.25, "kl": 0.5}
    given |= {"draw_distance": math.nan, **errors}
    return Measured(
        setting=Setting(tail, k, min(k, 2)),
        objective=objective,
        arrays={"target_ids": size},
        labels=10,
        mass={1.0: 0.75, 4.0: 0.02},
        **given,
    )


SAMPLED = item("sampled", 16, "sampled", 46.0, bias2=1e-6, variance=8e-3, draw_distance=0.3)
BUCKET = item("none", 16, "bucket", 53.0, bias2=7e-4, lasting=1e-4)
ALONE = item("none", 16, "renormalise", 53.0, bias2=0.2, lasting=1e-2, kl=math.inf)
FOUND = Comparison((SAMPLED, BUCKET, ALONE), 4, 100, 90, "a student", 1000, ("A note.",))


def test_the_table_shows_every_setting_with_its_numbers():
    lines = render(FOUND).splitlines()
    assert len({len(line) for line in lines[:3]}) == 1
    numbers = "46.0 1.00e-06 8.00e-03 8.00e-06 25.0 % 0.5000 30.0 % 75.0 % 2.0 %"
    assert " ".join(lines[1].split()) == f"sampled 16, exact 2, 6 bits {numbers}"
    numbers = "53.0 7.00e-04 0 1.01e-04 25.0 % 0.5000 – 75.0 % 2.0 %"
    assert " ".join(lines[2].split()) == f"exact 16, 6 bits {numbers}"
    assert "renormalised" not in render(FOUND)
    assert "4 rows, 100 tokens, 90 labels; student: a student." in lines
    assert lines[-1] == "A note."
    more = render(FOUND, renormalise=True).splitlines()
    assert "exact 16, 6 bits, renormalised" in more[3]
    assert " infinite " in more[3]


def _many() -> Comparison:
    """Pairs of equal bytes, of which the second has more of both errors; cheapest first."""
    items = []
    for k in range(8, 20):
        items.append(item("sampled", k, "sampled", 3.0 * k, bias2=1 / k, variance=1 / k))
        items.append(item("none", k, "bucket", 3.0 * k, bias2=2 / k, lasting=2 / k))
    return Comparison(tuple(items), 4, 100, 90, "a student", 1000, ("A note.",))


def test_a_long_table_shows_the_best_settings_unless_all_are_asked_for():
    found = _many()
    lines = render(found).splitlines()
    assert [line for line in lines if line.startswith("exact ")] == []
    assert len([line for line in lines if line.startswith("sampled ")]) == 12
    assert any(line.startswith("12 more lines are left out") for line in lines)
    whole = render(found, whole=True).splitlines()
    assert len([line for line in whole if line.startswith(("exact ", "sampled "))]) == 24
    assert not any("left out" in line for line in whole)
    assert len(to_json(found, None)["settings"]) == 24
    # Few settings are all shown, even those that are beaten.
    few = Comparison(found.measured[:4], 4, 100, 90, "a student", 1000, ())
    assert len([x for x in render(few).splitlines() if x.startswith("exact ")]) == 2


def test_what_is_recommended_is_shown():
    numbers = np.random.default_rng(0).uniform(size=(60, 3)).tolist()
    measured = [
        item("sampled", 8 + n, "sampled", float(8 + n // 2), bias2=b, lasting=b * part, variance=v)
        for n, (b, part, v) in enumerate(numbers)
    ]
    kept = best(measured, 1000)
    assert len(kept) < 30
    for budget in map(float, range(8, 38)):
        found = recommend(measured, budget, 1000)
        assert found.step in kept
        assert found.label in kept


def test_a_recommendation_tells_both_criteria_where_they_differ():
    told = render_recommendation(Recommendation(60.0, SAMPLED, BUCKET, SAMPLED), 1000)
    assert told.startswith("For at most 60 bytes per token: sampled 16, exact 2, 6 bits (46.0")
    assert "--k 16 --exact 2 --tail sampled --logprobs rounded --mantissa-bits 6" in told
    assert "A single label's gradient has the least error with exact 16, 6 bits (53.0" in told
    same = render_recommendation(Recommendation(50.0, SAMPLED, SAMPLED, SAMPLED), 1000)
    assert "single label" not in same
    none = render_recommendation(Recommendation(9.0, None, None, SAMPLED), 1000)
    assert none == (
        "No setting takes at most 9 bytes per token: the smallest, sampled 16, exact 2, 6 bits, "
        "takes 46.0."
    )


def test_json_has_no_numbers_that_json_lacks():
    recommendation = Recommendation(60.0, SAMPLED, None, SAMPLED)
    text = json.dumps(to_json(FOUND, recommendation), allow_nan=False)
    value = json.loads(text)
    sampled, bucket, alone = value["settings"]
    assert sampled["draw_total_variation"] == 0.3
    assert bucket["draw_total_variation"] is None
    assert alone["kl"] is None
    assert bucket["step_error"] == pytest.approx(1e-4 + 6e-4 / 1000)
    assert value["recommendation"]["step"]["setting"]["k"] == 16
    assert value["recommendation"]["label"] is None
    assert "recommendation" not in to_json(FOUND, None)


def test_a_plot_is_written_in_the_kind_that_its_name_says(tmp_path):
    for name, magic in (("a.png", b"\x89PNG"), ("a.SVG", b"<?xml")):
        check_plot(tmp_path / name)
        draw(FOUND, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(magic)
    with pytest.raises(CaptureError, match=r"should end with one of .*png"):
        check_plot(tmp_path / "a.doc")
