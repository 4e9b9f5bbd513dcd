"""The teacher in a worker process: loaded once, checked, compiled for one shape."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

import decoder
from decoder.devices import FAILURES, check_backend
from decoder.errors import BackendError, DecoderError
from pipelines.errors import TeacherError
from pipelines.plan import Plan
from pipelines.scoring import make_scorer, replicate, spread, spreading, teacher_functions

_loads = 0
_lock = threading.Lock()


@contextmanager
def named_by_manifest(so: bool) -> Iterator[None]:
    """Adds to what is wrong with a teacher where its name is from, if `so`: not from the user."""
    try:
        yield
    except DecoderError as error:
        if not so or isinstance(error, BackendError):
            raise
        raise TeacherError(
            f"{error}. That is where the manifest says the teacher was; if it is elsewhere now, "
            "say so with --teacher."
        ) from error


def loads() -> int:
    """How often this process has loaded a teacher."""
    return _loads


class Teacher:
    """A loaded teacher that scores micro-batches of one shape.

    Attributes:
      batch: rows in a micro-batch, over all local devices.
    """

    def __init__(self, plan: Plan):
        global _loads
        with _lock:
            _loads += 1
        options, manifest = plan.options, plan.manifest
        sharded = options.shard_teacher
        check_backend()
        devices = jax.local_devices()
        # A teacher that no device can hold: each tensor is cut as it is read. One that a function
        # makes is made in the host's memory, and then cut.
        host = _host() if sharded else None
        with jax.default_device(host):
            loaded = decoder.load_model(
                options.teacher,
                options.teacher_revision,
                options.precision,
                place=spreading(devices) if sharded else jax.device_put,
            )
        if loaded.fingerprint != manifest.teacher["fingerprint"]:
            raise TeacherError(
                f"the teacher that this worker loaded from {options.teacher} is not the one the "
                f"cache was begun with (fingerprint {loaded.fingerprint[:12]}…, expected "
                f"{manifest.teacher['fingerprint'][:12]}…). Every worker needs the same files."
            )
        legal = None
        if plan.holes:
            legal = np.ones(manifest.encoding.vocabulary, bool)
            legal[list(plan.holes)] = False
        self.batch = options.micro_batch * (1 if sharded else len(devices))
        functions, parameters = teacher_functions(loaded.model)
        self._parameters = (spread if sharded else replicate)(parameters, devices)
        self._score = make_scorer(
            functions, plan.targets, options.length, options.micro_batch, devices, legal, sharded
        )

    def score(self, tokens: np.ndarray, segments: np.ndarray, rows: np.ndarray) -> Any:
        """Dispatches one micro-batch [batch, length]; does not wait for the result."""
        return self._score(self._parameters, tokens, segments, rows)


def _host() -> Any:
    """The host's memory as a device of JAX, which it has only if it is not told otherwise."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except FAILURES as error:
        asked = os.environ.get("JAX_PLATFORMS", "")
        raise TeacherError(
            f"--shard-teacher needs JAX's backend cpu beside the others, and JAX_PLATFORMS={asked} "
            f"leaves it out. Set JAX_PLATFORMS={asked},cpu."
        ) from error
