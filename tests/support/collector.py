"""A collector of OpenTelemetry spans: an HTTP server that keeps what is posted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import NamedTuple


class Post(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes


@contextmanager
def collecting() -> Iterator[tuple[str, list[Post]]]:
    """Its address, and what has been posted so far."""
    posts: list[Post] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posts.append(Post(self.path, dict(self.headers), body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", posts
    finally:
        server.shutdown()
        thread.join(timeout=60)
        server.server_close()
