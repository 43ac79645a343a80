"""A small real HTTP server with SGLang's endpoints and a fake model."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from buffer.redis.connection import connect
from buffer.run_state import RunState
from rollout_pool.engines.sglang.client import SGLangClient
from tensors.layout import Layout, TensorSpec
from tests.support.bubblewrap import skip_without_bubblewrap
from weight_sync.types import MANIFEST_NAME, Manifest

F = TypeVar("F", "FakeSGLang", "FakeReceiver")


@dataclass
class Reply:
    """The fake engine's answer to one sample."""

    output_ids: list[int] = field(default_factory=lambda: [11, 12, 2])
    logprobs: list[float | None] | None = None
    versions: list[tuple[str, int, int]] | None = None
    """Reported at the end; the server's own at its beginning, if None."""
    finish_type: str | None = "stop"
    """None: the stream ends without the sample's end."""
    delay_s: float = 0.0
    """After its first token."""
    never_ends: bool = False
    """Unless it is aborted."""
    may_end: threading.Event | None = None
    """It ends no earlier than this is set, or it is aborted."""
    says_first_token: bool = True
    parts: list[int] | None = None
    """Lengths of all parts but the last."""
    labels: list[str] | None = None
    """The server's version as it stands in each of these parts."""
    breaks: bool = False
    """The connection is lost after those parts."""
    at_abort: list[int] = field(default_factory=list)
    """Further tokens sampled before the abort arrived."""
    abort_status: int | None = None
    """HTTP status of an abort without a request: the engine's own error."""
    num_retractions: int = 0
    queue_s: float | None = None
    cached_tokens: int | None = None
    """Cached tokens, of three; None: no count of tokens at all."""
    routed_experts: bytes | None = None
    """Experts of the tokens that are asked for: int32, little-endian."""


