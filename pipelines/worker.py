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


def main() -> None:
    end_with(int(sys.argv[1]))
    # Below errors, Beam tells of every channel it opens.
    logging.disable(logging.WARNING)
    from apache_beam.runners.worker import sdk_worker_main

    sdk_worker_main.main([])


if __name__ == "__main__":
    main()
