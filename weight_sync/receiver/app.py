"""The receiver process, `python -m weight_sync.receiver.app <spec as JSON>`, and its HTTP API.

The first line on its standard input is the key that every request must carry. It runs as long as
that pipe is open, so a killed parent leaves no receiver behind. Staged versions stay for the next
process, unless the line "remove" precedes the end of the input. When it is ready, it writes its URL
to standard output.

    GET  /status                                   GET  /newest?above=V&timeout_s=T   (long poll)
    POST /layout  /join  /receive                  GET  /manifest/{version}
         /verify  /release  /catch_up              GET  /data/{version}   (one Range, 206)
         /hold  /let_go

The model's layout is sent once: /receive, /verify and /catch_up name it by its digest. An unknown
digest is refused with 412.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
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

from host.http_server import HttpLimits, ServerConfig, read_body
from host.network import listen
from tensors.layout import Count, Layout
from weight_sync.receiver.receiver import Receiver
from weight_sync.timeouts import wire_s
from weight_sync.types import (
    BY_STATUS,
    Manifest,
    ReceiverSpec,
    Seconds,
    WeightSyncError,
)

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
    # Long work runs in threads, so that the event loop can always respond to /status.
    routes = [
        Route("/status", api.status),
        Route("/newest", api.newest),
        Route("/manifest/{version:int}", api.manifest),
        Route("/data/{version:int}", api.data),
        api.post("/layout", api.layout, in_thread=True),
        api.post("/join", receiver.join, in_thread=True),
        api.post("/receive", receiver.receive, in_thread=True),
        api.post("/verify", api.verify, in_thread=True),
        api.post("/release", receiver.release, in_thread=True),
        api.post("/catch_up", api.catch_up, in_thread=True),
        api.post("/hold", receiver.hold, in_thread=False),
        api.post("/let_go", receiver.let_go, in_thread=False),
    ]
    handlers: dict[Any, Any] = dict.fromkeys(_STATUS_OF, _refuse)
    handlers[HTTPException] = _http_error
    handlers[Exception] = _failed  # and it is logged
    app = Starlette(routes=routes, exception_handlers=handlers)
    return _KeyCheck(app, receiver.spec.key)


class _KeyCheck:
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


async def _refuse(request: Request, error: Exception) -> Response:
    status = next(_STATUS_OF[kind] for kind in type(error).__mro__ if kind in _STATUS_OF)
    return _json({"error": str(error) if status != 400 else repr(error)}, status)


async def _failed(request: Request, error: Exception) -> Response:
    return _json({"error": f"failed with {error!r}; its log says where"}, 500)


async def _http_error(request: Request, error: HTTPException) -> Response:
    return _json({"error": error.detail}, error.status_code)


class _Api:
    """The endpoints; most are a step of the receiver with its arguments as JSON."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver, self._store = receiver, receiver.store
        self._step_ended = asyncio.Event()
        """A step that ends sets it and puts a new event in its place; `newest` waits for it."""
        self._num_reads = 0

    def post(self, path: str, step: Callable[..., object], *, in_thread: bool) -> Route:
        """A route for POST requests, whose body is a JSON object of the step's arguments."""
        arguments = get_type_hints(step, include_extras=True)
        del arguments["return"]
        decoder = msgspec.json.Decoder(msgspec.defstruct(step.__name__, list(arguments.items())))

        async def endpoint(request: Request) -> Response:
            body = await read_body(request, _MAX_BODY_BYTES)
            is_large = len(body) > _LARGE_BODY_BYTES
            fields = (
                await asyncio.to_thread(decoder.decode, body) if is_large else decoder.decode(body)
            )
            call = partial(step, **msgspec.structs.asdict(fields))
            result = await asyncio.to_thread(call) if in_thread else call()
            self.note_step()
            return _json({} if result is None else result)

        return Route(path, endpoint, methods=["POST"])

    def note_step(self) -> None:
        """Wake those who wait for a newer version; in the server's event loop."""
        step_ended, self._step_ended = self._step_ended, asyncio.Event()
        step_ended.set()

    def layout(self, layout: dict[str, Any], digest: str) -> None:
        model = Layout.from_json(layout)
        if model.digest != digest:
            raise WeightSyncError(
                f"the model's layout is read differently here: {model.digest} is not {digest}; "
                "trainer and receiver must run the same release"
            )
        self._receiver.set_layout(model)

    def verify(
        self, version: Count, layout_digest: str, checksums: tuple[tuple[Count, ...], ...]
    ) -> None:
        self._receiver.verify(Manifest.of(version, self._receiver.layout(layout_digest), checksums))

    def catch_up(self, version: Count, peers: tuple[str, ...], layout_digest: str) -> str:
        return self._receiver.catch_up(version, peers, self._receiver.layout(layout_digest))

    async def status(self, request: Request) -> Response:
        return _json(self._receiver.status())

    async def newest(self, request: Request) -> Response:
        above = int(request.query_params["above"])
        timeout_s = msgspec.convert(float(request.query_params["timeout_s"]), Seconds)
        loop = asyncio.get_running_loop()
        self._receiver.on_merged = partial(loop.call_soon_threadsafe, self.note_step)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    step_ended = self._step_ended  # read first: no release is missed in between
                    newest = self._receiver.newest()
                    if newest is not None and newest.version > above:
                        return _json(newest)
                    await step_ended.wait()
        except TimeoutError:
            return _json(None)

    async def manifest(self, request: Request) -> Response:
        manifest = self._store.get(int(request.path_params["version"])).manifest
        assert manifest is not None
        return _json(manifest.note)

    async def data(self, request: Request) -> Response:
        version = int(request.path_params["version"])
        array: Any = self._store.get(version).data.numpy()
        data = memoryview(array)
        start, stop = _range_of(request.headers.get("range", ""), len(data))
        self._num_reads += 1
        reader = f"read {self._num_reads}"
        ttl_s = wire_s(stop - start, self._receiver.spec)
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
    receiver = Receiver(spec)
    threading.Thread(target=_end_with_parent, args=(receiver,), daemon=True).start()
    listener, url = listen(spec.host, 0)
    replies.write(url + "\n")
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
