"""A teacher whose tokenizer does not settle whether documents begin with BOS, in every command.

Its tokenizer.json puts nothing before a text and its tokenizer_config.json asks for BOS: for such a
class transformers 4 follows the one and transformers 5 the other.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import decoder
import stillroom
from decoder.errors import DecoderError
from pipelines.begin import what_is_wanted
from pipelines.errors import PipelineError
from tests.models import BOS, EOS
from tests.pipelines import small
from tests.student import runs

CHOICES = "  --bos on: as transformers 4 and the model's training\n  --bos off: as transformers 5"
PUBLISHED = {
    "bos_token": {"__type": "AddedToken", "content": BOS, "normalized": True},
    "eos_token": EOS,
    "add_bos_token": True,
    "add_eos_token": False,
    "tokenizer_class": "LlamaTokenizerFast",
    "chat_template": "{{ bos_token }}{% for message in messages %}{{ message.content }}"
    + EOS
    + "{% endfor %}",
}


def publish(folder: Path, **settings: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({**PUBLISHED, **settings}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A teacher, a corpus, and captures of it with BOS ("on") and without ("off")."""
    folder = tmp_path_factory.mktemp("work")
    small.options(folder)
    publish(folder / "teacher")
    runs.write_student(folder / "student")
    publish(folder / "student")
    with pytest.MonkeyPatch.context() as patch:
        small.quick(patch)
        for bos in ("on", "off"):
            small.capture(folder, bos, bos=bos, layout="pad", length=64)
        yield folder


def test_the_capture_follows_the_option(folder: Path) -> None:
    encode = decoder.load_tokenizer(str(folder / "teacher")).encode
    for bos, put in (("on", [0]), ("off", [])):
        opened = stillroom.open(folder / bos)
        assert opened.manifest.capture["bos"] is (bos == "on")
        rows = opened.rows(slice(None))
        for text, tokens, segments in zip(
            small.texts(), rows["tokens"], rows["segments"], strict=True
        ):
            assert tokens[segments > 0].tolist() == [*put, *encode(text).tolist()]


def test_auto_is_refused_with_both_readings(folder: Path, capsys: pytest.CaptureFixture) -> None:
    message = f"puts {BOS!r} there, and transformers 5 puts nothing"
    with pytest.raises(PipelineError) as error:
        small.capture(folder, "auto")
    assert message in str(error.value)
    assert CHOICES in str(error.value)
    assert not (folder / "auto").exists()
    words = ["--dataset", str(folder / "corpus.jsonl"), "--teacher", str(folder / "teacher")]
    for command in (["precompute", *words, "--out", str(folder / "auto")], ["compare", *words]):
        assert stillroom.main(command) == 1
        assert CHOICES in capsys.readouterr().err


def test_eos_alike(folder: Path) -> None:
    publish(folder / "teacher", add_eos_token=True)
    try:
        for choice in ("auto", "on", "off"):
            asked = small.options(folder, "ends", bos="on", eos=choice)
            if choice == "auto":
                with pytest.raises(PipelineError) as error:
                    what_is_wanted(asked)
            else:
                assert what_is_wanted(asked).manifest.capture["eos"] is (choice == "on")
    finally:
        publish(folder / "teacher")
    assert f"documents end with {EOS!r}" in str(error.value)
    assert CHOICES.replace("bos", "eos") in str(error.value)


@pytest.mark.parametrize("bos", ["on", "off"])
def test_every_command(
    bos: str, folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None asks again: what the cache recorded counts."""
    runs.quick(monkeypatch)
    small.write_corpus(folder / "more.jsonl", ["an added text", "and one more"])
    commands = [
        ["append", str(folder / bos), "--dataset", str(folder / "more.jsonl")],
        ["inspect", str(folder / bos)],
        ["verify", str(folder / bos)],
        ["audit", str(folder / bos), "--rows", "2"],
        runs.words(runs.options(folder, f"run-{bos}", cache=str(folder / bos), epochs=1)),
        ["evaluate", str(folder / f"run-{bos}")],
        ["export", str(folder / f"run-{bos}"), str(folder / f"export-{bos}")],
    ]
    for words in commands:
        assert stillroom.main(words) == 0, capsys.readouterr().err
    assert stillroom.open(folder / bos).manifest.capture["bos"] == (bos == "on")
    # The student's tokenizer is in as much doubt as it was, for transformers too.
    exported = decoder.load_tokenizer(str(folder / f"export-{bos}"))
    assert exported == decoder.load_tokenizer(str(folder / "student"))
    written = json.loads((folder / f"export-{bos}" / "tokenizer_config.json").read_text())
    same = ("eos_token", "add_bos_token", "add_eos_token", "tokenizer_class")
    assert {key: written[key] for key in same} == {key: PUBLISHED[key] for key in same}


def test_chat_templates_write_one_bos(folder: Path) -> None:
    messages = [{"role": "user", "content": "a"}]
    tokenizer = decoder.load_tokenizer(str(folder / "teacher"))
    assert decoder.encode_chat(tokenizer, messages).tolist()[:2] == [0, *tokenizer.encode("a")]
    publish(folder / "student", chat_template="{% for one in messages %}x{% endfor %}")
    silent = decoder.load_tokenizer(str(folder / "student"))
    publish(folder / "student")
    with pytest.raises(DecoderError, match=r"writes no BOS token .*replace\(tokenizer, adds_bos"):
        decoder.encode_chat(silent, messages)
    for adds in (True, False):
        ids = decoder.encode_chat(replace(silent, adds_bos=adds), messages)
        assert ids.tolist() == [*([0] * adds), *silent.encode("x").tolist()]
