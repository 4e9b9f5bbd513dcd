"""From a capture, or a cache made by hand, to the loss: each target meets its own position.

A student with its teacher's weights and a cache of the whole vocabulary has nothing to learn:
whatever is shifted, mixed up, or read otherwise than it was captured shows as a loss.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cache
import decoder
from student.batches import Batch, BatchSettings, read_batch
from student.functions import parameters_of, student_functions
from student.input import InputSettings, TrainingInput
from student.losses import position_losses
from student.objectives import Objective, choose
from student.options import TrainOptions
from student.step import (
    LossSettings,
    flat_positions,
    hidden_states,
    make_batch_loss,
    make_gradients,
    place,
    replicate,
)
from student.students import build
from tests.cache import builder
from tests.models import write_tiny_teacher
from tests.pipelines import small
from tests.student import plain

VOCABULARY, ROWS = 300, 4
EXACT = {"k": VOCABULARY, "logprobs": "float32", "tail": "none", "temperatures": (1.0, 2.0)}
CAPTURES: dict[str, dict[str, Any]] = {
    "pack": EXACT,
    "pad": {**EXACT, "layout": "pad"},
    # With as many entries as tokens, a sampled tail has nothing left to draw.
    "sampled": {**EXACT, "tail": "sampled", "temperatures": (1.0,)},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A teacher of one layer and real captures of it."""
    folder = tmp_path_factory.mktemp("made")
    write_tiny_teacher(folder / "teacher", layers=1, width=16, heads=2, kv_heads=1, mlp_width=32)
    with pytest.MonkeyPatch.context() as patch:
        small.quick(patch)
        for name, settings in CAPTURES.items():
            small.capture(folder, name, **settings)
    return folder


@pytest.fixture(scope="module")
def student(made) -> Any:
    """Functions and parameters of a student that starts from the teacher's checkpoint."""
    asked = TrainOptions(cache="c", out="o", student=str(made / "teacher"))
    built = build(asked, cache.open(made / "pack"), list)
    assert built.legal is None
    return student_functions(built.model), parameters_of(built.model)


@pytest.fixture(scope="module")
def losses(student) -> Any:
    """A function (objective, batch) to KD and CE per label; compiled once per objective."""
    functions, parameters = student
    compiled: dict[Objective, Any] = {}

    def per_label(objective: Objective, batch: Batch) -> tuple[float, float]:
        if objective not in compiled:
            loss = make_batch_loss(functions, LossSettings(objective, chunk=16))
            compiled[objective] = jax.jit(lambda p, b: loss(p, b, jnp.float32(0.5)))
        sums = compiled[objective](parameters, jax.tree.map(jnp.asarray, batch))
        labels = batch.label_mask.sum()
        return float(sums.kd) / labels, float(sums.ce) / labels

    return per_label


def batches(opened: cache.Cache, temperature: float = 1.0, seed: int = 0, **more: Any) -> Any:
    """Those of a training run, in its order; rows without a label are left out, as there."""
    mask = opened.rows(slice(None), "label_mask")["label_mask"]
    rows = np.flatnonzero((mask == 1).any(axis=1))[: more.get("first")]
    reading = BatchSettings(VOCABULARY, temperature=temperature)
    settings = InputSettings(reading, ROWS, more.get("epochs", 1), seed)
    with TrainingInput(opened, rows, settings) as source:
        yield from source


def rolled(batch: Batch, axis: int) -> Batch:
    """The targets of the row, or position, before."""
    targets = jax.tree.map(lambda x: np.roll(x, 1, axis), batch.targets)
    # Of those that are some position's own.
    has = np.roll(batch.label_mask, 1, axis)
    return batch._replace(targets=targets, label_mask=batch.label_mask & has)


