"""Filling: who may write, work on a finished cache, and how it is finished; kills in between."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cache
from cache import finishing
from cache.errors import CacheError
from cache.filling import begin_fill, begin_work, check_place, missing_shards, new_run, reopened
from cache.finishing import added, completed, finish, settle
from cache.format import BACKUP, MANIFEST, WORK, receipt_key
from cache.manifest import Extent, Manifest
from cache.shards import TakenOverError, write_shard
from cache.storage import Store
from cache.verify import verify
from tests.cache.builder import Built, make_cache, make_encoding, open_manifest, same

# Twice the first cache's rows, of another corpus.
CORPUS = {"description": "more text", "identity": {"kind": "more"}}


def _agree(found: Manifest) -> list[str]:
    return []


def _objects(store: Store) -> dict[str, bytes | None]:
    return {key: store.read(key) for key in store.list()}


@pytest.fixture
def opened() -> Manifest:
    return open_manifest(make_encoding(), {}, 7)


def test_runs_differ() -> None:
    assert len({new_run() for _ in range(50)}) == 50


# A new cache.


def test_a_new_cache_begins_with_manifest_and_backup(tmp_path: Path, opened: Manifest) -> None:
    store = Store(tmp_path / "c")
    assert begin_fill(store, opened, lambda found: pytest.fail("compared")) == opened
    assert _objects(store) == {MANIFEST: opened.to_bytes(), BACKUP: opened.to_bytes()}


def test_the_same_work_is_taken_over(tmp_path: Path, opened: Manifest) -> None:
    store = Store(tmp_path / "c")
    begin_fill(store, opened, _agree)
    later = replace(
        opened, run="run-2", software={"numpy": "9"}, corpus={"identity": {"kind": "other"}}
    )
    taken = begin_fill(store, later, _agree)
    assert (taken.run, taken.software) == ("run-2", {"numpy": "9"})
    # What was known of the corpus stays known.
    assert taken.corpus == {**opened.corpus, "identity": {"kind": "other"}}
    assert _objects(store) == {MANIFEST: taken.to_bytes(), BACKUP: taken.to_bytes()}


def test_other_work_is_refused_line_by_line(tmp_path: Path, opened: Manifest) -> None:
    store = Store(tmp_path / "c")
    begin_fill(store, opened, _agree)
    before = _objects(store)
    with pytest.raises(OSError, match="k: 1, not 2") as raised:
        begin_fill(store, opened, lambda found: ["k: 1, not 2", "m: 3"], _Refused)
    assert "\n  k: 1, not 2\n  m: 3\n" in str(raised.value)
    assert "or delete this unfinished one" in str(raised.value)
    assert _objects(store) == before


class _Refused(ValueError, OSError):
    """An error of a caller's own."""


def test_of_two_that_take_over_one_does(tmp_path: Path, opened: Manifest) -> None:
    store = Store(tmp_path / "c")
    begin_fill(store, opened, _agree)

    def meanwhile(found: Manifest) -> list[str]:
        store.write(MANIFEST, replace(opened, run="run-3").to_bytes())
        return []

    with pytest.raises(CacheError, match="another run has just begun to fill"):
        begin_fill(store, replace(opened, run="run-2"), meanwhile)
    assert json.loads(store.read(MANIFEST) or b"")["run"] == "run-3"


def test_a_finished_cache_is_given_back_untouched(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    before = _objects(built.store)
    assert begin_fill(built.store, reopened(built.manifest), _agree) == built.manifest
    with pytest.raises(CacheError, match="otherwise than you ask now") as raised:
        begin_fill(built.store, reopened(built.manifest), lambda found: ["k"])
    assert "unfinished" not in str(raised.value)
    assert _objects(built.store) == before


def test_a_cache_that_lost_its_manifest_is_not_begun_anew(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    (built.path / MANIFEST).unlink()
    before = _objects(built.store)
    check_place(built.store)
    with pytest.raises(CacheError, match=r"lost its manifest\.json. `stillroom verify .* --repair"):
        begin_fill(built.store, reopened(built.manifest), _agree)
    assert _objects(built.store) == before


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        ((), False),
        ((MANIFEST,), False),
        ((MANIFEST, "thesis.tex"), False),
        (("manifest.json.__lock",), False),
        ((BACKUP, "arrays"), False),
        (("thesis.tex",), True),
        (("arrays", "receipts"), True),
    ],
)
def test_a_place_that_holds_something_else(
    tmp_path: Path, names: tuple[str, ...], refused: bool
) -> None:
    for name in names:
        (tmp_path / name).write_text("mine")
    if refused:
        with pytest.raises(CacheError, match=f"not a cache and not empty: it holds {names[0]}"):
            check_place(Store(tmp_path))
    else:
        check_place(Store(tmp_path))
        check_place(Store(tmp_path / "none"))


# Shards made again.


def _written(built: Built, opened: Manifest, *shards: int) -> None:
    for shard in shards:
        place = slice(*built.manifest.shard_rows(shard))
        arrays = {name: values[place] for name, values in built.arrays.items()}
        write_shard(built.store, opened, shard, len(built.logits), arrays)


