"""A run whose cache has grown since it began goes on with the rows that it began with."""

import json
import shutil
from pathlib import Path

import pytest

from student.errors import RunError
from student.options import EvaluateOptions
from student.run import read_run
from student.train import train
from student.trained import evaluate
from tests.cache import builder
from tests.student import runs
from tests.student.small import make_student_cache


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    runs.quick(monkeypatch)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A cache and a student; the runs `whole`, and `half`, which was stopped before step 6."""
    folder = tmp_path_factory.mktemp("made")
    built, _ = make_student_cache(folder, vocabulary=runs.VOCABULARY)
    runs.write_student(folder / "student")
    with pytest.MonkeyPatch.context() as patch:
        runs.quick(patch)
        train(runs.options(folder, "whole"))
        with runs.killed_at("_log", 5), pytest.raises(runs.Killed):
            train(runs.options(folder, "half"))
        builder.grow(built)
    return folder


def test_a_run_goes_on_with_the_rows_it_began_with(made):
    outcome, said = runs.run(runs.options(made, "half"))
    assert 0 < outcome.steps < 9
    assert "The cache has grown by 6 rows since this run began: it goes on with the 22 " in said
    assert runs.saved(made / "half", 9) == runs.saved(made / "whole", 9)


def test_a_finished_run_is_finished_and_can_be_evaluated(made):
    _, said = runs.run(runs.options(made, "whole"))
    assert "is finished: 9 steps" in said
    step, found = evaluate(EvaluateOptions(str(made / "whole")))
    last = runs.raw_lines(made / "whole/evaluations.jsonl")[-1]
    assert (step, last["step"]) == (9, 9)
    assert found.to_json()["cross_entropy"] == last["cross_entropy"]


def test_a_new_run_takes_all_rows(made):
    _, said = runs.run(runs.options(made, "new"))
    assert "has grown" not in said
    cache = read_run(made / "new")["cache"]
    assert cache != read_run(made / "whole")["cache"]


def test_another_cache_is_still_refused(made, tmp_path):
    built, _ = make_student_cache(tmp_path, vocabulary=runs.VOCABULARY, seed=9)
    builder.grow(built)
    shutil.copytree(made / "whole", tmp_path / "run")
    before = json.loads((tmp_path / "run/run.json").read_text())
    with pytest.raises(RunError, match=r"cache\.identity: the cache is another one"):
        train(runs.options(made, cache=str(tmp_path / "cache"), out=str(tmp_path / "run")))
    assert json.loads((tmp_path / "run/run.json").read_text()) == before
