"""Tables, recommendations and JSON of a comparison made by hand."""

import json
import math

import pytest

from pipelines.compare import Comparison, Recommendation
from pipelines.compare_options import Setting
from pipelines.compare_show import check_plot, draw, render, render_recommendation, to_json
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