@pytest.mark.parametrize(
    ("name", "objective", "temperature"),
    [
        ("pack", "bucket", 1.0),
        ("pad", "bucket", 1.0),
        ("pack", "bucket", 2.0),
        ("pack", "renormalise", 1.0),
        ("pad", "renormalise", 1.0),
        ("sampled", "sampled", 1.0),
        ("sampled", "bucket", 1.0),
    ],
)
def test_a_student_with_its_teachers_weights_has_nothing_to_learn(
    made, losses, name, objective, temperature
):
    """C11, C14, C15: packed and padded; and rolled by one position there is much to learn."""
    opened = cache.open(made / name)
    chosen = choose(opened.encoding, objective, temperature=temperature)
    count = 0
    for batch in batches(opened, temperature):
        kd, ce = losses(chosen, batch)
        assert abs(kd) <= 1e-5
        assert ce == pytest.approx(-batch.label_logprobs[batch.label_mask].mean(), abs=1e-5)
        assert losses(chosen, rolled(batch, axis=1))[0] > 0.05
        count += int(batch.label_mask.sum())
    statistics = opened.manifest.statistics
    assert statistics is not None
    assert count == statistics.labels
    packed = opened.rows(slice(None), "segments")["segments"].max() > 1
    assert packed == (name != "pad")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_whatever_the_order_targets_stay_with_their_rows(made, losses, seed):
    """C36: two epochs, and a part of the rows; tokens are those of the documents."""
    opened = cache.open(made / "pack")
    chosen = choose(opened.encoding)
    tokenizer = decoder.load_tokenizer(str(made / "teacher"))
    documents = [tokenizer.encode(text).tolist() for text in small.texts()]
    whole = opened.rows(slice(None), ("tokens", "documents"))
    order = []
    for batch in [*batches(opened, seed=seed, epochs=2), *batches(opened, seed=seed, first=4)]:
        assert abs(losses(chosen, batch)[0]) <= 1e-5
        # Targets of another row would show.
        assert losses(chosen, rolled(batch, axis=0))[0] > 0.1
        for row, tokens, segments in zip(batch.rows, batch.tokens, batch.segments, strict=True):
            order.append(int(row))
            for segment in set(segments.tolist()) - {0}:
                here = segments == segment
                (document,) = set(whole["documents"][row][here].tolist())
                piece = tokens[here].tolist()
                starts = range(len(documents[document]) - len(piece) + 1)
                assert any(documents[document][x : x + len(piece)] == piece for x in starts)
    real = [row for row in order if row >= 0]
    assert sorted(real[-4:]) == list(range(4))
    assert real != sorted(real)
    _ORDERS[seed] = tuple(order)
    assert len(set(_ORDERS.values())) == len(_ORDERS)


_ORDERS: dict[int, tuple[int, ...]] = {}


def by_hand(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[list[list[int]]],
    length: int,
    vocabulary: int,
    sure: bool = True,
) -> tuple[cache.Cache, Batch]:
    """A cache of rows of documents, all of it in one batch. The teacher is sure of the next
    token, or else random."""
    laid = builder.padding_rows(len(rows), length)
    for row, documents in enumerate(rows):
        place = 0
        for segment, tokens in enumerate(documents, start=1):
            here = slice(place, place + len(tokens))
            laid["tokens"][row, here], laid["segments"][row, here] = tokens, segment
            laid["documents"][row, here] = row * 10 + segment
            laid["label_mask"][row, place : place + len(tokens) - 1] = 1
            place += len(tokens)
    logits = np.random.default_rng(0).normal(size=(len(rows), length, vocabulary))
    if sure:
        logits[:] = -np.inf
        following = np.roll(laid["tokens"], -1, axis=1).astype(int)
        np.put_along_axis(logits, following[..., None], 0.0, axis=-1)
    monkeypatch.setattr(builder, "make_rows", lambda *_: laid)
    settings: dict[str, Any] = {"length": length, "vocabulary": vocabulary, "k": vocabulary}
    built = builder.make_cache(
        folder, rows=len(rows), logits=logits, logprobs="float32", temperatures=(1.0,), **settings
    )
    opened = cache.open(built.path)
    return opened, read_batch(opened, BatchSettings(vocabulary), np.arange(len(rows)))


