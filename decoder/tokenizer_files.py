"""Tokenizers from a folder in Hugging Face's layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decoder.checkpoint import read_json
from decoder.errors import DecoderError
from decoder.tokenizer import Tokenizer, build_tokenizer


def from_folder(folder: Path) -> Tokenizer:
    """tokenizer.json with the special tokens and template that stand beside it.

    An explicit `add_bos_token` or `add_eos_token` of tokenizer_config.json wins
    over the post-processor of tokenizer.json.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DecoderError(_missing(folder))
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            settings.update(read_json(folder / name))
    return build_tokenizer(
        read_json(path),
        bos=_token(settings, "bos_token"),
        eos=_token(settings, "eos_token"),
        adds_bos=_flag(settings, "add_bos_token"),
        adds_eos=_flag(settings, "add_eos_token"),
        chat_template=_template(folder, settings),
    )


def _missing(folder: Path) -> str:
    for name in ("tokenizer.model", "vocab.json"):
        if (folder / name).is_file():
            return (
                f"{folder} has {name} but no tokenizer.json. Convert it once with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
    return (
        f"{folder} has no tokenizer.json. Name the folder, hub name or GGUF file that has the "
        "teacher's tokenizer (--tokenizer)"
    )


def _token(settings: Mapping[str, Any], key: str) -> str | None:
    """A special token, given as its text or as an object with the text in `content`."""
    value = settings.get(key)
    text = value.get("content") if isinstance(value, Mapping) else value
    if text is not None and not isinstance(text, str):
        raise DecoderError(f"tokenizer_config.json: {key} is {value!r}; expected a token's text")
    return text


def _flag(settings: Mapping[str, Any], key: str) -> bool | None:
    value = settings.get(key)
    if value is not None and not isinstance(value, bool):
        raise DecoderError(f"tokenizer_config.json: {key} is {value!r}; expected true or false")
    return value


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, one text, or the list entry named "default"."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_bytes().decode()
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    if template is not None and not isinstance(template, str):
        raise DecoderError(f"tokenizer_config.json: chat_template is {type(template).__name__}")
    return template
