"""Students that are a part of another model: without a block of its layers, or with fewer rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool

from decoder import Decoder, DecoderConfig
from decoder.rows import positions_from_segments
from student.batches import Batch
from student.errors import StudentError
from student.functions import StudentFunctions, fill, parameters_of, student_functions
from student.losses import Positions, in_chunks, masked, position_losses
from student.objectives import Objective

# Labels that a search measures: the mean of so many cross-entropies, which differ by about 3
# nats from token to token, is known to 0.01.
LABELS = 65_536
_LABELS_ALONE = Objective("labels")


@dataclass(frozen=True)
class Search:
    """Which block of layers is missed least.

    Attributes:
      first, last: its layers, counted from 0, inclusive.
      cross_entropies: held-out, nats per label, of the model without the block that begins at
        layer 0, 1, …; infinite where it is not finite.
      labels: how many labels were measured.
    """

    first: int
    last: int
    cross_entropies: tuple[float, ...]
    labels: int


def drop(model: Decoder, first: int, last: int) -> Decoder:
    """The model without its layers `first` to `last`, inclusive; shares the other arrays.

    Raises:
      StudentError: the model has no such layers, or has no others.
    """
    layers = model.config.layers
    if not 0 <= first <= last < layers or last - first + 1 == layers:
        raise StudentError(
            f"layers {first} to {last} cannot be dropped from the layers 0 to {layers - 1}."
        )
    config = model.config.without_layers(first, last)
    return _filled(config, without_layers(parameters_of(model), first, last))


def trim(model: Decoder, rows: int) -> Decoder:
    """The model with only the first `rows` rows of embedding and head.

    Raises:
      StudentError: the model has fewer.
    """
    if not 1 <= rows <= model.config.vocabulary:
        raise StudentError(f"{rows} of {model.config.vocabulary} rows cannot be kept.")
    cut = ("embedding.weight", "head.weight")
    parameters = parameters_of(model)
    kept = {name: value[:rows] if name in cut else value for name, value in parameters.items()}
    return _filled(replace(model.config, vocabulary=rows), kept)


def without_layers(parameters: Mapping[str, Array], first: int, last: int) -> dict[str, Array]:
    """The parameters of the model without these layers; later ones move up."""
    kept = {}
    for name, value in parameters.items():
        module, _, rest = name.partition(".")
        if module == "layers":
            number, _, inside = rest.partition(".")
            layer = int(number)
            if first <= layer <= last:
                continue
            layer -= 0 if layer < first else last - first + 1
            name = f"layers.{layer}.{inside}"
        kept[name] = value
    return kept


def best_block(
    model: Decoder,
    count: int,
    batches: Iterable[Batch],
    *,
    legal: Bool[np.ndarray, " rows"] | None = None,
    labels: int = LABELS,
    chunk: int = 128,
    progress: Callable[[int, int], None] | None = None,
) -> Search:
    """Finds the block of `count` layers without which held-out cross-entropy is least.

    Every contiguous block is measured on the same labels, the first and the last layers
    included. Of equal ones, that of the lower layers is taken. Compiles once for each shape of
    batch (and each order of layers of several kinds), computes in the parameters' dtype, and
    never holds more than [chunk, vocabulary] logits.

    Args:
      model: the whole model.
      count: layers to drop; at least 1, less than the model has.
      batches: held-out rows; targets are not used. Read until `labels` are found.
      legal: ids that the softmax is over; all rows of the head if None.
      labels: stop reading batches at so many labels.
      chunk: positions whose logits exist at once.
      progress: called with (measurements done, measurements in all).

    Raises:
      StudentError: the count does not fit, there are no labels, or no block gives a finite
        cross-entropy.
    """
    layers = model.config.layers
    if not 1 <= count < layers:
        raise StudentError(f"{count} of the layers 0 to {layers - 1} cannot be dropped.")
    read, found = _read(batches, labels)
    candidates = layers - count + 1
    # One for all, unless the model's layers are of several kinds.
    configs = [model.config.without_layers(first, first + count - 1) for first in range(candidates)]
    measures = {
        config: jax.jit(_cross_entropy(_functions(config), legal, chunk)) for config in set(configs)
    }
    whole = parameters_of(model)
    sums = np.zeros(candidates, np.float64)
    for number, batch in enumerate(read):
        for first in range(candidates):
            parameters = without_layers(whole, first, first + count - 1)
            of_rows = measures[configs[first]](parameters, *batch)
            sums[first] += np.asarray(of_rows, np.float64).sum()
            if progress is not None:
                progress(number * candidates + first + 1, len(read) * candidates)
    means = np.where(np.isfinite(sums), sums / found, math.inf)
    best = int(np.argmin(means))
    if not math.isfinite(means[best]):
        raise StudentError(
            f"without any {count} contiguous layers the student's held-out cross-entropy is not "
            "finite. Check that the checkpoint gives sensible text; drop fewer layers."
        )
    return Search(best, best + count - 1, tuple(means.tolist()), found)


def _read(batches: Iterable[Batch], labels: int) -> tuple[list[tuple[np.ndarray, ...]], int]:
    """Tokens, segments, labels and label masks of the first batches, and the labels' number."""
    read, found = [], 0
    for batch in batches:
        read.append((batch.tokens, batch.segments, batch.labels, batch.label_mask))
        found += int(np.count_nonzero(batch.label_mask))
        if found >= labels:
            break
    if not found:
        raise StudentError(
            "--drop-layers COUNT needs held-out rows to find the block by, and there are no "
            "labels in them. Raise --held-out, or name the layers: --drop-layers FIRST-LAST."
        )
    return read, found


def _cross_entropy(
    functions: StudentFunctions, legal: Bool[np.ndarray, " rows"] | None, chunk: int
) -> Callable[..., Any]:
    """(parameters, tokens, segments, labels, mask [rows, length]) to float32 sums [rows]."""

    def of_row(parameters: Any, row: tuple[Array, ...]) -> Array:
        tokens, segments, labels, mask = row
        hidden = functions.hidden(parameters, tokens, segments, positions_from_segments(segments))
        head = {name: parameters[name] for name in functions.head}

        def of_chunk(part: tuple[Array, Positions]) -> Array:
            hidden, positions = part
            logits = masked(functions.unembed(head, hidden), legal)
            return jnp.sum(position_losses(logits, positions, _LABELS_ALONE)[0])

        parts, _ = in_chunks((hidden, Positions(labels, mask, None)), chunk)
        return jnp.sum(jax.lax.map(of_chunk, parts))

    def of_batch(parameters: Any, *batch: Array) -> Array:
        return jax.lax.map(lambda row: of_row(parameters, row), batch)

    return of_batch


def _functions(config: DecoderConfig) -> StudentFunctions:
    return student_functions(nnx.eval_shape(lambda: Decoder(config, rngs=None)))


def _filled(config: DecoderConfig, parameters: Mapping[str, Array]) -> Decoder:
    return cast(Decoder, fill(nnx.eval_shape(lambda: Decoder(config, rngs=None)), parameters))
