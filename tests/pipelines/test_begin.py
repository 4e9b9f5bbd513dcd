"""Beginning: the place, the tokenizer and the teacher fit, and the plan says what is done."""

import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import cache
from cache.errors import DamageError
from pipelines import begin as begin_module
from pipelines.begin import begin
from pipelines.errors import CaptureError, PipelineError, TeacherError
from pipelines.plan import Plan
from pipelines.sampling import MAX_DRAWS
from tests.models import tiny_tokenizer, write_tiny_teacher, write_tiny_tokenizer
from tests.pipelines import small


def plan(folder: Path, **changes) -> Plan:
    started = begin(small.options(folder, **changes))
    assert isinstance(started, Plan)
    return started


def test_the_manifest_is_stored_before_anything_is_done(tmp_path):
    made = plan(tmp_path)
    stored = json.loads((tmp_path / "cache/manifest.json").read_text())
    assert stored["state"] == "open"
    assert stored["run"] == made.run
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {
        "manifest.json",
        "manifest.backup.json",
        "tokenizer",
    }
    backup = (tmp_path / "cache/manifest.backup.json").read_bytes()
    assert backup == (tmp_path / "cache/manifest.json").read_bytes()
    assert made.manifest.corpus["documents"] == 20
    assert made.rows == 0
    assert made.manifest.capture["micro_batch"] == 1
    assert made.manifest.capture["backend"] == "cpu"
    assert made.manifest.capture["exact"] == 2
    assert made.targets.exact == 2


def test_settings_that_decide_nothing_are_canonical(tmp_path):
    made = plan(tmp_path, tail="none", k=4)
    assert made.manifest.capture["seed"] == 0
    assert made.manifest.capture["exact"] == 4 == made.targets.exact


def test_the_stored_tokenizer_is_the_teachers(tmp_path):
    made = plan(tmp_path)
    stored = cache.Cache(made.store, made.manifest).tokenizer()
    text = "the teacher reads 12 Zwölf\r\n"
    import tokenizers

    own = tokenizers.Tokenizer.from_file(str(tmp_path / "teacher/tokenizer.json"))
    assert stored.encode(text).ids == own.encode(text).ids
    assert stored.decode(stored.encode(text).ids) == text


def test_workers_get_absolute_paths(tmp_path, monkeypatch):
    small.options(tmp_path)
    monkeypatch.chdir(tmp_path)
    started = begin(small.options(Path(), "cache", tokenizer="teacher"))
    assert isinstance(started, Plan)
    assert started.options.teacher == str(tmp_path / "teacher")
    assert started.options.tokenizer == str(tmp_path / "teacher")
    assert started.corpus.dataset == str(tmp_path / "corpus.jsonl")
    assert started.manifest.teacher["source"] == "teacher"


