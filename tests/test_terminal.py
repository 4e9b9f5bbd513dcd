"""What reaches a terminal: in its encoding, without what it would obey; and commands' help."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest

import stillroom
from cache import progress
from cache.format import MANIFEST
from cache.manifest import read_manifest
from cache.storage import Store
from cache.visible import visible
from pipelines.options import AppendOptions, PrecomputeOptions, config_words, read_options
from tests.pipelines import small
from tests.test_cli import run

_TRICKS = "\x1b[31m\u202e\u2028\x85\x0b\x1c\x7f[red]x"
_SPELT = r"\x1b[31m\u202e\u2028\x85\x0b\x1c\x7f[red]x"
_TEXT = f"a\n{_TRICKS}"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    """A folder with a cache of a text, and with a manifest, that would rule the terminal."""
    folder = tmp_path_factory.mktemp("hostile")
    corpus = small.write_corpus(folder / f"{_TRICKS}\n.jsonl", [_TEXT] * 3)
    with pytest.MonkeyPatch.context() as patch:
        small.quick(patch)
        small.capture(folder, dataset=str(corpus), length=32)
    store = Store(folder / "cache")
    manifest, _ = read_manifest(store)
    teacher = {**manifest.teacher, "source": f"{_TRICKS}\ncache  forged", "revision": "\x9b2J"}
    store.write(MANIFEST, replace(manifest, teacher=teacher).to_bytes())
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "CACHE"],
        ["inspect", "CACHE", "--row", "0"],
        ["inspect", "CACHE", "--row", "0", "--position", "3"],
        ["inspect", "CACHE", "--shard", "0"],
        ["inspect", "CACHE", "--json"],
        ["inspect", "CACHE", "--row", "0", "--json"],
        ["verify", "CACHE"],
        ["verify", "CACHE", "--json"],
        ["audit", "CACHE"],
        ["inspect", f"nowhere{_TRICKS}"],
        ["inspect", "CACHE", f"--{_TRICKS}"],
        ["inspect", "CACHE", "--row", _TRICKS],
        [_TRICKS],
        ["precompute", "--config", f"nowhere{_TRICKS}.toml"],
        ["precompute", "--dataset", _TRICKS, "--teacher", _TRICKS, "--out", "x"],
    ],
)
def test_no_text_rules_the_terminal(capsys, hostile, words):
    words = [str(hostile / "cache") if word == "CACHE" else word for word in words]
    _, out, err = run(capsys, *words)
    assert out or err
    for written in (out, err):
        assert visible(written) == written
    if "--json" in words:
        json.loads(out)


def test_no_traceback_rules_the_terminal(hostile):
    done = subprocess.run(
        [sys.executable, "-m", "stillroom", "inspect", f"/nowhere{_TRICKS}", "--debug"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Traceback")
    assert f"/nowhere{_SPELT} is not a cache" in done.stderr


def test_lines_of_a_text_are_those_of_its_line_ends(capsys, hostile):
    _, out, _ = run(capsys, "inspect", str(hostile / "cache"), "--row", "0")
    assert f"  | a\n  | {_SPELT}" in out
    _, out, _ = run(capsys, "inspect", str(hostile / "cache"))
    assert f"teacher               {_SPELT}\\ncache  forged at \\x9b2J, " in out
    assert f"{_SPELT}\\n.jsonl (1 json file), 3 documents" in out


def test_progress_shows_no_markup_and_no_escapes(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    line = progress.Line(f"Copying [red]{_TRICKS}", 0, 2)
    with line:
        line.show(2, f"[b]{_TRICKS}\n", last=True)
        line.say(f"[b]:smile: {_TRICKS}")
        monkeypatch.setattr(line._console, "_force_terminal", True)
        line._console.file = written
        line.say(f"[b]:smile: {_TRICKS}")
    told = written.getvalue().splitlines()
    assert told[0] == f"Copying [red]{_SPELT}: 2/2, [b]{_SPELT}\\n"
    assert told[1] == told[2] == f"[b]:smile: {_SPELT}"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_that_is_not_utf8(monkeypatch, hostile, encoding):
    """Every command's help and refusals, and the views of a cache: written, with no error."""
    place = str(hostile / "cache")
    lines = [[name, *rest] for name in stillroom._COMMANDS for rest in (["--help"], ["--─é"])]
    lines += [
        ["--help"],
        ["inspect", "\udcc3"],
        ["inspect", place],
        ["inspect", place, "--row", "0"],
    ]
    for words in lines:
        written = io.BytesIO(), io.BytesIO()
        for name, stream in zip(("stdout", "stderr"), written, strict=True):
            monkeypatch.setattr(sys, name, io.TextIOWrapper(stream, encoding=encoding))
        with suppress(SystemExit):
            stillroom.main(words)
        sys.stdout.flush()
        sys.stderr.flush()
        told = b"".join(stream.getvalue() for stream in written)
        assert told
        assert told.isascii() or encoding == "latin-1"


