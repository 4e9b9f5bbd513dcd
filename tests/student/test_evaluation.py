"""Every measure against plain numpy over all labels; the same for any batch and device count."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import jax
import numpy as np
import pytest

import cache
from cache.encoding import weights
from student.batches import Batch, BatchSettings, read_batch
from student.errors import StudentError
from student.evaluation import Evaluation, Measures, kl_objective, make_row_sums, mean_over
from student.input import held_out_batches
from student.objectives import choose
from student.step import LossSettings, make_gradients, place, replicate
from tests.cache.builder import Built, log_softmax, make_encoding, make_rows
from tests.student import plain
from tests.student.small import VOCABULARY, labels_of, make_student_cache

# More rows than there are tokens; the four of them between are no token's.
ROWS = 64
LEGAL = np.arange(ROWS) < VOCABULARY
FUNCTIONS = plain.functions(ROWS)
# The cache's teacher, and a student that agrees with it now and then.
THEIRS, OTHER = (plain.parameters(ROWS, VOCABULARY, seed) for seed in (1, 15))
PARAMETERS = {name: x + 0.8 * OTHER[name] for name, x in THEIRS.items()}
HELD_OUT = np.array([0, 1, 2, 3, 5, 8, 9, 14, 20, 21], np.int64)  # 3: half padding, 5: no label
ALPHA = 0.3


@pytest.fixture(scope="module", params=["sampled", "none"])
def case(request, tmp_path_factory) -> tuple[Built, cache.Cache]:
    rows = make_rows(22, make_encoding())
    logits = plain.logits(THEIRS, rows["tokens"].astype(int), rows["segments"])
    return make_student_cache(
        tmp_path_factory.mktemp("cache"),
        tail=request.param,
        logprobs="float32",
        logits=logits[..., :VOCABULARY],
    )


def objective_of(opened: cache.Cache) -> Any:
    """Another one than the KL's: at T = 2 where that was captured."""
    if opened.encoding.tail == "none":
        return choose(opened.encoding, "bucket", "reverse", temperature=2.0)
    return choose(opened.encoding, "bucket", "tv")


def measures_of(opened: cache.Cache, objective: Any) -> Measures:
    kl = kl_objective(opened.encoding)[0]
    return Measures(LossSettings(objective, legal=LEGAL, chunk=12), kl, VOCABULARY)


def batches(opened: cache.Cache, objective: Any, size: int, rows: Any = HELD_OUT) -> Any:
    kl = kl_objective(opened.encoding)[0]
    settings = BatchSettings(ROWS, temperature=kl.temperature)
    soft = replace(settings, temperature=objective.temperature)
    for batch in held_out_batches(opened, rows, settings, size):
        same = objective == kl
        yield batch, None if same else read_batch(opened, soft, batch.rows).targets


_MADE: dict[Any, Any] = {}


def row_sums(opened: cache.Cache, objective: Any, devices: int, teacher: bool) -> Any:
    """Compiling is most of the time: one program for all evaluations that can share it."""
    key = (opened.encoding.tail, objective, devices, teacher)
    if key not in _MADE:
        theirs = FUNCTIONS if teacher else None
        measures, used = measures_of(opened, objective), jax.devices()[:devices]
        _MADE[key] = make_row_sums(FUNCTIONS, measures, used, theirs)
    return _MADE[key]


def evaluate(
    opened: cache.Cache,
    size: int,
    devices: int = 1,
    *,
    objective: Any = None,
    teacher: bool = True,
    change: Any = lambda batch: batch,
    **more: Any,
) -> Evaluation:
    objective = objective or objective_of(opened)
    used = jax.devices()[:devices]
    return mean_over(
        row_sums(opened, objective, devices, teacher),
        replicate(PARAMETERS, used),
        ((change(batch), soft) for batch, soft in batches(opened, objective, size)),
        objective,
        ALPHA,
        kl_objective(opened.encoding)[1],
        used,
        replicate(THEIRS, used) if teacher else None,
        **more,
    )


