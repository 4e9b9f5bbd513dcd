"""`stillroom derive` as a whole: bytes, provenance, resumption, refusals, damage."""

import hashlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cache
import stillroom
from cache import derive as derive_function
from cache.derive import Derived
from cache.encoding import numbered_from
from cache.errors import CacheError, DamageError
from cache.format import BACKUP, MANIFEST, receipt_key
from cache.options import DeriveOptions
from cache.shards import TakenOverError
from cache.show import render
from cache.summary import summary
from tests.cache import builder, s3
from tests.cache.builder import Built, contents, make_cache, same, shard_file, stopped_at

# The package has the function under this name.
derive_module: Any = sys.modules["cache.derive"]


def derive(*places: Any, **asked: Any) -> Derived:
    return derive_function(DeriveOptions(tuple(str(place) for place in places), **asked))


def everything(derived: Derived) -> dict[str, np.ndarray]:
    assert cache.verify(derived.cache.location, full=True).damage == ()
    return derived.cache.rows(slice(None))


def same_rows(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], rows: Any) -> bool:
    return all(same(found[name], np.ascontiguousarray(v[rows])) for name, v in expected.items())


@pytest.fixture(scope="module")
def other_cache(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """6 rows of another corpus, captured as `exact_cache` was."""
    return other(tmp_path_factory.mktemp("other") / "cache")


def other(folder: Path, digest: str = "b", **changes: Any) -> Built:
    """A cache whose corpus has another digest."""
    plain = builder.open_manifest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            builder,
            "open_manifest",
            lambda *args, **more: plain(*args, **more).with_corpus(
                digest=digest * 64, description="more text"
            ),
        )
        return make_cache(folder, **{"rows": 6, "seed": 1, **changes})


# What comes out.


def test_rows_and_shards_of_another_size(exact_cache: Built, tmp_path: Path) -> None:
    derived = derive(exact_cache.path, tmp_path / "out", rows="2:9", rows_per_shard=3)
    assert derived.made == 3
    assert same_rows(everything(derived), exact_cache.arrays, slice(2, 9))
    manifest = derived.cache.manifest
    assert [extent.to_json() for extent in manifest.extents] == [
        {"first_shard": 0, "shards": 3, "rows": 7}
    ]
    before = exact_cache.manifest.statistics
    assert before is not None
    labels = int((exact_cache.arrays["label_mask"][2:9] == 1).sum())
    tokens = int((exact_cache.arrays["segments"][2:9] != 0).sum())
    assert manifest.accounting == {
        "rows": 7,
        "tokens": tokens,
        "labels": labels,
        "left_out": {
            "rows": 3,
            "tokens": before.tokens - tokens,
            "labels": before.labels - labels,
        },
    }


def test_every_operation_at_once(exact_cache: Built, tmp_path: Path) -> None:
    """Fewer entries, temperatures and bits, of some rows: as a direct capture has them."""
    direct = make_cache(tmp_path / "direct", k=3, temperatures=(1.0, 4.0), mantissa_bits=4)
    derived = derive(
        exact_cache.path,
        tmp_path / "out",
        k=3,
        temperatures=(1.0, 4.0),
        mantissa_bits=4,
        rows="0:7",
    )
    found = everything(derived)
    assert derived.cache.encoding == direct.encoding
    for name in found:
        if name not in ("target_logprobs", "tail_logprobs"):
            assert same(found[name], np.ascontiguousarray(direct.arrays[name][:7]))
    for name in ("target_logprobs", "tail_logprobs"):
        expected = direct.arrays[name][:7].astype(float)
        assert np.nanmax(np.abs(found[name] / expected - 1)) < 2.0**-4


def test_batches_do_not_matter(
    sampled_cache: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"k": 4, "rows": "1:10", "rows_per_shard": 5}
    derive(sampled_cache.path, tmp_path / "whole", **asked)
    monkeypatch.setattr(derive_module, "_BATCH_ENTRIES", 1)
    derive(sampled_cache.path, tmp_path / "single", **asked)
    assert contents(tmp_path / "single") == contents(tmp_path / "whole")


