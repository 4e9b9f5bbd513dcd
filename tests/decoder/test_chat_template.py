"""The Jinja program of a chat template: what it is given, what it may not do, and the day."""

import datetime
import time
from typing import Any

import pytest

from decoder import chat_template
from decoder.chat import encode_chat, encode_turns, render_chat
from decoder.errors import DecoderError
from tests.decoder.chat_families import CHATML, CONVERSATION
from tests.decoder.test_chat import BY_NAME, assistant, user, with_template

DAY = datetime.date(2024, 7, 6)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if %}", "not understood: line 1: Expected an expression"),
        ("{{ messages | random }}", "not understood: line 1: No filter named 'random'"),
        ("{{ lipsum() }}", r"fails at message 1 of 2 \(role 'user'\): 'lipsum' is undefined"),
        ("{{ unk_token }}", "uses unk_token; of the tokenizer's special tokens only bos_token"),
        ("{{ ''.__class__ }}", r"fails at message 1 .* attribute '__class__' .* is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "is unsafe"),
        ("{{ messages.append(1) }}", "fails at message 1 of 2.* attribute 'append' .* is unsafe"),
        ("{{ messages[0].content + 1 }}", "fails at message 1 of 2.*: TypeError: "),
        ("{{ messages[1].role.x.y }}", r"fails at message 1 of 2 .* has no attribute|undefined"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ range(1000000) | length }}", "OverflowError: Range too big"),
        ("{{ 'a' * 10**18 }}", "fails at message 1 of 2.*: MemoryError"),
        ("{{ 'a' | center(10**18) }}", "fails at message 1 of 2.*: (Memory|Overflow)Error"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "not understood: RecursionError"),
        ("{% if 1 %}" * 400 + "{% endif %}" * 400, "not understood: (RecursionError|SyntaxError)"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails at .*: RecursionError"),
        ("{{ '\\ud800' }}", "fails at message 1 of 2 .* writes half of a surrogate pair"),
        ("{{ strftime_now('%H:%M') }}", "it writes the date, which would give other tokens"),
        (
            "{% for m in messages %}{% if m.role == 'assistant' %}"
            "{{ raise_exception('no ' + m.role + ' here') }}{% endif %}{% endfor %}",
            r"fails at message 2 of 2 \(role 'assistant'\): no assistant here",
        ),
    ],
)
def test_templates_that_fail(template: str, expected: str) -> None:
    with pytest.raises(DecoderError, match=expected):
        render_chat(with_template(template), [user("a"), assistant("b")])


@pytest.mark.parametrize(
    ("printed", "kind"),
    [
        ("strftime_now", "function"),
        ("raise_exception", "function"),
        ("namespace()", "Namespace"),
        ("joiner()", "Joiner"),
        ("self", "TemplateReference"),
        ("messages[0].items", "builtin_function_or_method"),
        ("messages[0].items()", "dict_items"),
        ("messages | map(attribute='role')", "generator"),
        ("messages[0].content.encode()", "bytes"),
        ("[1, {'a': (namespace(),)}]", "list"),
        ("{'a': cycler('a')}", "dict"),
    ],
)
def test_objects_are_not_printed(printed: str, kind: str) -> None:
    """Their text has a place in memory: other bytes in each process."""
    template = with_template("{% for m in messages %}{{ " + printed + " }}{% endfor %}")
    with pytest.raises(DecoderError, match=f"fails at .*: it prints a value of the type {kind},"):
        render_chat(template, [user("a"), assistant("b")])


@pytest.mark.parametrize(
    "printed", ["joiner() ~ ''", "joiner() | string", "'%s' % joiner()", "[joiner()] | join"]
)
def test_places_in_memory_are_not_printed(printed: str) -> None:
    with pytest.raises(DecoderError, match=r"at message 1 of 1.*: it prints <.* at 0x.*>, a"):
        render_chat(with_template("{{ " + printed + " }}"), [user("a")])
    said = "<function f at 0x7f12>"
    assert render_chat(with_template("{{ messages[0].content }}"), [user(said)]) == said
    assert render_chat(with_template("a" + said), [user("a")]) == "a" + said


def test_plain_values_are_printed() -> None:
    template = "{{ [1, 2.5, true, none, ('a',)] }}{{ {'a': messages[0]} }}{{ nothing }}{{ none }}"
    assert render_chat(with_template(template), [user("b")]) == (
        "[1, 2.5, True, None, ('a',)]{'a': {'role': 'user', 'content': 'b'}}None"
    )


def test_roles_that_a_template_refuses() -> None:
    llama, gemma = BY_NAME["llama2"].tokenizer(), BY_NAME["gemma"].tokenizer()
    with pytest.raises(DecoderError, match=r"fails at message 3 of 3 \(role 'user'\): roles must"):
        encode_chat(llama, [CONVERSATION[0], user("a"), user("b")])
    with pytest.raises(DecoderError, match=r"message 1 of 2 \(role 'system'\): no system role"):
        encode_chat(gemma, CONVERSATION[:2])


