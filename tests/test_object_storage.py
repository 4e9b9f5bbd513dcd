"""The whole product on object storage: capture, look, check, repair and train, on S3."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import cache
import stillroom
from cache.format import MANIFEST
from cache.shards import array_chunk_key
from cache.storage import StorageError, Store
from pipelines.errors import CaptureError
from pipelines.precompute import precompute
from student.options import EvaluateOptions
from student.trained import evaluate
from tests.cache import s3
from tests.cache.builder import same
from tests.cache.s3 import Fault, Request, Server, share
from tests.pipelines.small import captured, options, quick, stored
from tests.student import runs


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a teacher, a corpus and a finished cache. Do not change it."""
    return captured(tmp_path_factory.mktemp("made"))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    quick(monkeypatch)
    return s3.connect(monkeypatch)


@pytest.fixture
def place(server: Server) -> str:
    return f"s3://{server.bucket()}/caches/first"


def capture(made: Path, place: str) -> cache.Cache:
    return precompute(replace(options(made), out=place)).cache


def test_a_capture_is_the_local_one_byte_for_byte(
    made: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = capture(made, place)
    assert stored(place) == stored(made / "cache")
    assert opened.location == place
    assert stillroom.main(["verify", place, "--full"]) == 0
    assert stillroom.main(["inspect", place]) == 0
    assert stillroom.main(["inspect", place, "--row", "1", "--position", "3"]) == 0
    assert stillroom.main(["inspect", place, "--shard", "1"]) == 0
    assert place in capsys.readouterr().out
    again = precompute(replace(options(made), out=place))
    assert again.scored == 0


@pytest.mark.parametrize("stop", ["parts/", "arrays/entropy", "receipts/000001", "manifest"])
def test_a_stopped_capture_goes_on(made: Path, server: Server, place: str, stop: str) -> None:
    """The server refuses a write for good; later it does not."""

    def plan(request: Request, count: int) -> Fault | None:
        late = stop != "manifest" or "receipts/000003" in str(seen)
        wrong = request.method == "PUT" and f"first/{stop}" in request.key and late
        return Fault("status") if wrong else None

    with (
        server.watch() as seen,
        server.faulty(plan) as injected,
        pytest.raises((CaptureError, StorageError), match="busy"),
    ):
        capture(made, place)
    assert injected
    capture(made, place)
    assert stored(place) == stored(made / "cache")


def test_a_capture_through_faults(made: Path, server: Server, place: str) -> None:
    kinds = ("503", "500", "429", "drop", "lost", "cut")
    with server.faulty(share(1, 0.2, *kinds)) as injected:
        capture(made, place)
    assert len({fault.kind for fault in injected}) == 4
    assert stored(place) == stored(made / "cache")


def test_repair_and_the_same_capture_bring_it_back(
    made: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    s3.upload(made / "cache", place)
    store = Store(place)
    first, second = array_chunk_key("target_ids", 3, 0), array_chunk_key("entropy", 2, 2)
    data = store.read(first) or b""
    store.write(first, data[:40] + bytes([data[40] ^ 1]) + data[41:])
    store.delete(second)
    assert stillroom.main(["verify", place, "--full", "--repair", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["repaired"] == [0, 2]
    capture(made, place)
    assert stored(place) == stored(made / "cache")
    assert cache.verify(place, full=True).sound


def test_a_server_that_fails_is_no_damage(made: Path, server: Server, place: str) -> None:
    """Otherwise `--repair` would remove the receipts of sound shards."""
    s3.upload(made / "cache", place)
    before = stored(place)

    def plan(request: Request, count: int) -> Fault | None:
        return Fault("status") if "arrays/tokens/c.1" in request.key else None

    with server.faulty(plan):
        with pytest.raises(StorageError, match="is too busy"):
            cache.open(place).rows(slice(None))
        with pytest.raises(StorageError, match="is too busy"):
            cache.verify(place, full=True, repair=True)
    assert stored(place) == before
    assert cache.verify(place, full=True).sound


def test_http_reads_a_cache(made: Path, server: Server, place: str) -> None:
    s3.upload(made / "cache", place)
    address = place.replace("s3://", f"{server.endpoint}/")
    assert cache.verify(address, full=True).sound
    found, expected = cache.open(address).rows([3, 0]), cache.open(made / "cache").rows([3, 0])
    assert all(same(found[name], values) for name, values in expected.items())
    Store(place).write(MANIFEST, b"{")
    with pytest.raises(cache.CacheError, match="is not valid JSON"):
        cache.open(address)


def test_a_student_trains_from_it(
    server: Server, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.quick(monkeypatch)
    runs.make(tmp_path)
    s3.upload(tmp_path / "cache", place)
    runs.run(runs.options(tmp_path, "local"))
    with server.faulty(share(2, 0.1, "503", "drop", "cut")) as injected:
        runs.run(runs.options(tmp_path, "remote", cache=place))
    assert injected
    runs.assert_equal(tmp_path / "remote", tmp_path / "local")

    # With a local copy each file is asked for once, in all epochs; and it is no other run.
    folder = str(tmp_path / "copy")
    asked = runs.options(tmp_path, "copied", cache=place, local_copy=folder)
    with server.watch() as seen, runs.killed_at("_log", 5), pytest.raises(runs.Killed):
        runs.run(asked)
    runs.run(replace(asked, local_copy=None))
    runs.assert_equal(tmp_path / "copied", tmp_path / "local")
    shards = [request.key for request in seen if "arrays/" in request.key]
    assert len(shards) == len(set(shards)) > 0
    with server.watch() as seen:
        measured = evaluate(EvaluateOptions(str(tmp_path / "copied"), local_copy=folder))
    assert not [request.key for request in seen if request.key in shards]
    assert measured == evaluate(EvaluateOptions(str(tmp_path / "local")))
