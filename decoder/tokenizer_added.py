"""Tokens that are named beside a tokenizer.json, added to it as `transformers` adds them.

`transformers` reads tokenizer.json, and then adds what tokenizer_config.json (`bos_token` and its
like, `additional_special_tokens`, `added_tokens_decoder`), special_tokens_map.json and
added_tokens.json name and tokenizer.json does not have among its `added_tokens`: a token that the
vocabulary has as an ordinary piece keeps its id, another gets the next free one, and flags of
`added_tokens_decoder` replace those of tokenizer.json. The order and the precedence here are those
of `TokenizersBackend` in transformers 5.24; `tests/parity/test_tokenizer_files.py` compares.
"""

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

from decoder.errors import DecoderError

DECODER = "added_tokens_decoder"
_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # the order in which they get ids
_MANY = ("extra_special_tokens", "additional_special_tokens")
_OWN_NAMES = "model_specific_special_tokens"  # of this model alone, as "image_token"
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")

_SAVE = (
    "Load and save the tokenizer once with transformers, so that tokenizer.json holds its tokens: "
    "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
)


def merged_settings(config: Mapping[str, Any], older: Mapping[str, Any] | None) -> dict[str, Any]:
    """tokenizer_config.json with special_tokens_map.json (`older`), which wins where it counts.

    It counts only where tokenizer_config.json has no `added_tokens_decoder`.
    """
    if older is None or DECODER in config:
        return dict(config)
    merged = dict(config)
    for key, value in older.items():
        if key == _MANY[1] and set(_MANY) & set(config):
            continue
        if key == _MANY[0]:
            raise DecoderError(f"special_tokens_map.json: {key} is not supported there. {_SAVE}")
        merged[key] = {**value, "special": True} if isinstance(value, Mapping) else value
    return merged


def token_text(settings: Mapping[str, Any], key: str) -> str | None:
    """A special token, given as its text or as an object with the text in `content`."""
    token = _special(settings, key)
    return None if token is None else token.content


def _special(settings: Mapping[str, Any], key: str) -> AddedToken | None:
    value = settings.get(key)
    if value is None:
        return None
    token = _token(value, f"tokenizer_config.json: {key}")
    token.special = True
    return token


def with_named_tokens(
    definition: Mapping[str, Any], settings: Mapping[str, Any], added: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    """A parsed tokenizer.json with the tokens that the files beside it name.

    Args:
      settings: what `merged_settings` gives.
      added: added_tokens.json, if there is one: ids by text.

    Without such tokens it is `definition` itself. Raises `DecoderError` for fields of another
    form, for ids that the tokens would not have, and for what is not imitated: a BOS or EOS that
    no vocabulary has, and tokens that only this model names.
    """
    if settings.get("split_special_tokens"):
        raise DecoderError(
            "tokenizer_config.json: split_special_tokens is true, with which transformers cuts "
            "special tokens in a text into pieces. That is not supported; set it to false"
        )
    present = {
        token["content"]: (token["id"], _token(token, "tokenizer.json: added_tokens"))
        for token in _listed(definition)
    }
    named = {name: _special(settings, f"{name}_token") for name in _NAMES}
    many = [_token(one, f"tokenizer_config.json: {_MANY[1]}") for one in _many(settings)]
    own = _own_names(settings)
    stated = _stated(settings, added)

    wanted: dict[str, AddedToken] = {}
    known = {repr(token) for _, token in present.values()}
    for token_id, token in sorted(stated.items()):
        _check_id(token, token_id, present.get(token.content, (token_id,))[0])
        if DECODER not in settings and token.content in present:
            continue  # tokenizer.json's flags win over those that added_tokens.json implies
        if repr(token) not in known:
            wanted[token.content] = token
    singles = [token for token in named.values() if token is not None]
    texts = {one.content for one in stated.values()}
    for token in [*singles, *many]:
        if token.content in present or token.content in texts:
            continue
        if repr(wanted.setdefault(token.content, token)) != repr(token):
            raise DecoderError(
                f"tokenizer_config.json names {token.content!r} twice, with other flags. {_SAVE}"
            )
    special = {*own.values(), *(token.content for token in singles)}
    for text, token in wanted.items():
        token.special = token.special or text in special
    for key, text in own.items():
        if text not in {*present, *wanted}:
            raise DecoderError(
                f"tokenizer_config.json: {key} names the token {text!r}, which is not among the "
                f"added_tokens of tokenizer.json. {_SAVE}"
            )
    return _added(definition, wanted, stated, named) if wanted else definition


def _added(
    definition: Mapping[str, Any],
    wanted: Mapping[str, AddedToken],
    stated: Mapping[int, AddedToken],
    named: Mapping[str, AddedToken | None],
) -> dict[str, Any]:
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(definition))
    except Exception as error:  # the library raises nothing narrower
        raise DecoderError(f"tokenizer.json is not understood: {error}") from error
    texts = {token.content for token in stated.values()}
    for name in ("bos", "eos"):
        token = named[name]
        if token is None or token.content not in wanted or token.content in texts:
            continue
        if backend.token_to_id(token.content) is None:
            raise DecoderError(
                f"the {name.upper()} token {token.content!r} is not in the vocabulary"
            )
    backend.add_tokens(list(wanted.values()))
    for token_id, token in stated.items():
        _check_id(token, token_id, backend.token_to_id(token.content))
    text = backend.to_str()
    if tokenizers.Tokenizer.from_str(text).get_vocab() != backend.get_vocab():
        raise DecoderError(
            f"the tokens {', '.join(sorted(wanted))} cannot be written into tokenizer.json with "
            f"the ids that they get. {_SAVE}"
        )
    return json.loads(text)


