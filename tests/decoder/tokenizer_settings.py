"""Whether BOS and EOS are added: settings as families publish them, and what comes of each.

Each line of the tables is a tokenizer class and a flag of tokenizer_config.json; each column a
post-processor of tokenizer.json:

  none        null
  bytes       ByteLevel, which puts nothing there
  template    TemplateProcessing, which puts the token there
  sequence    both of these, in a Sequence
  another     TemplateProcessing, which puts another token there than the one that is named

A cell has three signs: what transformers 4 does (measured with 4.57.6), what transformers 5 does
(measured with 5.25.0; the parity tests repeat it), and what we do:

  +  the token that is named BOS (or EOS) is put there
  -  nothing is
  x  another token is
  !  the folder is refused
  ?  we have a `Doubt`: `auto` is refused, `on` and `off` decide

Where a cell's signs are not all alike, this is why:

  +-? and the like     The two releases put different things there, and which of them the model
                       was trained with is not in the files.
  xx?                  Both put a token there that is not the one named: neither `on` nor `off`
                       does that.
  !--, !++ and !x?     Only transformers 5 takes the settings (4 refuses to add a token that is not
                       named, and classes that it does not know): its reading counts.
  !+? and !-?          A class that transformers 4 does not know, or none, beside a flag that says
                       otherwise: code of the model's own, or the class of its type, may follow it.
  --! and the like     A BOS that no vocabulary has. transformers gives it the next free id, for
                       which the model has no trained row.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.decoder.chat_families import FAMILIES, Family
from tests.decoder.tokenizer_folders import (
    EOT,
    EOT_ID,
    EXTRA,
    FREE,
    listed,
    token,
    write_folder,
)

POST_PROCESSORS = ("none", "bytes", "template", "sequence", "another")
UNKNOWN = "<nowhere>"
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
_FLAGS = {"null": None, "true": True, "false": False}
# Per class: the family whose tokenizer it is given, and there a special token that is not named.
_FAMILY = {
    "LlamaTokenizer": ("mistral", "[INST]"),
    "CodeLlamaTokenizer": ("mistral", "[INST]"),
    "GemmaTokenizer": ("gemma", "<start_of_turn>"),
}
_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": False,
    "use_regex": True,
}


@dataclass(frozen=True)
class Cell:
    """A folder, and the signs of what comes of it.

    Attributes:
      name: "bos" or "eos".
      token: "text", "object", "null" or "unknown": how tokenizer_config.json names it.
    """

    name: str
    token: str
    cls: str
    flag: str
    post_processor: str
    four: str = ""
    five: str = ""
    ours: str = ""

    @property
    def named(self) -> str | None:
        """The text of the token that is named."""
        family, _ = self._family
        own = family.bos if self.name == "bos" else family.eos
        return {"null": None, "unknown": UNKNOWN}.get(self.token, own)

    @property
    def _family(self) -> tuple[Family, str]:
        name, another = _FAMILY.get(self.cls, ("llama3", "<|eot_id|>"))
        return next(one for one in FAMILIES if one.name == name), another

    def write(self, folder: Path) -> Path:
        family, _ = self._family
        named: Any = self.named
        if self.token == "object":
            plain = dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
            named = {"__type": "AddedToken", "content": named, "normalized": True, **plain}
        settings = {"bos_token": family.bos, "eos_token": family.eos, f"{self.name}_token": named}
        if self.name == "eos":
            settings["add_bos_token"] = False
        if self.flag in _FLAGS:
            settings[f"add_{self.name}_token"] = _FLAGS[self.flag]
        if self.cls != "absent":
            settings["tokenizer_class"] = self.cls
        definition = {**family.definition(), "post_processor": self._post_processor()}
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text(json.dumps(definition))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder

    def _post_processor(self) -> dict[str, Any] | None:
        if self.post_processor == "none":
            return None
        if self.post_processor == "bytes":
            return _BYTE_LEVEL
        family, token = self._family
        if self.post_processor != "another":
            token = str(family.bos if self.name == "bos" else family.eos)
        put = {"SpecialToken": {"id": token, "type_id": 0}}
        first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        single = [put, first] if self.name == "bos" else [first, put]
        ids = [family.specials.index(token)]
        template = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, second],
            "special_tokens": {token: {"id": token, "ids": ids, "tokens": [token]}},
        }
        if self.post_processor == "sequence":
            return {"type": "Sequence", "processors": [_BYTE_LEVEL, template]}
        return template


_TABLES: dict[tuple[str, str], str] = {
    ("bos", "text object"): """
        PreTrainedTokenizerFast   absent  ---        ---        +++        +++        xx?
        PreTrainedTokenizerFast   null    ---        ---        +++        +++        xx?
        PreTrainedTokenizerFast   true    ---        ---        +++        +++        xx?
        PreTrainedTokenizerFast   false   ---        ---        +++        +++        xx?
        TokenizersBackend         absent  !--        !--        !++        !++        !x?
        TokenizersBackend         null    !--        !--        !++        !++        !x?
        TokenizersBackend         true    !--        !--        !++        !++        !x?
        TokenizersBackend         false   !--        !--        !++        !++        !x?
        GPT2Tokenizer             absent  ---        ---        +++        +++        xx?
        GPT2Tokenizer             null    ---        ---        +++        +++        xx?
        GPT2Tokenizer             true    ---        ---        +++        +++        xx?
        GPT2Tokenizer             false   ---        ---        +++        +++        xx?
        Qwen2Tokenizer            absent  ---        ---        +++        +++        xx?
        Qwen2Tokenizer            null    ---        ---        +++        +++        xx?
        Qwen2Tokenizer            true    ---        ---        +++        +++        xx?
        Qwen2Tokenizer            false   ---        ---        +++        +++        xx?
        LlamaTokenizerFast        absent  +-?        +-?        +++        +++        +x?
        LlamaTokenizerFast        null    ---        ---        -+?        -+?        -x?
        LlamaTokenizerFast        true    +-?        +-?        +++        +++        +x?
        LlamaTokenizerFast        false   ---        ---        -+?        -+?        -x?
        LlamaTokenizer            absent  +-?        +-?        +++        +++        +x?
        LlamaTokenizer            null    ---        ---        -+?        -+?        -x?
        LlamaTokenizer            true    +-?        +-?        +++        +++        +x?
        LlamaTokenizer            false   ---        ---        -+?        -+?        -x?
        CodeLlamaTokenizer        absent  +++        +++        +++        +++        +++
        CodeLlamaTokenizer        null    -+?        -+?        -+?        -+?        -+?
        CodeLlamaTokenizer        true    +++        +++        +++        +++        +++
        CodeLlamaTokenizer        false   -+?        -+?        -+?        -+?        -+?
        GemmaTokenizer            absent  +-?        +-?        +++        +++        +x?
        GemmaTokenizer            null    ---        ---        -+?        -+?        -x?
        GemmaTokenizer            true    +-?        +-?        +++        +++        +x?
        GemmaTokenizer            false   ---        ---        -+?        -+?        -x?
        CohereTokenizerFast       absent  +-?        +-?        +++        +++        +x?
        CohereTokenizerFast       null    ---        ---        -+?        -+?        -x?
        CohereTokenizerFast       true    +-?        +-?        +++        +++        +x?
        CohereTokenizerFast       false   ---        ---        -+?        -+?        -x?
        GPTNeoXTokenizerFast      absent  ---        ---        ---        ---        ---
        GPTNeoXTokenizerFast      null    ---        ---        ---        ---        ---
        GPTNeoXTokenizerFast      true    +-?        +-?        +-?        +-?        +-?
        GPTNeoXTokenizerFast      false   ---        ---        ---        ---        ---
        OwnTokenizer              absent  !--        !--        !++        !++        !x?
        OwnTokenizer              null    !--        !--        !++        !++        !x?
        OwnTokenizer              true    !-?        !-?        !++        !++        !x?
        OwnTokenizer              false   !--        !--        !+?        !+?        !x?
        absent                    absent  !--        !--        !++        !++        !x?
        absent                    null    !--        !--        !++        !++        !x?
        absent                    true    !-?        !-?        !++        !++        !x?
        absent                    false   !--        !--        !+?        !+?        !x?
    """,
    ("bos", "null"): """
        PreTrainedTokenizerFast   absent  ---        ---        xx?        xx?        xx?
        PreTrainedTokenizerFast   null    ---        ---        xx?        xx?        xx?
        PreTrainedTokenizerFast   true    ---        ---        xx?        xx?        xx?
        PreTrainedTokenizerFast   false   ---        ---        xx?        xx?        xx?
        LlamaTokenizerFast        absent  !--        !--        !x?        !x?        !x?
        LlamaTokenizerFast        null    ---        ---        -x?        -x?        -x?
        LlamaTokenizerFast        true    !--        !--        !x?        !x?        !x?
        LlamaTokenizerFast        false   ---        ---        -x?        -x?        -x?
        GemmaTokenizer            absent  !--        !--        !x?        !x?        !x?
        GemmaTokenizer            null    ---        ---        -x?        -x?        -x?
        GemmaTokenizer            true    !--        !--        !x?        !x?        !x?
        GemmaTokenizer            false   ---        ---        -x?        -x?        -x?
        GPTNeoXTokenizerFast      absent  ---        ---        ---        ---        ---
        GPTNeoXTokenizerFast      null    ---        ---        ---        ---        ---
        GPTNeoXTokenizerFast      true    !--        !--        !--        !--        !--
        GPTNeoXTokenizerFast      false   ---        ---        ---        ---        ---
        OwnTokenizer              absent  !--        !--        !x?        !x?        !x?
        OwnTokenizer              null    !--        !--        !x?        !x?        !x?
        OwnTokenizer              true    !--        !--        !x?        !x?        !x?
        OwnTokenizer              false   !--        !--        !x?        !x?        !x?
        absent                    absent  !--        !--        !x?        !x?        !x?
        absent                    null    !--        !--        !x?        !x?        !x?
        absent                    true    !--        !--        !x?        !x?        !x?
        absent                    false   !--        !--        !x?        !x?        !x?
    """,
    ("bos", "unknown"): """
        PreTrainedTokenizerFast   absent  --!        --!        xx!        xx!        xx!
        PreTrainedTokenizerFast   null    --!        --!        xx!        xx!        xx!
        PreTrainedTokenizerFast   true    --!        --!        xx!        xx!        xx!
        PreTrainedTokenizerFast   false   --!        --!        xx!        xx!        xx!
        LlamaTokenizerFast        absent  +-!        +-!        +x!        +x!        +x!
        LlamaTokenizerFast        null    --!        --!        -x!        -x!        -x!
        LlamaTokenizerFast        true    +-!        +-!        +x!        +x!        +x!
        LlamaTokenizerFast        false   --!        --!        -x!        -x!        -x!
        GPTNeoXTokenizerFast      absent  --!        --!        --!        --!        --!
        GPTNeoXTokenizerFast      null    --!        --!        --!        --!        --!
        GPTNeoXTokenizerFast      true    +-!        +-!        +-!        +-!        +-!
        GPTNeoXTokenizerFast      false   --!        --!        --!        --!        --!
    """,
    ("eos", "text"): """
        PreTrainedTokenizerFast   absent  ---        ---        +++        +++        xx?
        PreTrainedTokenizerFast   null    ---        ---        +++        +++        xx?
        PreTrainedTokenizerFast   true    ---        ---        +++        +++        xx?
        PreTrainedTokenizerFast   false   ---        ---        +++        +++        xx?
        LlamaTokenizerFast        absent  ---        ---        -+?        -+?        -x?
        LlamaTokenizerFast        null    ---        ---        -+?        -+?        -x?
        LlamaTokenizerFast        true    +-?        +-?        +++        +++        +x?
        LlamaTokenizerFast        false   ---        ---        -+?        -+?        -x?
        CodeLlamaTokenizer        absent  ---        ---        ---        ---        ---
        CodeLlamaTokenizer        null    ---        ---        ---        ---        ---
        CodeLlamaTokenizer        true    +-?        +-?        +-?        +-?        +-?
        CodeLlamaTokenizer        false   ---        ---        ---        ---        ---
        GPTNeoXTokenizerFast      absent  ---        ---        ---        ---        ---
        GPTNeoXTokenizerFast      null    ---        ---        ---        ---        ---
        GPTNeoXTokenizerFast      true    +-?        +-?        +-?        +-?        +-?
        GPTNeoXTokenizerFast      false   ---        ---        ---        ---        ---
        OwnTokenizer              absent  !--        !--        !++        !++        !x?
        OwnTokenizer              null    !--        !--        !++        !++        !x?
        OwnTokenizer              true    !-?        !-?        !++        !++        !x?
        OwnTokenizer              false   !--        !--        !+?        !+?        !x?
    """,
    ("eos", "null"): """
        PreTrainedTokenizerFast   absent  ---        ---        xx?        xx?        xx?
        PreTrainedTokenizerFast   null    ---        ---        xx?        xx?        xx?
        PreTrainedTokenizerFast   true    ---        ---        xx?        xx?        xx?
        PreTrainedTokenizerFast   false   ---        ---        xx?        xx?        xx?
        LlamaTokenizerFast        absent  ---        ---        -x?        -x?        -x?
        LlamaTokenizerFast        null    ---        ---        -x?        -x?        -x?
        LlamaTokenizerFast        true    !--        !--        !x?        !x?        !x?
        LlamaTokenizerFast        false   ---        ---        -x?        -x?        -x?
    """,
}


@dataclass(frozen=True)
class Seen:
    """What is made of a folder.

    `tokens` are those of PROBE, with what is put before it. `in_doubt`: whether that is BOS.
    """

    tokens: str
    bos: str = BOS
    eos: str = EOS
    template: str | None = None
    in_doubt: bool = False


@dataclass(frozen=True)
class Row:
    """A folder whose files disagree with each other.

    Attributes:
      five: what transformers 5 makes of it, and 4, where `four` says nothing else.
      ours: what we do, where it is something else; None beside a reason: we refuse the folder.
      why: the reason.
    """

    name: str
    case: dict[str, Any]
    five: Seen
    four: Seen | None = None
    ours: Seen | None = None
    why: str = ""

    def write(self, folder: Path) -> Path:
        return write_folder(folder, **self.case)


PROBE = f"a {EOT} b"
_PLAIN = f"{BOS} a \u0120 {EOT} \u0120 b"
_STRIPPED = f"{BOS} a \u0120 {EOT} b"
_WITHOUT = _PLAIN.removeprefix(f"{BOS} ")
_MAP, _JINJA = "special_tokens_map.json", "chat_template.jinja"
_LIST = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "config"}]
_FLAGGED: dict[str, Any] = {"cls": "LlamaTokenizerFast", "config": {"add_bos_token": True}}
_CONTRADICT = "The files contradict each other on the id, and which one the model read is not said."
ROWS: tuple[Row, ...] = (
    Row(
        "added_tokens_decoder: other flags",
        {"config": listed({EOT_ID: token(EOT, rstrip=True)})},
        Seen(_STRIPPED),
    ),
    Row(
        "added_tokens_decoder: other flags, beside a flag that agrees",
        {
            **_FLAGGED,
            "config": {**listed({EOT_ID: token(EOT, rstrip=True)}), "add_bos_token": True},
        },
        Seen(_STRIPPED),
    ),
    Row(
        "added_tokens_decoder: a token that tokenizer.json lacks",
        {"without": [EOT], "config": listed({EOT_ID: token(EOT)})},
        Seen(_PLAIN),
    ),
    Row(
        "added_tokens_decoder: another id",
        {"config": listed({1: token(EOT)})},
        Seen(_PLAIN),
        why=_CONTRADICT,
    ),
    Row(
        "added_tokens_decoder: another id of a new token",
        {"config": listed({FREE + 9: token(EXTRA)})},
        Seen(_PLAIN),
        why=_CONTRADICT,
    ),
    Row(
        "special_tokens_map: another EOS",
        {"files": {_MAP: {"eos_token": token(EOT)}}},
        Seen(_PLAIN, eos=EOT),
    ),
    Row(
        "special_tokens_map: another BOS",
        {"files": {_MAP: {"bos_token": EOT}}},
        Seen(_PLAIN, bos=EOT),
        ours=Seen(_WITHOUT, bos=EOT, in_doubt=True),
        why="Both releases put a token there that is not the one named.",
    ),
    Row(
        "special_tokens_map: another BOS, and a flag",
        {**_FLAGGED, "files": {_MAP: {"bos_token": EOT}}},
        Seen(_PLAIN, bos=EOT),
        four=Seen(f"{EOT} {_WITHOUT}", bos=EOT),
        ours=Seen(_WITHOUT, bos=EOT, in_doubt=True),
        why="The releases differ.",
    ),
    Row(
        "special_tokens_map: BOS is named nowhere else",
        {
            **_FLAGGED,
            "config": {"bos_token": None, "add_bos_token": True},
            "files": {_MAP: {"bos_token": token(BOS)}},
        },
        Seen(_PLAIN),
    ),
    Row(
        "special_tokens_map: another BOS, which does not count beside added_tokens_decoder",
        {"config": listed({EOT_ID: token(EOT)}), "files": {_MAP: {"bos_token": EOT}}},
        Seen(_PLAIN),
    ),
    Row(
        "chat_template: a file beside one in the config",
        {"config": {"chat_template": "config"}, "files": {_JINJA: "file"}},
        Seen(_PLAIN, template="file"),
    ),
    Row(
        "chat_template: a file beside a list in the config",
        {"config": {"chat_template": _LIST}, "files": {_JINJA: "file"}},
        Seen(_PLAIN, template="file"),
    ),
    Row(
        "chat_template: a list in the config",
        {"config": {"chat_template": _LIST}},
        Seen(_PLAIN, template="config"),
    ),
)


def cells() -> Iterator[Cell]:
    """Every cell of the tables."""
    for (name, spellings), table in _TABLES.items():
        for line in table.strip().splitlines():
            cls, flag, *signs = line.split()
            for post_processor, (four, five, ours) in zip(POST_PROCESSORS, signs, strict=True):
                for spelling in spellings.split():
                    yield Cell(name, spelling, cls, flag, post_processor, four, five, ours)


def sign(named: str | None, put: list[str]) -> str:
    """The sign of the tokens that are put before or after a text."""
    return "-" if not put else "+" if put == [named] else "x"


def put_there(name: str, whole: list[int], text: list[int]) -> list[int]:
    """The ids that were put before (or after) a text's own."""
    first = next(at for at in range(len(whole)) if whole[at : at + len(text)] == text)
    return whole[:first] if name == "bos" else whole[first + len(text) :]
