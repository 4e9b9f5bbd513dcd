"""What a cache can serve, what is refused by name, and weights in JAX against numpy's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cache.encoding import entry_weights, weights
from cache.format import Encoding
from student.batches import Targets
from student.errors import ObjectiveError
from student.objectives import Objective, choose, teacher_side
from tests.cache.builder import make_cache, make_encoding

EXACT = make_encoding()
SAMPLED = make_encoding(tail="sampled")
SAMPLED_AT_2 = make_encoding(tail="sampled", temperatures=(2.0,))


@pytest.mark.parametrize(
    ("encoding", "kind", "temperature"),
    [(EXACT, "bucket", 1.0), (SAMPLED, "sampled", 1.0), (SAMPLED_AT_2, "sampled", 2.0)],
)
def test_auto_takes_the_best_that_the_cache_has(encoding, kind, temperature):
    expected = Objective(kind, temperature=temperature, no_id=encoding.no_id)
    assert choose(encoding) == expected
    assert choose(encoding, kind) == expected


@pytest.mark.parametrize(
    ("encoding", "arguments", "expected"),
    [
        (EXACT, ("bucket", "js", 0.25, 4.0), ("bucket", "js", 0.25, 4.0)),
        (SAMPLED, ("bucket", "reverse"), ("bucket", "reverse", 0.5, 1.0)),
        (SAMPLED, ("bucket", "tv", 0.5, 1.0), ("bucket", "tv", 0.5, 1.0)),
        # Over exact entries alone, log-probs at T = 1 give every temperature (C03).
        (EXACT, ("renormalise", "forward", 0.5, 3.0), ("renormalise", "forward", 0.5, 3.0)),
        (SAMPLED, ("renormalise", "reverse", 0.5, 9.0), ("renormalise", "reverse", 0.5, 9.0)),
    ],
)
def test_what_is_asked_for_is_chosen(encoding, arguments, expected):
    assert choose(encoding, *arguments) == Objective(*expected, no_id=65535)


def test_the_empty_entry_is_the_caches():
    assert choose(make_encoding(vocabulary=70_000)).no_id == 2**32 - 1


@pytest.mark.parametrize(
    ("encoding", "asked", "message"),
    [
        (
            EXACT,
            {"objective": "sampled"},
            r"--objective sampled needs a cache with a sampled tail, and this one holds the 6 "
            r"most likely tokens alone. Use --objective bucket, or capture with --tail sampled\.",
        ),
        (
            SAMPLED,
            {"divergence": "reverse"},
            "--objective sampled gives --divergence forward only, not reverse: .*Use --objective "
            "bucket",
        ),
        (SAMPLED, {"objective": "sampled", "divergence": "js"}, "forward only, not js"),
        (
            EXACT,
            {"temperature": 3.0},
            "--temperature 3 was not captured, and --objective bucket needs the tail's mass "
            "there: the cache has it at temperature 1, 2, 4. Use one of these, or capture again "
            "with --temperatures 3",
        ),
        (
            SAMPLED,
            {"temperature": 2.0},
            "--temperature 2 was not captured, and --objective sampled .*at temperature 1. ",
        ),
        (SAMPLED_AT_2, {"temperature": 1.0}, "--temperature 1 was not captured"),
        (SAMPLED, {"objective": "bucket", "temperature": 4.0}, "--temperature 4 was not captured"),
        (EXACT, {"objective": "topk"}, "no objective 'topk'; there are auto, sampled, bucket, ren"),
        (EXACT, {"divergence": "js", "beta": 0.0}, "--beta should be above 0 and below 1, found 0"),
        (EXACT, {"divergence": "js", "beta": 1.0}, "the mixed divergence is 0, not a KL"),
        (
            EXACT,
            {"objective": "renormalise", "temperature": 0.0},
            "--temperature should be above 0, found 0",
        ),
        (EXACT, {"objective": "renormalise", "temperature": float("nan")}, "should be above 0"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(encoding, asked, message):
    with pytest.raises(ObjectiveError, match=message):
        choose(encoding, **asked)


def targets_at(
    arrays: dict[str, np.ndarray], temperature: int, rows: Any = slice(None)
) -> tuple[Targets, Any]:
    """Stored targets, flat, on the device; and where there is a label."""
    flat = {
        name: jnp.asarray(x[rows].reshape(-1, *x.shape[2:]))
        for name, x in arrays.items()
        if name not in ("tokens", "segments", "documents")
    }
    targets = Targets(
        ids=flat["target_ids"],
        logprobs=flat["target_logprobs"],
        exact_counts=flat["exact_counts"].astype(jnp.int32),
        tail_logprobs=flat["tail_logprobs"][:, temperature].astype(jnp.float32),
        entropy=flat["entropy"].astype(jnp.float32),
    )
    return targets, flat["label_mask"] == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"tail": "sampled", "logprobs": "float32"},
        {"tail": "none", "temperatures": (1.0, 4.0)},
        # Ids of 32 bits: the mark of an empty entry is no int32.
        {"tail": "sampled", "vocabulary": 66_000, "rows": 3, "length": 4, "likely": 65_541},
        # Fewer possible tokens than entries: some entries are empty.
        {"tail": "none", "temperatures": (2.0,), "impossible": 56},
    ],
    ids=["sampled", "exact", "wide", "empty entries"],
)
def test_weights_in_jax_are_those_of_numpy(tmp_path, settings):
    asked = dict(settings)
    impossible, likely = asked.pop("impossible", 0), asked.pop("likely", 0)
    if likely:
        asked["logits"] = np.random.default_rng(0).normal(size=(3, 4, 66_000))
        asked["logits"][..., likely] = 20.0
    if impossible:
        logits = np.random.default_rng(0).normal(size=(10, 8, 60))
        logits[:, ::2, 60 - impossible :] = -np.inf
        asked["logits"] = logits
    built = make_cache(tmp_path / "cache", **asked)
    encoding: Encoding = built.encoding
    arrays = built.arrays
    label = (arrays["label_mask"] == 1).reshape(-1)
    assert label.any()
    assert not label.all()
    for index, temperature in enumerate(encoding.temperatures):
        expected = weights(arrays, encoding, temperature).reshape(-1, encoding.k)
        targets, mask = targets_at(arrays, index)
        chosen = Objective("bucket", temperature=temperature, no_id=encoding.no_id)
        # 32-bit floats: exp and expm1 of float32 log-probs.
        found, exact = jax.jit(entry_weights, static_argnums=(5, 6, 7))(
            mask,
            targets.ids,
            targets.logprobs.astype(jnp.float32),
            targets.exact_counts,
            targets.tail_logprobs,
            temperature,
            encoding.no_id,
            jnp,
        )
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=3e-6, atol=1e-7)
        assert (np.asarray(found)[~label] == 0).all()
        side = jax.jit(teacher_side, static_argnums=2)(targets, mask, chosen)
        np.testing.assert_array_equal(side.weights, found)
        np.testing.assert_array_equal(side.exact, exact)
        np.testing.assert_array_equal(
            side.exact.sum(-1), np.where(label, arrays["exact_counts"].reshape(-1), 0)
        )
        kept = (arrays["target_ids"].reshape(-1, encoding.k) != encoding.no_id) & label[:, None]
        np.testing.assert_array_equal(side.entry, kept)
        ids = np.where(kept, arrays["target_ids"].reshape(-1, encoding.k), 0)
        np.testing.assert_array_equal(side.ids, ids)
        if impossible:
            assert not kept[label].all()
        if likely:
            assert targets.ids.dtype == jnp.uint32
            assert (ids[label, 0] == likely).all()
