"""Object storage: addresses, what of the environment is used, errors that say what to do."""

import json
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from cache import remote
from cache.errors import CacheError
from cache.storage import StorageError, Store, chunk_key, encode_chunk
from tests.cache import s3
from tests.cache.builder import make_encoding
from tests.cache.s3 import Fault, Server, share


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return s3.connect(monkeypatch)


@pytest.fixture
def location(server: Server) -> str:
    return f"s3://{server.bucket()}/a/cache"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No setting of any storage in the environment."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "STILLROOM_")):
            monkeypatch.delenv(name)
    return monkeypatch


# Addresses and the environment.


def test_what_an_address_is() -> None:
    for address in ("s3://b/x", "gs://b", "http://host/x", "https://host:1/x", "memory://x"):
        assert remote.is_remote(address)
    for path in ("/a/b", "a/b", "./s3", "C:", "a:b/c", "x s3://b"):
        assert not remote.is_remote(path)


@pytest.mark.parametrize("location", ["s3:/bucket/x", "http:/host", "gs:/b", "s3://", "s3:///x"])
def test_half_an_address_is_not_taken_for_a_path(location: str) -> None:
    with pytest.raises(CacheError, match=r"write (s3|http|gs)://bucket"):
        Store(location).read("k")


@pytest.mark.parametrize(
    "location",
    ["s3://user:pass-word@bucket/x", "https://user:pass-word@host/x", "http://host/x?pass-word=1"],
)
def test_secrets_in_addresses_are_refused_and_not_shown(location: str) -> None:
    with pytest.raises(CacheError, match="address should") as caught:
        Store(location)
    assert "pass-word" not in str(caught.value)


def test_specifications(bare: pytest.MonkeyPatch) -> None:
    aws = {"driver": "s3", "bucket": "b", "path": "x y/é%20/f/"}
    assert remote.specification("s3://b/x y/é%20", "f/") == aws
    assert remote.specification("s3://b") == {"driver": "s3", "bucket": "b", "path": ""}
    assert remote.specification("gs://b/x", "f/") == {
        "driver": "gcs",
        "bucket": "b",
        "path": "x/f/",
    }
    assert remote.specification("https://h/x", "f/") == "https://h/x/f/"
    bare.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert remote.specification("s3://b")["aws_region"] == "eu-west-1"  # type: ignore[index]
    bare.setenv("AWS_REGION", "eu-north-1")
    assert remote.specification("s3://b")["aws_region"] == "eu-north-1"  # type: ignore[index]
    bare.setenv("AWS_ENDPOINT_URL", "http://all:1/")
    assert remote.specification("s3://b")["endpoint"] == "http://all:1"  # type: ignore[index]
    bare.setenv("AWS_ENDPOINT_URL_S3", "http://minio:2")
    assert remote.specification("s3://b")["endpoint"] == "http://minio:2"  # type: ignore[index]
    bare.delenv("AWS_REGION")
    bare.delenv("AWS_DEFAULT_REGION")
    assert remote.specification("s3://b")["aws_region"] == "us-east-1"  # type: ignore[index]


def test_credentials(bare: pytest.MonkeyPatch) -> None:
    assert "aws_credentials" not in remote.resources()
    bare.setenv("AWS_PROFILE", "work")
    assert remote.resources()["aws_credentials"] == {"type": "profile", "profile": "work"}
    bare.setenv("AWS_ACCESS_KEY_ID", "id")
    bare.setenv("AWS_SECRET_ACCESS_KEY", "word")
    assert remote.resources()["aws_credentials"] == {"type": "environment"}
    bare.setenv("AWS_NO_SIGN_REQUEST", "1")
    assert remote.resources()["aws_credentials"] == {"type": "anonymous"}


