"""A worker process of the local runner: `python -m pipelines.worker OWNER`.

It is Beam's own worker, quiet, and gone when the command that started it (process OWNER)
is gone: a killed command leaves nobody behind who holds memory and devices.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


def end_with(owner: int) -> None:
    """Ends this process within a second of the end of another one."""

    def watch() -> None:
        while True:
            try:
                os.kill(owner, 0)
            except ProcessLookupError:
                os._exit(1)
            time.sleep(1)

    threading.Thread(target=watch, name="end-with-owner", daemon=True).start()


@contextmanager
def quiet_streams() -> Iterator[None]:
    """Keeps Beam's threads from printing a traceback for a stream whose other end is gone."""
    import grpc

    before = threading.excepthook
    logger = logging.getLogger("apache_beam.runners.worker.data_plane")
    level = logger.level

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if not isinstance(arguments.exc_value, grpc.RpcError):
            before(arguments)

    threading.excepthook = hook
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        threading.excepthook = before
        logger.setLevel(level)


def main() -> None:
    end_with(int(sys.argv[1]))
    # Below errors, Beam tells of every channel it opens.
    logging.disable(logging.WARNING)
    import grpc
    from apache_beam.runners.worker import sdk_worker_main

    logging.getLogger(sdk_worker_main.__name__).disabled = True
    with quiet_streams():
        try:
            sdk_worker_main.main([])
        except grpc.RpcError:
            # The command has ended, and has said why.
            os._exit(1)


if __name__ == "__main__":
    main()
