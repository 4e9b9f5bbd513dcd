"""Small tokenizers with the special tokens of each family, and templates in its format.

The templates are written for these tests after the formats that the families' papers and model
cards describe; each has what sets its family apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from decoder.tokenizer import Tokenizer, build_tokenizer
from tests.models import SPECIAL, special_tokens, tiny_tokenizer

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Thoughts are kept in what follows the last question alone, where they are written even if empty.
QWEN3 = """\
{%- set ns = namespace(question=0) %}
{%- for message in messages if message.role == 'user' %}
    {%- set ns.question = loop.index0 %}
{%- endfor %}
{%- set seen = namespace(users=-1) %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'user' %}
        {%- set seen.users = seen.users + 1 %}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if seen.users == ns.question %}
            {%- set content = '<think>\\n' + thought + '\\n</think>\\n\\n' + content %}
        {%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA2 = """\
{% if messages[0].role == 'system' %}
{% set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}
{% set turns = messages[1:] %}
{% else %}
{% set system = '' %}
{% set turns = messages %}
{% endif %}
{% for turn in turns %}
{% if (turn.role == 'user') != (loop.index0 is even) %}
{{ raise_exception('roles must take turns: user, assistant, user, …') }}
{% endif %}
{% if turn.role == 'user' %}
{{- bos_token + '[INST] ' + (system if loop.first else '') + turn.content.strip() + ' [/INST]' -}}
{% else %}
{{- ' ' + turn.content.strip() + ' ' + eos_token -}}
{% endif %}
{% endfor %}
"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {{- raise_exception('only user and assistant, found ' + message.role) }}
    {%- endif %}
{%- endfor %}
"""

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

_GEMMA_TURNS = """\
{%- for message in turns %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + (before if loop.first else '') }}
    {{- message.content | trim }}{{ '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('no system role') }}{% endif %}"
    "{% set turns, before = messages, '' %}" + _GEMMA_TURNS
)
GEMMA3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{% set turns, before = messages[1:], messages[0].content + '\n\n' %}"
    "{% else %}{% set turns, before = messages, '' %}{% endif %}" + _GEMMA_TURNS
)

PHI3 = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)

OLMO2 = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}{% else %}{{ '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A family's special tokens and template, and what they make of the tests' conversation.

    Attributes:
      specials: texts of the special tokens; ids count from 0.
      words: how text is split: "bytes", or as SentencePiece does for "llama" or "gemma".
      swallowing: special tokens that take the white space behind them.
      ordinary: further added tokens, not declared special.
      adds_bos: what the tokenizer's post-processor does to plain text.
      end: the end-of-turn token.
      takes_system: whether a conversation may begin with a system message.
      turns: the text of both turns of the assistant in CONVERSATION; None: not alike in the
        whole conversation and in its beginning.
    """

    name: str
    template: str
    specials: Sequence[str]
    bos: str | None
    eos: str
    end: str
    turns: tuple[str, str] | None
    words: str = "bytes"
    swallowing: Sequence[str] = ()
    ordinary: Sequence[str] = ()
    adds_bos: bool = False
    takes_system: bool = True
    text: str = field(default="")

    def tokenizer(self, **settings: Any) -> Tokenizer:
        options = {
            "bos": self.bos,
            "eos": self.eos,
            "adds_bos": None,
            "adds_eos": None,
            "chat_template": self.template,
        }
        return build_tokenizer(self.definition(), **{**options, **settings})

    def definition(self) -> dict[str, Any]:
        makers = {"bytes": _byte_level, "llama": _llama_pieces, "gemma": _gemma_pieces}
        definition = makers[self.words]([*self.specials, *self.ordinary])
        for token in definition["added_tokens"]:
            token["rstrip"] = token["content"] in self.swallowing
            token["special"] = token["content"] not in self.ordinary
        if self.adds_bos:
            assert self.bos is not None
            definition["post_processor"] = _puts_before(self.bos, self.specials.index(self.bos))
        return definition


CONVERSATION = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is the corpus?"},
    {"role": "assistant", "content": "Rows of tokens, é 语."},
    {"role": "user", "content": "And\n\nthe tail?"},
    {"role": "assistant", "content": "The rest\nof the sum."},
]


def _end_after(end: str, before: str = "") -> tuple[str, str]:
    first, second = CONVERSATION[2]["content"], CONVERSATION[4]["content"]
    return (before + first + end, before + second + end)


