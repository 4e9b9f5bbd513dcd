"""Students from every source, and models rebuilt from a run's record alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import cache
from decoder import Decoder, DecoderConfig, DecoderError, load_model
from student.batches import Batch, BatchSettings, read_batch
from student.errors import RunError, StudentError
from student.functions import parameters_of, student_functions
from student.options import TrainOptions
from student.students import Student, build, legal_of, parse_layers, rebuild
from tests.cache.builder import make_cache
from tests.decoder.functions import Table
from tests.models import tiny_tokenizer, write_tiny_teacher

VOCABULARY, LAYERS = 300, 4


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> cache.Cache:
    """A cache whose vocabulary is its tokenizer's 300 ids."""
    folder = tmp_path_factory.mktemp("wide") / "cache"
    return cache.open(make_cache(folder, vocabulary=VOCABULARY, rows=6).path)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> cache.Cache:
    """A cache of the first 11 ids, as many as the bigram table of the functions has."""
    folder = tmp_path_factory.mktemp("narrow") / "cache"
    return cache.open(make_cache(folder, vocabulary=11, rows=4).path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, 310 rows, a tokenizer of 300 ids. Do not change it."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    return write_tiny_teacher(folder, layers=LAYERS, rows=310, width=16, mlp_width=24)


def options(student: str | Path, **changes: Any) -> TrainOptions:
    return TrainOptions(**{"cache": "c", "out": "o", "student": str(student), **changes})


def nothing_held_out() -> list[Batch]:
    raise AssertionError("held-out rows are read only to find a block")


def built(student: str | Path, opened: cache.Cache, **changes: Any) -> Student:
    return build(options(student, **changes), opened, nothing_held_out)


def assert_rebuilt(student: Student) -> None:
    """The record alone, through JSON, gives the same shapes and the same legal ids."""
    record = json.loads(json.dumps(student.record))
    assert record == student.record
    found = rebuild(record)
    shapes = [
        [(path, value.shape, value.dtype) for path, value in nnx.to_flat_state(nnx.state(model))]
        for model in (found, student.model)
    ]
    assert shapes[0] == shapes[1]
    assert nnx.graphdef(found) == nnx.graphdef(student.model)
    legal = legal_of(record)
    assert (legal is None) == (student.legal is None)
    if legal is not None:
        np.testing.assert_array_equal(legal, student.legal)


# From scratch.


def test_a_preset(opened: cache.Cache) -> None:
    student = built("preset:nano", opened, seed=2**32 - 1)
    assert student.config is not None
    assert (student.config.vocabulary, student.vocabulary, student.legal) == (300, 300, None)
    assert (student.layers, student.parameters) == (6, 1_033_856 + 300 * 128)
    assert student.tokenizer.fingerprint == student.record["tokenizer"]["fingerprint"]
    assert student.tokenizer.vocabulary == 300
    assert student.record["seed"] == 2**32 - 1
    assert (student.record["source"], student.record["dropped"]) == ("preset:nano", None)
    assert_rebuilt(student)


def test_weights_from_scratch_are_those_of_the_seed(tmp_path: Path, opened: cache.Cache) -> None:
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    path.write_text(json.dumps({"model_type": "llama", "num_attention_heads": 2, **sizes}))
    one, same, other = (parameters_of(built(path, opened, seed=seed).model) for seed in (1, 1, 2))
    for name, value in one.items():
        np.testing.assert_array_equal(value, same[name])
        assert np.isfinite(value).all()
    assert np.abs(one["embedding.weight"] - other["embedding.weight"]).max() > 0.01
    assert_rebuilt(built(path, opened))


@pytest.mark.parametrize(
    "changes",
    [{"student_revision": "main"}, {"drop_layers": "0-1"}, {"trim_vocabulary": True}],
    ids=lambda one: next(iter(one)),
)
def test_what_scratch_has_not(opened: cache.Cache, changes: dict[str, Any]) -> None:
    option = "--" + next(iter(changes)).replace("_", "-")
    with pytest.raises(StudentError, match=f"{option} .*starts from scratch"):
        built("preset:nano", opened, **changes)


# From a checkpoint.


def test_a_checkpoint(checkpoint: Path, opened: cache.Cache) -> None:
    """C21: the 10 rows that no token has are illegal."""
    student = built(checkpoint, opened)
    loaded = load_model(str(checkpoint))
    expected, found = parameters_of(loaded.model), parameters_of(student.model)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
    assert (student.parameters, student.layers) == (loaded.parameters, LAYERS)
    assert student.vocabulary == 300
    assert student.legal is not None
    assert np.flatnonzero(~student.legal).tolist() == list(range(300, 310))
    assert student.record["fingerprint"] == loaded.fingerprint
    assert student.record["seed"] is None
    assert student.record["tokenizer"]["own"]
    assert_rebuilt(student)


def test_a_half_precision_checkpoint_is_trained_in_float32(
    tmp_path: Path, opened: cache.Cache
) -> None:
    student = built(write_tiny_teacher(tmp_path / "half", dtype="bfloat16"), opened)
    assert {value.dtype for value in parameters_of(student.model).values()} == {
        np.dtype(np.float32)
    }
    assert student.legal is None


def test_rebuilding_needs_no_checkpoint(tmp_path: Path, opened: cache.Cache) -> None:
    """C51: a tied student stays tied, without its files and through a run's record."""
    student = built(write_tiny_teacher(tmp_path / "gone", tied=True), opened, drop_layers="0-0")
    shutil.rmtree(tmp_path / "gone")
    assert_rebuilt(student)
    functions = student_functions(rebuild(student.record))
    assert functions.head == ("embedding.weight",)
    assert "head.weight" not in parameters_of(student.model)


@pytest.mark.parametrize("tied", [True, False])
def test_trimming(tmp_path: Path, opened: cache.Cache, tied: bool) -> None:
    path = write_tiny_teacher(tmp_path / "wide", rows=310, tied=tied)
    whole, student = built(path, opened), built(path, opened, trim_vocabulary=True)
    assert student.config is not None
    assert (student.config.vocabulary, student.vocabulary, student.legal) == (300, 300, None)
    assert whole.parameters - student.parameters == 10 * 32 * (1 if tied else 2)
    np.testing.assert_array_equal(
        parameters_of(student.model)["embedding.weight"],
        parameters_of(whole.model)["embedding.weight"][:300],
    )
    assert_rebuilt(student)


def test_a_student_of_fewer_rows(tmp_path: Path, opened: cache.Cache) -> None:
    path = write_tiny_teacher(tmp_path / "small", vocabulary=280)
    (path / "tokenizer.json").unlink()
    with pytest.raises(StudentError, match=r"280 rows.*is 300.*--vocabulary 280"):
        built(path, opened)


def test_a_student_of_another_tokenizer(tmp_path: Path, opened: cache.Cache) -> None:
    """C22, and before the weights are loaded: they are not there."""
    path = write_tiny_teacher(tmp_path / "swapped")
    definition = tiny_tokenizer()
    ids = definition["model"]["vocab"]
    first, second = (token for token, place in ids.items() if place in (290, 291))
    ids[first], ids[second] = ids[second], ids[first]
    (path / "tokenizer.json").write_text(json.dumps(definition))
    (path / "model.safetensors").unlink()
    with pytest.raises(StudentError, match=r"the student's tokenizer .* is not that of the cache"):
        built(path, opened)


def test_a_tokenizer_of_another_kind_is_not_passed_over(
    tmp_path: Path, opened: cache.Cache
) -> None:
    path = write_tiny_teacher(tmp_path / "model")
    (path / "tokenizer.json").rename(path / "vocab.json")
    with pytest.raises(DecoderError, match=r"has vocab\.json but no tokenizer\.json"):
        built(path, opened)


def test_a_checkpoint_without_a_tokenizer_has_the_caches(
    tmp_path: Path, opened: cache.Cache
) -> None:
    path = write_tiny_teacher(tmp_path / "model")
    (path / "tokenizer.json").unlink()
    student = built(path, opened)
    assert not student.record["tokenizer"]["own"]
    assert student.tokenizer.vocabulary == 300


def test_own_added_tokens_are_legal(tmp_path: Path, opened: cache.Cache) -> None:
    """An own token with the id 303: ids 300 to 302 and 304 on stay illegal."""
    path = write_tiny_teacher(tmp_path / "more", rows=306)
    definition = tiny_tokenizer()
    added = {**definition["added_tokens"][0], "id": 303, "content": "<own>"}
    definition["added_tokens"].append(added)
    definition["model"]["vocab"]["<own>"] = 303
    (path / "tokenizer.json").write_text(json.dumps(definition))
    student = built(path, opened)
    assert student.vocabulary == 304
    assert student.legal is not None
    assert np.flatnonzero(~student.legal).tolist() == [300, 301, 302, 304, 305]
    assert student.record["illegal"] == [300, 301, 302]
    assert student.tokenizer.backend.token_to_id("<own>") == 303
    assert_rebuilt(student)
    trimmed = built(path, opened, trim_vocabulary=True)
    assert trimmed.legal is not None
    assert np.flatnonzero(~trimmed.legal).tolist() == [300, 301, 302]
    assert_rebuilt(trimmed)


def test_rows_longer_than_the_student(tmp_path: Path, opened: cache.Cache) -> None:
    path = write_tiny_teacher(tmp_path / "short", max_positions=5)
    with pytest.raises(StudentError, match=r"rows of 8 positions .* the 5 .*--length 5"):
        built(path, opened)
    assert built(path, opened, length=5).layers == 2


# Without some of the layers.


@pytest.mark.parametrize("text", ["1-2", " 1 - 2 "])
def test_named_layers_are_dropped(checkpoint: Path, opened: cache.Cache, text: str) -> None:
    whole, student = built(checkpoint, opened), built(checkpoint, opened, drop_layers=text)
    assert (whole.layers, student.layers, student.search) == (4, 2, None)
    assert student.record["dropped"] == {"first": 1, "last": 2, "of": 4}
    found, before = parameters_of(student.model), parameters_of(whole.model)
    np.testing.assert_array_equal(found["layers.1.mlp.up.weight"], before["layers.3.mlp.up.weight"])
    assert student.parameters < whole.parameters
    assert_rebuilt(student)


def test_a_count_is_resolved_by_the_held_out_rows(tmp_path: Path, opened: cache.Cache) -> None:
    """Layers 1 and 2 add nothing, so that without them the loss is the whole model's."""
    path = write_tiny_teacher(tmp_path / "idle", layers=4, rows=310, scale=0.4, tied=False)
    tensors = load_file(path / "model.safetensors")
    for layer in (1, 2):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.{layer}.{name}.weight"][:] = 0
    tensors["lm_head.weight"] *= 20
    save_file(tensors, path / "model.safetensors")
    # What the teacher itself finds most likely, so that every working layer is missed.
    model = load_model(str(path)).model
    given = read_batch(opened, BatchSettings(most_id=310, targets=False), np.arange(6))
    labels = np.zeros_like(given.labels)
    for row in range(6):
        segments = given.segments[row]
        places = np.arange(8) - np.maximum.accumulate(
            np.where(np.diff(segments, prepend=0) != 0, np.arange(8), 0)
        )
        row_of = (given.tokens[row], segments, places.astype(np.int32))
        hidden = model(*map(jnp.asarray, row_of))  # pyright: ignore[reportCallIssue]
        logits = np.asarray(model.unembed(hidden))[:, :300]  # pyright: ignore
        labels[row] = np.where(given.label_mask[row], logits.argmax(-1), 0)
    held_out = given._replace(labels=labels)
    calls: list[tuple[int, int]] = []
    student = build(
        options(path, drop_layers="2", trim_vocabulary=True),
        opened,
        lambda: [held_out],
        lambda *call: calls.append(call),
    )
    assert student.record["dropped"] == {"first": 1, "last": 2, "of": 4}
    assert student.search is not None
    assert int(np.argmin(student.search.cross_entropies)) == 1
    assert calls == [(1, 3), (2, 3), (3, 3)]
    assert (student.layers, student.legal) == (2, None)
    assert_rebuilt(student)


def test_a_count_needs_held_out_rows(checkpoint: Path, opened: cache.Cache) -> None:
    def none() -> Iterator[Batch]:
        yield from ()

    with pytest.raises(StudentError, match="Raise --held-out"):
        build(options(checkpoint, drop_layers="2"), opened, none)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("18-9", "Did you mean 9-18"),
        ("9-30", "cannot drop layers 9 to 30"),
        ("0-29", "cannot drop layers 0 to 29"),
        ("30", "cannot drop 30 layers"),
        ("0", "cannot drop 0 layers"),
        ("middle", "should be FIRST-LAST"),
        ("-3", "should be FIRST-LAST"),
        ("3-", "should be FIRST-LAST"),
        ("1,2", "should be FIRST-LAST"),
        ("", "should be FIRST-LAST"),
    ],
)
def test_bad_layers_name_those_that_there_are(text: str, message: str) -> None:
    with pytest.raises(StudentError, match=rf"{message}.*has 30 layers, 0 to 29"):
        parse_layers(text, 30)