def _stated(settings: Mapping[str, Any], added: Mapping[str, Any] | None) -> dict[int, AddedToken]:
    """The tokens whose ids tokenizer_config.json states, or else added_tokens.json."""
    if DECODER in settings:
        where, entries = f"tokenizer_config.json: {DECODER}", settings[DECODER]
        if not isinstance(entries, Mapping) or not all(map(_is_object, entries.values())):
            raise DecoderError(f"{where} is not understood; expected objects with a content, by id")
        return {_id(key, where): _token(value, where) for key, value in entries.items()}
    # Not those of `bos_token` and its like that tokenizer_config.json gives as objects.
    values = [*(settings.get(f"{name}_token") for name in _NAMES), *_many(settings)]
    texts = [value for value in values if isinstance(value, str) or "__type" not in (value or {})]
    special = {_token(value, "").content for value in texts if value is not None}
    return {
        _id(token_id, f"added_tokens.json: {text!r}"): AddedToken(
            text, normalized=text not in special, special=text in special
        )
        for text, token_id in (added or {}).items()
    }


def _check_id(token: AddedToken, token_id: int, found: int | None) -> None:
    if found != token_id:
        raise DecoderError(
            f"the token {token.content!r} has the id {token_id} in {DECODER} of "
            f"tokenizer_config.json or in added_tokens.json, and {found} by tokenizer.json. {_SAVE}"
        )


def _own_names(settings: Mapping[str, Any]) -> dict[str, str]:
    """The texts of tokens that only this model names, by field."""
    standard = {"add_bos_token", "add_eos_token", *(f"{name}_token" for name in _NAMES)}
    own = {
        key: value
        for key, value in settings.items()
        if key.endswith("_token") and key not in standard and _is_token(value)
    }
    for key in (_MANY[0], _OWN_NAMES):
        if isinstance(settings.get(key), Mapping):
            own |= settings[key]
    return {
        key: _token(value, f"tokenizer_config.json: {key}").content for key, value in own.items()
    }


def _many(settings: Mapping[str, Any]) -> list[Any]:
    """The further special tokens, under their new name or the older one."""
    value = settings.get(_MANY[0])
    if not value or isinstance(value, Mapping):
        value = settings.get(_MANY[1]) or []
    if not isinstance(value, list):
        raise DecoderError(
            f"tokenizer_config.json: {' or '.join(_MANY)} is {value!r}; expected a list of tokens"
        )
    return value


def _listed(definition: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    tokens = definition.get("added_tokens") or []
    if not isinstance(tokens, list) or not all(
        _is_object(token) and "id" in token for token in tokens
    ):
        raise DecoderError(
            "tokenizer.json: added_tokens is not understood; expected a list of tokens"
        )
    return tokens


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or _is_object(value)


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("content"), str)


def _token(value: Any, where: str) -> AddedToken:
    """A token as text, which makes it special, or as an object with its flags."""
    if not _is_token(value):
        raise DecoderError(f"{where} is {value!r}; expected a token's text")
    if isinstance(value, str):
        return AddedToken(value, special=True)
    flags = {key: value[key] for key in _FLAGS if value.get(key) is not None}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise DecoderError(
            f"{where}: {value['content']!r} has a flag that is neither true nor false"
        )
    return AddedToken(value["content"], **flags)


def _id(value: Any, where: str) -> int:
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise DecoderError(f"{where} has {value!r} for an id; expected a number") from error
