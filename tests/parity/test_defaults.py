"""A config.json that says little means what it means to transformers.

Run by `make parity`. A key that is absent has another value in each family; transformers writes
the values that it takes, and reading those must give what reading the short file gives.
"""

from typing import Any

import pytest

from decoder.config_json import from_hugging_face
from decoder.families import FAMILIES

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys(family: str) -> None:
    from transformers import AutoConfig

    written = AutoConfig.for_model(family, **SIZES).to_dict()
    short = from_hugging_face({"model_type": family, **SIZES})
    assert short == from_hugging_face(written)