def test_a_sampled_tail_thinned_and_dropped(sampled_cache: Built, tmp_path: Path) -> None:
    thinned = derive(sampled_cache.path, tmp_path / "thinned", k=4)
    found = everything(thinned)
    assert (thinned.cache.encoding.k, thinned.cache.manifest.capture["exact"]) == (4, 2)
    label = found["label_mask"] == 1
    assert thinned.cache.weights(found)[label].sum(axis=-1) == pytest.approx(1, abs=1e-6)
    again = derive(sampled_cache.path, tmp_path / "again", k=4, seed=1)
    assert not same(everything(again)["target_ids"], found["target_ids"])

    dropped = derive(sampled_cache.path, tmp_path / "dropped", tail="drop")
    direct = make_cache(tmp_path / "direct", k=2, temperatures=(1.0,))
    found = everything(dropped)
    assert dropped.cache.encoding == direct.encoding
    for name in set(found) - {"tail_logprobs"}:
        assert same(found[name], direct.arrays[name])
    with pytest.raises(CacheError, match="the cache has no sampled tail"):
        derive(tmp_path / "dropped", tmp_path / "more", tail="drop")


def test_a_sample_of_whole_documents(exact_cache: Built, tmp_path: Path) -> None:
    documents = exact_cache.arrays["documents"]
    tokens = exact_cache.arrays["tokens"]
    seen = set()
    for seed in range(4):
        derived = derive(exact_cache.path, tmp_path / str(seed), sample=0.5, seed=seed)
        found = everything(derived)
        rows = [int(np.flatnonzero((tokens == row).all(axis=1))[0]) for row in found["tokens"]]
        assert rows == sorted(rows)
        assert len(rows) == 5
        assert same_rows(found, exact_cache.arrays, rows)
        left = np.setdiff1d(np.arange(10), rows)
        common = set(documents[rows].ravel()) & set(documents[left].ravel())
        assert common <= {2**32 - 1}
        assert derived.cache.manifest.corpus["documents"] == exact_cache.manifest.documents
        seen.add(tuple(rows))
    assert len(seen) > 1


def test_caches_joined(exact_cache: Built, other_cache: Built, tmp_path: Path) -> None:
    derived = derive(exact_cache.path, other_cache.path, tmp_path / "out", rows="8:16")
    found = everything(derived)
    count = exact_cache.manifest.documents or 0
    numbers = numbered_from(other_cache.arrays["documents"], count)
    expected = {
        name: np.concatenate([exact_cache.arrays[name], other_cache.arrays[name]]) for name in found
    }
    expected["documents"] = np.concatenate([exact_cache.arrays["documents"], numbers])
    assert same_rows(found, expected, slice(8, 16))
    corpus = derived.cache.manifest.corpus
    assert corpus["documents"] == count + (other_cache.manifest.documents or 0)
    assert [part["description"] for part in corpus["joined"]] == ["made-up text", "more text"]

    # Parts of one corpus share its numbers, and put together again are the whole.
    parts = [tmp_path / "first", tmp_path / "second"]
    derive(exact_cache.path, parts[0], rows="0:6", k=3)
    derive(exact_cache.path, parts[1], rows="6:10", k=3)
    whole = derive(*parts, tmp_path / "whole")
    direct = derive(exact_cache.path, tmp_path / "direct", k=3)
    assert same_rows(everything(whole), everything(direct), slice(None))
    assert whole.cache.manifest.corpus == direct.cache.manifest.corpus


def test_an_appended_cache_is_a_source_like_any_other(
    exact_cache: Built, copy: Callable[..., Built], tmp_path: Path
) -> None:
    grown = builder.grow(copy(exact_cache))
    assert len(grown.manifest.extents) == 2
    derived = derive(grown.path, tmp_path / "out", rows="7:15", rows_per_shard=8)
    found = everything(derived)
    assert same_rows(found, grown.arrays, slice(7, 15))
    assert derived.cache.manifest.documents == grown.manifest.documents
    assert len(derived.cache.manifest.capture["derived"]["sources"][0]["identities"]) == 2
    with pytest.raises(CacheError, match="both hold the rows 0-9 of one capture"):
        derive(grown.path, exact_cache.path, tmp_path / "more")
    # The appended part alone, and the original: in another order, the same documents.
    derive(grown.path, tmp_path / "part", rows="10:16")
    joined = derive(exact_cache.path, tmp_path / "part", tmp_path / "whole")
    assert same_rows(everything(joined), grown.arrays, slice(None))


