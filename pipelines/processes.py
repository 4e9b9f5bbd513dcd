"""Worker processes of Beam's local runner: started, watched and ended by us.

Beam's own handler of worker processes goes on waiting when a worker dies, and joins a worker
that is in the middle of its work when the command should end. Ours answers for a dead worker,
and ends what is left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners.portability.fn_api_runner.worker_handlers import (
    BeamFnControlServicer,
    GrpcWorkerHandler,
    WorkerHandler,
)
from apache_beam.transforms.environments import Environment, python_sdk_capabilities
from google.protobuf import text_format

_URN = "stillroom:environment:process:v1"
# Seconds that an idle worker has to end by itself, and between looks at what waits for a
# dead one.
_PATIENCE, _LOOK = 30.0, 0.2

_deaths: dict[str, int] = {}


class ProcessEnvironment(Environment):
    """Names `ProcessHandler` to the runner."""

    def to_runner_api_parameter(self, context: Any) -> tuple[str, bytes]:
        return _URN, b""

    @staticmethod
    def from_runner_api_parameter(
        payload: bytes, capabilities: Any, artifacts: Any, resource_hints: Any, context: Any
    ) -> ProcessEnvironment:
        return ProcessEnvironment(capabilities, artifacts, resource_hints)

    @classmethod
    def default(cls) -> ProcessEnvironment:
        return cls(capabilities=python_sdk_capabilities(), artifacts=())


Environment.register_urn(_URN, bytes)(ProcessEnvironment)


@WorkerHandler.register_environment(_URN, bytes)
class ProcessHandler(GrpcWorkerHandler):
    """One worker process (worker.py)."""

    def __init__(self, payload: bytes, state: Any, provision_info: Any, grpc_server: Any):
        super().__init__(state, provision_info, grpc_server)
        self._closing = threading.Event()

    def start_worker(self) -> None:
        # A session of its own: Ctrl-C reaches the command alone, which then ends its workers.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipelines.worker", str(os.getpid())],
            env={**os.environ, **self._environment()},
            start_new_session=True,
        )
        threading.Thread(target=self._watch, name="watch-worker", daemon=True).start()

    def _environment(self) -> dict[str, str]:
        return {
            # What this process can import, the worker can, wherever it is from.
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "WORKER_ID": self.worker_id,
            "CONTROL_API_SERVICE_DESCRIPTOR": text_format.MessageToString(
                self.control_api_service_descriptor()
            ),
            "PIPELINE_OPTIONS": json.dumps({}),
        }

    def _watch(self) -> None:
        """Answers every request to a worker that died with an error."""
        code = self._process.wait()
        if self._closing.is_set():
            return
        _deaths[self.worker_id] = code
        waiting = self.control_conn._futures_by_id
        while not self._closing.wait(_LOOK):
            for instruction in list(waiting):
                future = waiting.pop(instruction, None)
                if future is not None:
                    future.set(
                        beam_fn_api_pb2.InstructionResponse(
                            instruction_id=instruction, error="its worker died"
                        )
                    )

    def close(self) -> None:
        # Beam closes its workers in a `finally`.
        error = sys.exc_info()[1]
        if isinstance(error, Exception):
            # Perhaps for want of a worker whose streams broke before its end was seen.
            with suppress(subprocess.TimeoutExpired):
                _deaths[self.worker_id] = self._process.wait(_LOOK)
        self._closing.set()
        if error is None:
            self.control_conn.push(BeamFnControlServicer._DONE_MARKER)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE)
        # With an error on its way, what a worker still does is in vain.
        self._process.kill()
        self._process.wait()
        self.control_conn.close()
        with suppress(grpc.RpcError):
            self.data_conn.close()


@contextmanager
def worker_deaths() -> Iterator[dict[str, int]]:
    """Exit codes, by id, of workers that ended though nobody ended them; filled as it happens."""
    _deaths.clear()
    yield _deaths
