"""Fresh rows with a teacher: whose rows, whose distributions, in which chunks."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import decoder
from pipelines import compare_sources
from pipelines.compare_options import CompareOptions
from pipelines.compare_sources import Predictions, TeacherSample, check_student, fresh_rows
from pipelines.errors import CorpusError, TeacherError
from tests.models import write_tiny_teacher
from tests.pipelines import small

LENGTH = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    small.options(folder)  # writes teacher and corpus
    return folder


def options(folder, **changes) -> CompareOptions:
    given = {"dataset": str(folder / "corpus.jsonl"), "teacher": str(folder / "teacher")}
    return CompareOptions(**{**given, "rows": 4, "length": LENGTH, **changes})


def quiet(done: int, total: int) -> None:
    assert 1 <= done <= total


@pytest.fixture(scope="module")
def made(folder):
    """Rows, the model, and its predictions in chunks of 16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_sources, "_CHUNK", 16)
        rows, vocabulary, holes = fresh_rows(options(folder))
        model = decoder.load_model(str(folder / "teacher")).model
        yield rows, vocabulary, model, Predictions(model, rows, vocabulary, holes, quiet)


def dense(model, rows):
    """Log-probs float64 [row, position, vocabulary], of all positions at one time."""
    found = []
    for tokens, segments in zip(rows["tokens"], rows["segments"], strict=True):
        segments = segments.astype(np.int32)
        places = np.zeros(len(tokens), np.int32)
        for place in range(1, len(tokens)):
            same = segments[place] == segments[place - 1]
            places[place] = places[place - 1] + 1 if same else 0
        row = (tokens.astype(np.int32), segments, places)
        hidden = model(*(jnp.asarray(x) for x in row))
        x = np.asarray(model.unembed(hidden)).astype(np.float64)
        x = x - x.max(axis=-1, keepdims=True)
        found.append(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))
    return np.stack(found)


def test_rows_hold_documents_of_the_corpus_chosen_by_the_seed(folder):
    tokenizer = decoder.load_tokenizer(str(folder / "teacher"))
    known = {tuple(tokenizer.encode(text).tolist()) for text in small.texts()}
    first, vocabulary, holes = fresh_rows(options(folder))
    assert (vocabulary, holes) == (300, ())
    assert first["tokens"].shape == (4, LENGTH)
    whole = 0
    for row in range(4):
        for segment in range(1, first["segments"][row].max() + 1):
            held = tuple(first["tokens"][row][first["segments"][row] == segment].tolist())
            assert any(held == text[i : i + len(held)] for text in known for i in range(len(text)))
            whole += held in known
    assert whole >= 2
    again, _, _ = fresh_rows(options(folder))
    other, _, _ = fresh_rows(options(folder, seed=1))
    assert (again["tokens"] == first["tokens"]).all()
    assert (other["tokens"] != first["tokens"]).any()


def test_no_document_is_most_of_the_sample(folder, tmp_path):
    corpus = small.write_corpus(tmp_path / "long.jsonl", ["a b " * 4000, *small.texts(30)])
    for seed in range(3):
        rows, _, _ = fresh_rows(options(folder, dataset=str(corpus), rows=8, seed=seed))
        assert len(rows["tokens"]) == 8
        assert np.unique(rows["documents"][rows["segments"] > 0]).size > 3


def test_nothing_to_predict_is_refused(folder, tmp_path):
    corpus = small.write_corpus(tmp_path / "short.jsonl", ["", "a"])
    with pytest.raises(CorpusError, match="nothing to predict"):
        fresh_rows(options(folder, dataset=str(corpus)))


