"""A model that caps its logits (Gemma 2) does so as a teacher and as a student.

Its head has more rows than the tokenizer has tokens, which get no probability on either side.
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import decoder
from decoder.config import DecoderConfig
from decoder.rows import positions_from_segments
from decoder.saving import save_folder
from student.functions import parameters_of, student_functions
from student.objectives import Objective
from student.step import LossSettings, make_gradients, place, replicate
from tests.decoder.random_models import random_model
from tests.models import write_tiny_tokenizer
from tests.pipelines import small
from tests.student import plain
from tests.student.dense import NO_ID, softmax

CAP = 2.0
CONFIG = DecoderConfig(
    vocabulary=310,
    width=16,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp_width=16,
    max_positions=64,
    family="gemma2",
    norm="offset",
    norm_places="both",
    scaled_embedding=True,
    activation="gelu_tanh",
    tied=True,
    query_scalar=8.0,
    attention_cap=5.0,
    output_cap=CAP,
    windows=(3, 0),
)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return np.log(softmax(logits.astype(np.float64)))


def test_a_capture_keeps_the_capped_probabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.quick(monkeypatch)
    tokenizer = decoder.load_tokenizer(str(write_tiny_tokenizer(tmp_path / "tokenizer")))
    model = random_model(CONFIG)
    save_folder(model, tmp_path / "teacher", tokenizer)
    small.write_corpus(tmp_path / "corpus.jsonl", ["one two three"])
    opened = small.capture(
        tmp_path, tail="none", k=300, logprobs="float32", temperatures=(1.0, 2.0)
    ).cache

    ids = tokenizer.encode("one two three").astype(np.int32)
    order = np.arange(len(ids), dtype=np.int32)
    hidden = model(jnp.asarray(ids), jnp.ones_like(order), jnp.asarray(order))
    uncapped = np.asarray(hidden, np.float64) @ np.asarray(model.embedding.weight[...]).T
    uncapped = uncapped[:-1, :300]
    expected = log_softmax(CAP * np.tanh(uncapped / CAP))
    assert np.abs(expected - log_softmax(uncapped)).max() > 1

    found = {name: small.per_document(opened, name)[0] for name in opened.fields}
    stored = np.full_like(expected, np.nan)
    places = found["target_ids"].astype(np.int64)
    np.put_along_axis(stored, places, found["target_logprobs"].astype(np.float64), axis=1)
    np.testing.assert_allclose(stored, expected, atol=2e-5)
    labels = np.take_along_axis(expected, ids[1:, None].astype(np.int64), axis=1)[:, 0]
    np.testing.assert_allclose(found["label_logprobs"], labels, atol=2e-5)


@pytest.mark.parametrize(("kind", "temperature"), [("labels", 1.0), ("bucket", 2.0)])
def test_gradients_of_a_student_are_those_of_the_plain_definition(
    kind: str, temperature: float
) -> None:
    """The loss is fused with the head, its gradient written by hand; this is `jax.grad`."""
    tokens, rows = 12, 16
    model = random_model(replace(CONFIG, vocabulary=rows))
    segments = np.array([[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 2, 2, 2, 2]])
    batch, teacher = plain.make_batch(segments, tokens)
    legal = np.arange(rows) < tokens
    objective = Objective(kind, temperature=temperature, no_id=NO_ID)  # pyright: ignore
    settings = LossSettings(objective, legal=legal, chunk=4)
    devices = jax.devices()[:1]
    compiled = make_gradients(student_functions(model), settings, devices)
    parameters = replicate(parameters_of(model), devices)
    gradients, metrics = compiled(parameters, place(batch, 1, devices), np.float32(0.3))

    graphdef, state = nnx.split(model)
    p = jnp.asarray(softmax(teacher / temperature), jnp.float32)
    mask = jnp.asarray(batch.label_mask)

    def loss(state: nnx.State) -> jax.Array:
        whole = nnx.merge(graphdef, state)
        segments = jnp.asarray(batch.segments)
        positions = jax.vmap(positions_from_segments)(segments)
        hidden = jax.vmap(whole)(jnp.asarray(batch.tokens), segments, positions)
        table = whole.embedding.weight[...][:tokens]
        logits = CAP * jnp.tanh(jnp.matmul(hidden, table.T, precision="highest") / CAP)
        labels = jnp.asarray(batch.labels)[..., None]
        ce = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels, axis=-1)[..., 0]
        kl = (p * (jnp.log(p) - jax.nn.log_softmax(logits / temperature))).sum(-1)
        soft = 0.0 if kind == "labels" else 0.7 * temperature**2
        return jnp.where(mask, 0.3 * ce + soft * kl, 0.0).sum() / mask.sum(dtype=jnp.float32)

    value, expected = jax.jit(jax.value_and_grad(loss))(state)
    np.testing.assert_allclose(metrics.sums.loss / metrics.labels, value, rtol=1e-5)
    wanted = parameters_of(nnx.merge(graphdef, expected))
    assert gradients.keys() == wanted.keys()
    for name, reference in wanted.items():
        size = np.linalg.norm(reference)
        assert size > 0, name
        assert np.linalg.norm(np.asarray(gradients[name]) - reference) < 1e-5 * size, name
