"""Writers that should not write: leftovers of older runs, and two captures into one folder."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import cache
from cache import shards as shards_module
from cache.errors import CacheError, DamageError
from cache.format import BACKUP, MANIFEST, receipt_key
from cache.manifest import Manifest
from cache.receipt import Receipt
from cache.shards import TakenOverError, write_shard
from cache.storage import Store
from pipelines import transforms
from pipelines.begin import begin
from pipelines.errors import CaptureError
from pipelines.options import PrecomputeOptions
from pipelines.plan import Plan
from pipelines.precompute import precompute
from tests.attack.conftest import Attacked, Base
from tests.attack.damage import array_file
from tests.pipelines import small

# Of the shards' settings nothing that changes a shape: what an old worker writes looks right.
OTHER = {"seed": 5}
LATE = 2


class Worker:
    """A worker that scored a shard and then hung: `write` is what it does when it wakes."""

    def __init__(self, manifest: Manifest, rows: int, arrays: Any):
        self._manifest, self._rows, self._arrays = manifest, rows, arrays

    def write(self, folder: Path) -> None:
        write_shard(Store(folder), self._manifest, LATE, self._rows, self._arrays)


def hung_worker(made: Path, folder: Path, **changes: Any) -> Worker:
    """Begins a capture into a folder, and stops it when it is about to store its shard 2."""
    caught: list[Worker] = []
    real = transforms.write_shard

    def write(store: Store, manifest: Manifest, shard: int, rows: int, arrays: Any) -> Any:
        if shard == LATE:
            caught.append(Worker(manifest, rows, arrays))
            raise OSError("hangs")
        return real(store, manifest, shard, rows, arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transforms, "write_shard", write)
        with pytest.raises(CaptureError, match="hangs"):
            precompute(small.options(made, folder, **changes))
    return caught[0]


@contextmanager
def looked_before(times: int) -> Iterator[None]:
    """Lets a writer's first looks at the manifest pass: they were before the other run began."""
    real, left = shards_module.check_run, [times]

    def check(store: Store, run: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            real(store, run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards_module, "check_run", check)
        yield


def started(made: Path, folder: Path, **changes: Any) -> PrecomputeOptions:
    """Options of the run that took over; it has begun."""
    settings = small.options(made, folder, **changes)
    assert isinstance(begin(settings), Plan)
    return settings


@pytest.fixture
def old(base: Base, tmp_path: Path) -> tuple[Path, Worker]:
    """A folder with an unfinished capture, and a worker of it that hangs."""
    folder = tmp_path / "late"
    return folder, hung_worker(base.made, folder)


def test_a_leftover_with_the_same_settings_before_the_new_run_finished(
    base: Base, old: tuple[Path, Worker]
) -> None:
    folder, worker = old
    settings = started(base.made, folder)
    before = small.everything(folder)
    with pytest.raises(TakenOverError):
        worker.write(folder)
    assert small.everything(folder) == before
    # It had looked just before: it writes files, the same ones, and no receipt.
    with looked_before(1), pytest.raises(TakenOverError):
        worker.write(folder)
    assert not (folder / receipt_key(LATE)).exists()
    # Or even the receipt: the same as well.
    with looked_before(2):
        worker.write(folder)
    precompute(settings)
    assert small.stored(folder) == base.stored


def test_a_leftover_with_the_same_settings_after_the_new_run_finished(
    base: Base, old: tuple[Path, Worker]
) -> None:
    folder, worker = old
    precompute(small.options(base.made, folder))
    before = small.everything(folder)
    with pytest.raises(TakenOverError, match=r"filled by run \(finished\)"):
        worker.write(folder)
    assert small.everything(folder) == before
    for looks in (1, 2):
        with looked_before(looks), pytest.raises(TakenOverError) if looks == 1 else _nothing():
            worker.write(folder)
        assert small.stored(folder) == base.stored
        assert cache.verify(folder, full=True).sound


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@pytest.mark.parametrize("looks", [0, 1, 2])
@pytest.mark.parametrize("has_shard", [False, True], ids=["before the shard", "after the shard"])
def test_a_leftover_with_other_settings_before_the_new_run_finished(
    base: Base, tmp_path: Path, looks: int, has_shard: bool
) -> None:
    """Its folder was deleted and begun anew, with another seed; it woke at the worst moments."""
    folder = tmp_path / "late"
    worker = hung_worker(base.made, folder, **OTHER)
    shutil.rmtree(folder)
    real = transforms.write_shard
    woke: list[str] = []

    def write(store: Store, manifest: Manifest, shard: int, rows: int, arrays: Any) -> Any:
        if has_shard and shard == LATE:
            real(store, manifest, shard, rows, arrays)
        if shard == LATE:
            with looked_before(looks):
                try:
                    worker.write(folder)
                except CacheError as error:
                    woke.append(str(error))
        if has_shard and shard == LATE:
            return Receipt.from_bytes(store.read(receipt_key(LATE)) or b"", "it")
        return real(store, manifest, shard, rows, arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transforms, "write_shard", write)
        settings = small.options(base.made, folder)
        if (looks, has_shard) == (2, False):
            # Its receipt was there first: the shard is named, and done by the same command.
            with pytest.raises(CaptureError, match="another run wrote it late") as raised:
                precompute(settings)
            assert f"shard {LATE}: " in str(raised.value)
            patch.undo()
        precompute(settings)
    assert bool(woke) == (looks < 2 or has_shard)
    opened = cache.open(folder)
    rows = list(range(*base.manifest.shard_rows(LATE)))
    if has_shard and looks:
        # Its files are in the place of the shard's: found, and never read as data.
        damage = cache.verify(folder, full=True).damage
        assert damage
        assert {item.shard for item in damage} == {LATE}
        with pytest.raises(DamageError, match=f"shard {LATE}, .*of another cache"):
            opened.rows(rows)
        assert cache.verify(folder, full=True, repair=True).repaired == (LATE,)
        precompute(small.options(base.made, folder))
    assert small.stored(folder) == base.stored
    assert cache.verify(folder, full=True).sound


@pytest.mark.parametrize("looks", [0, 1, 2])
def test_a_leftover_with_other_settings_after_the_new_run_finished(
    base: Base, attacked: Attacked, tmp_path: Path, looks: int
) -> None:
    worker = hung_worker(base.made, tmp_path / "old", **OTHER)
    before = small.everything(attacked.path)
    with looked_before(looks), pytest.raises(CacheError):
        worker.write(attacked.path)
    if not looks:
        assert small.everything(attacked.path) == before
        return
    found = attacked.found()
    assert {item["shard"] for item in found} == {LATE}
    assert "target_ids" in {item["array"] for item in found}
    attacked.check_readers(
        {
            name: {LATE}
            for name in base.manifest.encoding.stored_arrays()
            if array_file(attacked.path, base.manifest, name, LATE).read_bytes()
            != base.stored[
                str(array_file(attacked.path, base.manifest, name, LATE).relative_to(attacked.path))
            ]
        }
    )
    # The receipt that was there is still the one the manifest lists.
    assert (attacked.path / receipt_key(LATE)).read_bytes() == base.stored[receipt_key(LATE)]
    attacked.repaired()


def test_a_leftover_whose_shard_was_broken_and_is_made_again(
    base: Base, attacked: Attacked, tmp_path: Path
) -> None:
    """Between repair and precompute there is no receipt: a late one must not pass for it."""
    worker = hung_worker(base.made, tmp_path / "old", **OTHER)
    array_file(attacked.path, base.manifest, "entropy", LATE).unlink()
    attacked.verify("--repair")
    with looked_before(2):
        worker.write(attacked.path)
    found = attacked.found()
    assert {(item["shard"], item["array"]) for item in found} == {(LATE, None)}
    attacked.repaired()


# Two captures.


def test_two_captures_with_other_settings(base: Base, tmp_path: Path) -> None:
    """Only one begins; the other says what differs and changes nothing."""
    folder = tmp_path / "cache"
    started(base.made, folder)
    before = small.everything(folder)
    with pytest.raises(CaptureError, match="made otherwise than you ask now:\n  seed: ") as raised:
        precompute(small.options(base.made, folder, **OTHER))
    assert "Nothing was changed" in str(raised.value)
    assert small.everything(folder) == before
    precompute(small.options(base.made, folder))
    assert small.stored(folder) == base.stored


@pytest.mark.parametrize("same", [True, False], ids=["same settings", "other settings"])
def test_two_captures_that_begin_at_once(base: Base, tmp_path: Path, same: bool) -> None:
    """Both look before either has written anything."""
    folder = tmp_path / "cache"
    barrier = threading.Barrier(2)
    real = Store.read
    outcomes: dict[int, Any] = {}
    waited = threading.local()

    def read(self: Store, key: str) -> bytes | None:
        value = real(self, key)
        if key in (MANIFEST, BACKUP) and value is None and not hasattr(waited, key):
            setattr(waited, key, True)
            barrier.wait(timeout=60)
        return value

    def run(number: int) -> None:
        changes = {} if same or number == 0 else OTHER
        try:
            outcomes[number] = begin(small.options(base.made, folder, **changes))
        except CacheError as error:
            outcomes[number] = error
        except CaptureError as error:
            outcomes[number] = error

    small.options(base.made, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "read", read)
        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    stored = json.loads((folder / MANIFEST).read_text())
    plans = [plan for plan in outcomes.values() if isinstance(plan, Plan)]
    assert stored["run"] in {plan.run for plan in plans}
    if not same:
        (error,) = (each for each in outcomes.values() if isinstance(each, CaptureError))
        assert "made otherwise than you ask now:\n  seed: " in str(error)
        shutil.rmtree(folder)
    precompute(small.options(base.made, folder))
    assert small.stored(folder) == base.stored


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False], ids=["same settings", "other settings"])
def test_two_real_captures_at_once(base: Base, tmp_path: Path, same: bool) -> None:
    """Two commands, started together: one may give way, none leaves anything wrong."""
    folder = tmp_path / "cache"
    settings = small.options(base.made, folder)
    words = [
        small.command_words(settings),
        small.command_words(settings, **({} if same else OTHER)),
    ]
    commands = [small.command(each) for each in words]
    ends = [(*command.communicate(timeout=300), command.returncode) for command in commands]
    assert all("Traceback" not in errors for _, errors, _ in ends)
    codes = sorted(code for *_, code in ends)
    if not same:
        assert codes == [0, 1]
        (errors,) = (errors for _, errors, code in ends if code)
        assert "made otherwise than you ask now" in errors
        winner = OTHER if ends[1][2] == 0 else {}
        shutil.rmtree(folder) if winner else None
    for _, errors, code in ends:
        if code and same:
            assert "another run" in errors
    precompute(small.options(base.made, folder))
    assert small.stored(folder) == base.stored
    assert cache.verify(folder, full=True).sound
