"""What differs between caches, in words."""

from dataclasses import replace

from cache.differences import field_differences, fingerprint_differences, setting_differences
from tests.cache.builder import Built


def test_fields() -> None:
    found = {"a": 1, "same": [1], "gone": None, "x_y": {"in": 1, "all": 2}, "kind": {}}
    wanted = {"a": 2, "same": [1], "new": "n", "x_y": {"in": 3, "all": 2}, "kind": 1}
    assert list(field_differences(found, wanted)) == [
        "a: the cache has 1, you ask for 2",
        "kind: the cache has {}, you ask for 1",
        'new: the cache has null, you ask for "n"',
        "x-y in: the cache has 1, you ask for 3",
    ]
    assert list(field_differences({"k": 1}, {"k": 2}, ("A has", "B has"))) == [
        "k: A has 1, B has 2"
    ]


def test_settings(exact_cache: Built) -> None:
    manifest = exact_cache.manifest
    assert list(setting_differences(manifest, manifest)) == []
    other = replace(
        manifest,
        encoding=replace(manifest.encoding, mantissa_bits=3),
        capture={**manifest.capture, "backend": "tpu"},
        teacher={"fingerprint": "a" * 64},
        tokenizer={"fingerprint": "b" * 64},
    )
    assert list(setting_differences(manifest, other)) == [
        "mantissa-bits: the cache has 6, you ask for 3",
        'JAX\'s backend: the cache has null, you ask for "tpu"',
        "teacher: the cache's has fingerprint ffffffffffff…, yours aaaaaaaaaaaa… "
        "(config or weights changed)",
        "tokenizer: the cache's has fingerprint eeeeeeeeeeee…, yours bbbbbbbbbbbb… "
        "(vocabulary, rules or template changed)",
    ]
    lines = list(fingerprint_differences(manifest, other, ("A", "B")))
    assert lines[0].startswith("teacher: A has fingerprint ffffffffffff…, B aaaa")
