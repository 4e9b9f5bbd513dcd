"""What can be wrong with a cache, said so that a person knows what to do next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Numbers that are listed in full.
LISTED = 20


class CacheError(ValueError):
    """Something about a cache that its user can act on; the text says how."""


@dataclass(frozen=True)
class Damage:
    """One thing found broken: where it is, and what it concerns.

    Attributes:
      reason: what was expected and what was found.
      shard: the shard, or None when it concerns the whole cache.
      array: the array, or None when it concerns the shard or the cache.
      rows: first and one past the last row concerned, or None.
      documents: first and last document concerned, or None when unknown.
    """

    reason: str
    shard: int | None = None
    array: str | None = None
    rows: tuple[int, int] | None = None
    documents: tuple[int, int] | None = None

    def __str__(self) -> str:
        where = []
        if self.shard is not None:
            where.append(f"shard {self.shard}")
        if self.rows is not None:
            where.append(f"rows {self.rows[0]}-{self.rows[1] - 1}")
        if self.documents is not None:
            where.append(f"documents {self.documents[0]}-{self.documents[1]}")
        elif self.shard is not None:
            where.append("documents unknown")
        if self.array is not None:
            where.append(f"array {self.array}")
        return f"{', '.join(where) or 'cache'}: {self.reason}"


class DamageError(CacheError):
    """Stored data is missing or is not what was written.

    Attributes:
      damage: everything found, one `Damage` each.
    """

    def __init__(self, damage: Sequence[Damage], next_step: str):
        self.damage = tuple(damage)
        lines = "\n".join(f"  {item}" for item in self.damage)
        super().__init__(f"the cache is damaged:\n{lines}\n{next_step}")


def listed(numbers: Iterable[int]) -> str:
    """Numbers as text; of many, the first."""
    numbers = list(numbers)
    shown = ", ".join(str(number) for number in numbers[:LISTED])
    return f"{shown} and {len(numbers) - LISTED:,} more" if len(numbers) > LISTED else shown
