"""Views and reports as text: the key numbers are there."""

from pathlib import Path
from typing import Any

import numpy as np

import cache
from cache.errors import Damage
from cache.options import InspectOptions
from cache.runlog import RunLog
from cache.show import render, render_report
from cache.summary import inspect, summary
from cache.verify import Report
from tests.cache.builder import Built, make_cache


def _shown(built: Built, **options: Any) -> str:
    return render(inspect(InspectOptions(str(built.path), **options)))


def test_the_summary(exact_cache: Built) -> None:
    text = _shown(exact_cache)
    view = summary(str(exact_cache.path))
    for part in (
        f"{exact_cache.path} (complete, format 1.1)",
        "made-up/teacher, 1,234 parameters, float32, fingerprint ffffffffffff",
        "60 tokens, fingerprint eeeeeeeeeeee",
        f"made-up text, {view['corpus']['documents']} documents",
        "k = 6, all exact, log-probs float16 rounded to 6 mantissa bits",
        "3 of 3 done, 0 missing, 0 files damaged; 4 rows each",
        f"10 of 8 (pack), {view['tokens']} tokens, {view['padding']:.1%} padding",
        f"{view['labels']}; 6.0 exact and 0.0 sampled entries each",
        "exact mass, T = 2",
        f"mean {view['exact_mass'][2]['mean']:.1%}",
        f"10th percentile {view['exact_mass'][2]['percentile_10']:.1%}",
        f"{view['entropy']:.3f} nats",
        f"{view['teacher_perplexity']:.2f} on the labels",
        f"{view['bytes']['total']:,}, {view['bytes']['per_token']:.1f} per token:",
        f"{view['bytes']['arrays']['target_ids']['per_token']:.2f} per token",
    ):
        assert part in text, part
    assert "missing:" not in text
    assert "damaged:" not in text


def test_the_summary_of_a_sampled_cache(sampled_cache: Built) -> None:
    assert "k = 6, sampled tail, at least 2 exact" in _shown(sampled_cache)


def test_the_summary_of_an_unfinished_cache(tmp_path: Path) -> None:
    built = make_cache(tmp_path / "c", complete=False)
    text = _shown(built)
    assert "2 of 3 done, 1 missing" in text
    assert "missing: shards 2" in text
    assert text.endswith("not finished: run the same `stillroom precompute` again")
    (tmp_path / "c" / "arrays" / "tokens" / "zarr.json").unlink()
    assert "2 of ? done" in _shown(built)


def test_the_summary_of_a_damaged_cache(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    (built.path / "arrays" / "entropy" / "c.1.0").unlink()
    text = _shown(built)
    assert "2 of 3 done, 0 missing, 1 files damaged" in text
    assert "damaged: shard 1, rows 4-7, documents" in text


def test_what_is_dropped_is_said(exact_cache: Built) -> None:
    view = summary(str(exact_cache.path))
    lost = {"dropped_bytes": 1200, "documents_with_dropped_bytes": 3}
    text = render({**view, "accounting": lost})
    assert "1,200 bytes of 3 documents that the tokenizer has no token for" in text


def test_a_teacher_beyond_any_number(tmp_path: Path) -> None:
    built = make_cache(tmp_path / "c", rows=4, scale=3000.0)
    assert "too large to tell" in _shown(built)
    assert "segment 1" in _shown(built, row=0)


def test_a_shard(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    RunLog(built.store, "r").write("shard", shard=1, scoring_seconds=1.5, writing_seconds=0.25)
    text = _shown(built, shard=1)
    first, last = built.manifest.receipts[1].documents
    for part in (
        f"1 of {built.path}",
        "4-7",
        f"{first}-{last}",
        built.manifest.receipts[1].sha256,
        "scoring 1.5 s, writing 0.2 s",
        "target_logprobs",
        "1 rows without",
    ):
        assert part in text, part


def test_a_row(exact_cache: Built) -> None:
    text = _shown(exact_cache, row=3)
    assert text.startswith(f"row 3 of {exact_cache.path} (shard 0)")
    document = exact_cache.arrays["documents"][3, 0]
    assert f"segment 1: document {document}, positions 0-3, 3 labels, teacher perplexity" in text
    assert text.endswith("4 positions of padding")


def test_positions(exact_cache: Built, sampled_cache: Built) -> None:
    label = exact_cache.arrays["label_mask"] == 1
    for built in (exact_cache, sampled_cache):
        for row, position in np.argwhere(label).tolist()[:12]:
            view = inspect(InspectOptions(str(built.path), row=row, position=position))
            text = render(view)
            rank = view["label"]["rank"]
            assert (f"rank {rank};" if rank else "rank above ") in text
            assert f"{view['label']['probability']:.4f}" in text
            assert text.count("<- next") == sum(
                entry["id"] == view["label"]["id"] for entry in view["entries"]
            )
            assert text.count("  sampled ") == sum(
                entry["kind"] == "sampled" for entry in view["entries"]
            )
            for entry in view["entries"]:
                assert f"{entry['probability']:.6f}" in text
    assert _shown(exact_cache, row=3, position=7).endswith("padding: no token, no prediction")
    assert "no label: the document ends here" in _shown(exact_cache, row=3, position=3)


def test_reports(exact_cache: Built) -> None:
    sound = render_report(cache.verify(exact_cache.path))
    assert sound.startswith(f"{exact_cache.path}: complete, 3 shards, ")
    assert sound.endswith("checked receipts, files and sizes\nsound (--full reads every byte)")
    assert render_report(cache.verify(exact_cache.path, full=True)).endswith("every byte\nsound")
    damage = tuple(Damage("bad", shard=shard, rows=(0, 4)) for shard in range(30))
    report = Report("c", "complete", True, 40, 5, damage)
    text = render_report(report)
    assert "  shard 19, rows 0-3, documents unknown: bad" in text
    assert "shard 20," not in text
    assert "  and 10 more" in text
    assert "--repair puts right what it can and removes the receipts of broken shards;" in text
    assert text.endswith("then run the command that made the cache again: it redoes exactly those")
    repaired = render_report(Report("c", "complete", True, 40, 5, damage, tuple(range(30))))
    assert "removed the receipts of shards 0, 1, 2," in repaired
    assert "19 and 10 more" in repaired
    assert "--repair" not in repaired
    whole = render_report(Report("c", "complete", True, 40, 5, (Damage("bad"),)))
    assert "  cache: bad\n--repair puts right what it can" in whole
    mended = render_report(
        Report("c", "complete", True, 40, 5, (Damage("bad"),), (), ("manifest.json", "x"))
    )
    assert mended.endswith("  cache: bad\nput right: manifest.json, x")
    unfinished = render_report(Report("c", "open", True, 40, 5, (Damage("it is not finished"),)))
    assert unfinished.endswith("  cache: it is not finished")
