"""The decoder against logits that transformers computed, and its contract for rows.

The assets are written by tests/assets/make_checkpoints.py. Logits agree to 1e-4
at positions 0 … 1,500; with one feature switched off they are far off.
"""

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import decoder.attention
import decoder.model
import decoder.rope
from decoder.config import DecoderConfig
from decoder.loading import load_model
from decoder.model import Decoder, Linear

ASSETS = Path(__file__).parent.parent / "assets" / "checkpoints"
LAYOUTS = sorted(path.name for path in ASSETS.iterdir())

TINY = DecoderConfig(
    vocabulary=50,
    width=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp_width=24,
    max_positions=64,
)


@cache
def asset(layout: str) -> Decoder:
    model = load_model(str(ASSETS / layout)).model
    assert isinstance(model, Decoder)
    return model


@cache
def expected(layout: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with np.load(ASSETS / layout / "expected.npz") as stored:
        return stored["tokens"].astype(np.int32), stored["positions"], stored["logits"]


def score_row(graphdef: nnx.GraphDef, state: nnx.State, *row: jax.Array) -> jax.Array:
    model = nnx.merge(graphdef, state)
    return model.unembed(model(*row))


SCORE = jax.jit(score_row, static_argnums=0)


def row_logits(
    model: Decoder, tokens: np.ndarray, segments=None, positions=None, score: Callable = SCORE
) -> np.ndarray:
    """Logits [length, vocabulary] of one row, by default one document without padding."""
    length = len(tokens)
    segments = np.ones(length, np.int32) if segments is None else segments
    positions = np.arange(length, dtype=np.int32) if positions is None else positions
    row = (jnp.asarray(tokens), jnp.asarray(segments), jnp.asarray(positions))
    return np.asarray(score(*nnx.split(model), *row))


def error(layout: str, model: Decoder | None = None, length: int = 256, **options) -> float:
    """Largest difference from the reference over the stored positions below `length`."""
    tokens, positions, logits = expected(layout)
    kept = positions < length
    got = row_logits(model or asset(layout), tokens[:length], **options)
    return float(np.abs(got[positions[kept]] - logits[kept]).max())


def with_config(model: Decoder, **changes: object) -> Decoder:
    """The same parameters in a model whose configuration differs."""
    config = dataclasses.replace(model.config, **changes)  # pyright: ignore[reportArgumentType]
    other = nnx.eval_shape(lambda: Decoder(config, rngs=None))
    return nnx.merge(nnx.graphdef(other), nnx.state(model))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parity(layout: str) -> None:
    _, positions, _ = expected(layout)
    assert positions.max() == 1500
    assert error(layout, length=1501) < 1e-4


def test_parity_covers_the_layouts() -> None:
    """Every head layout, tied and untied, sharded, biases, each rotary scaling."""
    configs = {layout: asset(layout).config for layout in LAYOUTS}
    sharing = {(one.heads == one.kv_heads, one.kv_heads == 1) for one in configs.values()}
    assert sharing == {(True, False), (False, True), (False, False)}
    assert {one.tied for one in configs.values()} == {True, False}
    assert any(one.head_dim * one.heads != one.width for one in configs.values())
    assert any(one.qkv_bias and one.output_bias and one.mlp_bias for one in configs.values())
    kinds = {one.rope_scaling.kind for one in configs.values() if one.rope_scaling}
    assert kinds == {"llama3", "linear"}
    assert len({one.rope_theta for one in configs.values()}) >= 3
    assert (ASSETS / "llama3_sharded" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("layout", ["llama3_sharded", "linear_tied"])
def test_rope_scaling_matters(layout: str) -> None:
    assert error(layout, with_config(asset(layout), rope_scaling=None)) > 1e-2


@pytest.mark.parametrize("layout", ["one_key_head_wide", "grouped_tied"])
def test_rope_theta_matters(layout: str) -> None:
    assert error(layout, with_config(asset(layout), rope_theta=10000.0)) > 1e-2


@pytest.mark.parametrize("name", ["query", "key", "value", "output", "gate", "up", "down"])
def test_every_bias_matters(name: str) -> None:
    graphdef, state = nnx.split(asset("biases"))
    flat = [
        (path, _zeros(variable) if path[-2:] == (name, "bias") else variable)
        for path, variable in nnx.to_flat_state(state)
    ]
    assert error("biases", nnx.merge(graphdef, nnx.from_flat_state(flat))) > 1e-2


def _zeros(variable: nnx.Variable) -> nnx.Variable:
    return variable.replace(jnp.zeros_like(variable[...]))


def retraced() -> Callable:
    """A scorer that shares no compilation with other tests, for use with patched functions."""
    return jax.jit(lambda *arguments: score_row(*arguments), static_argnums=0)


def test_head_mapping_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head h on key head h mod n instead of h // (heads / n)."""
    attend = decoder.attention.attend

    def interleaved(queries, keys, values, mask, *options):
        tiled = queries.shape[1] // keys.shape[1]
        keys, values = jnp.tile(keys, (1, tiled, 1)), jnp.tile(values, (1, tiled, 1))
        return attend(queries, keys, values, mask, *options)

    monkeypatch.setattr(decoder.model, "attend", interleaved)
    assert error("grouped_tied", score=retraced()) > 1e-2


def test_rope_layout_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbouring pairs instead of halves."""

    def pairs(heads, cosine, sine):
        even, odd = heads[..., ::2], heads[..., 1::2]
        cosine, sine = cosine[:, None, :], sine[:, None, :]
        turned = jnp.stack([even * cosine - odd * sine, odd * cosine + even * sine], axis=-1)
        return turned.reshape(heads.shape)

    monkeypatch.setattr(decoder.rope, "rotate", pairs)
    assert error("every_head_its_own", score=retraced()) > 1e-2


def packed_pair(first: int, second: int, padding: int) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(first)
    tokens = random.integers(0, 64, first + second + padding).astype(np.int32)
    segments = np.repeat(np.asarray([1, 2, 0], np.int32), [first, second, padding])
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in (first, second, padding)])
    return tokens, segments, positions


@pytest.mark.parametrize("layout", ["biases", "llama3_sharded"])
def test_packed_documents_equal_single_ones(layout: str) -> None:
    tokens, segments, positions = packed_pair(70, 40, 18)
    packed = row_logits(asset(layout), tokens, segments, positions)
    np.testing.assert_allclose(packed[:70], row_logits(asset(layout), tokens[:70]), atol=1e-5)
    np.testing.assert_allclose(packed[70:110], row_logits(asset(layout), tokens[70:110]), atol=1e-5)


def test_segment_mask_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that start anew are not enough (C14)."""
    tokens, segments, positions = packed_pair(70, 40, 18)
    alone = row_logits(asset("grouped_tied"), tokens[70:110])
    monkeypatch.setattr(
        decoder.model, "segment_mask", lambda segments, window: jnp.tril(jnp.ones((128, 128), bool))
    )
    leaking = row_logits(asset("grouped_tied"), tokens, segments, positions, retraced())
    assert np.abs(leaking[70:110] - alone).max() > 1e-2


def test_nothing_leaks_between_documents_or_from_the_future() -> None:
    tokens, segments, positions = packed_pair(70, 40, 18)
    base = row_logits(asset("biases"), tokens, segments, positions)
    other = tokens.copy()
    other[:70] = (other[:70] + 7) % 64
    np.testing.assert_array_equal(
        row_logits(asset("biases"), other, segments, positions)[70:], base[70:]
    )
    later = tokens.copy()
    later[100] = (later[100] + 7) % 64
    changed = row_logits(asset("biases"), later, segments, positions)
    np.testing.assert_array_equal(changed[:100], base[:100])
    assert np.abs(changed[100:110] - base[100:110]).max() > 1e-2


@cache
def tiny(**changes) -> Decoder:
    """A small random model; shared between tests, so not to be changed."""
    config = dataclasses.replace(TINY, **changes)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=None)))
    random = np.random.default_rng(0)
    values = jax.tree.map(
        lambda one: jnp.asarray(random.normal(size=one.shape) * 0.3, one.dtype), state
    )
    return nnx.merge(graphdef, values)


