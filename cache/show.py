"""The views of `summary.py` and the reports of `verify.py` as text for a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from cache.errors import LISTED, listed
from cache.provenance import DERIVED
from cache.verify import Report
from cache.visible import one_line, quoted, visible


def render(view: dict[str, Any]) -> str:
    """A view as text, by its "view" field."""
    return visible(_RENDERERS[view["view"]](view))


def render_report(report: Report) -> str:
    """What `verify` found, as text."""
    return visible(_report(report))


def _report(report: Report) -> str:
    depth = "every byte" if report.full else "receipts, files and sizes"
    lines = [
        f"{one_line(report.location)}: {report.state}, {report.shards:,} shards, "
        f"{report.bytes:,} bytes of arrays; checked {depth}"
    ]
    lines += [f"note: {note}" for note in report.notes]
    if report.sound:
        advice = "" if report.full else " (--full reads every byte)"
        return "\n".join([*lines, f"sound{advice}"])
    lines += [f"  {one_line(item)}" for item in report.damage[:LISTED]]
    if len(report.damage) > LISTED:
        lines.append(f"  and {len(report.damage) - LISTED:,} more")
    if report.mended:
        lines.append(f"put right: {one_line(', '.join(report.mended))}")
    if report.repaired:
        lines.append(f"removed the receipts of shards {listed(report.repaired)}")
        lines.append("run again what made them; it redoes exactly these (or copy them again):")
        lines += [f"  {one_line(line)}" for line in report.makers]
    elif not report.mended and any("not finished" not in item.reason for item in report.damage):
        lines.append("--repair puts right what it can and removes the receipts of broken shards;")
        lines.append("then run the command that made the cache again: it redoes exactly those")
    return "\n".join(lines)


def _table(rows: Iterable[tuple[str, str]]) -> list[str]:
    rows = [(one_line(name), one_line(value)) for name, value in rows]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _summary(view: dict[str, Any]) -> str:
    encoding, shards, teacher = view["encoding"], view["shards"], view["teacher"]
    tail = "all exact" if encoding["tail"] == "none" else "sampled tail"
    rounding = encoding["logprobs"]
    if rounding == "rounded":
        rounding = f"float16 rounded to {encoding['mantissa_bits']} mantissa bits"
    revision = f" at {teacher['revision']}" if teacher["revision"] else ""
    total = "?" if shards["total"] is None else f"{shards['total']:,}"
    rows = [
        ("cache", f"{view['cache']} ({view['state']}, format {view['format_version']})"),
        (
            "teacher",
            f"{teacher['source']}{revision}, {teacher['parameters']:,} parameters, "
            f"{view['capture'].get('precision')}, fingerprint {teacher['fingerprint'][:12]}",
        ),
        (
            "tokenizer",
            f"{encoding['vocabulary']:,} tokens, "
            f"fingerprint {view['tokenizer']['fingerprint'][:12]}",
        ),
        ("corpus", f"{view['corpus']['description']}, {view['corpus']['documents']:,} documents"),
        *_extents(view),
        (
            "targets",
            f"k = {encoding['k']}, {tail}"
            + (f", at least {view['capture'].get('exact')} exact" if tail != "all exact" else "")
            + f", log-probs {rounding}",
        ),
        *_derived(view),
        (
            "shards",
            f"{_present(shards, total)}; {encoding['rows_per_shard']:,} rows each",
        ),
    ]
    if "rows" in view:
        rows += [
            (
                "rows",
                f"{view['rows']:,} of {encoding['length']:,} ({view['capture'].get('layout')}), "
                f"{view['tokens']:,} tokens, {view['padding']:.1%} padding",
            ),
            *_statistics(view),
            ("bytes", f"{view['bytes']['total']:,}, {view['bytes']['per_token']:.1f} per token:"),
            *(
                (f"  {name}", f"{entry['per_token']:.2f} per token")
                for name, entry in view["bytes"]["arrays"].items()
            ),
        ]
        lost = view["accounting"]
        if lost.get("dropped_bytes"):
            rows.append(
                (
                    "dropped",
                    f"{lost['dropped_bytes']:,} bytes of {lost['documents_with_dropped_bytes']:,} "
                    "documents that the tokenizer has no token for",
                )
            )
    lines = _table(rows)
    lines += [f"note: {note}" for note in view["notes"]]
    if shards["missing"]:
        lines.append(f"missing: shards {listed(shards['missing'])}")
    lines += [f"damaged: {one_line(item)}" for item in (shards["damaged"] or ())[:LISTED]]
    if view["state"] != "open" and (shards["missing"] or shards["damaged"]):
        lines.append("broken: `stillroom verify` tells all that is wrong and how to repair it")
    work = view.get("work")
    if work is not None and "damaged" in work:
        lines.append(f"damaged: {one_line(work['damaged'])}")
    elif work is not None:
        kind = "shards are made again" if work["again"] else "documents are being added"
        lines.append(
            f"not finished: {kind}, {work['shards_done']:,} shards done; run the same `stillroom "
            f"{work['command']}` of {one_line(work['documents'])} again"
        )
    if view["state"] == "open":
        command = "derive" if DERIVED in view["capture"] else "precompute"
        lines.append(f"not finished: run the same `stillroom {command}` again")
    return "\n".join(lines)


def _extents(view: dict[str, Any]) -> list[tuple[str, str]]:
    """Where the documents of a cache that has grown are from."""
    extents = view.get("extents", ())
    if len(extents) < 2:
        return []
    row, lines = 0, []
    for number, extent in enumerate(extents):
        first, last = extent["first_shard"], extent["first_shard"] + extent["shards"] - 1
        lines.append(
            (
                f"  {'appended' if number else 'first'}",
                f"{extent['description']}, {extent['documents']:,} documents: rows {row:,}-"
                f"{row + extent['rows'] - 1:,}, shards {first:,}-{last:,}",
            )
        )
        row += extent["rows"]
    return lines


def _present(shards: dict[str, Any], total: str) -> str:
    if shards["missing"] is None:
        return f"{total}; whether all files are there was not looked at"
    return (
        f"{shards['done']:,} of {total} done, {len(shards['missing']):,} missing, "
        f"{len(shards['damaged']):,} files damaged"
    )


def _derived(view: dict[str, Any]) -> list[tuple[str, str]]:
    """What a derived cache is from, and what was done."""
    derived = view["capture"].get(DERIVED)
    if derived is None:
        return []
    before, encoding = derived["sources"][0], view["encoding"]
    done = [
        f"{name} {before[key]} -> {encoding[key]}"
        for name, key in (("k", "k"), ("tail", "tail"), ("log-probs", "logprobs"))
        if before[key] != encoding[key]
    ]
    bits = before["mantissa_bits"]
    if before["logprobs"] == "rounded" and bits != encoding["mantissa_bits"]:
        done.append(f"mantissa bits {bits} -> {encoding['mantissa_bits']}")
    if derived["rows"] is not None:
        done.append(f"rows {derived['rows'][0]}:{derived['rows'][1]}")
    done += [f"{name} {derived[name]:g}" for name in ("sample", "seed") if name in derived]
    caches = " + ".join(
        f"{source['manifest_sha256'][:12]} ({source['rows']:,} rows)"
        for source in derived["sources"]
    )
    return [("derived", ", ".join([f"from {caches}", *done]))]


def _statistics(view: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        (
            "labels",
            f"{view['labels']:,}; {view['exact_entries_per_label']:.1f} exact and "
            f"{view['sampled_entries_per_label']:.1f} sampled entries each; "
            f"{view['rows_without_labels']:,} rows without",
        )
    ]
    if view["entropy"] is None:
        return rows
    for mass in view["exact_mass"]:
        rows.append(
            (
                f"exact mass, T = {mass['temperature']:g}",
                f"mean {mass['mean']:.1%}, 10th percentile {mass['percentile_10']:.1%}",
            )
        )
    rows.append(("entropy", f"{view['entropy']:.3f} nats on average"))
    perplexity = view["teacher_perplexity"]
    shown = "too large to tell" if perplexity is None else f"{perplexity:.2f} on the labels"
    rows.append(("teacher's perplexity", shown))
    return rows


def _shard(view: dict[str, Any]) -> str:
    documents = view["documents"]
    first, end = view["rows"]
    rows = [
        ("shard", f"{view['shard']} of {view['cache']}"),
        ("rows", f"{first}-{end - 1}"),
        ("documents", "none" if documents is None else f"{documents[0]}-{documents[1]}"),
        ("tokens", f"{view['tokens']:,}"),
        *_statistics(view),
        ("receipt", f"sha256 {view['receipt_sha256']}"),
        *(
            (f"  {name}", f"{entry['bytes']:>12,} bytes  sha256 {entry['sha256'][:16]}…")
            for name, entry in view["arrays"].items()
        ),
        *(
            (
                "made",
                f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(event['time']))} UTC, "
                + ", ".join(
                    f"{name.removesuffix('_seconds')} {value:.1f} s"
                    for name, value in event.items()
                    if name.endswith("_seconds")
                ),
            )
            for event in view["timings"]
        ),
    ]
    return "\n".join(_table(rows))


def _row(view: dict[str, Any]) -> str:
    lines = [f"row {view['row']} of {one_line(view['cache'])} (shard {view['shard']})"]
    for segment in view["segments"]:
        first, end = segment["positions"]
        perplexity = segment["teacher_perplexity"]
        quality = "" if perplexity is None else f", teacher perplexity {perplexity:.2f}"
        lines.append(
            f"segment {segment['segment']}: document {segment['document']}, positions "
            f"{first}-{end - 1}, {segment['labels']} labels{quality}"
        )
        # Not splitlines(), which also breaks lines at U+2028 and others, and drops them.
        lines += [f"  | {line}" for line in segment["text"].split("\n")]
    if view["padding"]:
        lines.append(f"{view['padding']} positions of padding")
    return "\n".join(lines)


def _position(view: dict[str, Any]) -> str:
    lines = [f"row {view['row']}, position {view['position']} of {one_line(view['cache'])}"]
    if view["document"] is None:
        return "\n".join([*lines, "padding: no token, no prediction"])
    lines += [f"document {view['document']}", f"  before  {quoted(view['before'])}"]
    label = view["label"]
    if label is None:
        return "\n".join([*lines, "no label: the document ends here, or the label does not count"])
    rank = f"rank {label['rank']}" if label["rank"] else f"rank above {label['rank_above']}"
    lines += [
        f"  then    {quoted(view['after'])}",
        f"next token {quoted(label['text'])} (id {label['id']}): probability "
        f"{label['probability']:.4f}, {rank}; entropy {view['entropy']:.3f} nats",
        f"entries at temperature {view['temperature']:g}:",
        "       weight  kind        id  token",
    ]
    lines += [
        f"  {entry['probability']:11.6f}  {entry['kind']:<7} {entry['id']:>6}  "
        + quoted(entry["text"])
        + ("  <- next" if entry["id"] == label["id"] else "")
        for entry in view["entries"]
    ]
    total = sum(entry["probability"] for entry in view["entries"])
    lines.append(f"  {total:11.6f}  in all")
    if any(entry["kind"] == "sampled" for entry in view["entries"]):
        lines.append("an exact weight is the token's probability; sampled ones share the rest")
    return "\n".join(lines)


_RENDERERS = {"summary": _summary, "shard": _shard, "row": _row, "position": _position}
