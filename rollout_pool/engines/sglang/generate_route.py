"""A shorter way of streams through the server's POST /generate; only `server` loads this.

    request ─► SGLang's key check ─► GenerateRoute ─┬─ a stream ─► SGLang's manager of requests
                                                    └─ any other ─► SGLang's own route

SGLang's own route sends each part by itself through five layers, and waits for each sample in three
tasks. Here one task waits for all samples of a call and sends what is ready at once; clients see
the same, but that the first token of a sample of at most `stream_interval` tokens comes with the
others. Several tokenizer processes import SGLang's application anew, without this.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextvars import ContextVar
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_pool.engines.sglang.adapter_versions import stamp

INNER_HEADERS = (b"content-encoding", b"x-body-compressed", b"origin")
"""SGLang's inner layers read them."""

_joins: ContextVar[bool] = ContextVar("joins", default=False)
"""True in a task whose parts are joined as they come."""

_log = logging.getLogger(__name__)


def install() -> None:
    """Patch SGLang in this process. Call it before it starts its manager."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.environ import envs
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    if envs.SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES.get():
        return
    # SGLang adds its check of the key later, and so further out.
    own = http_server.generate_request
    [route] = [r for r in http_server.app.routes if getattr(r, "endpoint", None) is own]
    http_server.app.add_middleware(GenerateRoute, server=http_server, route=route)
    stock = TokenizerManager._stream_batch_responses

    def stream(manager: Any, generators: Sequence[Any], rids: Sequence[str]) -> AsyncGenerator[Any]:
        states = [manager.rid_to_state.get(rid) for rid in rids]
        if _joins.get() and _is_plain(manager, states):
            return _stream_joined(manager, states)
        parts: AsyncGenerator[Any] = stock(manager, generators, rids)
        return parts

    make = TokenizerManager._create_tokenized_object

    def make_quiet(manager: Any, *args: Any, **kwargs: Any) -> Any:
        tokenized = make(manager, *args, **kwargs)
        if _joins.get():
            settings = tokenized.sampling_params
            most, interval = settings.max_new_tokens, settings.stream_interval
            if most is not None and most <= (interval or 0):
                tokenized.stream = False  # its scheduler's flag: the manager streams what comes
        return tokenized

    TokenizerManager._stream_batch_responses = stream
    TokenizerManager._create_tokenized_object = make_quiet


class GenerateRoute:
    """In front of `app`, SGLang's application, whose module is `server` and own way `route`."""

    def __init__(self, app: ASGIApp, server: Any, route: Any) -> None:
        self._app, self._server, self._path = app, server, route.path
        self._validate = route.body_field.validate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._may_be_stream(scope):
            await self._app(scope, receive, send)
            return
        call = self._server.ORJSONRequest(scope, receive)
        try:
            asked = await self._read(call)
        except ClientDisconnect:
            return
        if asked is None:
            await self._app(scope, _from_start(await call.body(), receive), send)
            return
        manager = self._server.get_global_state().tokenizer_manager
        events, abort = self._events(manager, asked, call), manager.create_abort_task(asked)
        reply = StreamingResponse(events, media_type="text/event-stream", background=abort)
        await reply(scope, receive, send)

    async def _read(self, call: Request) -> Any:
        """Returns the request; None where SGLang's route is to reply."""
        try:
            asked, errors = self._validate(await call.json(), {}, loc=("body",))
        except ValueError:  # no JSON
            return None
        return None if errors or not asked.stream else asked

    async def _events(self, manager: Any, asked: Any, call: Request) -> AsyncGenerator[bytes]:
        _joins.set(True)
        try:
            async for parts in manager.generate_request(asked, call):
                yield self._lines(parts if isinstance(parts, list) else [parts])
        except ValueError as error:
            _log.error("A request to %s was refused: %s", self._path, error)
            code = getattr(error, "status_code", 400)
            body = {"message": str(error), "type": "invalid_request_error", "code": code}
            yield self._lines([{"error": {**body, "retryable": False}}])
        yield b"data: [DONE]\n\n"

    def _lines(self, parts: list[dict[str, Any]]) -> bytes:
        return b"".join(b"data: %b\n\n" % self._server.dumps_json(part) for part in parts)

    def _may_be_stream(self, scope: Scope) -> bool:
        if scope["type"] != "http" or (scope["method"], scope["path"]) != ("POST", self._path):
            return False
        headers = dict(scope["headers"])
        is_json = headers.get(b"content-type") == b"application/json"
        return is_json and not any(name in headers for name in INNER_HEADERS)


def _from_start(body: bytes, receive: Receive) -> Receive:
    left: list[Message] = [{"type": "http.request", "body": body}]

    async def again() -> Message:
        return left.pop() if left else await receive()

    return again


def _is_plain(manager: Any, states: list[Any]) -> bool:
    """Parts hold new tokens alone, none is a beam, and nothing is recorded of a sample's end."""
    return not (
        None in states  # it has ended before
        or not manager.incremental_streaming_output
        or any((state.obj.sampling_params or {}).get("beam_width") for state in states)
        or manager.request_logger.log_requests
        or manager.request_metrics_exporter_manager.exporter_enabled()
    )


async def _stream_joined(manager: Any, states: list[Any]) -> AsyncGenerator[list[dict[str, Any]]]:
    """Yields the parts of all samples that are ready, until each sample has ended."""
    ready = asyncio.Event()
    ready.set()  # some may have parts
    for state in states:
        state.event = ready
    running = dict(enumerate(states))
    while running:
        await ready.wait()  # uvicorn reports a client that goes, and the response cancels this
        ready.clear()
        parts = []
        for index, state in list(running.items()):
            if state.out_list:
                part = _take(manager, state)
                if state.finished:
                    del running[index]
                    if part["meta_info"]["finish_reason"]["type"] == "abort":
                        await manager._handle_abort_finish_reason(part, state, True)
                parts.append({**part, "index": index})
        if parts:
            yield parts


def _take(manager: Any, state: Any) -> dict[str, Any]:
    """Joins all that came since the last part."""
    parts, state.out_list = state.out_list, []
    part: dict[str, Any] = parts[0]
    if len(parts) > 1:
        extra = state.customized_info_accumulated.keys()
        part = manager._coalesce_streaming_chunks(parts, state.obj.rid, extra)
    if not state.time_stats.response_sent_to_client_time:
        state.time_stats.set_response_sent_to_client_time()
        sent = state.time_stats.get_response_sent_to_client_realtime()
        part["meta_info"]["response_sent_to_client_ts"] = sent
    if state.obj.lora_path is not None:
        stamp(part["meta_info"], state.obj.lora_path)
    return part
