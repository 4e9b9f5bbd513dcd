"""Every array, its seals included, under every kind of damage to its files."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.attack.conftest import Attacked, Base, train_on
from tests.attack.damage import (
    ARRAY_DAMAGE,
    array_file,
    copy_a_shard_from,
    flip_bit_at,
    footer_bytes,
    swap_two_shards,
)
from tests.cache.builder import make_encoding

NAMES = tuple(make_encoding().stored_arrays())
# What another teacher does not change.
OF_THE_CORPUS = {"tokens", "segments", "documents", "label_mask"}
# A shard of whole rows in the middle, and the partly filled last one.
MIDDLE = 2


def _changed(attacked: Attacked) -> dict[str, set[int]]:
    """Shards whose files are not what they were, by array."""
    changed: dict[str, set[int]] = defaultdict(set)
    for name in NAMES:
        for shard in range(attacked.manifest.shards):
            path = array_file(attacked.path, attacked.manifest, name, shard)
            key = str(path.relative_to(attacked.path))
            if not path.exists() or path.read_bytes() != attacked.base.stored[key]:
                changed[name].add(shard)
    return dict(changed)


def _check_report(attacked: Attacked, changed: dict[str, set[int]]) -> None:
    """Everything that was changed is named with its shard, array, rows and documents."""
    places = {(name, shard) for name, shards in changed.items() for shard in shards}
    found = attacked.found()
    named = {(item["array"], item["shard"]) for item in found}
    assert named == places
    for item in found:
        shard = item["shard"]
        assert tuple(item["rows"]) == attacked.manifest.shard_rows(shard)
        assert tuple(item["documents"]) == attacked.manifest.receipts[shard].documents


def test_the_copy_is_sound(attacked: Attacked) -> None:
    """What the harness asks of damaged caches holds of a whole one: else it would show nothing."""
    attacked.sound()
    attacked.check_readers({})
    assert train_on_all(attacked) == len(attacked.base.rows["tokens"])
    attacked.repaired()
    assert attacked.manifest.shards >= 5
    assert attacked.manifest.rows % 6


def train_on_all(attacked: Attacked) -> int:
    import cache

    opened = cache.open(attacked.path)
    without = int((attacked.base.rows["label_mask"] == 1).any(axis=1).sum())
    assert train_on(opened) == without
    return len(opened)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ARRAY_DAMAGE)
def test_every_array_and_every_damage(kind: str, name: str, attacked: Attacked) -> None:
    shard = MIDDLE if len(kind) % 2 else attacked.manifest.shards - 1
    ARRAY_DAMAGE[kind](attacked.path, attacked.manifest, name, shard, attacked.base.others)
    changed = _changed(attacked)
    if not changed:
        # The same documents, or as many exact entries everywhere: the same file.
        assert kind in ("of another teacher", "swapped with another shard's")
        assert name in {*OF_THE_CORPUS, "exact_counts"}
        attacked.sound()
        return
    assert set(changed) == {name}
    assert shard in changed[name]
    _check_report(attacked, changed)
    attacked.check_readers(changed)


@pytest.mark.parametrize("kind", ARRAY_DAMAGE)
def test_every_damage_is_repaired(kind: str, attacked: Attacked) -> None:
    """All arrays at once, each in another shard than the next."""
    shards = attacked.manifest.shards
    for place, name in enumerate(NAMES):
        shard = (2 * place) % shards
        ARRAY_DAMAGE[kind](attacked.path, attacked.manifest, name, shard, attacked.base.others)
    changed = _changed(attacked)
    assert len(changed) >= len(NAMES) - len(OF_THE_CORPUS) - 1
    _check_report(attacked, changed)
    attacked.repaired()


@pytest.mark.parametrize("shard", [0, MIDDLE])
@pytest.mark.parametrize("other", ["corpus", "teacher"])
def test_a_whole_shard_of_another_cache(other: str, shard: int, attacked: Attacked) -> None:
    """Files of all arrays, seals and receipt agree with each other; and are of something else."""
    copy_a_shard_from(attacked.path, attacked.manifest, attacked.base.others[other], shard)
    (found,) = attacked.found()
    assert (found["shard"], found["array"]) == (shard, None)
    assert "is not the one the manifest lists" in found["reason"]
    changed = _changed(attacked)
    assert "seals" in changed
    attacked.check_readers({"seals": {shard}})
    attacked.repaired()


@pytest.mark.parametrize("pair", [(0, 1), (1, 3)])
def test_two_whole_shards_swapped(pair: tuple[int, int], attacked: Attacked) -> None:
    """The nastiest: every file of both shards and their receipts, each in the other's place."""
    swap_two_shards(attacked.path, attacked.manifest, *pair)
    found = attacked.found()
    assert [(item["shard"], item["array"]) for item in found] == [(shard, None) for shard in pair]
    attacked.check_readers({"seals": set(pair)})
    attacked.repaired()


def test_two_whole_shards_swapped_without_the_receipts(attacked: Attacked) -> None:
    swap_two_shards(attacked.path, attacked.manifest, 1, 3)
    for key in ("receipts/000001.json", "receipts/000003.json"):
        (attacked.path / key).write_bytes(attacked.base.stored[key])
    found = attacked.found()
    assert {item["shard"] for item in found} == {1, 3}
    attacked.check_readers({"seals": {1, 3}})
    attacked.repaired()


@pytest.mark.parametrize("name", ["tokens", "target_ids", "seals"])
def test_bits_all_over_a_file(name: str, base: Base, attacked: Attacked) -> None:
    """Reading the shard alone: no bit of the file changes what is read without an error."""
    import cache
    from cache.errors import DamageError

    path = array_file(attacked.path, attacked.manifest, name, 1)
    good = path.read_bytes()
    size, index = len(good), footer_bytes(attacked.manifest)
    places = [*range(0, 8 * (size - index), 61), *range(8 * (size - index), 8 * size, 29)]
    rows = range(*attacked.manifest.shard_rows(1))
    field = "entropy" if name == "seals" else name
    for place in places:
        flip_bit_at(path, place)
        with pytest.raises(DamageError):
            cache.open(attacked.path).rows(list(rows), (field,))
        path.write_bytes(good)
    attacked.sound()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ARRAY_DAMAGE)
def test_every_array_is_repaired_from_every_damage(
    kind: str, name: str, attacked: Attacked
) -> None:
    for shard in (0, attacked.manifest.shards - 1):
        ARRAY_DAMAGE[kind](attacked.path, attacked.manifest, name, shard, attacked.base.others)
    attacked.repaired()
