"""What a tokenizer puts before and after a text, where releases of transformers agree on it.

transformers 4 builds some classes' post-processor anew from `add_bos_token` and `add_eos_token`;
transformers 5 keeps that of tokenizer.json for nearly all. `tests/decoder/tokenizer_settings.py`
has what each was seen to do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from decoder.errors import DecoderError

PLAIN_CLASS = "PreTrainedTokenizerFast"  # of our own files
# Classes that transformers 4 lets follow the flags: whether they add BOS where none is given.
_BOS_BY_DEFAULT = {
    "LlamaTokenizer": True,
    "CodeLlamaTokenizer": True,
    "GemmaTokenizer": True,
    "CohereTokenizer": True,
    "GPTNeoXTokenizer": False,
}
# Classes for which the flags never count.
_WITHOUT_FLAGS = ("PreTrainedTokenizer", "TokenizersBackend", "GPT2Tokenizer", "Qwen2Tokenizer")
# Classes whose post-processor transformers 5 replaces: whether by one that adds BOS.
_BOS_IN_5 = {"CodeLlamaTokenizer": True, "GPTNeoXTokenizer": False}


@dataclass(frozen=True)
class Doubt:
    """Whether BOS (or EOS) belongs to a text is not settled by the tokenizer's files.

    Releases of transformers put different tokens there, or all put another than the one named.

    Attributes:
      token: the one that is named as BOS (or EOS).
      transformers_4: the tokens that it puts there; None if it refuses the settings.
      transformers_5: those that this one puts there.
      tokenizer_class: as tokenizer_config.json names it, if it does.
    """

    token: str | None
    transformers_4: tuple[str, ...] | None
    transformers_5: tuple[str, ...]
    tokenizer_class: str | None

    def __bool__(self) -> bool:
        raise TypeError(f"{self} is neither true nor false; compare with True, or check its type")

    @property
    def flag(self) -> bool | None:
        """The `add_bos_token` (or `add_eos_token`) with which it is read again; None for null."""
        return None if self.transformers_4 == self.transformers_5 else self.transformers_4 != ()


def insertions(definition: bytes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tokens that the post-processor of a tokenizer.json puts before and after a text.

    Raises `DecoderError` for a definition that the `tokenizers` library refuses.
    """
    try:
        backend = tokenizers.Tokenizer.from_str(definition.decode())
    except Exception as error:  # the library raises nothing narrower
        raise DecoderError(f"tokenizer.json is not understood: {error}") from error
    encoding = backend.encode("a", add_special_tokens=True)
    tokens, inserted = encoding.tokens, encoding.special_tokens_mask
    own = [place for place, is_inserted in enumerate(inserted) if not is_inserted]
    # A vocabulary without the letter: the first is taken for what comes before it.
    first, last = (own[0], own[-1] + 1) if own else (1, 1)
    return tuple(tokens[:first]), tuple(tokens[last:])


def added(
    name: str, token: str | None, settings: Mapping[str, Any], inserted: tuple[str, ...]
) -> bool | Doubt:
    """Whether a tokenizer adds BOS or EOS to a text, by the files that describe it.

    Args:
      name: "bos" or "eos".
      token: the one that is named so.
      settings: tokenizer_config.json.
      inserted: what the post-processor of tokenizer.json puts there.
    """
    named = () if token is None else (token,)
    given, key = settings.get("tokenizer_class"), f"add_{name}_token"
    cls, stated = str(given).removesuffix("Fast"), settings.get(key)
    if stated is not None and not isinstance(stated, bool):
        raise DecoderError(f"tokenizer_config.json: {key} is {stated!r}; expected true or false")
    four: tuple[str, ...] | None = inserted
    if cls in _BOS_BY_DEFAULT:
        default = name == "bos" and _BOS_BY_DEFAULT[cls]
        four = (named or None) if settings.get(key, default) else ()
    elif stated is not None and cls not in _WITHOUT_FLAGS:
        # A class of its own, or that of the model's type: the settings are one reading.
        four = (named or None) if stated else ()
    five = inserted
    if cls in _BOS_IN_5:
        five = named if name == "bos" and _BOS_IN_5[cls] else ()
    if four in (None, five) and five in ((), named):
        return five != ()
    return Doubt(token, four, five, None if given is None else str(given))
