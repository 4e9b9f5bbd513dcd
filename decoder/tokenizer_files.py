"""Tokenizers from a folder in Hugging Face's layout."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decoder.checkpoint import read_json
from decoder.errors import DecoderError
from decoder.stand_ins import refuse_stand_in
from decoder.tokenizer import Tokenizer, build_tokenizer
from decoder.tokenizer_added import merged_settings, token_text, with_named_tokens

# What `Tokenizer.files` writes. Its two settings count where the post-processor inserts nothing: it
# keeps those of GGUF files, whose tokenizer has no post-processor.
_OWN_KEYS = {"bos_token", "eos_token", "add_bos_token", "add_eos_token", "tokenizer_class"}
_OWN_CLASS = "PreTrainedTokenizerFast"
# Classes for which transformers 4 and 5 both follow the post-processor, whatever the settings say.
_FLAGS_NEVER_COUNT = ("GPT2Tokenizer", "Qwen2Tokenizer", "PreTrainedTokenizer")


def from_folder(folder: Path) -> Tokenizer:
    """tokenizer.json with the special tokens and template that stand beside it.

    What those files name and tokenizer.json lacks is added as `transformers` adds it. An
    `add_bos_token` or `add_eos_token` that contradicts the post-processor of tokenizer.json is
    refused where releases of `transformers` differ in what they do. Raises `DecoderError`.
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
        return _build(definition, settings, _template(folder, settings))
    except DecoderError as error:
        raise DecoderError(f"{folder}: {error}") from error


def _build(
    definition: Mapping[str, Any], settings: Mapping[str, Any], template: str | None
) -> Tokenizer:
    def build(**adds: bool | None) -> Tokenizer:
        return build_tokenizer(
            definition,
            bos=token_text(settings, "bos_token"),
            eos=token_text(settings, "eos_token"),
            chat_template=template,
            **adds,
        )

    stated = {name: _flag(settings, f"add_{name}_token") for name in ("bos", "eos")}
    tokenizer = build(adds_bos=None, adds_eos=None)
    inserts = tokenizer.adds_bos or tokenizer.adds_eos
    if set(settings) == _OWN_KEYS and settings["tokenizer_class"] == _OWN_CLASS and not inserts:
        return build(adds_bos=stated["bos"], adds_eos=stated["eos"])
    if str(settings.get("tokenizer_class")).removesuffix("Fast") in _FLAGS_NEVER_COUNT:
        return tokenizer
    for name, adds in (("bos", tokenizer.adds_bos), ("eos", tokenizer.adds_eos)):
        if stated[name] is not None and stated[name] != adds:
            raise DecoderError(
                f"tokenizer_config.json says add_{name}_token {str(stated[name]).lower()}, but the "
                f"post-processor of tokenizer.json adds {'one' if adds else 'none'}, which is what "
                "transformers 5.24 follows. Make them agree: to follow tokenizer.json too, remove "
                f"add_{name}_token"
            )
    return tokenizer


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


def _flag(settings: Mapping[str, Any], key: str) -> bool | None:
    value = settings.get(key)
    if value is not None and not isinstance(value, bool):
        raise DecoderError(f"tokenizer_config.json: {key} is {value!r}; expected true or false")
    return value


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
