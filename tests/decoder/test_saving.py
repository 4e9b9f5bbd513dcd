"""Folders that are written: read back bit for bit, whole or not at all."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from decoder import saving
from decoder.config import DecoderConfig, RopeScaling
from decoder.errors import DecoderError
from decoder.loading import load_model
from decoder.model import Decoder
from decoder.saving import cut, save_folder
from decoder.tokenizer import load_tokenizer
from decoder.weight_files import INDEX
from tests.models import write_tiny_tokenizer

PLAIN = DecoderConfig(
    vocabulary=30,
    width=8,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=6,
    mlp_width=12,
    max_positions=64,
    rope_theta=500000.0,
    norm_epsilon=1e-5,
)
CONFIGS = {
    "untied": PLAIN,
    "tied": replace(PLAIN, tied=True),
    "biases": replace(PLAIN, qkv_bias=True, output_bias=True, mlp_bias=True),
    "llama3": replace(PLAIN, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 32)),
    "linear": replace(PLAIN, rope_scaling=RopeScaling("linear", 2.5)),
}


def random_model(config: DecoderConfig, seed: int = 0) -> Decoder:
    """Every parameter random, norms and biases included."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=None)))
    random = np.random.default_rng(seed)
    values = jax.tree.map(lambda one: jnp.asarray(random.normal(size=one.shape), one.dtype), state)
    return nnx.merge(graphdef, values)


def numbers(model: nnx.Module) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): np.asarray(variable[...]) for path, variable in flat}


def assert_equal(found: nnx.Module, expected: dict[str, np.ndarray]) -> None:
    read = numbers(found)
    assert read.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(read[name], value, err_msg=name)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_is_read_back(tmp_path: Path, name: str) -> None:
    model = random_model(CONFIGS[name])
    save_folder(model, tmp_path / "new" / "out", None)
    loaded = load_model(str(tmp_path / "new" / "out"))
    assert isinstance(loaded.model, Decoder)
    assert loaded.model.config == CONFIGS[name]
    assert_equal(loaded.model, numbers(model))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    stored = {}
    for name in ("tied", "untied"):
        save_folder(random_model(CONFIGS[name]), tmp_path / name, None)
        stored[name] = set(load_file(tmp_path / name / "model.safetensors"))
    assert stored["untied"] - stored["tied"] == {"lm_head.weight"}


def test_bfloat16_is_rounded_to_nearest(tmp_path: Path) -> None:
    model = random_model(PLAIN)
    save_folder(model, tmp_path / "out", None, "bfloat16")
    expected = {
        name: value.astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, value in numbers(model).items()
    }
    assert any((expected[name] != value).any() for name, value in numbers(model).items())
    assert_equal(load_model(str(tmp_path / "out")).model, expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_several_files_with_an_index(tmp_path: Path) -> None:
    model = random_model(PLAIN)
    save_folder(model, tmp_path / "out", None, most_bytes=1200)
    assert_equal(load_model(str(tmp_path / "out")).model, numbers(model))
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    sizes = [sum(value.nbytes for value in load_file(file).values()) for file in files]
    assert max(sizes) <= 1200
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(sizes)


def test_cutting() -> None:
    sizes = {"a": 4, "b": 6, "c": 1, "d": 30, "e": 5, "f": 5}
    assert cut(sizes, 10) == [["a", "b"], ["c"], ["d"], ["e", "f"]]
    assert cut(sizes, 51) == [list(sizes)]


def test_the_tokenizer_comes_with_it(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_tiny_tokenizer(tmp_path / "tokenizer")))
    save_folder(random_model(replace(PLAIN, vocabulary=300)), tmp_path / "out", tokenizer)
    again = load_tokenizer(str(tmp_path / "out"))
    assert again.fingerprint == tokenizer.fingerprint
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 2)


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "float32"), (3.4e38, "bfloat16")])
def test_numbers_that_are_not_finite(tmp_path: Path, value: float, dtype: str) -> None:
    """3.4e38 is finite in float32; the nearest bfloat16 is infinity."""
    model = random_model(PLAIN)
    query = model.layers[1].attention.query.weight
    query.set_value(query[...].at[0, 0].set(value))
    with pytest.raises(DecoderError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight"):
        save_folder(model, tmp_path / "out", None, dtype)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "empty", "file", "link"])
def test_an_existing_target_is_refused(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "out"
    if kind == "file":
        target.write_text("mine")
    elif kind == "link":
        target.symlink_to(tmp_path / "nowhere")
    else:
        target.mkdir()
        if kind == "folder":
            (target / "config.json").write_text("mine")
    with pytest.raises(DecoderError, match="out exists and is not overwritten"):
        save_folder(random_model(PLAIN), target, None)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_another_dtype(tmp_path: Path) -> None:
    with pytest.raises(DecoderError, match="dtype is 'float16'; supported: float32, bfloat16"):
        save_folder(random_model(PLAIN), tmp_path / "out", None, "float16")


def test_what_a_config_cannot_say(tmp_path: Path) -> None:
    config = replace(PLAIN, rope_scaling=RopeScaling("divisors", divisors=(1.0, 2.0, 3.0)))
    with pytest.raises(DecoderError, match="'divisors'"):
        save_folder(random_model(config), tmp_path / "out", None)
    assert list(tmp_path.iterdir()) == []


def test_storage_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full after the first of several weight files: nothing is left, not even hidden."""
    calls = []

    def save(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        write(*arguments)  # pyright: ignore

    write = saving.save_file
    monkeypatch.setattr(saving, "save_file", save)
    with pytest.raises(DecoderError, match=r"out failed: .*No space left.*run the same again"):
        save_folder(random_model(PLAIN), tmp_path / "out", None, most_bytes=1200)
    assert len(calls) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_killed_export_leaves_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kill at the last weight file would leave is hidden and is not the target."""
    seen = []

    def save(tensors: object, path: Path, metadata: object) -> None:
        write(tensors, path, metadata)  # pyright: ignore
        seen.extend(path.name for path in tmp_path.iterdir())

    write = saving.save_file
    monkeypatch.setattr(saving, "save_file", save)
    save_folder(random_model(PLAIN), tmp_path / "out", None)
    assert len(seen) == 1
    assert seen[0].startswith(".out.")
