"""Teachers that are functions: the convention, its violations, and their fingerprints."""

import importlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from decoder import function_source
from decoder.errors import DecoderError
from decoder.loading import fingerprint_model, load_model
from tests.decoder import functions

HERE = "tests.decoder.functions:"
ROW = (jnp.asarray([1, 2, 3], jnp.int32),) * 3


def test_logits_become_hidden_states_with_an_unembedding() -> None:
    loaded = load_model(HERE + "Table")
    assert loaded.vocabulary_rows == 11
    assert loaded.max_positions == 99
    assert loaded.parameters == 121
    assert (loaded.source, loaded.revision) == (HERE + "Table", None)
    model = loaded.model
    logits = model.unembed(model(*ROW))  # pyright: ignore
    np.testing.assert_array_equal(logits, functions.Table()(*ROW))
    assert logits.dtype == jnp.float32


def test_hidden_states_and_an_unembedding_of_its_own() -> None:
    loaded = load_model(HERE + "Hidden")
    assert isinstance(loaded.model, functions.Hidden)
    assert loaded.vocabulary_rows == 7


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Batched", r"hidden states of a row of 8 are a .* of shape \(1, 8, 11\); expected"),
        ("Integers", "the hidden states are int32; expected a floating dtype"),
        ("Raises", r"hidden states failed on one row .*ValueError: needs a batch axis"),
        ("TwoArguments", r"hidden states failed on one row .*TypeError"),
        ("Several", "hidden states of a row of 8 are a dict of shape None"),
        ("no_module", "returned a ArrayImpl; expected a flax.nnx.Module"),
        ("not_a_function", "is a int; expected a function"),
        ("absent", "tests.decoder.functions has no attribute 'absent'"),
    ],
)
def test_what_does_not_follow_the_convention(name: str, text: str) -> None:
    with pytest.raises(DecoderError, match=text):
        load_model(HERE + name)


@pytest.mark.parametrize("name", ["Modes", "modes_in_jit", "modes_in_remat", "modes_off"])
def test_a_module_is_put_into_evaluation_mode(name: str) -> None:
    model: Any = load_model(HERE + name).model
    table = functions.Table()(*ROW)
    norm = functions.Modes().norm
    mean = np.linspace(-1, 1, functions.VOCABULARY)
    expected = (np.asarray(table) - mean) / np.sqrt(1 + norm.epsilon)
    np.testing.assert_allclose(model(*ROW), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(model(*ROW), model(*ROW))


def test_an_eval_of_its_own_is_called() -> None:
    model: Any = load_model(HERE + "OwnEval").model
    np.testing.assert_array_equal(model(*ROW), functions.Table()(*ROW))


def test_the_mode_is_no_part_of_the_fingerprint() -> None:
    # The names differ, which are a part of it; so the states alone are compared.
    found = [function_source.build(HERE + name)[0] for name in ("Modes", "modes_off")]
    prints = [function_source.fingerprint(HERE + "Modes", model) for model in found]
    assert prints[0] == prints[1] == fingerprint_model(HERE + "Modes")
    training = function_source.LogitsModel(functions.Modes())
    assert function_source.fingerprint(HERE + "Modes", training) == prints[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DropsDirectly", "computing hidden states still draws random numbers"),
        ("DropsInJit", "computing hidden states still draws random numbers"),
        ("OwnFlag", "computing hidden states still draws random numbers"),
        ("DropsInUnembed", "computing logits still draws random numbers"),
        ("NormalisesDirectly", "computing hidden states still changes batch statistics"),
        ("NormalisesInRemat", "computing hidden states still changes batch statistics"),
    ],
)
def test_what_stays_in_training_mode_is_refused(name: str, text: str) -> None:
    with pytest.raises(DecoderError, match=f"{HERE}{name}: although eval.. was called .* {text}"):
        load_model(HERE + name)


def test_a_module_that_cannot_be_imported() -> None:
    with pytest.raises(DecoderError, match=r"importing no_such_package failed .* PYTHONPATH"):
        load_model("no_such_package:teacher")


def test_fingerprint_follows_name_state_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_model(HERE + "Table").fingerprint == fingerprint_model(HERE + "Table")
    assert fingerprint_model(HERE + "Table") == fingerprint_model(HERE + "Table")
    names = {fingerprint_model(HERE + name) for name in ("Table", "shifted", "Hidden", "WithKeys")}
    assert len(names) == 4
    code = tmp_path / "own_teacher.py"
    code.write_text("from tests.decoder.functions import Table\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    before = fingerprint_model("own_teacher:Table")
    code.write_text("from tests.decoder.functions import Table  # changed\n")
    assert fingerprint_model("own_teacher:Table") != before


def test_fingerprint_sees_a_single_number() -> None:
    table = functions.Table()
    before = function_source.fingerprint(HERE + "Table", table)
    table.table[...] = table.table[...].at[3, 4].add(1e-6)
    assert function_source.fingerprint(HERE + "Table", table) != before


def test_a_function_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_teacher.py").write_text("def build():\n    raise ValueError('boom')\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(DecoderError, match="failing_teacher:build failed: ValueError: boom"):
        load_model("failing_teacher:build")
