"""Bad input: one clear message with the next step, a non-zero exit, nothing lost."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cache
import stillroom
from cache.filling import reopened
from cache.jsonfields import digest
from cache.manifest import read_manifest
from cache.storage import Store
from decoder.weight_files import INDEX
from tests.models import tiny_tokenizer, write_tiny_teacher, write_tiny_tokenizer
from tests.pipelines import small


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return small.captured(tmp_path_factory.mktemp("made"))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return small.copy(made, tmp_path / "work")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    small.quick(monkeypatch)


def fails(capsys, words: list[str], *expected: str) -> str:
    """Runs a command that must fail with a message of its own; returns the message."""
    code = stillroom.main(words)
    captured = capsys.readouterr()
    assert code == 1
    assert captured.out == ""
    message = captured.err
    assert message.count(f"stillroom {words[0]}: ") == 1
    assert "Traceback (most" not in message
    for part in expected:
        assert part in message
    return message


def precompute(folder: Path, out: str = "new", **changes: Any) -> list[str]:
    return small.command_words(small.options(folder), out=str(folder / out), **changes)


# The corpus.


def test_a_dataset_that_is_not_there(capsys, folder):
    fails(
        capsys,
        precompute(folder, dataset=str(folder / "corpsu.jsonl")),
        "corpsu.jsonl",
        "A dataset is the name of a hub dataset, a folder saved with save_to_disk, or a file",
    )
    assert not (folder / "new").exists()


def test_a_hub_dataset_without_a_network(capsys, folder):
    fails(capsys, precompute(folder, dataset="nobody/nothing"), "nobody/nothing")
    assert not (folder / "new").exists()


def test_a_dataset_without_a_document(capsys, folder):
    (folder / "empty.jsonl").write_text("")
    fails(capsys, precompute(folder, dataset=str(folder / "empty.jsonl")), "is empty")


def test_a_dataset_of_empty_documents(capsys, folder):
    small.write_corpus(folder / "empty.jsonl", ["", "", ""])
    fails(
        capsys,
        precompute(folder, dataset=str(folder / "empty.jsonl")),
        "nothing to predict: 3 documents, of which 3 are empty",
        "Check --dataset and --column",
    )


def test_a_column_that_is_not_there(capsys, folder):
    fails(capsys, precompute(folder, column="txt"), "'txt'", "id", "text")


def test_a_column_that_holds_no_text(capsys, folder):
    fails(capsys, precompute(folder, column="id"), "'id'", "type int", "Name the column")


def test_a_line_that_is_no_json(capsys, folder):
    with (folder / "corpus.jsonl").open("a") as file:
        file.write('{"text": "cut off\n')
    fails(capsys, precompute(folder), "corpus.jsonl", "line 21")


def test_a_split_of_files(capsys, folder):
    fails(capsys, precompute(folder, split="test"), "Files have the one split 'train'")


# The teacher and its tokenizer.


def test_a_teacher_that_is_not_there(capsys, folder):
    fails(capsys, precompute(folder, teacher=str(folder / "techer")), "techer", "does not exist")


def test_a_teacher_that_lacks_a_file(capsys, folder):
    from safetensors.numpy import load_file, save_file

    place = folder / "teacher"
    tensors = load_file(place / "model.safetensors")
    names = sorted(tensors)
    (place / "model.safetensors").unlink()
    files = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, place / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (place / INDEX).write_text(json.dumps(index))
    assert stillroom.main(precompute(folder, "cache")) == 0  # the same teacher, in two files
    capsys.readouterr()
    (place / "two.safetensors").unlink()
    fails(capsys, precompute(folder), "lacks two.safetensors", "Download the missing files")


def test_a_teacher_that_was_cut_off(capsys, folder):
    path = folder / "teacher/model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    fails(capsys, precompute(folder), "truncated or damaged", "download it again")


def test_a_teacher_without_a_tokenizer(capsys, folder):
    (folder / "teacher/tokenizer.json").unlink()
    fails(capsys, precompute(folder), "has no tokenizer.json", "(--tokenizer)")


def test_a_function_that_is_not_there(capsys, folder):
    words = precompute(folder, teacher="tests.pipelines.poison:pupil")
    fails(capsys, words, "brings no tokenizer", "(--tokenizer)")
    words = precompute(folder, teacher="tests.pipelines.poison:pupil", tokenizer=folder / "teacher")
    fails(capsys, words, "tests.pipelines.poison has no attribute 'pupil'")
    words = precompute(folder, teacher="tests.nowhere:teacher", tokenizer=folder / "teacher")
    fails(capsys, words, "importing tests.nowhere failed", "PYTHONPATH")


def test_a_tokenizer_that_is_not_the_teachers(capsys, folder):
    definition = tiny_tokenizer()
    vocabulary = definition["model"]["vocab"]
    vocabulary["x"], vocabulary["y"] = vocabulary["y"], vocabulary["x"]
    write_tiny_tokenizer(folder / "other")
    (folder / "other/tokenizer.json").write_text(json.dumps(definition))
    message = fails(
        capsys, precompute(folder, tokenizer=folder / "other"), "is not the teacher's", "its own"
    )
    assert "'x'" in message or "'y'" in message


def test_a_tokenizer_wider_than_the_head(capsys, folder):
    """C20: both widths are named; with a narrower vocabulary it works, for what fits in."""
    write_tiny_teacher(folder / "narrow", vocabulary=300, rows=280)
    words = {"teacher": folder / "narrow"}
    fails(
        capsys,
        precompute(folder, **words),
        "has 300 ids",
        "only 280 rows",
        "--vocabulary 280",
    )
    assert not (folder / "new").exists()
    # Plain text needs merges, whose ids are the highest.
    message = fails(
        capsys,
        precompute(folder, vocabulary=280, **words),
        "part(s) could not be done",
        "Document 0 holds token",
        "ends at 279",
    )
    assert "part 2: Document " in message
    small.write_corpus(folder / "bytes.jsonl", ["q1 z2 x3 j4", "Qx Zy Jq"])
    words = {**words, "dataset": folder / "bytes.jsonl", "vocabulary": 280}
    assert stillroom.main(precompute(folder, "fits", **words)) == 0
    opened = cache.open(folder / "fits")
    rows = opened.rows(slice(None))
    labels = rows["label_mask"] == 1
    assert rows["target_ids"][labels].max() < 280
    assert opened.weights(rows)[labels].sum(axis=-1) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 301}, "--k 301 is more than the vocabulary of 300 tokens"),
        ({"length": 5000}, "--length 5000 is beyond the 4096 positions"),
        ({"vocabulary": 301}, "--vocabulary 301 is more than the tokenizer's 300 ids"),
        ({"bos": "on", "teacher": "bare"}, "no BOS token"),
        ({"teacher-revision": "main"}, "the revision 'main' is for hub names only"),
    ],
)
def test_a_setting_that_does_not_fit_the_teacher(capsys, folder, changes, message):
    shutil.copytree(folder / "teacher", folder / "bare")
    (folder / "bare/tokenizer_config.json").unlink()
    if "teacher" in changes:
        changes = {**changes, "teacher": folder / changes["teacher"]}
    fails(capsys, precompute(folder, **changes), message)
    assert not (folder / "new").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperatures": "0"}, "--temperatures should be above 0"),
        ({"temperatures": "-1"}, "--temperatures should be above 0"),
        ({"k": "0"}, "--k should be at least 1"),
        ({"length": "1"}, "--length should be at least 2"),
        ({"k": "many"}, "many"),
    ],
)
def test_a_setting_that_cannot_be(capsys, folder, changes, message):
    with pytest.raises(SystemExit) as stop:
        stillroom.main(precompute(folder, **changes))
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert message in " ".join(captured.err.replace("│", " ").split())
    assert "Traceback" not in captured.err
    assert not (folder / "new").exists()


# The place of the cache.


def test_a_place_that_is_taken(capsys, folder):
    fails(capsys, precompute(folder, "corpus.jsonl"), "is a file. A cache is a folder")
    fails(capsys, precompute(folder, "teacher"), "is not a cache and not empty", "config.json")
    assert (folder / "teacher/config.json").exists()


def test_a_place_below_a_file(capsys, folder):
    fails(
        capsys,
        precompute(folder, "corpus.jsonl/cache"),
        "cannot write",
        "corpus.jsonl/cache",
        "Not a directory",
        "Choose another place",
    )


def test_a_cache_that_was_made_otherwise(capsys, folder):
    before = small.everything(folder / "cache")
    fails(capsys, precompute(folder, "cache", k=5), "k: the cache has 4, you ask for 5")
    assert small.everything(folder / "cache") == before


def edit_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "cache/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def mended(capsys, folder: Path, command: str, *expected: str) -> None:
    """A command fails and names the manifest; `verify` tells, and repairs it from its backup."""
    broken = small.stored(folder / "cache")
    if not command.startswith("verify"):
        before = small.everything(folder / "cache")
        fails(capsys, COMMANDS[command](folder), *expected)
        assert small.everything(folder / "cache") == before
        return
    assert stillroom.main(COMMANDS[command](folder)) == 1
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "manifest.json" in shown.out
    again = stillroom.main(["verify", str(folder / "cache"), "--full"])
    capsys.readouterr()
    if command == "verify --repair":
        assert again == 0
        broken["manifest.json"] = broken["manifest.backup.json"]
    else:
        assert again == 1
    assert small.stored(folder / "cache") == broken


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "inspect": lambda folder: ["inspect", str(folder / "cache")],
    "inspect --row": lambda folder: ["inspect", str(folder / "cache"), "--row", "1"],
    "inspect --shard": lambda folder: ["inspect", str(folder / "cache"), "--shard", "1"],
    "verify": lambda folder: ["verify", str(folder / "cache")],
    "verify --full": lambda folder: ["verify", str(folder / "cache"), "--full"],
    "verify --repair": lambda folder: ["verify", str(folder / "cache"), "--repair"],
    "precompute": lambda folder: precompute(folder, "cache"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_cache_of_a_newer_version(capsys, folder, command):
    """Refused even where an older backup is there: nothing is put in its place."""
    path = folder / "cache/manifest.json"
    content = {**json.loads(path.read_text()), "version": [2, 0]}
    del content["digest"]
    path.write_text(json.dumps({**content, "digest": digest(content)}))
    before = small.everything(folder / "cache")
    fails(capsys, COMMANDS[command](folder), "has format version 2.0", "Update Stillroom")
    assert small.everything(folder / "cache") == before


@pytest.mark.parametrize("command", COMMANDS)
def test_a_manifest_that_was_edited(capsys, folder, command):
    edit_manifest(folder, state="open", run="mine")
    mended(capsys, folder, command, "manifest.json was changed", "--repair` restores")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": "zarr"}', b"\xff"])
def test_a_manifest_that_is_none(capsys, folder, command, content):
    (folder / "cache/manifest.json").write_bytes(content)
    mended(capsys, folder, command, "manifest.json")


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "precompute"])
def test_what_is_no_cache(capsys, folder, command):
    words = COMMANDS[command](folder)
    for place, expected in [
        ("nowhere", "There is no such folder. Check the path"),
        ("corpus.jsonl", "corpus.jsonl"),
        ("teacher", "It holds: config.json"),
    ]:
        words[1] = str(folder / place)
        fails(capsys, words, expected)
    assert not (folder / "nowhere").exists()


def test_an_unfinished_cache(capsys, folder):
    (folder / "cache/receipts/000002.json").unlink()
    store = Store(folder / "cache")
    opened = reopened(read_manifest(store)[0]).to_bytes()
    for name in ("manifest.json", "manifest.backup.json"):
        store.write(name, opened)
    for command in ("inspect --row", "precompute"):
        words = COMMANDS[command](folder)
        if command == "precompute":
            assert stillroom.main(words) == 0
        else:
            fails(capsys, words, "is not finished (5 shards done)", "stillroom precompute")
            code = stillroom.main(["verify", str(folder / "cache")])
            assert (code, "not finished" in capsys.readouterr().out) == (1, True)
    assert stillroom.main(["verify", str(folder / "cache"), "--full"]) == 0
