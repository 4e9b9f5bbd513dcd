"""What is said of damage."""

import pytest

from cache.errors import CacheError, Damage, DamageError


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (Damage("bad"), "cache: bad"),
        (Damage("bad", array="tokens"), "array tokens: bad"),
        (Damage("bad", shard=3), "shard 3, documents unknown: bad"),
        (
            Damage("bad", shard=0, array="tokens", rows=(0, 4), documents=(0, 7)),
            "shard 0, rows 0-3, documents 0-7, array tokens: bad",
        ),
    ],
)
def test_damage_says_where(damage: Damage, text: str) -> None:
    assert str(damage) == text


def test_all_damage_and_the_next_step_are_said() -> None:
    error = DamageError([Damage("one", shard=1, rows=(4, 8)), Damage("two")], "Do this.")
    assert isinstance(error, CacheError)
    assert [item.reason for item in error.damage] == ["one", "two"]
    assert str(error) == (
        "the cache is damaged:\n  shard 1, rows 4-7, documents unknown: one\n  cache: two\nDo this."
    )
