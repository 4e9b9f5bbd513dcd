"""The right files in the right order: of a split, behind links, and only those."""

import os
from pathlib import Path

import fsspec
import pytest
from datasets import config

from pipelines.corpus import CorpusSettings, open_corpus
from pipelines.corpus_find import find_sources
from pipelines.errors import CorpusError

LOCAL = fsspec.filesystem("file")


def names(path: Path | str, filesystem=LOCAL, split: str = "train") -> list[str]:
    sources = find_sources(filesystem, str(path), str(path), split)
    assert sources is not None
    return [file.identity["name"] for file in sources.files]


def write(path: Path, data: bytes = b'{"text": "a"}\n') -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_files_of_a_folder_in_order_of_their_names(tmp_path):
    for name in ("b.jsonl", "a/z.jsonl.gz", "a/b.json", "c.jsonl"):
        write(tmp_path / "d" / name)
    for name in (".hidden.jsonl", ".git/x.jsonl", "readme.md", "run.py"):
        write(tmp_path / "d" / name)
    assert names(tmp_path / "d") == ["a/b.json", "a/z.jsonl.gz", "b.jsonl", "c.jsonl"]
    assert names(f"{tmp_path}/d/*.jsonl") == ["b.jsonl", "c.jsonl"]
    assert names(f"{tmp_path}/d/**/*.json*") == ["a/b.json", "a/z.jsonl.gz", "b.jsonl", "c.jsonl"]
    assert names(f"{tmp_path}/[d]/?.jsonl") == ["d/b.jsonl", "d/c.jsonl"]
    assert names(tmp_path / "d" / "b.jsonl") == ["b.jsonl"]
    assert find_sources(LOCAL, str(tmp_path / "nothing"), "nothing") is None


def test_a_name_with_the_signs_of_a_pattern(tmp_path):
    write(tmp_path / "a[1].jsonl")
    assert names(tmp_path / "a[1].jsonl") == ["a[1].jsonl"]


def test_identity_names_no_absolute_path(tmp_path):
    write(tmp_path / "d" / "x.jsonl")
    sources = find_sources(LOCAL, str(tmp_path / "d"), "d")
    assert sources is not None
    status = os.stat(tmp_path / "d" / "x.jsonl")
    assert [file.identity for file in sources.files] == [
        {"name": "x.jsonl", "size": 14, "mtime_ns": status.st_mtime_ns}
    ]


def test_what_cannot_be_a_corpus(tmp_path):
    write(tmp_path / "d" / "x.md")
    with pytest.raises(CorpusError, match=r"folder 'D' holds no file that can be read \(\.jsonl"):
        find_sources(LOCAL, str(tmp_path / "d"), "D")
    with pytest.raises(CorpusError, match=r"Cannot read 'x\.md' of 'X': .*must end with one of"):
        find_sources(LOCAL, str(tmp_path / "d" / "x.md"), "X")
    with pytest.raises(CorpusError, match=r"No file matches 'P'"):
        find_sources(LOCAL, f"{tmp_path}/d/*.jsonl", "P")
    write(tmp_path / "d" / "a.txt")
    write(tmp_path / "d" / "b.jsonl")
    with pytest.raises(CorpusError, match=r"several kinds, such as 'a\.txt' and 'b\.jsonl'"):
        find_sources(LOCAL, str(tmp_path / "d"), "D")


def test_what_holds_no_data_beside_it_is_left_out(tmp_path):
    write(tmp_path / "train.jsonl")
    for name in ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"):
        write(tmp_path / name, b"{}")
    for name in (".gitattributes", "README.md", "LICENSE", "run.py", "_SUCCESS", "card.png"):
        write(tmp_path / name, b"text")
    assert names(tmp_path) == ["train.jsonl"]
    assert names(f"{tmp_path}/*.json*") == ["train.jsonl"]


@pytest.mark.parametrize(
    "name", ["b.csv", "b.jsonl.bak", "b.arrow", "b.zip", "b.parquet.gz", "b.jsonl.lz4", "b.tar.gz"]
)
def test_data_that_cannot_be_read_is_named_where_it_would_be_read(name, tmp_path):
    write(tmp_path / "a.jsonl")
    write(tmp_path / name)
    with pytest.raises(CorpusError, match=rf"Cannot read '{name}' of .* end with one of .*pattern"):
        names(tmp_path)
    write(tmp_path / "train.jsonl")
    assert names(tmp_path) == ["train.jsonl"]


def test_files_of_no_split_are_named(tmp_path):
    for name in ("train.jsonl", "test.jsonl", "a.jsonl", "b.csv", "c.txt", "d.jsonl", "e.md"):
        write(tmp_path / name)
    sources = find_sources(LOCAL, str(tmp_path), "d", "test")
    assert sources is not None
    assert [file.identity["name"] for file in sources.files] == ["test.jsonl"]
    assert sources.note == (
        ", split test, without a.jsonl, b.csv, c.txt and 1 more, which are of no split"
    )


def test_folders_behind_links(tmp_path):
    top, outside = tmp_path / "top", tmp_path / "outside"
    write(top / "a.jsonl")
    write(outside / "b.jsonl")
    (top / "more").symlink_to(outside)
    assert names(top) == ["a.jsonl", "more/b.jsonl"]
    assert names(f"{top}/**/*.jsonl") == ["a.jsonl", "more/b.jsonl"]
    assert names(f"{top}/*/b.jsonl") == ["more/b.jsonl"]
    assert names(f"{top}/*.jsonl") == ["a.jsonl"]
    # A link on the way, and links behind links.
    (outside / "further").symlink_to(tmp_path / "third")
    write(tmp_path / "third" / "c.jsonl")
    (tmp_path / "link").symlink_to(top)
    assert names(tmp_path / "link") == ["a.jsonl", "more/b.jsonl", "more/further/c.jsonl"]


