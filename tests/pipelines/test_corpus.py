"""A corpus is the same documents in the same order, whoever opens it; its digests tell."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.corpus import (
    CorpusSettings,
    combine_digests,
    digest_documents,
    document_digest,
    open_corpus,
    part_ranges,
)
from pipelines.errors import CorpusError
from pipelines.layout import LayoutSettings, lay_rows

TEXTS = [f"document {i}\r\n" for i in range(10)]


@pytest.fixture(autouse=True)
def _conversions(tmp_path, monkeypatch):
    """Conversions go to a folder of the test's own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def write_jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)))
    return str(path)


def read(dataset: str, **settings) -> list[str]:
    corpus = open_corpus(CorpusSettings(dataset, **settings))
    return corpus.texts(0, len(corpus))


def test_the_same_documents_from_every_kind_of_source(tmp_path):
    assert read(write_jsonl(tmp_path / "a.jsonl", TEXTS)) == TEXTS
    pq.write_table(pa.table({"text": TEXTS, "n": range(10)}), tmp_path / "a.parquet")
    assert read(str(tmp_path / "a.parquet")) == TEXTS
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{i}.txt").write_bytes(text.encode())
    assert read(str(tmp_path / "texts")) == TEXTS
    assert read(f"{tmp_path}/texts/*.txt", limit=3) == TEXTS[:3]
    assert read(str(tmp_path / "texts"), text_unit="line") == [text[:-2] for text in TEXTS]


def test_slices_and_limits(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    corpus = open_corpus(CorpusSettings(path, limit=4))
    assert len(corpus) == 4
    assert corpus.texts(1, 3) == TEXTS[1:3]
    assert corpus.texts(4, 4) == []
    with pytest.raises(IndexError, match="Documents 2 to 5 were asked for, but there are 4"):
        corpus.texts(2, 5)
    assert len(open_corpus(CorpusSettings(path, limit=40))) == 10


def test_identity_is_cheap_and_moves_with_its_folder(tmp_path):
    (tmp_path / "here").mkdir()
    path = tmp_path / "here" / "a.jsonl"
    write_jsonl(path, TEXTS)
    identity = open_corpus(CorpusSettings(str(path))).identity
    assert identity == {
        "source": "files",
        "format": "json",
        "files": [
            {
                "name": "a.jsonl",
                "size": path.stat().st_size,
                "mtime_ns": path.stat().st_mtime_ns,
            }
        ],
        "column": "text",
        "limit": None,
    }
    (tmp_path / "here").rename(tmp_path / "there")
    moved = open_corpus(CorpusSettings(str(tmp_path / "there" / "a.jsonl")))
    assert moved.identity == json.loads(json.dumps(identity))
    assert moved.description == f"{tmp_path}/there/a.jsonl (1 json file)"


def test_a_changed_file_is_seen_though_size_and_time_are_the_same(tmp_path):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, ["one"])
    assert read(str(path)) == ["one"]
    before = path.stat()
    write_jsonl(path, ["two"])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert read(str(path)) == ["two"]


def test_processes_that_open_it_at_once_read_the_same(tmp_path):
    texts = [f"text {i} " * 20 for i in range(3000)]
    settings = CorpusSettings(write_jsonl(tmp_path / "a.jsonl", texts), limit=2500)
    (tmp_path / "settings").write_bytes(pickle.dumps(settings))
    program = (
        "import pathlib, pickle, sys, warnings; warnings.simplefilter('error')\n"
        "from pipelines.corpus import digest_documents, open_corpus\n"
        "corpus = open_corpus(pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()))\n"
        "print(len(corpus), digest_documents(corpus.texts(0, len(corpus))))\n"
    )
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "shared")}
    command = [sys.executable, "-c", program, str(tmp_path / "settings")]
    workers = [
        subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True)
        for _ in range(3)
    ]
    outputs = [worker.communicate(timeout=120) for worker in workers]
    # Quiet: nothing on the standard error stream.
    assert outputs == [(f"2500 {digest_documents(texts[:2500])}\n", "")] * 3
    assert len(os.listdir(tmp_path / "shared" / "stillroom")) == 1


