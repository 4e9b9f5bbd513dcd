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
        ({"k": 4, "exact": 5}, "--exact should be at most --k 4, found 5"),
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


def test_exact_may_exceed_k_where_all_entries_are_exact():
    assert options(tail="none", k=4, exact=8).k == 4


def test_temperatures_follow_the_tail_unless_given():
    assert options().captured_temperatures == (1.0,)
    assert options(tail="none").captured_temperatures == (1.0, 2.0, 4.0)
    assert options(tail="none", temperatures=(4.0, 1.5, 4.0)).captured_temperatures == (1.5, 4.0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"k": 64, "tail": "none", "temperatures": (1.0, 2.5)},
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
        'dataset = "d"\nteacher = "t"\nout = "o"\nk = 5\nexact = 3\nrows-per-shard = 9\n'
        'keep_parts = true\ntail = "none"\ntemperatures = [1, 2]\n',
    )
    assert parsed(["--config", path]) == PrecomputeOptions(
        "d", "t", "o", k=5, exact=3, rows_per_shard=9, keep_parts=True, tail="none",
        temperatures=(1.0, 2.0),
    )  # fmt: skip
    words = ["--k", "6", f"--config={path}", "--no-keep-parts", "--temperatures", "3", "4"]
    changed = parsed([*words, "--rows_per_shard=2"])
    assert (changed.k, changed.exact, changed.rows_per_shard) == (6, 3, 2)
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
        ('k = 3\n[teacher]\nname = "x"\nkind = 1', None),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path, text, message):
    path = config(tmp_path, text)
    if message is None:
        with pytest.raises((CaptureError, SystemExit)):
            parsed(["--config", path, "--dataset", "d", "--out", "o"])
        return
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
