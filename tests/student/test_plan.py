"""What is found out before anything is loaded: objective, steps, epochs, what decides a run."""

from dataclasses import asdict, fields, replace

import numpy as np
import pytest
from flax import nnx

import cache
from student.errors import ObjectiveError, RunError, StudentError
from student.evaluation import kl_objective
from student.objectives import Objective
from student.options import TrainOptions
from student.plan import (
    cache_identity,
    cache_place,
    decides,
    make_plan,
    mass,
    notes,
    objective_of,
    resolve_precision,
)
from student.run import open_run
from student.trained import Checkpoint
from student.trained import _plan as measured_with
from tests.student import runs
from tests.student.small import laid_rows, make_student_cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two caches of 22 rows: a sampled tail, and exact entries alone."""
    folder = tmp_path_factory.mktemp("made")
    for name, settings in (("sampled", {}), ("exact", {"tail": "none"})):
        make_student_cache(folder / name, **settings)
    return folder


def asked(folder, cache="sampled", **changes) -> TrainOptions:
    return runs.options(folder, cache=str(folder / cache / "cache"), **changes)


@pytest.fixture
def two(monkeypatch):
    runs.use_devices(monkeypatch, 2)


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("batch", "epochs", "steps", "ends"),
    [
        (4, 1, 5, (5,)),  # 4.5 batches: the last step has two rows of padding
        (4, 2, 9, (5, 9)),
        (4, 3, 14, (5, 9, 14)),
        (6, 3, 9, (3, 6, 9)),
        (20, 2, 2, (1, 2)),  # an epoch ends within the first step
        (36, 2, 1, (1, 1)),
    ],
)
def test_steps_and_epochs(folder, batch, epochs, steps, ends):
    plan = make_plan(asked(folder, batch=batch, epochs=epochs))
    rows = len(plan.split.training)
    assert rows == 18
    assert (plan.steps, plan.epoch_ends) == (steps, ends)
    # Row by row: the step that ends an epoch is the one with its last row.
    last_rows = [epoch * rows - 1 for epoch in range(1, epochs + 1)]
    assert tuple(row // batch + 1 for row in last_rows) == ends
    for step in range(1, steps + 1):
        assert plan.epoch_of(step) == (step - 1) * batch // rows + 1


@pytest.mark.usefixtures("two")
def test_when_to_evaluate_and_to_save(folder):
    every = range(1, 15)
    plan = make_plan(asked(folder, epochs=3, checkpoint_every=4))
    assert [x for x in every if plan.evaluates_after(x)] == [5, 9, 14]
    assert [x for x in every if plan.checkpoints_after(x)] == [4, 5, 8, 9, 12, 14]
    plan = make_plan(asked(folder, epochs=3, checkpoint_every=100, evaluate_every=6))
    assert [x for x in every if plan.evaluates_after(x)] == [6, 12, 14]
    assert [x for x in every if plan.checkpoints_after(x)] == [6, 12, 14]
    plan = make_plan(asked(folder, epochs=3, checkpoint_every=100, held_out=0.0))
    assert plan.steps == 16
    assert not any(plan.evaluates_after(x) for x in range(1, 17))
    assert [x for x in range(1, 17) if plan.checkpoints_after(x)] == [16]


@pytest.mark.usefixtures("two")
def test_the_length_cuts_labels_and_is_told(folder):
    plan = make_plan(asked(folder, length=5))
    rows = cache.open(folder / "sampled/cache").rows(plan.split.training, "label_mask")
    labels = rows["label_mask"] == 1
    assert (plan.length, plan.split.training_labels) == (5, labels[:, :5].sum())
    assert plan.split.cut_labels == labels[:, 5:].sum() > 0
    told = (
        f"--length 5 of 8: {plan.split.cut_labels} of {labels.sum()} training labels are left out."
    )
    assert told in notes(plan)
    whole = make_plan(asked(folder))
    assert (whole.length, whole.split.training_labels) == (8, labels.sum())
    assert whole.split.cut_labels == 0
    assert not any("--length" in note for note in notes(whole))


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"batch": 3}, StudentError, r"--batch 3 .* each of 2 devices: expected a multiple of 2"),
        ({"batch": 6, "accumulation": 2}, StudentError, "expected a multiple of 4"),
        ({"batch": 38}, StudentError, r"--batch 38 is more than the 18 training rows in 2 epochs"),
        ({"length": 9}, StudentError, "--length 9 is more than the 8 positions"),
        ({"held_out": 22.0}, StudentError, "--held-out 22 is more than the 21 rows with labels"),
        ({"held_out": 21.0}, StudentError, "--held-out 21 takes all 21 rows"),
        ({"temperature": 2.0}, ObjectiveError, "--temperature 2 was not captured"),
        (
            {"objective": "sampled", "cache": "exact"},
            ObjectiveError,
            "needs a cache with a sampled",
        ),
        ({"divergence": "reverse"}, ObjectiveError, "sampled gives --divergence forward only"),
    ],
)
def test_what_does_not_fit(folder, changes, error, message):
    with pytest.raises(error, match=message):
        make_plan(asked(folder, **changes))


def test_without_training_neither_batch_nor_devices_matter(folder, monkeypatch):
    runs.use_devices(monkeypatch, 8)
    plan = make_plan(asked(folder, batch=500), training=False)
    assert len(plan.devices) == 8


def test_the_objective(folder):
    for name, expected in (("sampled", "sampled"), ("exact", "bucket")):
        opened = cache.open(folder / name / "cache")
        chosen = objective_of(asked(folder, name), opened)
        assert (chosen.kind, chosen.temperature) == (expected, 1.0)
        for alone in ({"alpha": 1.0}, {"alpha": 1.0, "alpha_end": 1.0}):
            labels = objective_of(asked(folder, name, **alone), opened)
            assert labels == Objective("labels", no_id=opened.encoding.no_id)
        scheduled = objective_of(asked(folder, name, alpha=1.0, alpha_end=0.5), opened)
        assert scheduled.kind == expected


@pytest.mark.parametrize(
    ("settings", "better"), [({"k": 1, "tail": "none"}, "bucket"), ({"exact": 1}, "sampled")]
)
def test_renormalising_one_entry_is_refused(tmp_path, settings, better):
    flat = np.zeros((22, 8, 60))
    make_student_cache(tmp_path, logits=flat, **settings)
    options = runs.options(tmp_path, objective="renormalise")
    with pytest.raises(ObjectiveError, match=f"learns nothing .* Use --objective {better}"):
        make_plan(options)
    # What was trained so once can be measured.
    assert make_plan(options, training=False).objective.kind == "renormalise"


@pytest.mark.usefixtures("two")
def test_renormalising_several_entries_is_not(folder):
    assert make_plan(asked(folder, objective="renormalise")).objective.kind == "renormalise"


@pytest.mark.usefixtures("two")
def test_a_cache_of_which_nothing_was_drawn_is_a_bucket(tmp_path):
    make_student_cache(tmp_path, exact=6)
    plan = make_plan(runs.options(tmp_path))
    assert plan.objective.kind == "bucket"
    assert any("the rest is one class" in note for note in notes(plan))
    assert kl_objective(plan.cache.encoding)[1] == "bucket, temperature 1"
    with pytest.raises(ObjectiveError, match=r"needs a cache with a sampled tail.*--tail sampled"):
        make_plan(runs.options(tmp_path, objective="sampled"))


def test_the_precision():
    class Device:
        def __init__(self, platform: str):
            self.platform = platform

    cpu, gpu = Device("cpu"), Device("gpu")
    assert resolve_precision("auto", [cpu, cpu]) == "float32"
    assert resolve_precision("auto", [gpu]) == "bfloat16"
    assert resolve_precision("bfloat16", [cpu]) == "bfloat16"
    assert resolve_precision("float32", [gpu]) == "float32"


def test_a_cache_is_known_by_its_content(folder, tmp_path):
    opened = cache.open(folder / "sampled/cache")
    make_student_cache(tmp_path / "same")
    make_student_cache(tmp_path / "other", seed=1)
    assert cache_identity(cache.open(tmp_path / "same/cache")) == cache_identity(opened)
    assert cache_identity(cache.open(tmp_path / "other/cache")) != cache_identity(opened)
    assert cache_identity(cache.open(folder / "exact/cache")) != cache_identity(opened)


def test_a_cache_is_found_from_any_folder(folder, monkeypatch):
    monkeypatch.chdir(folder / "sampled")
    assert cache_place(cache.open("cache")) == str((folder / "sampled/cache").resolve())


# Of `TrainOptions`: what may change from session to session. `objective`, `divergence`, `beta`,
# `temperature` and `precision` are recorded as they were resolved; the cache by its content.
FREE = {
    *("cache", "out", "accumulation", "remat", "chunk", "checkpoint_every", "evaluate_every"),
    *("keep", "keep_best", "track", "project", "local_copy"),
}


@pytest.mark.usefixtures("two")
def test_what_decides_a_run(folder):
    plan = make_plan(asked(folder))
    found = decides(plan)
    expected = {field.name for field in fields(TrainOptions)} - FREE | {"cache"}
    # Not named where it is off: runs from before there were blocks have no such field.
    assert set(found) == expected - {"shuffle_block"}
    assert decides(make_plan(asked(folder, shuffle_block=8)))["shuffle_block"] == 8
    assert found["cache"] == {"identity": cache_identity(plan.cache)}
    assert (found["objective"], found["temperature"], found["precision"]) == (
        "sampled",
        1.0,
        "float32",
    )
    same = {"accumulation": 2, "remat": True, "chunk": 3, "keep": 9, "keep_best": False}
    same |= {"checkpoint_every": 7, "evaluate_every": 3, "track": ("wandb",), "project": "x"}
    same |= {"local_copy": None}
    assert set(same) | {"cache", "out"} == FREE
    assert decides(make_plan(asked(folder, out="elsewhere", **same))) == found
    # What is unset and what it stands for are the same.
    explicit = {"objective": "sampled", "temperature": 1.0, "precision": "float32"}
    assert decides(make_plan(asked(folder, **explicit))) == found
    others = {
        "student": "x",
        "student_revision": "r",
        "drop_layers": "1",
        "trim_vocabulary": True,
        "held_out": 4.0,
        "epochs": 3,
        "length": 6,
        "seed": 1,
        "objective": "bucket",
        "alpha": 0.4,
        "alpha_end": 0.4,
        "batch": 6,
        "learning_rate": 0.02,
        "warmup": 0.1,
        "final_learning_rate": 0.2,
        "weight_decay": 0.2,
        "clip": 2.0,
        "precision": "bfloat16",
    }
    for name, value in others.items():
        changed = decides(make_plan(asked(folder, **{name: value})))
        assert {key for key in found if changed[key] != found[key]} == {name}
    exact = decides(make_plan(asked(folder, "exact")))
    for name, value in {"divergence": "js", "temperature": 2.0}.items():
        changed = decides(make_plan(asked(folder, "exact", **{name: value})))
        assert {key for key in exact if changed[key] != exact[key]} == {name}
    mixed = decides(make_plan(asked(folder, "exact", divergence="js", beta=0.3)))
    assert {key for key in exact if mixed[key] != exact[key]} == {"divergence", "beta"}
    assert (exact["divergence"], exact["beta"]) == ("forward", 0.5)


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """Ten documents, each twice, of 20 tokens in rows of 8 that repeat 6: 70 x 2 rows, 10 x 2 of
    which have a label in their first 4 positions."""
    corpus = [[6 * text + place % 6 for place in range(20)] for text in range(10)] * 2
    folder = tmp_path_factory.mktemp("copied")
    laid = laid_rows(corpus, overlap=6)
    make_student_cache(folder / "copies", laid=laid, rows_per_shard=200)
    return folder


@pytest.mark.usefixtures("two")
def test_copies_and_emptied_rows_are_told_and_decide(copied):
    changes = {"held_out": 14.0}, {"length": 4}
    told = [notes(make_plan(asked(copied, "copies", **each))) for each in changes]
    same = "10 documents and {} rows are exact copies of others: copies stay on one side."
    # Within a document, every third row is the same again.
    assert same.format(110) in told[0]
    assert same.format(10) in told[1]
    assert not any("label left" in note for note in told[0])
    assert "--length 4 of 8: 120 rows have no label left: left out." in told[1]
    assert told[1][0].startswith("18 rows with 72 labels to train on, 2 with 8 held out, of 10 g")
    plans = [make_plan(asked(copied, "copies", length=4, seed=seed)) for seed in (0, 0, 1)]
    digests = [decides(plan)["split"] for plan in plans]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.usefixtures("two")
def test_a_text_that_ties_most_rows_is_warned_of(tmp_path):
    """In six of eight packed rows; held out is what is without it."""
    corpus = [([50, 51, 52], [text, 20, 21, 22, 23]) for text in range(6)]
    corpus += [([text, 30, 31, 32, 33, 34, 35, 36],) for text in (7, 8)]
    laid = laid_rows([document for row in corpus for document in row], "pack")
    make_student_cache(tmp_path / "tied", laid=laid, rows_per_shard=20)
    plan = make_plan(asked(tmp_path, "tied", held_out=2.0, batch=2))
    assert plan.split.held_out.tolist() == [6, 7]
    (warning,) = [note for note in notes(plan) if note.startswith("Warning: 6 of 8 rows hang")]
    assert "may be unlike the rest" in warning


@pytest.mark.usefixtures("two")
def test_a_run_from_before_copies_were_kept_together(copied, tmp_path):
    """It had another split: neither training nor evaluating may take the one of now for it."""
    plan = make_plan(asked(copied, "copies", length=4, out=str(tmp_path / "run")))
    record = decides(plan)
    before = {name: value for name, value in record.items() if name != "split"}
    open_run(tmp_path / "run", before, {}).close()
    with pytest.raises(RunError, match="split: other rows are held out, for copies were not look"):
        open_run(tmp_path / "run", record, {})
    for known, refused in ((before, True), (record, False)):
        trained = Checkpoint(known, plan.options, 0, {}, nnx.Module(), ())
        if refused:
            with pytest.raises(RunError, match="was trained on some of the rows that would be mea"):
                measured_with(trained)
        else:
            assert measured_with(trained).split.digest == plan.split.digest


@pytest.mark.usefixtures("two")
def test_whole_numbers_decide_as_the_command_line_gives_them(folder):
    """From Python `alpha=1` is what `--alpha 1` is on the command line, where it is 1.0."""
    plan = make_plan(asked(folder))
    whole = replace(plan, options=asked(folder, held_out=3.0, alpha=1.0, clip=2.0))
    for name in ("held_out", "alpha", "clip"):
        object.__setattr__(plan.options, name, int(getattr(whole.options, name)))
    given = {name: (type(x), x) for name, x in decides(plan).items()}
    assert given == {name: (type(x), x) for name, x in decides(whole).items()}


def test_the_mass_is_that_of_the_exact_entries(folder):
    """Against the stored targets: the mean over labels of 1 - the tail's mass."""
    for name, temperature in (("sampled", 1.0), ("exact", 1.0), ("exact", 4.0)):
        plan = make_plan(
            asked(folder, name, temperature=temperature, objective="bucket"), training=False
        )
        rows = plan.cache.rows(slice(None), ("tail_logprobs", "label_mask"))
        place = plan.cache.encoding.temperatures.index(temperature)
        tail = rows["tail_logprobs"][..., place][rows["label_mask"] == 1]
        expected = 1 - np.exp(tail.astype(np.float64)).mean()
        assert mass(plan) == pytest.approx(expected, abs=2e-3)
    plan = make_plan(
        asked(folder, "exact", temperature=3.0, objective="renormalise"), training=False
    )
    assert mass(plan) is None


