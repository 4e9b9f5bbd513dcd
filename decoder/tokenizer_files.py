"""Tokenizers from a folder in Hugging Face's layout."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decoder.checkpoint import canonical_json, read_json
from decoder.errors import DecoderError
from decoder.stand_ins import refuse_stand_in
from decoder.tokenizer import Tokenizer, build_tokenizer
from decoder.tokenizer_added import merged_settings, token_text, with_named_tokens
from decoder.tokenizer_ends import PLAIN_CLASS

# What `Tokenizer.files` writes, in these very bytes. There the flags decide, unless they are null:
# they keep what GGUF files say, whose tokenizer has no post-processor.
_OWN_KEYS = {"bos_token", "eos_token", "add_bos_token", "add_eos_token", "tokenizer_class"}


def from_folder(folder: Path) -> Tokenizer:
    """tokenizer.json with the special tokens and template that stand beside it.

    What those files name and tokenizer.json lacks is added as `transformers` adds it. Where its
    releases differ in whether BOS or EOS is added, the tokenizer has a `Doubt`. Raises
    `DecoderError`.
    """
    if not (folder / "tokenizer.json").is_file():
        raise DecoderError(_missing(folder))
    definition = read_json(folder / "tokenizer.json")
    config, older, added = (
        read_json(folder / name) if (folder / name).is_file() else None
        for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    )
    try:
        settings = merged_settings(config or {}, older)
        definition = with_named_tokens(definition, settings, added)
        own = older is None and _is_own(config or {}, folder / "tokenizer_config.json")
        return build_tokenizer(
            definition,
            bos=token_text(settings, "bos_token"),
            eos=token_text(settings, "eos_token"),
            adds_bos=settings["add_bos_token"] if own else None,
            adds_eos=settings["add_eos_token"] if own else None,
            chat_template=_template(folder, settings),
            settings=settings,
        )
    except DecoderError as error:
        raise DecoderError(f"{folder}: {error}") from error


def _is_own(config: Mapping[str, Any], path: Path) -> bool:
    return (
        set(config) == _OWN_KEYS
        and config["tokenizer_class"] == PLAIN_CLASS
        and {config["add_bos_token"], config["add_eos_token"]} <= {True, False, None}
        and path.read_bytes() == canonical_json(config)
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


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, one text, or the list entry named "default"."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        refuse_stand_in(path)
        try:
            return path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise DecoderError(
                f"{path.name} is not UTF-8 text: {error.reason} at byte {error.start}. Save it as "
                "UTF-8"
            ) from error
    template, path = settings.get("chat_template"), folder / "tokenizer_config.json"
    if isinstance(template, list):
        template = _default_template(template, path)
    if template is not None and not isinstance(template, str):
        raise DecoderError(
            f"{path.name}: chat_template is {type(template).__name__}; expected a string"
        )
    if template is not None and re.search("[\ud800-\udfff]", template):
        raise DecoderError(
            f"{path.name}: chat_template is not valid Unicode: half of a surrogate pair"
        )
    return template


def _default_template(entries: list[Any], path: Path) -> Any:
    for entry in entries:
        if not isinstance(entry, Mapping) or not {"name", "template"} <= set(entry):
            raise DecoderError(
                f"{path.name}: an entry of the list chat_template is {entry!r}; expected "
                '{"name": …, "template": …}'
            )
    named = {entry["name"]: entry["template"] for entry in entries}
    return named.get("default")
