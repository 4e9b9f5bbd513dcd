"""The manifest: round trips, versions, every edit, and anything as its bytes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cache
from cache.errors import CacheError, DamageError
from cache.jsonfields import digest
from cache.manifest import Manifest, read_manifest
from cache.storage import Store
from tests.cache.builder import Built, make_encoding, open_manifest


def _parsed(manifest: Manifest) -> dict[str, Any]:
    return json.loads(manifest.to_bytes())


def _forged(content: dict[str, Any]) -> bytes:
    """A manifest's bytes whose digest is right for its content."""
    content = {key: value for key, value in content.items() if key != "digest"}
    return json.dumps({**content, "digest": digest(content)}).encode()


def _read(data: bytes) -> Manifest:
    return Manifest.from_bytes(data, "here")


@pytest.fixture
def opened() -> Manifest:
    return open_manifest(make_encoding(), {"tokenizer.json": b"{}"}, 7)


def test_round_trip_of_both_states(opened: Manifest, exact_cache: Built) -> None:
    for manifest in (opened, exact_cache.manifest):
        data = manifest.to_bytes()
        assert _read(data) == manifest
        assert _read(data).to_bytes() == data
    stored = (exact_cache.path / "manifest.json").read_bytes()
    assert stored == exact_cache.manifest.to_bytes()


def test_the_order_of_keys_does_not_matter(exact_cache: Built) -> None:
    content = _parsed(exact_cache.manifest)
    mixed = dict(reversed(content.items()))
    mixed["teacher"] = dict(reversed(content["teacher"].items()))
    assert _read(json.dumps(mixed).encode()) == exact_cache.manifest
    other = replace(
        exact_cache.manifest, teacher=dict(reversed(exact_cache.manifest.teacher.items()))
    )
    assert other.to_bytes() == exact_cache.manifest.to_bytes()
    assert other.identity == exact_cache.manifest.identity


def test_a_complete_manifest_names_no_run_and_no_time(exact_cache: Built) -> None:
    content = _parsed(exact_cache.manifest)
    assert "run" not in content
    assert set(content) == {
        "format",
        "version",
        "required_features",
        "state",
        "encoding",
        "capture",
        "teacher",
        "tokenizer",
        "corpus",
        "software",
        "arrays",
        "extents",
        "receipts",
        "accounting",
        "statistics",
        "bytes",
        "digest",
    }
    assert set(content["arrays"]) == {*exact_cache.encoding.arrays(), "seals"}


def _paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list):
        items = list(enumerate(value))[:1]
    else:
        return []
    return [
        path for key, inner in items for path in [(*prefix, key), *_paths(inner, (*prefix, key))]
    ]


def _edit(content: dict[str, Any], path: tuple[Any, ...], change: Callable[[Any, Any], Any]) -> Any:
    copy = json.loads(json.dumps(content))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return copy


_WRONG: tuple[Any, ...] = (None, True, -1, 1.5, 7, "?", [], [None], [[-1]], {}, {"x": []})


@pytest.mark.parametrize("state", ["open", "complete"])
def test_every_edit_is_detected(state: str, opened: Manifest, exact_cache: Built) -> None:
    content = _parsed(opened if state == "open" else exact_cache.manifest)
    paths = _paths(content)
    assert len(paths) > (30 if state == "open" else 80)
    for path in paths:
        edits = [_edit(content, path, lambda inner, key: inner.pop(key))]
        edits += [
            _edit(content, path, lambda inner, key, wrong=wrong: inner.__setitem__(key, wrong))
            for wrong in _WRONG
        ]
        for edited in edits:
            if edited == content:
                continue
            with pytest.raises(CacheError):
                _read(json.dumps(edited).encode())


@pytest.mark.parametrize("state", ["open", "complete"])
def test_a_forged_manifest_reads_or_is_refused(
    state: str, opened: Manifest, exact_cache: Built
) -> None:
    """Its digest is right: fields of wrong types are refused, never another exception."""
    content = _parsed(opened if state == "open" else exact_cache.manifest)
    needed = set(content) - {"digest", "arrays"}
    for path in _paths(content):
        gone = _edit(content, path, lambda inner, key: inner.pop(key))
        if len(path) == 1 and path[0] in needed:
            with pytest.raises(CacheError):
                _read(_forged(gone))
        else:
            _read_or_refuse(_forged(gone))
        for wrong in _WRONG[1::3]:
            edited = _edit(
                content, path, lambda inner, key, wrong=wrong: inner.__setitem__(key, wrong)
            )
            _read_or_refuse(_forged(edited))


