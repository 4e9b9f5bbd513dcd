"""Settings that every test runs under: strict JAX, several CPU devices, no network."""

import atexit
import os
import shutil
import signal
import tempfile

# Before anything imports JAX: eight virtual devices, and no look-ups of hubs.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

# Conversions of the tests' corpora do not belong into the user's own cache.
_datasets = tempfile.mkdtemp(prefix="stillroom-datasets-")
os.environ["HF_DATASETS_CACHE"] = _datasets
atexit.register(shutil.rmtree, _datasets, ignore_errors=True)

# A suite that runs in the background or under nohup inherits signals that are ignored. The
# commands that tests start and stop must not.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
