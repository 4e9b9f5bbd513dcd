"""What a loaded model says of itself, and fingerprints that follow the content alone."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from decoder.errors import DecoderError
from decoder.loading import fingerprint_model, load_model
from tests.decoder.test_safetensors_files import shard
from tests.models import write_tiny_teacher

GOLDEN = "a37d49c09735423a005e861c23be31ca7f3df2562b0ec760fb6a7cc91b4f2afb"


def test_describes_itself(tmp_path: Path) -> None:
    loaded = load_model(str(write_tiny_teacher(tmp_path, rows=320)))
    assert loaded.source == str(tmp_path)
    assert loaded.revision is None
    assert loaded.vocabulary_rows == 320
    assert loaded.max_positions == 4096
    description = json.loads(json.dumps(loaded.description))
    assert (description["kind"], description["family"]) == ("safetensors", "llama")
    assert description["config"]["kv_heads"] == 2
    assert loaded.parameters == sum(
        values.size for values in load_file(tmp_path / "model.safetensors").values()
    )


def test_refuses_another_dtype(tmp_path: Path) -> None:
    write_tiny_teacher(tmp_path)
    with pytest.raises(DecoderError, match="dtype is 'float16'; supported: float32, bfloat16"):
        load_model(str(tmp_path), dtype="float16")


def test_loading_reports_the_fingerprint_of_the_files(tmp_path: Path) -> None:
    source = str(write_tiny_teacher(tmp_path))
    assert load_model(source).fingerprint == fingerprint_model(source)
    assert load_model(source, dtype="bfloat16").fingerprint == fingerprint_model(source)


def test_fingerprint_ignores_place_sharding_and_key_order(tmp_path: Path) -> None:
    first = fingerprint_model(str(write_tiny_teacher(tmp_path / "first")))
    assert fingerprint_model(str(write_tiny_teacher(tmp_path / "second"))) == first
    assert fingerprint_model(str(shard(write_tiny_teacher(tmp_path / "third")))) == first
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    reordered = dict(reversed(config.items())) | {
        "transformers_version": "9.9",
        "_name_or_path": "elsewhere",
        "torch_dtype": "float32",
        "rope_scaling": None,
    }
    (tmp_path / "second" / "config.json").write_text(json.dumps(reordered))
    assert fingerprint_model(str(tmp_path / "second")) == first


def test_fingerprint_is_stable() -> None:
    """A golden value: a cache made today must know its teacher tomorrow."""
    folder = Path(__file__).parent.parent / "assets" / "checkpoints" / "grouped_tied"
    assert fingerprint_model(str(folder)) == GOLDEN


def test_one_byte_or_one_setting_changes_the_fingerprint(tmp_path: Path) -> None:
    source = str(write_tiny_teacher(tmp_path))
    seen = {fingerprint_model(source)}
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    for offset in (-1, -5000, -50000):
        changed = bytearray(data)
        changed[offset] ^= 1
        path.write_bytes(changed)
        seen.add(fingerprint_model(source))
        assert load_model(source).fingerprint in seen
    path.write_bytes(data)
    config = json.loads((tmp_path / "config.json").read_text())
    for field, value in (("rms_norm_eps", 1e-6), ("rope_theta", 9999.0)):
        (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
        seen.add(fingerprint_model(source))
    assert len(seen) == 6


def test_names_shapes_and_dtypes_are_part_of_it(tmp_path: Path) -> None:
    """The same bytes under swapped names, or read as another dtype, are another teacher."""
    source = str(write_tiny_teacher(tmp_path, layers=2))
    before = fingerprint_model(source)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    one, two = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    save_file({**tensors, one: tensors[two], two: tensors[one]}, path)
    swapped = fingerprint_model(source)
    save_file({name: values.astype(np.float16) for name, values in tensors.items()}, path)
    assert len({before, swapped, fingerprint_model(source)}) == 3


def test_a_model_over_several_devices_has_a_full_copy_on_none(tmp_path: Path) -> None:
    """Each parameter goes from the file to its devices, with no device in between."""
    write_tiny_teacher(tmp_path, vocabulary=320, width=32, heads=8, kv_heads=8)
    devices = jax.devices()[:4]
    mesh = Mesh(np.array(devices), ("devices",), axis_types=(AxisType.Auto,))
    cut = NamedSharding(mesh, PartitionSpec("devices"))
    placed: list[int] = []

    def place(values: np.ndarray) -> jax.Array:
        placed.append(values.nbytes)
        return jax.device_put(values, cut)

    whole = load_model(str(tmp_path), dtype="bfloat16")
    spread = load_model(str(tmp_path), dtype="bfloat16", place=place)
    assert spread.fingerprint == whole.fingerprint
    assert sum(placed) == 2 * whole.parameters
    held = dict.fromkeys(devices, 0)
    for ours, theirs in zip(
        jax.tree.leaves(nnx.state(spread.model)),
        jax.tree.leaves(nnx.state(whole.model)),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == jnp.bfloat16
        for part in ours.addressable_shards:
            held[part.device] += part.data.nbytes
    assert set(held.values()) == {sum(placed) // 4}
