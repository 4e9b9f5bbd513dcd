"""A read-only S3 server of a folder that answers late, as a server far away does.

    python benchmarks/slow_s3.py FOLDER MILLISECONDS

Prints its port. GET /_requests tells how many objects were asked for since it was last asked.
Serves path-style addresses (/bucket/key, the bucket being any name) with ranges and ETags.
"""

from __future__ import annotations

import hashlib
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Small answers must not wait for the client's acknowledgement.
    disable_nagle_algorithm = True
    folder = Path()
    seconds = 0.0
    requests = 0
    lock = threading.Lock()

    def do_GET(self) -> None:
        if self.path == "/_requests":
            with self.lock:
                count, _Handler.requests = _Handler.requests, 0
            self._answer(200, str(count).encode())
            return
        with self.lock:
            _Handler.requests += 1
        time.sleep(self.seconds)
        path = self.folder / self.path.split("?")[0].lstrip("/").partition("/")[2]
        if not path.is_file():
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        size = path.stat().st_size
        tag = hashlib.sha256(f"{path}/{size}".encode()).hexdigest()[:32]
        asked = re.fullmatch(r"bytes=([0-9]*)-([0-9]*)", self.headers.get("Range", ""))
        if asked is None:
            self._answer(200, path.read_bytes(), tag)
            return
        if asked[1]:
            first, last = int(asked[1]), int(asked[2] or size - 1)
        else:
            first, last = max(size - int(asked[2]), 0), size - 1
        last = min(last, size - 1)
        if first > last:
            self._answer(416, b"")
            return
        with path.open("rb") as file:
            file.seek(first)
            self._answer(206, file.read(last - first + 1), tag, f"bytes {first}-{last}/{size}")

    def _answer(self, status: int, body: bytes, tag: str = "", place: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if tag:
            self.send_header("ETag", f'"{tag}"')
        if place:
            self.send_header("Content-Range", place)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    _Handler.folder = Path(sys.argv[1]).resolve()
    _Handler.seconds = float(sys.argv[2]) / 1000
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
