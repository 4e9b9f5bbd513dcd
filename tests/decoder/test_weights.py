"""Strict filling: each tensor that is missing, extra, misshapen or not finite is named."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from decoder.errors import DecoderError
from decoder.loading import LoadedModel, load_model
from decoder.model import Decoder
from decoder.tensor_names import parameter_name
from tests.models import write_tiny_teacher


def change(folder: Path, edit: Callable[[dict[str, np.ndarray]], object]) -> str:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def set_config(folder: Path, **fields: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return str(folder)


def decoder_of(loaded: LoadedModel) -> Decoder:
    assert isinstance(loaded.model, Decoder)
    return loaded.model


def test_parameter_names() -> None:
    assert parameter_name(("embedding", "weight")) == "model.embed_tokens.weight"
    assert parameter_name(("norm", "weight")) == "model.norm.weight"
    assert parameter_name(("head", "weight")) == "lm_head.weight"
    assert parameter_name(("layers", 3, "attention", "output", "bias")) == (
        "model.layers.3.self_attn.o_proj.bias"
    )
    assert parameter_name(("layers", 0, "mlp_norm", "weight")) == (
        "model.layers.0.post_attention_layernorm.weight"
    )


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_parameter_holds_its_tensor(tmp_path: Path, stored: str, dtype: str) -> None:
    write_tiny_teacher(tmp_path, tied=False, attention_bias=True, mlp_bias=True, dtype=stored)
    loaded = load_model(str(tmp_path), dtype=dtype)
    tensors = _read_by_hand(tmp_path / "model.safetensors")
    filled = {
        parameter_name(path): np.asarray(variable[...])
        for path, variable in nnx.to_flat_state(nnx.state(loaded.model))
    }
    assert filled.keys() == tensors.keys()
    wanted = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    for name, values in tensors.items():
        assert filled[name].dtype == wanted
        np.testing.assert_array_equal(filled[name], values.astype(np.float32).astype(wanted))
    assert loaded.parameters == sum(values.size for values in tensors.values())


def _read_by_hand(path: Path) -> dict[str, np.ndarray]:
    """The safetensors layout, read without the library (which has no bfloat16 for numpy)."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    types = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
    tensors = {}
    for name, entry in header.items():
        first, last = (8 + length + offset for offset in entry["data_offsets"])
        values = np.frombuffer(data[first:last], types[entry["dtype"]])
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def test_a_missing_tensor(tmp_path: Path) -> None:
    write_tiny_teacher(tmp_path)
    source = change(tmp_path, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(DecoderError, match=r"lacks the tensor model.layers.1.mlp.up_proj.weight"):
        load_model(source)


def test_missing_layers(tmp_path: Path) -> None:
    write_tiny_teacher(tmp_path)
    with pytest.raises(DecoderError, match=r"lacks 9 tensors \(model.layers.2.input_layernorm"):
        load_model(set_config(tmp_path, num_hidden_layers=3))


def test_an_extra_tensor(tmp_path: Path) -> None:
    write_tiny_teacher(tmp_path)
    source = change(tmp_path, lambda t: t.update(stranger=np.ones(3, np.float32)))
    with pytest.raises(DecoderError, match="holds the tensor stranger, for which the model"):
        load_model(source)


def test_biases_without_a_model_for_them(tmp_path: Path) -> None:
    """C49: a checkpoint with biases and a configuration without must fail."""
    write_tiny_teacher(tmp_path, attention_bias=True)
    with pytest.raises(DecoderError, match=r"holds 8 tensors \(model.layers.0.self_attn.k_proj"):
        load_model(set_config(tmp_path, attention_bias=False))


def test_a_layer_too_many(tmp_path: Path) -> None:
    write_tiny_teacher(tmp_path)
    with pytest.raises(DecoderError, match=r"holds 9 tensors \(model.layers.1.input_layernorm"):
        load_model(set_config(tmp_path, num_hidden_layers=1))


def test_a_wrong_shape_names_both(tmp_path: Path) -> None:
    write_tiny_teacher(tmp_path)
    with pytest.raises(
        DecoderError,
        match=r"self_attn.k_proj.weight has the shape \[16, 32\]; .* needs \[32, 32\]",
    ):
        load_model(set_config(tmp_path, head_dim=16))


def test_stated_head_size(tmp_path: Path) -> None:
    """C49: hidden 64, 4 heads, head_dim 32: the query projection is [128, 64]."""
    write_tiny_teacher(tmp_path, width=64, heads=4, head_dim=32)
    query = decoder_of(load_model(str(tmp_path))).layers[0].attention.query
    assert query.weight.shape == (128, 64)


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    write_tiny_teacher(tmp_path, tied=True)
    with pytest.raises(DecoderError, match=r"lacks the tensor lm_head.weight.*tie_word_embeddings"):
        load_model(set_config(tmp_path, tie_word_embeddings=False))


def test_a_redundant_tied_head_must_be_the_embedding(tmp_path: Path) -> None:
    write_tiny_teacher(tmp_path, tied=True)
    plain = load_model(str(tmp_path))
    source = change(
        tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()})
    )
    assert load_model(source).parameters == plain.parameters

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"][7, 3] += 1e-3

    with pytest.raises(DecoderError, match=r"lm_head.weight \[300, 32\] differs from model.embed"):
        load_model(change(tmp_path, spoil))
    source = change(
        tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"][:9].copy()})
    )
    with pytest.raises(DecoderError, match=r"lm_head.weight \[9, 32\] differs"):
        load_model(source)


