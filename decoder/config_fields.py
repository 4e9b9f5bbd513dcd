"""Single fields of a parsed config.json, each of its type."""

from collections.abc import Mapping
from typing import Any

from decoder.errors import DecoderError


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    if key not in config and default is None:
        raise DecoderError(f"config.json: the field {key} is missing")
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise DecoderError(f"config.json: {key} is {value!r}; expected a whole number")
    return value


def number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DecoderError(f"config.json: {key} is {value!r}; expected a number")
    return float(value)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise DecoderError(f"config.json: {key} is {value!r}; expected true or false")
    return value
