"""Options of training: those that would do nothing beside the others are refused."""

from typing import Any

import pytest

from student.errors import StudentError
from student.options import EvaluateOptions, TrainOptions


def _options(**changes: Any) -> TrainOptions:
    return TrainOptions(**{"cache": "c", "student": "s", "out": "o", **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": 0.9}, "--beta 0.9 is of --divergence js and does nothing with --divergence forw"),
        ({"beta": 0.5, "objective": "bucket"}, "--beta 0.5 is of --divergence js"),
        ({"beta": 0.5, "divergence": "tv"}, "does nothing with --divergence tv.* or give --diverg"),
        ({"beta": 1.0, "divergence": "js"}, "--beta should be above 0 and below 1, found 1.0"),
        ({"alpha": 1.0, "objective": "bucket"}, "--objective bucket does nothing with --alpha 1"),
        ({"alpha": 1.0, "divergence": "forward"}, "--divergence forward does nothing with --alpha"),
        ({"alpha": 1.0, "temperature": 2.0}, "--temperature 2.0 does nothing with --alpha 1"),
        (
            {"alpha": 1.0, "alpha_end": 1.0, "objective": "sampled"},
            "--objective sampled does nothin",
        ),
        ({"held_out": 0.0, "evaluate_every": 5}, "--evaluate-every 5 does nothing with --held-out"),
        ({"project": "p"}, "--project p is of Weights & Biases.* --track wandb"),
        ({"project": "p", "track": ("tensorboard",)}, "--project p is of Weights & Biases"),
    ],
)
def test_options_without_effect_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StudentError, match=message):
        _options(**changes)


def test_they_are_taken_where_they_have_one() -> None:
    assert _options(divergence="js", beta=0.9).mixture == 0.9
    assert _options(divergence="js").mixture == 0.5
    assert _options(alpha=1.0, alpha_end=0.5, objective="bucket", temperature=2.0).alpha == 1
    assert _options(alpha=0.5, alpha_end=1.0, divergence="tv").divergence == "tv"
    assert _options(track=("wandb",), project="p").project == "p"


def test_a_revision_of_no_teacher_is_refused() -> None:
    with pytest.raises(StudentError, match="--teacher-revision main is of --teacher"):
        EvaluateOptions("run", teacher_revision="main")
    assert EvaluateOptions("run", teacher="t", teacher_revision="main").teacher == "t"
