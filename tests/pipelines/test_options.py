"""Options: what is refused, defaults that depend on others, and the way through a file."""

import dataclasses
import math

import pytest

from cache.arguments import parse
from pipelines.errors import CaptureError
from pipelines.options import PrecomputeOptions, config_words, read_options

GIVEN = {"dataset": "corpus.jsonl", "teacher": "teacher", "out": "cache"}


def options(**changes) -> PrecomputeOptions:
    return PrecomputeOptions(**{**GIVEN, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": ""}, "--dataset should be given, found ''"),
        ({"teacher": " "}, "--teacher should be given"),
        ({"out": ""}, "--out should be given"),
        ({"k": 0}, "--k should be at least 1, found 0"),
        ({"exact": 0}, "--exact should be at least 1"),
        ({"k": 4, "exact": 5}, "--exact 5 should be less than --k 4: with --tail sampled"),
        ({"k": 4, "exact": 4}, "--exact 4 should be less than --k 4: with --tail sampled"),
        ({"k": 1}, "--k 1 with --tail sampled leaves no entry to draw.* --k 2 or more, or --tail"),
        ({"k": 1, "exact": 1}, "--k 1 with --tail sampled leaves no entry to draw"),
        ({"tail": "none", "exact": 4}, "--exact 4 is of --tail sampled and does nothing"),
        ({"tail": "none", "exact": 8}, "--exact 8 is of --tail sampled"),
        ({"tail": "none", "seed": 0}, "--seed 0 is of --tail sampled .* or give --tail sampled"),
        ({"logprobs": "float32", "mantissa_bits": 3}, "--mantissa-bits 3 is of --logprobs rounded"),
        ({"logprobs": "float16", "mantissa_bits": 6}, "--mantissa-bits 6 is of --logprobs rounded"),
        (
            {"runner": "DaskRunner", "workers": 2},
            "--workers 2 has no effect with --runner Dask",
        ),
        ({"length": 1}, "--length should be at least 2"),
        ({"overlap": 0}, "--overlap should be at least 1"),
        ({"length": 8, "overlap": 8}, "--overlap should be less than --length 8, found 8"),
        ({"seed": -1}, "--seed should be between 0 and"),
        ({"seed": 2**32}, "--seed should be between 0 and"),
        ({"mantissa_bits": 0}, "--mantissa-bits should be between 1 and 10"),
        ({"mantissa_bits": 11}, "--mantissa-bits should be between 1 and 10"),
        ({"limit": 0}, "--limit should be at least 1"),
        ({"vocabulary": 0}, "--vocabulary should be at least 1"),
        ({"micro_batch": 0}, "--micro-batch should be at least 1"),
        ({"chunk": 0}, "--chunk should be at least 1"),
        ({"rows_per_shard": 0}, "--rows-per-shard should be at least 1"),
        ({"documents_per_part": 0}, "--documents-per-part should be at least 1"),
        ({"workers": 0}, "--workers should be at least 1"),
        ({"temperatures": (0.0,)}, "--temperatures should be above 0"),
        ({"temperatures": (-1.0,)}, "--temperatures should be above 0"),
        ({"temperatures": ()}, "--temperatures should be above 0"),
        ({"temperatures": (math.nan,)}, "--temperatures should be above 0"),
        ({"temperatures": (math.inf,)}, "--temperatures should be above 0"),
        ({"temperatures": (1.0, 2.0)}, "--temperatures should be one temperature when the tail"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(changes, message):
    with pytest.raises(CaptureError, match=message):
        options(**changes)


@pytest.mark.parametrize(
    ("k", "exact"),
    [(2, 1), (3, 1), (4, 2), (8, 4), (9, 4), (15, 7), (16, 8), (17, 8), (32, 8), (128, 8)],
)
def test_the_least_number_of_exact_entries_follows_k(k, exact):
    assert options(k=k).captured_exact == exact
    assert options(k=k, tail="none").captured_exact == k
    assert options(k=k, exact=k - 1).captured_exact == k - 1


def test_what_is_unset_has_a_value_all_the_same():
    assert (options().captured_seed, options().captured_mantissa_bits) == (0, 6)
    given = options(seed=3, mantissa_bits=4)
    assert (given.captured_seed, given.captured_mantissa_bits) == (3, 4)


def test_temperatures_follow_the_tail_unless_given():
    assert options().captured_temperatures == (1.0,)
    assert options(tail="none").captured_temperatures == (1.0, 2.0, 4.0)
    assert options(tail="none", temperatures=(4.0, 1.5, 4.0)).captured_temperatures == (1.5, 4.0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"k": 64, "tail": "none", "temperatures": (1.0, 2.5)},
        {"logprobs": "float32", "tail": "none"},
        {"k": 8, "exact": 3, "seed": 0, "mantissa_bits": 6},
        {"keep_parts": True, "limit": 7, "name": "en", "tokenizer": 'a "b" \\c'},
        {"dataset": "dir/ä*.jsonl", "seed": 2**32 - 1, "eos": "on", "bos": "off"},
    ],
)
def test_a_file_written_from_options_reads_back_as_the_same(changes, tmp_path):
    wanted = options(**changes)
    (tmp_path / "config.toml").write_text(wanted.to_toml())
    assert PrecomputeOptions(**read_options(tmp_path / "config.toml")) == wanted
    words = config_words(["--config", str(tmp_path / "config.toml")])
    assert parse(PrecomputeOptions, "stillroom", words) == wanted


def parsed(words: list[str]) -> PrecomputeOptions:
    return parse(PrecomputeOptions, "stillroom", config_words(words))


def config(tmp_path, text: str) -> str:
    path = tmp_path / "options.toml"
    path.write_text(text)
    return str(path)


def test_the_command_line_wins_over_the_file(tmp_path):
    path = config(
        tmp_path,
        'dataset = "d"\nteacher = "t"\nout = "o"\nk = 5\nlength = 7\nrows-per-shard = 9\n'
        'keep_parts = true\ntail = "none"\ntemperatures = [1, 2]\n',
    )
    assert parsed(["--config", path]) == PrecomputeOptions(
        "d", "t", "o", k=5, length=7, rows_per_shard=9, keep_parts=True, tail="none",
        temperatures=(1.0, 2.0),
    )  # fmt: skip
    words = ["--k", "6", f"--config={path}", "--no-keep-parts", "--temperatures", "3", "4"]
    changed = parsed([*words, "--rows_per_shard=2"])
    assert (changed.k, changed.length, changed.rows_per_shard) == (6, 7, 2)
    assert changed.keep_parts is False
    assert changed.temperatures == (3.0, 4.0)


def test_a_value_that_is_called_like_an_option_hides_nothing(tmp_path):
    path = config(tmp_path, 'dataset = "d"\nteacher = "t"\nout = "o"\nk = 15\nseed = 3\n')
    changed = parsed(["--config", path, "--column", "k", "--split", "seed"])
    assert (changed.column, changed.split, changed.k, changed.seed) == ("k", "seed", 15, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k = ", "is not TOML"),
        ("colour = 3\nkk = 1", "has unknown options: colour, kk. There are: beam_options, bos"),
        ('k = 3\n[teacher]\nname = "x"\nkind = 1', "has a table for teacher; expected a value"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path, text, message):
    path = config(tmp_path, text)
    with pytest.raises(CaptureError, match=message):
        config_words(["--config", path])


def test_a_file_that_is_not_there_or_not_named(tmp_path):
    with pytest.raises(CaptureError, match=r"cannot read the config file .*nowhere\.toml: No such"):
        config_words(["--config", str(tmp_path / "nowhere.toml")])
    with pytest.raises(CaptureError, match="--config needs a file"):
        config_words(["--k", "3", "--config"])
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(CaptureError, match="is not TOML"):
        config_words([f"--config={tmp_path / 'binary.toml'}"])


def test_every_option_is_documented(capsys):
    with pytest.raises(SystemExit) as stop:
        parsed(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(PrecomputeOptions):
        assert f"--{field.name.replace('_', '-')}" in text
