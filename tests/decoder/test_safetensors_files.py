"""Folders: whole and sharded checkpoints, and each way in which one can be incomplete."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from decoder.errors import DecoderError
from decoder.loading import load_model
from decoder.safetensors_files import INDEX, SINGLE, read_folder
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


@pytest.mark.parametrize("complete", [True, False])
def test_shards_beside_a_whole_file(tmp_path: Path, complete: bool) -> None:
    """transformers would take the whole file, whichever was saved last."""
    whole = (write_tiny_teacher(tmp_path) / SINGLE).read_bytes()
    shard(tmp_path)
    (tmp_path / SINGLE).write_bytes(whole)
    if not complete:
        (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        DecoderError,
        match=rf"holds {SINGLE}, and {INDEX}, which names other files: model-00001-of-00003.* "
        rf"\(3 in all\).*Remove {INDEX} and its files if {SINGLE} is meant",
    ):
        read_folder(tmp_path)


def test_an_index_of_one_file(tmp_path: Path) -> None:
    """Nothing is doubtful about it."""
    expected = read_folder(write_tiny_teacher(tmp_path)).tensors
    weight_map = dict.fromkeys(expected, SINGLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert read_folder(tmp_path).tensors.keys() == expected.keys()


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
    with pytest.raises(DecoderError, match=r"several weight files .* but no model.safetensors.ind"):
        read_folder(folder)


def test_no_weights(tmp_path: Path) -> None:
    folder = write_tiny_teacher(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(DecoderError, match=r"no \*.safetensors file; .'pytorch_model.bin'. would"):
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
