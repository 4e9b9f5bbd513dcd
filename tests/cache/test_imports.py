"""What importing the package costs: none of the big libraries."""

import subprocess
import sys


def test_importing_the_cache_loads_no_framework() -> None:
    code = """
import sys
import cache, cache.consistency, cache.options, cache.runlog, cache.shards, cache.show
import cache.summary, cache.verify
heavy = {"jax", "jaxlib", "flax", "optax", "orbax", "apache_beam", "grain", "datasets", "torch",
         "transformers", "decoder", "pipelines", "student", "stillroom", "beartype"}
print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_package_exports_what_it_says() -> None:
    import cache

    for name in cache.__all__:
        assert getattr(cache, name) is not None
    assert sorted(cache.__all__) == sorted(set(cache.__all__))
