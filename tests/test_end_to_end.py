"""What is in a cache, against independent computations; the same bytes however it was made."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zarr

import cache
import decoder
from cache.storage import Store
from pipelines import precompute as precompute_module
from tests.models import write_tiny_teacher
from tests.pipelines import small

# All tokens, as exact as they come: what is cached can be compared with the mathematics.
EXACT = {"tail": "none", "k": 300, "logprobs": "float32", "temperatures": (1.0, 2.0)}


@pytest.fixture
def with_beam() -> None:
    """Asks for Beam's own runner, and for teachers that are loaded each time."""


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    if "with_beam" not in request.fixturenames:
        small.share_teachers(monkeypatch)
        small.run_without_beam(monkeypatch)


def corpus(folder: Path, documents: list[str]) -> None:
    small.options(folder)
    small.write_corpus(folder / "corpus.jsonl", documents)


def reference(folder: Path, text: str, start: int = 0) -> np.ndarray:
    """log p [token - 1, vocabulary] of a document alone, in float64 from the model's logits."""
    ids = decoder.load_tokenizer(str(folder / "teacher")).encode(text).astype(np.int32)
    model: Any = decoder.load_model(str(folder / "teacher")).model
    place = jnp.arange(len(ids), dtype=jnp.int32)
    hidden = model(jnp.asarray(ids), jnp.ones_like(place), place)
    logits = np.asarray(model.unembed(hidden), np.float64)
    top = logits.max(axis=1, keepdims=True)
    logprobs = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    return logprobs[:-1]


def labels(folder: Path, text: str) -> np.ndarray:
    return decoder.load_tokenizer(str(folder / "teacher")).encode(text)[1:].astype(np.int64)


def test_every_number_is_that_of_the_document_alone(tmp_path):
    documents = ["abc def", "one two three", "x", "", "return rows", "q"]
    corpus(tmp_path, documents)
    opened = small.capture(tmp_path, **EXACT).cache
    rows = opened.rows(slice(None))
    assert (rows["segments"].max(axis=1) > 1).any()  # several documents share a row
    found = {name: small.per_document(opened, name) for name in opened.fields}
    assert sorted(found["label_logprobs"]) == [0, 1, 4]
    for index in (0, 1, 4):
        expected = reference(tmp_path, documents[index])
        ids = found["target_ids"][index].astype(np.int64)
        assert (np.sort(ids, axis=1) == np.arange(300)).all()
        stored = np.empty_like(expected)
        np.put_along_axis(stored, ids, found["target_logprobs"][index].astype(np.float64), axis=1)
        np.testing.assert_allclose(stored, expected, atol=2e-5)
        label = np.take_along_axis(expected, labels(tmp_path, documents[index])[:, None], axis=1)
        np.testing.assert_allclose(found["label_logprobs"][index], label[:, 0], atol=2e-5)
        entropy = -(np.exp(expected) * expected).sum(axis=1)
        np.testing.assert_allclose(found["entropy"][index], entropy, rtol=1e-3)


def test_tails_are_exact_at_every_temperature(tmp_path):
    corpus(tmp_path, ["abc def", "one two three"])
    opened = small.capture(tmp_path, **{**EXACT, "k": 8}).cache
    tails = small.per_document(opened, "tail_logprobs")
    for index, text in enumerate(["abc def", "one two three"]):
        logprobs = np.sort(reference(tmp_path, text), axis=1)[:, ::-1]
        for column, temperature in enumerate((1.0, 2.0)):
            scaled = np.exp(logprobs / temperature)
            expected = np.log(scaled[:, 8:].sum(axis=1) / scaled.sum(axis=1))
            np.testing.assert_allclose(tails[index][:, column], expected, rtol=2e-3, atol=1e-5)


def test_weights_of_a_sampled_cache_sum_to_one(tmp_path):
    corpus(tmp_path, small.texts())
    opened = small.capture(tmp_path).cache
    rows = opened.rows(slice(None))
    mask = rows["label_mask"] == 1
    weights = opened.weights(rows)
    np.testing.assert_allclose(weights[mask].sum(axis=-1), 1, atol=1e-6)
    assert not weights[~mask].any()
    assert (rows["exact_counts"][mask] >= 2).all()


