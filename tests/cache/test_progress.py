"""Progress: rate, time left, and lines where there is no terminal."""

import re
import time

import pytest

from cache import progress
from cache.progress import Line, clock, describe, watch


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0:00"), (9.6, "0:10"), (59.4, "0:59"), (60.0, "1:00"), (3599.6, "1:00:00"),
     (3661.0, "1:01:01"), (360000.0, "100:00:00")],
)  # fmt: skip
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_the_rate_counts_from_the_first_element_of_this_run():
    # 4 of 10 were done when the clock started at 100 s; 2 more by 104 s: 2 s each, 4 to go.
    assert describe(6, 10, (4, 100.0), 104.0, tokens=50.0) == "25 tokens/s, 0:08 left"
    assert describe(6, 10, (4, 100.0), 104.0, tokens=0.0) == "0.5/s, 0:08 left"
    bytes_done = describe(6_000_000, 9_000_000, (0, 100.0), 104.0, 0.0, (1_000_000, "MB"))
    assert bytes_done == "1.5 MB/s, 0:02 left"
    assert describe(10, 10, (4, 100.0), 106.0, tokens=50.0) == "50 tokens/s, 0:00 left"


def test_no_rate_is_invented():
    assert describe(4, 10, (4, 100.0), 104.0, tokens=50.0) == "measuring the rate"
    assert describe(5, 10, (4, 100.0), 100.0, tokens=50.0) == "measuring the rate"
    # A receipt was removed meanwhile.
    assert describe(3, 10, (4, 100.0), 104.0, tokens=50.0) == "measuring the rate"


def test_without_a_terminal_the_last_count_is_a_line(capsys):
    done = [3]
    with watch("Scoring", lambda: done[0], before=3, total=5):
        done[0] = 5
    text = capsys.readouterr().err
    assert text.splitlines()[-1].startswith("Scoring: 5/5, ")
    assert "\x1b" not in text


def test_counts_are_shown_while_the_work_is_under_way(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_COUNT", 0.001)
    monkeypatch.setattr(progress, "_LOG", 0.0)
    done = [0]
    with watch("Scoring", lambda: done[0], before=0, total=5):
        for _ in range(1000):
            if capsys.readouterr().err.startswith("Scoring: 0/5, measuring the rate"):
                break
            time.sleep(0.001)
        else:
            raise AssertionError("no line was written")


def test_an_error_of_the_work_goes_through_and_the_thread_ends(capsys):
    with pytest.raises(RuntimeError, match="broken"), watch("x", lambda: 1, before=0, total=5):
        raise RuntimeError("broken")
    assert "x: 1/5" in capsys.readouterr().err


def test_without_a_terminal_a_line_is_written_now_and_then_and_what_is_said_at_once(
    capsys, monkeypatch
):
    with Line("Training", done=2, total=9) as line:
        line.show(3, "fast")
        line.say("[a] warning")
        monkeypatch.setattr(progress, "_LOG", 0.0)
        line.show(4, "slow [x]")
        monkeypatch.undo()
        line.show(5, "fast")
        line.show(5, "done", last=True)
    text = "[a] warning\nTraining: 4/9, slow [x]\nTraining: 5/9, done\n"
    assert capsys.readouterr() == ("", text)


def test_on_a_terminal_the_line_is_live_and_what_is_said_stays_above_it(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with Line("Training", done=2, total=9) as line:
        line.say("[a] warning")
        line.show(5, "slow [x]", last=True)
    text = capsys.readouterr().err
    assert "\x1b[" in text
    # No markup is made of brackets; the last state is what is left on the screen.
    assert "[a] warning" in text
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert re.search(r"Training [━╸]+ 5/9 slow \[x\] ", plain.splitlines()[-1])
    assert "Training: " not in text


def test_counted_work_is_shown_when_it_takes_long(capsys, monkeypatch):
    now = iter([0.0, 1.0, 1.0, 1.0, 6.0, 6.0, 12.0, 12.0, 18.0, 18.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    with progress.counted("Reading") as report:
        for done in (10, 20, 30, 40):
            report(done, 100)
    # The line begins at 1 s; the first that comes 10 s later is at 12 s.
    assert capsys.readouterr().err == "Reading: 30/100, 1.8/s, 0:38 left\n"
