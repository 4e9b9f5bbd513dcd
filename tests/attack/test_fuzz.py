"""Anything at all as a cache's JSON objects: an error that says so, or the data as it was."""

from __future__ import annotations

import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cache
import stillroom
from cache.errors import CacheError
from cache.format import BACKUP, MANIFEST, WORK, receipt_key
from tests.attack.conftest import Base, train_on
from tests.attack.damage import paths, to_bytes, with_digest
from tests.cache.builder import same
from tests.pipelines import small

KEYS = (MANIFEST, BACKUP, WORK, receipt_key(0), receipt_key(2))

# What parsers, paths and evaluators trip over; any code in it would leave the file "run".
_NASTY = [
    None, True, -1, 0, 2**31, 2**63, 10**400, 1e308, "", "\x00", "\ud800", "../../run",
    "/run", "file:///run", "s3://run", "{0.__class__}", "%s%n", "$(touch run)", "`touch run`",
    "__import__('os').mknod('run')", "!!python/object/apply:os.mknod ['run']",
    "cos\nmknod\n(S'run'\ntR.", "$ref", "NaN", [], {}, [[]], {"": {"": []}},
]  # fmt: skip
NASTY = st.sampled_from(_NASTY).map(deepcopy)


def _changed(content: Any, data: st.DataObject) -> Any:
    """A copy of a JSON value with one to three of its fields set, removed, or moved elsewhere."""
    copy = json.loads(json.dumps(content))
    for _ in range(data.draw(st.integers(1, 3))):
        places = list(paths(copy))
        place = data.draw(st.sampled_from(places))
        inner = copy
        for key in place[:-1]:
            inner = inner[key]
        change = data.draw(st.sampled_from(["set", "remove", "move", "add"]))
        if change == "set":
            inner[place[-1]] = data.draw(NASTY)
        elif change == "remove":
            del inner[place[-1]]
        elif change == "add" and isinstance(inner, dict):
            inner[data.draw(st.sampled_from(["x", "../run", "__class__", "arrays"]))] = data.draw(
                NASTY
            )
        else:
            source = copy
            for key in data.draw(st.sampled_from(places)):
                holds = isinstance(source, dict) or (isinstance(source, list) and source)
                source = source[key] if holds and _has(source, key) else source
            inner[place[-1]] = json.loads(json.dumps(source))
        if not list(paths(copy)):
            break
    return copy


def _has(value: Any, key: Any) -> bool:
    if isinstance(value, dict):
        return key in value
    return isinstance(key, int) and key < len(value)


def _noise(good: bytes, data: st.DataObject) -> bytes:
    """The bytes of an object with a part replaced by others."""
    first = data.draw(st.integers(0, len(good)))
    end = data.draw(st.integers(first, min(first + 50, len(good))))
    return good[:first] + data.draw(st.binary(max_size=20)) + good[end:]


def _attack(base: Base, folder: Path, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(KEYS))
    good = base.stored[MANIFEST if key in (BACKUP, WORK) else key]
    content = json.loads(good)
    kind = data.draw(st.sampled_from(["fields", "fields with their digest", "bytes"]))
    if kind == "bytes":
        written = _noise(good, data)
    else:
        content = _changed(content, data)
        signs = kind == "fields with their digest" and isinstance(content, dict)
        try:
            written = to_bytes(with_digest(content) if signs else content)
        except ValueError:
            # No digest can be made of it.
            written = to_bytes(content)
    (folder / key).write_bytes(written)
    keys = [MANIFEST, BACKUP] if key == MANIFEST and data.draw(st.booleans()) else [key]
    for each in keys:
        (folder / each).write_bytes(written)


def _tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _read_or_refused(base: Base, folder: Path) -> None:
    """Whoever opens it gets an error of the cache, or rows that are those of before."""
    try:
        opened = cache.open(folder)
        rows = np.arange(len(opened))
        found = opened.rows(rows)
        train_on(opened)
    except CacheError:
        return
    for name, values in found.items():
        assert same(values, base.rows[name][rows])


def _fuzz(base: Base, outer: Path, capsys: pytest.CaptureFixture[str], data: st.DataObject) -> None:
    made = outer / str(len(os.listdir(outer)))
    made.mkdir()
    folder = small.copy(base.made / "cache", made / "outer" / "cache")
    _attack(base, folder, data)
    before = _tree(made)
    _read_or_refused(base, folder)
    for words in (["inspect"], ["inspect", "--row", "0"], ["verify", "--full"]):
        code = stillroom.main([words[0], str(folder), *words[1:]])
        output = capsys.readouterr()
        assert code in (0, 1)
        assert "Traceback" not in output.err + output.out
        assert code == 0 or output.err.strip() or output.out.strip()
    # Nothing was written, and nothing was run.
    assert _tree(made) == before
    code = stillroom.main(["verify", str(folder), "--repair"])
    assert code in (0, 1)
    assert "Traceback" not in capsys.readouterr().err
    strange = set(_tree(made)) - set(before) - {f"outer/cache/{MANIFEST}", f"outer/cache/{BACKUP}"}
    assert not strange
    _read_or_refused(base, folder)
    assert not (outer / "run").exists()


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


_QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=60, deadline=None, suppress_health_check=_QUIET)
@given(data=st.data())
def test_any_json(
    base: Base, in_a_folder: Path, capsys: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    _fuzz(base, in_a_folder, capsys, data)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=_QUIET)
@given(data=st.data())
def test_any_json_for_long(
    base: Base, in_a_folder: Path, capsys: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    _fuzz(base, in_a_folder, capsys, data)
