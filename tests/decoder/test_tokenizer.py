"""What a tokenizer tells of itself, its fingerprint, and comparing two of them."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoder.errors import DecoderError
from decoder.tokenizer import Tokenizer, build_tokenizer, load_tokenizer
from tests.models import BOS, EOS, tiny_tokenizer


def build(edit: Callable[[dict[str, Any]], object] | None = None, **settings: Any) -> Tokenizer:
    definition = tiny_tokenizer(300)
    if edit is not None:
        edit(definition)
    options = {"bos": BOS, "eos": EOS, "adds_bos": None, "adds_eos": None, "chat_template": None}
    return build_tokenizer(definition, **{**options, **settings})


def post_processor(*, before: bool, after: bool) -> dict[str, Any]:
    special = {"bos": (BOS, 0), "eos": (EOS, 2)}
    pieces: list[dict] = [{"Sequence": {"id": "A", "type_id": 0}}]
    if before:
        pieces.insert(0, {"SpecialToken": {"id": BOS, "type_id": 0}})
    if after:
        pieces.append({"SpecialToken": {"id": EOS, "type_id": 0}})
    return {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            token: {"id": token, "ids": [place], "tokens": [token]}
            for token, place in special.values()
        },
    }


def add_token(token_id: int, content: str, special: bool = True) -> dict[str, Any]:
    token = dict(tiny_tokenizer(300)["added_tokens"][0])
    return {**token, "id": token_id, "content": content, "special": special}


def test_encode_inserts_nothing_and_decode_keeps_everything() -> None:
    """C24: whatever the post-processor adds is reported, never done."""
    with_bos = build(lambda d: d.update(post_processor=post_processor(before=True, after=True)))
    assert (with_bos.adds_bos, with_bos.adds_eos) == (True, True)
    plain = build()
    assert (plain.adds_bos, plain.adds_eos) == (False, False)
    for tokenizer in (with_bos, plain):
        ids = tokenizer.encode("the teacher")
        assert ids.dtype == np.uint32
        assert not {0, 2} & set(ids.tolist())
        assert tokenizer.encode(BOS + "the").tolist().count(0) == 1
        assert tokenizer.decode([0, *ids, 2]) == f"{BOS}the teacher{EOS}"


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_bos_and_eos_are_told_apart(before: bool, after: bool) -> None:
    processor = post_processor(before=before, after=after)
    tokenizer = build(lambda d: d.update(post_processor=processor))
    assert (tokenizer.adds_bos, tokenizer.adds_eos) == (before, after)


def test_stated_settings_win_over_the_post_processor() -> None:
    processor = post_processor(before=True, after=False)
    tokenizer = build(lambda d: d.update(post_processor=processor), adds_bos=False, adds_eos=True)
    assert (tokenizer.adds_bos, tokenizer.adds_eos) == (False, True)


def test_batches_equal_single_texts() -> None:
    texts = ["", "the corpus", "é\r\n", "x" * 1000]
    for text, ids in zip(texts, build().encode_batch(texts), strict=True):
        np.testing.assert_array_equal(ids, build().encode(text))
    assert build().encode("").shape == (0,)
    assert build().encode_batch([]) == []


def test_truncation_and_padding_are_off() -> None:
    def limit(definition: dict[str, Any]) -> None:
        definition["truncation"] = {
            "direction": "Right",
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        definition["padding"] = {
            "strategy": {"Fixed": 8},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": BOS,
        }

    text = "the teacher reads the corpus"
    np.testing.assert_array_equal(build(limit).encode(text), build().encode(text))
    assert len(build(limit).encode("a")) == 1
    assert build(limit).fingerprint == build().fingerprint


def test_half_a_surrogate_pair() -> None:
    with pytest.raises(DecoderError, match="text 1 is not valid Unicode: half of a surrogate"):
        build().encode_batch(["fine", "a\ud800b"])


def test_ids_that_no_token_has() -> None:
    tokenizer = build()
    with pytest.raises(DecoderError, match="no token has the id 300; the tokenizer has 300 ids"):
        tokenizer.decode([1, 300])
    with pytest.raises(DecoderError, match="no token has the id -1"):
        tokenizer.decode([-1])
    assert tokenizer.token_text(300) == "<unused 300>"


def test_ids_count_added_tokens_and_leave_holes() -> None:
    """C23: the real vocabulary is the largest id + 1, not the base size."""
    tokenizer = build(lambda d: d["added_tokens"].append(add_token(65549, "<far>")))
    assert tokenizer.vocabulary in (301, 65550)  # the library may renumber added tokens
    assert tokenizer.vocabulary == max(tokenizer.backend.get_vocab().values()) + 1
    assert len(tokenizer.holes) == tokenizer.vocabulary - 301

    def gap(definition: dict[str, Any]) -> None:
        definition["model"]["vocab"]["zzz"] = 310

    assert build(gap).vocabulary == 311
    assert build(gap).holes == tuple(range(300, 310))


def test_missing_bytes() -> None:
    assert build().missing_bytes == frozenset()

    def drop(definition: dict[str, Any]) -> None:
        vocabulary = definition["model"]["vocab"]
        del vocabulary["Ā"], vocabulary["ÿ"]  # bytes 0x00 and 0xFF

    tokenizer = build(drop)
    assert tokenizer.missing_bytes == {0x00, 0xFF}
    assert tokenizer.decode(tokenizer.encode("a\x00b")) == "ab"

    def with_unknown(definition: dict[str, Any]) -> None:
        drop(definition)
        definition["model"]["unk_token"] = BOS

    assert build(with_unknown).missing_bytes == frozenset()


@pytest.mark.parametrize("setting", ["bos", "eos"])
def test_a_special_token_that_is_not_there(setting: str) -> None:
    with pytest.raises(DecoderError, match=f"the {setting.upper()} token '<s>' is not in the voc"):
        build(**{setting: "<s>"})


def test_no_special_tokens_at_all() -> None:
    tokenizer = build(bos=None, eos=None)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (None, None, False)
    with pytest.raises(DecoderError, match="the tokenizer adds BOS but names no BOS token"):
        build(bos=None, adds_bos=True)


def test_a_definition_that_the_library_refuses() -> None:
    with pytest.raises(DecoderError, match=r"tokenizer.json is not understood"):
        build(lambda d: d["model"].update(merges=[["a", "no such"]]))


def test_fingerprint_follows_content_only() -> None:
    """C33: each of these is another tokenizer; the order of JSON keys is not."""

    def swap_merges(definition: dict[str, Any]) -> None:
        merges = definition["model"]["merges"]
        merges[0], merges[1] = merges[1], merges[0]

    def swap_ids(definition: dict[str, Any]) -> None:
        vocabulary = definition["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    def reverse_keys(definition: dict[str, Any]) -> None:
        definition["model"]["vocab"] = dict(reversed(definition["model"]["vocab"].items()))
        definition["model"] = dict(reversed(definition["model"].items()))

    different = [
        build(),
        build(swap_merges),
        build(swap_ids),
        build(lambda d: d["added_tokens"].append(add_token(300, "<x>"))),
        build(lambda d: d.update(normalizer={"type": "NFC"})),
        build(bos=EOS),
        build(eos=BOS),
        build(adds_bos=True),
        build(adds_eos=True),
        build(chat_template="{{ messages }}"),
    ]
    assert len({tokenizer.fingerprint for tokenizer in different}) == len(different)
    assert build(reverse_keys).fingerprint == build().fingerprint
    assert build(reverse_keys) == build()


def test_fingerprint_is_stable() -> None:
    """A golden value: a cache made today must know its tokenizer tomorrow."""
    assert build().fingerprint == (
        "f776050c6e6a0302cb09ec23f8b425a0d64a26394f2247a82b014161f5816c7b"
    )


@pytest.mark.parametrize("template", [None, "{% for m in messages %}\r\n{{ m }}é{% endfor %}"])
def test_files_give_the_tokenizer_again(tmp_path: Path, template: str | None) -> None:
    tokenizer = build(
        lambda d: d.update(post_processor=post_processor(before=True, after=False)),
        chat_template=template,
    )
    for name, content in tokenizer.files().items():
        (tmp_path / name).write_bytes(content)
    assert ("chat_template.jinja" in tokenizer.files()) == (template is not None)
    again = load_tokenizer(str(tmp_path))
    assert again == tokenizer
    assert again.fingerprint == tokenizer.fingerprint
    assert again.files() == tokenizer.files()


def test_mapping_difference() -> None:
    """C22: refuse a swapped pair by example; accept added tokens and reordered keys."""

    def swap(definition: dict[str, Any]) -> None:
        vocabulary = definition["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    def extend(definition: dict[str, Any]) -> None:
        definition["added_tokens"] += [add_token(300, "<x>"), add_token(301, "<y>")]

    def reorder(definition: dict[str, Any]) -> None:
        definition["model"]["vocab"] = dict(reversed(definition["model"]["vocab"].items()))

    base = build()
    assert base.mapping_difference(build(extend)) is None
    assert build(extend).mapping_difference(base) is None
    assert base.mapping_difference(build(reorder)) is None
    a, b = (base.backend.token_to_id(letter) for letter in "ab")
    assert base.mapping_difference(build(swap)) == (
        f"the token 'a' has the id {a} in this tokenizer and the id {b} in the other"
    )

    def rename(definition: dict[str, Any]) -> None:
        extend(definition)
        definition["added_tokens"][1]["content"] = "<|renamed|>"
        vocabulary = definition["model"]["vocab"]
        vocabulary["<|renamed|>"] = vocabulary.pop("<|im_start|>")

    assert base.mapping_difference(build(rename)) == (
        "the token '<|im_start|>' has the id 1 in this tokenizer and no id in the other"
    )
    assert build(rename).mapping_difference(base) == (
        "the token '<|im_start|>' has the id 1 in the other tokenizer and no id in this"
    )


def test_survives_pickling() -> None:
    tokenizer = build(chat_template="x")
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again == tokenizer
    np.testing.assert_array_equal(again.encode("the corpus"), tokenizer.encode("the corpus"))


def test_loading_does_not_import_jax(tmp_path: Path) -> None:
    for name, content in build().files().items():
        (tmp_path / name).write_bytes(content)
    code = (
        "import sys; from decoder import load_tokenizer; "
        "t = load_tokenizer(sys.argv[1]); t.encode('a'); t.fingerprint; "
        "import json; print(json.dumps([m for m in ('jax', 'flax') if m in sys.modules]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent.parent,
    )
    assert json.loads(out.stdout) == []
