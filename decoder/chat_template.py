"""The Jinja program that is a chat template, run so that its text depends on its input alone."""

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from decoder.errors import DecoderError

# Names that a template's `{% generation %}` and `{% endgeneration %}` print; mostly undefined.
_MARKS = ("_generation_starts", "_generation_ends")

# What a Jinja template can raise, beside Jinja's own errors, for what it is given.
_TEMPLATE_FAILS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)

_NO_DATE = (
    "it writes the date, which would give other tokens on another day. Pin it: pass "
    "date=datetime.date(…), and record it with the settings"
)
_MONTHS = "January February March April May June July August September October November December"
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"


def render(
    source: str | None,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool,
    special_tokens: Mapping[str, str | None],
    date: datetime.date | None,
    marks: tuple[str, str] | None = None,
) -> str:
    """The text that a template makes of messages.

    Args:
      source: the template; None is refused.
      special_tokens: `bos_token` and `eos_token`; one that is None is undefined in the template.
      date: what `strftime_now` and `date_string` give; None: the first is an error, and the
        second undefined, as a template that has a date of its own asks for.
      marks: texts to write before and after what is in a `{% generation %}` block.

    Raises `DecoderError` with the number, from 1, of the message at which the template fails.
    """
    template = _compiled(source)
    given: dict[str, Any] = {
        "add_generation_prompt": add_generation_prompt,
        "tools": None,
        "documents": None,
        "strftime_now": lambda form: _format_date(date, form),
        **{name: token for name, token in special_tokens.items() if token is not None},
    }
    if date is not None:
        given["date_string"] = _format_date(date, "%d %b %Y")
    if marks is not None:
        given.update(zip(_MARKS, marks, strict=True))

    def attempt(count: int) -> str:
        text = template.render(messages=[dict(message) for message in messages[:count]], **given)
        text.encode()
        _refuse_addresses(text, source or "", messages)
        return text

    try:
        return attempt(len(messages))
    except _TEMPLATE_FAILS as error:
        number = _first_failing(attempt, len(messages))
        raise DecoderError(
            f"the chat template fails at message {number} of {len(messages)} (role "
            f"{messages[number - 1]['role']!r}): {_reason(error)}"
        ) from error


def _first_failing(attempt: Callable[[int], str], count: int) -> int:
    """How many messages it takes for a rendering to fail that fails with all `count`."""
    for number in range(1, count):
        try:
            attempt(number)
        except _TEMPLATE_FAILS:
            return number
    return count


def _reason(error: Exception) -> str:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    if isinstance(error, jinja2.TemplateError):
        return str(error.message)
    if isinstance(error, UnicodeEncodeError):
        return "it writes half of a surrogate pair, which is no Unicode text"
    return f"{type(error).__name__}: {error}"


@lru_cache(maxsize=8)
def _compiled(source: str | None) -> jinja2.Template:
    if source is None:
        raise DecoderError(
            "the tokenizer has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json). Name the tokenizer of a model that was trained on "
            "conversations"
        )
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=_Undefined,
        finalize=_printable,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlocks],
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = _to_json
    # Random text.
    del environment.globals["lipsum"], environment.filters["random"]
    try:
        names = find_undeclared_variables(environment.parse(source))
        template = environment.from_string(source)
    except (*_TEMPLATE_FAILS, SyntaxError) as error:
        raise DecoderError(f"the chat template is not understood: {_reason(error)}") from error
    known = ("bos_token", "eos_token")
    unknown = sorted(name for name in names if name.endswith("_token") and name not in known)
    if unknown:
        raise DecoderError(
            f"the chat template uses {', '.join(unknown)}; of the tokenizer's special "
            "tokens only bos_token and eos_token are given to it. Write the token's text into the "
            "template"
        )
    return template


def _printable(value: Any) -> Any:
    """What a template prints; of other values the text is another one in each process."""
    if not _is_plain(value):
        raise jinja2.TemplateRuntimeError(
            f"it prints a value of the type {type(value).__name__}, which is no text of its own; "
            "expected a string, a number, or a list or dict of them"
        )
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return type(value) is dict and all(map(_is_plain, [*value, *value.values()]))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | jinja2.Undefined)


_ADDRESS = re.compile(r"<[^<>]* at 0x[0-9a-fA-F]+>")


def _refuse_addresses(text: str, source: str, messages: Sequence[Mapping[str, str]]) -> None:
    """Refuse objects that became text before they were printed, as in `namespace() ~ ''`."""
    given = "".join([source, *(part for message in messages for part in message.values())])
    for found in _ADDRESS.findall(text):
        if found not in given:
            raise jinja2.TemplateRuntimeError(
                f"it prints {found}, a place in memory, which is another one each time"
            )


class _Undefined(jinja2.Undefined):
    """False and empty, but a date that is not pinned and what the sandbox forbids are errors."""

    __slots__ = ()

    def __str__(self) -> str:
        if self._undefined_exception is SecurityError:
            self._fail_with_undefined_error()
        if self._undefined_name == "date_string":
            raise jinja2.TemplateRuntimeError(_NO_DATE)
        return ""


class _GenerationBlocks(Extension):
    """`{% generation %} … {% endgeneration %}`: the text of the assistant, as it stands."""

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        before, after = (nodes.Output([nodes.Name(name, "load")]) for name in _MARKS)
        return nodes.Scope([before, *body, after]).set_lineno(line)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateRuntimeError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape the characters of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _format_date(date: datetime.date | None, form: str) -> str:
    """`strftime` for days alone, in English whatever the process's locale is."""
    if date is None:
        raise jinja2.TemplateRuntimeError(_NO_DATE)
    month, day = _MONTHS.split()[date.month - 1], _DAYS.split()[date.weekday()]
    known = {
        "%d": f"{date.day:02}",
        "%-d": f"{date.day}",
        "%m": f"{date.month:02}",
        "%-m": f"{date.month}",
        "%Y": f"{date.year:04}",
        "%y": f"{date.year % 100:02}",
        "%B": month,
        "%b": month[:3],
        "%A": day,
        "%a": day[:3],
        "%j": f"{date.timetuple().tm_yday:03}",
        "%%": "%",
    }

    def replace(match: re.Match[str]) -> str:
        if match[0] not in known:
            raise jinja2.TemplateRuntimeError(
                f"it asks for {match[0]} of the date; known are {' '.join(known)}"
            )
        return known[match[0]]

    return re.sub(r"%-?.?", replace, form, flags=re.DOTALL)
