"""What differs between two caches, field by field, for people to read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cache.manifest import Manifest

# How a setting is called, where not by its name in the manifest.
_NAMES = {"backend": "JAX's backend"}
# Of each fingerprint, what it is of.
_FINGERPRINTS = {"teacher": "config or weights", "tokenizer": "vocabulary, rules or template"}


def field_differences(
    found: dict[str, Any],
    wanted: dict[str, Any],
    who: tuple[str, str] = ("the cache has", "you ask for"),
    prefix: str = "",
) -> Iterator[str]:
    """What differs between two JSON objects, a line for each field, objects inside included.

    Args:
      found, wanted: the objects.
      who: how each is introduced.
      prefix: in front of the names.
    """
    for name in sorted(found.keys() | wanted.keys()):
        before, now = found.get(name), wanted.get(name)
        label = prefix + _NAMES.get(name, name.replace("_", "-"))
        if isinstance(before, dict) and isinstance(now, dict):
            yield from field_differences(before, now, who, f"{label} ")
        elif before != now:
            yield f"{label}: {who[0]} {json.dumps(before)}, {who[1]} {json.dumps(now)}"


def setting_differences(
    found: Manifest, wanted: Manifest, who: tuple[str, str] = ("the cache has", "you ask for")
) -> Iterator[str]:
    """What differs in all but the corpus, a line for each field."""
    yield from field_differences(found.encoding.to_json(), wanted.encoding.to_json(), who)
    yield from field_differences(found.capture, wanted.capture, who)
    yield from fingerprint_differences(found, wanted)


def fingerprint_differences(
    found: Manifest, wanted: Manifest, who: tuple[str, str] = ("the cache's", "yours")
) -> Iterator[str]:
    """What differs in teacher and tokenizer, a line for each."""
    for name, changed in _FINGERPRINTS.items():
        here, there = (getattr(each, name)["fingerprint"][:12] for each in (found, wanted))
        if getattr(found, name)["fingerprint"] != getattr(wanted, name)["fingerprint"]:
            yield f"{name}: {who[0]} has fingerprint {here}…, {who[1]} {there}… ({changed} changed)"