def test_preference_pairs_stay_together(tmp_path: Path) -> None:
    built = make_cache(tmp_path / "pairs", rows_per_example=2)
    with pytest.raises(CacheError, match="would separate pairs of rows"):
        derive(built.path, tmp_path / "out", rows="1:6")
    with pytest.raises(CacheError, match=r"rows_per_shard should be a positive multiple of"):
        derive(built.path, tmp_path / "out", rows_per_shard=3)
    found = everything(derive(built.path, tmp_path / "out", sample=6.0, rows_per_shard=2))
    tokens = built.arrays["tokens"]
    rows = [int(np.flatnonzero((tokens == row).all(axis=1))[0]) for row in found["tokens"]]
    assert [row ^ 1 for row in rows[::2]] == rows[1::2]
    assert not any(row % 2 for row in rows[::2])


def test_a_cache_of_the_first_format_becomes_sealed(tmp_path: Path) -> None:
    old = make_cache(tmp_path / "old", sealed=False)
    derived = derive(old.path, tmp_path / "out")
    assert same_rows(everything(derived), old.arrays, slice(None))
    assert derived.cache.encoding.sealed


def test_rounding_again_states_its_error(tmp_path: Path) -> None:
    built = make_cache(tmp_path / "source", mantissa_bits=7, rows=40)
    once = derive(built.path, tmp_path / "once", mantissa_bits=6)
    everything(once)
    assert once.cache.manifest.relative_error == 2.0**-7 + 2.0**-8
    twice = derive(tmp_path / "once", tmp_path / "twice", mantissa_bits=3)
    everything(twice)
    assert twice.cache.manifest.relative_error == 2.0**-4 + 2.0**-7 + 2.0**-8
    (source,) = twice.cache.manifest.capture["derived"]["sources"]
    assert source["derived"] == once.cache.manifest.capture["derived"]


def test_where_it_is_from(sampled_cache: Built, tmp_path: Path) -> None:
    derived = derive(sampled_cache.path, tmp_path / "out", k=4, rows="2:10", seed=3)
    manifest, source = derived.cache.manifest, sampled_cache.manifest
    assert manifest.capture == {
        **source.capture,
        "exact": 2,
        "derived": {
            "version": 1,
            "sources": [
                {
                    "identities": [source.identity],
                    "manifest_sha256": hashlib.sha256(
                        (sampled_cache.path / MANIFEST).read_bytes()
                    ).hexdigest(),
                    "rows": 10,
                    "k": 6,
                    "tail": "sampled",
                    "logprobs": "rounded",
                    "mantissa_bits": 6,
                }
            ],
            "rows": [2, 10],
            "rows_held": [["d" * 64, 2, 10]],
            "seed": 3,
        },
    }
    assert manifest.teacher == source.teacher
    assert manifest.software == source.software
    assert derived.cache.tokenizer_files() == cache.open(sampled_cache.path).tokenizer_files()
    assert str(tmp_path).encode() not in manifest.to_bytes()
    view = render(summary(str(tmp_path / "out")))
    (line,) = [line for line in view.splitlines() if line.startswith("derived")]
    assert line.split(maxsplit=1)[1].endswith("(10 rows), k 6 -> 4, rows 2:10, seed 3")
    assert view.count("derived") == 1
    assert "derived" not in render(summary(str(sampled_cache.path)))
    shard = render(stillroom.inspect(stillroom.InspectOptions(str(tmp_path / "out"), shard=0)))
    assert "UTC, deriving 0." in shard


