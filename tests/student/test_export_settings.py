"""An export has the settings of where its student started, though that be gone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import cache
import decoder
from student.errors import RunError, StudentError
from student.options import ExportOptions
from student.run import open_run, read_run
from student.students import Student, build
from student.train import train
from student.trained import export
from tests.decoder.full_settings import (
    CONFIG,
    FILES,
    TOKENIZER,
    add_settings,
    assert_exported,
)
from tests.student import runs


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run of a student that has every setting, killed and resumed.

    What changed there after the start is another student's; in the end it is gone.
    """
    folder = runs.make(tmp_path_factory.mktemp("made"))
    add_settings(folder / "student")
    # A checkpoint is written before the first step, so that no step has to be compiled.
    for _ in range(2):
        with runs.killed_at("_steps", 0), pytest.raises(runs.Killed):
            train(runs.options(folder, held_out=0.0, batch=8))
        if not (folder / "kept").exists():
            shutil.copytree(folder / "student", folder / "kept")
            (folder / "student/generation_config.json").write_text('{"eos_token_id": 5}')
    shutil.rmtree(folder / "student")
    return folder


@pytest.fixture
def copied(made, tmp_path) -> Path:
    shutil.copytree(made, tmp_path / "work", copy_function=shutil.copy2)
    return tmp_path / "work"


def source(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (*FILES, "tokenizer.json")}


def exported(run: Path, out: Path, **changes: Any) -> Path:
    export(ExportOptions(str(run), str(out), **changes))
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_a_folder(made, tmp_path, dtype):
    out = exported(made / "run", tmp_path / "out", dtype=dtype)
    assert_exported(out, source(made / "kept"), dtype)


def built(made: Path, student: Path | str, **changes: Any) -> Student:
    options = runs.options(made, student=str(student), **changes)
    return build(options, cache.open(str(made / "cache")), list)


def written(student: Student, out: Path) -> dict[str, Any]:
    """Writes a student as `export` does; its config.json."""
    assert isinstance(student.model, decoder.Decoder)
    settings = decoder.OwnSettings(student.record["settings"], student.files)
    decoder.save_folder(student.model, out, None, settings=settings)
    return json.loads((out / "config.json").read_text())


def test_of_a_pruned_student(made, tmp_path):
    student = add_settings(runs.write_student(tmp_path / "student", layers=3))
    config = written(built(made, student, drop_layers="1-1"), tmp_path / "out")
    assert config["num_hidden_layers"] == 2
    assert_exported(tmp_path / "out", source(student))


def test_of_a_student_without_a_tokenizer(made, tmp_path):
    """The cache's comes with it; the ids and generation_config.json are the student's."""
    folder = add_settings(runs.write_student(tmp_path / "student"))
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json"):
        (folder / name).unlink()
    config = written(built(made, folder), tmp_path / "out")
    assert {key: config[key] for key in CONFIG} == CONFIG
    cached = {path.name: path.read_bytes() for path in (made / "cache/tokenizer").iterdir()}
    kept = {**cached, "generation_config.json": FILES["generation_config.json"].encode()}
    found = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert found.keys() == kept.keys() | {"config.json", "model.safetensors"}
    assert {name: found[name] for name in kept} == kept


def test_of_a_student_from_scratch(made, tmp_path):
    """Its tokens are the cache's, whatever the file of its sizes says of another tokenizer."""
    sizes = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 8}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "sizes.json").write_text(json.dumps({**sizes, "eos_token_id": 128001}))
    config = written(built(made, tmp_path / "sizes.json"), tmp_path / "out")
    cached = json.loads((made / "cache/tokenizer/tokenizer.json").read_text())
    named = json.loads((made / "cache/tokenizer/tokenizer_config.json").read_text())
    ids = {token["content"]: token["id"] for token in cached["added_tokens"]}
    assert ids
    assert config["bos_token_id"] == ids.get(named["bos_token"])
    assert config["eos_token_id"] == ids.get(named["eos_token"])
    assert config["pad_token_id"] is None
    assert not (tmp_path / "out/generation_config.json").exists()


@pytest.mark.parametrize(
    "name", ["generation_config.json", "tokenizer.json", "additional_chat_templates/tools.jinja"]
)
def test_what_the_run_has_lost(copied, tmp_path, name):
    path = copied / "run/tokenizer" / name
    path.write_text(path.read_text() + " ")
    with pytest.raises(RunError, match=f"{name} is another file than when the run began"):
        exported(copied / "run", tmp_path / "out")
    path.unlink()
    with pytest.raises(RunError, match=f"has lost its {name}"):
        exported(copied / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_that_an_older_version_began(copied, made, tmp_path):
    """It keeps nothing but the tokenizer, which comes with the ids that it names."""
    record = read_run(made / "run")
    del record["model"]["settings"], record["model"]["tokenizer"]["files"]
    (copied / "run/run.json").unlink()
    (copied / "run/tokenizer/generation_config.json").unlink()
    for path in copied.glob("run/*"):
        if path.name != "checkpoints" and path.name != "tokenizer":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.move(copied / "run", copied / "parts")
    with open_run(copied / "run", record, {"cache": str(copied / "cache")}):
        pass
    for name in ("checkpoints", "tokenizer"):
        shutil.move(copied / "parts" / name, copied / "run" / name)
    out = exported(copied / "run", tmp_path / "out")
    written = json.loads((out / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (0, 2)
    assert (out / "chat_template.jinja").read_text() == FILES["chat_template.jinja"]
    assert (
        json.loads((out / "tokenizer_config.json").read_text())["eos_token"]
        == (TOKENIZER["eos_token"])
    )


def test_rows_of_special_tokens_are_not_trimmed(made, tmp_path):
    student = add_settings(runs.write_student(tmp_path / "student", rows=320))
    path = student / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token_id": 310}))
    with pytest.raises(StudentError, match=r"--trim-vocabulary would leave .*tokens \[310\]"):
        built(made, student, trim_vocabulary=True)
