"""What another capture asks for is refused by its name, and nothing is touched; else reused."""

import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from cache.storage import Store
from pipelines import begin as begin_module
from pipelines import precompute as precompute_module
from pipelines import transforms
from pipelines.begin import begin
from pipelines.errors import CaptureError
from pipelines.plan import Plan
from pipelines.precompute import precompute
from tests.models import tiny_tokenizer
from tests.pipelines import small

STATES = ("open", "complete")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a teacher, a corpus, a complete cache and one that stopped at a shard."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        small.quick(patch)
        texts = small.texts()
        lines = [{"text": text, "other": text + "!", "same": text} for text in texts]
        (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        small.capture(folder, "complete")
        real = transforms.write_shard

        def write(store: Store, manifest: Any, shard: int, rows: int, arrays: Any) -> Any:
            if shard == 2:
                raise RuntimeError("stop")
            return real(store, manifest, shard, rows, arrays)

        patch.setattr(transforms, "write_shard", write)
        with pytest.raises(CaptureError, match="shard 2: RuntimeError"):
            small.capture(folder, "open")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy, so that tests can change it; times and all."""
    return small.copy(made, tmp_path / "work")


@pytest.fixture(autouse=True)
def no_forward_pass(monkeypatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("a pipeline was started")

    monkeypatch.setattr(precompute_module, "run_pipeline", refuse)


def refused(folder: Path, state: str, message: str, **changes: Any) -> str:
    before = small.everything(folder / state)
    with pytest.raises(CaptureError, match=message) as error:
        precompute(small.options(folder, state, **changes))
    assert small.everything(folder / state) == before
    text = str(error.value)
    assert "Nothing was changed" in text
    assert "choose another place" in text
    return text


def accepted(folder: Path, state: str, **changes: Any) -> None:
    if state == "complete":
        before = small.everything(folder / state)
        assert precompute(small.options(folder, state, **changes)).scored == 0
        assert small.everything(folder / state) == before
    else:
        receipts = small.stored(folder / state, data_only=True)
        assert isinstance(begin(small.options(folder, state, **changes)), Plan)
        assert small.stored(folder / state, data_only=True) == receipts


SETTINGS = [
    ({"k": 3}, "k: the cache has 4, you ask for 3"),
    ({"tail": "none"}, 'tail: the cache has "sampled", you ask for "none"'),
    ({"exact": 1}, "exact: the cache has 2, you ask for 1"),
    ({"temperatures": (2.0,)}, r"temperatures: the cache has \[1.0\], you ask for \[2.0\]"),
    ({"length": 12}, "length: the cache has 16, you ask for 12"),
    ({"overlap": 2}, "overlap: the cache has 1, you ask for 2"),
    ({"layout": "pad"}, 'layout: the cache has "pack", you ask for "pad"'),
    ({"bos": "on"}, "bos: the cache has false, you ask for true"),
    ({"eos": "on"}, "eos: the cache has false, you ask for true"),
    ({"micro_batch": 2}, "micro-batch: the cache has 1, you ask for 2"),
    ({"chunk": 4}, "chunk: the cache has 8, you ask for 4"),
    ({"precision": "bfloat16"}, 'precision: the cache has "float32", you ask for "bfloat16"'),
    ({"seed": 1}, "seed: the cache has 0, you ask for 1"),
    ({"logprobs": "float16"}, 'logprobs: the cache has "rounded", you ask for "float16"'),
    ({"mantissa_bits": 5}, "mantissa-bits: the cache has 6, you ask for 5"),
    ({"rows_per_shard": 5}, "rows-per-shard: the cache has 6, you ask for 5"),
    ({"documents_per_part": 5}, "documents-per-part: the cache has 6, you ask for 5"),
    ({"vocabulary": 299}, "vocabulary: the cache has 300, you ask for 299"),
    ({"shard_teacher": True}, "teacher-devices: the cache has 1, you ask for 8"),
    ({"limit": 19}, "corpus: the cache is of 20 documents, yours has 19"),
    ({"column": "other"}, "corpus: of the documents 0-5 at least one is another"),
]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("changes", "message"), SETTINGS, ids=lambda x: str(x)[:20])
def test_one_setting_is_another(folder, state, changes, message):
    refused(folder, state, message, **changes)


def test_everything_that_differs_is_named_at_once(folder):
    text = refused(folder, "complete", "made otherwise", k=3, length=12, seed=5)
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:-1]] == [
        "k", "length", "seed"
    ]  # fmt: skip


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def flip_weight(folder: Path) -> None:
    data = bytearray((folder / "teacher/model.safetensors").read_bytes())
    data[-5] ^= 1
    (folder / "teacher/model.safetensors").write_bytes(data)


def change_tokenizer(folder: Path) -> None:
    path = folder / "teacher/tokenizer.json"
    text = path.read_text()
    assert text.count('"lstrip": false') == 3
    path.write_text(text.replace('"lstrip": false', '"lstrip": true', 1))


def swap_documents(folder: Path) -> None:
    lines = (folder / "corpus.jsonl").read_text().splitlines()
    lines[7], lines[8] = lines[8], lines[7]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")


def change_document(folder: Path) -> None:
    text = (folder / "corpus.jsonl").read_text()
    (folder / "corpus.jsonl").write_text(text.replace("7 the teacher", "7 the Teacher"))


def add_document(folder: Path) -> None:
    with (folder / "corpus.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')


INPUTS = {
    "a bit of a weight": (flip_weight, "teacher: the cache's has .*config or weights changed"),
    "a config field": (
        lambda folder: edit_json(folder / "teacher/config.json", rope_theta=10001.0),
        "teacher: the cache's has fingerprint",
    ),
    "a rule of the tokenizer": (change_tokenizer, "tokenizer: .*vocabulary, rules or template"),
    "the start token": (
        lambda folder: edit_json(folder / "teacher/tokenizer_config.json", bos_token="<|im_end|>"),
        "tokenizer: the cache's has fingerprint",
    ),
    "a chat template": (
        lambda folder: (folder / "teacher/chat_template.jinja").write_text("{{ x }}"),
        "tokenizer: the cache's has fingerprint",
    ),
    "a document": (change_document, "corpus: of the documents 6-11 at least one is another"),
    "the order of two": (swap_documents, "corpus: of the documents 6-11 at least one is another"),
    "one more document": (add_document, "corpus: the cache is of 20 documents, yours has 21"),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", INPUTS)
def test_one_input_is_another(folder, state, name):
    change, message = INPUTS[name]
    change(folder)
    refused(folder, state, message)


def reorder(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reorder(value[key]) for key in reversed(list(value))}
    return [reorder(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("state", STATES)
def test_the_order_of_keys_does_not_matter(folder, state):
    for name in ("tokenizer.json", "config.json", "tokenizer_config.json"):
        path = folder / "teacher" / name
        path.write_text(json.dumps(reorder(json.loads(path.read_text())), indent=3))
    assert json.loads((folder / "teacher/tokenizer.json").read_text()) == tiny_tokenizer()
    accepted(folder, state)


@pytest.mark.parametrize("state", STATES)
def test_nothing_changed(folder, state):
    accepted(folder, state)


@pytest.mark.parametrize("state", STATES)
def test_touched_files_are_compared_by_content(folder, state):
    os.utime(folder / "corpus.jsonl", (1, 1))
    accepted(folder, state)


@pytest.mark.parametrize("state", STATES)
def test_equal_documents_from_elsewhere_are_the_same_corpus(folder, state):
    accepted(folder, state, column="same")
    (folder / "corpus.jsonl").rename(folder / "moved.jsonl")
    accepted(folder, state, dataset=str(folder / "moved.jsonl"))


@pytest.mark.parametrize("state", STATES)
def test_teacher_and_cache_may_move(folder, state):
    (folder / "teacher").rename(folder / "moved")
    (folder / state).rename(folder / "elsewhere")
    (folder / "elsewhere").rename(folder / f"{state}-2")
    options = small.options(folder, f"{state}-2", teacher=str(folder / "moved"))
    started = begin(options)
    assert isinstance(started, Plan) == (state == "open")


def test_workers_and_keeping_parts_do_not_make_another_cache(folder):
    accepted(folder, "complete", workers=3)
    accepted(folder, "complete", keep_parts=True)


def test_an_unfinished_capture_needs_the_release_that_began_it(folder, monkeypatch):
    monkeypatch.setattr(
        begin_module.metadata,
        "version",
        lambda name: "9.9.9" if name == "jax" else metadata.Distribution.from_name(name).version,
    )
    text = refused(folder, "open", "jax: the unfinished capture was begun with release")
    assert "this is 9.9.9" in text
    assert f"Install jax=={metadata.Distribution.from_name('jax').version} to finish it" in text
    accepted(folder, "complete")


def test_two_that_begin_at_once_do_not_both_go_on(folder, monkeypatch):
    monkeypatch.setattr(Store, "replace", lambda *_: False)
    with pytest.raises(CaptureError, match="another run has just begun to fill"):
        begin(small.options(folder, "open"))


def test_taking_over_changes_the_run_alone(folder):
    begin(small.options(folder, "open"))
    before = json.loads((folder / "open/manifest.json").read_text())
    begin(small.options(folder, "open"))
    after = json.loads((folder / "open/manifest.json").read_text())
    assert {name for name in after if after[name] != before[name]} == {"run", "digest"}
