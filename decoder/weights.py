"""Filling a decoder with the tensors of a checkpoint, strictly.

Every parameter is filled, every tensor of the files is used, and every number is
finite; otherwise a `DecoderError` names the tensor.
"""

import re
from collections.abc import Callable, Mapping

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from decoder.checkpoint import Checkpoint, aligned_empty
from decoder.errors import DecoderError
from decoder.model import Decoder
from decoder.tensor_names import EMBEDDING, HEAD, Part, parts

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

# Puts one parameter's numbers onto devices.
Place = Callable[[np.ndarray], jax.Array]

# Tensors that repeat what the configuration says (rotary frequencies).
_REPEATED = re.compile(r".*\.rotary_emb\.inv_freq|rope_freqs\.weight")


def load_decoder(
    checkpoint: Checkpoint, dtype: str, place: Place = jax.device_put
) -> tuple[Decoder, dict[str, str]]:
    """The filled model, and the sha256 of each tensor's bytes as they were read.

    Tensors are read one at a time and placed at once: the host holds one tensor, and of the model
    what `place` leaves there.
    """
    abstract = nnx.eval_shape(lambda: Decoder(checkpoint.config, rngs=None, dtype=DTYPES[dtype]))
    graphdef, state = nnx.split(abstract)
    held: dict[str, list[tuple[nnx.Variable, Part]]] = {}
    for path, variable in nnx.to_flat_state(state):
        for part in parts(path, variable.shape, checkpoint.config):
            held.setdefault(part.name, []).append((variable, part))
    _check(checkpoint, {name: holders[0][1].shape for name, holders in held.items()})
    digests: dict[str, str] = {}
    unfinished: dict[int, _Unfinished] = {}
    for name, tensor in checkpoint.tensors.items():
        if name not in held:
            digests[name] = tensor.digest()
            continue
        values, digests[name] = tensor.load(DTYPES[dtype])
        for variable, part in held[name]:
            if part.place is None:
                first = part.start or 0
                rows = slice(first, first + variable.shape[0])
                variable.set_value(place(values if part.start is None else values[rows]))
                continue
            found = unfinished.setdefault(id(variable), _Unfinished(variable.shape, values.dtype))
            if found.put(part.place, values):
                variable.set_value(place(unfinished.pop(id(variable)).values))
    if checkpoint.config.tied and HEAD in checkpoint.tensors:
        _check_redundant_head(checkpoint, digests)
    return nnx.merge(graphdef, state), digests


class _Unfinished:
    """A parameter that several stored tensors make up, while they come in."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.values, self.left = aligned_empty(shape, dtype), shape[0]

    def put(self, place: int, values: np.ndarray) -> bool:
        """Fills one place; whether it was the last."""
        self.values[place] = values
        self.left -= 1
        return not self.left


def _check(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    stored = checkpoint.tensors
    missing = sorted(set(shapes) - set(stored))
    if missing:
        hint = (
            ". The configuration says that head and embedding are not shared "
            "(tie_word_embeddings false)"
            if missing == [HEAD]
            else ""
        )
        raise DecoderError(
            f"{checkpoint.place} lacks {_list(missing)}, which this configuration needs{hint}"
        )
    extra = sorted(name for name in stored if name not in shapes and not _known(checkpoint, name))
    if extra:
        raise DecoderError(
            f"{checkpoint.place} holds {_list(extra)}, for which the model of this configuration "
            "has no parameter. A checkpoint with other parts gives other numbers; check "
            "config.json (attention_bias, mlp_bias, num_hidden_layers, tie_word_embeddings)"
        )
    for name, shape in shapes.items():
        if stored[name].shape != tuple(shape):
            raise DecoderError(
                f"{stored[name].file}: the tensor {stored[name].name} has the shape "
                f"{list(stored[name].shape)}; this configuration needs {list(shape)}"
            )


def _known(checkpoint: Checkpoint, name: str) -> bool:
    return bool(_REPEATED.fullmatch(name)) or (name == HEAD and checkpoint.config.tied)


def _check_redundant_head(checkpoint: Checkpoint, digests: Mapping[str, str]) -> None:
    """A stored head beside a shared one must be the embedding again."""
    head, embedding = checkpoint.tensors[HEAD], checkpoint.tensors[EMBEDDING]
    if head.shape == embedding.shape and (
        digests[HEAD] == digests[EMBEDDING]
        if head.dtype == embedding.dtype
        else head.equals(embedding)
    ):
        return
    raise DecoderError(
        f"{checkpoint.place}: config.json says that head and embedding are shared "
        f"(tie_word_embeddings), but {HEAD} {list(head.shape)} differs from {EMBEDDING} "
        f"{list(embedding.shape)}. Set tie_word_embeddings to false if the head is meant"
    )


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"the tensor {shown}" if len(names) == 1 else f"{len(names)} tensors ({shown}, …)"
