"""Which tokens stand for the tail: systematic sampling with float32 probabilities.

`n` tokens are drawn without replacement so that token `i` is drawn with
probability `p_i / τ`, `τ` being the tail's mass over `n`: lay the tokens end to
end as intervals of length `p_i / τ`, and take the token under each of the points
`u, u + 1, …, u + n - 1` for one uniform `u`. With the head chosen as in
:func:`head_counts` this is the variance-optimal scheme of Cohen, Duffield,
Kaplan, Lund and Thorup (SIAM J. Comput. 40(5), 2011).

No interval may be longer than 1, or a token could be drawn twice. Two things keep
that true in spite of rounding:

* Only tokens of the sorted top k can come near length 1: a token beyond them has
  at most `n / (n + 1)`, for the tail holds `n` tokens that are at least as likely.
* The top k's intervals, and the blocks into which the other tokens are grouped,
  have whole-numbered lengths in units of `2^-q`. Their sums are exact, and a top-k
  token's length is at most `2^q` units. Only the search inside one block of 64
  tokens is done in floating point, where the slack of `1 / (n + 1)` is far above
  the rounding error.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32, UInt32

# Tokens per block. The search inside the chosen blocks costs `n * BLOCK`, the search
# for the blocks `n * log(vocabulary / BLOCK)`.
BLOCK = 64

# Most tokens drawn per position. The bound keeps the slack `1 / (n + 1)` well above the
# rounding error inside a block.
MAX_DRAWS = 8192

# The units of all intervals together stay below 2^29, so that int32 sums cannot overflow.
_UNIT_BITS = 29

# Sorts behind every token id.
_NO_ID = 2**31 - 1


def position_bits(
    seed: int, row: Int32[Array, ""], positions: Int32[Array, " positions"]
) -> UInt32[Array, "positions 2"]:
    """64 random bits for each position of one row, a function of (seed, row, position) only.

    `seed` is a whole number in [0, 2^32). Threefry is named here, and its output words
    are used as they are, so that no JAX configuration flag changes the draws.
    """
    root = jax.random.wrap_key_data(jnp.array([0, seed], jnp.uint32), impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.fold_in(root, row), positions)
    return jax.random.key_data(keys)


def head_counts(
    sorted_logits: Float[Array, "positions k"],
    following: Float[Array, " positions"],
    mass_beyond: Float[Array, " positions"],
    temperature: float,
    exact: int,
) -> Int32[Array, " positions"]:
    """How many of the most likely tokens stay exact when the rest is sampled.

    The smallest `h >= exact` with `p_(h+1) < τ`, `τ = (sum of p beyond h) / (k - h)`. With
    `q` the mass behind token h + 1 relative to that token's, this is `k - h - 1 < q`: nothing
    is subtracted, and no gap between logits is too wide. It holds at `h = k - 1` whenever
    there is a token beyond the top k.

    Args:
      sorted_logits: the k largest logits, descending; -inf stands for no token.
      following: the next logit; -inf if there is none.
      mass_beyond: sum of exp((logit - following) / temperature) over all but the top k.
      temperature: the capture temperature.
      exact: least number of exact entries, `1 <= exact < k`.

    Returns:
      the counts; where nothing lies beyond the top k, the number of tokens there are.
    """
    k = sorted_logits.shape[1]
    after = jnp.concatenate([sorted_logits[:, 1:], following[:, None]], axis=1)
    ratios = jnp.where(after > -jnp.inf, jnp.exp((after - sorted_logits) / temperature), 0.0)

    def behind(mass, ratio):
        mass = ratio * mass
        return 1.0 + mass, mass

    _, q = jax.lax.scan(behind, mass_beyond, ratios.T, reverse=True, unroll=4)
    h = jnp.arange(k, dtype=jnp.int32)
    enough = (k - 1 - h).astype(jnp.float32)[None, :] < q.T
    enough = enough | ((h == k - 1)[None, :] & (following > -jnp.inf)[:, None])
    enough = enough & (h >= exact)[None, :]
    possible = jnp.sum(sorted_logits > -jnp.inf, axis=1, dtype=jnp.int32)
    first = jnp.argmax(enough, axis=1).astype(jnp.int32)
    return jnp.where(jnp.any(enough, axis=1), first, possible)


def draw_tail(
    blocks: Float[Array, "positions blocks block"],
    sorted_logits: Float[Array, "positions k"],
    sorted_ids: Int[Array, "positions k"],
    block_mass: Float[Array, "positions blocks"],
    reference: Float[Array, " positions"],
    heads: Int32[Array, " positions"],
    bits: UInt32[Array, "positions 2"],
    temperature: float,
    exact: int,
) -> Int32[Array, "positions draws"]:
    """The ids drawn from the tokens that are not exact, ascending, `k - heads` of them.

    Args:
      blocks: all logits in id order, in blocks of `BLOCK`; -inf stands for no token.
      sorted_logits, sorted_ids: the k largest logits and their ids, ties by lower id.
      block_mass: sum of exp((logit - reference) / temperature) over each block's tokens
        that are not among the top k.
      reference: the largest logit beyond the top k.
      heads: exact entries per position, from :func:`head_counts`.
      bits: random bits, from :func:`position_bits`.
      temperature: the capture temperature.
      exact: least number of exact entries; `draws = k - exact`.

    Returns:
      ids; the slots after the first `k - heads` hold int32's maximum. Positions with
      nothing beyond the top k return that everywhere.
    """
    k = sorted_logits.shape[1]
    draws = k - exact
    unit_bits = _UNIT_BITS - (draws - 1).bit_length()
    unit = jnp.int32(2**unit_bits)
    wanted = jnp.where(reference > -jnp.inf, k - heads, 0).astype(jnp.int32)
    total = wanted * unit
    offset = (bits[:, 0] >> jnp.uint32(32 - unit_bits)).astype(jnp.int32)
    fraction = (bits[:, 1] >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2**-24)

    top_length, block_length = _interval_lengths(
        sorted_logits, block_mass, reference, heads, total, temperature
    )
    top_ends, beyond_start = _top_intervals(
        top_length[:, exact:], jnp.sum(block_length, axis=1), total, unit
    )
    points_before = _points_below(top_ends, offset[:, None], unit_bits)
    starts = jnp.concatenate([jnp.zeros_like(points_before[:, :1]), points_before[:, :-1]], axis=1)
    top_drawn = jnp.where(points_before > starts, sorted_ids[:, exact:], _NO_ID)

    slot = jnp.arange(draws, dtype=jnp.int32)[None, :]
    in_blocks = (slot >= points_before[:, -1:]) & (slot < wanted[:, None])
    points = jnp.where(in_blocks, slot * unit + offset[:, None] - beyond_start[:, None], 0)
    ids = _ids_in_blocks(
        blocks,
        block_length,
        points,
        fraction,
        reference,
        sorted_logits[:, -1],
        sorted_ids[:, -1],
        temperature,
    )
    drawn = jnp.concatenate([top_drawn, jnp.where(in_blocks, ids, _NO_ID)], axis=1)
    return jnp.sort(drawn, axis=1)[:, :draws]


def _interval_lengths(sorted_logits, block_mass, reference, heads, total, temperature):
    """Lengths `p / τ` of the top k's intervals (0 for the head) and of the blocks, in units."""
    k = sorted_logits.shape[1]
    # The largest logit outside the head is the scale: nothing overflows, and what
    # underflows is out of reach of sampling.
    first = jnp.take_along_axis(sorted_logits, jnp.minimum(heads, k - 1)[:, None], axis=1)
    in_tail = jnp.arange(k, dtype=jnp.int32)[None, :] >= heads[:, None]
    top = jnp.where(in_tail, jnp.exp((sorted_logits - first) / temperature), 0.0)
    block = block_mass * jnp.exp((reference[:, None] - first) / temperature)
    mass = jnp.sum(top, axis=1) + jnp.sum(block, axis=1)
    scale = jnp.where(total > 0, total.astype(jnp.float32) / mass, 0.0)[:, None]

    def units(x):
        return jnp.where(scale > 0, jnp.round(x * scale), 0.0).astype(jnp.int32)

    return units(top), units(block)


