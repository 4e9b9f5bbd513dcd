"""The real teacher, end to end: SmolLM2 over standard-library text, against a plain forward."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from tests.models import smollm2_path

pytestmark = pytest.mark.slow

LENGTH, K = 128, 24


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """A cache of some 1,000 tokens, made by the command in a process of its own."""
    folder = tmp_path_factory.mktemp("real")
    stdlib = Path(sysconfig.get_path("stdlib"))
    texts = [(stdlib / name).read_text()[:1200] for name in ("bisect.py", "heapq.py", "copy.py")]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    words = [sys.executable, "-m", "stillroom", "precompute", "--dataset", "corpus.jsonl"]
    words += ["--teacher", str(smollm2_path()), "--out", "cache", "--length", str(LENGTH)]
    words += ["--k", str(K), "--exact", "6", "--rows-per-shard", "4", "--logprobs", "float32"]
    words += ["--micro-batch", "2"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def reference(captured):
    """Float64 log-probs of some rows' positions, from whole logits of one document a row."""
    import jax.numpy as jnp

    import stillroom
    from decoder import load_model

    cache = stillroom.open(captured / "cache")
    model = load_model(str(smollm2_path())).model
    assert callable(model)
    batch = cache.rows(slice(0, 3))
    rows = []
    for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True):
        pieces = []
        for segment in range(1, int(segments.max()) + 1):
            document = tokens[segments == segment].astype(np.int32)
            positions = jnp.arange(len(document), dtype=jnp.int32)
            ones = jnp.ones(len(document), jnp.int32)
            hidden = model(jnp.asarray(document), ones, positions)
            logits = np.asarray(model.unembed(hidden), np.float64)  # pyright: ignore
            shifted = logits - logits.max(-1, keepdims=True)
            pieces.append(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
        rows.append(np.concatenate(pieces))
    return cache, batch, rows


def test_every_packed_row_equals_its_documents_alone(reference):
    _, batch, rows = reference
    compared = 0
    for row, logprobs in enumerate(rows):
        for position in np.flatnonzero(batch["label_mask"][row] == 1):
            count = batch["exact_counts"][row, position]
            ids = batch["target_ids"][row, position]
            stored = batch["target_logprobs"][row, position, :count]
            expected = logprobs[position]
            assert np.abs(stored - expected[ids[:count]]).max() < 1e-3
            # The exact entries are the most likely tokens, up to the arithmetic's ties.
            best = np.sort(expected)[::-1][:count]
            assert np.abs(stored - best).max() < 1e-3
            label = batch["tokens"][row, position + 1]
            assert abs(batch["label_logprobs"][row, position] - expected[label]) < 1e-3
            entropy = -(np.exp(expected) * expected).sum()
            assert abs(float(batch["entropy"][row, position]) - entropy) < 5e-3
            compared += 1
    assert compared > 250


def test_weights_of_the_sampled_cache_sum_to_one_and_follow_the_threshold(reference):
    cache, batch, rows = reference
    label = batch["label_mask"] == 1
    weights = cache.weights(batch)
    assert np.abs(weights[label].sum(-1) - 1).max() < 1e-6
    for row, logprobs in enumerate(rows):
        for position in np.flatnonzero(label[row])[::17]:
            count = int(batch["exact_counts"][row, position])
            ids = batch["target_ids"][row, position].astype(np.int64)
            probabilities = np.exp(logprobs[position])
            threshold = (1 - probabilities[ids[:count]].sum()) / (K - count)
            assert np.allclose(weights[row, position, count:], threshold, rtol=1e-2, atol=1e-6)
            assert (probabilities[ids[count:]] < threshold * 1.01).all()


def test_the_command_scores_nothing_again_and_the_cache_is_sound(captured):
    words = [sys.executable, "-m", "stillroom", "verify", "cache", "--full", "--json"]
    done = subprocess.run(words, cwd=captured, capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["sound"]
    assert report["shards"] >= 2
    words = [sys.executable, "-m", "stillroom", "inspect", "cache", "--json"]
    view = json.loads(subprocess.run(words, cwd=captured, capture_output=True, text=True).stdout)
    # A 135M model reads code it has likely seen: far better than chance, never perfect.
    assert 1.5 < view["teacher_perplexity"] < 40
    assert view["shards"]["done"] == view["shards"]["total"]
