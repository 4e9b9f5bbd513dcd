"""GGUF checkpoints: the rotary row order undone, types dequantised, strictness kept."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file

from decoder.config import RopeScaling
from decoder.errors import DecoderError
from decoder.gguf_checkpoint import read_gguf
from decoder.loading import fingerprint_model, load_model
from decoder.model import Decoder
from decoder.tensor_names import parameter_name
from tests.models import smollm2_path, write_tiny_teacher

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    base, _, kind = name.rpartition(".")
    if base.startswith("model.layers."):
        _, _, layer, part = base.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[base]}.{kind}"


def pair_order(weights: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp's converter stores query and key rows."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    folder: Path,
    kind: Type = Type.F32,
    fields: Mapping[str, Any] | None = None,
    edit: Callable[[dict[str, np.ndarray]], object] | None = None,
    architecture: str = "llama",
) -> Path:
    """The checkpoint in a folder as a GGUF file; matrices in `kind`, vectors in float32."""
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = {}
    for name, values in load_file(folder / "model.safetensors").items():
        if "q_proj" in name or "k_proj" in name:
            values = pair_order(values, heads if "q_proj" in name else kv_heads)
        tensors[gguf_name(name)] = values
    if edit is not None:
        edit(tensors)
    metadata: dict[str, Any] = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.rope.freq_base": config["rope_theta"],
        **(fields or {}),
    }
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add.get(type(value), writer.add_array)(key, value)
    for name, values in tensors.items():
        matrix = values.ndim > 1
        stored = gguf.quants.quantize(values, kind) if matrix else values.astype(np.float32)
        writer.add_tensor(name, stored, raw_dtype=kind if matrix else Type.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def parameters(source: Path) -> dict[str, np.ndarray]:
    model = load_model(str(source)).model
    assert isinstance(model, Decoder)
    return {
        parameter_name(path): np.asarray(variable[...])
        for path, variable in nnx.to_flat_state(nnx.state(model))
    }


@pytest.mark.parametrize(
    "layout",
    [
        {"tied": True},
        {"tied": False, "attention_bias": True, "mlp_bias": True},
        {"heads": 4, "kv_heads": 1, "head_dim": 16},
        {"heads": 4, "kv_heads": 4},
    ],
)
def test_equals_the_folder_it_was_made_from(tmp_path: Path, layout: dict) -> None:
    write_tiny_teacher(tmp_path, **layout)
    path = write_gguf(tmp_path)
    folder, file = parameters(tmp_path), parameters(path)
    assert folder.keys() == file.keys()
    for name, values in folder.items():
        np.testing.assert_array_equal(file[name], values)
    assert read_gguf(path).config == load_config(tmp_path)


def load_config(folder: Path) -> object:
    model = load_model(str(folder)).model
    assert isinstance(model, Decoder)
    return model.config


@pytest.mark.parametrize(
    ("kind", "bound"),
    [(Type.F16, 1e-3), (Type.BF16, 5e-3), (Type.Q8_0, 1e-2), (Type.Q4_1, 0.1), (Type.Q5_0, 0.1)],
)
def test_quantised_types(tmp_path: Path, kind: Type, bound: float) -> None:
    """Dequantised values are near the originals, and equal those of the package."""
    write_tiny_teacher(tmp_path)
    path = write_gguf(tmp_path, kind)
    folder, file = parameters(tmp_path), parameters(path)
    for name, values in folder.items():
        assert np.abs(file[name] - values).max() <= bound * np.abs(values).max()
    name = "model.layers.1.mlp.down_proj.weight"
    expected = gguf.quants.dequantize(gguf.quants.quantize(folder[name], kind), kind)
    np.testing.assert_array_equal(file[name], expected)


def test_fingerprint(tmp_path: Path) -> None:
    path = write_gguf(write_tiny_teacher(tmp_path))
    before = fingerprint_model(str(path))
    assert load_model(str(path)).fingerprint == before
    renamed = path.rename(tmp_path / "other.gguf")
    assert fingerprint_model(str(renamed)) == before
    data = bytearray(renamed.read_bytes())
    data[-40] ^= 1
    renamed.write_bytes(data)
    assert fingerprint_model(str(renamed)) != before
    renamed.unlink()
    write_gguf(tmp_path, fields={"llama.rope.freq_base": 9999.0})
    assert fingerprint_model(str(path)) != before
    write_gguf(tmp_path, fields={"general.name": "another name"})
    assert fingerprint_model(str(path)) == before


def test_rotary_divisors(tmp_path: Path) -> None:
    """Llama 3's scaling as GGUF stores it: one divisor per frequency."""
    write_tiny_teacher(tmp_path)
    divisors = np.asarray([1.0, 1.0, 3.0, 8.0], np.float32)
    path = write_gguf(tmp_path, edit=lambda t: t.update({"rope_freqs.weight": divisors}))
    config = read_gguf(path).config
    assert config.rope_scaling == RopeScaling("divisors", divisors=(1.0, 1.0, 3.0, 8.0))
    load_model(str(path))
    path = write_gguf(tmp_path, edit=lambda t: t.update({"rope_freqs.weight": divisors[:3]}))
    with pytest.raises(DecoderError, match="3 rotary divisors for head_dim 8: expected 4"):
        load_model(str(path))