class _Server:
    """A real HTTP server in a thread, for one application after the other."""

    idle: ClassVar[list[_Server]] = []
    """Servers that no test uses: a start costs more than most tests."""

    def __init__(self) -> None:
        self._app: Starlette | None = None
        config = uvicorn.Config(
            self, host="127.0.0.1", port=0, log_level="critical", lifespan="off", ws="none"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self._server.started:
            assert time.monotonic() < deadline, "the fake server did not start"
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    @classmethod
    def take(cls, app: Starlette) -> _Server:
        server = cls.idle.pop() if cls.idle else cls()
        server._app = app
        return server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert self._app is not None
        await self._app(scope, receive, send)

    def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(timeout=60)


class _Fake:
    """Answers at `url` between `start` and `stop`."""

    url = ""
    _server: _Server | None = None

    def _serve(self, routes: list[Route]) -> None:
        self._server = _Server.take(Starlette(routes=routes))
        self.url = self._server.url

    def stop(self) -> None:
        """Stops listening at the port."""
        assert self._server is not None
        self._server.stop()
        self._server = None

    def leave(self) -> None:
        """Another test may have the server."""
        if self._server is not None:
            _Server.idle.append(self._server)


@pytest.fixture(scope="session", autouse=True)
def _end_servers() -> Iterator[None]:
    yield
    while _Server.idle:
        _Server.idle.pop().stop()


class FakeSGLang(_Fake):
    """Answers as `reply` says for a request id; remembers every call."""

    def __init__(self) -> None:
        self.version = "0"
        self.status = 200
        self.refused: set[str] = set()
        """Paths that are answered with an error regardless of `status`."""
        self.slow: dict[str, float] = {}
        """Seconds before a path is answered."""
        self.gates: dict[str, threading.Event] = {}
        """A path is answered when this is set."""
        self.num_refusals: dict[str, int] = {}
        """Further calls of a path that are answered with an error."""
        self.is_ready = True
        self.reply: Callable[[str], Reply] = lambda rid: Reply()
        self.prompt_logprob: float | str | None = -1.0
        self.bad_tokens: set[int] = set()
        """A call with any of these is refused as a whole."""
        self.load: dict[str, float] | None = None
        """The answer of /v1/loads; None answers 404."""
        self.num_kv_tokens = 65536
        self.held: Callable[[int], Mapping[str, str]] = lambda version: {}
        """Gives the hashes of its one rank's parameters at a version."""
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.num_infos = 0
        """Calls of /model_info."""
        self.num_loads = 0
        self.aborted: list[str] = []
        self.num_lost_aborts = 0
        """Aborts still to come that are ignored, as those that overtake their request are."""
        self.num_failed_flushes = 0
        """Flushes still to come that find requests."""
        self._aborting: dict[str, asyncio.Event] = {}
        self.num_running = 0
        """Samples that have not ended."""

    def says(self, **fields: Any) -> None:
        """Sets its replies from now on; a field may be a function of the request id."""
        self.reply = lambda rid: Reply(
            **{name: one(rid) if callable(one) else one for name, one in fields.items()}
        )

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for called, body in self.calls if called == path]

    # Endpoints

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.calls.append(("/generate", body))
        if self.status != 200:
            return JSONResponse({"error": {"message": "out of order"}}, self.status)
        if not body.get("stream"):
            return JSONResponse([*map(self._scored, body["input_ids"], body["logprob_start_len"])])
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    def _scored(self, tokens: list[int], start: int) -> dict[str, Any]:
        """Each token of a prompt is as likely."""
        pairs = [[self.prompt_logprob, token, None] for token in tokens[start + 1 :]]
        found = [[None, tokens[start], None], *pairs]
        return {"meta_info": {"weight_version": self.version, "input_token_logprobs": found}}

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        if any(self.bad_tokens & set(tokens) for tokens in body["input_ids"]):
            yield b'data: {"error": {"message": "too long", "code": 400}}\n\ndata: [DONE]\n\n'
            return
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        rids = body["rid"]
        samples = [
            asyncio.create_task(self._sample(rid, params["max_new_tokens"], queue))
            for rid, params in zip(rids, body["sampling_params"], strict=True)
        ]
        try:
            for _ in rids:
                while (event := await queue.get()) is not None:
                    if event.get("breaks"):
                        raise ConnectionError("the fake server breaks the connection")
                    yield b"data: " + json.dumps(event).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            for sample in samples:
                sample.cancel()

    async def _sample(
        self, rid: str, most: int, queue: asyncio.Queue[dict[str, Any] | None]
    ) -> None:
        self.num_running += 1
        try:
            await self._answer(rid, most, queue)
        finally:
            self.num_running -= 1

    async def _answer(
        self, rid: str, most: int, queue: asyncio.Queue[dict[str, Any] | None]
    ) -> None:
        reply = self.reply(rid)
        aborting = self._aborting[rid] = asyncio.Event()
        version, ids = self.version, reply.output_ids
        parts = reply.parts
        if parts is None:
            parts = [1] if reply.says_first_token and ids else []
        start = 0
        for number, length in enumerate(parts):
            label = self.version if reply.labels is None else reply.labels[number]
            await queue.put(_part(rid, reply, start, start + length, label))
            start += length
        if reply.breaks:
            await queue.put({"breaks": True})
        await self._pause(reply, aborting)
        if aborting.is_set():
            reply = dataclasses.replace(reply, output_ids=ids[:start] + reply.at_abort)
            length, finish = len(reply.output_ids), "abort"
        else:
            length, finish = min(len(ids), most), reply.finish_type
            if length < len(ids):
                finish = "length"
        if finish is not None:
            spans = reply.versions or [(version, 0, length)]
            await queue.put(_part(rid, reply, start, length, self.version, finish, spans))
        await queue.put(None)

    async def _pause(self, reply: Reply, aborting: asyncio.Event) -> None:
        while reply.may_end is not None and not (reply.may_end.is_set() or aborting.is_set()):
            await asyncio.sleep(0.01)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if reply.never_ends else reply.delay_s):
                await aborting.wait()

    async def _control(self, request: Request) -> Response:
        body = await request.json()
        self.calls.append((request.url.path, body))
        await asyncio.sleep(self.slow.get(request.url.path, 0.0))
        while request.url.path in self.gates and not self.gates[request.url.path].is_set():
            await asyncio.sleep(0.01)
        if self.status != 200 or self._refuses(request.url.path):
            return JSONResponse({"success": False, "message": "out of order"}, 400)
        if request.url.path == "/abort_request":
            self._abort(body)
        self.version = body.get("weight_version", body.get("lora_name", self.version))
        return JSONResponse({"success": True})

    def _refuses(self, path: str) -> bool:
        if self.num_refusals.get(path, 0):
            self.num_refusals[path] -= 1
            return True
        return path in self.refused

    def _abort(self, body: dict[str, Any]) -> None:
        if "rid" in body:
            self.aborted.append(body["rid"])
        if self.num_lost_aborts > 0:
            self.num_lost_aborts -= 1
            return
        # As SGLang does it, by what the ids begin with.
        for rid, aborting in list(self._aborting.items()):
            if body.get("abort_all") or rid.startswith(body["rid"]):
                aborting.set()

    async def _flush(self, request: Request) -> Response:
        self.calls.append(("/flush_cache", dict(request.query_params)))
        if self.num_failed_flushes > 0:
            self.num_failed_flushes -= 1
            return Response(status_code=400)
        deadline = time.monotonic() + float(request.query_params["timeout"])
        while self.num_running and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return Response(status_code=400 if self.num_running else 200)

    async def _model_info(self, request: Request) -> Response:
        self.num_infos += 1
        await asyncio.sleep(self.slow.get("/model_info", 0.0))
        return JSONResponse({"weight_version": self.version, "served_model_name": "fake"})

    async def _loads(self, request: Request) -> Response:
        self.num_loads += 1
        await asyncio.sleep(self.slow.get("/v1/loads", 0.0))
        if self.load is None:
            return JSONResponse({}, 404)
        return JSONResponse({"loads": [self.load]})

    async def _server_info(self, request: Request) -> Response:
        return JSONResponse({"max_total_num_tokens": self.num_kv_tokens})

    async def _hashes(self, request: Request) -> Response:
        self.calls.append(("/weights_checker", await request.json()))
        if self._refuses("/weights_checker"):
            return JSONResponse({"success": False, "message": "out of order"}, 400)
        return JSONResponse({"ranks": [{"checksums": self.held(int(self.version))}]})

    async def _ready(self, request: Request) -> Response:
        return Response(status_code=200 if self.is_ready else 503)

    # Server

    def start(self) -> None:
        control = [
            "/pause_generation",
            "/update_weights_from_disk",
            "/update_weights_from_ipc",
            "/load_lora_adapter",
            "/continue_generation",
            "/abort_request",
        ]
        routes = [Route(path, self._control, methods=["POST"]) for path in control]
        routes += [
            Route("/generate", self._generate, methods=["POST"]),
            Route("/model_info", self._model_info),
            Route("/flush_cache", self._flush, methods=["POST"]),
            Route("/v1/loads", self._loads),
            Route("/weights_checker", self._hashes, methods=["POST"]),
            Route("/server_info", self._server_info),
            Route("/ready", self._ready),
        ]
        self._serve(routes)

    def client(self, name: str, **settings: Any) -> SGLangClient:
        settings = {"request_timeout_s": 30.0, **settings}
        return SGLangClient(name, self.url, key="a-key", **settings)


