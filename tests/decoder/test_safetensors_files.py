"""Folders: whole and sharded checkpoints, and each way in which one can be incomplete."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from decoder.errors import DecoderError
from decoder.loading import load_model
from decoder.safetensors_files import read_folder
from decoder.weight_files import INDEX, SINGLE
from tests.models import write_tiny_teacher


def shard(folder: Path, files: int = 3) -> Path:
    """Spread model.safetensors over several files with an index, as hubs do."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for place in range(files):
        name = f"model-{place + 1:05}-of-{files:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[place::files]}
        save_file(part, folder / name)
        weight_map.update(dict.fromkeys(part, name))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_shards_give_what_one_file_gives(tmp_path: Path) -> None:
    whole = read_folder(write_tiny_teacher(tmp_path / "whole"))
    sharded = read_folder(shard(write_tiny_teacher(tmp_path / "sharded")))
    assert whole.tensors.keys() == sharded.tensors.keys()
    assert whole.config == sharded.config
    assert len({tensor.file for tensor in sharded.tensors.values()}) == 3
    for name, tensor in whole.tensors.items():
        assert tensor.equals(sharded.tensors[name])
        assert tensor.digest() == sharded.tensors[name].digest()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = shard(write_tiny_teacher(tmp_path))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        DecoderError, match=r"lacks model-00002-of-00003.safetensors.*\(1 of 3 shard files\)"
    ):
        read_folder(folder)


def test_a_shard_of_another_checkpoint(tmp_path: Path) -> None:
    folder = shard(write_tiny_teacher(tmp_path))
    path = folder / "model-00002-of-00003.safetensors"
    tensors = load_file(path)
    lost = sorted(tensors)[0]
    save_file({**{key: tensors[key] for key in sorted(tensors)[1:]}, "other": tensors[lost]}, path)
    with pytest.raises(DecoderError, match=rf"missing \['{lost}'\], not listed \['other'\]"):
        read_folder(folder)


@pytest.mark.parametrize(
    "others",
    [
        ("consolidated.safetensors",),
        ("consolidated.safetensors", "consolidated.safetensors.index.json"),
        ("consolidated.00.pth", "pytorch_model.bin", "pytorch_model.bin.index.json"),
        ("model.fp16.safetensors", "model.bf16.safetensors", "adapter_model.safetensors"),
        ("model.fp16.safetensors.index.json", "model.fp16-00001-of-00002.safetensors"),
        ("original/consolidated.00.pth", "onnx/model.onnx", "onnx/model.safetensors"),
        (INDEX, "model-00001-of-00002.safetensors"),
    ],
)
def test_the_whole_file_wins(tmp_path: Path, others: tuple[str, ...]) -> None:
    """Whatever stands beside it, its own index included, which may name files that are gone."""
    expected = {
        name: tensor.digest()
        for name, tensor in read_folder(write_tiny_teacher(tmp_path)).tensors.items()
    }
    for other in others:
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_text('{"weight_map": {"a": "gone.safetensors"}}')
    found = read_folder(tmp_path).tensors
    assert {name: tensor.digest() for name, tensor in found.items()} == expected
    assert {tensor.file.name for tensor in found.values()} == {SINGLE}