def test_padding_may_hold_anything_and_is_finite() -> None:
    """Poison in padding reaches nobody; a row of padding alone is finite."""
    tokens, segments, positions = packed_pair(8, 4, 6)
    tokens = tokens % 50
    clean = row_logits(tiny(), tokens, segments, positions)
    poisoned = tokens.astype(np.uint32)
    poisoned[12:] = 4294967295
    got = row_logits(tiny(), poisoned, segments, positions)
    np.testing.assert_array_equal(got[:12], clean[:12])
    assert np.isfinite(got).all()
    assert np.isfinite(row_logits(tiny(), poisoned, np.zeros(18, np.int32), positions)).all()


@pytest.mark.parametrize("token", [50, 65535, 4294967295])
def test_an_illegal_id_gives_nan_not_another_token(token: int) -> None:
    tokens = np.asarray([1, 2, token, 3], np.uint32)
    got = row_logits(tiny(), tokens)
    assert np.isnan(got[2]).all()
    assert np.isfinite(tiny().embedding(jnp.asarray(tokens[:2]))).all()


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int32, np.int64])
def test_takes_ids_of_any_integer_type(dtype: type) -> None:
    tokens = np.asarray([4, 3, 2, 1])
    np.testing.assert_array_equal(
        row_logits(tiny(), tokens.astype(dtype), np.ones(4, np.uint16)),
        row_logits(tiny(), tokens.astype(np.int32)),
    )