def test_chunks_hold_the_teachers_and_the_students_distributions(made, monkeypatch):
    monkeypatch.setattr(compare_sources, "_CHUNK", 16)
    rows, vocabulary, model, predictions = made
    log_p = dense(model, rows)
    label = rows["label_mask"] == 1
    mean = np.exp(log_p)[label].mean(axis=0)
    sample = TeacherSample(predictions, rows, vocabulary, (1.0, 2.0), seed=3)
    assert (sample.rows, sample.length) == (4, LENGTH)
    assert sample.tokens == np.count_nonzero(rows["segments"])
    chunks = list(sample.chunks(6, [(5, 2)]))
    assert [chunk.row for chunk in chunks] == [0, 0, 1, 1, 2, 2, 3, 3]
    start = 0
    for chunk in chunks:
        n = chunk.rows["tokens"].shape[1]
        place = start + chunk.where
        assert label[chunk.row, place].all()
        assert len(chunk.where) == np.count_nonzero(label[chunk.row, start : start + n])
        expected = log_p[chunk.row, place]
        best = np.argsort(-expected, axis=1, kind="stable")[:, :6]
        np.testing.assert_array_equal(chunk.positions.ids, best)
        listed = np.take_along_axis(np.exp(expected), best, axis=1)
        np.testing.assert_allclose(chunk.positions.p, listed, rtol=2e-5)
        np.testing.assert_allclose(chunk.positions.q, mean[best], rtol=2e-5)
        rest = np.exp(expected).sum(axis=1) - listed.sum(axis=1)
        np.testing.assert_allclose(chunk.positions.beyond.mass.p, rest, rtol=1e-4)
        rest = 1 - mean[best].sum(axis=1)
        np.testing.assert_allclose(chunk.positions.beyond.mass.q, rest, rtol=1e-4)
        tokens = rows["tokens"][chunk.row]
        following = tokens[np.minimum(place + 1, LENGTH - 1)]
        np.testing.assert_allclose(
            chunk.exact["label_logprobs"][0, chunk.where],
            expected[np.arange(len(place)), following],
            rtol=1e-5,
            atol=1e-5,
        )
        drawn = chunk.sampled[5, 2]
        heads = drawn["exact_counts"][0, chunk.where]
        assert (heads >= 2).all()
        np.testing.assert_array_equal(drawn["ids"][0, chunk.where][:, :2], best[:, :2])
        start = 0 if start + n == LENGTH else start + n
    other = TeacherSample(predictions, rows, vocabulary, (1.0, 2.0), seed=4)
    first, second = chunks[0].sampled[5, 2], next(iter(other.chunks(6, [(5, 2)]))).sampled[5, 2]
    assert (first["ids"] != second["ids"]).any()


def test_a_given_student_takes_the_place_of_the_mean(made, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(compare_sources, "_CHUNK", 16)
    rows, vocabulary, _, predictions = made
    smaller = decoder.load_model(str(write_tiny_teacher(tmp_path / "s", seed=5, layers=1))).model
    student = Predictions(smaller, rows, vocabulary, (), quiet)
    sample = TeacherSample(predictions, rows, vocabulary, (1.0,), student=student)
    chunk = next(iter(sample.chunks(4, [])))
    log_q = dense(smaller, rows)[0, chunk.where]
    expected = np.take_along_axis(log_q, chunk.positions.ids, axis=1)
    np.testing.assert_allclose(chunk.positions.log_q, expected, rtol=1e-4, atol=1e-4)


class Whole(nnx.Module):
    """A model that gives logits itself: another's, its head included."""

    def __init__(self, model):
        self.inner = model

    def __call__(self, tokens, segments, positions):
        return self.inner.unembed(self.inner(tokens, segments, positions))


def test_a_model_without_a_head_and_ids_without_a_token(made, monkeypatch):
    monkeypatch.setattr(compare_sources, "_CHUNK", 16)
    rows, vocabulary, model, predictions = made
    whole = Predictions(Whole(model), rows, vocabulary, (7, 9), quiet)
    for row, start in ((0, 0), (1, 16), (0, 16)):
        found = np.asarray(whole.logits(row, start))
        expected = np.asarray(predictions.logits(row, start)).copy()
        n = LENGTH - start
        assert np.isneginf(found[:n, [7, 9]]).all()
        expected[:, [7, 9]] = -np.inf
        np.testing.assert_allclose(found[:n], expected[:n], rtol=1e-5, atol=1e-5)


def test_logits_that_are_not_numbers_are_refused(made, monkeypatch):
    monkeypatch.setattr(compare_sources, "_CHUNK", 16)
    rows, vocabulary, model, _ = made
    graph, state = nnx.split(model)
    broken = nnx.merge(graph, jax.tree.map(lambda x: x * np.float32(np.nan), state))
    predictions = Predictions(broken, rows, vocabulary, (), quiet)
    with pytest.raises(TeacherError, match="teacher's logits are not numbers at row 0, position 0"):
        TeacherSample(predictions, rows, vocabulary, (1.0,))


def test_a_student_of_other_tokens_is_refused(folder, tmp_path):
    other = write_tiny_teacher(tmp_path / "other")
    definition = json.loads((other / "tokenizer.json").read_text())
    words = definition["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (other / "tokenizer.json").write_text(json.dumps(definition))
    asked = options(folder, student=str(other))
    with pytest.raises(TeacherError, match="does not read the teacher's tokens: the token 'b'"):
        check_student(asked, 300, 300)
    asked = dataclasses.replace(asked, student=str(folder / "teacher"))
    check_student(asked, 300, 300)
    with pytest.raises(TeacherError, match="has 299 logits per position"):
        check_student(asked, 299, 300)
