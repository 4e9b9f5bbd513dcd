"""The command line: help, options from files, JSON, exit codes, and no traceback."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import cache
import stillroom
from cache.filling import reopened
from cache.format import MANIFEST
from cache.manifest import read_manifest
from cache.storage import Store
from pipelines.options import PrecomputeOptions
from tests.pipelines import small


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return small.captured(tmp_path_factory.mktemp("made"))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return small.copy(made, tmp_path / "work")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    small.quick(monkeypatch)


def run(capsys, *words: str) -> tuple[int, str, str]:
    """The exit code, standard output and standard error of a command line."""
    try:
        code = stillroom.main(list(words))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def break_file(folder: Path, shard: int = 1) -> None:
    (path,) = (folder / "cache/arrays/target_ids").glob(f"c.{shard}.*")
    path.write_bytes(path.read_bytes()[:-1])


def reopen(folder: Path) -> None:
    """Makes the finished cache one whose shard 2 is to be done."""
    (folder / "cache/receipts/000002.json").unlink()
    store = Store(folder / "cache")
    store.write(MANIFEST, reopened(read_manifest(store)[0]).to_bytes())


# Help and usage.


def test_without_a_command_the_usage_is_shown(capsys):
    code, out, _ = run(capsys)
    assert code == 2
    assert all(f"  {name} " in out for name in stillroom._COMMANDS)
    assert run(capsys, "--help")[:2] == run(capsys, "-h")[:2] == (0, out)


@pytest.mark.parametrize("command", stillroom._COMMANDS)
def test_every_command_has_help_with_an_example(capsys, command):
    code, out, err = run(capsys, command, "--help")
    assert (code, err) == (0, "")
    assert f"Example: stillroom {command}" in " ".join(out.replace("│", " ").split())
    assert f"usage: stillroom {command}" in out


@pytest.mark.parametrize("command", stillroom._COMMANDS)
def test_stopped_commands_say_whether_they_go_on(capsys, monkeypatch, command):
    def stopped(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(stillroom._COMMANDS, command, stopped)
    code, _, err = run(capsys, command)
    assert code == 130
    resumes = command in ("precompute", "append", "derive", "copy", "train")
    assert ("it goes on where it stopped" in err) == resumes
    assert err.startswith("\nStopped.")


def test_an_unknown_command_or_option(capsys):
    code, out, err = run(capsys, "precompile")
    assert (code, out) == (2, "")
    assert "there is no command 'precompile'" in err
    assert "usage: stillroom COMMAND" in err
    code, _, err = run(capsys, "inspect", "cache", "--depth", "3")
    assert code == 2
    assert "--depth" in err
    code, _, err = run(capsys, "precompute", "--dataset", "x")
    assert code == 2
    assert "--teacher" in err
    assert "--out" in err


def test_an_impossible_option_is_a_usage_error(capsys, folder):
    words = small.command_words(small.options(folder))
    code, _, err = run(capsys, *words, "--temperatures", "0")
    assert code == 2
    assert "--temperatures should be above 0" in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"stillroom {stillroom.__version__}\n", "")


# Precompute.


def test_precompute_says_what_it_did(capsys, folder):
    words = small.command_words(small.options(folder, "new"))
    code, out, err = run(capsys, *words)
    assert code == 0
    assert f"{folder / 'new'}: scored 6 shards" in out
    assert "6 of 6 done, 0 missing" in out
    assert "Scoring 6 of 6 shards" in err
    code, out, err = run(capsys, *words)
    assert code == 0
    assert f"{folder / 'new'}: already complete" in out
    assert "Scoring" not in err


def test_a_config_file_is_read_overridden_and_written(capsys, folder):
    options = small.options(folder, "configured", k=5)
    (folder / "options.toml").write_text(options.to_toml())
    words = ["--config", str(folder / "options.toml"), "--k", "4"]
    code, _, err = run(capsys, "precompute", *words)
    assert code == 0, err
    assert cache.open(folder / "configured").encoding.k == 4

    (written,) = (folder / "configured/runs").glob("*/config.toml")
    asked = PrecomputeOptions(**tomllib.loads(written.read_text()))
    assert asked == small.options(folder, "configured")
    code, out, _ = run(
        capsys, "precompute", "--config", str(written), "--out", str(folder / "again")
    )
    assert code == 0
    assert small.stored(folder / "again") == small.stored(folder / "configured")
    # The same file, for the same cache: nothing is left to do.
    code, out, _ = run(capsys, "precompute", "--config", str(written))
    assert (code, "already complete" in out) == (0, True)


def test_a_config_file_that_is_wrong(capsys, folder):
    (folder / "wrong.toml").write_text("kk = 3\n")
    code, out, err = run(capsys, "precompute", "--config", str(folder / "wrong.toml"))
    assert (code, out) == (1, "")
    assert err.startswith("stillroom precompute: the config file")
    assert "unknown options: kk. There are: " in err
    code, _, err = run(capsys, "precompute", "--config", str(folder / "none.toml"))
    assert (code, "No such file" in err) == (1, True)


def test_debug_shows_the_traceback(capsys, folder):
    words = small.command_words(small.options(folder), k=3)
    code, _, err = run(capsys, *words)
    assert code == 1
    assert err.startswith("stillroom precompute: the cache ")
    assert "k: the cache has 4, you ask for 3" in err
    with pytest.raises(ValueError, match="k: the cache has 4"):
        stillroom.main(["--debug", *words])
    with pytest.raises(ValueError, match="k: the cache has 4"):
        stillroom.main([*words, "--debug"])


def test_an_interrupt_has_its_own_exit_code(capsys, folder, monkeypatch):
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipelines.precompute.begin", interrupt)
    code, _, err = run(capsys, *small.command_words(small.options(folder)))
    assert code == 130
    assert "Stopped. Run the same command again" in err


class _Finalised:
    """Ctrl-C comes while the interpreter is where no exception can be raised."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_python_loses_is_raised_again(capsys, folder, monkeypatch):
    def interrupted(_: object) -> None:
        _Finalised()
        # The exception was lost: work goes on. It comes again.
        for _ in range(1000):
            time.sleep(0.01)
        raise AssertionError("the interrupt was lost")

    monkeypatch.setattr("pipelines.precompute.begin", interrupted)
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    code, _, err = run(capsys, *small.command_words(small.options(folder)))
    assert code == 130
    assert "Stopped. Run the same command again" in err
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before


