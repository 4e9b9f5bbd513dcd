"""What the students of quality.py learn of their teacher, and how many bytes that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from cache.encoding import encode_shard
from cache.format import Encoding
from pipelines.sampling import position_bits
from pipelines.targets import TargetSettings, select_targets
from student.batches import Targets
from student.objectives import Objective

# Rows whose logits exist at one time.
_ROWS = 8
# Stored bytes of an id and of a log-prob; of an exact count and the tail's mass.
_ID, _LOGPROB, _POSITION = 2, 2, 1 + 2


@dataclass(frozen=True)
class Recipe:
    """How one kind of student is trained.

    Attributes:
      name: in the table.
      group: the section of the benchmark.
      objective: of the fused loss; None for the full distribution.
      k, exact: entries and, with a sampled tail, the least number of exact ones.
      tail: "replacement": n ids drawn from the whole distribution with replacement, each
        weighing (times drawn) / n ("Sparse Logit Sampling", Anshumann et al., 2025), n such
        that a position takes as many bytes as that of `sampled` with the same k and exact.
    """

    name: str
    group: str
    objective: Literal["labels", "sampled", "bucket", "renormalise"] | None
    k: int = 0
    exact: int = 0
    tail: Literal["none", "sampled", "replacement"] = "none"


EXACT = {8: 2, 16: 4, 64: 16}
RECIPES = (
    Recipe("hard labels", "labels", "labels"),
    Recipe("full distribution", "full", None),
    *(
        Recipe(f"exact k = {k}, {kind}", "exact", kind, k)
        for kind in ("bucket", "renormalise")
        for k in EXACT
    ),
    *(
        Recipe(f"sampled k = {k}, exact {exact}", "sampled", "sampled", k, exact, "sampled")
        for k, exact in EXACT.items()
    ),
    *(
        Recipe(
            f"with replacement, bytes of k = {k}", "replacement", "sampled", k, exact, "replacement"
        )
        for k, exact in EXACT.items()
    ),
)


@dataclass(frozen=True)
class Teacher:
    """A teacher's hidden states of some rows and its head: its distribution, kept small.

    Attributes:
      tokens: int32 [rows, length].
      hidden: float32 [rows, length, width].
      head: float32 [vocabulary, width].
    """

    tokens: np.ndarray
    hidden: np.ndarray
    head: Any

    @property
    def vocabulary(self) -> int:
        return self.head.shape[0]


@dataclass(frozen=True)
class Stored:
    """Targets of all rows as a cache would give them, and their size.

    Attributes:
      targets: [rows, length, ...]; None for hard labels.
      objective: that they are trained with.
      bytes: mean per position with a label, before compression, empty slots not counted: ids 2,
        exact log-probs 2, and per position 1 for the number of exact entries and 2 for the
        tail's mass; with replacement: ids 2, counts 1 (2 if n is above 255), and per position 1
        for the number of entries. Entropy and the label's log-prob are for reports alone.
      draws: n, with replacement; else 0.
    """

    targets: Any
    objective: Objective | None
    bytes: float
    draws: int = 0


def store(recipe: Recipe, teacher: Teacher, seed: int) -> Stored:
    """What a student of this recipe is trained on; the seed is that of the draws."""
    if recipe.objective is None:
        return Stored(teacher.hidden, None, 2.0 * teacher.vocabulary)
    if recipe.objective == "labels":
        return Stored(None, Objective("labels"), 0.0)
    encoding = Encoding(
        length=teacher.tokens.shape[1],
        vocabulary=teacher.vocabulary,
        k=recipe.k,
        tail="none" if recipe.tail == "none" else "sampled",
        temperatures=(1.0,),
    )
    arrays = _captured(recipe, encoding, teacher, seed)
    label = arrays["label_mask"] == 1
    entries = np.count_nonzero((arrays["target_ids"] != encoding.no_id)[label])
    exact = int(arrays["exact_counts"][label].sum(dtype=np.int64))
    size = (_ID * entries + _LOGPROB * exact) / np.count_nonzero(label) + _POSITION
    if recipe.tail == "replacement":
        draws = _draws_for(teacher, size)
        return _with_replacement(teacher, draws, seed)
    targets = Targets(
        ids=arrays["target_ids"],
        logprobs=arrays["target_logprobs"],
        exact_counts=arrays["exact_counts"].astype(np.int32),
        tail_logprobs=arrays["tail_logprobs"][..., 0].astype(np.float32),
        entropy=arrays["entropy"].astype(np.float32),
    )
    return Stored(targets, Objective(recipe.objective, no_id=encoding.no_id), size)


def _captured(
    recipe: Recipe, encoding: Encoding, teacher: Teacher, seed: int
) -> dict[str, np.ndarray]:
    """The arrays that a capture stores, in its rounding."""
    settings = TargetSettings(
        k=recipe.k,
        vocabulary=teacher.vocabulary,
        tail="none" if recipe.tail == "none" else "sampled",
        exact=max(recipe.exact, 1),
        seed=seed,
    )
    rows, length = teacher.tokens.shape
    places = jnp.arange(length, dtype=jnp.int32)
    following = np.concatenate([teacher.tokens[:, 1:], np.full((rows, 1), -1)], axis=1)

    @jax.jit
    def select(hidden: Any, labels: Any, row: Any) -> Any:
        def one(part: Any) -> Any:
            hidden, labels, row = part
            bits = position_bits(seed, row, places)
            return select_targets(_logits(teacher.head, hidden), labels, settings, bits)

        return jax.lax.map(one, (hidden, labels, row))

    found = []
    for start in range(0, rows, _ROWS):
        part = slice(start, start + _ROWS)
        numbers = np.arange(rows, dtype=np.int32)[part]
        chosen = select(teacher.hidden[part], following[part].astype(np.int32), numbers)
        found.append(jax.tree.map(np.asarray, chosen))
    targets = jax.tree.map(lambda *parts: np.concatenate(parts), *found)._asdict()
    del targets["finite"]
    label_mask = np.ones(teacher.tokens.shape, np.uint8)
    label_mask[:, -1] = 0
    rows_of = {
        "tokens": teacher.tokens,
        "segments": np.ones_like(teacher.tokens),
        "documents": np.zeros_like(teacher.tokens),
        "label_mask": label_mask,
    }
    return encode_shard(rows_of, targets, encoding)


def _logits(head: Any, hidden: Any) -> Any:
    return jnp.dot(hidden, head.T, precision="highest")


@jax.jit
def _probabilities(head: Any, hidden: Any) -> Any:
    return jax.nn.softmax(_logits(head, hidden), axis=-1)


def _probabilities_of(teacher: Teacher, rows: slice) -> np.ndarray:
    """float64 [positions, vocabulary] of some rows."""
    hidden = teacher.hidden[rows].reshape(-1, teacher.hidden.shape[-1])
    return np.asarray(_probabilities(teacher.head, hidden)).astype(np.float64)


def _count_bytes(draws: int) -> int:
    return 1 if draws <= 255 else 2


def _draws_for(teacher: Teacher, size: float) -> int:
    """The least n whose positions take at least `size` bytes on average: E[distinct ids] is
    the sum of 1 - (1 - p)^n. Found on every so-manieth row."""
    step = max(len(teacher.tokens) // 16, 1)
    p = _probabilities_of(teacher, slice(0, None, step))
    rest = np.log1p(-np.minimum(p, 1 - 1e-12))

    def bytes_of(draws: int) -> float:
        distinct = -np.expm1(draws * rest).sum(-1).mean()
        return distinct * (_ID + _count_bytes(draws)) + 1

    low, high = 1, 255
    if bytes_of(high) < size:
        low, high = 256, 65_535
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if bytes_of(middle) >= size else (middle + 1, high)
    return low


def _with_replacement(teacher: Teacher, draws: int, seed: int) -> Stored:
    """Counts of n ids drawn with replacement, as exact entries that hold all the mass."""
    random = np.random.default_rng([seed, draws])
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for start in range(0, len(teacher.tokens), _ROWS):
        p = _probabilities_of(teacher, slice(start, start + _ROWS))
        found.append(_distinct(_draw(random, p, draws)))
    width = max(ids.shape[1] for ids, _ in found)
    no_id = 0xFFFF
    shape = teacher.tokens.shape
    ids = np.concatenate([_widen(ids, width) for ids, _ in found])
    counts = np.concatenate([_widen(counts, width) for _, counts in found])
    ids = np.where(counts > 0, ids, no_id)
    with np.errstate(divide="ignore"):
        logprobs = np.log(counts / draws).astype(np.float32)
    distinct = (counts > 0).sum(-1)
    targets = Targets(
        ids=ids.astype(np.uint16).reshape(*shape, width),
        logprobs=np.where(counts > 0, logprobs, np.nan).astype(np.float32).reshape(*shape, width),
        exact_counts=distinct.astype(np.int32).reshape(shape),
        tail_logprobs=np.full(shape, -np.inf, np.float32),
        entropy=np.zeros(shape, np.float32),
    )
    labels = targets.exact_counts[:, :-1]
    size = float(labels.mean()) * (_ID + _count_bytes(draws)) + 1
    return Stored(targets, Objective("sampled", no_id=no_id), size, draws)


def _draw(random: np.random.Generator, p: np.ndarray, draws: int) -> np.ndarray:
    """Ids [positions, draws], ascending, independent draws from p [positions, vocabulary]."""
    ends = np.cumsum(p, axis=-1)
    ends /= ends[:, -1:]
    points = np.sort(random.random((len(p), draws)), axis=-1)
    # One search for all positions: those of position i lie between i and i + 1.
    offset = np.arange(len(p))[:, None]
    found = np.searchsorted((ends + offset).ravel(), points + offset, side="right")
    return np.clip(found - offset * p.shape[1], 0, p.shape[1] - 1)


def _distinct(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ids of each position and how often they are there; then 0, 0 times."""
    positions = len(ids)
    new = np.ones(ids.shape, bool)
    new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    slot = np.cumsum(new, axis=-1) - 1
    width = int(slot.max()) + 1
    place = np.arange(positions)[:, None]
    counts = np.bincount((place * width + slot).ravel(), minlength=positions * width)
    distinct = np.zeros((positions, width), np.int64)
    distinct[np.broadcast_to(place, ids.shape)[new], slot[new]] = ids[new]
    return distinct, counts.reshape(positions, width)


def _widen(values: np.ndarray, width: int) -> np.ndarray:
    missing = width - values.shape[1]
    return np.pad(values, ((0, 0), (0, missing)))
