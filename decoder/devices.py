"""JAX's backend: what is said where the one that was asked for is not there."""

import os
import subprocess
import sys

import jax

from decoder.errors import BackendError

# What JAX raises where it cannot open a backend; an assertion fails where it skips all of them.
FAILURES = (RuntimeError, AssertionError)

_ASKED = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")
_LIST = "from jax.extend.backend import backends; print(*backends(), sep=', ')"


def check_backend() -> None:
    """Opens JAX's devices, before anything else does.

    Raises:
      BackendError: they cannot be opened; names the variable that asks for them.
    """
    try:
        jax.devices()
    except FAILURES as error:
        raise missing_backend(str(error)) from error


def missing_backend(reason: str) -> BackendError:
    """The error where devices cannot be opened, here or in another process.

    Args:
      reason: what JAX said; for where nothing was asked for.
    """
    asked = {name: os.environ[name] for name in _ASKED if os.environ.get(name)}
    if not asked:
        why = reason.splitlines()[0] if reason else "it does not say why"
        return BackendError(f"JAX cannot open its devices: {why}. Try JAX_PLATFORMS=cpu.")
    # In another process: this one has tried to open its backends already.
    rest = {name: value for name, value in os.environ.items() if name not in asked}
    command = [sys.executable, "-P", "-c", _LIST]
    found = subprocess.run(command, capture_output=True, text=True, env=rest)
    there = found.stdout.split("\n")[-2] if found.returncode == 0 else "none"
    settings = " ".join(f"{name}={value!r}" for name, value in asked.items())
    return BackendError(
        f"{settings} asks for a backend that JAX does not have here. Those that it has: {there}. "
        "Name one of them, or install what the other needs (for NVIDIA: pip install 'jax[cuda12]')."
    )
