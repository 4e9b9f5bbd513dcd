"""The checkpoints of tests/decoder/golden/: written anew from a seed, with transformers' logits.

Each JSON file holds a config.json as transformers wrote it, name and shape of every tensor, how
their values follow from a seed, and float32 logits of transformers at some positions of one
document. `tests.parity.make_golden` writes them.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.json"))
LENGTH = 60
KEPT = [0, 1, 17, 30, 45, 46, 58, 59]

_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


def read(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def tokens(golden: dict[str, Any]) -> np.ndarray:
    """int32 [LENGTH]; `RandomState` gives the same numbers in every release of numpy."""
    config = golden["config"].get("text_config", golden["config"])
    random = np.random.RandomState(golden["seed"] + 1)
    return random.randint(0, config["vocab_size"], LENGTH).astype(np.int32)


def tensors(golden: dict[str, Any]) -> dict[str, np.ndarray]:
    """Values of deviation 0.25, around 1 for norms whose weights are not added to 1."""
    random = np.random.RandomState(golden["seed"])
    gemma = golden["config"]["model_type"].startswith("gemma")
    values = {}
    for name, shape in golden["tensors"]:
        center = 1.0 if name.endswith("norm.weight") and not gemma else 0.0
        drawn = center + 0.25 * random.standard_normal(shape)
        values[name] = drawn.astype(_DTYPES[golden["dtype"]])
    return values


def write(folder: Path, golden: dict[str, Any]) -> Path:
    """The checkpoint, as a folder that transformers and we read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(golden["config"]))
    save_file(tensors(golden), folder / "model.safetensors", {"format": "pt"})
    return folder
