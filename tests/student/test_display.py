"""What training shows, and the table of evaluations."""

import math

import pytest

from cache import progress
from student.display import Display, Moment, line, table

MOMENT = Moment(
    step=12, epoch=2, loss=3.21449, cross_entropy=3.5, distillation=2.9289999,
    learning_rate=1e-5, tokens=400,
)  # fmt: skip


def test_a_step_in_words():
    assert line(MOMENT, 3, "178 tokens/s, 3:12 left") == (
        "epoch 2/3, loss 3.214 (CE 3.500, KD 2.929), learning rate 1e-05, 178 tokens/s, 3:12 left"
    )


def test_labels_alone_have_no_distillation():
    moment = Moment(1, 1, 3.2, 3.2, None, 3.14159e-4, 400)
    assert (
        line(moment, 1, "fast") == "epoch 1/1, loss 3.200 (CE 3.200), learning rate 0.00031, fast"
    )


class Clock:
    """Time that a test sets."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("student.display.time", clock)
    monkeypatch.setattr("cache.progress.time", clock)
    return clock


def test_a_line_every_ten_seconds_and_the_last(clock, capsys):
    assert progress._LOG == 10.0
    with Display(total=20, epochs=2, before=10) as display:
        for step in range(11, 18):
            # Compiling takes 30 s, each step then 4 s for 200 tokens.
            clock.now += 30 if step == 11 else 4
            display.update(Moment(step, 2, 3.0, 3.0, None, 1e-5, tokens=200))
        display.say("step 17: held-out loss 2.5")
    assert capsys.readouterr().err.splitlines() == [
        f"Training: {text}" if text[0].isdigit() else text
        for text in (
            "11/20, epoch 2/2, loss 3.000 (CE 3.000), learning rate 1e-05, measuring the rate",
            "14/20, epoch 2/2, loss 3.000 (CE 3.000), learning rate 1e-05, 50 tokens/s, 0:24 left",
            "17/20, epoch 2/2, loss 3.000 (CE 3.000), learning rate 1e-05, 50 tokens/s, 0:12 left",
            "step 17: held-out loss 2.5",
            "17/20, epoch 2/2, loss 3.000 (CE 3.000), learning rate 1e-05, 50 tokens/s, 0:12 left",
        )
    ]


def test_an_error_goes_through_after_the_last_line(clock, capsys):
    def train():
        with Display(20, 2) as display:
            display.update(MOMENT)
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        train()
    assert capsys.readouterr().err.startswith("Training: 12/20, epoch 2/2, loss 3.214")
    with Display(20, 2):
        pass
    assert capsys.readouterr().err == ""


def test_runs_side_by_side():
    rows = [
        {"name": "soft", "epoch": 1, "step": 32, "cross_entropy": 3.4312, "kl": 1.33,
         "perplexity": 30.914, "top1": 0.5049, "top5": 0.75, "ece": 0.0312,
         "tokens_per_second": 17800.4},
        {"name": "hard", "epoch": 2, "step": 1064, "cross_entropy": 7.5,
         "perplexity": 1808.04, "top1": None, "ece": math.nan, "rows": 3},
    ]  # fmt: skip
    assert table(rows).splitlines() == [
        "student  epoch   step  cross-entropy  perplexity     KL   top-1   top-5    ECE  tokens/s",
        "soft         1     32          3.431       30.91  1.330  50.5 %  75.0 %  3.1 %    17,800",
        "hard         2  1,064          7.500       1,808      –       –       –      –         –",
    ]  # fmt: skip


def test_columns_that_no_row_has_are_left_out():
    assert table([{"step": 3, "cross_entropy": 2.0, "kl": None}, {"step": 4}]).splitlines() == [
        "step  cross-entropy",
        "   3          2.000",
        "   4              –",
    ]
    assert table([]) == ""