def test_a_place_that_is_taken_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CaptureError, match=r"file is a file. A cache is a folder"):
        plan(tmp_path, out="file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("mine")
    with pytest.raises(CaptureError, match=r"not a cache and not empty: it holds thesis\.tex"):
        plan(tmp_path, out="full")
    assert (tmp_path / "full/thesis.tex").read_text() == "mine"
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.tex"]


def test_a_place_where_the_first_write_was_killed_is_free(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/manifest.json.__lock").write_bytes(b'{"form')
    assert plan(tmp_path).rows == 0


def test_more_entries_than_tokens(tmp_path):
    with pytest.raises(CaptureError, match="--k 301 is more than the vocabulary of 300 tokens"):
        plan(tmp_path, k=301)
    assert not (tmp_path / "cache").exists()


def test_more_sampled_entries_than_can_be_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(begin_module, "MAX_DRAWS", 5)
    with pytest.raises(CaptureError, match="leaves 6 sampled entries; at most 5 are possible"):
        plan(tmp_path, k=8, exact=2)
    assert plan(tmp_path, k=7, exact=2).targets.k == 7
    assert MAX_DRAWS > 5


def test_a_row_longer_than_the_teacher_reads(tmp_path):
    write_tiny_teacher(tmp_path / "teacher", max_positions=32)
    with pytest.raises(TeacherError, match="--length 33 is beyond the 32 positions"):
        plan(tmp_path, length=33)
    assert plan(tmp_path, length=32).options.length == 32


def test_a_tokenizer_wider_than_the_head(tmp_path):
    write_tiny_teacher(tmp_path / "teacher", vocabulary=300, rows=290)
    with pytest.raises(TeacherError, match=r"has 300 ids, but .* only 290 rows.*--vocabulary 290"):
        plan(tmp_path)
    assert plan(tmp_path, vocabulary=290).manifest.encoding.vocabulary == 290


def test_a_head_wider_than_the_tokenizer_is_cut(tmp_path):
    write_tiny_teacher(tmp_path / "teacher", vocabulary=300, rows=320)
    made = plan(tmp_path)
    assert made.manifest.encoding.vocabulary == 300
    assert made.manifest.teacher["vocabulary_rows"] == 320
    with pytest.raises(CaptureError, match="--vocabulary 310 is more than the tokenizer's 300"):
        plan(tmp_path, vocabulary=310)


def rewrite_tokenizer(folder: Path, change) -> Path:
    definition = tiny_tokenizer()
    change(definition)
    write_tiny_tokenizer(folder)
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    return folder


def swap(definition) -> None:
    vocabulary = definition["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def add_special(definition) -> None:
    token = {**definition["added_tokens"][0], "id": 300, "content": "<|extra|>"}
    definition["added_tokens"].append(token)


def test_a_tokenizer_of_equal_size_with_other_ids_is_refused(tmp_path):
    other = rewrite_tokenizer(tmp_path / "other", swap)
    with pytest.raises(TeacherError, match=r"other is not the teacher's: the token '[ab]' has the"):
        plan(tmp_path, tokenizer=str(other))
    assert not (tmp_path / "cache").exists()


def test_a_tokenizer_with_added_tokens_is_the_same(tmp_path):
    write_tiny_teacher(tmp_path / "teacher", rows=304)
    other = rewrite_tokenizer(tmp_path / "other", add_special)
    made = plan(tmp_path, tokenizer=str(other))
    assert made.manifest.encoding.vocabulary == 301
    same = rewrite_tokenizer(tmp_path / "same", lambda definition: None)
    definition = json.loads((same / "tokenizer.json").read_text())
    definition = {key: definition[key] for key in reversed(list(definition))}
    (same / "tokenizer.json").write_text(json.dumps(definition))
    assert plan(tmp_path, out="cache-2", tokenizer=str(same)).manifest.encoding.vocabulary == 300


def test_ids_that_no_token_has_are_known(tmp_path):
    def leave_out(definition) -> None:
        vocabulary = definition["model"]["vocab"]
        vocabulary[max(vocabulary, key=vocabulary.__getitem__)] = 303

    write_tiny_teacher(tmp_path / "teacher", rows=304)
    rewrite_tokenizer(tmp_path / "teacher", leave_out)
    made = plan(tmp_path)
    assert made.manifest.encoding.vocabulary == 304
    assert made.holes == (299, 300, 301, 302)
    assert plan(tmp_path, out="cache-2", vocabulary=301).holes == (299, 300)


def test_special_tokens_that_the_tokenizer_lacks(tmp_path):
    small.options(tmp_path)
    (tmp_path / "teacher/tokenizer_config.json").write_text("{}")
    with pytest.raises(PipelineError, match=r"no BOS token\. Set bos to 'off'"):
        plan(tmp_path, bos="on")
    assert plan(tmp_path, bos="auto").parts.bos is False


def test_several_workers_leave_the_devices_alone(tmp_path, monkeypatch):
    options = small.options(tmp_path, workers=2)

    def opened(*_: object) -> None:
        raise AssertionError("the devices were opened in this process")

    expected = (jax.default_backend(), jax.local_device_count())
    monkeypatch.setattr(jax, "local_device_count", opened)
    monkeypatch.setattr(jax, "default_backend", opened)
    assert begin_module._backend(options) == expected
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(CaptureError, match="JAX finds no device in a process of its own"):
        begin_module._backend(options)


def test_a_damaged_cache_is_not_taken_for_finished(tmp_path, monkeypatch):
    small.share_teachers(monkeypatch)
    small.run_without_beam(monkeypatch)
    small.capture(tmp_path, keep_parts=True)
    assert (tmp_path / "cache/parts").exists()
    assert isinstance(begin(small.options(tmp_path, keep_parts=True)), cache.Cache)
    assert (tmp_path / "cache/parts").exists()
    assert isinstance(begin(small.options(tmp_path)), cache.Cache)
    assert not (tmp_path / "cache/parts").exists()
    path = tmp_path / "cache/arrays/target_ids/c.1.0.0"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(
        DamageError, match=r"shard 1, rows 6-11, .*target_ids.*shorter.*\n.*--repai"
    ):
        begin(small.options(tmp_path))


def test_a_weight_that_is_no_number_is_refused_by_name(tmp_path):
    small.options(tmp_path)
    path = tmp_path / "teacher/model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, path)
    made = plan(tmp_path)
    from decoder.errors import DecoderError
    from pipelines.teacher import Teacher

    with pytest.raises(
        DecoderError, match=r"model\.norm\.weight holds numbers that are not finite"
    ):
        Teacher(made)