def _read_or_refuse(data: bytes) -> Manifest | None:
    try:
        return _read(data)
    except CacheError:
        return None


@pytest.mark.parametrize(
    ("path", "wrong", "message"),
    [
        (("format",), "other", "says format 'other', expected 'stillroom-cache'"),
        (("version",), [2, 0], r"format version 2\.0; this Stillroom reads version 1\.x"),
        (("version",), [0, 9], r"format version 0\.9"),
        (("version",), [1], "has the version .1.; expected two numbers"),
        (("version",), ["1", "0"], "field 'version'"),
        (("required_features",), ["rotated", "zipped"], "does not have: rotated, zipped"),
        (("state",), "half", "field 'state' should be one of open, complete"),
        (("encoding", "k"), 0, "k should be between"),
        (("teacher", "fingerprint"), None, "teacher should have a fingerprint"),
        (("tokenizer", "fingerprint"), 3, "tokenizer should have a fingerprint"),
        (("corpus", "digest"), None, "statistics and corpus digest"),
        (("extents", 0, "rows"), 13, "should start at shard 0 and have 4 shards"),
        (("extents", 0, "first_shard"), 1, "an appended extent should have a corpus of its own"),
        (
            ("extents", 0),
            {"first_shard": 1, "shards": 3, "rows": 10, "corpus": {"digest": "", "documents": 1}},
            "should start at shard 0",
        ),
        (("extents", 0, "rows"), 0, "field 'rows'"),
        (("extents", 0, "rows"), 9, "the extents have 9 rows, the statistics 10"),
        (("receipts",), {"sha256": ["a"], "documents": [None]}, "3 shards, but 1 receipts are"),
        (("receipts", "documents"), [None, None], "lists 3 digests and 2 document ranges"),
        (("receipts", "documents", 1), [3, 2], "two non-decreasing integers"),
        (("statistics", "rows"), 11, "the extents have 10 rows, the statistics 11"),
        (("bytes", "tokens"), -1, "field 'tokens'"),
    ],
)
def test_what_is_said_of_a_forged_field(
    path: tuple[Any, ...], wrong: Any, message: str, exact_cache: Built
) -> None:
    content = _parsed(exact_cache.manifest)
    edited = _edit(content, path, lambda inner, key: inner.__setitem__(key, wrong))
    with pytest.raises(CacheError, match=message):
        _read(_forged(edited))


def test_a_receipt_too_few_is_refused(exact_cache: Built) -> None:
    """C29: remove one ledger entry."""
    manifest = exact_cache.manifest
    with pytest.raises(CacheError, match="3 shards, but 2 receipts"):
        replace(manifest, receipts=manifest.receipts[:-1])


def test_a_changed_digest_is_damage(exact_cache: Built) -> None:
    data = exact_cache.manifest.to_bytes()
    edited = data.replace(b"made-up text", b"made-up tixt")
    with pytest.raises(DamageError, match=r"manifest.json was changed: .*\n`stillroom verify "):
        _read(edited.replace(b"\n", b" "))
    with pytest.raises(DamageError, match=r"cache: work.json was changed: "):
        Manifest.from_bytes(edited, "here", "work.json")


def test_a_newer_minor_version_is_read(exact_cache: Built, copy: Any) -> None:
    """What a later 1.x adds does not concern us unless it says so."""
    content = _parsed(exact_cache.manifest)
    content["version"] = [1, 7]
    content["new"] = {"anything": [1]}
    content["arrays"]["hidden_states"] = {"dtype": "float16", "dimensions": ["row", "position"]}
    content["bytes"]["hidden_states"] = 5
    built = copy(exact_cache)
    (built.path / "manifest.json").write_bytes(_forged(content))
    opened = cache.open(built.path)
    assert len(opened) == 10
    assert opened.fields == tuple(built.encoding.arrays())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": ""}, "an open cache should name its run"),
        ({"state": "complete"}, "a complete cache should not name a run"),
        ({"state": "complete", "run": ""}, "statistics and corpus digest"),
        ({"teacher": {}}, "teacher should have a fingerprint"),
        ({"tokenizer": {"fingerprint": None}}, "tokenizer should have a fingerprint"),
    ],
)
def test_an_impossible_manifest_is_refused(
    change: dict[str, Any], message: str, opened: Manifest
) -> None:
    with pytest.raises(CacheError, match=message):
        replace(opened, **change)


