"""GGUF files of every supported architecture, and of every type that `gguf` takes apart."""

from dataclasses import replace
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from flax import nnx
from gguf.quants import _type_traits

from decoder.checkpoint import StoredTensor
from decoder.config import RopeScaling
from decoder.errors import DecoderError
from decoder.gguf_checkpoint import block_decoder, read_gguf
from decoder.loading import load_model
from decoder.model import Decoder
from tests.decoder.gguf_files import CONFIGS, write_gguf
from tests.decoder.random_models import random_model


def decoder_at(path: Path) -> Decoder:
    model = load_model(str(path)).model
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("architecture", CONFIGS)
def test_equals_the_model_it_was_made_from(tmp_path: Path, architecture: str) -> None:
    """Configuration and every weight; `make parity` has transformers read the same files."""
    config = CONFIGS[architecture]
    original = random_model(config)
    converted = decoder_at(write_gguf(tmp_path / "a.gguf", architecture, original))
    assert converted.config == config
    # 1 was added to some and taken away again, which rounds.
    near = 2e-7 if config.norm == "offset" else 0
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=near, rtol=0),
        nnx.state(converted),
        nnx.state(original),
    )


@pytest.mark.parametrize(
    ("architecture", "layers", "width", "heads", "scalar"),
    [("gemma2", 46, 4608, 32, 144.0), ("gemma3", 62, 5376, 32, 168.0)],
)
def test_the_largest_gemma_has_a_scale_of_its_own(
    tmp_path: Path, architecture: str, layers: int, width: int, heads: int, scalar: float
) -> None:
    """Width over heads of the published 27B, where the other sizes have that of a head."""
    sizes = {"layers": layers, "heads": heads, "kv_heads": 16, "windows": (24,) * layers}
    small = replace(CONFIGS[architecture], **sizes, width=2, head_dim=2, mlp_width=1, ropes=())
    path = write_gguf(tmp_path / "a.gguf", architecture, random_model(small))
    # Of the weights of that size, only the field is needed.
    data, key = path.read_bytes(), f"{architecture}.embedding_length".encode()
    place = data.index(key) + len(key) + 4
    path.write_bytes(data[:place] + width.to_bytes(4, "little") + data[place + 4 :])
    assert read_gguf(path).config.query_scalar == scalar


def test_linear_scaling_of_gemma3(tmp_path: Path) -> None:
    """It is the global layers' alone; see `rope.frequencies`."""
    config = replace(CONFIGS["gemma3"], rope_scaling=RopeScaling("linear", 8.0))
    path = write_gguf(tmp_path / "a.gguf", "gemma3", random_model(config))
    assert read_gguf(path).config == config


@pytest.mark.parametrize(
    "kind", [*_type_traits, gguf.GGMLQuantizationType.F16], ids=lambda kind: kind.name
)
def test_every_type_is_read_as_the_package_reads_it(
    tmp_path: Path, kind: gguf.GGMLQuantizationType
) -> None:
    """Random blocks, in the model's blocks of rows as in one piece."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 24, max(block, 32) * 2
    size = rows * columns // block * block_bytes
    # No byte above 0x3B: whatever is a scale is finite.
    raw = np.random.default_rng(int(kind)).integers(0, 0x3C, size, dtype=np.uint8)
    path = tmp_path / "raw"
    path.write_bytes(raw.tobytes())
    order = tuple(reversed(range(rows)))
    tensor = StoredTensor(
        "t", "t", (rows, columns), kind.name, path, 0, size, block_decoder(kind), order
    )
    expected = gguf.quants.dequantize(raw.reshape(rows, -1), kind)
    assert np.isfinite(expected).all()
    assert np.abs(expected).max() > 0
    np.testing.assert_array_equal(tensor.load(np.dtype(np.float32))[0], expected[::-1])


@pytest.mark.parametrize(
    ("architecture", "change", "text"),
    [
        ("gemma2", {"attention_cap": None}, "gemma2.attn_logit_softcapping is None; expected"),
        ("gemma2", {"windows": ()}, "gemma2.attention.sliding_window is None; expected one whole"),
        ("gemma", {"windows": (24,) * 7}, "gemma.attention.sliding_window .24. is not understood"),
        ("qwen2", {"output_cap": 30.0}, "qwen2.final_logit_softcapping .30.0. is not understood"),
    ],
)
def test_fields_that_lack_or_are_not_understood(
    tmp_path: Path, architecture: str, change: dict, text: str
) -> None:
    model = random_model(replace(CONFIGS[architecture], **change))
    path = write_gguf(tmp_path / "a.gguf", architecture, model)
    with pytest.raises(DecoderError, match=text):
        read_gguf(path)
