"""A folder gives the rows that `datasets.load_dataset` gives, in its order."""

import json
from pathlib import Path
from random import Random

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import config, data_files

from pipelines import corpus_files
from pipelines.corpus import CorpusSettings, open_corpus
from pipelines.corpus_formats import TextUnit
from pipelines.corpus_splits import find_splits
from pipelines.errors import CorpusError


@pytest.fixture(autouse=True)
def _caches(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(corpus_files, "_CLOCK_TICK", 0.0)  # no file changes here
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def fill(folder: Path, names: list[str]) -> Path:
    """Writes files of two documents each, which say where they are from."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [f"{name} {i}" for i in range(2)]
        if path.suffix == ".parquet":
            pq.write_table(pa.table({"text": texts}), path)
        elif path.suffix == ".txt":
            path.write_text("".join(f"{text}\n" for text in texts))
        else:
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def expected(folder: Path, name: str | None = None) -> dict[str, list[str]]:
    loaded = datasets.load_dataset(str(folder), name)
    return {str(split): list(rows["text"]) for split, rows in loaded.items()}


def found(
    folder: Path, split: str, name: str | None = None, unit: TextUnit | None = None
) -> list[str]:
    corpus = open_corpus(CorpusSettings(str(folder), split=split, name=name, text_unit=unit))
    return corpus.texts(0, len(corpus))


def number(*names: str) -> list[str]:
    return [f"{name}-0000{i}-of-00002.parquet" for name in names for i in range(2)]


FOLDERS = {
    "files": ["train.jsonl", "test.jsonl"],
    "shards": number("train", "validation"),
    "shards in data": [*number("data/train", "data/test", "data/other"), "more.parquet"],
    "shards out of order": ["train_10.jsonl", "train_2.jsonl", "train_1.jsonl", "test_0.jsonl"],
    "folders": ["train/b.jsonl", "train/a.jsonl", "test/c.jsonl"],
    "folders of shards": ["train-0/x.jsonl", "train-1/x.jsonl", "x-test/x.jsonl"],
    "folders before files": ["train/a.jsonl", "test/b.jsonl", "test.jsonl", "dev.jsonl"],
    "other words": ["my-training.jsonl", "a dev.jsonl", "val.json", "data/eval.jsonl"],
    "several words": ["train.jsonl", "a.training.jsonl", "dev.jsonl", "valid.jsonl"],
    "words within words": ["trainer.jsonl", "latest.jsonl", "devil.jsonl"],
    "no words": ["b.jsonl", "a-b.jsonl", "a/z.jsonl", "c/d/e.jsonl"],
    "one split": ["only-train.jsonl", "other.jsonl"],
    "no train": ["test.jsonl", "validation.jsonl"],
    "lines of text": ["train.txt", "test.txt"],
    "folders of text": ["train/1.txt", "train/2.txt", "dev/1.txt"],
    "ndjson": ["train.ndjson", "test.ndjson"],
    "metadata": ["train.jsonl", "dataset_infos.json", "config.json", "test.jsonl"],
    "folders left out": ["__x/train.jsonl", ".y/train.jsonl", "a/train.jsonl", "test.jsonl"],
    "signs of patterns": ["train[1].jsonl", "a*/train.jsonl", "test.jsonl"],
}


@pytest.mark.parametrize("names", FOLDERS.values(), ids=FOLDERS)
def test_the_rows_of_load_dataset(names, tmp_path):
    folder = fill(tmp_path / "corpus", names)
    if "dataset_infos.json" in names:
        (folder / "dataset_infos.json").write_text("{}")
    rows = expected(folder)
    unit = "line" if names[0].endswith(".txt") else None
    assert {split: found(folder, split, unit=unit) for split in rows} == rows
    missing = next(split for split in ("dev", "validation", "train") if split not in rows)
    with pytest.raises(CorpusError, match=rf"no split '{missing}'.* are: {', '.join(rows)}\."):
        found(folder, missing)


def test_a_file_that_two_patterns_match_is_read_once(tmp_path):
    folder = fill(tmp_path / "corpus", ["train/train-0/a.jsonl", "train/b.jsonl"])
    twice = expected(folder)["train"]
    assert sorted(twice) == sorted(2 * ["train/train-0/a.jsonl 0", "train/train-0/a.jsonl 1"]
                                   + ["train/b.jsonl 0", "train/b.jsonl 1"])  # fmt: skip
    assert found(folder, "train") == list(dict.fromkeys(twice))


def configured(folder: Path, configs: str, names: list[str]) -> Path:
    fill(folder, names)
    (folder / "README.md").write_text(f"---\nlicense: mit\nconfigs:\n{configs}---\n# Data\n")
    return folder


LANGUAGES = ["en/train.jsonl", "en/test.jsonl", "fr/train.jsonl"]
CONFIGURATIONS = {
    "data_dir": "- config_name: en\n  data_dir: en\n- config_name: fr\n  data_dir: fr\n",
    "data_files": "- config_name: en\n  data_files: en/train.jsonl\n"
    "- config_name: fr\n  data_files:\n  - fr/*.jsonl\n",
    "data_files by split": "- config_name: en\n  data_files:\n  - split: train\n"
    "    path: [en/test.jsonl, en/train.jsonl]\n  - split: dev\n    path: fr/*\n"
    "- config_name: fr\n  data_files: fr/train.jsonl\n",
}


@pytest.mark.parametrize("configs", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_configurations(configs, tmp_path):
    folder = configured(tmp_path / "corpus", configs, LANGUAGES)
    for name in ("en", "fr"):
        rows = expected(folder, name)
        assert {split: found(folder, split, name) for split in rows} == rows
    with pytest.raises(CorpusError, match=r"has several configurations\. .* are: en, fr\."):
        found(folder, "train")
    with pytest.raises(CorpusError, match=r"no configuration 'de'\. .* are: en, fr\. Name one"):
        found(folder, "train", "de")
    with pytest.raises(CorpusError, match=r"no split 'other'\. Its splits of .* 'fr' are: train\."):
        found(folder, "other", "fr")


@pytest.mark.parametrize(
    "configs",
    [
        CONFIGURATIONS["data_dir"] + "  default: true\n",
        CONFIGURATIONS["data_dir"].replace("fr\n  data", "default\n  data"),
        "- config_name: fr\n  data_dir: fr\n",
    ],
)
def test_the_default_configuration(configs, tmp_path):
    folder = configured(tmp_path / "corpus", configs, LANGUAGES)
    rows = expected(folder)
    assert rows == {"train": ["fr/train.jsonl 0", "fr/train.jsonl 1"]}
    assert found(folder, "train") == rows["train"]
    with pytest.raises(CorpusError, match="no split 'test'"):
        found(folder, "test")


def test_configurations_of_one_folder_are_different_corpora(tmp_path):
    folder = configured(tmp_path / "corpus", CONFIGURATIONS["data_dir"], LANGUAGES)
    en, fr, test = (
        open_corpus(CorpusSettings(str(folder), name=name, split=split))
        for name, split in (("en", "train"), ("fr", "train"), ("en", "test"))
    )
    identities = [json.dumps(corpus.identity) for corpus in (en, fr, test)]
    assert len(set(identities)) == 3
    assert en.description == f"{folder} (1 json file, configuration en, split train)"
    assert fr.description == f"{folder} (1 json file, configuration fr)"


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ("- config_name: a\n  data_files: en/nothing.jsonl\n", "finds no splits .*en/nothing"),
        ("- config_name: a\n  data_files: ../outside.jsonl\n", r"finds no splits|not in it"),
        ("- config_name: a\n  data_files: /etc/*.txt\n", r"finds no splits|not in it"),
        ("- config_name: a\n  data_dir: en\n  field: data\n", "configuration 'a' .* sets field"),
        ("- data_files: en/*\n", "finds no splits .*config_name"),
        ("  {\n", r"finds no splits"),
        ("- config_name: a\n  data_files: [en/train.jsonl, x/train.txt]\n", r"several kinds"),
    ],
)
def test_configurations_that_cannot_be_followed(configs, message, tmp_path):
    folder = configured(tmp_path / "corpus", configs, [*LANGUAGES, "x/train.txt"])
    fill(tmp_path, ["outside.jsonl"])
    with pytest.raises(CorpusError, match=message):
        found(folder, "train")


def test_a_readme_without_configurations(tmp_path):
    folder = fill(tmp_path / "corpus", ["train.jsonl", "test.jsonl"])
    for text in ("# Data\n", "---\nlicense: mit\n---\n", "---\nno: [end\n", ""):
        (folder / "README.md").write_text(text)
        assert found(folder, "train") == expected(folder)["train"]
        with pytest.raises(
            CorpusError, match=r"no configuration 'en': no README\.md in it names any"
        ):
            found(folder, "train", "en")


WORDS = ("train", "test", "dev", "eval", "data", "a", "of", "0", "00001", "__", "é", "TEST")
ENDS = (".jsonl", ".txt.gz", "-00000-of-00002.parquet", "/config.json")


def random_name(random: Random) -> str:
    parts = ("".join(random.choices([*WORDS, *"-_. "], k=3)) for _ in range(random.randint(1, 3)))
    return "/".join(part.lstrip(".") for part in parts) + random.choice(ENDS)


@pytest.mark.parametrize("seed", range(2, 13, 2))
def test_names_that_datasets_cannot_tell_apart(seed, tmp_path):
    # It is asked about one of those that are alike, which must be as good as about all.
    random = Random(seed)
    names = ["z.jsonl", *{random_name(random) for _ in range(seed)}]
    fill(tmp_path, names)
    patterns = data_files.get_data_patterns(str(tmp_path))
    expected = {
        str(split): dict.fromkeys(
            Path(file).relative_to(tmp_path).as_posix()
            for pattern in held
            for file in resolved(pattern, tmp_path)
        )
        for split, held in patterns.items()
    }
    found = find_splits(names, {}, None, "d").files
    assert found == {split: tuple(files) for split, files in expected.items()}


def resolved(pattern: str, folder: Path) -> list[str]:
    try:
        return data_files.resolve_pattern(pattern, str(folder))
    except FileNotFoundError:
        return []
