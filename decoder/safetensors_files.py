"""Checkpoints in Hugging Face's layout: config.json and *.safetensors, whole or sharded."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Float32, UInt8
from safetensors import SafetensorError, safe_open

from decoder import rope
from decoder.checkpoint import Checkpoint, StoredTensor, read_json
from decoder.config import DecoderConfig
from decoder.config_json import from_hugging_face, numeric_part
from decoder.errors import DecoderError
from decoder.stand_ins import refuse_stand_in
from decoder.weight_files import INDEX, weight_files

ADAPTER = "adapter_config.json"

_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def read_folder(folder: Path) -> Checkpoint:
    """The checkpoint in a folder; reads the configuration and the files' headers only.

    And stored rotary frequencies, if there are any: they must be those of the configuration.
    Raises `DecoderError` for anything missing, damaged or not understood.
    """
    if (folder / ADAPTER).is_file():
        raise DecoderError(
            f"{folder} holds {ADAPTER}: an adapter, which belongs to another model's weights, and "
            "would be left out. Merge the adapter first (peft's merge_and_unload, then "
            "save_pretrained) and give the merged model's folder; where it has been merged, "
            f"remove {ADAPTER} and the adapter's weights"
        )
    config_path = folder / "config.json"
    if not config_path.is_file():
        found = sorted(path.name for path in folder.iterdir())[:10]
        raise DecoderError(
            f"{folder} has no config.json (it holds {found}). Give a folder with config.json and "
            "*.safetensors, or the path of one .gguf file"
        )
    raw_config = read_json(config_path)
    config = from_hugging_face(raw_config)
    tensors: dict[str, StoredTensor] = {}
    for path, names in weight_files(folder):
        found = _read_header(path)
        _check_index(path, names, found)
        for name, tensor in found.items():
            if name in tensors:
                raise DecoderError(
                    f"the tensor {name} is in {tensors[name].file.name} and in {path.name}; "
                    "remove the files that do not belong to this checkpoint"
                )
            tensors[name] = tensor
    if raw_config.get("model_type") == "gemma3":
        tensors = _text_tensors(tensors)
    for parameter, tensor in tensors.items():
        if stored := _FREQUENCIES.fullmatch(parameter):
            _check_frequencies(tensor, config, stored["layer"])
    return Checkpoint("safetensors", folder, config, numeric_part(raw_config), tensors)


# Of a model that also sees: what belongs to its language model, in the spelling of before and
# since transformers 5, and what does not.
_TEXT = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_VISION = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*")


def _text_tensors(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The language model's tensors, by the names that they have in a model of its own."""
    found = {}
    for name, tensor in tensors.items():
        if _VISION.fullmatch(name):
            continue
        parameter = name
        for prefix, plain in _TEXT:
            if name.startswith(prefix):
                parameter = plain + name.removeprefix(prefix)
        found[parameter] = replace(tensor, parameter=parameter)
    return found


# Releases of transformers before 4.32 saved each layer's frequencies with the weights.
_FREQUENCIES = re.compile(r"(.*\.layers\.(?P<layer>\d+)\.)?(.*\.)?rotary_emb\.inv_freq")


def _check_frequencies(tensor: StoredTensor, config: DecoderConfig, layer: str | None) -> None:
    """Raises where they are not those of the configuration, which are the ones used.

    Each to 1 in 1,000, or 1 in 100 in a half type, and none nearer than the smallest number of
    float16. Linear scaling was once applied to positions: the stored ones may be without it.
    """
    index = config.layers if layer is None else int(layer)
    kind = config.rope(index) if index < config.layers else "global"
    plain = replace(config, rope_scaling=None)
    expected = [rope.frequencies(one, kind) for one in (config, plain)]
    found, _ = tensor.load(np.dtype(np.float32))
    near = 1e-2 if tensor.dtype in ("F16", "BF16") else 1e-3
    if not any(
        found.shape == one.shape and np.allclose(found, one, rtol=near, atol=6e-8)
        for one in expected
    ):
        raise DecoderError(
            f"{tensor.file}: the tensor {tensor.name} says rotary frequencies {_ends(found)}, but "
            f"config.json (rope_theta {config.rope_theta}, head_dim {config.head_dim}) gives "
            f"{_ends(expected[0])}. Correct config.json if the tensor is right; else remove it"
        )


def _ends(frequencies: Float32[np.ndarray, "..."]) -> str:
    return f"{[float(f'{one:.4g}') for one in frequencies.reshape(-1)[:3]]}… {frequencies.shape}"


def _check_index(path: Path, names: set[str] | None, found: dict[str, StoredTensor]) -> None:
    if names is None or names == set(found):
        return
    missing, extra = sorted(names - set(found)), sorted(set(found) - names)
    raise DecoderError(
        f"{path} does not hold what {INDEX} says: missing {missing[:5]}, not listed {extra[:5]}. "
        "Download both again"
    )


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Name, dtype, shape and place of every tensor of one file, checked by safetensors."""
    refuse_stand_in(path)
    try:
        with safe_open(path, framework="np") as file:
            names = list(file.keys())
    except SafetensorError as error:
        raise DecoderError(
            f"{path} is truncated or damaged ({error}). Copy or download it again"
        ) from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {name: _stored(path, name, header[name], 8 + length) for name in names}


def _stored(path: Path, name: str, entry: dict, start: int) -> StoredTensor:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if dtype not in _DTYPES:
        raise DecoderError(
            f"{path}: the tensor {name} is stored as {dtype}; supported: {', '.join(_DTYPES)}. "
            "Quantised checkpoints have to be converted first"
        )
    if not shape or math.prod(shape) == 0:
        raise DecoderError(f"{path}: the tensor {name} has the shape {list(shape)}: no numbers")
    first, last = entry["data_offsets"]
    return StoredTensor(
        name, name, shape, dtype, path, start + first, last - first, _decoder(_DTYPES[dtype])
    )


def _decoder(
    dtype: np.dtype,
) -> Callable[[UInt8[np.ndarray, "..."]], Float32[np.ndarray, "..."]]:
    def decode(raw: UInt8[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
        return raw.view(dtype).astype(np.float32)

    return decode
