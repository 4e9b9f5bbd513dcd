"""What a manifest may say of where a cache is from."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from cache.errors import CacheError
from cache.manifest import Manifest
from cache.provenance import check_derived
from tests.cache.builder import Built

_SOURCE: dict[str, Any] = {
    "identities": ["a" * 64],
    "manifest_sha256": "b" * 64,
    "rows": 10,
    "k": 6,
    "tail": "none",
    "logprobs": "rounded",
    "mantissa_bits": 6,
}
_DERIVED: dict[str, Any] = {
    "version": 1,
    "sources": [_SOURCE],
    "rows": [0, 5],
    "rows_held": [["c" * 64, 0, 5]],
    "sample": 0.5,
    "seed": 0,
    "relative_error": 0.01,
}


def test_what_derive_writes_is_accepted() -> None:
    check_derived({"exact": 2})
    check_derived({"derived": _DERIVED})
    optional = {"sample", "seed", "relative_error"}
    least = {name: value for name, value in _DERIVED.items() if name not in optional}
    check_derived({"derived": {**least, "rows": None, "rows_held": None}})
    nested = {**_DERIVED, "sources": [{**_SOURCE, "derived": _DERIVED}, _SOURCE]}
    check_derived({"derived": nested})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((), 3),
        (("sources",), []),
        (("sources",), [1]),
        (("sources", 0, "manifest_sha256"), 1),
        (("sources", 0, "identities"), "x"),
        (("sources", 0, "rows"), "10"),
        (("sources", 0, "derived"), {}),
        (("rows",), [5, 0]),
        (("rows",), "0:5"),
        (("rows_held",), [["c", 0]]),
        (("rows_held",), [["c", 0, "5"]]),
        (("rows_held",), 1),
        (("sample",), "half"),
        (("seed",), -1),
        (("relative_error",), None),
        (("version",), None),
    ],
)
@pytest.mark.parametrize("deep", [False, True])
def test_anything_else_is_refused(path: tuple[str | int, ...], value: Any, deep: bool) -> None:
    changed: Any = {"derived": deepcopy(_DERIVED)}
    place: Any = changed
    for name in ("derived", *path)[:-1]:
        place = place[name]
    place[("derived", *path)[-1]] = value
    outer = {"derived": {**_DERIVED, "sources": [{**_SOURCE, **changed}]}}
    with pytest.raises(CacheError, match=r"manifest, derived|field"):
        check_derived(outer if deep else changed)


@pytest.mark.parametrize("name", ["sources", "rows", "rows_held", "version"])
def test_nothing_may_be_missing(name: str) -> None:
    left = {key: value for key, value in _DERIVED.items() if key != name}
    with pytest.raises(CacheError, match=f"no field '{name}'"):
        check_derived({"derived": left})


def test_a_manifest_checks_it_and_states_the_error(exact_cache: Built) -> None:
    manifest = exact_cache.manifest
    assert manifest.relative_error == manifest.encoding.relative_error == 2.0**-7
    derived = replace(manifest, capture={**manifest.capture, "derived": _DERIVED})
    assert derived.relative_error == 0.01
    read = Manifest.from_bytes(derived.to_bytes(), "somewhere")
    assert read == derived
    assert derived.identity != manifest.identity
    with pytest.raises(CacheError, match="at least one source"):
        replace(manifest, capture={"derived": {**_DERIVED, "sources": []}})


def test_deep_histories_do_not_recurse() -> None:
    value: dict[str, Any] = _DERIVED
    for _ in range(5000):
        value = {**_DERIVED, "sources": [{**_SOURCE, "derived": value}]}
    check_derived({"derived": value})
