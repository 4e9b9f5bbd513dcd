"""Options of the commands that look at a cache."""

import json
import shlex
from dataclasses import asdict
from typing import Any

import pytest

from cache.arguments import parse
from cache.errors import CacheError
from cache.options import CopyOptions, DeriveOptions, InspectOptions, VerifyOptions


def test_defaults() -> None:
    assert asdict(InspectOptions("c")) == {
        "cache": "c",
        "row": None,
        "position": None,
        "shard": None,
        "temperature": None,
        "files": True,
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
    assert parse(InspectOptions, "stillroom", shlex.split(line)) == options


def test_verify_lines() -> None:
    assert parse(VerifyOptions, "stillroom", ["c", "--full", "--repair"]) == VerifyOptions(
        "c", full=True, repair=True
    )


def test_copy_lines() -> None:
    found = parse(CopyOptions, "stillroom", ["c", "s3://bucket/c"])
    assert asdict(found) == {"source": "c", "destination": "s3://bucket/c"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position": 1}, "--position needs --row"),
        ({"shard": 1, "row": 1}, "--shard and --row exclude each other"),
        ({"shard": 1, "row": 1, "position": 1}, "--shard and --row exclude each other"),
        ({"temperature": 2.0}, "--temperature needs --position"),
        ({"temperature": 2.0, "row": 1}, "--temperature needs --position"),
        ({"files": False, "row": 1}, "--no-files is of the summary"),
        ({"files": False, "shard": 0}, "--no-files is of the summary"),
    ],
)
def test_what_does_not_go_together(fields: dict[str, int], message: str) -> None:
    with pytest.raises(CacheError, match=message):
        InspectOptions("c", **fields)  # type: ignore[arg-type]


def test_options_are_jsonable() -> None:
    assert json.loads(json.dumps(asdict(InspectOptions("c", row=0))))["row"] == 0


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("a b", DeriveOptions(("a", "b"))),
        ("a b c --k 4 --exact 2", DeriveOptions(("a", "b", "c"), k=4, exact=2)),
        (
            "a b --temperatures 1 2 --tail drop",
            DeriveOptions(("a", "b"), temperatures=(1.0, 2.0), tail="drop"),
        ),
        ("--rows 3:9 --sample 0.5 a b", DeriveOptions(("a", "b"), rows="3:9", sample=0.5)),
        (
            "a b --sample 100 --seed 3 --rows-per-shard 8",
            DeriveOptions(("a", "b"), sample=100.0, seed=3, rows_per_shard=8),
        ),
        (
            "a b --logprobs rounded --mantissa-bits 4",
            DeriveOptions(("a", "b"), logprobs="rounded", mantissa_bits=4),
        ),
    ],
)
def test_derive_lines(line: str, options: DeriveOptions) -> None:
    found = parse(DeriveOptions, "stillroom", shlex.split(line))
    assert found == options
    assert (*found.sources, found.out) == found.places


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"places": ()}, "at least one cache to derive from"),
        ({"places": ("a",)}, "at least one cache to derive from"),
        ({"places": ("a", " ")}, "at least one cache to derive from"),
        ({"k": 0}, "--k should be at least 1, found 0"),
        ({"exact": 0}, "--exact should be at least 1"),
        ({"rows_per_shard": 0}, "--rows-per-shard should be at least 1"),
        ({"mantissa_bits": 11}, "--mantissa-bits should be between 1 and 10"),
        ({"seed": -1}, "--seed should be between 0"),
        ({"seed": 2**32}, "--seed should be between 0"),
        ({"rows": "3"}, "--rows should be two row numbers, such as 0:1000, found '3'"),
        ({"rows": "-3:5"}, "--rows should be two row numbers"),
        ({"sample": 0.0}, "--sample should be a share below 1, or a whole number"),
        ({"sample": -2.0}, "--sample should be"),
        ({"sample": 1.5}, "--sample should be"),
        ({"sample": float("nan")}, "--sample should be"),
        ({"sample": float("inf")}, "--sample should be"),
    ],
)
def test_derive_options_that_make_no_sense(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheError, match=message):
        DeriveOptions(**{"places": ("a", "b"), **fields})
