"""A small real HTTP server that speaks SGLang's endpoints, behind which nothing is computed."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rollout_pool.engines.sglang_client import SGLangClient


@dataclass
class Reply:
    """What the fake engine answers to one sample."""

    output_ids: list[int] = field(default_factory=lambda: [11, 12, 2])
    logprobs: list[float | None] | None = None
    versions: list[tuple[str, int, int]] | None = None
    finish_type: str | None = "stop"
    delay_s: float = 0.0
    never_ends: bool = False
    says_first_token: bool = True


class FakeSGLang:
    """Answers as `reply` says for a request id; remembers every call."""

    def __init__(self) -> None:
        self.version = "0"
        self.status = 200
        self.refused: set[str] = set()
        """Paths that are answered with an error, whatever `status` says."""
        self.slow: dict[str, float] = {}
        """Seconds before a path is answered."""
        self.offers = {"/update_weights_from_disk"}
        """Routes that the server says it has, among those that not every SGLang has."""
        self.is_ready = True
        self.reply: Callable[[str], Reply] = lambda rid: Reply()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.num_infos = 0
        """Calls of /model_info, which change nothing."""
        self.aborted: list[str] = []
        self.url = ""
        self._server: _Server | None = None

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for called, body in self.calls if called == path]

    # Endpoints

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.calls.append(("/generate", body))
        if self.status != 200:
            return JSONResponse({"error": {"message": "out of order"}}, self.status)
        return StreamingResponse(self._stream(body["rid"]), media_type="text/event-stream")

    async def _stream(self, rids: list[str]) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        samples = [asyncio.create_task(self._sample(rid, queue)) for rid in rids]
        try:
            for _ in rids:
                while (event := await queue.get()) is not None:
                    yield b"data: " + json.dumps(event).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            for sample in samples:
                sample.cancel()

    async def _sample(self, rid: str, queue: asyncio.Queue[dict[str, Any] | None]) -> None:
        reply = self.reply(rid)
        version = self.version
        length = len(reply.output_ids)
        if reply.says_first_token and reply.output_ids:
            await queue.put(self._event(rid, reply, 1, [(version, 0, 1)], None))
        await asyncio.sleep(reply.delay_s)
        if reply.never_ends:
            await asyncio.Event().wait()
        if reply.finish_type is not None:
            versions = reply.versions or [(version, 0, length)]
            await queue.put(self._event(rid, reply, length, versions, reply.finish_type))
        await queue.put(None)

    def _event(
        self,
        rid: str,
        reply: Reply,
        length: int,
        versions: list[tuple[str, int, int]],
        finish_type: str | None,
    ) -> dict[str, Any]:
        logprobs = reply.logprobs or [-0.5] * len(reply.output_ids)
        return {
            "output_ids": reply.output_ids[:length],
            "meta_info": {
                "id": rid,
                "finish_reason": None if finish_type is None else {"type": finish_type},
                "output_token_logprobs": [
                    [logprob, token, None]
                    for logprob, token in zip(logprobs, reply.output_ids, strict=False)
                ][:length],
                "weight_version": versions[-1][0],
                **({} if finish_type is None else {"weight_versions": _spans(versions)}),
            },
        }

    async def _control(self, request: Request) -> Response:
        body = await request.json()
        self.calls.append((request.url.path, body))
        await asyncio.sleep(self.slow.get(request.url.path, 0.0))
        if self.status != 200 or request.url.path in self.refused:
            return JSONResponse({"success": False, "message": "out of order"}, 400)
        if request.url.path == "/abort_request":
            self.aborted.append(body["rid"])
        if "weight_version" in body:
            self.version = body["weight_version"]
        return JSONResponse({"success": True})

    async def _model_info(self, request: Request) -> Response:
        self.num_infos += 1
        await asyncio.sleep(self.slow.get("/model_info", 0.0))
        return JSONResponse({"weight_version": self.version, "served_model_name": "fake"})

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse({"paths": {path: {} for path in self.offers}})

    async def _ready(self, request: Request) -> Response:
        return Response(status_code=200 if self.is_ready else 503)

    # Server

    def start(self) -> None:
        control = [
            "/init_weights_update_group",
            "/pause_generation",
            "/begin_weight_update",
            "/update_weights_from_disk",
            "/update_weights_from_distributed",
            "/update_weights_from_ipc",
            "/end_weight_update",
            "/continue_generation",
            "/abort_request",
        ]
        routes = [Route(path, self._control, methods=["POST"]) for path in control]
        routes += [
            Route("/generate", self._generate, methods=["POST"]),
            Route("/model_info", self._model_info),
            Route("/openapi.json", self._openapi),
            Route("/ready", self._ready),
        ]
        self._server = _Server(Starlette(routes=routes))
        self.url = self._server.start()

    def stop(self) -> None:
        assert self._server is not None
        self._server.stop()

    def client(self, name: str, *, keys_prefix_by_version: bool = False) -> SGLangClient:
        return SGLangClient(
            name,
            self.url,
            key="a-key",
            request_timeout_s=2.0,
            keys_prefix_by_version=keys_prefix_by_version,
        )


class FakeReceiver:
    """Offers the versions in `offered`, by their folders; remembers who held what."""

    def __init__(self) -> None:
        self.offered: dict[int, str] = {}
        self.held: set[tuple[int, str]] = set()
        self.log: list[tuple[str, int, str]] = []
        self.is_gone: set[int] = set()
        """Versions that were offered a moment ago and are not staged any more."""
        self._server = _Server(
            Starlette(
                routes=[
                    Route("/newest", self._newest),
                    Route("/hold", self._hold, methods=["POST"]),
                    Route("/let_go", self._let_go, methods=["POST"]),
                ]
            )
        )
        self.url = ""

    def offer(self, version: int) -> None:
        self.offered[version] = f"/dev/shm/staged/{version}"

    def start(self) -> None:
        self.url = self._server.start()

    def stop(self) -> None:
        self._server.stop()

    async def _newest(self, request: Request) -> Response:
        above = int(request.query_params["above"])
        deadline = time.monotonic() + float(request.query_params["timeout_s"])
        while not (newer := [version for version in self.offered if version > above]):
            if time.monotonic() >= deadline:
                return JSONResponse({})
            await asyncio.sleep(0.01)
        return JSONResponse({"version": max(newer), "path": self.offered[max(newer)]})

    async def _hold(self, request: Request) -> Response:
        body = await request.json()
        if body["version"] in self.is_gone:
            return JSONResponse({"error": "not staged"}, 404)
        self.held.add((body["version"], body["who"]))
        self.log.append(("hold", body["version"], body["who"]))
        return JSONResponse({})

    async def _let_go(self, request: Request) -> Response:
        body = await request.json()
        self.held.discard((body["version"], body["who"]))
        self.log.append(("let_go", body["version"], body["who"]))
        return JSONResponse({})


class _Server:
    """A real HTTP server in a thread."""

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self._server: uvicorn.Server | None = None

    def start(self) -> str:
        """Its URL."""
        config = uvicorn.Config(
            self._app, host="127.0.0.1", port=0, log_level="critical", lifespan="off", ws="none"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self._server.started:
            assert time.monotonic() < deadline, "the fake server did not start"
            time.sleep(0.01)
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        assert self._server is not None
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(timeout=10)


def _spans(versions: list[tuple[str, int, int]]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in versions]


@pytest.fixture
def fake() -> Iterator[FakeSGLang]:
    server = FakeSGLang()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def receiver() -> Iterator[FakeReceiver]:
    receiver = FakeReceiver()
    receiver.start()
    yield receiver
    receiver.stop()


@pytest.fixture
def other_receiver() -> Iterator[FakeReceiver]:
    receiver = FakeReceiver()
    receiver.start()
    yield receiver
    receiver.stop()


@pytest.fixture
def other_fake() -> Iterator[FakeSGLang]:
    server = FakeSGLang()
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def client(fake: FakeSGLang) -> AsyncGenerator[SGLangClient]:
    client = fake.client("engine-0")
    yield client
    await client.close()


@pytest.fixture
async def other_client(other_fake: FakeSGLang) -> AsyncGenerator[SGLangClient]:
    client = other_fake.client("engine-1")
    yield client
    await client.close()


@pytest.fixture
def make_reply() -> type[Reply]:
    return Reply