def test_settings_of_the_user(bare: pytest.MonkeyPatch) -> None:
    usual = remote.resources()["s3_request_retries"]
    given = {"s3_request_retries": {"max_retries": 3}, "gcs_user_project": {"project_id": "p"}}
    bare.setenv("STILLROOM_STORAGE", json.dumps(given))
    found = remote.resources()
    assert found["s3_request_retries"] == {**usual, "max_retries": 3}
    assert found["gcs_user_project"] == {"project_id": "p"}
    assert found["http_request_retries"] == usual
    for wrong in ("{", "[]", '{"s3_request_retries": {"tries": 3}}', '{"nonsense": 1}'):
        bare.setenv("STILLROOM_STORAGE", wrong)
        with pytest.raises(CacheError, match="environment variable STILLROOM_STORAGE should be"):
            Store("s3://b/x")
        Store("/a/path")


# The rules of storage, on S3.


def test_the_rules_of_storage(location: str) -> None:
    store = Store(location)
    assert store.local is None
    assert store.read("a/b") is None
    assert store.create("a/b", b"one")
    assert not store.create("a/b", b"two")
    value, generation = store.read_versioned("a/b")
    assert value == b"one"
    assert store.replace("a/b", b"22", generation)
    assert not store.replace("a/b", b"333", generation)
    _, absent = store.read_versioned("none")
    assert store.replace("none", b"made", absent)
    assert not store.replace("none", b"again", absent)
    store.write("empty", b"")
    assert store.read_many(["a/b", "x", "empty"]) == [b"22", None, b""]
    store.delete("empty")
    store.delete("empty")
    assert store.read("empty") is None
    again = pickle.loads(pickle.dumps(store))
    assert again.read("a/b") == b"22"
    assert s3.SECRET.encode() not in pickle.dumps(store)


def test_folders(location: str) -> None:
    store = Store(location)
    for key in ("b/2", "b/10", "b/sub/x", "a", "bb/1", "b.json", "with space/ü%?#"):
        store.write(key, b"1")
    Store(f"{location}2").write("b/else", b"1")
    assert store.list("b/") == ["10", "2", "sub/x"]
    assert store.list("none") == []
    assert store.list() == ["a", "b.json", "b/10", "b/2", "b/sub/x", "bb/1", "with space/ü%?#"]
    store.delete_folder("b")
    assert store.list() == ["a", "b.json", "bb/1", "with space/ü%?#"]
    assert store.read("with space/ü%?#") == b"1"
    assert Store(f"{location}2").list() == ["b/else"]


def test_a_bucket_itself_is_a_place(server: Server) -> None:
    bucket = server.bucket()
    Store(f"s3://{bucket}/").write("k", b"1")
    assert Store(f"s3://{bucket}").list() == ["k"]


@pytest.mark.parametrize("size", [None, 0, 1, 5, 9])
def test_sizes_differ(location: str, size: int | None) -> None:
    store = Store(location)
    store.write("other", b"x")
    if size is not None:
        store.write("k", b"x" * size)
    for wanted in (0, 1, 5, 6, 500):
        found = store.sizes_differ({"k": wanted, "other": 1})
        assert set(found) == (set() if size == wanted else {"k"})
        if size is None:
            assert found["k"] == "is missing"
        elif found:
            assert found["k"].endswith("longer" if size > wanted else "shorter")


def _race(location: str, attempt: Callable[[Store, bytes], bool], count: int = 12) -> list[bool]:
    """Attempts with stores of their own, as processes have, at the same time."""
    barrier = Barrier(count)

    def one(number: int) -> bool:
        store = Store(location)
        store.read("warm")
        barrier.wait()
        return attempt(store, f"writer {number}".encode())

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_of_many_creators_one_wins(server: Server, location: str) -> None:
    Store(location).write("warm", b"")
    with server.watch() as seen:
        won = _race(location, lambda store, value: store.create("k", value))
    assert sum(won) == 1
    assert Store(location).read("k") == f"writer {won.index(True)}".encode()
    # They were all under way before one had won: it is the server that decides.
    methods = [request.method for request in seen if request.key.endswith("/k")]
    assert methods.count("PUT") > 1