def test_a_redundant_tied_head_of_another_dtype(tmp_path: Path) -> None:
    write_tiny_teacher(tmp_path, tied=True, dtype="float16")
    source = change(
        tmp_path,
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].astype(np.float32)}),
    )
    assert decoder_of(load_model(source)).head is None


def test_stored_rotary_frequencies_are_accepted(tmp_path: Path) -> None:
    write_tiny_teacher(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    theirs = np.asarray([1, 1e-1, 1e-2, 1e-3], np.float32)
    load_model(change(tmp_path, lambda t: t.update({name: theirs})))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_that_are_not_finite(tmp_path: Path, value: float, dtype: str) -> None:
    write_tiny_teacher(tmp_path)

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][31, 63] = value

    with pytest.raises(DecoderError, match=r"model.layers.1.mlp.down_proj.weight holds numbers"):
        load_model(change(tmp_path, spoil), dtype=dtype)


def test_a_number_too_large_for_bfloat16(tmp_path: Path) -> None:
    write_tiny_teacher(tmp_path)

    def enlarge(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"][0] = np.finfo(np.float32).max

    source = change(tmp_path, enlarge)
    load_model(source)
    with pytest.raises(DecoderError, match=r"model.norm.weight holds numbers that are not finite"):
        load_model(source, dtype="bfloat16")


def test_one_training_step_saved_and_loaded(tmp_path: Path) -> None:
    """C51: tied storage survives training: saved under its one name, logits equal to 1e-6."""
    write_tiny_teacher(tmp_path, tied=True)
    model = decoder_of(load_model(str(tmp_path)))
    graphdef, state = nnx.split(model)
    row = [jnp.asarray(one, jnp.int32) for one in ([5, 6, 7, 8], [1] * 4, range(4))]

    def loss(state: nnx.State) -> jnp.ndarray:
        merged = nnx.merge(graphdef, state)
        return jnp.square(merged.unembed(merged(*row))).mean()

    gradient = jax.jit(jax.grad(loss))(state)
    stepped = jax.tree.map(lambda one, slope: one - 0.1 * slope, state, gradient)
    tensors = {
        parameter_name(path): np.asarray(variable[...])
        for path, variable in nnx.to_flat_state(stepped)
    }
    assert "lm_head.weight" not in tensors
    save_file(tensors, tmp_path / "model.safetensors")
    again = decoder_of(load_model(str(tmp_path)))
    trained = nnx.merge(graphdef, stepped)
    np.testing.assert_allclose(
        again.unembed(again(*row)), trained.unembed(trained(*row)), atol=1e-6
    )
    assert np.abs(trained.unembed(trained(*row)) - model.unembed(model(*row))).max() > 1e-3


# The kernel's own high-water mark: getrusage would hand down that of the parent process.
_MEMORY = """
import sys
from pathlib import Path
from decoder.loading import load_model
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
small, large, dtype = sys.argv[1:]
load_model(small, dtype=dtype)  # what the libraries themselves take
Path("/proc/self/clear_refs").write_text("5")  # the mark starts again from what is held now
before = status("VmHWM")
loaded = load_model(large, dtype=dtype)
print(status("VmHWM") - before, (4 if dtype == "float32" else 2) * loaded.parameters)
"""


def _layers_only(folder: Path) -> None:
    write_tiny_teacher(
        folder, width=512, mlp_width=2048, layers=8, heads=8, kv_heads=4, vocabulary=300
    )


def _shared_head_stored_again(folder: Path) -> None:
    """Most numbers are the embedding's, and the head repeats them in another dtype."""
    write_tiny_teacher(folder, width=512, mlp_width=512, heads=8, kv_heads=4, tied=True)

    def repeat(tensors: dict[str, np.ndarray]) -> None:
        embedding = np.random.default_rng(0).normal(size=(60_000, 512)).astype(np.float16)
        tensors["model.embed_tokens.weight"] = embedding.astype(np.float32)
        tensors["lm_head.weight"] = embedding

    change(folder, repeat)
    set_config(folder, vocab_size=60_000)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("write", [_layers_only, _shared_head_stored_again])
def test_memory_stays_near_the_weights(
    tmp_path: Path, write: Callable[[Path], None], dtype: str
) -> None:
    """120 MB stored in float32: the host never holds more than 1.2 times the model's numbers."""
    write_tiny_teacher(tmp_path / "small")
    write(tmp_path / "large")
    out = subprocess.run(
        [sys.executable, "-c", _MEMORY, tmp_path / "small", tmp_path / "large", dtype],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent.parent,
    )
    grown, weights = map(int, out.stdout.split())
    assert weights > 55e6
    assert grown < 1.2 * weights
