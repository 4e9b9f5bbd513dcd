"""Options of compare: settings by their words, and what is refused by its name."""

import dataclasses
import math
from pathlib import Path

import pytest

from pipelines.compare_options import (
    ROUNDINGS,
    SETTINGS,
    CompareOptions,
    Setting,
    parse_settings,
)
from pipelines.errors import CaptureError
from pipelines.options import PrecomputeOptions

GIVEN = {"teacher": "teacher", "dataset": "corpus.jsonl"}


def options(**changes) -> CompareOptions:
    return CompareOptions(**{**GIVEN, **changes})


def test_every_entry_with_every_rounding():
    found = parse_settings(("exact:64", "sampled:32/8", "exact:64"), ("float16", "rounded:4"))
    assert found == (
        Setting("none", 64, 64, "float16", 6),
        Setting("none", 64, 64, "rounded", 4),
        Setting("sampled", 32, 8, "float16", 6),
        Setting("sampled", 32, 8, "rounded", 4),
    )
    assert [x.name for x in found[1:3]] == ["exact 64, 4 bits", "sampled 32, exact 8, float16"]
    assert len(options().wanted()) == len(SETTINGS) * len(ROUNDINGS)


def test_the_words_of_a_setting_are_the_options_of_a_capture():
    for setting in options().wanted():
        words = iter(setting.words.split())
        given = {name.removeprefix("--").replace("-", "_"): next(words) for name in words}
        kinds = {"k": int, "exact": int, "mantissa_bits": int}
        values = {name: kinds.get(name, str)(value) for name, value in given.items()}
        capture = PrecomputeOptions(dataset="d", teacher="t", out="o", **values)
        encoding = setting.encoding(512, 50_000, (1.0, 2.0, 4.0), 256)
        assert (capture.k, capture.tail) == (encoding.k, encoding.tail)
        assert capture.logprobs == encoding.logprobs
        assert capture.captured_mantissa_bits == encoding.mantissa_bits
        assert capture.captured_temperatures == encoding.temperatures
        if setting.tail == "sampled":
            assert capture.captured_exact == setting.exact


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": ("exact",)}, "--settings has 'exact'; expected exact:K"),
        ({"settings": ("exact:0",)}, "--settings has 'exact:0'"),
        ({"settings": ("exact:-3",)}, "--settings has 'exact:-3'"),
        ({"settings": ("sampled:8",)}, "--settings has 'sampled:8'"),
        ({"settings": ("sampled:8/8",)}, "--settings has 'sampled:8/8'"),
        ({"settings": ("sampled:8/0",)}, "--settings has 'sampled:8/0'"),
        ({"settings": ()}, "at least one each"),
        ({"roundings": ()}, "at least one each"),
        ({"roundings": ("rounded:0",)}, "--roundings has 'rounded:0'"),
        ({"roundings": ("rounded:11",)}, "--roundings has 'rounded:11'"),
        ({"roundings": ("bfloat16",)}, "--roundings has 'bfloat16'"),
        ({"rows": 0}, "--rows should be at least 1, found 0"),
        ({"batch": 0}, "--batch should be at least 1"),
        ({"seed": -1}, "--seed should be between 0 and"),
        ({"budget": 0.0}, "--budget should be above 0"),
        ({"budget": math.nan}, "--budget should be above 0"),
        ({"temperatures": ()}, "--temperatures should be above 0"),
        ({"temperatures": (0.0,)}, "--temperatures should be above 0, found 0.0"),
        ({"temperatures": (1.0, math.nan)}, "--temperatures should be above 0, found 1.0 nan"),
        (
            {"cache": "c", "teacher": None, "dataset": None, "temperatures": (2.0,)},
            "--temperatures and a CACHE exclude each other",
        ),
        (
            {"cache": "c", "teacher": None, "dataset": None, "length": 64},
            "--length and a CACHE exclude each other",
        ),
        *(
            (
                {"cache": "c", "teacher": None, "dataset": None, name: value},
                f"--{name} and a CACHE exclude each other",
            )
            for name, value in {
                "length": 512,
                "layout": "pack",
                "bos": "auto",
                "precision": "float32",
                "temperatures": (1.0, 2.0, 4.0),
            }.items()
        ),
        (
            {"settings": ("sampled:8/1",), "renormalise": True},
            "--renormalise is of exact entries, and --settings asks for none",
        ),
        ({"plot": Path("nowhere/errors.png")}, "there is no folder nowhere"),
        ({"dataset": None}, "needs --teacher and --dataset, or a CACHE"),
        ({"teacher": None}, "needs --teacher and --dataset, or a CACHE"),
        ({"cache": "cache"}, "--teacher and a CACHE exclude each other"),
        ({"cache": "c", "teacher": None}, "--dataset and a CACHE exclude each other"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(changes, message):
    with pytest.raises(CaptureError, match=message):
        options(**changes)


def test_from_a_cache_neither_student_nor_budget():
    CompareOptions(cache="cache")
    with pytest.raises(CaptureError, match="--student and a CACHE exclude"):
        CompareOptions(cache="cache", student="student")
    with pytest.raises(CaptureError, match="--budget needs --teacher and --dataset"):
        CompareOptions(cache="cache", budget=80.0)


def test_temperatures_always_have_1():
    assert options(temperatures=(4.0, 2.0, 4.0)).measured_temperatures == (1.0, 2.0, 4.0)
    assert options(temperatures=(3.0,)).measured_temperatures == (1.0, 3.0)


def test_the_rows_are_those_of_a_capture_with_the_same_options():
    changes = {
        "name": "en",
        "split": "test",
        "revision": "r",
        "column": "body",
        "text_unit": "line",
        "teacher_revision": "t",
        "tokenizer": "tok",
        "vocabulary": 77,
        "precision": "bfloat16",
        "layout": "pad",
        "length": 99,
        "bos": "on",
    }
    found = dataclasses.asdict(options(**changes).capture("out"))
    assert {name: found[name] for name in changes} == changes