class FakeReceiver(_Fake):
    """Offers the versions in `offered`, by folder; records the holds."""

    def __init__(self) -> None:
        self.offered: dict[int, str] = {}
        self.held: set[tuple[int, str]] = set()
        self.log: list[tuple[str, int, str]] = []
        self.is_gone: set[int] = set()
        """Versions that were offered a moment ago and are not staged any more."""
        self.hold_s = 0.0
        """From a hold to its answer."""
        self.polled_above = -2
        """The version above which it was asked last."""

    def offer(self, version: int) -> None:
        self.offered[version] = f"/dev/shm/staged/{version}"

    def offer_weights(self, folder: Path, version: int, checksums: Mapping[str, int]) -> None:
        """A version that is staged with a manifest, of tensors with these checksums."""
        specs = [TensorSpec(name=name, dtype="float32", shape=(2,)) for name in checksums]
        manifest = Manifest.of(version, Layout.of(specs, 1), (tuple(checksums.values()),))
        staged = folder / str(version)
        staged.mkdir()
        (staged / MANIFEST_NAME).write_text(json.dumps(manifest.to_json()))
        self.offered[version] = str(staged)

    def start(self) -> None:
        routes = [
            Route("/newest", self._newest),
            Route("/hold", self._hold, methods=["POST"]),
            Route("/let_go", self._let_go, methods=["POST"]),
        ]
        self._serve(routes)

    async def _newest(self, request: Request) -> Response:
        self.polled_above = above = int(request.query_params["above"])
        deadline = time.monotonic() + float(request.query_params["timeout_s"])
        while not (newer := [version for version in self.offered if version > above]):
            if time.monotonic() >= deadline:
                return JSONResponse(None)
            await asyncio.sleep(0.01)
        return JSONResponse({"version": max(newer), "path": self.offered[max(newer)]})

    async def _hold(self, request: Request) -> Response:
        body = await request.json()
        if body["version"] in self.is_gone:
            return JSONResponse({"error": "not staged"}, 404)
        self.held.add((body["version"], body["who"]))
        self.log.append(("hold", body["version"], body["who"]))
        await asyncio.sleep(self.hold_s)
        return JSONResponse({})

    async def _let_go(self, request: Request) -> Response:
        body = await request.json()
        self.held.discard((body["version"], body["who"]))
        self.log.append(("let_go", body["version"], body["who"]))
        return JSONResponse({})


