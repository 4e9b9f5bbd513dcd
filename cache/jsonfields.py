"""Reading JSON objects that somebody else may have edited: typed fields or a clear error."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from typing import Any

from cache.errors import CacheError


def canonical(value: Any) -> bytes:
    """The one byte form of a JSON value: sorted keys, no spaces, no NaN, UTF-8."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False
    )
    # A path that is not UTF-8 reaches us with lone surrogates.
    return text.encode(errors="surrogatepass")


def digest(value: Any) -> str:
    """sha256 (hex) of the canonical form of a JSON value."""
    return hashlib.sha256(canonical(value)).hexdigest()


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object from bytes.

    Raises:
      CacheError: the bytes are not UTF-8 JSON, hold NaN or an infinity, or no object.
    """
    try:
        value = json.loads(data.decode(), parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise CacheError(f"{what} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CacheError(f"{what} should be a JSON object, found {type(value).__name__}")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


class Fields:
    """Typed access to the fields of a JSON object, with errors that name the field."""

    def __init__(self, value: Any, what: str):
        if not isinstance(value, dict):
            raise CacheError(f"{what} should be a JSON object, found {type(value).__name__}")
        self.value = value
        self.what = what

    def _get(self, name: str) -> Any:
        if name not in self.value:
            raise CacheError(f"{self.what} has no field {name!r}")
        return self.value[name]

    def _wrong(self, name: str, expected: str) -> CacheError:
        found = repr(self.value[name])
        if len(found) > 80:
            found = found[:77] + "..."
        return CacheError(f"{self.what}: field {name!r} should be {expected}, found {found}")

    def integer(self, name: str, least: int = 0) -> int:
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(name, f"an integer of at least {least}")
        return value

    def number(self, name: str) -> float:
        if not _is_number(self._get(name)):
            raise self._wrong(name, "a number")
        return float(self.value[name])

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self._get(name)
        if not isinstance(value, list) or not all(map(_is_number, value)):
            raise self._wrong(name, "a list of numbers")
        return tuple(float(item) for item in value)

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A boolean; the default where the field is absent."""
        value = self.value.get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        value = self._get(name)
        if value not in allowed or not isinstance(value, str):
            raise self._wrong(name, "one of " + ", ".join(allowed))
        return value

    def list_of(self, name: str, kind: type | tuple[type, ...]) -> list[Any]:
        value = self._get(name)
        if not isinstance(value, list) or not all(
            isinstance(item, kind) and not isinstance(item, bool) for item in value
        ):
            raise self._wrong(name, f"a list of {kind}")
        return value

    def object(self, name: str) -> dict[str, Any]:
        value = self._get(name)
        if not isinstance(value, dict):
            raise self._wrong(name, "a JSON object")
        return value

    def fields(self, name: str) -> Fields:
        return Fields(self.object(name), f"{self.what}, {name}")

    def span(self, name: str) -> tuple[int, int] | None:
        """Two non-decreasing non-negative integers, or null."""
        value = self._get(name)
        return None if value is None else as_span(value, f"{self.what}: field {name!r}")


def _is_number(value: Any) -> bool:
    """Whether a JSON value is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def as_span(value: Any, what: str) -> tuple[int, int]:
    """Checks that a JSON value is a pair of non-decreasing non-negative integers."""
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
        and 0 <= value[0] <= value[1]
    ):
        return value[0], value[1]
    raise CacheError(f"{what} should be two non-decreasing integers, found {value!r}")