def test_what_a_template_is_given() -> None:
    def text(template: str, **settings: Any) -> str:
        return render_chat(with_template(template, **settings), [user("é<b>")])

    assert text("{{ bos_token }}|{{ eos_token }}") == "<|im_start|>|<|im_end|>"
    assert text("[{{ bos_token }}]", bos=None) == "[]"
    assert text("{{ nothing }}{% if nothing %}a{% else %}b{% endif %}{{ nothing ~ 'c' }}") == "bc"
    assert text("{{ tools is none }} {{ documents is none }}") == "True True"
    assert text("{{ messages | tojson }}") == '[{"role": "user", "content": "é<b>"}]'
    assert text("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == (
        '{\n "a": 2,\n "b": 1\n}'
    )
    assert text(
        "{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    ) == ("012")
    assert text("  {% if true %}\na\n  {% endif %}\nb\n") == "a\nb", (
        "trimmed blocks, one end of line"
    )
    assert text("{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}") == "2"


LLAMA31 = (
    "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "{{ bos_token }}Today: {{ date_string }}\n"
)
LLAMA32 = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ bos_token }}Today: {{ date_string }}\n"
)


def test_the_day_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """C25: on two days the same text, or an error that says how to pin the date."""
    asks, has_one = with_template(LLAMA32, "llama3"), with_template(LLAMA31, "llama3")
    prints = with_template("Today: {{ date_string }}", "llama3")
    seen = set()
    for seconds in (1_700_000_000.0, 1_800_000_000.0):
        monkeypatch.setattr(time, "time", lambda seconds=seconds: seconds)
        frozen = type(
            "Frozen",
            (datetime.datetime,),
            {"now": classmethod(lambda cls, tz=None: cls.fromtimestamp(time.time(), tz))},
        )
        monkeypatch.setattr(datetime, "datetime", frozen)
        for tokenizer in (asks, prints):
            for call in (render_chat, encode_chat, encode_turns):
                with pytest.raises(DecoderError, match=r"pass date=datetime.date\(…\), and record"):
                    call(tokenizer, [user("a")])
        seen.add(
            (
                render_chat(has_one, [user("a")]),
                *(render_chat(one, [user("a")], date=DAY) for one in (asks, has_one, prints)),
                encode_chat(asks, [user("a")], date=DAY).tobytes(),
                encode_turns(asks, [user("a")], date=DAY)[0].tobytes(),
            )
        )
    (only,) = seen
    bos = "<|begin_of_text|>"
    assert only[0] == f"{bos}Today: 26 Jul 2024"
    assert only[1:4] == (f"{bos}Today: 06 Jul 2024",) * 2 + ("Today: 06 Jul 2024",)
    later = render_chat(asks, [user("a")], date=datetime.date(2025, 1, 2))
    assert later == f"{bos}Today: 02 Jan 2025"


@pytest.mark.parametrize("day", [DAY, datetime.date(2025, 12, 31), datetime.date(2023, 3, 1)])
@pytest.mark.parametrize(
    "form", ["%d %b %Y", "%Y-%m-%d", "%A, %-d %B %Y", "%a %y %j %-m", "100 %%", "none", ""]
)
def test_dates_are_written_as_strftime_does(day: datetime.date, form: str) -> None:
    tokenizer = with_template("{{ strftime_now('" + form + "') }}")
    assert render_chat(tokenizer, [user("a")], date=day) == day.strftime(form)


@pytest.mark.parametrize("form", ["%H:%M", "%c", "%-H", "%"])
def test_parts_of_a_date_that_are_no_day(form: str) -> None:
    tokenizer = with_template("{{ strftime_now('" + form + "') }}")
    with pytest.raises(DecoderError, match=f"it asks for {form[:2]}.* of the date; known are %d"):
        render_chat(tokenizer, [user("a")], date=DAY)


def test_a_template_cannot_change_the_messages() -> None:
    messages = [user("a"), assistant("b")]
    changes = with_template("{% set messages[0].content = 'c' %}")
    with pytest.raises(DecoderError, match="not understood"):
        render_chat(changes, messages)
    with pytest.raises(DecoderError, match="'update' of 'dict' object is unsafe"):
        render_chat(with_template("{{ messages[0].update({'content': 'c'}) }}"), messages)
    assert messages == [user("a"), assistant("b")]


def test_templates_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_template(CHATML + "{# once #}")
    render_chat(tokenizer, CONVERSATION)

    def fail(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(chat_template.ImmutableSandboxedEnvironment, "from_string", fail)
    assert encode_chat(tokenizer, CONVERSATION).size > 0