def test_the_identity_is_of_everything_that_decides_the_bytes(opened: Manifest) -> None:
    """C33: one at a time."""
    changes: list[dict[str, Any]] = [
        {"encoding": replace(opened.encoding, k=5)},
        {"encoding": replace(opened.encoding, temperatures=(1.0, 2.0))},
        {"encoding": replace(opened.encoding, length=16)},
        {"encoding": replace(opened.encoding, logprobs="float32")},
        {"encoding": replace(opened.encoding, mantissa_bits=7)},
        {"encoding": replace(opened.encoding, rows_per_shard=8)},
        *({"capture": {**opened.capture, name: "other"}} for name in opened.capture),
        {"teacher": {**opened.teacher, "fingerprint": "0"}},
        {"tokenizer": {**opened.tokenizer, "fingerprint": "0"}},
        {"corpus": {**opened.corpus, "digest": "0"}},
    ]
    identities = [replace(opened, **change).identity for change in changes]
    assert len({opened.identity, *identities}) == len(changes) + 1


def test_the_identity_is_of_nothing_else(opened: Manifest, exact_cache: Built) -> None:
    changes: list[dict[str, Any]] = [
        {"run": "other"},
        {"teacher": {**opened.teacher, "source": "elsewhere"}},
        {"corpus": {**opened.corpus, "description": "elsewhere", "identity": {}}},
        {"software": {"numpy": "9"}},
    ]
    assert {replace(opened, **change).identity for change in changes} == {opened.identity}


def test_with_corpus(opened: Manifest) -> None:
    known = opened.with_corpus(digest="0", parts=["a"])
    assert known.corpus == {**opened.corpus, "digest": "0", "parts": ["a"]}
    assert opened.corpus["digest"] == "d" * 64


def test_an_open_manifest_of_a_later_extent(opened: Manifest) -> None:
    assert (opened.documents, opened.identities()) == (7, [opened.identity])
    assert opened.extent_at(0) == opened.extent_at(9) == 0
    assert not {"first_shard", "first_document"} & set(_parsed(opened))
    later = replace(opened, first_shard=3, first_document=7)
    assert _read(later.to_bytes()) == later
    assert later.documents == 14
    assert later.identity == opened.identity
    with pytest.raises(CacheError, match="should not name a run or a beginning"):
        replace(later, state="complete", run="")


def test_no_extents_no_rows(opened: Manifest) -> None:
    assert (opened.rows, opened.shards, opened.stored_rows) == (0, 0, 0)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=80)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["format", "version", "digest", "state", "encoding", "x"]),
                inner | st.just("stillroom-cache") | st.just([1, 0]),
                max_size=5,
            )
        ),
        max_leaves=20,
    ).map(lambda value: json.dumps(value).encode())
)
def test_anything_as_a_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(CacheError):
        _read(data)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**400)
    | st.floats()
    | st.text(max_size=3)
    | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_mutated_manifests_are_read_or_refused(data: st.DataObject, exact_cache: Built) -> None:
    """With and without the right digest."""
    content = _parsed(exact_cache.manifest)
    mutated = content
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(_paths(mutated)))
        value = data.draw(_VALUES)
        mutated = _edit(
            mutated,
            path,
            lambda inner, key, value=value: (
                inner.update({key: value})
                if isinstance(inner, dict)
                else inner.__setitem__(key, value)
            ),
        )
    raw = json.dumps(mutated).encode()
    if mutated != content:
        with pytest.raises(CacheError):
            _read(raw)
    try:
        forged = _forged(mutated)
    except ValueError:
        return  # NaN: such a digest cannot be made
    _read_or_refuse(forged)


def test_deep_nesting_is_refused(exact_cache: Built) -> None:
    content = exact_cache.manifest.to_bytes().decode()
    for depth in (200, 900, 960, 985, 990, 995, 1000, 5000):
        deep = "[" * depth + "]" * depth
        data = content.replace('"made-up text"', deep).encode()
        with pytest.raises(CacheError):
            _read(data)


# Where there is none.


def test_no_cache_there(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"none is not a cache: .* There is no such folder"):
        read_manifest(Store(str(tmp_path / "none")))
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheError, match="It is a file; a cache is a folder"):
        read_manifest(Store(str(tmp_path / "file")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CacheError, match=r"It holds: nothing. Check the path"):
        read_manifest(Store(str(tmp_path / "empty")))
    with pytest.raises(CacheError, match=r"It holds: empty, file. Check the path"):
        read_manifest(Store(str(tmp_path)))
    with pytest.raises(CacheError, match=r"is not a cache: .* Check the address"):
        read_manifest(Store("memory://nothing"))


def test_a_folder_as_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(CacheError):
        read_manifest(Store(str(tmp_path)))
