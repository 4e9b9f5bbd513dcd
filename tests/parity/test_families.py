"""Every family against transformers on a CPU: logits, gradients, packing, saving, bfloat16.

Run by `make parity`, in an environment that has torch and transformers. The checkpoints are
random and small, written by transformers; see `layouts`.
"""

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from decoder.loading import load_model
from decoder.model import Decoder
from decoder.saving import save_folder
from tests.parity.layouts import LAYOUTS, load, logits, model_type, random_tokens, write

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

LONG = 1030  # positions beyond 1,000
SHORT = 90  # beyond every window
FAMILIES = [layout for layout in LAYOUTS if model_type(layout) == layout]


@dataclass(frozen=True)
class Pair:
    """A checkpoint, loaded by transformers and by us, in float32."""

    folder: Path
    theirs: Any
    ours: Decoder


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def pair(layout: str) -> Pair:
        folder = tmp_path_factory.mktemp("families") / layout
        return Pair(folder, write(folder, layout), decoder_at(folder))

    return pair


def decoder_at(folder: Path, dtype: str = "float32") -> Decoder:
    model = load_model(str(folder), dtype=dtype).model
    assert isinstance(model, Decoder)
    return model


@partial(jax.jit, static_argnums=0)
def score(graphdef: nnx.GraphDef, state: nnx.State, *row: jax.Array) -> jax.Array:
    model = nnx.merge(graphdef, state)
    return model.unembed(model(*row))


def row_logits(model: Decoder, tokens: np.ndarray, *rest: np.ndarray) -> np.ndarray:
    """Logits of one row, by default one document."""
    length = len(tokens)
    segments, positions = rest or (np.ones(length, np.int32), np.arange(length, dtype=np.int32))
    row = (jnp.asarray(one) for one in (tokens, segments, positions))
    return np.asarray(score(*nnx.split(model), *row))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits(pairs: Any, layout: str) -> None:
    """Of two documents packed into one row: those of each alone, to 1e-4 at every position."""
    pair = pairs(layout)
    documents, padding = [random_tokens(LONG, 1), random_tokens(SHORT, 2)], random_tokens(9, 3)
    sizes = [LONG, SHORT, 9]
    packed = row_logits(
        pair.ours,
        np.concatenate([*documents, padding]),
        np.repeat(np.asarray([1, 2, 0], np.int32), sizes),
        np.concatenate([np.arange(size, dtype=np.int32) for size in sizes]),
    )
    assert np.isfinite(packed).all()
    for document, start in zip(documents, (0, LONG), strict=True):
        expected = logits(pair.theirs, document)
        assert np.abs(expected).max() > 1
        difference = np.abs(packed[start : start + len(document)] - expected)
        parts = [float(part.max()) for part in np.array_split(difference, 10)]
        assert difference.max() < 1e-4, f"at most, in ten parts: {parts}"


# Sizes whose exponents 2 i / head_dim are no binary fractions: frequencies off by a bit show.
UNEVEN = {
    family: {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        **({"hidden_size": 72} if family == "phi3" else {"head_dim": 12}),
    }
    for family in FAMILIES
}


@pytest.mark.parametrize("family", FAMILIES)
def test_long_documents_and_heads_of_12(tmp_path: Path, family: str) -> None:
    """To 1e-4 of transformers in float64, over 1,030 positions.

    In float32 transformers is itself further from that for Phi 3 of four layers (1.0e-4 to
    1.4e-4 with other seeds and heads, where we are 0.9e-4 to 1.0e-4), so that the two can differ
    by the sum. Angles, norms and softmax are float32 in its code whatever the dtype: the
    frequencies are those that it always computes.
    """
    write(tmp_path, family, seed=2, **UNEVEN[family])
    document = random_tokens(LONG, 1)
    expected = logits(load(tmp_path).double(), document)
    assert np.abs(expected).max() > 1
    assert np.abs(row_logits(decoder_at(tmp_path), document) - expected).max() < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_and_saving(pairs: Any, tmp_path: Path, layout: str) -> None:
    """Of the mean cross-entropy, every tensor to 1e-3 of its largest entry.

    Our gradients are put into a model, written by `save_folder` and loaded by transformers,
    which gives them the names that its own have.
    """
    import torch

    pair, tokens = pairs(layout), random_tokens(SHORT, 4)
    graphdef, state = nnx.split(pair.ours)
    row = [jnp.asarray(one) for one in (tokens, np.ones(SHORT, np.int32), np.arange(SHORT))]

    def loss(state: nnx.State) -> jax.Array:
        model = nnx.merge(graphdef, state)
        found = jax.nn.log_softmax(model.unembed(model(*row, remat=True)))
        return -found[jnp.arange(SHORT - 1), row[0][1:]].mean()

    value, gradients = jax.jit(jax.value_and_grad(loss))(state)
    save_folder(nnx.merge(graphdef, gradients), tmp_path / "gradients", None)
    ours = dict(load(tmp_path / "gradients").named_parameters())

    batch = torch.tensor(tokens.astype(np.int64))[None]
    reference = load(pair.folder)
    expected = reference(batch, labels=batch).loss
    expected.backward()
    assert float(value) == pytest.approx(expected.item(), rel=1e-5)
    theirs = dict(reference.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        wanted, found = parameter.grad.numpy(), ours[name].detach().numpy()
        assert np.abs(wanted).max() > 0, name
        # A bias of keys without positions changes nothing: its gradient is rounding alone.
        bound = 1e-3 * max(np.abs(wanted).max(), 1e-4)
        assert np.abs(found - wanted).max() < bound, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_by_us_and_loaded_by_transformers(pairs: Any, tmp_path: Path, layout: str) -> None:
    pair, tokens = pairs(layout), random_tokens(SHORT, 5)
    save_folder(pair.ours, tmp_path / "out", None, most_bytes=30_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    expected = logits(pair.theirs, tokens)
    np.testing.assert_array_equal(logits(load(tmp_path / "out"), tokens), expected)
    again = decoder_at(tmp_path / "out")
    assert again.config == pair.ours.config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(pair.ours))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16(tmp_path: Path, layout: str) -> None:
    """As near to the float32 logits as transformers in bfloat16 is, and within 5 %.

    Root mean squares over a position's logits, at nine positions of ten; the weights are bfloat16
    on all sides. The tenth is within 10 % where there are no experts: with them, a rounding may
    send a token through another expert, in transformers as here.
    """
    reference, tokens = write(tmp_path, layout, dtype="bfloat16"), random_tokens(SHORT, 6)
    exact = logits(reference, tokens)
    theirs = _sizes(logits(load(tmp_path, "bfloat16"), tokens) - exact)
    model = decoder_at(tmp_path, "bfloat16")
    ours = _sizes(row_logits(model, tokens) - exact) / _sizes(exact).mean()
    theirs = theirs / _sizes(exact).mean()
    usual = np.quantile(ours, 0.9)
    assert 1e-3 < usual < 0.05
    assert usual < 1.1 * np.quantile(theirs, 0.9)
    if not model.config.sparse:
        assert ours.max() < 0.1


def _sizes(values: np.ndarray) -> np.ndarray:
    """Of each position, float64 [length]."""
    return np.sqrt(np.mean(np.square(values, dtype=np.float64), axis=-1))
