"""Which files of a folder belong to which split: as `datasets` decides.

Its rules go by names alone. So they are asked about a folder of empty files with such
names, whatever file system the corpus is on, and whatever links it has.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import yaml

from pipelines.corpus_datasets import quiet, reason
from pipelines.errors import CorpusError

if TYPE_CHECKING:
    from datasets import BuilderConfig

# `datasets` takes seconds to import, so it is imported where it is needed.

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
    with quiet():
        try:
            if any(_has_configurations(name, content) for name, content in cards.items()):
                chosen, found = _configured(names, cards, configuration, dataset)
            else:
                _refuse_configuration(configuration, dataset)
                chosen, found = None, _by_names(names)
        except CorpusError:
            raise
        except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
            raise CorpusError(
                f"`datasets` finds no splits in {dataset!r}: {reason(error)}. Correct its names "
                "or its README.md, or name the files you mean with a pattern."
            ) from error
    return Splits({split: tuple(dict.fromkeys(files)) for split, files in found.items()}, chosen)


def _has_configurations(name: str, content: str) -> bool:
    from huggingface_hub import DatasetCard

    if not name.endswith(".md"):
        content = f"---\n{content}\n---\n"
    return bool(DatasetCard(content).data.get("configs"))


def _refuse_configuration(configuration: str | None, dataset: str) -> None:
    if configuration is not None:
        raise CorpusError(
            f"{dataset!r} has no configuration {configuration!r}: no README.md in it names any. "
            "Leave the name out, or name a folder or pattern of files."
        )


def _by_names(names: Iterable[str]) -> dict[str, list[str]]:
    from datasets.data_files import get_data_patterns, resolve_pattern

    # `datasets` lists a folder some 70 times, so of names that are alike to it it gets one.
    alike: defaultdict[str, list[str]] = defaultdict(list)
    words = _pattern_words()
    for name in names:
        alike[_shortened(name, words)].append(name)
    found: defaultdict[str, list[str]] = defaultdict(list)
    with _empty_files(alike) as root:
        for split, patterns in get_data_patterns(str(root)).items():
            for pattern in patterns:
                try:
                    matches = resolve_pattern(pattern, str(root))
                except FileNotFoundError:
                    continue
                relative = (Path(match).relative_to(root).as_posix() for match in matches)
                found[str(split)] += sorted(name for one in relative for name in alike[one])
    return dict(found)


def _pattern_words() -> re.Pattern[str]:
    """Finds the words of the patterns by which `datasets` tells splits."""
    from datasets.data_files import ALL_DEFAULT_PATTERNS, ALL_SPLIT_PATTERNS

    defaults = [patterns for group in ALL_DEFAULT_PATTERNS for patterns in group.values()]
    patterns = " ".join([*ALL_SPLIT_PATTERNS, *(one for group in defaults for one in group)])
    words = re.findall(r"[A-Za-z]+", re.sub(r"\[.*?\]|\{.*?\}", " ", patterns))
    return re.compile("|".join(sorted(set(words))))


def _shortened(name: str, words: re.Pattern[str]) -> str:
    """The name, its parts that no pattern can tell from others replaced by one letter."""
    from datasets.data_files import FILES_TO_IGNORE

    def counts(part: str) -> bool:
        return bool(words.search(part)) or part.startswith("__") or part in FILES_TO_IGNORE

    *folders, file = PurePosixPath(name).parts
    short = [part if counts(part) else "x" for part in folders]
    return "/".join([*short, file if counts(file) else "x.x"])


def _configured(
    names: Iterable[str], cards: Mapping[str, str], configuration: str | None, dataset: str
) -> tuple[str, dict[str, list[str]]]:
    """The configuration, and its files by split."""
    import datasets

    with _empty_files(names) as root:
        for name, content in cards.items():
            (root / name).write_text(content, encoding="utf-8", newline="")
        held = datasets.get_dataset_config_names(str(root))
        chosen = configuration or datasets.get_dataset_default_config_name(str(root))
        if chosen not in held:
            wanted = f"no configuration {chosen!r}" if chosen else "several configurations"
            raise CorpusError(
                f"{dataset!r} has {wanted}. Its configurations are: {', '.join(held)}. Name one "
                "of them (--name)."
            )
        builder = datasets.load_dataset_builder(
            str(root), chosen, cache_dir=str(root.parent / "cache")
        )
        _refuse_other_settings(builder.config, dataset)
        found: dict[str, list[str]] = {}
        for split, files in (builder.config.data_files or {}).items():
            outside = [file for file in files if not Path(file).is_relative_to(root)]
            if outside:
                raise CorpusError(
                    f"The README.md of {dataset!r} names {outside[0]}, which is not in it. "
                    "Name the files you mean with a pattern."
                )
            found[str(split)] = [Path(file).relative_to(root).as_posix() for file in files]
        return chosen, found


def _refuse_other_settings(config: "BuilderConfig", dataset: str) -> None:
    """Refuses what says how `datasets` should read the files, which are not read with it."""
    own = ("name", "version", "description", "data_dir", "data_files", "features")
    values = vars(config)
    plain = vars(replace(type(config)(), **{name: values[name] for name in own if name in values}))
    changed = [name for name, value in values.items() if value != plain[name]]
    if changed:
        raise CorpusError(
            f"The configuration {config.name!r} of {dataset!r} sets {', '.join(changed)}, which "
            "only `datasets` follows. Load it there and write it with save_to_disk."
        )


@contextmanager
def _empty_files(names: Iterable[str]) -> Iterator[Path]:
    """A folder of empty files with these names, for a while."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary).resolve() / "data"
        root.mkdir()
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        yield root