def _top_intervals(lengths, beyond, total, unit):
    """Ends of the top k's intervals, no longer than one unit each, and where the blocks start.

    Rounding leaves the lengths a few units off `total`. The difference goes to the last,
    least likely tokens of the top k, whose intervals are longer than any other token's.
    """
    ends = jnp.cumsum(jnp.minimum(lengths, unit), axis=1, dtype=jnp.int32)
    last = jnp.maximum(total - beyond, 0)[:, None]
    after = jnp.arange(lengths.shape[1] - 1, -1, -1, dtype=jnp.int32)[None, :]
    return jnp.clip(ends, last - after * unit, last), last[:, 0]


def _points_below(ends, offset, unit_bits):
    """How many of the points `offset, offset + unit, …` lie below each end."""
    return (jnp.maximum(ends, 0) - offset + (2**unit_bits - 1)) >> unit_bits


def _ids_in_blocks(
    blocks, block_length, points, fraction, reference, last_logit, last_id, temperature
):
    """The id under each point, counted in units from the first block's start."""
    ends = jnp.cumsum(block_length, axis=1, dtype=jnp.int32)
    chosen = jax.vmap(lambda e, p: jnp.searchsorted(e, p, side="right"))(ends, points)
    chosen = jnp.minimum(chosen, ends.shape[1] - 1).astype(jnp.int32)
    length = jnp.take_along_axis(block_length, chosen, axis=1)
    within = points - (jnp.take_along_axis(ends, chosen, axis=1) - length)
    share = (within.astype(jnp.float32) + fraction[:, None]) / length.astype(jnp.float32)

    logits = jax.vmap(lambda rows, i: rows[i])(blocks, chosen)
    lane = jnp.arange(BLOCK, dtype=jnp.int32)[None, None, :]
    ids = chosen[:, :, None] * BLOCK + lane
    beyond = beyond_top(logits, ids, last_logit[:, None, None], last_id[:, None, None])
    mass = jnp.where(beyond, jnp.exp((logits - reference[:, None, None]) / temperature), 0.0)
    # Running sums as a product: a cumulative sum of this shape takes 4 times as long on CPUs.
    sums = jnp.dot(mass, jnp.triu(jnp.ones((BLOCK, BLOCK), jnp.float32)), precision="highest")
    reached = (sums > share[:, :, None] * sums[:, :, -1:]) & (mass > 0)
    last = jnp.max(jnp.where(mass > 0, lane, 0), axis=2)  # if rounding lets none be reached
    return chosen * BLOCK + jnp.minimum(jnp.min(jnp.where(reached, lane, BLOCK), axis=2), last)


def beyond_top(logits, ids, last_logit, last_id):
    """Whether tokens rank behind the k-th, `(last_logit, last_id)`; true for NaN."""
    return ~((logits > last_logit) | ((logits == last_logit) & (ids <= last_id)))
