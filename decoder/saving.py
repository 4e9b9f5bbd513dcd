"""Writing a decoder as a Hugging Face folder: config.json, *.safetensors, tokenizer."""

import json
import math
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import save_file

from decoder.config_json import to_hugging_face
from decoder.errors import DecoderError
from decoder.model import Decoder
from decoder.settings import OwnSettings
from decoder.tensor_names import Part, parts
from decoder.tokenizer import Tokenizer
from decoder.weight_files import INDEX, SINGLE
from decoder.weights import DTYPES

MOST_BYTES = 5 * 10**9  # of one weight file


def save_folder(
    model: Decoder,
    folder: str | os.PathLike[str],
    tokenizer: Tokenizer | None,
    dtype: str = "float32",
    most_bytes: int = MOST_BYTES,
    settings: OwnSettings | None = None,
) -> None:
    """Write a folder that `load_model`, and transformers' AutoModelForCausalLM, load.

    Everything goes into a hidden folder beside the target, which is renamed at the end: a
    target that exists is complete. A shared head is stored once, as the embedding. Weights of
    more than `most_bytes` are cut into several files with an index; a tensor is never cut. The
    host holds one file's weights at a time.

    `tokenizer` None: the folder gets none, and the ids of its special tokens are unknown.
    `settings`: what the model's own files said (`own_settings`), which is written as it was, in
    the place of what `tokenizer` says.
    `dtype`, "float32" or "bfloat16", is that of the stored weights.
    Raises `DecoderError`: the target exists or cannot be written, a weight is not finite in
    `dtype`, or a config.json cannot say what the model is.
    """
    target = Path(folder).expanduser().absolute()
    if dtype not in DTYPES:
        raise DecoderError(f"dtype is {dtype!r}; supported: {', '.join(DTYPES)}")
    if os.path.lexists(target):
        raise DecoderError(f"{target} exists and is not overwritten. Choose another folder")
    config = to_hugging_face(
        model.config, tokenizer, dtype, None if settings is None else settings.config
    )
    own = settings.files if settings else tokenizer.files() if tokenizer else {}
    files = {**own, "config.json": _json(config)}
    unfinished = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.unfinished"
    try:
        unfinished.mkdir(parents=True)
        for name, data in files.items():
            (unfinished / name).parent.mkdir(exist_ok=True)
            (unfinished / name).write_bytes(data)
        _write_weights(model, unfinished, DTYPES[dtype], most_bytes)
        unfinished.rename(target)
    except (OSError, SafetensorError) as error:
        raise DecoderError(
            f"writing {target} failed: {error}. Nothing is left of it; free some space or choose "
            "another folder, then run the same again"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_weights(model: Decoder, folder: Path, dtype: np.dtype, most_bytes: int) -> None:
    holders: dict[str, list[tuple[nnx.Variable, Part]]] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        for part in parts(path, variable.shape, model.config):
            holders.setdefault(part.name, []).append((variable, part))
    sizes = {name: math.prod(held[0][1].shape) * dtype.itemsize for name, held in holders.items()}
    cuts = cut(sizes, most_bytes)
    weight_map = {}
    for number, names in enumerate(cuts, start=1):
        count = f"-{number:05d}-of-{len(cuts):05d}" if len(cuts) > 1 else ""
        file = SINGLE.replace(".", f"{count}.", 1)
        tensors = {name: _finite(name, _stored(holders[name]), dtype) for name in names}
        # Older releases of transformers want to be told which library's layout it is.
        save_file(tensors, folder / file, {"format": "pt"})
        # safetensors makes files that their owner alone can read.
        (folder / file).chmod((folder / "config.json").stat().st_mode)
        weight_map |= dict.fromkeys(names, file)
    if len(cuts) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_bytes(_json(index))


def cut(sizes: Mapping[str, int], most_bytes: int) -> list[list[str]]:
    """Names in their order, in parts of at most `most_bytes`; what is larger stands alone."""
    parts: list[list[str]] = []
    used = 0
    for name, size in sizes.items():
        if not parts or used + size > most_bytes:
            parts.append([])
            used = 0
        parts[-1].append(name)
        used += size
    return parts


def _stored(held: list[tuple[nnx.Variable, Part]]) -> np.ndarray:
    """A stored tensor from the parameters that it holds, one below the other."""
    held = sorted(held, key=lambda one: one[1].start or 0)
    values = [
        variable.get_value() if part.place is None else variable.get_value()[part.place]
        for variable, part in held
    ]
    return np.asarray(values[0]) if len(values) == 1 else np.concatenate(values)


def _finite(name: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(values.astype(dtype))
    if not np.isfinite(values.astype(np.float32)).all():
        raise DecoderError(
            f"the weight {name} holds numbers that are not finite in {dtype}, so that the model "
            "would give nothing but NaN. Take an earlier checkpoint"
        )
    return values


def _json(value: Mapping[str, object]) -> bytes:
    return f"{json.dumps(value, indent=2)}\n".encode()
