"""Corpora that `datasets` keeps: folders of `save_to_disk`, and the hub.

`datasets` falls back to whatever version it last stored when the hub does not
answer. A corpus must be the commit that was asked for, so that is checked.
"""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import fsspec
import pyarrow as pa

from decoder.stand_ins import HEAD
from pipelines.corpus_files import describe_files
from pipelines.corpus_formats import refuse_stand_in
from pipelines.corpus_links import leads_nowhere, list_files
from pipelines.errors import CorpusError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

# `datasets` takes seconds to import, so it is imported where it is needed.

_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT = 60.0  # seconds for the hub to name a commit


@dataclass(frozen=True)
class Loaded:
    """A dataset, the cheap identity of its source, and a description for people."""

    dataset: "Dataset"
    identity: dict[str, Any]
    description: str


def is_saved(filesystem: fsspec.AbstractFileSystem, path: str) -> bool:
    """Whether `save_to_disk` wrote this folder."""

    def holds(name: str) -> bool:
        return filesystem.isfile(f"{path}/{name}")

    return holds("dataset_dict.json") or (holds("state.json") and holds("dataset_info.json"))


def load_saved(
    filesystem: fsspec.AbstractFileSystem, path: str, split: str, dataset: str
) -> Loaded:
    """Maps a saved dataset, or one split of a saved dictionary of them.

    Args:
      dataset: what the user wrote, for messages.
    """
    import datasets

    inside = filesystem.isfile(f"{path}/dataset_dict.json")
    try:
        if inside:
            splits = _read_json(filesystem, f"{path}/dataset_dict.json")["splits"]
            if split not in splits:
                raise CorpusError(_wrong_split(dataset, split, splits))
            path = f"{path}/{split}"
        _read_json(filesystem, f"{path}/dataset_info.json")
        arrows = _read_json(filesystem, f"{path}/state.json")["_data_files"]
        if not arrows:
            raise CorpusError(f"{dataset!r} is empty: it holds no document at all.")
        for arrow in arrows:
            file = f"{path}/{arrow['filename']}"
            with filesystem.open(file, "rb") as stream:
                refuse_stand_in(cast(bytes, stream.read(HEAD)), file)
        with quiet():
            loaded = datasets.load_from_disk(filesystem.unstrip_protocol(path))
    except (OSError, KeyError, json.JSONDecodeError, pa.ArrowException) as error:
        raise CorpusError(
            f"The saved dataset {dataset!r} is damaged: {reason(error)}. Save it again."
        ) from error
    loaded = cast("Dataset", loaded)
    saved = str(loaded.split) if loaded.split is not None else "train"
    # A cut of a split ("train[:1%]") is taken under any name.
    if not inside and split != saved and re.fullmatch(r"\w+", saved):
        raise CorpusError(_wrong_split(dataset, split, [saved]))
    # `datasets` puts results of `map` next to the data.
    names = {
        name: file
        for name, file in list_files(filesystem, path, dataset).items()
        if not name.startswith(("cache-", "tmp")) and not leads_nowhere(filesystem, file)
    }
    files = [file.identity for file in describe_files(filesystem, names)]
    return Loaded(loaded, {"source": "saved", "files": files}, f"{dataset} (saved, {split})")


def load_hub(dataset: str, name: str | None, split: str, revision: str | None) -> Loaded:
    """Downloads a dataset of the hub, or maps it if that commit is here already.

    Args:
      name: its configuration; the default one if None.
    """
    import datasets
    from datasets.exceptions import DatasetsError
    from huggingface_hub.utils import httpx

    commit = _resolve_commit(dataset, revision)
    with quiet():
        try:
            builder = datasets.load_dataset_builder(dataset, name, revision=commit)
            commit = _checked_commit(builder, dataset, commit)
            builder.download_and_prepare()
        except CorpusError:
            raise
        except (DatasetsError, OSError, RuntimeError, ValueError, httpx.HTTPError) as error:
            raise CorpusError(
                f"There is no file or folder {dataset!r}, and the hub's dataset of that name "
                f"cannot be loaded: {reason(error)}. Check the name and the network."
            ) from error
        try:
            loaded = cast("Dataset", builder.as_dataset(split=split))
        except ValueError as error:
            splits = list(builder.info.splits or [])
            raise CorpusError(_wrong_split(dataset, split, splits)) from error
    identity = {
        "source": "hub",
        "dataset": dataset,
        "configuration": builder.config.name,
        "split": split,
        "commit": commit,
    }
    description = f"{dataset} ({builder.config.name}, {split}, commit {commit[:12]})"
    return Loaded(loaded, identity, description)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and log lines of `datasets` and of the hub's client."""
    import datasets
    from huggingface_hub import utils as hub

    loggers = (datasets.logging, hub.logging)
    levels = [logger.get_verbosity() for logger in loggers]
    for logger in loggers:
        logger.set_verbosity(logging.CRITICAL)
    restores = []
    for library, disable, enable in (
        (datasets, datasets.disable_progress_bars, datasets.enable_progress_bars),
        (hub, hub.disable_progress_bars, hub.enable_progress_bars),
    ):
        if not library.are_progress_bars_disabled():
            disable()
            restores.append(enable)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.set_verbosity(level)
        for enable in restores:
            enable()


def _resolve_commit(dataset: str, revision: str | None) -> str | None:
    """The commit of a revision; None if the hub does not answer and none is demanded."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import httpx

    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    try:
        return HfApi().dataset_info(dataset, revision=revision, timeout=_TIMEOUT).sha
    except RevisionNotFoundError as error:
        raise CorpusError(
            f"The hub's dataset {dataset!r} has no revision {revision!r}. "
            "Name a branch, a tag or a commit that its page lists."
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CorpusError(
            f"There is no file or folder {dataset!r}, and the hub has no such dataset, or not "
            "for you. Check the name, or log in with `hf auth login` if it is private or gated."
        ) from error
    except (OfflineModeIsEnabled, httpx.TransportError, HfHubHTTPError) as error:
        if revision is None:
            return None
        raise CorpusError(
            f"The hub cannot be reached to look up revision {revision!r} of {dataset!r} "
            f"({reason(error)}). Name the commit to work offline."
        ) from error


def _checked_commit(builder: "DatasetBuilder", dataset: str, commit: str | None) -> str:
    """The commit that a builder will load; a CorpusError if it is not the wanted one."""
    found = builder.hash or ""
    if not _COMMIT.fullmatch(found) or (commit is not None and found != commit):
        raise CorpusError(
            f"Cannot load {dataset!r} at commit {commit or 'of its default branch'}: the hub "
            f"cannot be reached, and what is stored here is {found or 'of no known commit'}. "
            "Connect to the hub once, or name the commit that is stored."
        )
    return found


def _read_json(filesystem: fsspec.AbstractFileSystem, file: str) -> Any:
    data = cast(bytes, filesystem.cat_file(file))
    refuse_stand_in(data[:HEAD], file)
    return json.loads(data)


def _wrong_split(dataset: str, split: str, splits: list[str]) -> str:
    return f"{dataset!r} has no split {split!r}. Its splits are: {', '.join(splits) or 'none'}."


def reason(error: BaseException) -> str:
    """What went wrong, in one line, and what that came from."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{lines[0]} ({error.__cause__})" if error.__cause__ else lines[0]