def test_a_directory_in_s3(
    sampled_cache: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = s3.connect(monkeypatch)
    place = f"s3://{server.bucket()}/derive"
    source = s3.upload(sampled_cache.path, f"{place}/source")
    derive(source, f"{place}/out", k=3)
    derive(sampled_cache.path, tmp_path / "out", k=3)
    assert contents(f"{place}/out") == contents(tmp_path / "out")
    assert cache.verify(f"{place}/out", full=True).sound
    with pytest.raises(CacheError, match="is inside"):
        derive(source, f"{source}/out")


# Interrupted, repeated, repaired.

_ASKED: dict[str, Any] = {"k": 4, "rows": "0:9", "rows_per_shard": 3}


@pytest.fixture
def reference(sampled_cache: Built, tmp_path: Path) -> dict[str, bytes | None]:
    derive(sampled_cache.path, tmp_path / "reference", **_ASKED)
    return contents(tmp_path / "reference")


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("_copy_tokenizer", 0),
        ("create_arrays", 0),
        ("write_shard", 0),
        ("write_shard", 1),
        ("write_shard", 2),
        ("finish", 0),
    ],
)
def test_stopped_anywhere_it_goes_on(
    sampled_cache: Built,
    reference: dict[str, bytes | None],
    tmp_path: Path,
    where: str,
    count: int,
) -> None:
    out = tmp_path / "out"
    with stopped_at(derive_module, where, count):
        derive(sampled_cache.path, out, **_ASKED)
    with pytest.raises(CacheError, match="Run the same `stillroom derive` again"):
        cache.open(out)
    assert "`stillroom derive` again" in render(summary(str(out)))
    assert not cache.verify(out).sound
    made = derive(sampled_cache.path, out, **_ASKED).made
    assert made == {"finish": 0, "write_shard": 3 - count}.get(where, 3)
    assert contents(out) == reference


def test_what_is_finished_is_left_as_it_is(
    sampled_cache: Built, reference: dict[str, bytes | None], tmp_path: Path
) -> None:
    out = tmp_path / "reference"
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert derive(sampled_cache.path, out, **_ASKED).made == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    for changed, line in [
        ({"k": 3}, "k: the cache has 4, you ask for 3"),
        ({"rows": "0:8"}, "rows: the cache has 0:9, you ask for 0:8"),
        ({"seed": 1}, "seed: the cache has 0, you ask for 1"),
        ({"exact": 1}, "exact: the cache has 2, you ask for 1"),
        ({"rows_per_shard": 4}, "rows-per-shard: the cache has 3, you ask for 4"),
    ]:
        with pytest.raises(CacheError) as caught:
            derive(sampled_cache.path, out, **{**_ASKED, **changed})
        assert f"  {line}" in str(caught.value)
        assert "Nothing was changed" in str(caught.value)
    assert contents(out) == reference


def test_another_source_is_another_cache(
    sampled_cache: Built, reference: dict[str, bytes | None], tmp_path: Path
) -> None:
    similar = make_cache(tmp_path / "similar", tail="sampled", seed=5)
    with pytest.raises(CacheError, match=r"source 1 \(.*similar\) has another manifest"):
        derive(similar.path, tmp_path / "reference", **_ASKED)
    # The same source elsewhere is the same source.
    shutil.copytree(sampled_cache.path, tmp_path / "moved")
    assert derive(tmp_path / "moved", tmp_path / "reference", **_ASKED).made == 0
    assert contents(tmp_path / "reference") == reference


def test_repaired_and_derived_again(
    sampled_cache: Built, reference: dict[str, bytes | None], tmp_path: Path
) -> None:
    out = tmp_path / "reference"
    file = out / "arrays/target_ids/c.1.0.0"
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)
    (out / "arrays/tokens/c.2.0").unlink()
    (out / "tokenizer/tokenizer.json").write_text("{}")
    with pytest.raises(DamageError, match="shard 2"):
        derive(sampled_cache.path, out, **_ASKED)
    report = cache.verify(out, full=True, repair=True)
    assert report.repaired == (1, 2)
    with stopped_at(derive_module, "write_shard", 1):
        derive(sampled_cache.path, out, **_ASKED)
    # Readers go on meanwhile.
    assert len(cache.open(out)) == 9
    assert derive(sampled_cache.path, out, **_ASKED).made == 1
    assert contents(out) == reference