def test_what_has_several_names_is_read_once(tmp_path):
    top, outside = tmp_path / "top", tmp_path / "outside"
    write(top / "z.jsonl")
    write(outside / "b.jsonl")
    for link in ("one", "two"):
        (top / link).symlink_to(outside)
    (top / "same.jsonl").symlink_to("z.jsonl")
    assert names(top) == ["one/b.jsonl", "same.jsonl"]
    assert names(f"{top}/**/*.jsonl") == ["one/b.jsonl", "same.jsonl"]
    sources = find_sources(LOCAL, str(top), "top")
    assert sources is not None
    assert sources.note == ", 2 more by other names"


def test_each_split_has_the_folder_that_both_link_to(tmp_path):
    write(tmp_path / "outside" / "b.jsonl")
    (tmp_path / "top").mkdir()
    for split in ("train", "test"):
        (tmp_path / "top" / split).symlink_to(tmp_path / "outside")
    assert names(tmp_path / "top") == ["train/b.jsonl"]
    assert names(tmp_path / "top", split="test") == ["test/b.jsonl"]


def test_loops_are_refused_by_name(tmp_path):
    write(tmp_path / "top" / "a.jsonl")
    write(tmp_path / "other" / "b.jsonl")
    (tmp_path / "top" / "self").symlink_to(tmp_path / "top")
    for dataset in (tmp_path / "top", f"{tmp_path}/top/**/*.jsonl"):
        with pytest.raises(CorpusError, match=r"The link 'self' in .*top.* leads back to"):
            names(dataset)
    assert names(f"{tmp_path}/top/*.jsonl") == ["a.jsonl"]
    (tmp_path / "top" / "self").unlink()
    (tmp_path / "top" / "more").symlink_to(tmp_path / "other")
    (tmp_path / "other" / "back").symlink_to(tmp_path / "top")
    with pytest.raises(CorpusError, match=r"The link 'more/back' in .* leads back to"):
        names(tmp_path / "top")


def test_dead_links_are_refused_where_they_would_be_read(tmp_path):
    write(tmp_path / "a.jsonl")
    for name in ("notes.md", "state.json", "data"):
        (tmp_path / name).symlink_to(tmp_path / "nothing")
    assert names(tmp_path) == names(f"{tmp_path}/*.jsonl") == ["a.jsonl"]
    (tmp_path / "test.jsonl").symlink_to(tmp_path / "nothing")
    write(tmp_path / "train.jsonl")
    assert names(tmp_path) == ["train.jsonl"]
    (tmp_path / "train-2.jsonl").symlink_to("train-2.jsonl")
    for dataset in (tmp_path, f"{tmp_path}/train*"):
        with pytest.raises(CorpusError, match=r"'train-2\.jsonl' of .* is a link that leads no"):
            names(dataset)


@pytest.mark.parametrize("dataset", ["a.jsonl", "*.jsonl", "."])
def test_options_that_nothing_uses_are_refused(dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "hf")
    write(tmp_path / "a.jsonl")
    for settings, message in (
        (
            CorpusSettings(dataset, revision="v9.9"),
            r"--revision v9\.9 is for datasets of the hub, but .* Leave it out",
        ),
        (
            CorpusSettings(dataset, name="en"),
            r"configuration 'en': no README\.md|--name en is for datasets of the hub",
        ),
        (
            CorpusSettings(dataset, text_unit="file"),
            r"--text-unit file is for text files \(\.txt\), but .* holds json",
        ),
        (
            CorpusSettings(dataset, split="test"),
            "Files have the one split 'train'|no split 'test'. .* are: train",
        ),
    ):
        with pytest.raises(CorpusError, match=message):
            open_corpus(settings)


def test_remote_folders(tmp_path):
    memory = fsspec.filesystem("memory")
    for name in ("train.jsonl", "b/test.jsonl", "other.jsonl", ".hidden/train.jsonl"):
        memory.pipe(f"/corpus/{name}", b'{"text": "%s"}' % name.encode())
    try:
        assert names("/corpus", memory) == ["train.jsonl"]
        assert names("/corpus", memory, "test") == ["b/test.jsonl"]
        assert names("/corpus/*.jsonl", memory) == ["other.jsonl", "train.jsonl"]
        readme = "---\nconfigs:\n- config_name: o\n  data_files: other.jsonl\n---\n"
        memory.pipe("/corpus/README.md", readme.encode())
        assert names("/corpus", memory) == ["other.jsonl"]
        memory.pipe(
            "/corpus/README.md", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
        )
        with pytest.raises(CorpusError, match=r"/corpus/README\.md is a pointer of Git LFS"):
            names("/corpus", memory)
    finally:
        memory.rm("/corpus", recursive=True)


def test_large_folders_leave_no_files_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    for number in range(300):
        write(tmp_path / "d" / f"{number % 7}" / f"{number}.jsonl")
    assert len(names(tmp_path / "d")) == 300
    assert os.listdir(tmp_path / "temporary") == []