class Expected:
    """The measures in float64, over a flat list of labels."""

    def __init__(self, built: Built, student: dict[str, Any] = PARAMETERS):
        arrays = {name: values[HELD_OUT] for name, values in built.arrays.items()}
        here = arrays["label_mask"] == 1
        self.labels = labels_of(built)[HELD_OUT][here]
        self.count = len(self.labels)
        self.arrays = {name: values[here] for name, values in arrays.items()}
        self.encoding = built.encoding
        tokens, segments = arrays["tokens"].astype(int), arrays["segments"]
        self.logits = plain.logits(student, tokens, segments)[here][:, :VOCABULARY]
        self.logq = log_softmax(self.logits)
        theirs = plain.logits(THEIRS, tokens, segments)[here][:, :VOCABULARY]
        self.logp = log_softmax(theirs)

    def ce(self) -> float:
        return -self.logq[np.arange(self.count), self.labels].mean()

    def classes(self, temperature: float) -> tuple[np.ndarray, np.ndarray]:
        """Both sides' probabilities of the exact entries and the rest."""
        at = self.encoding.temperatures.index(temperature)
        w = weights(self.arrays, self.encoding, temperature).astype(np.float64)
        q = np.exp(log_softmax(self.logits / temperature))
        p, ours = [], []
        for i in range(self.count):
            exact = int(self.arrays["exact_counts"][i])
            kept = q[i, self.arrays["target_ids"][i, :exact].astype(int)]
            tail = math.exp(self.arrays["tail_logprobs"][i, at].astype(float))
            p.append(np.pad([*w[i, :exact], tail], (0, self.encoding.k - exact)))
            ours.append(np.pad([*kept, 1 - kept.sum()], (0, self.encoding.k - exact)))
        return np.array(p), np.array(ours)

    def kl(self) -> float:
        if self.encoding.tail == "none":
            p, q = self.classes(1.0)
            return (p * np.log(p / q)).sum(-1).mean()
        w = weights(self.arrays, self.encoding, 1.0).astype(np.float64)
        logq = np.take_along_axis(self.logq, self.arrays["target_ids"].astype(int), axis=-1)
        return (-(w * logq).sum(-1) - self.arrays["entropy"].astype(float)).mean()

    def kd(self) -> float:
        """What `objective_of` trains on."""
        if self.encoding.tail == "none":
            p, q = self.classes(2.0)
            return (q * np.log(q / p)).sum(-1).mean()
        p, q = self.classes(1.0)
        return np.abs(p - q).sum(-1).mean() / 2

    def kl_full(self) -> float:
        return (np.exp(self.logp) * (self.logp - self.logq)).sum(-1).mean()

    def top(self, count: int) -> float:
        """Share at which the teacher's first is among the student's first `count`."""
        first = np.argsort(-self.logits, axis=-1)[:, :count]
        return (first == self.arrays["target_ids"][:, :1]).any(-1).mean()

    def hits(self) -> np.ndarray:
        return self.logits.argmax(-1) == self.labels

    def ece(self) -> float:
        confidence = np.exp(self.logq.max(-1))
        total = 0.0
        for low in range(15):
            inside = (confidence >= low / 15) & ((confidence < (low + 1) / 15) | (low == 14))
            if inside.any():
                gap = abs(confidence[inside].mean() - self.hits()[inside].mean())
                total += inside.sum() / self.count * gap
        return total

    def teacher_ce(self) -> float:
        return -self.arrays["label_logprobs"].astype(np.float64).mean()


@pytest.fixture(scope="module")
def found(case) -> Evaluation:
    return evaluate(case[1], 4)


def test_every_measure_is_that_of_plain_numpy(case, found):
    built, opened = case
    expected = Expected(built)
    assert (found.rows, found.labels) == (10, expected.count)
    close = {
        "cross_entropy": expected.ce(),
        "perplexity": math.exp(expected.ce()),
        "kl": expected.kl(),
        "kl_full": expected.kl_full(),
        "top1": expected.top(1),
        "top5": expected.top(5),
        "accuracy": expected.hits().mean(),
        "ece": expected.ece(),
        "teacher_cross_entropy": expected.teacher_ce(),
        "teacher_perplexity": math.exp(expected.teacher_ce()),
    }
    for name, value in close.items():
        assert getattr(found, name) == pytest.approx(value, rel=2e-5, abs=1e-6), name
    square = objective_of(opened).temperature ** 2
    loss = ALPHA * expected.ce() + (1 - ALPHA) * square * expected.kd()
    assert found.loss == pytest.approx(loss, rel=2e-5)
    # The fixture tells the measures apart.
    assert 0 < found.top1 < expected.top(4) < found.top5 < expected.top(6) < 1
    assert found.accuracy > 0
    assert abs(found.kl - found.kl_full) > 0.01
    exact = built.encoding.tail == "none"
    assert found.kl_kind == ("bucket, temperature 1" if exact else "estimate")
    assert found.to_json()["cross_entropy"] == found.cross_entropy


@pytest.mark.parametrize(
    ("case", "size", "devices"),
    [("none", *each) for each in ((1, 1), (2, 1), (10, 1), (4, 2), (8, 8))] + [("sampled", 10, 1)],
    indirect=["case"],
)
def test_neither_batch_nor_devices_decide_a_number(case, found, size, devices):
    """C44: ten rows; most of these do not divide them."""
    other, expected = evaluate(case[1], size, devices).to_json(), found.to_json()
    for name, value in expected.items():
        if isinstance(value, float):
            assert other[name] == pytest.approx(value, rel=1e-6), name
        else:
            assert other[name] == value, name