def test_of_many_replacers_one_wins(location: str) -> None:
    Store(location).write("warm", b"")
    Store(location).write("k", b"old")
    _, generation = Store(location).read_versioned("k")
    won = _race(location, lambda store, value: store.replace("k", value, generation))
    assert sum(won) == 1
    assert Store(location).read("k") == f"writer {won.index(True)}".encode()


def test_a_missing_chunk_is_an_error_never_a_fill(location: str) -> None:
    store = Store(location)
    metadata = make_encoding().arrays()["tokens"].zarr(10, 4)
    chunk = encode_chunk(metadata, 0, np.ones((4, 8), np.uint16))
    store.write(f"a/{chunk_key(0, 2)}", chunk)
    array = store.open_array("a", metadata)
    assert array[0:4].read().result().sum() == 32
    for rows in (slice(0, 5), slice(8, 10)):
        with pytest.raises(ValueError, match=r"a/c\.[12]\.0") as caught:
            array[rows].read().result()
        assert store.failed_to_read("a", caught.value) is None


# Faults.

_OPERATIONS: dict[str, Callable[[Store], Any]] = {
    "read": lambda store: store.read("k") == b"old",
    "read_many": lambda store: store.read_many(["k", "f/1", "none"]) == [b"old", b"1", None],
    "write": lambda store: store.write("k", b"new"),
    "create": lambda store: store.create("fresh", b"new"),
    "list": lambda store: store.list("f") == ["1", "2"],
    "delete": lambda store: store.delete("k"),
    "delete_folder": lambda store: store.delete_folder("f"),
    "sizes": lambda store: store.sizes_differ({"k": 3}) == {},
}


def _store(location: str) -> Store:
    store = Store(location)
    for key, value in {"k": b"old", "f/1": b"1", "f/2": b"2"}.items():
        store.write(key, value)
    return store


@pytest.mark.parametrize("kind", ["drop", "lost", "cut", "status", "delay"])
@pytest.mark.parametrize("name", _OPERATIONS)
def test_passing_faults_are_not_noticed(
    server: Server, location: str, kind: str, name: str
) -> None:
    store = _store(location)
    fault = Fault(kind, seconds=0.02)
    with server.faulty(lambda request, count: fault if count < 3 else None) as injected:
        found = _OPERATIONS[name](store)
    assert injected
    assert found in (None, True)
    expected = {"k": b"old", "f/1": b"1", "f/2": b"2"}
    changes: dict[str, Any] = {
        "write": {"k": b"new"},
        "create": {"fresh": b"new"},
        "delete": {"k": None},
        "delete_folder": {"f/1": None, "f/2": None},
    }
    expected |= changes.get(name, {})
    assert dict(zip(expected, store.read_many(expected), strict=True)) == expected


@pytest.mark.parametrize("kind", ["drop", "lost", "status"])
@pytest.mark.parametrize("name", _OPERATIONS)
def test_lasting_faults_are_one_clear_error(
    server: Server, location: str, kind: str, name: str
) -> None:
    store = _store(location)
    with (
        server.faulty(lambda request, count: Fault(kind)),
        pytest.raises(StorageError, match=r"^cannot (read|write|list|delete) s3://") as caught,
    ):
        _OPERATIONS[name](store)
    text = str(caught.value)
    assert "run the same command again" in text.lower()
    assert server.endpoint in text
    assert s3.SECRET not in text
    assert "test-key" not in text


