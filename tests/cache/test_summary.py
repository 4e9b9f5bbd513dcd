"""Views of a cache: numbers against what was stored, and everything as JSON."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cache
from cache.errors import CacheError, DamageError
from cache.options import InspectOptions
from cache.runlog import RunLog
from cache.summary import inspect, position_view, row_view, shard_view, summary
from tests.cache.builder import Built, make_cache, make_encoding, make_rows


def _strict(view: dict[str, Any]) -> dict[str, Any]:
    """The view through JSON that holds no NaN and no infinity."""
    return json.loads(json.dumps(view, allow_nan=False))


def _labels(built: Built) -> np.ndarray:
    return built.arrays["label_mask"] == 1


def test_the_summary_of_a_finished_cache(exact_cache: Built) -> None:
    view = _strict(inspect(InspectOptions(str(exact_cache.path))))
    label = _labels(exact_cache)
    tokens = int((exact_cache.arrays["segments"] > 0).sum())
    assert (view["view"], view["state"], view["format_version"]) == ("summary", "complete", "1.1")
    assert (view["rows"], view["tokens"], view["labels"]) == (10, tokens, int(label.sum()))
    assert view["padding"] == pytest.approx(1 - tokens / 80)
    assert view["rows_without_labels"] == int((~label.any(axis=1)).sum())
    assert view["exact_entries_per_label"] == 6
    assert view["sampled_entries_per_label"] == 0
    assert view["shards"] == {"total": 3, "done": 3, "missing": [], "damaged": []}
    files = {
        name: sum(path.stat().st_size for path in (exact_cache.path / "arrays" / name).glob("c.*"))
        for name in exact_cache.encoding.stored_arrays()
    }
    assert view["bytes"]["total"] == sum(files.values())
    assert view["bytes"]["per_token"] == pytest.approx(sum(files.values()) / tokens)
    assert {name: entry["total"] for name, entry in view["bytes"]["arrays"].items()} == files
    assert [mass["temperature"] for mass in view["exact_mass"]] == [1.0, 2.0, 4.0]
    for mass in view["exact_mass"]:
        p = np.sort(np.exp(exact_cache.log_probabilities(mass["temperature"])), axis=-1)
        assert mass["mean"] == pytest.approx(p[..., -6:].sum(axis=-1)[label].mean(), abs=1e-3)
        assert 0 < mass["percentile_10"] < mass["mean"]
    stored = exact_cache.arrays["label_logprobs"][label].astype(np.float64)
    assert view["teacher_perplexity"] == pytest.approx(np.exp(-stored.mean()))
    assert view["entropy"] == pytest.approx(
        exact_cache.arrays["entropy"][label].astype(np.float64).mean()
    )
    assert view["teacher"]["source"] == "made-up/teacher"
    assert view["corpus"] == {
        "description": "made-up text",
        "documents": exact_cache.manifest.corpus["documents"],
    }


def test_the_summary_of_a_sampled_cache(sampled_cache: Built) -> None:
    view = _strict(summary(str(sampled_cache.path)))
    label = _labels(sampled_cache)
    counts = sampled_cache.arrays["exact_counts"][label]
    assert view["exact_entries_per_label"] == pytest.approx(counts.mean())
    assert view["sampled_entries_per_label"] == pytest.approx(6 - counts.mean())
    assert view["encoding"]["tail"] == "sampled"


def test_the_summary_of_an_unfinished_cache(tmp_path: Path) -> None:
    make_cache(tmp_path / "c", complete=False)
    view = _strict(summary(str(tmp_path / "c")))
    assert view["state"] == "open"
    assert view["shards"] == {"total": 3, "done": 2, "missing": [2], "damaged": []}
    assert "rows" not in view
    (tmp_path / "c" / "arrays" / "tokens" / "zarr.json").unlink()
    assert summary(str(tmp_path / "c"))["shards"]["total"] is None
    for wrong in ("{}", '{"shape": []}', '{"shape": ["x"]}', "not JSON"):
        (tmp_path / "c" / "arrays" / "tokens" / "zarr.json").write_text(wrong)
        with pytest.raises(CacheError, match=r"tokens/zarr\.json"):
            summary(str(tmp_path / "c"))


def test_the_summary_counts_what_is_missing(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    (built.path / "receipts" / "000000.json").unlink()
    (built.path / "arrays" / "entropy" / "c.2.0").unlink()
    (built.path / "arrays" / "tokens" / "c.2.0").unlink()
    shards = summary(str(built.path))["shards"]
    assert (shards["total"], shards["done"], shards["missing"]) == (3, 1, [0])
    assert len(shards["damaged"]) == 2
    first, last = built.manifest.receipts[2].documents
    assert shards["damaged"][0] == (
        f"shard 2, rows 8-9, documents {first}-{last}, array tokens: arrays/tokens/c.2.0 is missing"
    )


def test_a_perplexity_beyond_any_number_is_none(tmp_path: Path) -> None:
    built = make_cache(tmp_path / "wild", rows=4, scale=3000.0)
    view = _strict(summary(str(built.path)))
    assert view["teacher_perplexity"] is None
    shown = _strict(row_view(cache.open(built.path), 0))
    assert any(segment["teacher_perplexity"] is None for segment in shown["segments"])


# Shards.


def test_a_shard(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    log = RunLog(built.store, "run-1")
    log.write("shard", shard=1, scoring_seconds=1.5, writing_seconds=0.25)
    log.write("shard", shard=2, scoring_seconds=9)
    log.write("begin")
    built.store.write("runs/run-1/odd.jsonl", b'{"time": 1}\n{"time": 2, "event": 3}\n')
    view = _strict(inspect(InspectOptions(str(built.path), shard=1)))
    documents = built.arrays["documents"][4:8]
    documents = documents[documents != 2**32 - 1]
    assert view["rows"] == [4, 8]
    assert view["documents"] == [documents.min(), documents.max()]
    assert view["labels"] == int(_labels(built)[4:8].sum())
    assert set(view["arrays"]) == set(built.encoding.stored_arrays())
    assert view["receipt_sha256"] == built.manifest.receipts[1].sha256
    (timing,) = view["timings"]
    assert timing["scoring_seconds"] == 1.5
    assert set(timing) == {"time", "scoring_seconds", "writing_seconds"}


@pytest.mark.parametrize("shard", [-1, 3, 10**9])
def test_a_shard_that_does_not_exist(exact_cache: Built, shard: int) -> None:
    with pytest.raises(CacheError, match=f"the cache has shards 0 to 2, not {shard}"):
        shard_view(str(exact_cache.path), shard)


def test_a_shard_of_an_unfinished_cache(tmp_path: Path) -> None:
    make_cache(tmp_path / "c", complete=False)
    assert _strict(shard_view(str(tmp_path / "c"), 0))["rows"] == [0, 4]
    with pytest.raises(CacheError, match="shard 2 is not done yet"):
        shard_view(str(tmp_path / "c"), 2)
    with pytest.raises(CacheError, match="the cache has shards 0 to 2, not 3"):
        shard_view(str(tmp_path / "c"), 3)


@pytest.mark.parametrize("fault", ["is missing", "is not the one the manifest lists"])
def test_a_shard_whose_receipt_is_not_the_one(exact_cache: Built, copy: Any, fault: str) -> None:
    built = copy(exact_cache)
    path = built.path / "receipts" / "000001.json"
    if fault == "is missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes().replace(b'"shard":1', b'"shard":2'))
    with pytest.raises(DamageError, match=rf"shard 1, rows 4-7, documents \d+-\d+: .*{fault}"):
        shard_view(str(built.path), 1)


# Rows.


def test_a_row(exact_cache: Built) -> None:
    for row in (0, 3, 5, 9):
        view = _strict(inspect(InspectOptions(str(exact_cache.path), row=row)))
        segments = exact_cache.arrays["segments"][row]
        assert (view["row"], view["shard"]) == (row, row // 4)
        assert view["padding"] == int((segments == 0).sum())
        assert [entry["segment"] for entry in view["segments"]] == list(
            range(1, int(segments.max()) + 1)
        )
        tokenizer = cache.open(exact_cache.path).tokenizer()
        for entry in view["segments"]:
            first, end = entry["positions"]
            place = slice(first, end)
            assert (segments[place] == entry["segment"]).all()
            assert entry["document"] == exact_cache.arrays["documents"][row, first]
            assert entry["text"] == tokenizer.decode(
                exact_cache.arrays["tokens"][row, place].tolist(), skip_special_tokens=False
            )
            label = _labels(exact_cache)[row, place]
            assert entry["labels"] == int(label.sum())
            logprobs = exact_cache.arrays["label_logprobs"][row, place][label].astype(np.float64)
            if len(logprobs):
                assert entry["teacher_perplexity"] == pytest.approx(np.exp(-logprobs.mean()))
            else:
                assert entry["teacher_perplexity"] is None


@pytest.mark.parametrize("row", [-1, 10])
def test_a_row_that_does_not_exist(exact_cache: Built, row: int) -> None:
    with pytest.raises(CacheError, match=f"the cache has rows 0 to 9, not {row}"):
        inspect(InspectOptions(str(exact_cache.path), row=row))


# Positions.


def _labelled(built: Built, hit: bool) -> tuple[int, int]:
    """A position whose label is among its exact entries, or is not."""
    labels = np.concatenate([built.arrays["tokens"][:, 1:], built.arrays["tokens"][:, :1]], axis=1)
    exact = np.arange(6) < np.where(_labels(built), built.arrays["exact_counts"], 0)[..., None]
    found = ((built.arrays["target_ids"] == labels[..., None]) & exact).any(axis=-1)
    row, position = np.argwhere(_labels(built) & (found == hit))[0].tolist()
    return row, position


@pytest.mark.parametrize("kind", ["exact", "sampled"])
@pytest.mark.parametrize("hit", [True, False])
def test_a_position(kind: str, hit: bool, exact_cache: Built, sampled_cache: Built) -> None:
    built = exact_cache if kind == "exact" else sampled_cache
    row, position = _labelled(built, hit)
    view = _strict(inspect(InspectOptions(str(built.path), row=row, position=position)))
    assert view["view"] == "position"
    assert view["document"] == built.arrays["documents"][row, position]
    count = int(built.arrays["exact_counts"][row, position])
    kinds = [entry["kind"] for entry in view["entries"]]
    assert kinds == ["exact"] * count + ["sampled"] * (6 - count)
    ids = [entry["id"] for entry in view["entries"]]
    assert ids == built.arrays["target_ids"][row, position].tolist()
    weights = cache.open(built.path).weights(cache.open(built.path).rows([row]))[0, position]
    assert [entry["probability"] for entry in view["entries"]] == pytest.approx(weights.tolist())
    label = view["label"]
    assert label["id"] == built.arrays["tokens"][row, position + 1]
    true = built.log_probabilities()[row, position]
    assert label["probability"] == pytest.approx(np.exp(true[label["id"]]), rel=1e-5)
    rank = int((true > true[label["id"]]).sum()) + 1
    if hit:
        assert label["rank"] == rank <= count
    else:
        assert label["rank"] is None
        assert rank > label["rank_above"] == count
    assert view["entropy"] == pytest.approx(-(np.exp(true) * true).sum(), rel=1e-3)


def test_the_text_around_a_position(exact_cache: Built) -> None:
    tokenizer = cache.open(exact_cache.path).tokenizer()
    for row, position in np.argwhere(_labels(exact_cache)).tolist()[:20]:
        view = position_view(cache.open(exact_cache.path), row, position)
        segments = exact_cache.arrays["segments"][row]
        inside = np.flatnonzero(segments == segments[position])
        tokens = exact_cache.arrays["tokens"][row]
        before, after = inside[inside <= position], inside[inside > position]
        assert view["before"] == tokenizer.decode(tokens[before].tolist())
        assert view["after"] == tokenizer.decode(tokens[after].tolist())


def test_the_temperature_of_a_position(exact_cache: Built) -> None:
    row, position = _labelled(exact_cache, True)
    opened = cache.open(exact_cache.path)
    lowest = position_view(opened, row, position)
    view = position_view(opened, row, position, 4.0)
    assert (lowest["temperature"], view["temperature"]) == (1.0, 4.0)
    p = np.sort(np.exp(exact_cache.log_probabilities(4.0)[row, position]))[::-1][:6]
    assert [entry["probability"] for entry in view["entries"]] == pytest.approx(p, rel=0.05)
    with pytest.raises(CacheError, match="not at 3"):
        position_view(opened, row, position, 3.0)


def test_padding_and_the_end_of_a_document(exact_cache: Built) -> None:
    opened = cache.open(exact_cache.path)
    view = _strict(position_view(opened, 3, 7))
    assert (view["document"], view["label"], view["before"], view["after"]) == (None, None, "", "")
    assert "entries" not in view
    last = _strict(position_view(opened, 3, 3))
    assert last["document"] is not None
    assert last["label"] is None
    assert last["after"] == ""
    assert last["before"] != ""
    assert _strict(position_view(opened, 0, 7))["label"] is None


@pytest.mark.parametrize("position", [-1, 8, 1000])
def test_a_position_that_does_not_exist(exact_cache: Built, position: int) -> None:
    with pytest.raises(CacheError, match=f"a row has positions 0 to 7, not {position}"):
        inspect(InspectOptions(str(exact_cache.path), row=0, position=position))


def test_empty_slots_are_no_entries(tmp_path: Path) -> None:
    rows = make_rows(4, make_encoding())
    labels = np.concatenate([rows["tokens"][:, 1:], rows["tokens"][:, :1]], axis=1)
    logits = np.full((4, 8, 60), -np.inf)
    logits[..., 7] = 1.0
    np.put_along_axis(logits, labels[..., None].astype(np.int64), 0.5, axis=-1)
    built = make_cache(tmp_path / "c", rows=4, logits=logits)
    row, position = np.argwhere(_labels(built))[0].tolist()
    view = position_view(cache.open(built.path), row, position)
    assert [entry["id"] for entry in view["entries"]] == [7, view["label"]["id"]]
    assert sum(entry["probability"] for entry in view["entries"]) == pytest.approx(1)


def test_tokens_that_are_no_text(tmp_path: Path) -> None:
    """Ids beyond the tokenizer's and halves of characters have a spelling all the same."""
    logits = np.zeros((4, 8, 1000))
    logits[..., 900] = 9.0
    logits[..., 3 + 0xE2] = 8.0
    built = make_cache(tmp_path / "c", rows=4, logits=logits, vocabulary=1000)
    row, position = np.argwhere(_labels(built))[0].tolist()
    entries = position_view(cache.open(built.path), row, position)["entries"]
    assert entries[0]["text"] == "<900>"
    assert "\ufffd" not in entries[1]["text"]
    assert entries[1]["text"]


def test_views_of_damage_name_it(exact_cache: Built, copy: Any) -> None:
    """C26: inspect names the documents of a chunk that is gone."""
    built = copy(exact_cache)
    (built.path / "arrays" / "entropy" / "c.1.0").unlink()
    for options in (
        InspectOptions(str(built.path), row=5),
        InspectOptions(str(built.path), row=5, position=2),
    ):
        with pytest.raises(DamageError, match=r"shard 1, rows 4-7, documents \d+-\d+, array entro"):
            inspect(options)
    assert inspect(InspectOptions(str(built.path), row=0))["row"] == 0


def test_views_of_an_unfinished_cache_are_refused(tmp_path: Path) -> None:
    make_cache(tmp_path / "c", complete=False)
    with pytest.raises(CacheError, match="is not finished"):
        inspect(InspectOptions(str(tmp_path / "c"), row=0))