def test_packed_and_padded_captures_agree(tmp_path):
    """C14, C15: what a document gets does not depend on its company."""
    documents = [*small.texts(9), "a longer document that fills more than one row of sixteen"]
    corpus(tmp_path, documents)
    settings = {"tail": "none", "k": 5, "logprobs": "float32"}
    packed = small.capture(tmp_path, "packed", layout="pack", **settings).cache
    padded = small.capture(tmp_path, "padded", layout="pad", **settings).cache
    assert len(packed) < len(padded)
    for name in ("target_ids", "exact_counts"):
        one, other = small.per_document(packed, name), small.per_document(padded, name)
        assert sorted(one) == sorted(other) == list(range(10))
        for document in one:
            np.testing.assert_array_equal(one[document], other[document])
    for name in ("target_logprobs", "label_logprobs"):
        one, other = small.per_document(packed, name), small.per_document(padded, name)
        for document in one:
            np.testing.assert_allclose(one[document], other[document], atol=1e-5)


def test_a_long_document_over_many_rows(tmp_path):
    """C16: every token but the first is predicted once, from what the row has of its past."""
    text = "the teacher reads the corpus once and " * 12
    corpus(tmp_path, [text])
    opened = small.capture(tmp_path, tail="none", k=4, logprobs="float32", overlap=3).cache
    ids = decoder.load_tokenizer(str(tmp_path / "teacher")).encode(text)
    accounting = opened.manifest.accounting
    assert len(opened) == 1 + -(-(len(ids) - 16) // 13) > 8
    assert accounting["tokens"] == len(ids)
    assert accounting["labels"] == len(ids) - 1
    assert accounting["dropped"] == {}
    assert accounting["stored"] - accounting["repeated"] == len(ids)
    rows = opened.rows(slice(None))
    nexts = np.concatenate(
        [rows["tokens"][row, 1:][rows["label_mask"][row, :-1] == 1] for row in range(len(opened))]
    )
    np.testing.assert_array_equal(nexts, ids[1:])
    # Row 2 starts at token 26; its positions count from there.
    model: Any = decoder.load_model(str(tmp_path / "teacher")).model
    place = jnp.arange(16, dtype=jnp.int32)
    hidden = model(jnp.asarray(ids[26:42].astype(np.int32)), jnp.ones_like(place), place)
    logprobs = np.asarray(jax.nn.log_softmax(model.unembed(hidden)))
    expected = [logprobs[t, ids[26 + t + 1]] for t in range(2, 15)]
    np.testing.assert_allclose(rows["label_logprobs"][2, 2:15], expected, atol=1e-5)
    # The last stored token is the text's own; nothing was put at a cut.
    assert rows["tokens"][-1][rows["segments"][-1] == 1][-1] == ids[-1]


def test_accounting_of_mixed_lengths(tmp_path):
    """C16: documents of 4, 2, 3, 1 tokens in rows of 3."""
    corpus(tmp_path, ["abcd", "ef", "ghi", "j"])
    opened = small.capture(tmp_path, length=3, chunk=3, tail="none", k=2).cache
    accounting = opened.manifest.accounting
    assert (accounting["tokens"], accounting["dropped"]) == (10, {})
    assert accounting["stored"] == 10 + accounting["repeated"] == 11
    assert accounting["labels"] == 3 + 1 + 2
    assert accounting["one_token_documents"] == 1
    assert opened.manifest.statistics is not None
    assert opened.manifest.statistics.labels == 6
    assert opened.manifest.statistics.rows_without_labels == accounting["rows_without_labels"]


def test_empty_and_one_token_documents(tmp_path):
    """C35."""
    corpus(tmp_path, ["ab", "", "c", "de"])
    settings = {"layout": "pad", "tail": "none", "k": 4}
    outcome = small.capture(tmp_path, "with", **settings)
    rows = outcome.cache.rows(slice(None))
    assert len(outcome.cache) == 4
    assert rows["label_mask"].sum(axis=1).tolist() == [1, 0, 0, 1]
    assert (rows["documents"][:, 0]).tolist() == [0, 0xFFFFFFFF, 2, 3]
    assert outcome.notes == ("2 rows have nothing to predict.",)
    statistics = outcome.cache.manifest.statistics
    assert statistics is not None
    assert (statistics.labels, statistics.rows_without_labels) == (2, 2)
    corpus(tmp_path, ["ab", "de"])
    without = small.capture(tmp_path, "without", **settings).cache.rows(slice(None))
    for name in rows:
        if name != "documents":
            np.testing.assert_array_equal(rows[name][[0, 3]], without[name])


def test_reordered_documents_are_detected(tmp_path):
    """C36: the last clause; the others are the students'."""
    documents = small.texts(10)
    corpus(tmp_path, documents)
    opened = small.capture(tmp_path).cache
    found = small.per_document(opened, "tokens")
    for index, text in enumerate(documents):
        ids = decoder.load_tokenizer(str(tmp_path / "teacher")).encode(text)
        np.testing.assert_array_equal(found.get(index, ids[:0]), ids[: len(ids) - 1])
    documents[3], documents[4] = documents[4], documents[3]
    corpus(tmp_path, documents)
    with pytest.raises(ValueError, match="of the documents 0-5 at least one is another"):
        small.capture(tmp_path)


def test_unused_rows_of_the_head_get_nothing(tmp_path):
    """C21: rows beyond the tokenizer that would win everywhere."""
    from safetensors.numpy import load_file, save_file

    write_tiny_teacher(tmp_path / "teacher", rows=306, tied=False)
    path = tmp_path / "teacher/model.safetensors"
    tensors = load_file(path)
    corpus(tmp_path, ["abc def", "one two three"])
    plain = small.capture(tmp_path, "plain", **EXACT).cache
    tensors["lm_head.weight"][300:] *= 50
    save_file(tensors, path)
    model: Any = decoder.load_model(str(tmp_path / "teacher")).model
    place = jnp.arange(7, dtype=jnp.int32)
    logits = model.unembed(model(place + 100, jnp.ones_like(place), place))
    assert (np.asarray(logits).argmax(axis=1) >= 300).any()  # they do win
    loud = small.capture(tmp_path, "loud", **EXACT).cache
    for name in ("target_ids", "target_logprobs", "label_logprobs", "tail_logprobs"):
        np.testing.assert_array_equal(
            plain.rows(slice(None))[name], loud.rows(slice(None))[name], name
        )


@pytest.mark.parametrize(("bos", "eos"), [("on", "off"), ("on", "on"), ("auto", "on")])
def test_start_and_end_tokens(tmp_path, bos, eos):
    """C24: exactly one of each, also where the text brings its own."""
    corpus(tmp_path, ["ab", "<|endoftext|>ab", "", "ab<|im_end|>"])
    opened = small.capture(tmp_path, bos=bos, eos=eos, layout="pad", tail="none", k=2).cache
    rows = opened.rows(slice(None), ("tokens", "segments"))
    found = [
        tokens[segments == 1].tolist()
        for tokens, segments in zip(rows["tokens"], rows["segments"], strict=True)
    ]
    text = [100, 101]
    start, end = ([0] if bos == "on" else []), ([2] if eos == "on" else [])
    own_start, own_end = start or [0], end or [2]
    assert found == [
        start + text + end, own_start + text + end, [], start + text + own_end
    ]  # fmt: skip
    assert opened.manifest.capture["bos"] is (bos == "on")
    assert opened.manifest.capture["eos"] is (eos == "on")


def test_other_readers_open_the_arrays(tmp_path):
    corpus(tmp_path, small.texts())
    opened = small.capture(tmp_path).cache
    group = zarr.open_group(str(tmp_path / "cache/arrays"), mode="r")
    mine = opened.rows(slice(None))
    for name in opened.fields:
        array = group[name]
        assert isinstance(array, zarr.Array)
        np.testing.assert_array_equal(np.asarray(array[:]), mine[name], name)


# The same bytes however it was made.


def test_folders_may_be_anywhere(tmp_path, monkeypatch):
    small.options(tmp_path)
    small.capture(tmp_path, "here")
    for name in ("teacher", "corpus.jsonl"):
        shutil.copytree(tmp_path / name, tmp_path / "far/away" / name) if (
            tmp_path / name
        ).is_dir() else shutil.copy(tmp_path / name, tmp_path / "far/away" / name)
    (tmp_path / "far/away/teacher").rename(tmp_path / "far/away/professor")
    monkeypatch.chdir(tmp_path / "far")
    small.capture(Path("away"), "there", teacher="away/professor")
    here = small.stored(tmp_path / "here", data_only=True)
    assert small.stored(tmp_path / "far/away/there", data_only=True) == here
    one, other = (
        json.loads((path / "manifest.json").read_text())
        for path in (tmp_path / "here", tmp_path / "far/away/there")
    )
    del one["digest"], other["digest"]
    for manifest in (one, other):
        del manifest["teacher"]["source"], manifest["corpus"]["description"]
        for file in manifest["corpus"]["identity"]["files"]:
            del file["mtime_ns"]
    assert one == other


@pytest.mark.slow
@pytest.mark.usefixtures("with_beam")
def test_beam_with_any_order_and_workers_and_devices(tmp_path, monkeypatch):
    """1, 2 and 8 devices; 1 and 2 processes; forwards and backwards; with and without Beam."""
    small.options(tmp_path)
    eight = jax.local_device_count()
    assert eight == 8
    commands = {
        "one-device": small.command(words(tmp_path, "one-device"), devices=1),
        "two-devices": small.command(words(tmp_path, "two-devices"), devices=2),
    }
    small.capture(tmp_path, "beam")
    real = precompute_module.stage_pipeline
    monkeypatch.setattr(
        precompute_module,
        "stage_pipeline",
        lambda root, dofn, elements: real(root, dofn, elements[::-1]),
    )
    small.capture(tmp_path, "backwards")
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patch:
        small.run_without_beam(patch)
        small.capture(tmp_path, "plain")
    for command in commands.values():
        output, errors = command.communicate(timeout=300)
        assert command.returncode == 0, errors
        assert "scored 6 shards" in output
    two = small.command(words(tmp_path, "two-workers", workers=2), devices=1)
    _, errors = two.communicate(timeout=300)
    assert two.returncode == 0, errors
    expected = small.stored(tmp_path / "plain")
    for name in ("beam", "backwards", *commands, "two-workers"):
        assert small.stored(tmp_path / name) == expected, name
    workers = {
        path.name.split("-")[-3]
        for path in (tmp_path / "two-workers/runs").rglob("*.jsonl")
        if '"shard"' in path.read_text()
    }
    assert len(workers) == 2  # both processes did their share
    assert str(two.pid) not in workers


def words(folder: Path, out: str, **changes: Any) -> list[str]:
    return small.command_words(small.options(folder, out), **changes)


@pytest.mark.usefixtures("with_beam")
def test_a_shard_that_fails_within_beam(tmp_path, monkeypatch):
    """One process, Beam's own runner: the others finish, the command names it."""
    from pipelines import transforms

    small.share_teachers(monkeypatch)
    real = transforms.encode_shard
    calls = []

    def fail(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("cosmic ray")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(transforms, "encode_shard", fail)
        with pytest.raises(ValueError, match=r"1 shard\(s\) could not be done.*\n  shard \d: Zero"):
            small.capture(tmp_path)
    assert len(Store(tmp_path / "cache").list("receipts")) == 5
    assert small.capture(tmp_path).scored == 1


@pytest.mark.usefixtures("with_beam")
def test_an_import_that_fails_in_a_worker_ends_the_command(tmp_path):
    """C55: a module that the command can import and its workers cannot."""
    small.options(tmp_path)
    (tmp_path / "fickle.py").write_text(
        "import os, sys\n"
        "if 'worker' in ' '.join(sys.argv) or 'CONTROL_API_SERVICE_DESCRIPTOR' in os.environ:\n"
        "    raise ImportError('not in a worker')\n"
        "from tests.pipelines.poison import teacher\n"
    )
    command = small.command(
        words(
            tmp_path, "cache", workers=2, teacher="fickle:teacher", tokenizer=tmp_path / "teacher"
        ),
        PYTHONPATH=f"{tmp_path}:{Path.cwd()}",
    )
    _, errors = command.communicate(timeout=300)
    assert command.returncode == 1
    assert "importing fickle failed (not in a worker)" in errors
    assert "Traceback" not in errors


def test_the_installed_command_captures_from_another_folder(tmp_path):
    """C55: from the console script, not __main__; beside files called like our modules."""
    import sys

    small.options(tmp_path)
    for name in ("cache.py", "pipelines.py", "types.py"):
        (tmp_path / name).write_text("raise SystemExit('shadowed')")
    script = Path(sys.executable).parent / "stillroom"
    settings = small.options(tmp_path)
    line = small.command_words(
        settings, dataset="corpus.jsonl", teacher="teacher", out="made", documents_per_part=99
    )
    environment = small.environment(devices=1)
    done = subprocess.run(
        [str(script), *line, "--workers", "2"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert cache.verify(tmp_path / "made", full=True).sound