def test_reading_leaves_the_progress_bars_as_they_were(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    level = datasets.logging.get_verbosity()
    assert not datasets.are_progress_bars_disabled()
    read(path)
    assert not datasets.are_progress_bars_disabled()
    assert datasets.logging.get_verbosity() == level


@pytest.mark.parametrize(
    ("dataset", "settings", "message"),
    [
        ("nothing.jsonl", {}, r"There is no 'nothing\.jsonl'\. A dataset is the name of a hub"),
        ("./nothing", {}, r"There is no './nothing'\. A dataset is"),
        ("/no/such/folder", {}, "There is no '/no/such/folder'"),
        ("no such name", {}, "There is no 'no such name'"),
        ("*.nothing", {}, r"No file matches '\*\.nothing'"),
        ("what://ever", {}, "Cannot read 'what://ever': Protocol not known: what"),
        ("a.jsonl", {"column": "body"}, r"line 1: There is no column 'body'.*'id' \(number\), 'te"),
        ("a.jsonl", {"column": "id"}, r"line 1: Document 0 .*'id' holds a value of type int"),
        ("a.jsonl", {"split": "test"}, "Files have the one split 'train', but the split is 'test'"),
        ("empty.jsonl", {}, r"'empty\.jsonl' is empty: it holds no document"),
        ("empty.txt", {"text_unit": "line"}, r"'empty\.txt' is empty"),
    ],
)
def test_bad_corpora(dataset, settings, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(CorpusError, match=message):
        open_corpus(CorpusSettings(dataset, **settings))


def test_bad_settings():
    with pytest.raises(CorpusError, match="limit must be at least 1 document, but it is 0"):
        CorpusSettings("x", limit=0)
    with pytest.raises(CorpusError, match="No dataset is named"):
        CorpusSettings("")


def test_a_local_file_asks_no_network(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    program = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise RuntimeError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from pipelines.corpus import CorpusSettings, open_corpus\n"
        "print(len(open_corpus(CorpusSettings(sys.argv[1]))))\n"
    )
    environment = {
        **os.environ,
        "HF_DATASETS_CACHE": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
        "HF_DATASETS_OFFLINE": "0",
    }
    command = [sys.executable, "-c", program, path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("10\n", "")


def test_digests_have_one_meaning():
    # C36: two lines swapped, and every other way to rearrange the same characters.
    corpora = [
        ["ab", "c"],
        ["c", "ab"],
        ["a", "bc"],
        ["abc"],
        ["ab", "c", ""],
        ["", "ab", "c"],
        ["ab", "C"],
        [],
        [""],
        ["", ""],
    ]
    digests = {digest_documents(texts) for texts in corpora}
    assert len(digests) == len(corpora)
    assert all(len(bytes.fromhex(digest)) == 32 for digest in digests)


@given(st.lists(st.text(max_size=3), max_size=4), st.lists(st.text(max_size=3), max_size=4))
def test_digests_are_equal_for_equal_documents_only(first, second):
    assert (digest_documents(first) == digest_documents(second)) == (first == second)


def test_digests_are_the_same_everywhere():
    # Golden values: a change would make every cache on storage another corpus's.
    assert document_digest("").hex()[:16] == "c0e684442878cdef"
    assert digest_documents(["ab", "c"])[:16] == "29398b212c30481a"
    assert (
        combine_digests([digest_documents(["ab"]), digest_documents(["c"])])[:16]
        == "4bc32756060baf2a"
    )


def test_combined_digests():
    a, b = digest_documents(["a"]), digest_documents(["b"])
    assert len({combine_digests(parts) for parts in ([a, b], [b, a], [a], [b], [], [a, a])}) == 6
    with pytest.raises(ValueError, match="64 hex digits"):
        combine_digests([a[:-2]])


def test_digests_refuse_what_is_no_text():
    with pytest.raises(CorpusError, match=r"Document 5 must be a text, .*nothing \(null\)"):
        digest_documents(["a", None], first_document=4)
    with pytest.raises(CorpusError, match="Document 0 is no valid text"):
        digest_documents(["\ud800"])


def test_parts():
    assert part_ranges(10, 4) == [range(4), range(4, 8), range(8, 10)]
    assert part_ranges(8, 4) == [range(4), range(4, 8)]
    assert part_ranges(0, 4) == []
    with pytest.raises(ValueError, match="at least 1 document, but found 0"):
        part_ranges(10, 0)


@pytest.mark.parametrize("done", [0, 1, 5, 9, 10])
def test_a_stopped_capture_takes_up_the_next_document(done, tmp_path):
    # C30: parts of one document; `done` of them before the stop, the others after.
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    seen = []
    for parts in (slice(0, done), slice(done, None)):
        corpus = open_corpus(CorpusSettings(path))
        for part in part_ranges(len(corpus), 1)[parts]:
            seen += corpus.texts(part.start, part.stop)
    assert seen == TEXTS


def test_rows_do_not_depend_on_the_order_of_the_parts(tmp_path):
    # C32.
    corpus = open_corpus(CorpusSettings(write_jsonl(tmp_path / "a.jsonl", TEXTS)))
    parts = part_ranges(len(corpus), 3)

    def lay(part: range) -> np.ndarray:
        texts = corpus.texts(part.start, part.stop)
        documents = [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]
        rows = lay_rows(documents, part.start, LayoutSettings("pack", 16))
        return np.stack([rows.tokens, rows.documents])

    forward = {part: lay(part) for part in parts}
    backward = {part: lay(part) for part in reversed(parts)}
    for part in parts:
        np.testing.assert_array_equal(forward[part], backward[part])
        held = forward[part][1][forward[part][0] > 0]
        assert set(held.tolist()) == set(part)
