"""A backend that JAX does not have is named, with those that it has."""

import subprocess

import jax
import pytest

from decoder import devices
from decoder.errors import BackendError

PLATFORMS, NAME = "JAX_PLATFORMS", "JAX_PLATFORM_NAME"


@pytest.fixture
def broken(monkeypatch):
    """JAX fails to open its devices, as it is told to; another process lists two backends."""
    listed = subprocess.CompletedProcess([], 0, "a line of another library\ncpu, cuda\n")
    monkeypatch.setattr(devices.subprocess, "run", lambda *_, **__: listed)
    for name in (PLATFORMS, NAME):
        monkeypatch.delenv(name, raising=False)

    def fail(error: Exception) -> None:
        def raises() -> None:
            raise error

        monkeypatch.setattr(jax, "devices", raises)

    return fail


def test_what_is_there_is_opened():
    devices.check_backend()


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("Unable to\ninitialize 'tpu'")])
@pytest.mark.parametrize(
    "given", [{PLATFORMS: "tpu,cpu"}, {NAME: "tpu"}, {PLATFORMS: "x", NAME: "y"}]
)
def test_what_is_asked_for_is_named(broken, monkeypatch, error, given):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    broken(error)
    with pytest.raises(BackendError) as found:
        devices.check_backend()
    text = str(found.value)
    settings = " ".join(f"{name}={value!r}" for name, value in given.items())
    assert text.startswith(f"{settings} asks for a backend that JAX does not have here.")
    assert "Those that it has: cpu, cuda." in text
    assert "\n" not in text


def test_where_nothing_is_asked_for_the_reason_is_jaxs(broken):
    broken(RuntimeError("the driver is too old\nmore of it"))
    with pytest.raises(BackendError, match=r"cannot open its devices: the driver is too old\. Try"):
        devices.check_backend()
    broken(AssertionError())
    with pytest.raises(BackendError, match=r"cannot open its devices: it does not say why\. Try"):
        devices.check_backend()


def test_another_failure_stays_what_it_is(broken):
    broken(ZeroDivisionError("a fault of ours"))
    with pytest.raises(ZeroDivisionError):
        devices.check_backend()
