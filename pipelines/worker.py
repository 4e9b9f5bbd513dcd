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
    """Ends this process within a second of the end of its parent, process `owner`."""

    def watch() -> None:
        # An ended process that nobody has waited for still exists, but has no children.
        while os.getppid() == owner:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-owner", daemon=True).start()


# Beam tells on these of every stream whose other end is gone, and once more of errors that
# are raised as well.
_LOGGERS = (
    "apache_beam.runners.common",
    "apache_beam.runners.worker.data_plane",
    "apache_beam.runners.worker.sdk_worker",
    "apache_beam.runners.worker.sdk_worker_main",
)


@contextmanager
def quiet_beam() -> Iterator[None]:
    """Keeps Beam from printing tracebacks of what it raises, and of streams that ended."""
    import grpc

    before = threading.excepthook
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if not isinstance(arguments.exc_value, grpc.RpcError):
            before(arguments)

    threading.excepthook = hook
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        threading.excepthook = before
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def main() -> None:
    end_with(int(sys.argv[1]))
    # Below errors, Beam tells of every channel it opens.
    logging.disable(logging.WARNING)
    import grpc
    from apache_beam.runners.worker import sdk_worker_main

    with quiet_beam():
        try:
            sdk_worker_main.main([])
        except grpc.RpcError:
            # The command has ended, and has said why.
            os._exit(1)


if __name__ == "__main__":
    main()