_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA2_SPECIALS = ("<unk>", "<s>", "</s>")
_GEMMA_SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")

FAMILIES = (
    Family(
        "llama2",
        LLAMA2,
        _LLAMA2_SPECIALS,
        "<s>",
        "</s>",
        "</s>",
        _end_after(" </s>", " "),
        words="llama",
        adds_bos=True,
    ),
    Family(
        "llama3",
        LLAMA3,
        (
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>"),
            *("<|end_header_id|>", "<|eot_id|>"),
        ),
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        _end_after("<|eot_id|>"),
        adds_bos=True,
    ),
    Family(
        "mistral",
        MISTRAL,
        (*_LLAMA2_SPECIALS, "[INST]", "[/INST]"),
        "<s>",
        "</s>",
        "</s>",
        _end_after("</s>", " "),
        words="llama",
        adds_bos=True,
        takes_system=False,
    ),
    Family(
        "smollm2",
        CHATML,
        _IM,
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
        _end_after("<|im_end|>"),
    ),
    Family("qwen2.5", CHATML, _IM, None, "<|im_end|>", "<|im_end|>", _end_after("<|im_end|>")),
    Family(
        "qwen3",
        QWEN3,
        _IM,
        None,
        "<|im_end|>",
        "<|im_end|>",
        None,
        ordinary=("<think>", "</think>"),
    ),
    Family(
        "gemma",
        GEMMA,
        _GEMMA_SPECIALS,
        "<bos>",
        "<eos>",
        "<end_of_turn>",
        _end_after("<end_of_turn>"),
        words="gemma",
        adds_bos=True,
        takes_system=False,
    ),
    Family(
        "gemma3",
        GEMMA3,
        _GEMMA_SPECIALS,
        "<bos>",
        "<eos>",
        "<end_of_turn>",
        _end_after("<end_of_turn>"),
        words="gemma",
        ordinary=("\n\n",),
        adds_bos=True,
    ),
    Family(
        "phi3",
        PHI3,
        (
            *(*_LLAMA2_SPECIALS, "<|endoftext|>", "<|system|>", "<|user|>"),
            *("<|assistant|>", "<|end|>"),
        ),
        "<s>",
        "<|endoftext|>",
        "<|end|>",
        _end_after("<|end|>"),
        words="llama",
        swallowing=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    ),
    Family(
        "olmo2",
        OLMO2,
        ("<|endoftext|>", "<|pad|>"),
        "<|endoftext|>",
        "<|endoftext|>",
        "<|endoftext|>",
        _end_after("<|endoftext|>"),
    ),
)


def conversation(family: Family) -> list[dict[str, str]]:
    return CONVERSATION if family.takes_system else CONVERSATION[1:]


def _byte_level(tokens: Sequence[str]) -> dict[str, Any]:
    """The tests' byte-level BPE with other special tokens, and GPT-2's trimmed offsets."""
    definition = tiny_tokenizer(300)
    ordinary = [token for token in definition["model"]["vocab"] if token not in SPECIAL]
    definition["model"]["vocab"] = {
        token: place for place, token in enumerate([*tokens, *ordinary])
    }
    definition["added_tokens"] = special_tokens(tokens)
    definition["post_processor"] = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    }
    return definition


def _pieces(tokens: Sequence[str]) -> dict[str, Any]:
    """A BPE of characters with bytes to fall back on, "▁" for a space."""
    letters = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,?[]/<>|_\n"
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("\n", "\n"), ("e", "s"), ("o", "f")]
    vocabulary = [
        *tokens,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *letters,
        *("".join(pair) for pair in merges),
    ]
    return {
        **tiny_tokenizer(300),
        "added_tokens": special_tokens(tokens),
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: place for place, token in enumerate(dict.fromkeys(vocabulary))},
            "merges": [list(pair) for pair in merges],
        },
    }


def _spaces() -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


def _llama_pieces(tokens: Sequence[str]) -> dict[str, Any]:
    steps = [{"type": "Prepend", "prepend": "▁"}, _spaces()]
    return {**_pieces(tokens), "normalizer": {"type": "Sequence", "normalizers": steps}}


def _gemma_pieces(tokens: Sequence[str]) -> dict[str, Any]:
    return {**_pieces(tokens), "normalizer": _spaces()}


def _puts_before(token: str, token_id: int) -> dict[str, Any]:
    piece = {"SpecialToken": {"id": token, "type_id": 0}}
    text, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [piece, text],
        "pair": [piece, text, piece, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }
