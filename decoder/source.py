"""What a teacher's name stands for: a folder, a GGUF file, a hub name, or a function."""

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from decoder.errors import DecoderError
from decoder.weight_files import INDEX, SINGLE, read_index

# Where there is no model.safetensors, also the files that the index names.
WEIGHT_FILES = ("config.json", "adapter_config.json", SINGLE, INDEX)
TOKENIZER_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
# What `own_settings` keeps: also of the tokenizer's what is not read here.
SETTINGS_FILES = (
    *TOKENIZER_FILES,
    "generation_config.json",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Source:
    """A resolved source.

    kind "folder": `path` is a folder; `revision` its commit if it came from the hub.
    kind "gguf": `path` is one file.
    kind "function": `function` is "package.module:name"; `path` is None.
    """

    kind: str
    given: str
    path: Path | None = None
    revision: str | None = None
    function: str | None = None

    @property
    def files(self) -> Path:
        """The folder or file; raises for a function."""
        if self.path is None:
            raise DecoderError(f"{self.given} is a function and has no files")
        return self.path


def resolve(
    source: str, revision: str | None = None, patterns: tuple[str, ...] = WEIGHT_FILES
) -> Source:
    """Find what `source` names; for a hub name, download the files that match `patterns`.

    What exists locally wins over the hub. `revision` (a branch, tag or commit)
    is for hub names only; the result has the commit that it stands for.
    """
    path = Path(source).expanduser()
    if path.exists():
        return _local(source, path, revision)
    if _FUNCTION.fullmatch(source):
        _refuse_revision(source, revision)
        return Source("function", source, function=source)
    if _looks_local(source) or not _HUB_NAME.fullmatch(source):
        raise DecoderError(
            f"{source!r} does not exist here (looked at {path.absolute()}). Give a folder with "
            "config.json and *.safetensors, a .gguf file, a hub name (owner/name), or "
            "package.module:function"
        )
    return _download(source, revision, patterns)


def _local(source: str, path: Path, revision: str | None) -> Source:
    _refuse_revision(source, revision)
    if path.is_dir():
        return Source("folder", source, path)
    with path.open("rb") as file:
        if file.read(4) == b"GGUF" or path.suffix == ".gguf":
            return Source("gguf", source, path)
    raise DecoderError(
        f"{source} is a file but no GGUF file. Give the folder that holds config.json and "
        "*.safetensors, or a .gguf file"
    )


def _refuse_revision(source: str, revision: str | None) -> None:
    if revision is not None:
        raise DecoderError(
            f"the revision {revision!r} is for hub names only, and {source} is none; leave it out"
        )


def _looks_local(source: str) -> bool:
    return (
        source.startswith((".", "/", "~"))
        or "\\" in source
        or source.endswith(("/", ".gguf", ".safetensors"))
        or source.count("/") > 1
    )


def _download(source: str, revision: str | None, patterns: tuple[str, ...]) -> Source:
    folder = _snapshot(source, revision, patterns)
    index = folder / INDEX
    if patterns == WEIGHT_FILES and index.is_file() and not (folder / SINGLE).is_file():
        folder = _snapshot(source, folder.name, tuple(sorted(read_index(index))))
    return Source("folder", source, folder, revision=folder.name)


def _snapshot(source: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """The folder of a commit of a hub name, with what the patterns match of it."""
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=list(patterns)))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        at = f" at revision {revision!r}" if revision else ""
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DecoderError(
            f"{source!r} is no local path, and fetching it from the Hugging Face hub{at} failed "
            f"({type(error).__name__}: {first}). Check the name, the network and your access, or "
            "give a local folder"
        ) from error
