"""The README's commands and Python run as they stand, in order, in one folder."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import write_tiny_teacher

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


COMMANDS = (
    *("precompute", "append", "audit", "compare", "copy", "derive"),
    *("inspect", "verify", "train", "evaluate", "export"),
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What the README's commands find: a corpus and a teacher."""
    folder = tmp_path_factory.mktemp("readme")
    write_tiny_teacher(folder / "models" / "teacher")
    text = "".join(path.read_text() for path in sorted((ROOT / "cache").glob("*.py"))[:4])
    lines = [json.dumps({"text": text[at : at + 180]}) for at in range(0, 7200, 180)]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    more = [json.dumps({"text": f"an added text, number {number}"}) for number in range(8)]
    (folder / "more.jsonl").write_text("\n".join(more))
    return folder


def test_the_commands_of_the_readme_run(folder):
    commands = [
        line.removeprefix("$ ")
        for block in blocks("console")
        for line in block.splitlines()
        if line.startswith("$ stillroom")
    ]
    assert len(commands) >= 5
    for command in commands:
        words = [sys.executable, "-m", *command.split()]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip()


def test_the_python_of_the_readme_runs(folder):
    programs = blocks("python")
    assert len(programs) >= 2
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(programs)], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"the exact entries hold \d+\.\d% of the teacher's probability", done.stdout)


def test_the_two_commands_of_the_first_screen_exist():
    targets = re.findall(r"^make (\w+) +#", README, re.MULTILINE)
    assert targets[:2] == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_every_option_that_the_readme_names_exists():
    named = set(re.findall(r"`(?:stillroom \w+ )?(--[a-z-]+)", README))
    assert len(named) > 10
    helps = ""
    for command in COMMANDS:
        done = subprocess.run(
            [sys.executable, "-m", "stillroom", command, "--help"], capture_output=True, text=True
        )
        assert done.returncode == 0
        helps += done.stdout
    missing = [option for option in sorted(named) if option not in helps]
    assert missing == []


def test_the_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target