def test_a_damaged_source_is_named(
    sampled_cache: Built,
    reference: dict[str, bytes | None],
    copy: Callable[..., Built],
    tmp_path: Path,
) -> None:
    broken = copy(sampled_cache)
    shard_file(broken, "target_ids", 1).unlink()
    with pytest.raises(DamageError, match=r"shard 1, rows 4-7, (?s:.)*in the source .*copy\. "):
        derive(broken.path, tmp_path / "out", **_ASKED)
    # Its first shard of rows 0-2 is done; the source mended, it goes on.
    assert (tmp_path / "out" / receipt_key(0)).exists()
    assert derive(sampled_cache.path, tmp_path / "out", **_ASKED).made == 2
    assert contents(tmp_path / "out") == reference
    (broken.path / "tokenizer/tokenizer.json").unlink()
    with pytest.raises(DamageError, match=r"tokenizer\.json is missing(?s:.)*in the source"):
        derive(broken.path, tmp_path / "more")


def test_the_later_of_two_runs_wins(
    sampled_cache: Built, reference: dict[str, bytes | None], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    real = derive_module.write_shard

    def meanwhile(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(derive_module, "write_shard", real)
            derive(sampled_cache.path, out, **_ASKED)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(derive_module, "write_shard", meanwhile)
        with pytest.raises(TakenOverError):
            derive(sampled_cache.path, out, **_ASKED)
    assert contents(out) == reference


def test_a_broken_receipt_of_an_unfinished_one_is_made_again(
    sampled_cache: Built,
    reference: dict[str, bytes | None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    with stopped_at(derive_module, "write_shard", 2):
        derive(sampled_cache.path, out, **_ASKED)
    (out / receipt_key(0)).write_text("{}")
    (out / receipt_key(7)).write_text("{}")
    assert derive(sampled_cache.path, out, **_ASKED).made == 2
    assert "Made again: shard 0" in capsys.readouterr().err
    assert contents(out) == reference


# Refused.


def test_places_that_cannot_be(exact_cache: Built, tmp_path: Path) -> None:
    source = exact_cache.path
    link = tmp_path / "link"
    link.symlink_to(source)
    before = contents(source)
    for out, message in [
        (source, "is .*, which it would be derived from"),
        (f"{source}/", "is .*, which it would be derived from"),
        (source / "inside", "is inside"),
        (link, "which it would be derived from"),
    ]:
        with pytest.raises(CacheError, match=message):
            derive(source, out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(CacheError, match=r"not a cache and not empty: it holds thesis\.tex"):
        derive(source, tmp_path / "full")
    with pytest.raises(CacheError, match="is not a cache"):
        derive(tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(CacheError, match="made otherwise than you ask now"):
        derive(source, make_cache(tmp_path / "captured").path)
    assert contents(source) == before
    assert not (tmp_path / "out").exists()


def test_sources_that_cannot_be(exact_cache: Built, sampled_cache: Built, tmp_path: Path) -> None:
    out = tmp_path / "out"
    unfinished = make_cache(tmp_path / "unfinished", complete=False)
    with pytest.raises(CacheError, match="is not finished"):
        derive(unfinished.path, out)
    with pytest.raises(CacheError, match="are the same cache"):
        derive(exact_cache.path, exact_cache.path, out)
    with pytest.raises(CacheError, match=r'tail: .* has "none", .* has "sampled"'):
        derive(exact_cache.path, sampled_cache.path, out)
    assert not out.exists()


# The command.


def test_the_command(
    exact_cache: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["derive", str(exact_cache.path), str(tmp_path / "out"), "--k", "2"]
    assert stillroom.main(words) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{tmp_path}/out: made 3 shards\n")
    assert "k 6 -> 2" in shown.out
    assert "Deriving: 3/3" in shown.err
    assert stillroom.main(words) == 0
    assert "already complete" in capsys.readouterr().out
    assert stillroom.main([*words[:-1], "9"]) == 1
    assert "stillroom derive: --k 9 is more than the 6" in capsys.readouterr().err


def test_stopped_by_hand(
    exact_cache: Built,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(derive_module, "write_shard", stop)
    assert stillroom.main(["derive", str(exact_cache.path), str(tmp_path / "out")]) == 130
    assert "Run the same command again" in capsys.readouterr().err
    assert (tmp_path / "out" / BACKUP).exists()