@pytest.mark.parametrize(
    "other", ["consolidated.safetensors", "model.fp16.safetensors", "pytorch_model.bin"]
)
def test_the_index_wins_where_there_is_no_whole_file(tmp_path: Path, other: str) -> None:
    shard(write_tiny_teacher(tmp_path))
    (tmp_path / other).write_bytes(b"another")
    files = {tensor.file.name for tensor in read_folder(tmp_path).tensors.values()}
    assert files == {f"model-{place:05}-of-00003.safetensors" for place in (1, 2, 3)}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "consolidated.safetensors",
            r"but consolidated\.safetensors, which names the tensors in a",
        ),
        (
            "model.fp16.safetensors",
            r"but model\.fp16\.safetensors\. Rename it to model\.safetensors",
        ),
        ("weights.safetensors", r"but weights\.safetensors\. Rename it to model\.safetensors if"),
        ("consolidated.00.pth", r"but consolidated\.00\.pth, which would have to be converted"),
    ],
)
def test_weights_under_another_name_alone(tmp_path: Path, name: str, text: str) -> None:
    (write_tiny_teacher(tmp_path) / SINGLE).rename(tmp_path / name)
    with pytest.raises(DecoderError, match=f"has no model.safetensors and no .*{text}"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("alone", [True, False])
def test_an_adapter(tmp_path: Path, alone: bool) -> None:
    if not alone:
        write_tiny_teacher(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(DecoderError, match=r"holds adapter_config.json: .* Merge the adapter fir"):
        read_folder(tmp_path)


PLAIN = np.asarray([10000.0 ** (-pair / 4) for pair in range(4)], np.float32)


def with_frequencies(folder: Path, stored: np.ndarray, **settings: Any) -> Path:
    """A checkpoint of head_dim 8 that repeats its rotary frequencies in the second layer."""
    write_tiny_teacher(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    tensors = load_file(folder / SINGLE)
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = stored
    save_file(tensors, folder / SINGLE)
    return folder


LINEAR = {"rope_scaling": {"type": "linear", "factor": 4.0}}


@pytest.mark.parametrize(
    ("stored", "settings"),
    [
        (PLAIN, {}),
        (PLAIN * np.float32(1.0005), {}),
        (PLAIN.astype(np.float16), {}),
        (PLAIN / 4, LINEAR),
        (PLAIN, LINEAR),
    ],
)
def test_stored_frequencies_that_agree(tmp_path: Path, stored: np.ndarray, settings: dict) -> None:
    load_model(str(with_frequencies(tmp_path, stored, rope_theta=1e4, **settings)))


@pytest.mark.parametrize(
    ("stored", "settings"),
    [
        (PLAIN, {"rope_theta": 5e5}),
        (PLAIN / 4, {}),
        (PLAIN[::-1].copy(), {}),
        (PLAIN * np.float32(1.002), {}),
        (PLAIN[:3], {}),
        (PLAIN / 2, LINEAR),
    ],
)
def test_stored_frequencies_that_contradict(
    tmp_path: Path, stored: np.ndarray, settings: dict
) -> None:
    folder = with_frequencies(tmp_path, stored, **{"rope_theta": 1e4, **settings})
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    with pytest.raises(DecoderError, match=rf"{name} says rotary frequencies .*config.json .rope_"):
        read_folder(folder)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds a JSON list; expected an object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "puts a into '../b.safetensors'"),
    ],
)
def test_a_bad_index(tmp_path: Path, index: str, text: str) -> None:
    folder = shard(write_tiny_teacher(tmp_path))
    (folder / INDEX).write_text(index)
    with pytest.raises(DecoderError, match=text):
        read_folder(folder)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    folder = shard(write_tiny_teacher(tmp_path))
    (folder / INDEX).unlink()
    with pytest.raises(
        DecoderError, match=r"model-00001-of-00003.safetensors, .* several weight files"
    ):
        read_folder(folder)


def test_no_weights(tmp_path: Path) -> None:
    folder = write_tiny_teacher(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(DecoderError, match=r"but pytorch_model.bin, which would have to be conv"):
        read_folder(folder)


def test_no_config(tmp_path: Path) -> None:
    folder = write_tiny_teacher(tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(DecoderError, match=r"has no config.json .it holds .'model.safetensors'"):
        read_folder(folder)


def test_config_that_is_no_json(tmp_path: Path) -> None:
    folder = write_tiny_teacher(tmp_path)
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(DecoderError, match=r"config.json is not valid JSON"):
        read_folder(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file(tmp_path: Path, kept: int) -> None:
    folder = write_tiny_teacher(tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:kept])
    with pytest.raises(DecoderError, match=r"model.safetensors is truncated or damaged"):
        read_folder(folder)


def test_a_damaged_header(tmp_path: Path) -> None:
    folder = write_tiny_teacher(tmp_path)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[8] = ord("x")
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(DecoderError, match=r"model.safetensors is truncated or damaged"):
        read_folder(folder)


def test_integers_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_teacher(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = np.ones(32, np.int8)  # pyright: ignore[reportArgumentType]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DecoderError, match=r"model.norm.weight is stored as I8; supported: F64"):
        read_folder(folder)


def test_a_tensor_without_numbers(tmp_path: Path) -> None:
    folder = write_tiny_teacher(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = np.ones((0,), np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DecoderError, match=r"model.norm.weight has the shape \[0\]: no numbers"):
        read_folder(folder)