def test_positions_are_the_callers() -> None:
    """The same tokens further along: other absolute positions, equal distances."""
    tokens = np.asarray([4, 3, 2, 1])
    shifted = row_logits(tiny(), tokens, positions=np.arange(4, dtype=np.int32) + 40)
    np.testing.assert_allclose(shifted, row_logits(tiny(), tokens), atol=1e-5)
    spread = row_logits(tiny(), tokens, positions=np.asarray([0, 9, 20, 33], np.int32))
    assert np.abs(spread - row_logits(tiny(), tokens)).max() > 1e-6


def test_lifts_over_rows_devices_and_jit() -> None:
    """split/merge, vmap, jit and pmap all give the row's own numbers; one compilation."""
    model = tiny()
    graphdef, state = nnx.split(model)
    random = np.random.default_rng(0)
    tokens = jnp.asarray(random.integers(0, 50, (8, 12)), jnp.int32)
    segments = jnp.asarray(np.repeat([[1] * 7 + [2] * 3 + [0] * 2], 8, axis=0), jnp.int32)
    positions = jnp.asarray(np.repeat([[*range(7), *range(3), 0, 1]], 8, axis=0), jnp.int32)
    traces = 0

    def score(state: nnx.State, *row: jax.Array) -> jax.Array:
        nonlocal traces
        traces += 1
        return score_row(graphdef, state, *row)

    single = np.stack(
        [
            row_logits(model, *row)
            for row in zip(*map(np.asarray, (tokens, segments, positions)), strict=True)
        ]
    )
    rows = jax.vmap(score, in_axes=(None, 0, 0, 0))
    batched = jax.jit(rows)
    for start in (0, 2, 4):
        part = slice(start, start + 2)
        got = batched(state, tokens[part], segments[part], positions[part])
        np.testing.assert_allclose(got, single[part], atol=1e-6)
    assert traces == 1
    split = [one.reshape(8, 1, 12) for one in (tokens, segments, positions)]
    spread = jax.pmap(rows, in_axes=(None, 0, 0, 0))(state, *split)
    np.testing.assert_allclose(np.asarray(spread)[:, 0], single, atol=1e-6)


def test_unembed_takes_any_number_of_positions() -> None:
    model = tiny()
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(6, 16)), jnp.float32)
    whole = model.unembed(hidden)
    parts = jnp.concatenate([model.unembed(hidden[:1]), model.unembed(hidden[1:])])
    assert whole.shape == (6, 50)
    np.testing.assert_allclose(parts, whole, atol=1e-6)


def test_bfloat16_computes_in_bfloat16_with_float32_logits() -> None:
    wide = asset("every_head_its_own")
    narrow = load_model(str(ASSETS / "every_head_its_own"), dtype="bfloat16").model
    assert isinstance(narrow, Decoder)
    tokens, _, _ = expected("every_head_its_own")
    row = [jnp.asarray(one, jnp.int32) for one in (tokens[:64], np.ones(64), np.arange(64))]
    graphdef, state = nnx.split(narrow)
    hidden = jax.eval_shape(lambda state: nnx.merge(graphdef, state)(*row), state)
    assert hidden.dtype == jnp.bfloat16
    logits, reference = SCORE(graphdef, state, *row), SCORE(*nnx.split(wide), *row)
    assert logits.dtype == jnp.float32
    difference = float(jnp.abs(logits - reference).max())
    assert 1e-4 < difference < 0.2 * float(jnp.abs(reference).max())
    # Not rounded to bfloat16 on the way out.
    assert bool((logits != logits.astype(jnp.bfloat16).astype(jnp.float32)).any())


