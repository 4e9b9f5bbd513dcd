"""Loading a model by its name, and the fingerprint of what was loaded."""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from typing import Any

import jax
from flax import nnx

from decoder import function_source
from decoder.checkpoint import Checkpoint
from decoder.errors import DecoderError
from decoder.gguf_checkpoint import read_gguf
from decoder.safetensors_files import read_folder
from decoder.source import Source, resolve
from decoder.tensor_names import HEAD
from decoder.weights import DTYPES, Place, load_decoder

_HASHING_THREADS = 4  # sha256 releases the GIL; beyond this, storage is the limit


@dataclass(frozen=True)
class ModelDescription:
    """What a model is, known without its weights in memory.

    `revision` is the commit of a hub name. `vocabulary_rows` counts the head's
    rows, which may be more than the tokenizer has tokens. `fingerprint` is sha256
    over what in the configuration can change numbers, and every tensor's name,
    shape, dtype and bytes: the same for the same model whatever its folder is
    called and however its tensors are spread over files. `parameters` counts
    shared ones once.
    """

    source: str
    revision: str | None
    description: Mapping[str, Any]
    vocabulary_rows: int
    max_positions: int | None
    fingerprint: str
    parameters: int


@dataclass(frozen=True)
class LoadedModel(ModelDescription):
    """A model ready to score rows: `model(tokens, segments, positions)` and `model.unembed`.

    `fingerprint` is that of the bytes that were loaded.
    """

    model: nnx.Module


def load_model(
    source: str,
    revision: str | None = None,
    dtype: str = "float32",
    place: Place = jax.device_put,
) -> LoadedModel:
    """Load a folder, hub name, GGUF file or `package.module:function`.

    `dtype` ("float32" or "bfloat16") is that of the parameters and, with it, of
    the computation; a function chooses its own. `place` puts each parameter onto
    devices as soon as it is read, for a model that no device holds as a whole:
    `lambda values: jax.device_put(values, sharding)`; a function's are where it puts
    them. Raises `DecoderError`.
    """
    if dtype not in DTYPES:
        raise DecoderError(f"dtype is {dtype!r}; supported: {', '.join(DTYPES)}")
    resolved = resolve(source, revision)
    if resolved.function is not None:
        return _load_function(resolved.function)
    checkpoint = _checkpoint(resolved)
    model, digests = load_decoder(checkpoint, dtype, place)
    return LoadedModel(**_fields(source, resolved, checkpoint, digests), model=model)


def describe_model(source: str, revision: str | None = None) -> ModelDescription:
    """What `load_model` would load, from the files alone. Raises `DecoderError`."""
    resolved = resolve(source, revision)
    if resolved.function is not None:
        loaded = _load_function(resolved.function)
        names = (field.name for field in fields(ModelDescription))
        return ModelDescription(**{name: getattr(loaded, name) for name in names})
    checkpoint = _checkpoint(resolved)
    names = list(checkpoint.tensors)
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        digests = list(pool.map(lambda name: checkpoint.tensors[name].digest(), names))
    digests = dict(zip(names, digests, strict=True))
    return ModelDescription(**_fields(source, resolved, checkpoint, digests))


def fingerprint_model(source: str, revision: str | None = None) -> str:
    """The fingerprint that `load_model` would report, from the files alone."""
    return describe_model(source, revision).fingerprint


def _fields(
    source: str, resolved: Source, checkpoint: Checkpoint, digests: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "source": source,
        "revision": resolved.revision,
        "description": {
            "kind": checkpoint.kind,
            "family": checkpoint.config.family,
            "config": asdict(checkpoint.config),
        },
        "vocabulary_rows": checkpoint.config.vocabulary,
        "max_positions": checkpoint.config.max_positions,
        "fingerprint": checkpoint.fingerprint(digests),
        "parameters": sum(
            math.prod(tensor.shape)
            for name, tensor in checkpoint.tensors.items()
            if not (checkpoint.config.tied and name == HEAD)
        ),
    }


def count_parameters(model: nnx.Module) -> int:
    """Numbers in the model's parameters; a shared one counts once."""
    return sum(variable.size for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)))


def _checkpoint(source: Source) -> Checkpoint:
    return read_gguf(source.files) if source.kind == "gguf" else read_folder(source.files)


def _load_function(name: str) -> LoadedModel:
    model, rows = function_source.build(name)
    return LoadedModel(
        model=model,
        source=name,
        revision=None,
        description={"kind": "function", "family": type(model).__name__, "config": {}},
        vocabulary_rows=rows,
        max_positions=getattr(model, "max_positions", None),
        fingerprint=function_source.fingerprint(name, model),
        parameters=count_parameters(model),
    )