def test_the_next_token_is_the_target(tmp_path, monkeypatch):
    """C11: a logit of 5 on the true next token, a teacher that is sure of it: .058874."""
    document = [3, 7, 1, 9, 4]
    opened, batch = by_hand(tmp_path / "cache", monkeypatch, [[document]], 5, 10)
    # The last token's next is the first, so that every position that is read tells something.
    table = np.zeros((10, 10), np.float32)
    table[document, np.roll(document, -1)] = 5.0
    parameters = {**plain.identity(10), "table": jnp.asarray(table)}
    functions = replace(plain.functions(10), hidden=lambda p, tokens, *_: p["table"][tokens])
    loss = jax.jit(make_batch_loss(functions, LossSettings(choose(opened.encoding))))
    assert batch.label_mask.sum() == 4
    # A student that is a step late, or early, reads another token.
    for shift, expected in ((0, 0.058874), (1, 5.058874), (-1, 5.058874)):
        shifted = batch._replace(tokens=np.roll(batch.tokens, shift, axis=1))
        sums = loss(parameters, jax.tree.map(jnp.asarray, shifted), jnp.float32(0.5))
        for value in sums:
            assert float(value) / 4 == pytest.approx(expected, abs=1e-6)


def test_padding_is_no_target(tmp_path, monkeypatch):
    """C10: documents of 5 and 2 tokens have 5 targets, and a uniform student a loss of ln 4 on
    each, at any length; whatever stands at the padding changes no bit."""
    used = jax.devices()[:1]
    parameters = replicate(plain.identity(4), used)
    for length in (8, 16):
        rows = [[[3, 1, 2, 0, 1]], [[2, 3]]]
        opened, batch = by_hand(tmp_path / str(length), monkeypatch, rows, length, 4)
        settings = LossSettings(choose(opened.encoding))
        compute = make_gradients(plain.functions(4), settings, used)
        seen = []
        for garbage in (None, 1e4, np.nan):
            targets = jax.tree.map(np.array, batch.targets)
            for values in targets if garbage is not None else ():
                values[~batch.label_mask] = garbage if values.dtype.kind == "f" else 3
            dirty = batch._replace(targets=targets)
            gradients, metrics = compute(parameters, place(dirty, 1, used), np.float32(0.5))
            assert float(metrics.labels) == 5
            for value in metrics.sums:
                assert float(value / metrics.labels) == pytest.approx(math.log(4), abs=1e-6)
            leaves = jax.tree.leaves((gradients, metrics))
            seen.append([np.asarray(x).tobytes() for x in leaves])
        assert seen[0] == seen[1] == seen[2]


def test_the_last_token_of_a_document_predicts_nothing(tmp_path, monkeypatch):
    """C13: A of 3 tokens and B of 2 in a row of 5 have 3 targets; no loss of A depends on B."""
    functions, parameters = plain.functions(10), plain.parameters(10, 10)
    chosen = Objective("bucket", no_id=65535)

    @jax.jit
    def terms(batch: Batch) -> Any:
        logits = functions.unembed(
            parameters, hidden_states(functions, parameters, batch, "float32")
        )
        return position_losses(logits, flat_positions(batch), chosen)

    found = []
    for first in (6, 8):
        rows = [[[3, 7, 1], [first, 4]]]
        opened, batch = by_hand(tmp_path / str(first), monkeypatch, rows, 5, 10, sure=False)
        assert batch.label_mask.tolist() == [[True, True, False, True, False]]
        assert choose(opened.encoding) == chosen
        found.append(np.array(terms(jax.tree.map(jnp.asarray, batch))))
    np.testing.assert_array_equal(found[0][:, :3], found[1][:, :3])
    assert (found[0][:, [2, 4]] == 0).all()
    assert (found[0][:, [0, 1, 3]] > 0).all()
    # The change of B is seen where B is.
    assert (found[0][:, 3] != found[1][:, 3]).all()