def test_a_locale_that_is_not_utf8(hostile, tmp_path):
    """Files are read as UTF-8, and names from files and from the command line mean the same."""
    folder = tmp_path / "é"
    shutil.copytree(hostile / "cache", folder)
    (tmp_path / "o.toml").write_text(f'# ─\nout = "{folder}"\ncolumn = "ü"', encoding="utf-8")
    code = (
        "import sys, stillroom\n"
        "from pipelines.options import read_options\n"
        "found = read_options(sys.argv[2])\n"
        "assert (found['out'], found['column']) == (sys.argv[1], '\\xfc'), found\n"
        "assert stillroom.main(['inspect', sys.argv[1]]) == 0\n"
        "assert stillroom.main(['inspect', '\\udcff']) == 1\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(tmp_path / "o.toml")],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
    )
    assert (done.returncode, done.stdout[:5]) == (0, b"cache"), done.stderr
    assert done.stderr.startswith(rb"stillroom inspect: cannot open '\udcff' as a place")


# Help.


def options_of(command: str, monkeypatch) -> type:
    found = []

    def parse(options: type, name: str, words: list[str]) -> None:
        found.append(options)
        raise SystemExit

    monkeypatch.setattr(stillroom, "_parse", parse)
    with pytest.raises(SystemExit):
        stillroom._COMMANDS[command](["x"])
    monkeypatch.undo()
    return found[0]


@pytest.mark.parametrize("command", stillroom._COMMANDS)
def test_help_shows_every_option_as_it_is_written(capsys, monkeypatch, command):
    options = options_of(command, monkeypatch)
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = run(capsys, command, "--help")
    assert not re.search(r"None|\[\w+ \[|''|\(default: \)", out)
    # An entry begins at the left edge; what goes on is indented.
    entries = [" ".join(entry.split()) for entry in re.split(r"\n  (?=\S)", out)[1:]]
    for field in fields(options):
        flag = f"--{field.name.replace('_', '-')}"
        shown = [entry for entry in entries if re.match(rf"{flag}\b(?!-)", entry)]
        if not shown:  # a positional argument
            assert "Positional" in str(field.type)
            shown = [entry for entry in entries if re.match(r"[A-Z]", entry)]
        text = " ".join(shown)
        assert re.search(r"\S \S.*[.)] \((required|optional|default: .+)\)", text), text
        if field.default is None:
            assert re.search(r"\. Unset: \w.*\. \(optional\)", text), text
        elif field.default is MISSING:
            assert "(required)" in text


def test_an_option_that_cannot_be_is_refused_by_its_name(capsys):
    place = ["--dataset", "x", "--teacher", "y", "--out", "z"]
    for words, told in (
        (["precompute", *place, "--k", "0"], "stillroom precompute: --k should be at least 1"),
        (["derive", "a"], "stillroom derive: derive needs at least one cache"),
        (
            ["train", "a", "--student", "b", "--out", "c", "--alpha", "2"],
            "stillroom train: --alpha",
        ),
        (["audit", "a", "--rows", "0"], "stillroom audit: --rows should be at least 1"),
        (["precompute", *place, "--limit", "many"], "Error parsing --limit: invalid literal"),
    ):
        code, out, err = run(capsys, *words)
        assert (code, out) == (2, "")
        assert told in err
        assert "Options" not in err
        assert "--help" in err


def test_no_word_is_none(capsys):
    options = ["--dataset", "x", "--teacher", "y", "--out", "z", "--limit", "None"]
    assert run(capsys, "precompute", *options)[0] == 2


# Beam's options, which look like ours.


@pytest.mark.parametrize("words", [["--beam-options=--x --k=1"], ["--beam-options", "--x --k=1"]])
def test_beam_options_begin_with_dashes(capsys, monkeypatch, tmp_path, words):
    file = tmp_path / "options.toml"
    file.write_text('dataset = "a"\nteacher = "b"\nout = "c"\nk = 9\nrunner = "Sisyphus"\n')
    asked = []
    monkeypatch.setattr("pipelines.precompute.precompute", asked.append)
    monkeypatch.setattr("pipelines.append.append", asked.append)
    monkeypatch.setattr(stillroom, "_print_capture", lambda done: 0)
    assert run(capsys, "precompute", "--config", str(file), *words)[0] == 0
    given = ["c", "--dataset", "a", "--runner", "Sisyphus"]
    assert run(capsys, "append", *given, *words)[0] == 0
    capture, addition = asked
    assert (capture.beam_options, capture.k, capture.runner) == ("--x --k=1", 9, "Sisyphus")
    assert addition == AppendOptions("c", "a", runner="Sisyphus", beam_options="--x --k=1")


def test_options_from_a_file_may_begin_with_dashes(tmp_path):
    file = tmp_path / "options.toml"
    options = PrecomputeOptions("a", "b", "c", runner="x", beam_options="--x", temperatures=(1.0,))
    file.write_text(options.to_toml(), encoding="utf-8")
    assert "--beam-options=--x" in config_words(["--config", str(file)])
    assert PrecomputeOptions(**read_options(file)) == options
    assert tomllib.loads(file.read_text(encoding="utf-8"))["beam_options"] == "--x"
