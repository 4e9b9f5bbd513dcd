"""The package's front door: names on demand."""

import pytest

import decoder


@pytest.mark.parametrize("name", decoder.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(decoder, name).__name__ == name
    assert name in dir(decoder)


def test_another_name() -> None:
    with pytest.raises(AttributeError, match="module 'decoder' has no attribute 'load_models'"):
        _ = decoder.load_models  # pyright: ignore
