"""The receiver process, `python -m weight_sync.receiver.app <spec as JSON>`, and its HTTP API.

The first line on its standard input is the key that every request must carry. It runs as long as
that pipe is open, so a killed parent leaves no receiver behind. Staged versions stay for the next
process, unless the line "remove" precedes the end of the input. When it is ready, it writes one
line to standard output: {"url": ..., "pid": ...}.

    GET  /status                                   GET  /newest?above=V&timeout_s=T   (long poll)
    POST /layout  /join  /receive                  GET  /manifest/{version}
         /finish  /release  /catch_up              GET  /data/{version}   (one Range, 206)
         /hold  /let_go

The model's layout is sent once: /receive, /finish and /catch_up name it by its digest. An unknown
digest is refused with 412.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TextIO, get_type_hints

import msgspec
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from weight_sync.errors import BY_STATUS
from weight_sync.group import bucket_timeout_s
from weight_sync.http_server import HttpLimits, ServerConfig, read_body
from weight_sync.layout import Layout, Manifest, Transfer
from weight_sync.receiver.client import CatchUpReport
from weight_sync.receiver.receiver import Receiver
from weight_sync.types import Count, GroupSpec, ReceiverSpec, Seconds, WeightSyncError

_CHUNK_BYTES = 2**20
_MAX_BODY_BYTES = 256 * 2**20
"""A manifest has a checksum of each tensor at each rank."""
_LARGE_BODY_BYTES = 64 * 1024
"""A larger one is parsed in a thread."""
_LIMITS = HttpLimits(max_connections=4096)

_STATUS_OF: dict[type[Exception], int] = {
    **{error: status for status, error in BY_STATUS.items()},
    **dict.fromkeys((ValueError, KeyError, TypeError, OverflowError), 400),
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
        api.layout,
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
            refusal = _json({"error": "the key is missing or wrong"}, 401)
            return await refusal(scope, receive, send)
        await self._app(scope, receive, send)


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _json_step(step: Callable[..., Awaitable[object]]) -> Callable[[Request], Any]:
    """An endpoint whose body is a JSON object of the arguments of `step`."""
    arguments = get_type_hints(step, include_extras=True)
    del arguments["return"]
    decoder = msgspec.json.Decoder(msgspec.defstruct(step.__name__, list(arguments.items())))

    async def endpoint(request: Request) -> Response:
        body = await read_body(request, _MAX_BODY_BYTES)
        is_large = len(body) > _LARGE_BODY_BYTES
        fields = await asyncio.to_thread(decoder.decode, body) if is_large else decoder.decode(body)
        result = await step(**msgspec.structs.asdict(fields))
        return _json({} if result is None else result)

    return endpoint


async def _refuse(request: Request, error: Exception) -> Response:
    status = next(_STATUS_OF[kind] for kind in type(error).__mro__ if kind in _STATUS_OF)
    return _json({"error": str(error) if status != 400 else repr(error)}, status)


async def _failed(request: Request, error: Exception) -> Response:
    return _json({"error": f"failed with {error!r}; its log says where"}, 500)


async def _http_error(request: Request, error: HTTPException) -> Response:
    return _json({"error": error.detail}, error.status_code)


class _Api:
    """Long work runs in threads, so that the event loop can always respond to /status."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver, self._store = receiver, receiver.store
        self._released = asyncio.Event()
        """Set and replaced at each release; waiters hold the one of the next release."""
        self._num_reads = 0

    async def status(self, request: Request) -> Response:
        return _json(self._receiver.status())

    async def layout(self, layout: dict[str, Any], digest: str) -> None:
        model = Layout.from_json(layout)
        if model.digest != digest:
            raise WeightSyncError(
                f"the model's layout is read differently here: {model.digest} is not {digest}; "
                "trainer and receiver must run the same release"
            )
        await asyncio.to_thread(self._receiver.set_layout, model)

    async def join(self, group: GroupSpec) -> None:
        await asyncio.to_thread(self._receiver.join, group)

    async def receive(self, transfer: Transfer, epoch: Count, first: Count) -> int:
        return await asyncio.to_thread(self._receiver.receive, transfer, epoch, first)

    async def finish(
        self, version: Count, layout_digest: str, checksums: tuple[tuple[Count, ...], ...]
    ) -> None:
        manifest = Manifest.of(version, self._receiver.layout(layout_digest), checksums)
        await asyncio.to_thread(self._receiver.finish, manifest)

    async def release(self, version: Count) -> None:
        await asyncio.to_thread(self._store.release, version)
        self._wake()

    async def catch_up(
        self, version: Count, peers: tuple[str, ...], layout_digest: str
    ) -> CatchUpReport:
        layout = self._receiver.layout(layout_digest)
        report = await asyncio.to_thread(self._receiver.catch_up, version, peers, layout)
        self._wake()
        return report

    async def hold(self, version: Count, who: str, ttl_s: Seconds) -> None:
        self._store.hold(version, who, ttl_s)

    async def let_go(self, version: Count, who: str) -> None:
        self._store.let_go(version, who)

    async def newest(self, request: Request) -> Response:
        above = int(request.query_params["above"])
        timeout_s = msgspec.convert(float(request.query_params["timeout_s"]), Seconds)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    released = self._released  # read first, so that no release is missed in between
                    newest = self._receiver.newest()
                    if newest is not None and newest.version > above:
                        return _json(newest)
                    await released.wait()
        except TimeoutError:
            return _json({})

    def _wake(self) -> None:
        released, self._released = self._released, asyncio.Event()
        released.set()

    async def manifest(self, request: Request) -> Response:
        manifest = self._store.get(int(request.path_params["version"])).manifest
        assert manifest is not None
        return _json(manifest.to_wire())

    async def data(self, request: Request) -> Response:
        version = int(request.path_params["version"])
        array: Any = self._store.get(version).data.numpy()
        data = memoryview(array)
        start, stop = _range_of(request.headers.get("range", ""), len(data))
        spec = self._receiver.spec
        self._num_reads += 1
        reader = f"read {self._num_reads}"
        ttl_s = bucket_timeout_s(stop - start, spec.timeout_s, spec.min_bandwidth)
        self._store.hold(version, reader, ttl_s)  # expires if the reader never comes for it
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
                # Sending to a closed connection never waits: let the loop notice the close.
                await asyncio.sleep(0)
        finally:
            self._store.let_go(version, reader)


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
