"""What the cache keeps of a teacher's distribution at one position.

Pure functions of logits: no I/O, no model. :mod:`pipelines.scoring` feeds them.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from pipelines.errors import CaptureError
from pipelines.sampling import BLOCK, MAX_DRAWS, beyond_top, draw_tail, head_counts


@dataclass(frozen=True)
class TargetSettings:
    """What to keep of each position. Hashable; every field is static under `jax.jit`."""

    k: int  # entries per position
    vocabulary: int  # real token ids, 0 ... vocabulary - 1, added tokens included
    tail: Literal["none", "sampled"] = "none"
    exact: int = 1  # least number of exact entries; for a sampled tail only
    temperatures: tuple[float, ...] = (1.0,)  # ascending; the capture temperature if sampled
    seed: int = 0  # of the sampled entries
    chunk: int = 64  # positions whose logits exist at one time; 64 was fastest on CPUs

    def __post_init__(self) -> None:
        _check_whole("vocabulary", self.vocabulary, 1, 2**31 - 1 - BLOCK)
        _check_whole("k", self.k, 1, self.vocabulary, "the vocabulary")
        _check_whole("chunk", self.chunk, 1, 2**31 - 1)
        _check_whole("seed", self.seed, 0, 2**32 - 1)
        if self.tail not in ("none", "sampled"):
            raise CaptureError(f'tail is {self.tail!r}; allowed are "none" and "sampled"')
        _check_temperatures(self.temperatures, self.tail)
        if self.tail == "sampled":
            _check_whole("k", self.k, 2, self.vocabulary, "the vocabulary")
            _check_whole("exact", self.exact, 1, self.k - 1, "k - 1")
            if self.k - self.exact > MAX_DRAWS:
                raise CaptureError(
                    f"k - exact is {self.k - self.exact} sampled entries per position; "
                    f"at most {MAX_DRAWS} are allowed: lower k or raise exact"
                )


class Targets(NamedTuple):
    """Targets of some positions; a pytree. Further leading axes may precede `positions`.

    Where `finite` is false the teacher gave no distribution: ids are -1, counts 0 and the
    floats NaN.
    """

    ids: Int32[Array, "*positions k"]  # exact by descending log-prob, sampled ascending, then -1
    logprobs: Float32[Array, "*positions k"]  # nats, T = 1; NaN for sampled and empty entries
    exact_counts: Int32[Array, "*positions"]
    tail_logprobs: Float32[Array, "*positions temperatures"]  # mass outside the exact entries
    label_logprobs: Float32[Array, "*positions"]  # nats, T = 1; NaN where there is no label
    entropy: Float32[Array, "*positions"]  # nats, T = 1
    finite: Bool[Array, "*positions"]  # no NaN, no +inf, and at least one token possible


def select_targets(
    logits: Float32[Array, "positions vocabulary"],
    labels: Int32[Array, " positions"],
    settings: TargetSettings,
    bits: UInt32[Array, "positions 2"] | None = None,
    legal: Bool[Array, " vocabulary"] | None = None,
) -> Targets:
    """Targets of some positions from their logits over the real vocabulary.

    A token is possible if its log-prob at T = 1 is a float32 above -inf, which is to say
    if its logit is above -inf: all masses are kept in log space, where e^-200 is as good
    a number as any. Impossible tokens are never entries.

    Args:
      logits: -inf marks an impossible token; NaN and +inf make a position not finite.
      labels: the token that follows; anything outside the vocabulary means no label.
      settings: `settings.vocabulary` must be the width of `logits`.
      bits: from :func:`pipelines.sampling.position_bits`; needed for a sampled tail only.
      legal: false for ids below the vocabulary's size that no token has.
    """
    if logits.shape[1] != settings.vocabulary:
        raise ValueError(
            f"logits have {logits.shape[1]} columns; expected the {settings.vocabulary} of the "
            "vocabulary: slice off the rows that are no token"
        )
    if legal is not None:
        logits = jnp.where(legal[None, :], logits, -jnp.inf)
    blocks = _in_blocks(logits)
    ranking = _rank(blocks, settings.k)
    relative = _beyond(blocks, ranking)
    weight = jnp.exp(relative)
    moments = _block_sums(jnp.where(weight > 0, weight * relative, 0.0))
    block_mass = {1.0: _block_sums(weight)}
    for t in settings.temperatures:
        block_mass.setdefault(t, _block_sums(jnp.exp(relative / t)))
    beyond = {t: jnp.sum(mass, axis=1) for t, mass in block_mass.items()}
    log_z = {t: _log_normaliser(ranking, mass, t) for t, mass in beyond.items()}

    logprobs = ranking.below_first() - log_z[1.0][:, None]
    possible = jnp.sum(logprobs > -jnp.inf, axis=1, dtype=jnp.int32)
    ids, exact_counts = ranking.ids, possible
    if settings.tail == "sampled":
        (t,) = settings.temperatures
        ids, exact_counts = _sample(blocks, ranking, block_mass[t], settings, bits)
    tails = [
        _log_tail(ranking, beyond[t], exact_counts, t) - log_z[t] for t in settings.temperatures
    ]
    entropy = _entropy(ranking, beyond[1.0], jnp.sum(moments, axis=1), log_z[1.0])

    has_label = (labels >= 0) & (labels < settings.vocabulary)
    column = jnp.clip(labels, 0, settings.vocabulary - 1)[:, None]
    label_logits = jnp.take_along_axis(logits, column, axis=1)[:, 0]
    label_logprobs = label_logits - ranking.logits[:, 0] - log_z[1.0]

    finite = jnp.isfinite(log_z[1.0])
    slot = jnp.arange(settings.k, dtype=jnp.int32)[None, :]
    is_exact = (slot < exact_counts[:, None]) & finite[:, None]
    return Targets(
        ids=jnp.where(finite[:, None] & (slot < possible[:, None]), ids, -1),
        logprobs=jnp.where(is_exact, logprobs, jnp.nan),
        exact_counts=jnp.where(finite, exact_counts, 0),
        tail_logprobs=jnp.where(finite[:, None], jnp.stack(tails, axis=1), jnp.nan),
        label_logprobs=jnp.where(has_label & finite, label_logprobs, jnp.nan),
        entropy=jnp.where(finite, entropy, jnp.nan),
        finite=finite,
    )


class _Ranking(NamedTuple):
    """The k largest logits, and where the others begin."""

    logits: jax.Array  # [positions, k], descending; -inf where there is no token
    ids: jax.Array  # [positions, k], ties by lower id
    following: jax.Array  # [positions], the (k + 1)-th logit; -inf where there is none

    def below_first(self) -> jax.Array:
        """[positions, k]: the logits less the largest, so that the first is 0."""
        return self.logits - self.logits[:, :1]

    def following_below_first(self) -> jax.Array:
        """[positions]: the (k + 1)-th logit less the largest."""
        return self.following - self.logits[:, 0]


def _in_blocks(logits):
    """[positions, blocks, BLOCK], padded with -inf."""
    padding = -logits.shape[1] % BLOCK
    if padding:
        logits = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return logits.reshape(logits.shape[0], -1, BLOCK)


def _rank(blocks, k):
    positions, count, _ = blocks.shape
    wanted = min(k + 1, count * BLOCK)
    if count > 2 * wanted:
        values, ids = _top_by_blocks(blocks, wanted)
    else:
        values, ids = _top_k(blocks.reshape(positions, -1), wanted)
    none = jnp.full((positions,), -jnp.inf, jnp.float32)
    return _Ranking(values[:, :k], ids[:, :k], values[:, k] if wanted > k else none)


def _top_k(values, k):
    """`jax.lax.top_k`, with 0 and -0 equal, which it ranks in this order.

    The barrier keeps XLA from merging the slices taken of the result into the operation,
    which it would then no longer recognise, and sort everything: 15 times the time.
    """
    top, ids = jax.lax.top_k(jnp.where(values == 0, 0.0, values), k)
    # One barrier for both crashes XLA's partitioner when there are several devices.
    return jax.lax.optimization_barrier(top), jax.lax.optimization_barrier(ids)


def _top_by_blocks(blocks, k):
    """`jax.lax.top_k` over all tokens, exactly, ties by lower id: 2 to 5 times as fast.

    The k largest lie in the k blocks with the largest maxima (ties: the lower block),
    since each of these holds a token that ranks before every token of the other blocks.
    Put in ascending order, the chosen blocks list their tokens in id order.
    """
    _, chosen = _top_k(jnp.max(blocks, axis=2), k)
    chosen = jnp.sort(chosen, axis=1)
    candidates = jax.vmap(lambda rows, i: rows[i])(blocks, chosen)
    values, place = _top_k(candidates.reshape(blocks.shape[0], -1), k)
    ids = jnp.take_along_axis(chosen, place // BLOCK, axis=1) * BLOCK + place % BLOCK
    return values, ids


def _beyond(blocks, ranking):
    """[positions, blocks, BLOCK]: logits less `ranking.following`; -inf for the top k."""
    ids = jnp.arange(blocks.shape[1] * BLOCK, dtype=jnp.int32).reshape(1, -1, BLOCK)
    behind = beyond_top(
        blocks, ids, ranking.logits[:, -1, None, None], ranking.ids[:, -1, None, None]
    )
    reference = jnp.where(ranking.following > -jnp.inf, ranking.following, 0.0)
    return jnp.where(behind, blocks - reference[:, None, None], -jnp.inf)


def _block_sums(values):
    """Sums over the last axis. A product with ones is vectorised on CPUs; a sum is not."""
    return jnp.dot(values, jnp.ones((BLOCK,), jnp.float32), precision="highest")


def _log_normaliser(ranking, mass_beyond, temperature):
    """log of the sum of exp((logit - largest) / T) over all tokens."""
    top = jnp.sum(jnp.exp(ranking.below_first() / temperature), axis=1)
    rest = mass_beyond * jnp.exp(ranking.following_below_first() / temperature)
    return jnp.log(top + rest)


def _log_tail(ranking, mass_beyond, heads, temperature):
    """log of the sum of exp((logit - largest) / T) over all tokens but the first `heads`.

    Relative to the largest of these, so that nothing underflows and nothing cancels.
    """
    k = ranking.logits.shape[1]
    every = jnp.concatenate([ranking.logits, ranking.following[:, None]], axis=1)
    first = jnp.take_along_axis(every, heads[:, None], axis=1)
    in_tail = jnp.arange(k, dtype=jnp.int32)[None, :] >= heads[:, None]
    relative = jnp.where(first > -jnp.inf, (every - first) / temperature, -jnp.inf)
    mass = jnp.sum(jnp.where(in_tail, jnp.exp(relative[:, :k]), 0.0), axis=1)
    mass = mass + mass_beyond * jnp.exp(relative[:, k])
    return jnp.log(mass) + (first[:, 0] - ranking.logits[:, 0]) / temperature


def _entropy(ranking, mass_beyond, moment_beyond, log_z):
    """Nats at T = 1: log Z - sum of p (logit - largest), a sum of terms that are not negative."""
    top = ranking.below_first()
    following = ranking.following_below_first()
    following = jnp.where(following > -jnp.inf, following, 0.0)
    weight = jnp.exp(top)
    moment = jnp.sum(jnp.where(weight > 0, weight * top, 0.0), axis=1)
    beyond = jnp.exp(following) * (moment_beyond + following * mass_beyond)
    return log_z - (moment + beyond) * jnp.exp(-log_z)


def _sample(blocks, ranking, block_mass, settings, bits):
    """(ids, exact counts) with the entries behind the head drawn from the tail."""
    if bits is None:
        raise ValueError("a sampled tail needs bits: pass pipelines.sampling.position_bits(...)")
    (temperature,) = settings.temperatures
    mass = jnp.sum(block_mass, axis=1)
    heads = head_counts(ranking.logits, ranking.following, mass, temperature, settings.exact)
    drawn = draw_tail(
        blocks,
        ranking.logits,
        ranking.ids,
        block_mass,
        ranking.following,
        heads,
        bits,
        temperature,
        settings.exact,
    )
    slot = jnp.arange(settings.k, dtype=jnp.int32)[None, :]
    place = jnp.clip(slot - heads[:, None], 0, drawn.shape[1] - 1)
    sampled = jnp.take_along_axis(drawn, place, axis=1)
    return jnp.where(slot < heads[:, None], ranking.ids, sampled), heads


def _check_whole(name: str, found: object, least: int, most: int, most_name: str = "") -> None:
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
        limit = f"{most} ({most_name})" if most_name else f"{most}"
        raise CaptureError(
            f"{name} is {found!r}; allowed are whole numbers from {least} to {limit}"
        )


def _check_temperatures(found: tuple[float, ...], tail: str) -> None:
    rule = "allowed are finite numbers above 0, strictly ascending"
    if not isinstance(found, tuple) or not found:
        raise CaptureError(f"temperatures is {found!r}; expected a tuple of at least one; {rule}")
    for value in found:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CaptureError(f"temperatures holds {value!r}; {rule}")
        if not (math.isfinite(value) and value > 0):
            raise CaptureError(f"temperatures holds {value!r}; {rule}")
    if any(a >= b for a, b in itertools.pairwise(found)):
        raise CaptureError(f"temperatures is {found!r}; {rule}")
    if tail == "sampled" and len(found) != 1:
        raise CaptureError(
            f"temperatures is {found!r}; a sampled tail allows exactly one, the capture temperature"
        )
