"""Saved datasets, and the hub: the split and the commit that were asked for, or an error."""

import json
import os
import shutil
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pytest

from pipelines.corpus import Corpus, CorpusSettings, open_corpus
from pipelines.errors import CorpusError

TEXTS = ["one\r\n", "", "2026-01-01", "four"]


def saved(path: Path, texts=TEXTS, split: str | None = "train") -> str:
    dataset = datasets.Dataset.from_dict(
        {"n": list(range(len(texts))), "text": texts},
        features=datasets.Features(
            {"n": datasets.Value("int64"), "text": datasets.Value("string")}
        ),
        split=split and datasets.NamedSplit(split),
    )
    dataset.save_to_disk(str(path))
    return str(path)


@pytest.fixture(autouse=True)
def _no_bars() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def opened(dataset: str, **settings) -> Corpus:
    return open_corpus(CorpusSettings(dataset, **settings))


def test_a_saved_dataset(tmp_path):
    corpus = opened(saved(tmp_path / "d"), limit=3)
    assert corpus.texts(0, len(corpus)) == TEXTS[:3]
    assert corpus.identity["source"] == "saved"
    files = {file["name"]: file["size"] for file in corpus.identity["files"]}
    on_disk = {file.name: file.stat().st_size for file in (tmp_path / "d").iterdir()}
    assert files == on_disk
    assert str(tmp_path) not in json.dumps(corpus.identity)


def test_results_that_map_keeps_there_do_not_count(tmp_path):
    path = saved(tmp_path / "d")
    before = opened(path).identity
    shutil.copy(tmp_path / "d" / "data-00000-of-00001.arrow", tmp_path / "d" / "cache-1.arrow")
    assert opened(path).identity == before


def test_a_saved_format_does_not_change_the_texts(tmp_path):
    dataset = datasets.Dataset.from_dict({"text": TEXTS}).with_format("numpy")
    dataset.save_to_disk(str(tmp_path / "d"))
    texts = opened(str(tmp_path / "d")).texts(0, 4)
    assert texts == TEXTS
    assert {type(text) for text in texts} == {str}


def test_a_saved_selection(tmp_path):
    dataset = datasets.Dataset.from_dict({"text": TEXTS}).select([3, 0])
    dataset.save_to_disk(str(tmp_path / "d"))
    assert opened(str(tmp_path / "d")).texts(0, 2) == ["four", "one\r\n"]


def test_splits_of_a_saved_dictionary(tmp_path):
    parts = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "dev")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "d"))
    assert opened(str(tmp_path / "d")).texts(0, 1) == ["train"]
    dev = opened(str(tmp_path / "d"), split="dev")
    assert dev.texts(0, 1) == ["dev"]
    assert "data-00000-of-00001.arrow" in {file["name"] for file in dev.identity["files"]}
    with pytest.raises(CorpusError, match=r"no split 'test'\. Its splits are: train, dev\."):
        opened(str(tmp_path / "d"), split="test")


def test_the_split_of_a_saved_dataset(tmp_path):
    test = saved(tmp_path / "test", split="test")
    with pytest.raises(CorpusError, match=r"no split 'train'\. Its splits are: test\."):
        opened(test)
    assert len(opened(test, split="test")) == 4
    assert len(opened(saved(tmp_path / "cut", split="validation[:1%]"))) == 4
    with pytest.raises(CorpusError, match=r"no split 'dev'\. Its splits are: train\."):
        opened(saved(tmp_path / "none", split=None), split="dev")


@pytest.mark.parametrize(
    ("option", "use"),
    [
        ({"name": "en"}, "--name en is for datasets of the hub and folders"),
        ({"revision": "main"}, "--revision main is for datasets of the hub"),
        ({"text_unit": "line"}, "--text-unit line is for text files"),
    ],
)
def test_options_that_nothing_uses_are_refused(option, use, tmp_path):
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(
        str(tmp_path / "dictionary")
    )
    for path in (saved(tmp_path / "d"), str(tmp_path / "dictionary")):
        with pytest.raises(CorpusError, match=rf"{use}.* was saved with save_to_disk\. Leave it"):
            opened(path, **option)
    with pytest.raises(CorpusError, match="--text-unit file is for text files"):
        opened("org/data", text_unit="file")


@pytest.mark.parametrize(
    ("content", "next_step"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "Download the file again"),
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "dataset_dict.json",
        "train/state.json",
        "train/dataset_info.json",
        "train/data-00000-of-00001.arrow",
    ],
)
def test_what_stands_in_place_of_a_saved_file_is_refused(name, content, next_step, tmp_path):
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(
        str(tmp_path / "d")
    )
    (tmp_path / "d" / name).write_bytes(content)
    with pytest.raises(CorpusError, match=rf"d/{name} is .*{next_step}"):
        opened(str(tmp_path / "d"))


def test_a_dead_link_beside_a_saved_dataset(tmp_path):
    path = saved(tmp_path / "d")
    before = opened(path).identity
    (tmp_path / "d" / "notes.md").symlink_to(tmp_path / "nothing")
    assert opened(path).identity == before