def test_the_training_loss_is_the_evaluations(case):
    """C44: on the same rows without an update; progress is told."""
    _, opened = case
    objective, used = objective_of(opened), jax.devices()[:1]
    done: list[int] = []
    found = evaluate(opened, 4, progress=done.append)
    batch = read_batch(opened, BatchSettings(ROWS, temperature=objective.temperature), HELD_OUT)
    settings = measures_of(opened, objective).training
    metrics = make_gradients(FUNCTIONS, settings, used)(
        replicate(PARAMETERS, used), place(batch, 1, used), np.float32(ALPHA)
    )[1]
    assert float(metrics.labels) == found.labels
    assert float(metrics.sums.loss) / found.labels == pytest.approx(found.loss, rel=1e-6)
    assert float(metrics.sums.ce) / found.labels == pytest.approx(found.cross_entropy, rel=1e-6)
    assert done == [4, 8, 10]


@pytest.mark.parametrize("case", ["sampled"], indirect=True)
def test_without_another_objective_the_loss_holds_the_kl(case):
    _, opened = case
    kl = kl_objective(opened.encoding)[0]
    found = evaluate(opened, 5, objective=kl, teacher=False)
    assert found.kl_full is None
    expected = ALPHA * found.cross_entropy + (1 - ALPHA) * found.kl
    assert found.loss == pytest.approx(expected, rel=1e-9)


def test_labels_that_the_teacher_held_impossible(case, found):
    """Its perplexity is infinite, and nothing else is touched."""

    def change(batch: Batch) -> Batch:
        logprobs = batch.label_logprobs.copy()
        places = np.argwhere(batch.label_mask & (batch.rows == 8)[:, None])
        for row, position in places[:1]:
            logprobs[row, position] = -np.inf
        return batch._replace(label_logprobs=logprobs)

    other = evaluate(case[1], 4, change=change).to_json()
    assert other["teacher_perplexity"] == other["teacher_cross_entropy"] == math.inf
    rest = {name: value for name, value in other.items() if not name.startswith("teacher")}
    assert rest == {name: found.to_json()[name] for name in rest}


def test_values_where_there_is_no_label_change_nothing(case, found):
    def change(batch: Batch) -> Batch:
        logprobs = np.where(batch.label_mask, batch.label_logprobs, np.nan)
        targets = jax.tree.map(np.array, batch.targets)
        for values in targets:
            values[~batch.label_mask] = np.nan if values.dtype.kind == "f" else 59
        return batch._replace(label_logprobs=logprobs.astype(np.float32), targets=targets)

    assert evaluate(case[1], 4, change=change) == found


@pytest.mark.parametrize(
    ("case", "rows", "parameters", "message"),
    [
        ("sampled", [], PARAMETERS, "no held-out row"),
        ("sampled", [5], PARAMETERS, "the held-out rows have no label"),
        ("sampled", [8], jax.tree.map(lambda x: x * np.nan, PARAMETERS), "ce .* is not a number"),
    ],
    indirect=["case"],
)
def test_what_cannot_be_evaluated_is_refused(case, rows, parameters, message):
    _, opened = case
    kl, used = kl_objective(opened.encoding)[0], jax.devices()[:1]
    given = batches(opened, kl, 5, np.array(rows, np.int64)) if rows else []
    with pytest.raises(StudentError, match=message):
        mean_over(
            row_sums(opened, kl, 1, False),
            replicate(parameters, used),
            given,
            kl,
            ALPHA,
            "",
            used,
        )


def test_how_the_kl_is_measured_follows_from_the_cache():
    found = [
        kl_objective(make_encoding(**changes))
        for changes in (
            {"tail": "sampled"},
            {"tail": "sampled", "temperatures": (2.0,)},
            {"temperatures": (0.5, 1.0, 2.0)},
            {"temperatures": (2.0, 4.0)},
        )
    ]
    assert [(kl.kind, kl.temperature, kl.divergence) for kl, _ in found] == [
        ("sampled", 1.0, "forward"),
        ("bucket", 2.0, "forward"),
        ("bucket", 1.0, "forward"),
        ("bucket", 2.0, "forward"),
    ]
    assert [name for _, name in found] == [
        "estimate",
        "bucket, temperature 2",
        "bucket, temperature 1",
        "bucket, temperature 2",
    ]


@pytest.mark.parametrize(
    ("student", "teacher", "better"),
    [(2.0, 2.0, False), (2.0, 2.00001, False), (2.0, 2.05, True), (2.05, 2.0, False)],
)
def test_a_student_as_good_as_its_teacher_is_not_better(student, teacher, better):
    values = dict.fromkeys((field.name for field in fields(Evaluation)), 0.5)
    values |= {"rows": 2, "labels": 9, "kl_kind": "bucket", "kl_full": None}
    values |= {"cross_entropy": student, "teacher_cross_entropy": teacher}
    assert Evaluation(**values).beats_teacher is better