@pytest.mark.parametrize(
    ("changes", "expected", "warned"),
    [
        ({}, "Objective: sampled, temperature 1. The entries stand for all", None),
        ({"alpha": 1.0}, "the labels alone; the teacher is not used", None),
        ({"objective": "bucket"}, "bucket (forward), temperature 1", "--objective sampled learns"),
        ({"cache": "exact", "temperature": 4.0}, "bucket (forward)", "A lower --temperature has"),
        ({"objective": "renormalise"}, "renormalise (forward)", "--objective sampled does not"),
        ({"objective": "renormalise", "cache": "exact"}, "renormalise", "--objective bucket does"),
    ],
)
def test_what_is_told(folder, changes, expected, warned):
    plan = make_plan(asked(folder, **changes), training=False)
    told = notes(plan)
    assert told[0].startswith(
        f"18 rows with {plan.split.training_labels} labels to train on, 3 with "
    )
    assert "1 rows have nothing to predict: left out." in told  # C16: row 5
    text = "\n".join(told)
    assert expected in text
    warnings = [note for note in told if note.startswith("Warning")]
    assert len(warnings) == (warned is not None)
    if warned is not None:
        assert warned in warnings[0]


def test_what_is_read_for_training(folder):
    """The tail at the objective's temperature; renormalising, which has none, does with any."""
    for changes, temperature in (
        ({"temperature": 4.0}, 4.0),
        ({}, 1.0),
        ({"objective": "renormalise", "temperature": 3.0}, None),
    ):
        plan = make_plan(asked(folder, "exact", length=6, seed=5, **changes), training=False)
        settings = plan.input_settings(77)
        assert (settings.batch, settings.epochs, settings.seed) == (4, 2, 5)
        reading = settings.reading
        assert (reading.most_id, reading.length, reading.targets) == (77, 6, True)
        assert reading.temperature == temperature
    plan = make_plan(asked(folder, "exact", alpha=1.0), training=False)
    assert not plan.input_settings(77).reading.targets


def test_options_are_kept_with_the_plan(folder):
    asked_for = asked(folder, "exact")
    assert asdict(make_plan(asked_for, training=False).options) == asdict(asked_for)
