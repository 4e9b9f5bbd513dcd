"""Typed reading of JSON that somebody else may have edited."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import CacheError
from cache.jsonfields import Fields, as_span, canonical, digest, parse_object

_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def test_the_canonical_form() -> None:
    assert canonical({"b": [1, 2.5], "a": {"ü": None}}) == '{"a":{"ü":null},"b":[1,2.5]}'.encode()
    assert digest({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            canonical({"x": wrong})


@given(_JSON)
def test_a_value_has_one_form_whatever_its_layout(value: Any) -> None:
    once = canonical({"x": value, "a": 1})
    again = json.loads(json.dumps({"a": 1, "x": value}, indent=3))
    assert canonical(again) == once


def test_a_path_that_is_not_utf8_has_a_form() -> None:
    odd = b"models/caf\xe9".decode(errors="surrogateescape")
    assert digest({"source": odd}) != digest({"source": "models/caf"})
    assert parse_object(json.dumps({"source": odd}).encode(), "x") == {"source": odd}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": [-Infinity]}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xef\xbb\xbf{}",
    ],
)
def test_what_is_not_json_is_refused(data: bytes) -> None:
    with pytest.raises(CacheError, match=r"^it is not valid JSON"):
        parse_object(data, "it")


@pytest.mark.parametrize("data", [b"[]", b"1", b"null", b'"x"'])
def test_what_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(CacheError, match="it should be a JSON object, found"):
        parse_object(data, "it")
    with pytest.raises(CacheError, match="it should be a JSON object, found"):
        Fields(json.loads(data), "it")


GOOD: dict[str, Any] = {
    "integer": 3,
    "number": 2.5,
    "text": "x",
    "choice": "a",
    "list": ["x"],
    "numbers": [1, 2.5],
    "object": {"in": 1},
    "span": [1, 2],
}
READ: dict[str, Any] = {
    "integer": lambda fields: fields.integer("integer", 2),
    "number": lambda fields: fields.number("number"),
    "text": lambda fields: fields.text("text"),
    "choice": lambda fields: fields.choice("choice", ("a", "b")),
    "list": lambda fields: fields.list_of("list", str),
    "numbers": lambda fields: fields.numbers("numbers"),
    "object": lambda fields: fields.object("object"),
    "span": lambda fields: fields.span("span"),
}
WRONG: dict[str, list[Any]] = {
    "integer": [None, True, 2.0, "3", 1, -3, [], {}],
    "number": [None, False, "1", [], 10**400],
    "text": [None, 1, True, [], {}],
    "choice": [None, 1, "c", [], ["a"], {}, {"a": 1}],
    "list": [None, "x", [1], ["x", None], [True], {}],
    "numbers": [None, 1, ["x"], [True], [10**400], [None], {}],
    "object": [None, [], "x", 1],
    "span": [[], [1], [2, 1], [-1, 2], [1, 2, 3], ["1", "2"], [1.0, 2.0], [True, 2], 1, {}],
}


@pytest.mark.parametrize("name", list(GOOD))
def test_each_kind_of_field(name: str) -> None:
    expected = {"span": (1, 2), "numbers": (1.0, 2.5)}.get(name, GOOD[name])
    assert READ[name](Fields(GOOD, "it")) == expected
    with pytest.raises(CacheError, match=f"it has no field '{name}'"):
        READ[name](Fields({}, "it"))
    for wrong in WRONG[name]:
        with pytest.raises(CacheError, match=f"it: field '{name}' should be .*, found "):
            READ[name](Fields({name: wrong}, "it"))


def test_long_values_are_cut_in_messages() -> None:
    with pytest.raises(CacheError) as caught:
        Fields({"a": ["x" * 1000]}, "it").text("a")
    assert len(str(caught.value)) < 200


def test_nested_fields_say_where_they_are() -> None:
    with pytest.raises(CacheError, match="it, object has no field 'out'"):
        Fields(GOOD, "it").fields("object").integer("out")


def test_spans() -> None:
    assert Fields({"span": None}, "it").span("span") is None
    assert as_span([0, 0], "it") == (0, 0)
    with pytest.raises(CacheError, match="two non-decreasing integers"):
        as_span(None, "it")
