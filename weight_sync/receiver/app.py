"""The receiver process, `python -m weight_sync.receiver.app <spec as JSON>`, and its HTTP API.

The first line on its standard input is the key that every request must carry. It lives as long as
that pipe is open, so a parent that is killed leaves no receiver behind. Staged versions stay for
the next process, unless the line "remove" comes before the end of the input. When it can be called,
it writes one line to standard output: {"url": ..., "pid": ...}.

    GET  /status                                   GET  /newest?above=V&timeout_s=T   (long poll)
    POST /begin  /join  /receive                   GET  /manifest/{version}
         /finish  /release  /catch_up              GET  /data/{version}   (one Range, 206)
         /hold  /let_go

The layout of the model travels once: /begin, /finish and /catch_up name it by its digest. A digest
that is not known here is refused with 412, and the caller adds the layout.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from typing import Any, TextIO

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from weight_sync.errors import (
    ChecksumMismatch,
    StoreBusyError,
    StoreFullError,
    TransferFailed,
    UnknownLayout,
    UnknownVersion,
)
from weight_sync.group import bucket_timeout_s
from weight_sync.http_server import HttpLimits, ServerConfig, read_body
from weight_sync.layout import Layout, Manifest, Transfer
from weight_sync.receiver.receiver import Receiver
from weight_sync.types import LONGEST_TIMEOUT_S, GroupSpec, ReceiverSpec, WeightSyncError

_CHUNK_BYTES = 2**20
_MAX_BODY_BYTES = 256 * 2**20
"""A manifest has a checksum of each tensor at each rank."""
_LARGE_BODY_BYTES = 64 * 1024
"""A larger one is parsed in a thread."""
_MAX_INT = 2**63 - 1
_LIMITS = HttpLimits(max_connections=4096)

_STATUS_OF = {
    UnknownVersion: 404,
    UnknownLayout: 412,
    ChecksumMismatch: 422,
    StoreBusyError: 423,
    TransferFailed: 502,
    StoreFullError: 507,
    WeightSyncError: 409,
    ValueError: 400,
    KeyError: 400,
    TypeError: 400,
    OverflowError: 400,
}


def make_app(receiver: Receiver) -> ASGIApp:
    """The HTTP API of `receiver`, behind its key."""
    api = _Api(receiver)
    routes = [
        Route("/status", api.status),
        Route("/newest", api.newest),
        Route("/manifest/{version:int}", api.manifest),
        Route("/data/{version:int}", api.data),
    ]
    for step in (
        api.begin,
        api.join,
        api.receive,
        api.finish,
        api.release,
        api.catch_up,
        api.hold,
        api.let_go,
    ):
        routes.append(Route(f"/{step.__name__}", _json_step(step), methods=["POST"]))
    handlers: dict[Any, Any] = dict.fromkeys(_STATUS_OF, _refuse)
    handlers[HTTPException] = _http_error
    handlers[Exception] = _failed  # and it is logged
    app = Starlette(routes=routes, exception_handlers=handlers)
    return _Guard(app, receiver.spec.key)


class _Guard:
    """Refuses requests without the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "http" and not hmac.compare_digest(given, self._expected):
            refusal = JSONResponse({"error": "the key is missing or wrong"}, 401)
            return await refusal(scope, receive, send)
        await self._app(scope, receive, send)


def _json_step(step: Callable[[Any], Awaitable[dict[str, Any]]]) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        body = await read_body(request, _MAX_BODY_BYTES)
        is_large = len(body) > _LARGE_BODY_BYTES
        fields = await asyncio.to_thread(_as_json, body) if is_large else _as_json(body)
        return JSONResponse(await step(fields))

    return endpoint


def _as_json(body: bytes) -> Any:
    """Raises ValueError, also for numbers that are not finite or have no room in 64 bits."""
    try:
        return json.loads(body, parse_int=_int, parse_float=_float, parse_constant=_float)
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error


def _int(text: str) -> int:
    if not -_MAX_INT <= (number := int(text)) <= _MAX_INT:
        raise ValueError(f"{text} has no room in 64 bits")
    return number


def _float(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not finite")
    return number


def _seconds(name: str, value: Any) -> float:
    seconds = float(value)
    if not 0 <= seconds <= LONGEST_TIMEOUT_S:  # false for nan
        raise ValueError(f"{name}={seconds} must lie between 0 and {LONGEST_TIMEOUT_S:g}")
    return seconds


async def _refuse(request: Request, error: Exception) -> Response:
    status = next(_STATUS_OF[kind] for kind in type(error).__mro__ if kind in _STATUS_OF)
    reply: dict[str, Any] = {"error": str(error) if status != 400 else repr(error)}
    if isinstance(error, TransferFailed):
        reply["received"] = error.received
    if isinstance(error, ChecksumMismatch):
        reply["tensors"] = list(error.tensors)
    return JSONResponse(reply, status)


async def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"failed with {error!r}; its log says where"}, 500)


async def _http_error(request: Request, error: HTTPException) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code)


