"""Writes tests/decoder/golden/: one small checkpoint of each family with transformers' logits.

    .venv-parity/bin/python -m tests.parity.make_golden

Run it again after a change of `layouts` or `tests/decoder/golden_checkpoints.py`.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tests.decoder.golden_checkpoints import GOLDEN, KEPT, tokens, write
from tests.parity import layouts

NAMES = [
    *("mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3", "phi3"),
    *("olmo2", "mixtral", "qwen3_moe"),
]
# Of a config.json, what says nothing about the model's numbers and changes with the release.
_DROPPED = ("transformers_version", "dtype", "initializer_range", "use_cache")


def golden(folder: Path, name: str, seed: int) -> dict[str, Any]:
    """The content of one file."""
    layouts.write(folder / "shapes", name)
    made = describe(folder / "shapes", seed)
    reference = layouts.load(write(folder / "values", made))
    return finished(made, layouts.logits(reference, tokens(made)))


def describe(folder: Path, seed: int) -> dict[str, Any]:
    """Configuration and shapes of a saved checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in _DROPPED}
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = [[key, file.get_slice(key).get_shape()] for key in sorted(file.keys())]
    dtype = ("bfloat16", "float16")[seed % 2]
    return {"config": config, "tensors": shapes, "seed": seed, "dtype": dtype}


def finished(made: dict[str, Any], logits: Any) -> dict[str, Any]:
    rows = [[float(f"{value:.6g}") for value in logits[place]] for place in KEPT]
    return {**made, "positions": KEPT, "logits": rows}


def save(name: str, made: dict[str, Any]) -> None:
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in made.items()]
    (GOLDEN / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for seed, name in enumerate(NAMES):
            save(name, golden(Path(folder) / name, name, seed))


if __name__ == "__main__":
    sys.exit(main())
