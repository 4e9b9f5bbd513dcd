"""A teacher's tokenizer: text to ids and back, special ids, template and fingerprint.

Nothing here adds special tokens: `encode` gives the ids of the text alone, and
`adds_bos` / `adds_eos` say what the tokenizer's own settings would add, if they settle it. Special
text inside a document ("<|im_end|>") becomes the special token, as the library
does by default. JAX is not imported.
"""

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsInt

import numpy as np
import tokenizers
from jaxtyping import UInt32

from decoder import byte_level
from decoder.checkpoint import canonical_digest, canonical_json
from decoder.errors import DecoderError
from decoder.source import TOKENIZER_FILES, resolve
from decoder.tokenizer_ends import PLAIN_CLASS, Doubt, added, insertions


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, complete: two with equal fields give equal ids for every text.

    `definition` is the canonical tokenizer.json, without truncation and padding. `adds_bos` and
    `adds_eos` are a `Doubt` where the files do not settle it; `dataclasses.replace` with True or
    False does.
    """

    definition: bytes = field(repr=False)
    bos: str | None
    eos: str | None
    adds_bos: bool | Doubt
    adds_eos: bool | Doubt
    chat_template: str | None = field(repr=False)

    def __post_init__(self) -> None:
        for name, token in (("BOS", self.bos), ("EOS", self.eos)):
            if token is not None and self.backend.token_to_id(token) is None:
                raise DecoderError(f"the {name} token {token!r} is not in the vocabulary")
        for name, adds, token in (
            ("BOS", self.adds_bos, self.bos),
            ("EOS", self.adds_eos, self.eos),
        ):
            if adds is True and token is None:
                raise DecoderError(f"the tokenizer adds {name} but names no {name} token")

    @cached_property
    def backend(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self.definition.decode())

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    @property
    def bos_id(self) -> int | None:
        return None if self.bos is None else self.backend.token_to_id(self.bos)

    @property
    def eos_id(self) -> int | None:
        return None if self.eos is None else self.backend.token_to_id(self.eos)

    @cached_property
    def vocabulary(self) -> int:
        """The largest id + 1, added tokens included."""
        return max(self._vocabulary.values()) + 1

    @cached_property
    def holes(self) -> tuple[int, ...]:
        """Ids below `vocabulary` that no token has."""
        return tuple(sorted(set(range(self.vocabulary)) - set(self._vocabulary.values())))

    @property
    def missing_bytes(self) -> frozenset[int]:
        """Bytes of UTF-8 text that the tokenizer drops without a trace.

        Those of a byte-level BPE without unknown token or byte fallback whose
        symbol is not in the vocabulary; empty for other tokenizers.
        """
        return self._missing_bytes

    @cached_property
    def _missing_bytes(self) -> frozenset[int]:
        parsed = json.loads(self.definition)
        model = parsed["model"]
        lossless = model.get("unk_token") is not None or model.get("byte_fallback")
        if model.get("type") != "BPE" or lossless or not is_byte_level(parsed):
            return frozenset()
        symbols = byte_level.SYMBOLS.items()
        return frozenset(byte for byte, symbol in symbols if symbol not in model["vocab"])

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the content; the key order of the JSON files does not matter."""
        return canonical_digest(
            {
                "tokenizer": json.loads(self.definition),
                "settings": self._settings(),
                "chat_template": self.chat_template,
            }
        )

    def encode(self, text: str) -> UInt32[np.ndarray, "tokens"]:
        """The ids of a text, without BOS, EOS or other insertions."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[UInt32[np.ndarray, "_"]]:
        """`encode` of each text, over the library's threads."""
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:
            raise DecoderError(_not_unicode(texts)) from error
        return [np.asarray(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The text of ids, special tokens included. Raises for an id that no token has."""
        numbers = [int(one) for one in ids]
        for number in set(numbers):
            if number < 0 or self.backend.id_to_token(number) is None:
                raise DecoderError(
                    f"no token has the id {number}; the tokenizer has {self.vocabulary} ids"
                )
        return self.backend.decode(numbers, skip_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """One token as a reader wants to see it; bytes that are no whole character as <0xE2>."""
        token = self.backend.id_to_token(int(token_id))
        if token is None:
            return f"<unused {int(token_id)}>"
        if token in self._added:
            return token
        return byte_level.symbol_text(token) if self._byte_level else token.replace("▁", " ")

    @cached_property
    def _added(self) -> frozenset[str]:
        return frozenset(
            token.content for token in self.backend.get_added_tokens_decoder().values()
        )

    @cached_property
    def _byte_level(self) -> bool:
        return is_byte_level(json.loads(self.definition))

    def mapping_difference(self, other: "Tokenizer") -> str | None:
        """None if one tokenizer's tokens all have the same ids in the other; else an example.

        The larger may have further tokens, such as added special ones.
        """
        pair = sorted((self._vocabulary, other._vocabulary), key=len)
        smaller, larger = pair
        here, there = (
            ("this", "the other") if smaller is self._vocabulary else ("the other", "this")
        )
        for token, token_id in sorted(smaller.items(), key=lambda item: item[1]):
            found = larger.get(token)
            if found != token_id:
                place = "no id" if found is None else f"the id {found}"
                return (
                    f"the token {token!r} has the id {token_id} in {here} tokenizer "
                    f"and {place} in {there}"
                )
        return None

    def files(self) -> dict[str, bytes]:
        """Files from which `load_tokenizer` gives this tokenizer again, always the same bytes."""
        settings = {"tokenizer_class": PLAIN_CLASS, **self._settings()}
        if settings["tokenizer_class"] is None:
            del settings["tokenizer_class"]
        files = {
            "tokenizer.json": self.definition,
            "tokenizer_config.json": canonical_json(settings),
        }
        if self.chat_template is not None:
            files["chat_template.jinja"] = self.chat_template.encode()
        return files

    def _settings(self) -> dict[str, Any]:
        """What counts of tokenizer_config.json; its class only where that is part of a doubt."""
        settings: dict[str, Any] = {"bos_token": self.bos, "eos_token": self.eos}
        for key, adds in (("add_bos_token", self.adds_bos), ("add_eos_token", self.adds_eos)):
            settings[key] = adds.flag if isinstance(adds, Doubt) else adds
            if isinstance(adds, Doubt):
                settings["tokenizer_class"] = adds.tokenizer_class
        return settings


def load_tokenizer(source: str, revision: str | None = None) -> Tokenizer:
    """The tokenizer of a folder, hub name or GGUF file. Raises `DecoderError`."""
    resolved = resolve(source, revision, TOKENIZER_FILES)
    if resolved.kind == "function":
        raise DecoderError(
            f"{source} is a function and brings no tokenizer; name one of its own (--tokenizer)"
        )
    # Imported here because both build on the class above.
    from decoder.tokenizer_files import from_folder
    from decoder.tokenizer_gguf import from_gguf

    return from_gguf(resolved.files) if resolved.kind == "gguf" else from_folder(resolved.files)


def tokenizer_from_files(files: Mapping[str, bytes]) -> Tokenizer:
    """The tokenizer of what `Tokenizer.files` gave, by name. Raises `DecoderError`."""
    with tempfile.TemporaryDirectory(prefix="stillroom-tokenizer-") as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        return load_tokenizer(folder)


def has_tokenizer(source: str, revision: str | None = None) -> bool:
    """Whether a source brings a tokenizer of its own. Raises `DecoderError` if there is none."""
    resolved = resolve(source, revision, TOKENIZER_FILES)
    if resolved.kind == "folder":
        return (resolved.files / "tokenizer.json").exists()
    return resolved.kind == "gguf"


def build_tokenizer(
    definition: Mapping[str, Any],
    *,
    bos: str | None,
    eos: str | None,
    adds_bos: bool | None,
    adds_eos: bool | None,
    chat_template: str | None,
    settings: Mapping[str, Any] | None = None,
) -> Tokenizer:
    """A tokenizer from a parsed tokenizer.json and the settings beside it.

    Where `adds_bos` or `adds_eos` is None, the definition's own post-processor decides, together
    with `settings`, a parsed tokenizer_config.json. Truncation and padding are switched off.
    Raises `DecoderError` for a definition that the `tokenizers` library refuses.
    """
    canonical = canonical_json({**definition, "truncation": None, "padding": None})
    first, last = insertions(canonical)
    return Tokenizer(
        canonical,
        bos,
        eos,
        adds_bos=added("bos", bos, settings or {}, first) if adds_bos is None else adds_bos,
        adds_eos=added("eos", eos, settings or {}, last) if adds_eos is None else adds_eos,
        chat_template=chat_template,
    )


def _not_unicode(texts: Sequence[str]) -> str:
    for place, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return (
                f"text {place} is not valid Unicode: half of a surrogate pair at character "
                f"{error.start}. Replace such characters in the corpus"
            )
    return f"expected texts, found {sorted({type(text).__name__ for text in texts})}"


def is_byte_level(definition: Mapping[str, Any]) -> bool:
    """Whether a parsed tokenizer.json turns texts into bytes before it looks for tokens."""

    def has(part: Mapping[str, Any] | None) -> bool:
        if part is None:
            return False
        inner = [*part.get("pretokenizers", []), *part.get("normalizers", [])]
        return part.get("type") == "ByteLevel" or any(map(has, inner))

    return has(definition.get("pre_tokenizer")) or has(definition.get("normalizer"))