class _Api:
    """Long work runs in threads, so that the event loop can always answer /status."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._released = asyncio.Event()
        """Set and replaced at each release; waiters hold the one of the next release."""
        self._num_reads = 0

    async def status(self, request: Request) -> Response:
        return JSONResponse(asdict(self._receiver.status()))

    async def _layout(self, body: Any) -> Layout:
        """The layout of the digest in `body`, which brings the layout itself if it is new here."""
        digest = str(body["layout_digest"])
        if "layout" in body:
            layout = Layout.from_json(body["layout"])
            if layout.digest != digest:
                raise WeightSyncError(
                    f"the model's layout is read differently here: {layout.digest} is not "
                    f"{digest}; trainer and receiver must run the same release"
                )
            await asyncio.to_thread(self._receiver.set_layout, layout)
        return self._receiver.layout(digest)

    async def begin(self, body: Any) -> dict[str, Any]:
        await self._layout(body)
        transfer = Transfer.from_json(body)
        return {"received": await asyncio.to_thread(self._receiver.begin, transfer)}

    async def join(self, body: Any) -> dict[str, Any]:
        spec = GroupSpec.from_json(body["group"])
        await asyncio.to_thread(self._receiver.join, spec, int(body["rank"]))
        return {}

    async def receive(self, body: Any) -> dict[str, Any]:
        where = int(body["epoch"]), int(body["version"]), int(body["first"])
        return asdict(await asyncio.to_thread(self._receiver.receive, *where))

    async def finish(self, body: Any) -> dict[str, Any]:
        manifest = Manifest.from_wire(body, await self._layout(body))
        return {"verify_s": await asyncio.to_thread(self._receiver.finish, manifest)}

    async def release(self, body: Any) -> dict[str, Any]:
        await asyncio.to_thread(self._receiver.release, int(body["version"]))
        self._wake()
        return {}

    async def catch_up(self, body: Any) -> dict[str, Any]:
        layout, peers = await self._layout(body), [str(url) for url in body["peers"]]
        report = await asyncio.to_thread(
            self._receiver.catch_up, int(body["version"]), peers, layout
        )
        self._wake()
        return asdict(report)

    async def hold(self, body: Any) -> dict[str, Any]:
        ttl_s = _seconds("ttl_s", body["ttl_s"])
        self._receiver.hold(int(body["version"]), str(body["who"]), ttl_s)
        return {}

    async def let_go(self, body: Any) -> dict[str, Any]:
        self._receiver.let_go(int(body["version"]), str(body["who"]))
        return {}

    async def newest(self, request: Request) -> Response:
        above = int(request.query_params["above"])
        timeout_s = _seconds("timeout_s", request.query_params["timeout_s"])
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    released = self._released  # read first, so that no release is missed in between
                    newest = self._receiver.newest()
                    if newest is not None and newest.version > above:
                        return JSONResponse(asdict(newest))
                    await released.wait()
        except TimeoutError:
            return JSONResponse({})

    def _wake(self) -> None:
        released, self._released = self._released, asyncio.Event()
        released.set()

    async def manifest(self, request: Request) -> Response:
        manifest = self._receiver.whole(int(request.path_params["version"])).manifest
        assert manifest is not None
        return JSONResponse(manifest.to_wire())

    async def data(self, request: Request) -> Response:
        version = int(request.path_params["version"])
        array: Any = self._receiver.whole(version).data.numpy()
        data = memoryview(array)
        start, stop = _range_of(request.headers.get("range", ""), len(data))
        spec = self._receiver.spec
        self._num_reads += 1
        reader = f"read {self._num_reads}"
        ttl_s = bucket_timeout_s(stop - start, spec.timeout_s, spec.min_bandwidth)
        self._receiver.hold(version, reader, ttl_s)  # expires if the reader never comes for it
        return StreamingResponse(
            self._chunks(version, reader, data[start:stop]),
            status_code=206,
            media_type="application/octet-stream",
            headers={
                "Content-Length": str(stop - start),
                "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}",
            },
        )

    async def _chunks(self, version: int, reader: str, data: memoryview) -> AsyncIterator[bytes]:
        try:
            for start in range(0, len(data), _CHUNK_BYTES):
                yield bytes(data[start : start + _CHUNK_BYTES])
                # Sending to a reader that is gone never waits: let the loop notice that it is.
                await asyncio.sleep(0)
        finally:
            self._receiver.let_go(version, reader)


def _range_of(header: str, size: int) -> tuple[int, int]:
    """The half-open range of `bytes=first-last`."""
    unit, _, text = header.partition("=")
    first, _, last = text.partition("-")
    if unit != "bytes" or not first.isdigit() or not last.isdigit():
        raise HTTPException(416, f"Range: bytes=first-last is needed, not {header!r}")
    if not int(first) <= int(last) < size:
        raise HTTPException(416, f"{header} lies outside of {size} bytes")
    return int(first), int(last) + 1


def main(argv: list[str]) -> None:
    """Serve until standard input ends, or until a signal."""
    replies = _own_stdout()
    spec = ReceiverSpec.from_json(argv[0], sys.stdin.readline().rstrip("\n"))
    torch.set_num_threads(1)  # leave the cores to the engines
    receiver = Receiver(spec, os.getpid())
    threading.Thread(target=_end_with_parent, args=(receiver,), daemon=True).start()
    family = socket.AF_INET6 if ":" in spec.host else socket.AF_INET
    listener = socket.create_server((spec.host, 0), family=family)
    place = f"[{spec.host}]" if family == socket.AF_INET6 else spec.host
    url = f"http://{place}:{listener.getsockname()[1]}"
    replies.write(json.dumps({"url": url, "pid": os.getpid()}) + "\n")
    replies.flush()
    server = uvicorn.Server(ServerConfig(make_app(receiver), _LIMITS, close_s=1))
    server.run(sockets=[listener])
    receiver.close(should_remove=False)
    os._exit(0)  # a thread may still wait for a peer


def _own_stdout() -> TextIO:
    """Standard output, reserved for the one line: gloo writes to it, too."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _end_with_parent(receiver: Receiver) -> None:
    should_remove = False
    for line in sys.stdin:
        should_remove = line.rstrip("\n") == "remove"
    receiver.close(should_remove=should_remove)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