def test_layers_as_text() -> None:
    assert parse_layers("9-18", 30) == (9, 18)
    assert parse_layers("0-28", 30) == (0, 28)
    assert parse_layers("7-7", 30) == (7, 7)
    assert parse_layers("29", 30) == 29


# From a function.


class HalfTable(Table):
    def __init__(self) -> None:
        super().__init__()
        self.table.set_value(self.table[...].astype(jnp.bfloat16))


def own_decoder() -> Decoder:
    sizes: Any = {"width": 8, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 4, "mlp_width": 8}
    return Decoder(DecoderConfig(vocabulary=11, max_positions=8, **sizes), rngs=nnx.Rngs(0))


def test_a_function(narrow: cache.Cache) -> None:
    student = built("tests.decoder.functions:Table", narrow)
    assert (student.config, student.layers, student.legal) == (None, None, None)
    assert (student.vocabulary, student.parameters) == (11, 121)
    assert student.record["kind"] == "function"
    assert student.record["config"] is None
    assert_rebuilt(student)


def test_a_function_that_has_changed(narrow: cache.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    student = built("tests.decoder.functions:shifted", narrow)
    monkeypatch.setattr("tests.decoder.functions.shifted", lambda: Table(2.0))
    with pytest.raises(RunError, match="functions:shifted gives another model"):
        rebuild(student.record)


def test_a_decoder_from_a_function(narrow: cache.Cache) -> None:
    """A plain decoder can be cut, rebuilt and exported wherever it comes from."""
    student = built("tests.student.test_students:own_decoder", narrow, drop_layers="0-0")
    assert student.config == replace(own_decoder().config, layers=1)
    assert_rebuilt(student)


@pytest.mark.parametrize("changes", [{"drop_layers": "1"}, {"trim_vocabulary": True}])
def test_a_function_is_not_cut(narrow: cache.Cache, changes: dict[str, Any]) -> None:
    option = "--" + next(iter(changes)).replace("_", "-")
    with pytest.raises(StudentError, match=f"{option} is for .*Table gives a LogitsModel"):
        built("tests.decoder.functions:Table", narrow, **changes)


def test_a_function_of_half_precision(narrow: cache.Cache) -> None:
    with pytest.raises(StudentError, match=r"model\.table in bfloat16; parameters are trained in"):
        built("tests.student.test_students:HalfTable", narrow)


# A damaged record.


@pytest.mark.parametrize("field", ["kind", "config", "source", "fingerprint"])
def test_a_record_lacks_a_field(narrow: cache.Cache, field: str) -> None:
    record = dict(built("tests.decoder.functions:Table", narrow).record)
    del record[field]
    with pytest.raises(RunError, match=f"the field {field} is missing"):
        rebuild(record)


def test_a_record_without_a_model() -> None:
    with pytest.raises(RunError, match="kind 'checkpoint', no config"):
        rebuild({"kind": "checkpoint", "config": None})
    with pytest.raises(RunError, match="the field rows is missing"):
        legal_of({})
