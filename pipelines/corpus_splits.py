"""Which files of a folder belong to which split: as `datasets` decides.

Its rules go by names alone. So they are asked about a folder of empty files with the
same names, whatever file system the corpus is on, and whatever links it has.
"""

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from pipelines.corpus_datasets import quiet, reason
from pipelines.errors import CorpusError

# Files in which a folder may name configurations, and which files are whose.
CARDS = ("README.md", ".huggingface.yaml")


@dataclass(frozen=True)
class Splits:
    """The splits of a folder.

    Attributes:
      files: of each split, the names of its files in the order of `datasets`; each once.
      configuration: whose they are; None if the folder names no configurations.
    """

    files: Mapping[str, tuple[str, ...]]
    configuration: str | None = None


def find_splits(
    names: Iterable[str], cards: Mapping[str, str], configuration: str | None, dataset: str
) -> Splits:
    """The splits that `datasets.load_dataset` finds in a folder.

    It reads a file twice that two of its patterns match, such as train/train-0/x.jsonl; here
    no file is read twice.

    Args:
      names: of the data files, relative to the folder.
      cards: the content of those of `CARDS` that are there.
      configuration: which one is wanted; the default one if None.
      dataset: what the user wrote, for messages.

    Raises:
      CorpusError: there is no such configuration, or none is the default; or what the
        folder says of them cannot be followed.
    """
    with tempfile.TemporaryDirectory() as temporary, quiet():
        root = Path(temporary).resolve() / "data"
        root.mkdir()
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        for name, content in cards.items():
            (root / name).write_text(content, encoding="utf-8", newline="")
        try:
            chosen = _chosen(root, cards, configuration, dataset)
            found = _by_names(root) if chosen is None else _configured(root, chosen, dataset)
        except CorpusError:
            raise
        except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
            message = reason(error).replace(f"{root}/", "").replace(str(root), "this folder")
            raise CorpusError(
                f"`datasets` finds no splits in {dataset!r}: {message}. Correct its names or its "
                "README.md, or name the files you mean with a pattern."
            ) from error
        return Splits(
            {
                str(split): tuple(dict.fromkeys(_relative(file, root, dataset) for file in files))
                for split, files in found.items()
            },
            chosen,
        )


def _by_names(root: Path) -> Mapping[Any, list[str]]:
    from datasets.data_files import DataFilesDict, get_data_patterns

    return DataFilesDict.from_patterns(get_data_patterns(str(root)), base_path=str(root))


def _chosen(
    root: Path, cards: Mapping[str, str], configuration: str | None, dataset: str
) -> str | None:
    """The name of the configuration to load; None if the folder has none."""
    import datasets

    if not any(_has_configurations(name, content) for name, content in cards.items()):
        if configuration is not None:
            raise CorpusError(
                f"{dataset!r} has no configuration {configuration!r}: no README.md in it names "
                "any. Leave the name out, or name a folder or pattern of files."
            )
        return None
    held = datasets.get_dataset_config_names(str(root))
    chosen = configuration or datasets.get_dataset_default_config_name(str(root))
    if chosen not in held:
        wanted = f"no configuration {chosen!r}" if chosen else "several configurations, no default"
        raise CorpusError(
            f"{dataset!r} has {wanted}. Its configurations are: {', '.join(held)}. Name one "
            "of them (--name)."
        )
    return chosen


def _has_configurations(name: str, content: str) -> bool:
    from huggingface_hub import DatasetCard

    if not name.endswith(".md"):
        content = f"---\n{content}\n---\n"
    return bool(DatasetCard(content).data.get("configs"))


def _configured(root: Path, name: str, dataset: str) -> Mapping[Any, list[str]]:
    """The files of a configuration by split."""
    import datasets

    builder = datasets.load_dataset_builder(str(root), name, cache_dir=str(root.parent / "cache"))
    config = builder.config
    # What else may stand there says how `datasets` should read the files, which it does not do.
    plain = replace(
        type(config)(),
        **{
            field: getattr(config, field)
            for field in ("name", "version", "description", "data_dir", "data_files", "features")
            if hasattr(config, field)
        },
    )
    changed = [field for field, value in vars(config).items() if value != vars(plain)[field]]
    if changed:
        raise CorpusError(
            f"The configuration {name!r} of {dataset!r} sets {', '.join(changed)}, which only "
            "`datasets` follows. Load it there and write it with save_to_disk."
        )
    return config.data_files or {}


def _relative(file: str, root: Path, dataset: str) -> str:
    if not Path(file).is_relative_to(root):
        raise CorpusError(
            f"The README.md of {dataset!r} names {file}, which is not in this folder. Name the "
            "files you mean with a pattern."
        )
    return Path(file).relative_to(root).as_posix()
