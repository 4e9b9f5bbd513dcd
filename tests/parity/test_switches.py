"""Parity fails when a feature is switched off on purpose: the comparison can see each of them.

Run by `make parity`. Logits that differ by less than 1e-4 with a family's features differ by
more than 1e-2 without one.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import decoder.attention
from decoder.model import Decoder, Layer
from tests.parity.layouts import logits, random_tokens, write
from tests.parity.test_families import FAMILIES, SHORT, decoder_at, row_logits

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

TOKENS = random_tokens(SHORT, 7)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By layout: the folder and transformers' logits, which ours equal."""

    @cache
    def reference(layout: str) -> tuple[Path, np.ndarray]:
        folder = tmp_path_factory.mktemp("switches") / layout
        expected = logits(write(folder, layout, seed=1), TOKENS)
        assert np.abs(row_logits(decoder_at(folder), TOKENS) - expected).max() < 1e-4
        return folder, expected

    return reference


def with_config(**changes: Any) -> Callable[[Decoder], Decoder]:
    """The same parameters in a model whose configuration differs."""

    def change(model: Decoder) -> Decoder:
        config = replace(model.config, **changes)
        other = nnx.eval_shape(lambda: Decoder(config, rngs=None))
        return nnx.merge(nnx.graphdef(other), nnx.state(model))

    return change


def in_layers(change: Callable[[Layer], None]) -> Callable[[Decoder], Decoder]:
    def changed(model: Decoder) -> Decoder:
        for layer in model.layers:
            change(layer)
        return model

    return changed


def no_post_norms(layer: Layer) -> None:
    layer.attention_post_norm = layer.mlp_post_norm = None


def norms_before(layer: Layer) -> None:
    layer.attention_norm = nnx.data(layer.attention_post_norm)
    layer.mlp_norm = nnx.data(layer.mlp_post_norm)
    no_post_norms(layer)


def norms_swapped(layer: Layer) -> None:
    """The norm after the attention and that before the MLP, whose names other families share."""
    layer.attention_post_norm, layer.mlp_norm = layer.mlp_norm, layer.attention_post_norm


def no_head_norms(layer: Layer) -> None:
    layer.attention.query_norm = layer.attention.key_norm = None


def key_norm_for_queries(layer: Layer) -> None:
    layer.attention.query_norm = layer.attention.key_norm


def gate_and_up_swapped(layer: Layer) -> None:
    layer.mlp.gate, layer.mlp.up = layer.mlp.up, layer.mlp.gate


def keys_and_values_swapped(layer: Layer) -> None:
    layer.attention.key, layer.attention.value = layer.attention.value, layer.attention.key


def no_query_bias(layer: Layer) -> None:
    layer.attention.query.bias = None


def no_output_bias(layer: Layer) -> None:
    layer.attention.output.bias = None


def no_gate_bias(layer: Layer) -> None:
    layer.mlp.gate.bias = None


def local_everywhere(layer: Layer) -> None:
    layer.rope = "local"