def test_precision_is_explicit() -> None:
    """Every matrix product of a float32 model asks for the highest precision."""
    graphdef, state = nnx.split(tiny())
    row = jax.ShapeDtypeStruct((4,), jnp.int32)
    text = str(jax.make_jaxpr(partial(score_row, graphdef))(state, row, row, row))
    assert text.count("dot_general[") == 2 * (4 + 3 + 2) + 1
    assert text.count("Precision.HIGHEST") >= text.count("dot_general[")
    assert text.count("preferred_element_type=float32") == text.count("dot_general[")


def test_tied_head_is_the_embedding_transposed() -> None:
    """C51: shared storage, one parameter, a gradient from both uses."""
    tied, untied = tiny(tied=True), tiny(tied=False)
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16)), jnp.float32)
    table = np.asarray(tied.embedding.weight[...], np.float64)
    np.testing.assert_allclose(
        tied.unembed(hidden), np.asarray(hidden, np.float64) @ table.T, atol=1e-6
    )
    count = [sum(one.size for one in jax.tree.leaves(nnx.state(model))) for model in (tied, untied)]
    assert count[1] - count[0] == 50 * 16

    graphdef, state = nnx.split(tied)

    def loss(state: nnx.State, tokens: jax.Array) -> jax.Array:
        merged = nnx.merge(graphdef, state)
        return jnp.square(merged.unembed(merged(tokens, tokens, tokens))[:, 7]).sum()

    gradient = jax.jit(jax.grad(loss))(state, jnp.asarray([1, 1, 1], jnp.int32))
    rows = np.abs(np.asarray(gradient["embedding"]["weight"][...])).max(axis=1)
    assert rows[1] > 0  # used as input
    assert rows[7] > 0  # used in the head
    assert np.count_nonzero(rows) == 2


def test_gradients_are_finite_beside_padding() -> None:
    graphdef, state = nnx.split(tiny())
    tokens, segments, positions = (jnp.asarray(one) for one in packed_pair(5, 3, 4))

    def loss(state: nnx.State) -> jax.Array:
        merged = nnx.merge(graphdef, state)
        logits = merged.unembed(merged(tokens % 50, segments, positions))
        return jnp.where(segments[:, None] > 0, jax.nn.log_softmax(logits), 0.0).sum()

    for gradient in jax.tree.leaves(jax.jit(jax.grad(loss))(state)):
        assert np.isfinite(np.asarray(gradient)).all()


def test_rematerialised_layers_have_the_same_gradient() -> None:
    graphdef, state = nnx.split(tiny(qkv_bias=True, tied=True))
    row = [jnp.asarray(one) for one in packed_pair(5, 3, 4)]

    def gradient(remat: bool) -> Callable:
        def loss(state: nnx.State, tokens: jax.Array, *rest: jax.Array) -> jax.Array:
            return jnp.sin(nnx.merge(graphdef, state)(tokens % 50, *rest, remat=remat)).sum()

        return jax.grad(loss)

    plain, again = (jax.jit(gradient(remat))(state, *row) for remat in (False, True))
    assert all(np.abs(one).max() > 0 for one in jax.tree.leaves(plain))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), plain, again)
    traced = [str(jax.make_jaxpr(gradient(remat))(state, *row)) for remat in (False, True)]
    assert [text.count("remat2[") for text in traced] == [0, 2]


def test_random_weights_have_the_stated_scale() -> None:
    linear = Linear(60, 70, bias=True, dtype=jnp.float32, rngs=nnx.Rngs(3))
    assert float(jnp.std(linear.weight[...])) == pytest.approx(0.02, rel=0.1)
    assert linear.bias is not None
    assert not linear.bias[...].any()


def test_layers_can_be_dropped() -> None:
    """Students keep some of a teacher's layers: the list is plain."""
    model = nnx.merge(*nnx.split(tiny(layers=3)))
    tokens = np.asarray([4, 3, 2, 1])
    whole = row_logits(model, tokens)
    model.layers = nnx.List([model.layers[0], model.layers[2]])
    shorter = row_logits(model, tokens)
    assert np.abs(shorter - whole).max() > 1e-6
    model.layers[1] = tiny(layers=3).layers[1]
    nnx.update(model, nnx.state(tiny()))
    np.testing.assert_array_equal(row_logits(model, tokens), row_logits(tiny(), tokens))