def test_an_interrupt_that_becomes_another_error(capsys, folder, monkeypatch):
    def interrupted(_: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise ImportError("initialization failed") from error

    monkeypatch.setattr("pipelines.precompute.begin", interrupted)
    words = small.command_words(small.options(folder))
    code, _, err = run(capsys, *words)
    assert (code, err) == (
        130,
        "\nStopped. Run the same command again: it goes on where it stopped.\n",
    )
    with pytest.raises(ImportError, match="initialization failed"):
        stillroom.main([*words, "--debug"])


# Inspect.


def test_inspect_a_finished_cache(capsys, folder):
    place = str(folder / "cache")
    code, out, err = run(capsys, "inspect", place)
    assert (code, err) == (0, "")
    assert "6 of 6 done, 0 missing" in out
    assert "20 documents" in out
    code, out, _ = run(capsys, "inspect", place, "--json")
    view = json.loads(out)
    assert (code, view["state"], view["shards"]["done"]) == (0, "complete", 6)
    for words in (["--shard", "5"], ["--row", "3"], ["--row", "3", "--position", "2"]):
        code, out, _ = run(capsys, "inspect", place, *words)
        assert code == 0
        assert out.strip()
        code, out, _ = run(capsys, "inspect", place, *words, "--json")
        assert code == 0
        assert json.loads(out)["view"] in ("shard", "row", "position")


def test_inspect_an_unfinished_cache(capsys, folder):
    reopen(folder)
    place = str(folder / "cache")
    code, out, _ = run(capsys, "inspect", place)
    assert code == 0
    assert "5 of 6 done, 1 missing" in out
    assert "missing: shards 2" in out
    assert "not finished: run the same `stillroom precompute` again" in out
    assert json.loads(run(capsys, "inspect", place, "--json")[1])["shards"]["missing"] == [2]
    assert run(capsys, "inspect", place, "--shard", "1")[0] == 0
    code, _, err = run(capsys, "inspect", place, "--shard", "2")
    assert (code, "shard 2 is not done yet" in err) == (1, True)
    code, _, err = run(capsys, "inspect", place, "--row", "1")
    assert (code, "is not finished (5 shards done)" in err) == (1, True)


def test_inspect_a_damaged_cache(capsys, folder):
    place = str(folder / "cache")
    (folder / "cache/receipts/000002.json").unlink()
    next((folder / "cache/arrays/tokens").glob("c.1.*")).unlink()
    code, out, _ = run(capsys, "inspect", place)
    assert code == 1
    assert "missing: shards 2" in out
    assert "damaged: shard 1, rows 6-11, documents" in out
    code, _, err = run(capsys, "inspect", place, "--shard", "2")
    assert code == 1
    assert "receipts/000002.json is missing" in err
    code, _, err = run(capsys, "inspect", place, "--row", "8")
    assert code == 1
    assert "shard 1, rows 6-11" in err
    assert "--repair" in err
    # What is sound can still be seen.
    assert run(capsys, "inspect", place, "--row", "3")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--row", "99"], "the cache has rows 0 to 32, not 99"),
        (["--row", "-1"], "the cache has rows 0 to 32, not -1"),
        (["--row", "0", "--position", "16"], "positions 0 to 15, not 16"),
        (["--shard", "6"], "the cache has shards 0 to 5, not 6"),
        (["--row", "0", "--position", "0", "--temperature", "2"], "at temperature 1, not at 2"),
    ],
)
def test_inspect_what_there_is_not(capsys, folder, words, message):
    code, out, err = run(capsys, "inspect", str(folder / "cache"), *words)
    assert (code, out) == (1, "")
    assert message in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--position", "2"], "--position needs --row"),
        (["--row", "2", "--shard", "1"], "--shard and --row exclude each other"),
    ],
)
def test_inspect_options_that_do_not_go_together(capsys, folder, words, message):
    code, _, err = run(capsys, "inspect", str(folder / "cache"), *words)
    assert code in (1, 2)
    assert message in " ".join(err.replace("│", " ").split())


