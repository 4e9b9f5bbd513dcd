"""What a model's files say beside its numbers: where it stops, how it samples and pads."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decoder.checkpoint import canonical_json, read_json
from decoder.config_json import text_part
from decoder.config_keys import SETTINGS
from decoder.errors import DecoderError
from decoder.gguf_file import read_header
from decoder.source import SETTINGS_FILES, resolve
from decoder.stand_ins import refuse_stand_in
from decoder.tokenizer import load_tokenizer

GENERATION = "generation_config.json"
_CONFIG = "config.json"

# Of tokens, by their names in config.json: what a GGUF file calls them (one is misspelt there).
_GGUF_NAMES = {
    "bos": "bos",
    "pad": "padding",
    "unk": "unknown",
    "sep": "seperator",
    "cls": "cls",
    "mask": "mask",
}
_GGUF_ENDS = ("eos", "eot", "eom")  # llama.cpp stops at each


@dataclass(frozen=True)
class OwnSettings:
    """Settings that come through from where a model is from to where it is written.

    Attributes:
      config: entries of config.json (`config_keys.SETTINGS`); a key that is absent there is absent
        here, so that transformers takes the same for it.
      files: by path within the folder: generation_config.json and, if there is a tokenizer,
        everything of it, as it was.
    """

    config: Mapping[str, Any]
    files: Mapping[str, bytes] = field(repr=False)

    def ids(self) -> set[int]:
        """The ids of tokens that config.json and generation_config.json name."""
        generation = json.loads(self.files.get(GENERATION, b"{}"))
        named = [
            value
            for entries in (self.config, generation)
            for key, value in entries.items()
            if key.endswith("_token_id")
        ]
        listed = [one for value in named for one in (value if isinstance(value, list) else [value])]
        return {one for one in listed if type(one) is int}


def own_settings(source: str, revision: str | None = None) -> OwnSettings | None:
    """The settings of a folder, hub name or GGUF file; None for a function, which has none.

    Raises `DecoderError` for a file that cannot be read.
    """
    resolved = resolve(source, revision, SETTINGS_FILES)
    if resolved.kind == "function":
        return None
    return _of_gguf(resolved.files) if resolved.kind == "gguf" else _of_folder(resolved.files)


def _of_folder(folder: Path) -> OwnSettings:
    whole = read_json(folder / _CONFIG)
    part = text_part(whole)
    # Of a model that also sees, what the outer level says counts.
    said = {key: value for key, value in whole.items() if value is not None or part is whole}
    config = {key: value for key, value in {**part, **said}.items() if key in SETTINGS}
    try:
        json.dumps(config, allow_nan=False)
    except ValueError as error:
        raise DecoderError(
            f"{folder / _CONFIG} holds a number that is not finite, which JSON does not have. "
            "Correct it"
        ) from error
    if (folder / GENERATION).is_file():
        read_json(folder / GENERATION)
    patterns = SETTINGS_FILES if (folder / "tokenizer.json").is_file() else (GENERATION,)
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    for path in found:
        refuse_stand_in(path)
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(found)}
    files.pop(_CONFIG, None)
    return OwnSettings(config, files)


def _of_gguf(path: Path) -> OwnSettings:
    metadata = read_header(path).metadata
    tokens = metadata.get("tokenizer.ggml.tokens") or []

    def of(name: str) -> int | None:
        """The id, if there is such a token: files also write the largest number for none."""
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(tokens) else None

    ids = {name: of(theirs) for name, theirs in _GGUF_NAMES.items()}
    ends = list(dict.fromkeys(one for one in map(of, _GGUF_ENDS) if one is not None))
    config: dict[str, Any] = {
        f"{name}_token_id": one
        for name, one in ids.items()
        if one is not None or name in ("bos", "pad")
    }
    config["eos_token_id"] = ends if len(ends) > 1 else ends[0] if ends else None
    tokenizer = load_tokenizer(str(path))
    files = tokenizer.files()
    if not (tokenizer.adds_bos or tokenizer.adds_eos):
        # Else the file's own keys alone say what is added (`tokenizer_files`).
        settings = json.loads(files["tokenizer_config.json"])
        added = tokenizer.backend.get_added_tokens_decoder()  # naming another would cut text anew
        named = {
            f"{name}_token": tokens[one]
            for name, one in ids.items()
            if name != "bos" and one in added
        }
        files["tokenizer_config.json"] = canonical_json({**settings, **named})
    return OwnSettings(config, files)