def _part(
    rid: str,
    reply: Reply,
    start: int,
    end: int,
    label: str,
    finish_type: str | None = None,
    versions: list[tuple[str, int, int]] | None = None,
) -> dict[str, Any]:
    """Tokens [start, end) of the sample, and at its end the versions of all of them."""
    ids = reply.output_ids[:end]
    logprobs = reply.logprobs or [-0.5] * len(ids)
    pairs = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=False)]
    status = {} if reply.abort_status is None else {"status_code": reply.abort_status}
    ending = {"type": finish_type, "message": "as asked", **status}
    optional = {
        "queue_time": reply.queue_s,
        "prompt_tokens": None if reply.cached_tokens is None else 3,
        "cached_tokens": reply.cached_tokens,
        "weight_versions": versions
        and [dict(zip(("version", "start", "end"), span, strict=True)) for span in versions],
    }
    return {
        "output_ids": ids[start:],
        "meta_info": {
            "id": rid,
            "finish_reason": None if finish_type is None else ending,
            "completion_tokens": end,
            "output_token_logprobs": pairs[start:],
            "weight_version": label,
            "num_retractions": reply.num_retractions,
            **{name: one for name, one in optional.items() if one is not None},
            **_experts(reply, finish_type),
        },
    }


def _experts(reply: Reply, finish_type: str | None) -> dict[str, str]:
    if finish_type is None or reply.routed_experts is None:
        return {}
    return {"routed_experts": base64.b64encode(reply.routed_experts).decode()}


def _started(fake: F) -> Iterator[F]:
    fake.start()
    yield fake
    fake.leave()


@pytest.fixture
def fake() -> Iterator[FakeSGLang]:
    yield from _started(FakeSGLang())


@pytest.fixture
def other_fake() -> Iterator[FakeSGLang]:
    yield from _started(FakeSGLang())


@pytest.fixture
def receiver() -> Iterator[FakeReceiver]:
    yield from _started(FakeReceiver())


@pytest.fixture
def other_receiver() -> Iterator[FakeReceiver]:
    yield from _started(FakeReceiver())


@pytest.fixture
async def state(
    redis_url: str, run_name: str, buffer_factory: Callable[[], Awaitable[object]]
) -> AsyncGenerator[RunState]:
    """The state of a run with a buffer."""
    await buffer_factory()
    state = RunState(await connect(redis_url), run_name)
    yield state
    await state.close()


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
def serve() -> Iterator[Callable[[list[Route]], str]]:
    """Serves routes; returns their URL."""
    fake = _Fake()

    def start(routes: list[Route]) -> str:
        fake._serve(routes)
        return fake.url

    yield start
    fake.leave()


@pytest.fixture
def bubblewrap_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where containers of bubblewrap are; skips where none starts."""
    skip_without_bubblewrap()
    made = tmp_path / "made"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    return made