@pytest.mark.parametrize("seed", range(2))
def test_a_share_of_all_faults_changes_nothing(server: Server, location: str, seed: int) -> None:
    store = Store(location)
    values = {f"f/{number}": bytes([number]) * (100 * number) for number in range(30)}
    plan = share(seed, 0.3, "503", "500", "429", "drop", "lost", "cut", "delay")
    with server.faulty(plan) as injected:
        for number, (key, value) in enumerate(values.items()):
            if number % 2:
                assert store.create(key, value)
                assert not store.create(key, b"another")
            else:
                store.write(key, value)
        assert store.list() == sorted(values)
        assert store.read_many(values) == list(values.values())
    assert len({fault.kind for fault in injected}) >= 4


@pytest.mark.parametrize("times", [1, 2])
def test_a_conditional_write_whose_answer_is_lost_was_ours(
    server: Server, location: str, times: int
) -> None:
    store = Store(location)

    def plan(request: s3.Request, count: int) -> Fault | None:
        return Fault("lost") if request.method == "PUT" and count < times else None

    with server.faulty(plan) as injected:
        assert store.create("k", b"run 1")
    assert injected
    assert not store.create("k", b"run 2")
    _, generation = store.read_versioned("k")
    with server.faulty(plan) as injected:
        assert store.replace("k", b"run 3", generation)
    assert injected
    assert not store.replace("k", b"run 4", generation)
    assert store.read("k") == b"run 3"


def test_a_lost_race_is_lost_with_lost_answers_too(server: Server, location: str) -> None:
    Store(location).write("warm", b"")
    with server.faulty(share(0, 0.5, "lost", "drop")):
        won = _race(location, lambda store, value: store.create("k", value))
    assert sum(won) == 1
    assert Store(location).read("k") == f"writer {won.index(True)}".encode()


# What cannot be reached, or refuses.


def test_a_bucket_that_does_not_exist(server: Server) -> None:
    store = Store("s3://no-such-bucket/x")
    for operation in (
        lambda: store.read("k"),
        lambda: store.write("k", b""),
        lambda: store.create("k", b""),
        lambda: store.list(),
    ):
        with pytest.raises(StorageError, match="NoSuchBucket") as caught:
            operation()
        assert f"no such bucket on {server.endpoint}: make it" in str(caught.value)


def test_a_bucket_is_looked_for_once(server: Server, location: str) -> None:
    store = Store(location)
    with server.watch() as seen:
        for key in ("k", "l", "m"):
            assert store.read(key) is None
    assert sum("list-type" in request.query for request in seen) == 1
    store = _store(location)
    assert store.read("k")
    with server.watch() as seen:
        assert store.read("none") is None
    assert not any("list-type" in request.query for request in seen)


def test_a_bucket_that_may_be_read_but_not_listed(server: Server, location: str) -> None:
    def plan(request: s3.Request, count: int) -> Fault | None:
        listing = "list-type" in request.query
        return Fault("status", status=403, code="AccessDenied") if listing else None

    with server.faulty(plan) as injected:
        assert Store(location).read("k") is None
    assert injected


@pytest.mark.parametrize(
    ("status", "code", "advice"),
    [
        (403, "InvalidAccessKeyId", "missing or not accepted: check AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", "missing or not accepted"),
        (400, "ExpiredToken", "missing or not accepted"),
        (403, "AccessDenied", "Get permission for that place, or give other credentials"),
        (301, "PermanentRedirect", "in another region than us-east-1: set AWS_REGION"),
        (400, "AuthorizationHeaderMalformed", "in another region than us-east-1: set AWS_REGION"),
        (503, "SlowDown", "is too busy. Run the same command again later"),
    ],
)
@pytest.mark.parametrize("name", ["read", "create"])
def test_refusals_say_what_to_do(
    server: Server, location: str, name: str, status: int, code: str, advice: str
) -> None:
    store = _store(location)
    fault = Fault("status", status=status, code=code, message="No.")
    with (
        server.faulty(lambda request, count: fault if request.method != "HEAD" else None),
        pytest.raises(StorageError, match=f"{code}: No") as caught,
    ):
        _OPERATIONS[name](store)
    assert advice in str(caught.value)
    assert "test-key" not in str(caught.value)
    assert "<Error>" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (403, "credentials are missing or not accepted"),
        (301, "in another region"),
        (503, "is too busy"),
        (500, "does not answer"),
    ],
)
def test_refusals_without_a_reason(server: Server, location: str, status: int, advice: str) -> None:
    """What is asked first for a conditional write is answered with a bare status."""
    fault = Fault("status", status=status, code="")
    with (
        server.faulty(lambda request, count: fault if request.method != "GET" else None),
        pytest.raises(StorageError, match=f"HTTP status {status}") as caught,
    ):
        Store(location).create("k", b"")
    assert advice in str(caught.value)


