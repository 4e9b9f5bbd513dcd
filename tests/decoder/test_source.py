"""Which names stand for what; the hub is replaced by functions that answer as it does."""

import json
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

import decoder.source
from decoder.errors import DecoderError
from decoder.source import SETTINGS_FILES, TOKENIZER_FILES, WEIGHT_FILES, Source, resolve
from decoder.weight_files import INDEX

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_folder(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == Source("folder", str(tmp_path), tmp_path)


def test_a_gguf_file_by_name_or_by_content(tmp_path: Path) -> None:
    for name, content in (("a.gguf", b""), ("b.bin", b"GGUF and more")):
        (tmp_path / name).write_bytes(content)
        assert resolve(str(tmp_path / name)).kind == "gguf"


def test_another_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12345678{}")
    with pytest.raises(DecoderError, match=r"is a file but no GGUF file. Give the folder"):
        resolve(str(tmp_path / "model.safetensors"))


def test_a_function() -> None:
    source = resolve("some.package:make.teacher")
    assert (source.kind, source.function) == ("function", "some.package:make.teacher")
    with pytest.raises(DecoderError, match="is a function and has no files"):
        _ = source.files


@pytest.mark.parametrize(
    "name",
    [
        "./nowhere",
        "/no/where",
        "~/no-such-folder",
        "a/b/c",
        "models/",
        "a/b.gguf",
        "nothing",
        "a b",
    ],
)
def test_what_looks_local_but_does_not_exist(name: str) -> None:
    with pytest.raises(DecoderError, match=r"does not exist here .looked at /.* Give a folder"):
        resolve(name)


def test_what_exists_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/name").path == Path("owner/name")


@pytest.mark.parametrize("name", [".", "some.package:function"])
def test_a_revision_is_for_the_hub(name: str) -> None:
    with pytest.raises(DecoderError, match="the revision 'main' is for hub names only"):
        resolve(name, "main")


@pytest.mark.parametrize("patterns", [WEIGHT_FILES, TOKENIZER_FILES])
def test_a_hub_name_becomes_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patterns: tuple[str, ...]
) -> None:
    folder = tmp_path / "snapshots" / COMMIT
    asked = {}

    def download(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        return str(folder)

    monkeypatch.setattr(decoder.source, "snapshot_download", download)
    source = resolve("owner/name", "v1", patterns)
    assert source == Source("folder", "owner/name", folder, COMMIT)
    assert asked == {
        "repo_id": "owner/name",
        "revision": "v1",
        "allow_patterns": list(patterns),
    }


REPOSITORY = {
    "config.json": "{}",
    INDEX: json.dumps({"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}),
    "x-1.safetensors": "1",
    "x-2.safetensors": "2",
    "model.safetensors": "3",
    "model.fp16.safetensors": "4",
    "consolidated.safetensors": "5",
    "original/config.json": "6",
    "original/consolidated.00.pth": "7",
    "onnx/model.safetensors": "8",
    "pytorch_model.bin": "9",
    "generation_config.json": "{}",
    "additional_chat_templates/tools.jinja": "10",
    "README.md": "11",
}


@pytest.mark.parametrize(
    ("patterns", "lacks", "expected"),
    [
        (WEIGHT_FILES, (), {"config.json", "model.safetensors", INDEX}),
        (
            WEIGHT_FILES,
            ("model.safetensors",),
            {"config.json", INDEX, "x-1.safetensors", "x-2.safetensors"},
        ),
        (WEIGHT_FILES, ("model.safetensors", INDEX), {"config.json"}),
        (TOKENIZER_FILES, ("model.safetensors",), {"config.json"}),
        (
            SETTINGS_FILES,
            (),
            {"config.json", "generation_config.json", "additional_chat_templates/tools.jinja"},
        ),
    ],
)
def test_what_is_fetched(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    patterns: tuple[str, ...],
    lacks: tuple[str, ...],
    expected: set[str],
) -> None:
    """By the hub client's own rule for patterns; all calls but the first ask for the commit."""
    folder, revisions = tmp_path / COMMIT, []

    def download(repo_id: str, revision: str | None, allow_patterns: list[str]) -> str:
        revisions.append(revision)
        names = sorted(REPOSITORY.keys() - set(lacks))
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(REPOSITORY[name])
        return str(folder)

    monkeypatch.setattr(decoder.source, "snapshot_download", download)
    assert resolve("owner/name", "v1", patterns).revision == COMMIT
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == expected
    assert revisions == ["v1", COMMIT][: len(revisions)]


def test_offline_without_a_copy() -> None:
    """The real client, which the test settings keep offline."""
    with pytest.raises(DecoderError, match="'owner/no-such-model' is no local path, and fetching"):
        resolve("owner/no-such-model")


@pytest.mark.parametrize(
    "answer",
    [
        LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder"),
        ConnectionError("no route"),
        OSError("disk full"),
    ],
)
def test_an_unreachable_hub(monkeypatch: pytest.MonkeyPatch, answer: Exception) -> None:
    def download(repo_id: str, **options: object) -> str:
        raise answer

    monkeypatch.setattr(decoder.source, "snapshot_download", download)
    with pytest.raises(DecoderError, match=f"at revision 'v1' failed .{type(answer).__name__}"):
        resolve("owner/name", "v1")
