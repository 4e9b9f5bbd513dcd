"""Options of the commands that look at a cache."""

import json
import shlex
from dataclasses import asdict

import pytest
import tyro

from cache.errors import CacheError
from cache.options import InspectOptions, VerifyOptions


def test_defaults() -> None:
    assert asdict(InspectOptions("c")) == {
        "cache": "c",
        "row": None,
        "position": None,
        "shard": None,
        "temperature": None,
        "json": False,
    }
    assert asdict(VerifyOptions("c")) == {
        "cache": "c",
        "full": False,
        "repair": False,
        "json": False,
    }


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("c", InspectOptions("c")),
        ("c --row 3 --position 17", InspectOptions("c", row=3, position=17)),
        ("c --shard 0 --json", InspectOptions("c", shard=0, json=True)),
        (
            "c --row 0 --position 1 --temperature 2",
            InspectOptions("c", row=0, position=1, temperature=2.0),
        ),
    ],
)
def test_inspect_lines(line: str, options: InspectOptions) -> None:
    assert tyro.cli(InspectOptions, args=shlex.split(line)) == options


def test_verify_lines() -> None:
    assert tyro.cli(VerifyOptions, args=["c", "--full", "--repair"]) == VerifyOptions(
        "c", full=True, repair=True
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position": 1}, "--position needs --row"),
        ({"shard": 1, "row": 1}, "--shard and --row exclude each other"),
        ({"shard": 1, "row": 1, "position": 1}, "--shard and --row exclude each other"),
        ({"temperature": 2.0}, "--temperature needs --position"),
        ({"temperature": 2.0, "row": 1}, "--temperature needs --position"),
    ],
)
def test_what_does_not_go_together(fields: dict[str, int], message: str) -> None:
    with pytest.raises(CacheError, match=message):
        InspectOptions("c", **fields)  # type: ignore[arg-type]


def test_options_are_jsonable() -> None:
    assert json.loads(json.dumps(asdict(InspectOptions("c", row=0))))["row"] == 0
