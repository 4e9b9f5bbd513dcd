"""Byte-level BPE in plain Python: an independent reference for tokenizers.

`split_gpt2` is GPT-2's published pattern,
`'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+`,
written as a scanner; `split_smollm` takes every `\\p{N}` out first, as the rule
named 'smollm' does.
"""

import unicodedata
from collections.abc import Iterator

_CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
_SPACES = frozenset(
    [
        *range(0x09, 0x0E),
        *(0x20, 0x85, 0xA0, 0x1680),
        *range(0x2000, 0x200B),
        *(0x2028, 0x2029, 0x202F, 0x205F, 0x3000),
    ]
)


def kind(character: str) -> str:
    """L, N, S (white space) or O."""
    if ord(character) in _SPACES:
        return "S"
    category = unicodedata.category(character)[0]
    return category if category in "LN" else "O"


def split_smollm(text: str) -> list[str]:
    pieces: list[str] = []
    run = ""
    for character in text:
        if kind(character) == "N":
            pieces += [*split_gpt2(run), character]
            run = ""
        else:
            run += character
    return pieces + list(split_gpt2(run))


def split_gpt2(text: str) -> Iterator[str]:
    place = 0
    while place < len(text):
        end = _match(text, place)
        yield text[place:end]
        place = end


def _match(text: str, place: int) -> int:
    for contraction in _CONTRACTIONS:
        if text.startswith(contraction, place):
            return place + len(contraction)
    start = place + (text[place] == " ")
    if start < len(text) and kind(text[start]) != "S":
        return _run(text, start, kind(text[start]))
    end = _run(text, place, "S")
    # Spaces before a word: all but the last, which belongs to the word; a lone one stays.
    return end if end == len(text) or end - place == 1 else end - 1


def _run(text: str, place: int, wanted: str) -> int:
    while place < len(text) and kind(text[place]) == wanted:
        place += 1
    return place


class ReferenceBPE:
    """Merges by rank, lowest first, leftmost first; symbols without a token are dropped."""

    def __init__(self, vocabulary: dict[str, int], merges: list[list[str]], special: list[str]):
        self.vocabulary = vocabulary
        self.ranks = {tuple(pair): rank for rank, pair in enumerate(merges)}
        self.special = sorted(special, key=len, reverse=True)
        self.symbols = _symbols()
        self.known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        plain = ""
        place = 0
        while place < len(text):
            found = next((one for one in self.special if text.startswith(one, place)), None)
            if found is None:
                plain += text[place]
                place += 1
                continue
            ids += [*self._plain(plain), self.vocabulary[found]]
            plain = ""
            place += len(found)
        return ids + self._plain(plain)

    def _plain(self, text: str) -> list[int]:
        return [one for piece in split_smollm(text) for one in self._piece(piece)]

    def _piece(self, piece: str) -> list[int]:
        if piece not in self.known:
            symbols = [self.symbols[byte] for byte in piece.encode()]
            parts = self._merge([symbol for symbol in symbols if symbol in self.vocabulary])
            self.known[piece] = [self.vocabulary[part] for part in parts]
        return self.known[piece]

    def _merge(self, parts: list[str]) -> list[str]:
        while len(parts) > 1:
            ranked = [
                (self.ranks.get((parts[i], parts[i + 1]), len(self.ranks)), i)
                for i in range(len(parts) - 1)
            ]
            rank, i = min(ranked)
            if rank == len(self.ranks):
                break
            parts = [*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :]]
        return parts


def _symbols() -> list[str]:
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]