def test_bad_saved_datasets(tmp_path):
    path = saved(tmp_path / "d")
    with pytest.raises(CorpusError, match=r"no column 'body'.*'n' \(int64\), 'text' \(string\)"):
        opened(path, column="body")
    with pytest.raises(CorpusError, match=r"Column 'n' of .* must hold texts, but holds Value"):
        opened(path, column="n")
    with pytest.raises(CorpusError, match="is empty: it holds no document"):
        opened(saved(tmp_path / "empty", texts=[]))
    (tmp_path / "d" / "state.json").write_text("{")
    with pytest.raises(CorpusError, match=r"saved dataset .* is damaged: .*Save it again"):
        opened(path)
    path = saved(tmp_path / "e")
    (tmp_path / "e" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(CorpusError, match=r"saved dataset .* is damaged"):
        opened(path)


COMMIT = "a" * 40
CARD = b"""---
configs:
- config_name: default
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
---
"""
HUB_FILES = {
    "README.md": CARD,
    "train.jsonl": b'{"text": "one"}\n{"text": "two"}\n',
    "test.jsonl": b'{"text": "three"}\n',
}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as it takes to load its one dataset, org/data."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        name = path.split("/", 6)[-1]
        if path.startswith("/api/datasets/org/data/tree/"):
            self._json([_entry(name) for name in HUB_FILES])
        elif path == "/api/datasets/org/data/revision/missing":
            self._error(404, "RevisionNotFound")
        elif path.startswith("/api/datasets/org/data"):
            self._json({"id": "org/data", "sha": COMMIT, "siblings": [], "tags": []})
        elif path.startswith("/datasets/org/data/resolve/") and name in HUB_FILES:
            etag = f'"{name.replace(".", ""):0<40}"'
            self._answer(200, HUB_FILES[name], {"ETag": etag, "X-Repo-Commit": COMMIT})
        elif path.startswith("/datasets/org/data/"):
            self._error(404, "EntryNotFound")
        else:
            self._error(401, "RepoNotFound")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        paths = (
            json.loads(body)["paths"] if body[0] == "{" else urllib.parse.parse_qs(body)["paths"]
        )
        self._json([_entry(path) for path in paths if path in HUB_FILES])

    def _json(self, value: object, status: int = 200, **headers: str) -> None:
        data = json.dumps(value).encode()
        self._answer(status, data, {"Content-Type": "application/json", **headers})

    def _error(self, status: int, code: str) -> None:
        self._json({"error": code}, status, **{"X-Error-Code": code})

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _entry(path: str) -> dict:
    return {"type": "file", "path": path, "size": len(HUB_FILES[path]), "oid": "b" * 40}


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


# A process of its own, because the hub's client reads its settings when it is imported.
PROGRAM = """
import json, sys
from pipelines.corpus import CorpusSettings, open_corpus
from pipelines.errors import CorpusError
for settings in json.loads(sys.argv[1]):
    try:
        corpus = open_corpus(CorpusSettings(**settings))
        print(json.dumps([corpus.texts(0, len(corpus)), corpus.identity]))
    except CorpusError as error:
        print(json.dumps(str(error)))
"""


def answers(hub: str, home: Path, offline: bool, *settings: dict) -> list:
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": str(int(offline)),
        "HF_DATASETS_OFFLINE": str(int(offline)),
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(settings)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_hub(hub, tmp_path):
    data = {"dataset": "org/data"}
    train, test, named, split, name, revision, column, missing = answers(
        hub,
        tmp_path,
        False,
        data,
        {**data, "split": "test"},
        {**data, "revision": COMMIT},
        {**data, "split": "dev"},
        {**data, "name": "other"},
        {**data, "revision": "missing"},
        {**data, "column": "body"},
        {"dataset": "org/nothing"},
    )
    identity = {
        "source": "hub",
        "dataset": "org/data",
        "configuration": "default",
        "split": "train",
        "commit": COMMIT,
        "column": "text",
        "limit": None,
    }
    assert train == [["one", "two"], identity]
    assert test == [["three"], {**identity, "split": "test"}]
    assert named == train
    assert split == "'org/data' has no split 'dev'. Its splits are: train, test."
    assert "BuilderConfig 'other' not found. Available: ['default']" in name
    assert "'org/data' has no revision 'missing'" in revision
    assert "There is no column 'body'. The columns are: 'text' (string)" in column
    assert "no file or folder 'org/nothing', and the hub has no such dataset" in missing

    # Offline, the stored commit is taken under its own name only.
    stored, named, other, branch, missing = answers(
        hub,
        tmp_path,
        True,
        data,
        {**data, "revision": COMMIT},
        {**data, "revision": "b" * 40},
        {**data, "revision": "main"},
        {"dataset": "org/nothing"},
    )
    assert stored == named == train
    assert f"what is stored here is {COMMIT}" in other
    assert "The hub cannot be reached to look up revision 'main'" in branch
    assert "no file or folder 'org/nothing', and the hub's dataset of that name cannot" in missing
