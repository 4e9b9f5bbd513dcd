"""Tokenizers rebuilt from the metadata of a GGUF file.

The file holds the vocabulary, the merges and the *name* of a rule that splits
text before merging (`tokenizer.ggml.pre`). The rules below are those of the
tokenizers from which files of that name are made; another name is refused.
"""

from pathlib import Path
from typing import Any

from decoder.errors import DecoderError
from decoder.gguf_file import read_header
from decoder.tokenizer import Tokenizer, build_tokenizer

# tokenizer.ggml.token_type
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _regex_split(pattern: str) -> dict[str, Any]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, {**_BYTE_LEVEL, "use_regex": False}]}


def _llama3_pattern(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


# Per rule: the pre-tokenizer, the normaliser, whether a word that is a token as it
# stands is taken before any merge, and whether BOS is added if the file does not say.
_RULES: dict[str, dict[str, Any]] = {
    "smollm": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**_BYTE_LEVEL, "use_regex": True},
            ],
        }
    },
    "gpt-2": {"pre_tokenizer": {**_BYTE_LEVEL, "use_regex": True}},
    "llama-bpe": {
        "pre_tokenizer": _regex_split(_llama3_pattern(r"\p{N}{1,3}")),
        "ignore_merges": True,
        "adds_bos": True,
    },
    "qwen2": {
        "pre_tokenizer": _regex_split(_llama3_pattern(r"\p{N}")),
        "normalizer": {"type": "NFC"},
    },
}


def from_gguf(path: Path) -> Tokenizer:
    """The byte-level BPE tokenizer that a GGUF file describes. Raises `DecoderError`."""
    metadata = read_header(path).metadata
    model, rule_name = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    advice = "Name the folder or hub name of the original model's tokenizer (--tokenizer)"
    if model != "gpt2":
        raise DecoderError(
            f"{path}: the tokenizer is of the kind {model!r}; supported is 'gpt2' (byte-level "
            f"BPE). {advice}"
        )
    if rule_name not in _RULES:
        raise DecoderError(
            f"{path}: the splitting rule {rule_name!r} (tokenizer.ggml.pre) is not known; known: "
            f"{', '.join(_RULES)}. {advice}"
        )
    for key in ("tokens", "token_type", "merges"):
        if not metadata.get(f"tokenizer.ggml.{key}"):
            raise DecoderError(f"{path}: the field tokenizer.ggml.{key} is missing. {advice}")
    if metadata.get("tokenizer.ggml.add_space_prefix"):
        raise DecoderError(f"{path}: tokenizer.ggml.add_space_prefix is not supported. {advice}")
    rule, tokens = _RULES[rule_name], metadata["tokenizer.ggml.tokens"]
    return build_tokenizer(
        _definition(path, metadata, rule),
        bos=_special(path, metadata, tokens, "bos"),
        eos=_special(path, metadata, tokens, "eos"),
        adds_bos=metadata.get("tokenizer.ggml.add_bos_token", rule.get("adds_bos", False)),
        adds_eos=metadata.get("tokenizer.ggml.add_eos_token", False),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _definition(path: Path, metadata: dict[str, Any], rule: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer.json that the metadata stand for."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    if len(tokens) != len(kinds):
        raise DecoderError(f"{path}: {len(tokens)} tokens but {len(kinds)} token types")
    vocabulary: dict[str, int] = {}
    added = []
    for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind == _UNUSED:
            continue
        if kind not in (_NORMAL, _CONTROL, _USER_DEFINED):
            raise DecoderError(f"{path}: the token {token!r} is of the unsupported type {kind}")
        if token in vocabulary:
            raise DecoderError(
                f"{path}: the token {token!r} has the ids {vocabulary[token]} and {token_id}"
            )
        vocabulary[token] = token_id
        if kind != _NORMAL:
            added.append(_added_token(token_id, token, special=kind == _CONTROL))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": rule.get("normalizer"),
        "pre_tokenizer": rule["pre_tokenizer"],
        "post_processor": None,
        "decoder": {**_BYTE_LEVEL, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rule.get("ignore_merges", False),
            "vocab": vocabulary,
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def _added_token(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _special(path: Path, metadata: dict[str, Any], tokens: list[str], name: str) -> str | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise DecoderError(f"{path}: {name}_token_id is {token_id} of {len(tokens)} tokens")
    return tokens[token_id]