# Verify.


def test_verify(capsys, folder):
    place = str(folder / "cache")
    for words in ([], ["--full"]):
        code, out, err = run(capsys, "verify", place, *words)
        assert (code, err) == (0, "")
        assert "sound" in out
        code, out, _ = run(capsys, "verify", place, *words, "--json")
        assert (code, json.loads(out)["sound"], json.loads(out)["damage"]) == (0, True, [])
    break_file(folder)
    code, out, _ = run(capsys, "verify", place)
    assert code == 1
    assert "shard 1, rows 6-11" in out
    assert "--repair" in out
    code, out, _ = run(capsys, "verify", place, "--json")
    found = json.loads(out)
    assert (code, found["sound"], found["damage"][0]["shard"]) == (1, False, 1)
    code, out, _ = run(capsys, "verify", place, "--repair")
    assert code == 1
    assert "removed the receipts of shards 1" in out
    code, out, _ = run(capsys, "verify", place)
    assert code == 1
    assert "receipts/000001.json is missing" in out
    assert run(capsys, *small.command_words(small.options(folder)))[0] == 0
    assert run(capsys, "verify", place, "--full")[0] == 0


# As processes.


@pytest.mark.parametrize("words", [["inspect", "CACHE", "--json"], ["inspect", "--help"], []])
def test_a_reader_that_goes_away_is_no_traceback(folder, words):
    """`stillroom inspect … | head`, with a head that does not even read a line."""
    words = [str(folder / "cache") if word == "CACHE" else word for word in words]
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "stillroom", *words],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(write)
    assert done.stderr == ""
    assert done.returncode != 120  # what Python exits with when it cannot flush


def test_a_reader_that_takes_one_line(folder):
    place = str(folder / "cache")
    command = f"{sys.executable} -m stillroom inspect {place} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("cache ")
    assert done.stderr == ""


def test_a_command_started_beside_files_of_the_same_names(folder):
    """A folder that holds a `cache/` and modules called like those of Stillroom and Python."""
    for name in ("cache.py", "types.py", "pipelines.py"):
        (folder / name).write_text("raise SystemExit('shadowed')")
    script = Path(sys.executable).parent / "stillroom"
    done = subprocess.run([script, "inspect", "cache"], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "complete" in done.stdout


def test_looking_into_a_cache_imports_neither_jax_nor_beam(folder):
    code = (
        "import sys, stillroom\n"
        "heavy = {'jax', 'apache_beam', 'flax', 'datasets', 'tensorstore'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "heavy.remove('tensorstore')\n"
        f"assert stillroom.main(['inspect', {str(folder / 'cache')!r}, '--row', '1']) == 0\n"
        f"assert len(stillroom.open({str(folder / 'cache')!r}).rows([0, 3])['tokens']) == 2\n"
        f"assert stillroom.verify({str(folder / 'cache')!r}, full=True).sound\n"
        "stillroom.PrecomputeOptions\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# From Python.


def test_every_name_of_the_front_door_is_there():
    for name in stillroom.__all__:
        assert getattr(stillroom, name) is not None
        assert name in dir(stillroom)
    assert stillroom.PrecomputeOptions is PrecomputeOptions
    assert stillroom.open is cache.open
    with pytest.raises(AttributeError, match="no attribute 'distil'"):
        stillroom.distil  # noqa: B018
