"""A conversion is of the files as they are, never a stale one."""

import os
from pathlib import Path

import fsspec
import pytest

from pipelines import corpus_files
from pipelines.corpus_files import converted
from pipelines.corpus_find import find_sources
from pipelines.errors import CorpusError

LOCAL = fsspec.filesystem("file")


def write(path: Path, data: bytes = b'{"text": "a"}\n') -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def convert(path: Path, folder: Path, limit=None) -> Path:
    sources = find_sources(LOCAL, str(path), str(path))
    assert sources is not None
    return converted(sources, "text", "file", limit, folder)


def test_a_conversion_is_made_once(tmp_path, monkeypatch):
    path = write(tmp_path / "x.jsonl")
    first = convert(path, tmp_path / "cache")
    monkeypatch.setattr(corpus_files, "_write_arrow", None)
    assert convert(path, tmp_path / "cache") == first
    assert os.listdir(tmp_path / "cache") == [first.name]


def test_a_changed_file_of_equal_size_and_time_is_converted_again(tmp_path):
    path = write(tmp_path / "x.jsonl", b'{"text": "a"}\n')
    first = convert(path, tmp_path / "cache")
    for content in (b"b", b"c", b"d"):
        before = path.stat()
        path.write_bytes(b'{"text": "%s"}\n' % content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_mtime_ns == before.st_mtime_ns
        again = convert(path, tmp_path / "cache")
        assert again != first
        assert content in again.read_bytes()


def test_a_failed_conversion_leaves_nothing(tmp_path):
    path = write(tmp_path / "x.jsonl", b'{"text": "a"}\n{"text": 1}\n')
    with pytest.raises(CorpusError, match="line 2"):
        convert(path, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []
    assert convert(path, tmp_path / "cache", limit=1).exists()


def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch):
    path = write(tmp_path / "x.jsonl")
    write_arrow = corpus_files._write_arrow

    def write_and_change(*arguments):
        write_arrow(*arguments)
        path.write_bytes(b'{"text": "another"}\n')

    monkeypatch.setattr(corpus_files, "_write_arrow", write_and_change)
    with pytest.raises(CorpusError, match=r"x\.jsonl changed while it was read"):
        convert(path, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_no_place_for_the_conversion(tmp_path):
    path = write(tmp_path / "x.jsonl")
    write(tmp_path / "file")
    with pytest.raises(CorpusError, match=r"Cannot keep the converted corpus .*HF_DATASETS_CACHE"):
        convert(path, tmp_path / "file" / "cache")


def test_remote_files(tmp_path):
    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/b.jsonl", b'{"text": "one"}\n')
    memory.pipe("/corpus/a.jsonl", b'{"text": "two"}\n')
    try:
        sources = find_sources(memory, "/corpus", "memory://corpus")
        assert sources is not None
        first = converted(sources, "text", "file", None, tmp_path)
        assert b"twoone" in first.read_bytes()
        memory.pipe("/corpus/a.jsonl", b'{"text": "six"}\n')
        sources = find_sources(memory, "/corpus", "memory://corpus")
        assert sources is not None
        assert b"sixone" in converted(sources, "text", "file", None, tmp_path).read_bytes()
    finally:
        memory.rm("/corpus", recursive=True)


def test_batches_are_bounded():
    documents = ["x"] * 2500 + ["y" * 5_000_000] * 3
    batches = list(corpus_files._batches(documents))
    assert [len(batch) for batch in batches] == [1000, 1000, 501, 1, 1]
    assert [document for batch in batches for document in batch] == documents