TYPE, FACTOR, OLD = (
    f"llama.rope.{key}" for key in ("scaling.type", "scaling.factor", "scale_linear")
)


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({TYPE: "linear", FACTOR: 4.0}, 4.0),
        ({FACTOR: 4.0}, 4.0),
        ({OLD: 4.0}, 4.0),
        ({TYPE: "linear", OLD: 4.0}, 4.0),
        ({FACTOR: 4.0, OLD: 3.0}, 4.0),
        ({TYPE: "none", FACTOR: 4.0}, None),
        ({FACTOR: 1.0}, None),
        ({FACTOR: 0.0}, None),
        ({OLD: 1.0}, None),
        ({}, None),
    ],
)
def test_linear_scaling(tmp_path: Path, fields: dict, factor: float | None) -> None:
    """What llama.cpp makes of these fields: without a type, a factor is of linear scaling."""
    path = write_gguf(write_tiny_teacher(tmp_path), fields=fields)
    expected = None if factor is None else RopeScaling("linear", factor)
    assert read_gguf(path).config.rope_scaling == expected


@pytest.mark.parametrize(
    ("fields", "divisors", "text"),
    [
        ({FACTOR: 4.0}, [1, 1, 3, 8], "has linear rotary scaling and rope_freqs.weight"),
        ({}, [1, 1, 0, 8], r"the tensor rope_freqs.weight holds 0.0; frequencies are divided"),
        ({}, [1, 1, -3, 8], r"the tensor rope_freqs.weight holds -3.0; frequencies are divided"),
        ({}, [1, 1, np.inf, 8], "the tensor rope_freqs.weight holds numbers that are not finite"),
    ],
)
def test_wrong_divisors(tmp_path: Path, fields: dict, divisors: list, text: str) -> None:
    stored = {"rope_freqs.weight": np.asarray(divisors, np.float32)}
    path = write_gguf(write_tiny_teacher(tmp_path), fields=fields, edit=lambda t: t.update(stored))
    with pytest.raises(DecoderError, match=text):
        read_gguf(path)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"llama.expert_count": 8}, r"the field llama.expert_count \(8\) is not understood"),
        ({TYPE: "yarn"}, "llama.rope.scaling.type is 'yarn'; supported"),
        ({TYPE: "linear"}, "scaling.factor is None; expected a number"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count is 4; supported is 8"),
        ({"llama.attention.value_length": 4}, "value_length is 4; supported is 8"),
        ({"llama.vocab_size": 299}, "llama.vocab_size is 299, but token_embd.weight has 300 rows"),
        ({"llama.attention.head_count": [4, 4]}, r"head_count is \[4, 4\]; expected one whole"),
        ({"llama.block_count": None}, "llama.block_count is None; expected one whole number"),
        (
            {"llama.attention.layer_norm_rms_epsilon": None},
            "rms_epsilon is None; expected a number",
        ),
        ({"llama.embedding_length": 64}, r"has the shape \[300, 32\]; .* needs \[300, 64\]"),
        ({"llama.block_count": 3}, "lacks 9 tensors"),
        ({"split.count": 2}, "is one of several parts; merge them"),
    ],
)
def test_refuses(tmp_path: Path, fields: dict, text: str) -> None:
    path = write_gguf(write_tiny_teacher(tmp_path), fields=fields)
    with pytest.raises(DecoderError, match=text):
        load_model(str(path))


