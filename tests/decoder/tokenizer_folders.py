"""Tokenizer folders whose files name tokens that tokenizer.json lacks or describes otherwise.

The unit tests say what comes of each, the parity tests that it is what transformers makes.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.decoder.chat_families import FAMILIES

FREE = 302  # the first id after llama3's of these tests
EOT, EOT_ID = "<|eot_id|>", 4
EXTRA, MORE = "<|extra|>", "<|more|>"


def write_folder(
    folder: Path,
    family: str = "llama3",
    *,
    config: Mapping[str, Any] | None = None,
    without: Sequence[str] = (),
    files: Mapping[str, Any] | None = None,
    normalizer: Mapping[str, Any] | None = None,
    cls: str = "PreTrainedTokenizerFast",
    beside: bool = True,
    null: Sequence[str] = (),
) -> Path:
    """A family's tokenizer.json and tokenizer_config.json.

    Args:
      config: fields of tokenizer_config.json beside BOS and EOS; a field that is None is left out.
      without: tokens that are no `added_tokens` of tokenizer.json; the vocabulary keeps them.
      files: further files, by name.
      null: fields of tokenizer_config.json that are null.
      beside: whether there is anything but BOS and EOS beside tokenizer.json.
    """
    (made,) = (one for one in FAMILIES if one.name == family)
    folder.mkdir(exist_ok=True)
    definition = made.definition()
    definition["added_tokens"] = [
        token for token in definition["added_tokens"] if token["content"] not in without
    ]
    if normalizer is not None:
        definition["normalizer"] = normalizer
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    settings: dict[str, Any] = {
        "bos_token": made.bos,
        "eos_token": made.eos,
        "tokenizer_class": cls,
        **((config or {}) if beside else {}),
    }
    if not beside:
        settings = {"bos_token": None, "eos_token": None}
    settings = {key: value for key, value in settings.items() if value is not None}
    settings |= dict.fromkeys(null)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in (files or {}).items() if beside else ():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    return folder


def token(content: str, **flags: bool) -> dict[str, Any]:
    """An entry of `added_tokens_decoder`."""
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, **plain, "special": True, **flags}


def typed(content: str, **flags: bool) -> dict[str, Any]:
    """A token elsewhere in tokenizer_config.json."""
    return {"__type": "AddedToken", **token(content, **flags)}


def listed(entries: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """A field of tokenizer_config.json."""
    return {"added_tokens_decoder": {str(number): entry for number, entry in entries.items()}}


CONSISTENT: dict[str, dict[str, Any]] = {
    "decoder says the same": {"config": listed({EOT_ID: token(EOT)})},
    "named again": {"config": {"pad_token": EOT, "additional_special_tokens": [EOT]}},
    "of this model, known": {"config": {"image_token": EOT, "extra_special_tokens": {"x": EOT}}},
    "added_tokens.json says the same": {"files": {"added_tokens.json": {EOT: EOT_ID}}},
    "special tokens are kept": {"config": {"split_special_tokens": False}},
    "a flag of a named token": {"config": {"pad_token": typed(EOT, rstrip=True)}},
    "a map that says the same": {
        "files": {"special_tokens_map.json": {"eos_token": token("<|end_of_text|>")}}
    },
    "a map that does not count": {
        "config": listed({EOT_ID: token(EOT)}),
        "files": {"special_tokens_map.json": {"eos_token": EOT, "pad_token": EXTRA}},
    },
    "added_tokens.json that does not count": {
        "config": listed({EOT_ID: token(EOT)}),
        "files": {"added_tokens.json": {EXTRA: FREE}},
    },
}

_OLD_LLAMA = {
    "legacy": True,
    "model_max_length": 1000000000000000019884624838656,
    "sp_model_kwargs": {},
    "spaces_between_special_tokens": False,
    "use_default_system_prompt": False,
    "clean_up_tokenization_spaces": False,
}
# The fields of tokenizer_config.json that families publish, beside small tokenizers of theirs; and
# whether BOS is added.
PUBLISHED: dict[str, tuple[bool, dict[str, Any]]] = {
    "Mistral": (
        True,
        {
            "family": "mistral",
            "cls": "LlamaTokenizer",
            "config": {
                **_OLD_LLAMA,
                **listed(
                    {place: token(text) for place, text in enumerate(("<unk>", "<s>", "</s>"))}
                ),
                "add_bos_token": True,
                "add_eos_token": False,
                "unk_token": "<unk>",
                "additional_special_tokens": [],
                "add_prefix_space": None,
                "pad_token": None,
            },
            "files": {
                "special_tokens_map.json": {
                    f"{name}_token": {**token(text), "special": False}
                    for name, text in (("bos", "<s>"), ("eos", "</s>"), ("unk", "<unk>"))
                }
            },
        },
    ),
    "Phi 3": (
        False,
        {
            "family": "phi3",
            "cls": "LlamaTokenizer",
            "config": {
                **_OLD_LLAMA,
                **listed({2: token("</s>", rstrip=True, special=False)}),
                "add_bos_token": False,
                "add_eos_token": False,
                "unk_token": "<unk>",
                "pad_token": "<|endoftext|>",
                "padding_side": "left",
            },
        },
    ),
    "Gemma": (
        True,
        {
            "family": "gemma",
            "cls": "GemmaTokenizer",
            "config": {
                "add_bos_token": True,
                "add_eos_token": False,
                "unk_token": "<unk>",
                "pad_token": "<pad>",
                "sp_model_kwargs": {},
                "use_default_system_prompt": False,
                "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"],
            },
        },
    ),
    "Qwen": (
        False,
        {
            "family": "qwen2.5",
            "cls": "Qwen2Tokenizer",
            "null": ["bos_token", "unk_token"],
            "config": {
                "add_bos_token": False,
                "add_prefix_space": False,
                "errors": "replace",
                "pad_token": "<|endoftext|>",
                "split_special_tokens": False,
                "model_max_length": 131072,
                "additional_special_tokens": ["<|im_start|>"],
            },
        },
    ),
    "SmolLM 3": (
        False,
        {
            "family": "qwen3",
            "null": ["bos_token"],
            "config": {
                "pad_token": "<|im_end|>",
                "fast": False,
                "extra_special_tokens": {},
                "model_input_names": ["input_ids", "attention_mask"],
            },
            "files": {"chat_template.jinja": "{{ messages[0].content }}"},
        },
    ),
    "OLMo": (
        False,
        {
            "family": "olmo2",
            "cls": "GPTNeoXTokenizer",
            "config": {
                "add_bos_token": False,
                "add_eos_token": False,
                "add_prefix_space": False,
                "pad_token": "<|pad|>",
                "unk_token": "<|endoftext|>",
            },
        },
    ),
    "OLMo 2": (
        False,
        {
            "family": "olmo2",
            "cls": "GPT2Tokenizer",
            "config": {
                "add_prefix_space": False,
                "pad_token": "<|pad|>",
                "unk_token": "<|endoftext|>",
            },
        },
    ),
}

# Each with the tokens that its files add to tokenizer.json's, or change there, and their ids.
ADDED: dict[str, dict[str, int]] = {}
FOLLOWED: dict[str, dict[str, Any]] = {}


def _follow(name: str, added: dict[str, int], **case: Any) -> None:
    FOLLOWED[name], ADDED[name] = case, added


_follow("eos is a piece", {"<|end_of_text|>": 1}, without=["<|end_of_text|>"])
_follow("bos is a piece", {"<|begin_of_text|>": 0}, without=["<|begin_of_text|>"])
_follow(
    "additional, a piece",
    {EOT: EOT_ID},
    without=[EOT],
    config={"additional_special_tokens": [EOT]},
)
_follow("extra, a piece", {EOT: EOT_ID}, without=[EOT], config={"extra_special_tokens": [EOT]})
_follow("additional, new", {EXTRA: FREE}, config={"additional_special_tokens": [EXTRA]})
_follow(
    "additional beside extra",
    {EXTRA: FREE},
    config={"extra_special_tokens": [EXTRA], "additional_special_tokens": [MORE]},
)
_follow(
    "additional, as objects",
    {EXTRA: FREE, MORE: FREE + 1},
    config={"additional_special_tokens": [typed(EXTRA, lstrip=True), typed(MORE, special=False)]},
)
_follow("pad, new", {EXTRA: FREE}, config={"pad_token": EXTRA})
_follow("pad, an object", {EXTRA: FREE}, config={"pad_token": typed(EXTRA, rstrip=True)})
_follow(
    "pad, an object not declared special",
    {EXTRA: FREE},
    config={"pad_token": {"__type": "AddedToken", "content": EXTRA}},
)
_follow(
    "in their order",
    {EXTRA: FREE + 1, MORE: FREE, "[X]": FREE + 2},
    config={"additional_special_tokens": ["[X]", MORE], "pad_token": EXTRA, "unk_token": MORE},
)
_follow("decoder, new", {EXTRA: FREE}, config=listed({FREE: token(EXTRA)}))
_follow(
    "decoder, new and ordinary",
    {EXTRA: FREE},
    config=listed({FREE: token(EXTRA, special=False, normalized=True)}),
)
_follow(
    "decoder, new and named",
    {EXTRA: FREE},
    config={**listed({FREE: token(EXTRA, special=False)}), "pad_token": EXTRA},
)
_follow(
    "decoder, before the named ones",
    {MORE: FREE, EXTRA: FREE + 1},
    config={**listed({FREE: token(MORE)}), "pad_token": EXTRA},
)
for _flag in ("lstrip", "rstrip", "normalized", "single_word"):
    _follow(
        f"decoder, other {_flag}",
        {EOT: EOT_ID},
        config=listed({EOT_ID: token(EOT, **{_flag: True})}),
    )
_follow(
    "decoder, no longer special",
    {EOT: EOT_ID},
    config=listed({EOT_ID: token(EOT, special=False)}),
)
_follow(
    "decoder without a map",
    {EOT: EOT_ID},
    config={**listed({EOT_ID: token(EOT, rstrip=True)}), "eos_token": None},
    files={"special_tokens_map.json": {"eos_token": EOT}},
)
_follow("added_tokens.json", {EXTRA: FREE}, files={"added_tokens.json": {EXTRA: FREE}})
_follow(
    "added_tokens.json, named",
    {EXTRA: FREE},
    config={"pad_token": EXTRA},
    files={"added_tokens.json": {EXTRA: FREE}},
)
_follow(
    "added_tokens.json, named by an object",
    {EXTRA: FREE},
    config={"pad_token": typed(EXTRA)},
    files={"added_tokens.json": {EXTRA: FREE}},
)
_follow(
    "added_tokens.json, in the order of ids",
    {EXTRA: FREE + 1, MORE: FREE},
    files={"added_tokens.json": {EXTRA: FREE + 1, MORE: FREE}},
)
_follow("a map over the config", {}, files={"special_tokens_map.json": {"eos_token": EOT}})
_follow(
    "a map with objects",
    {EXTRA: FREE},
    files={"special_tokens_map.json": {"pad_token": {"content": EXTRA, "rstrip": True}}},
)
_follow(
    "a map with more tokens",
    {EXTRA: FREE},
    files={"special_tokens_map.json": {"additional_special_tokens": [EXTRA]}},
)
_follow(
    "a map after more tokens",
    {MORE: FREE},
    config={"additional_special_tokens": [MORE]},
    files={"special_tokens_map.json": {"additional_special_tokens": [EXTRA]}},
)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "split special tokens": (
        {"config": {"split_special_tokens": True}},
        "tokenizer_config.json: split_special_tokens is true",
    ),
    "another id": (
        {"config": listed({FREE + 9: token(EXTRA)})},
        r"'<\|extra\|>' has the id 311 in added_tokens_decoder .* and 302 by tokenizer.json. Load",
    ),
    "another id of a known token": (
        {"config": listed({1: token(EOT)})},
        r"'<\|eot_id\|>' has the id 1 in added_tokens_decoder .* and 4 by tokenizer.json. Load",
    ),
    "another id in added_tokens.json": (
        {"files": {"added_tokens.json": {EOT: FREE}}},
        r"'<\|eot_id\|>' has the id 302 in .* added_tokens.json, and 4 by tokenizer.json",
    ),
    "a token of this model": (
        {"config": {"image_token": EXTRA}},
        r"image_token names the token '<\|extra\|>', which is not among the added_tokens",
    ),
    "tokens of this model": (
        {"config": {"extra_special_tokens": {"image": EXTRA}}},
        r"image names the token '<\|extra\|>', which is not among the added_tokens",
    ),
    "two flags": (
        {"config": {"pad_token": EXTRA, "additional_special_tokens": [typed(EXTRA, rstrip=True)]}},
        r"names '<\|extra\|>' twice, with other flags",
    ),
    "a new eos": ({"config": {"eos_token": EXTRA}}, "the EOS token .* is not in the vocabulary"),
    "extra tokens in a map": (
        {"files": {"special_tokens_map.json": {"extra_special_tokens": [EXTRA]}}},
        "special_tokens_map.json: extra_special_tokens is not supported there",
    ),
    "a decoder that is none": (
        {"config": {"added_tokens_decoder": {"4": EOT}}},
        "added_tokens_decoder is not understood; expected objects with a content, by id",
    ),
    "a flag that is none": (
        {"config": listed({EOT_ID: {"content": EOT, "rstrip": 1}})},
        r"added_tokens_decoder: '<\|eot_id\|>' has a flag that is neither true nor false",
    ),
    "an id that is none": (
        {"files": {"added_tokens.json": {EXTRA: "x"}}},
        r"added_tokens.json: '<\|extra\|>' has 'x' for an id; expected a number",
    ),
    "no list of tokens": (
        {"config": {"additional_special_tokens": EXTRA}},
        "additional_special_tokens is .*; expected a list of tokens",
    ),
    "a list of no tokens": (
        {"config": {"additional_special_tokens": [3]}},
        "additional_special_tokens is 3; expected a token's text",
    ),
}
