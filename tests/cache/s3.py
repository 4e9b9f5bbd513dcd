"""An S3 server on the loopback interface: moto's, with faults, and with every request counted.

`serve()` starts it once for a process. Faults are injected in front of moto, on the socket.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cache.storage import Store

_ERROR = (
    '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code>'
    "<Message>{message}</Message><AWSAccessKeyId>test-key</AWSAccessKeyId></Error>"
)
# What clients are told by; set in `connect`, and to be found in no message of ours.
SECRET = "never-in-a-message"


@dataclass(frozen=True)
class Request:
    """One request: method, key ("bucket/path/key"), query, Range header, whether it is signed."""

    method: str
    key: str
    query: str = ""
    range: str = ""
    signed: bool = False


@dataclass(frozen=True)
class Fault:
    """What goes wrong with a request.

    Attributes:
      kind: "delay" (and then as usual), "status" (refused with a status), "drop" (the connection
        closes, nothing is done), "lost" (it is done, and the connection closes), "cut" (the
        connection closes in the middle of the response's body).
      seconds: of a delay.
      status, code, message: of a status.
      headers: more headers of a status.
    """

    kind: str
    seconds: float = 0.0
    status: int = 503
    code: str = "SlowDown"
    message: str = "Please reduce your request rate."
    headers: tuple[tuple[str, str], ...] = ()


Plan = Callable[[Request, int], Fault | None]


class Server:
    """The server.

    Attributes:
      endpoint: its address.
      requests: what was asked for since the last `watch`, in order.
    """

    def __init__(self, app: Any):
        self._app = app
        self._changes = threading.Lock()
        self._lock = threading.Lock()
        self._plan: Plan | None = None
        self._buckets = itertools.count()
        self.endpoint = ""
        self.requests: list[Request] = []

    def bucket(self) -> str:
        """Makes a new bucket; returns its name."""
        name = f"bucket-{next(self._buckets)}"
        # Public, so that http:// reads it too.
        public = {"x-amz-acl": "public-read"}
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT", headers=public)
        with _opener().open(request):
            return name

    @contextmanager
    def faulty(self, plan: Plan) -> Iterator[list[Fault]]:
        """Faults by (request, number of this request from 0) while the body runs.

        Yields the faults that were injected.
        """
        counts: dict[tuple[str, str, str], int] = {}
        injected: list[Fault] = []

        def counted(request: Request, _: int) -> Fault | None:
            place = (request.method, request.key, request.range)
            with self._lock:
                counts[place] = counts.get(place, -1) + 1
                fault = plan(request, counts[place])
                if fault is not None:
                    injected.append(fault)
            return fault

        self._plan = counted
        try:
            yield injected
        finally:
            self._plan = None

    @contextmanager
    def watch(self) -> Iterator[list[Request]]:
        """The requests that are made while the body runs."""
        with self._lock:
            self.requests = seen = []
        try:
            yield seen
        finally:
            with self._lock:
                self.requests = []

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        request = Request(
            environ["REQUEST_METHOD"],
            environ["PATH_INFO"].lstrip("/"),
            environ["QUERY_STRING"],
            environ.get("HTTP_RANGE", ""),
            "HTTP_AUTHORIZATION" in environ,
        )
        with self._lock:
            self.requests.append(request)
        plan = self._plan
        fault = plan(request, 0) if plan else None
        kind = fault.kind if fault else ""
        if fault and kind == "delay":
            time.sleep(fault.seconds)
        if kind == "drop":
            return _closed(environ)
        if fault and kind == "status":
            body = _ERROR.format(code=fault.code, message=fault.message).encode()
            _read_body(environ)
            start_response(
                f"{fault.status} {fault.code}",
                [("Content-Type", "application/xml"), *fault.headers],
            )
            return [body if request.method != "HEAD" else b""]
        status, headers, body = self._answer(request, environ)
        if kind == "lost":
            return _closed(environ)
        if kind == "cut":
            return _cut(environ, start_response, status, headers, body)
        start_response(status, headers)
        return [body]

    def _answer(
        self, request: Request, environ: dict[str, Any]
    ) -> tuple[str, list[tuple[str, str]], bytes]:
        found: list[Any] = []

        def keep(status: str, headers: list[tuple[str, str]], *_: Any) -> Callable[..., None]:
            found[:] = [status, headers]
            return lambda _: None

        if request.method in ("GET", "HEAD"):
            body = b"".join(self._app(environ, keep))
        else:
            # S3 looks at a condition and writes in one step; moto does it in two.
            with self._changes:
                body = b"".join(self._app(environ, keep))
        return found[0], found[1], body


def share(seed: int, fraction: float, *kinds: str) -> Plan:
    """Faults at a share of the requests: the same for the same seed, request and count."""

    def plan(request: Request, count: int) -> Fault | None:
        text = f"{seed}/{request.method}/{request.key.split('/', 1)[-1]}/{request.range}/{count}"
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        if number % 10_000 >= fraction * 10_000:
            return None
        kind = kinds[number // 10_000 % len(kinds)]
        if kind.isdigit():
            return Fault("status", status=int(kind), code="SlowDown", message="Slow down.")
        return Fault(kind, seconds=0.02)

    return plan


def _read_body(environ: dict[str, Any]) -> None:
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))


def _closed(environ: dict[str, Any]) -> Iterable[bytes]:
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError("closed on purpose")


def _cut(
    environ: dict[str, Any],
    start_response: Callable[..., Any],
    status: str,
    headers: list[tuple[str, str]],
    body: bytes,
) -> Iterator[bytes]:
    sized = [(name, value) for name, value in headers if name.lower() != "content-length"]
    start_response(status, [*sized, ("Content-Length", str(len(body) or 1))])
    yield body[: len(body) // 2]
    yield from _closed(environ)


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


@functools.cache
def serve() -> Server:
    """The server of this process, started when first asked for."""
    from moto.moto_server.threaded_moto_server import MotoRequestHandler
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    class Quiet(MotoRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, type: str, message: str, *args: Any) -> None:
            pass

    server = Server(DomainDispatcherApplication(create_backend_app))
    listening = make_server("127.0.0.1", 0, server, threaded=True, request_handler=Quiet)
    server.endpoint = f"http://127.0.0.1:{listening.server_address[1]}"
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    return server


def connect(monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server, this process and those it starts pointed to it."""
    server = serve()
    given = {
        "AWS_ENDPOINT_URL_S3": server.endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test-key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "STILLROOM_STORAGE": QUICK_RETRIES,
    }
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_NO_SIGN_REQUEST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return server


def upload(folder: Path, location: str) -> str:
    """Puts every file of a folder to a place; returns the place."""
    store = Store(location)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.write(str(path.relative_to(folder)), path.read_bytes())
    return location


# As many retries as by default, in a hundredth of the time.
QUICK_RETRIES = (
    '{"s3_request_retries": {"initial_delay": "2ms", "max_delay": "10ms"},'
    ' "http_request_retries": {"initial_delay": "2ms", "max_delay": "10ms"}}'
)