def test_what_a_reopened_manifest_is(exact_cache: Built) -> None:
    manifest = exact_cache.manifest
    opened = reopened(manifest)
    assert (opened.state, opened.first_shard, opened.first_document) == ("open", 0, 0)
    assert opened.identity == manifest.identity
    for name in ("encoding", "capture", "teacher", "tokenizer", "corpus", "software"):
        assert getattr(opened, name) == getattr(manifest, name)
    assert reopened(manifest, run="x").run == "x"
    assert reopened(manifest).run != opened.run


def test_shards_made_again_leave_the_bytes_as_they_were(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    before = _objects(built.store)
    for shard in (0, 2):
        built.store.delete(receipt_key(shard))
    assert missing_shards(built.store, built.manifest) == [0, 2]
    opened = begin_work(built.store, reopened(built.manifest), _agree)
    # The finished cache is there all the while.
    assert built.store.read(MANIFEST) == before[MANIFEST]
    assert same(cache.open(built.path).rows([5])["tokens"], built.arrays["tokens"][5:6])
    (found,) = [item for item in verify(built.path).damage if item.shard is None]
    assert "not finished. Run the command that began it again" in found.reason
    _written(built, opened, 0, 2)
    assert finish(built.store, opened, 10, built.manifest.accounting) == (built.manifest, False, [])
    assert _objects(built.store) == before


def test_shards_made_again_with_other_bytes_are_listed(exact_cache: Built, copy: Any) -> None:
    """Another machine's last bits: the manifest lists what is there, and the caller is told."""
    built = copy(exact_cache)
    built.store.delete(receipt_key(1))
    opened = begin_work(built.store, reopened(built.manifest), _agree)
    arrays = {name: values[4:8].copy() for name, values in built.arrays.items()}
    label = np.argwhere(arrays["label_mask"] == 1)[0]
    arrays["entropy"][tuple(label)] += np.float16(0.01)
    receipt = write_shard(built.store, opened, 1, 10, arrays)
    complete, changed, _ = finish(built.store, opened, 10, built.manifest.accounting)
    assert changed
    assert [entry.sha256 for entry in complete.receipts] == [
        built.manifest.receipts[0].sha256,
        receipt.digest,
        built.manifest.receipts[2].sha256,
    ]
    assert verify(built.path, full=True).sound


def test_work_is_taken_over_or_refused(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    store = built.store
    first = begin_work(store, reopened(built.manifest), _agree)
    second = begin_work(store, reopened(built.manifest), _agree)
    assert second == replace(first, run=second.run)
    assert second.run != first.run
    with pytest.raises(TakenOverError, match=f"filled by run {second.run}, this is run"):
        _written(built, first, 0)
    with pytest.raises(TakenOverError):
        finish(store, first, 10, built.manifest.accounting)
    before = _objects(store)
    with pytest.raises(CacheError, match=r"is not finished: `stillroom (?s:.)*\n  k: 3") as raised:
        begin_work(store, reopened(built.manifest), lambda found: ["k: 3"])
    assert "or delete" in str(raised.value)
    assert _objects(store) == before

    def meanwhile(found: Manifest) -> list[str]:
        store.write(WORK, first.to_bytes())
        return []

    with pytest.raises(CacheError, match="another run has just begun to add"):
        begin_work(store, reopened(built.manifest), meanwhile)


def test_two_begin_work_at_once(
    exact_cache: Built, copy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = copy(exact_cache)
    monkeypatch.setattr(Store, "create", lambda *_: False)
    with pytest.raises(CacheError, match="another run has just begun to add"):
        begin_work(built.store, reopened(built.manifest), _agree)


def test_nobody_finishes_without_every_receipt(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    built.store.delete(receipt_key(1))
    opened = begin_work(built.store, reopened(built.manifest), _agree)
    with pytest.raises(CacheError, match="shard 1 has no receipt"):
        finish(built.store, opened, 10, built.manifest.accounting)
    with pytest.raises(CacheError, match="shard 1 has no receipt"):
        completed(built.store, opened, built.manifest.extents, {})
    assert built.store.read(MANIFEST) == built.manifest.to_bytes()


def test_a_run_that_takes_over_at_any_moment_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late: the first run completes nothing of the second's."""
    for moment in ("read_manifest", "check_run", "_completed"):
        built = make_cache(tmp_path / moment, complete=False)
        place = slice(8, 10)
        whole = make_cache(tmp_path / f"{moment}-whole")
        arrays = {name: values[place] for name, values in whole.arrays.items()}
        write_shard(built.store, built.manifest, 2, 10, arrays)
        real = getattr(finishing, moment)

        def after(*given: Any, real: Callable[..., Any] = real, built: Built = built) -> Any:
            result = real(*given)
            built.store.write(MANIFEST, replace(built.manifest, run="second").to_bytes())
            return result

        with monkeypatch.context() as patch:
            patch.setattr(finishing, moment, after)
            with pytest.raises(CacheError, match=r"another run took over|changed by another run"):
                finish(built.store, built.manifest, 10, {})
        assert json.loads(built.store.read(MANIFEST) or b"")["run"] == "second"


# Shards behind those of a finished cache.


def _grown(built: Built, corpus: dict[str, Any] = CORPUS) -> tuple[Manifest, Built]:
    """Begins to add the rows of another cache, and writes all of its shards but the last."""
    more = make_cache(built.path.parent / "more", rows=6, seed=3)
    opened = replace(
        reopened(built.manifest),
        corpus={**corpus, "digest": "c" * 64, "documents": 50},
        first_shard=3,
        first_document=built.manifest.corpus["documents"],
    )
    opened = begin_work(built.store, opened, _agree)
    arrays = {name: values[:4] for name, values in more.arrays.items()}
    write_shard(built.store, opened, 3, 12 + 6, arrays)
    return opened, more


def test_shards_that_are_added(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    before = _objects(built.store)
    reader = cache.open(built.path)
    opened, more = _grown(built)
    with pytest.raises(CacheError, match="shard 4 has no receipt"):
        finish(built.store, opened, 6, {"documents": 50})
    last = {name: values[4:] for name, values in more.arrays.items()}
    write_shard(built.store, opened, 4, 12 + 6, last)
    complete, changed, _ = finish(built.store, opened, 6, {"documents": 50, "dropped": {"a": 1}})
    assert not changed
    own = built.manifest.accounting
    assert complete.accounting == {**own, "documents": own["documents"] + 50, "dropped": {"a": 1}}
    assert complete.extents == (
        Extent(0, 3, 10),
        Extent(3, 2, 6, opened.corpus, {"documents": 50, "dropped": {"a": 1}}),
    )
    assert complete.corpus == built.manifest.corpus
    assert complete.software == built.manifest.software
    after = _objects(built.store)
    kept = {key for key in before if key.startswith(("receipts/", "tokenizer/"))}
    assert {key: after[key] for key in kept} == {key: before[key] for key in kept}
    assert after[BACKUP] == after[MANIFEST] == complete.to_bytes()
    assert WORK not in after
    assert verify(built.path, full=True).sound
    everything = cache.open(built.path).rows(slice(None))
    for name, values in reader.rows(slice(None)).items():
        assert same(values, built.arrays[name])
        assert same(everything[name], np.concatenate([values, more.arrays[name]]))
    # A shard of either extent made again, the accounting of both as before.
    for extent, shard, rows, counts in ((0, 1, 10, own), (1, 4, 6, complete.extents[1].accounting)):
        built.store.delete(receipt_key(shard))
        assert missing_shards(built.store, complete, extent) == [shard]
        assert missing_shards(built.store, complete, 1 - extent) == []
        again = begin_work(built.store, reopened(complete, extent), _agree)
        assert again.corpus == (complete.corpus, opened.corpus)[extent]
        assert again.first_document == (0, opened.first_document)[extent]
        if extent == 0:
            _written(built, again, shard)
        else:
            write_shard(built.store, again, shard, 12 + 6, last)
        assert finish(built.store, again, rows, counts or {}) == (complete, False, [])
        assert _objects(built.store) == after


def test_an_addition_behind_shards_that_are_not_there(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    opened = replace(
        reopened(built.manifest), corpus={"digest": "c", "documents": 1}, first_shard=5
    )
    begin_work(built.store, opened, _agree)
    with pytest.raises(CacheError, match="was changed while shards were added"):
        finish(built.store, opened, 4, {})


# Kills at the very end.


def test_killed_between_manifest_and_backup(exact_cache: Built, copy: Any) -> None:
    built = copy(exact_cache)
    before = _objects(built.store)
    for key in (BACKUP, "arrays/zarr.json", "arrays/tokens/zarr.json"):
        built.store.delete(key)
    built.store.write(WORK, reopened(built.manifest).to_bytes())
    settle(built.store, built.manifest)
    assert _objects(built.store) == before


def test_a_backup_that_says_otherwise_is_not_written_over(exact_cache: Built, copy: Any) -> None:
    """An edited manifest must not become its own witness."""
    built = copy(exact_cache)
    edited = replace(built.manifest, teacher={**built.manifest.teacher, "source": "elsewhere"})
    built.store.write(MANIFEST, edited.to_bytes())
    settle(built.store, edited)
    assert built.store.read(BACKUP) == built.manifest.to_bytes()
    assert not verify(built.path).sound
    # Of fewer shards, or of none, it is only old.
    for old in (reopened(built.manifest).to_bytes(), b"", b"{}"):
        built.store.write(BACKUP, old)
        settle(built.store, built.manifest)
        assert built.store.read(BACKUP) == built.manifest.to_bytes()


@pytest.mark.parametrize(
    ("parts", "total"),
    [
        ([], {}),
        ([{"a": 1}, {}], {"a": 1}),
        (
            [{"a": 1}, {"a": 2, "b": {"c": 3}}, {"b": {"c": 4, "d": 5}}],
            {"a": 3, "b": {"c": 7, "d": 5}},
        ),
    ],
)
def test_counts_are_added_by_name(parts: list[dict[str, Any]], total: dict[str, Any]) -> None:
    assert added(parts) == total