SWITCHES: dict[tuple[str, str], Callable[[Decoder], Decoder]] = {
    ("llama", "no rope scaling"): with_config(rope_scaling=None),
    ("mistral", "no window"): with_config(windows=()),
    ("mistral", "a window of one more"): with_config(windows=(25, 25, 25)),
    ("qwen2", "no window"): with_config(windows=()),
    ("qwen2", "windows in other layers"): with_config(windows=(40, 40, 0, 0)),
    ("qwen2", "no bias"): in_layers(no_query_bias),
    ("qwen3", "no head norm"): in_layers(no_head_norms),
    ("qwen3", "one norm for both"): in_layers(key_norm_for_queries),
    ("qwen3_biases", "no query bias"): in_layers(no_query_bias),
    ("qwen3_biases", "no output bias"): in_layers(no_output_bias),
    ("qwen3_biases", "no windows"): with_config(windows=()),
    ("qwen3_biases", "windows in the other layers"): with_config(windows=(0, 31, 0, 31)),
    ("gemma", "no embedding scale"): with_config(scaled_embedding=False),
    ("gemma", "norms without the 1"): with_config(norm="plain"),
    ("gemma", "silu"): with_config(activation="silu"),
    ("gemma", "exact gelu"): with_config(activation="gelu"),
    ("gemma2", "no attention cap"): with_config(attention_cap=None),
    ("gemma2", "no output cap"): with_config(output_cap=None),
    ("gemma2", "no query scalar"): with_config(query_scalar=None),
    ("gemma2", "no windows"): with_config(windows=()),
    ("gemma2", "windows in the other layers"): with_config(windows=(0, 24, 0, 24)),
    ("gemma2", "no norms after"): in_layers(no_post_norms),
    ("gemma2", "norms in another order"): in_layers(norms_swapped),
    ("gemma2", "no embedding scale"): with_config(scaled_embedding=False),
    ("gemma2", "norms without the 1"): with_config(norm="plain"),
    ("gemma3_text", "no embedding scale"): with_config(scaled_embedding=False),
    ("gemma3_text", "norms without the 1"): with_config(norm="plain"),
    ("gemma3_text", "no query scalar"): with_config(query_scalar=None),
    ("gemma3_text", "no windows"): with_config(windows=()),
    ("gemma3_text", "windows in the other layers"): with_config(windows=(0, 24, 0, 24)),
    ("gemma3_text", "no norms after"): in_layers(no_post_norms),
    ("gemma3_text", "norms in another order"): in_layers(norms_swapped),
    ("gemma3_text", "one rope for all"): with_config(ropes=()),
    ("gemma3_text", "the local rope for all"): in_layers(local_everywhere),
    ("gemma3_text", "no rope scaling"): with_config(rope_scaling=None),
    ("gemma3_text", "no head norm"): in_layers(no_head_norms),
    ("gemma3_text", "one norm for both"): in_layers(key_norm_for_queries),
    ("gemma3_text", "no output cap"): with_config(output_cap=None),
    ("smollm3", "rope in all layers"): with_config(ropes=()),
    ("smollm3", "rope in the other layers"): with_config(
        ropes=("none", "global", "none", "global")
    ),
    ("smollm3_windows", "no windows"): with_config(windows=()),
    ("smollm3_windows", "windows in the other layers"): with_config(windows=(0, 24, 24, 0)),
    ("smollm3_windows", "no query bias"): in_layers(no_query_bias),
    ("smollm3_windows", "no output bias"): in_layers(no_output_bias),
    ("smollm3_windows", "no bias of the MLP"): in_layers(no_gate_bias),
    ("phi3", "gate and up swapped"): in_layers(gate_and_up_swapped),
    ("phi3", "keys and values swapped"): in_layers(keys_and_values_swapped),
    ("phi3", "no window"): with_config(windows=()),
    ("olmo2", "norms before"): in_layers(norms_before),
    ("olmo2", "no head norm"): in_layers(no_head_norms),
    ("mixtral", "shares that do not add up"): with_config(shares_add_up=False),
    ("mixtral", "no window"): with_config(windows=()),
    ("mixtral", "a window of one more"): with_config(windows=(41, 41, 41)),
    ("mixtral", "one expert"): with_config(experts_used=1),
    ("qwen3_moe", "one expert less"): with_config(experts_used=2),
    ("qwen3_moe", "no head norm"): in_layers(no_head_norms),
    ("qwen3_moe_sums", "no window"): with_config(windows=()),
    ("qwen3_moe_sums", "a window of one more"): with_config(windows=(25,) * 4),
    ("qwen3_moe_sums", "no query bias"): in_layers(no_query_bias),
    ("qwen3_moe_sums", "no output bias"): in_layers(no_output_bias),
    ("qwen3_moe", "shares that do not add up"): with_config(shares_add_up=False),
    ("qwen3_moe_sums", "shares that add up"): with_config(shares_add_up=True),
}


@pytest.mark.parametrize(("layout", "switch"), SWITCHES)
def test_a_switch_is_seen(references: Any, layout: str, switch: str) -> None:
    folder, expected = references(layout)
    found = row_logits(SWITCHES[layout, switch](decoder_at(folder)), TOKENS)
    # The two forms of GELU differ by 5e-4 at most.
    least = 1e-3 if switch == "exact gelu" else 1e-2
    assert np.abs(found - expected).max() > least


def pairs(heads, cosine, sine):
    """Neighbouring pairs instead of halves."""
    even, odd = heads[..., ::2], heads[..., 1::2]
    cosine, sine = cosine[:, None, :], sine[:, None, :]
    turned = jnp.stack([even * cosine - odd * sine, odd * cosine + even * sine], axis=-1)
    return turned.reshape(heads.shape)


def interleaved(queries, keys, values, *rest):
    """Head h on key head h mod n instead of h // (heads / n)."""
    tiled = queries.shape[1] // keys.shape[1]
    keys, values = jnp.tile(keys, (1, tiled, 1)), jnp.tile(values, (1, tiled, 1))
    return decoder.attention.attend(queries, keys, values, *rest)


@pytest.mark.parametrize(
    ("layout", "target", "wrong"),
    [
        (layout, target, wrong)
        for target, wrong in (
            ("decoder.rope.rotate", pairs),
            ("decoder.model.attend", interleaved),
        )
        for layout in FAMILIES
        # Gemma has one key head, or as many as heads.
        if not (layout == "gemma" and wrong is interleaved)
    ],
)
def test_layouts_of_heads_are_seen(
    references: Any, monkeypatch: pytest.MonkeyPatch, layout: str, target: str, wrong: Callable
) -> None:
    folder, expected = references(layout)
    graphdef, state = nnx.split(decoder_at(folder))
    monkeypatch.setattr(target, wrong)

    @jax.jit  # anew: another compilation would be of the model as it was
    def score(state: nnx.State, *row: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state)
        return model.unembed(model(*row))

    rows = (TOKENS, np.ones(SHORT, np.int32), np.arange(SHORT, dtype=np.int32))
    assert np.abs(np.asarray(score(state, *rows)) - expected).max() > 1e-2
