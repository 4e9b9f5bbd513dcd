"""Pointers of Git LFS and pages of HTML are told from files, and refused by name."""

import json
import shutil
from pathlib import Path

import pytest

from decoder import DecoderError, describe_model, load_tokenizer, own_settings
from decoder.stand_ins import HEAD, stand_in
from tests.models import write_tiny_teacher

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
PAGE = b"<!DOCTYPE html>\n<html><head><title>404</title></head><body>Not found</body></html>\n"


@pytest.mark.parametrize(
    "head",
    [
        PAGE,
        b"\xef\xbb\xbf\r\n\t <!doctype HTML>",
        b"<HTML lang='en'>",
        b"<html>",
        b"<!-- saved --> <!-- - -- > -->\n<!DOCTYPE\thtml PUBLIC '-//W3C//DTD XHTML 1.0'>",
        b"<?xml version='1.0'?>\n<html xmlns='x'>",
    ],
)
def test_pages(head):
    assert "HTML page" in (stand_in(head) or "")


@pytest.mark.parametrize("head", [POINTER, b"\xef\xbb\xbf" + POINTER, POINTER[:24]])
def test_pointers(head):
    assert "`git lfs pull`" in (stand_in(head) or "")


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"A pointer begins with version https://git-lfs.github.com/spec/v1",
        b"A page begins with <!doctype html>",
        b'{"text": "<!doctype html>"}',
        b"<htmlish>",
        b"<!doctype htmlx>",
        b"<h1>Title</h1>",
        b"<?xml version='1.0'?><svg>",
        b"version 2",
        b"GGUF\x03\0\0\0",
        (b"<!---->" * HEAD)[:HEAD],
    ],
)
def test_other_files(head):
    assert stand_in(head) is None


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    folder = write_tiny_teacher(tmp_path_factory.mktemp("models") / "teacher", layers=1)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        (folder / name).write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    index = {"weight_map": {"x": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(folder / "model.safetensors", folder / "model.gguf")
    return folder


@pytest.mark.parametrize(("content", "next_step"), [(POINTER, "git lfs pull"), (PAGE, "again")])
@pytest.mark.parametrize(
    ("name", "opens"),
    [
        ("config.json", describe_model),
        ("model.safetensors", describe_model),
        ("model.safetensors.index.json", describe_model),
        ("model.gguf", describe_model),
        ("model.gguf", load_tokenizer),
        ("tokenizer.json", load_tokenizer),
        ("tokenizer_config.json", load_tokenizer),
        ("special_tokens_map.json", load_tokenizer),
        ("added_tokens.json", load_tokenizer),
        ("chat_template.jinja", load_tokenizer),
        ("generation_config.json", own_settings),
        ("tokenizer.model", own_settings),
        ("merges.txt", own_settings),
    ],
)
def test_files_of_models(content, next_step, name, opens, teacher, tmp_path):
    folder = shutil.copytree(teacher, tmp_path / "copy")
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()  # beside which no index is read
    (folder / name).write_bytes(content)
    source = folder / name if name.endswith(".gguf") else folder
    with pytest.raises(DecoderError, match=rf"{name} is .*{next_step}"):
        opens(str(source))