def test_another_architecture(tmp_path: Path) -> None:
    path = write_gguf(write_tiny_teacher(tmp_path), architecture="phi3")
    with pytest.raises(
        DecoderError, match="is of the architecture 'phi3'; supported: llama, qwen2"
    ):
        load_model(str(path))


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda t: t.pop("token_embd.weight"), "the tensor token_embd.weight is missing"),
        (lambda t: t.pop("blk.1.ffn_up.weight"), r"lacks the tensor model.layers.1.mlp.up_proj"),
        (
            lambda t: t.update({"blk.0.ffn_gate_inp.weight": np.ones((2, 32), np.float32)}),
            r"holds the tensor blk.0.ffn_gate_inp.weight, for which the model",
        ),
        (
            lambda t: t.update({"blk.0.attn_q.weight": np.ones((20, 32), np.float32)}),
            r"blk.0.attn_q.weight has the shape \[20, 32\]; this configuration needs \[32, 32\]",
        ),
        (
            lambda t: t.update({"output_norm.weight": np.full(32, np.nan, np.float32)}),
            r"the tensor output_norm.weight holds numbers that are not finite",
        ),
    ],
)
def test_tensors_are_checked(tmp_path: Path, edit: Callable, text: str) -> None:
    path = write_gguf(write_tiny_teacher(tmp_path), edit=edit)
    with pytest.raises(DecoderError, match=text):
        load_model(str(path))


@pytest.mark.parametrize("dtype", [np.float64, np.int8])
def test_types_that_are_not_decoded_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: type
) -> None:
    real = gguf.GGUFWriter.add_tensor

    def add(self: Any, name: str, values: np.ndarray, raw_dtype: Any) -> None:
        if name == "rope_freqs.weight":
            real(self, name, values.astype(dtype))
        else:
            real(self, name, values, raw_dtype=raw_dtype)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add)
    ones = np.ones(4, np.float32)
    path = write_gguf(
        write_tiny_teacher(tmp_path), edit=lambda t: t.update({"rope_freqs.weight": ones})
    )
    name = {np.float64: "F64", np.int8: "I8"}[dtype]
    with pytest.raises(DecoderError, match=f"rope_freqs.weight is stored as {name}, which the"):
        load_model(str(path))


def test_a_file_cut_short(tmp_path: Path) -> None:
    path = write_gguf(write_tiny_teacher(tmp_path))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DecoderError, match="is truncated: the tensor"):
        load_model(str(path))


def test_smollm2() -> None:
    """The real teacher's sizes; its numbers are compared in tests/parity."""
    checkpoint = read_gguf(smollm2_path())
    config = checkpoint.config
    assert (config.layers, config.width, config.heads, config.kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.mlp_width, config.vocabulary) == (64, 1536, 49152)
    assert (config.tied, config.norm_epsilon, config.rope_theta) == (True, 1e-5, 1e5)
    assert config.max_positions == 8192
    embedding = checkpoint.tensors["model.embed_tokens.weight"]
    assert (embedding.dtype, embedding.shape) == ("Q8_0", (49152, 576))
