"""Whether places overlap: what is written should be neither a cache that is read nor inside it."""

from __future__ import annotations

from cache.errors import CacheError
from cache.storage import place_of


def check_apart(out: str, source: str, what: str, around: bool = False) -> None:
    """Refuses to write into a cache that is read, under whatever names both are given.

    Args:
      out: where something will be written: a path or an address.
      source: the cache.
      what: how the two are related, to follow the source's name: "which it would be a copy of".
      around: whether the cache may not be inside of `out` either.

    Raises:
      CacheError: `out` is the cache, or is inside of it (or around it).
    """
    here, there = (place_of(place) for place in (out, source))
    if here == there:
        where = "is"
    elif here.startswith(f"{there}/"):
        where = "is inside"
    elif around and there.startswith(f"{here.rstrip('/')}/"):
        where = "holds"
    else:
        return
    raise CacheError(f"{out} {where} {source}, {what}. Choose another place.")