def test_a_public_bucket_needs_no_credentials(
    server: Server, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _store(location)
    with server.watch() as seen:
        assert Store(location).read("k") == b"old"
    assert [request.signed for request in seen] == [True]
    monkeypatch.setenv("AWS_NO_SIGN_REQUEST", "1")
    with server.watch() as seen:
        assert Store(location).read("k") == b"old"
    assert [request.signed for request in seen] == [False]


def test_credentials_that_are_not_there(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(location)
    assert store.kvstore
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageError, match="credentials are missing or not accepted"):
        store.read("k")


@pytest.mark.parametrize("address", ["s3://bucket/x", "http://127.0.0.1:9/x"])
def test_a_server_that_is_not_there(
    server: Server, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="does not answer: check the address"):
        Store(address).read("k")


def test_a_password_in_the_endpoint_is_not_shown(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("AWS_ENDPOINT_URL", "http://me:pass-word@minio:1")
    _, advice = remote.explain("s3://bucket/x", "ABORTED: All 8 retry attempts failed: CURL error")
    assert advice.startswith("http://minio:1 does not answer")


@pytest.mark.parametrize("driver", ["s3", "gcs", "http"])
def test_a_dead_host_is_given_up_soon(bare: pytest.MonkeyPatch, driver: str) -> None:
    """All waits together; each attempt to connect fails after five seconds at most."""
    found = remote.resources()[f"{driver}_request_retries"]
    waits, wait = 0.0, float(found["initial_delay"].removesuffix("ms")) / 1000
    for _ in range(found["max_retries"]):
        waits += wait
        wait = min(2 * wait, float(found["max_delay"].removesuffix("s")))
    assert 15 < waits < 30
    assert os.environ["TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS"] == "5"


def test_a_server_that_says_nothing(
    server: Server, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache.storage._PATIENCE", 0.2)
    with (
        server.faulty(lambda request, count: Fault("delay", seconds=2.0)),
        pytest.raises(StorageError, match=r"DEADLINE_EXCEEDED: no answer.*does not answer"),
    ):
        Store(location).read("k")


# http://


def test_http_reads_and_does_no_more(server: Server, location: str) -> None:
    _store(location)
    store = Store(location.replace("s3://", f"{server.endpoint}/"))
    assert not store.lists
    assert store.read_many(["k", "f/1", "none"]) == [b"old", b"1", None]
    assert store.sizes_differ({"k": 3, "f/1": 2, "none": 1}) == {
        "f/1": "should be 2 bytes long, is shorter",
        "none": "is missing",
    }
    for operation in (
        lambda: store.write("k", b"1"),
        lambda: store.create("k", b"1"),
        lambda: store.delete("k"),
        lambda: store.list(),
        lambda: store.delete_folder("f"),
    ):
        with pytest.raises(StorageError, match="http:// address can only be read"):
            operation()


@pytest.mark.parametrize("kind", ["drop", "cut", "status"])
def test_http_survives_passing_faults(server: Server, location: str, kind: str) -> None:
    _store(location)
    store = Store(location.replace("s3://", f"{server.endpoint}/"))
    with server.faulty(lambda request, count: Fault(kind) if count < 3 else None) as injected:
        assert store.read("k") == b"old"
    assert len(injected) == 3
