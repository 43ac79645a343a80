"""The endpoint's HTTP routes.

POST /v1/chat/completions   /v1/completions   /v1/responses   /v1/messages[/count_tokens]
GET  /v1/models                                                     with a session's key
the same under /sessions/KEY/v1, for clients that can't send a key
POST /sessions/ID/reward                                            with its key or the admin key
POST /groups      GET /groups/ID                                    with the admin key
GET  /health                                                        with none
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import uvicorn
from msgspec import structs
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from host.http_server import BodyRoom, HttpLimits, ServerConfig, has_more_values, read_body
from host.network import listen_for
from rollout_pool.cancelling import end_tasks, unless_gone
from rollout_pool.endpoint.chat import ChatTurn, MessagesTurn, ResponsesTurn
from rollout_pool.endpoint.completions import CompletionTurn
from rollout_pool.endpoint.errors import ApiError, refuse
from rollout_pool.endpoint.groups import ExternalGroups, GroupStream
from rollout_pool.endpoint.messages import CountRequest, MessagesRequest
from rollout_pool.endpoint.pending_completion import PendingCompletion
from rollout_pool.endpoint.responses import ResponsesRequest
from rollout_pool.endpoint.schema import (
    ChatRequest,
    CompletionRequest,
    GroupRequest,
    Reward,
    decode,
    shown,
)
from rollout_pool.endpoint.sessions import (
    CHARACTERS_PER_TOKEN,
    Outcome,
    Serving,
    Session,
    SessionOver,
    Sessions,
)
from rollout_pool.endpoint.stream import Stream, Turn, ended
from rollout_pool.episodes.episode import ROLE, EpisodeFailed, check_parts

log = logging.getLogger(__name__)

MAX_SMALL_BODY_BYTES = 64 * 1024
"""Limit of a request without a conversation."""
BYTES_PER_CHARACTER = 6
r"""In JSON: a character can be spelled \u00e9."""
BASE_BODY_BYTES = 2**20
MAX_BODY_BYTES = 16 * 2**20
MAX_OPEN_BYTES = 2**30
"""Limit for the bodies of all requests at a time."""
BASE_VALUES = 50_000
LARGE_BODY_BYTES = 16 * 1024
"""A larger request is parsed and tokenized in a thread."""
MAX_LARGE_AT_ONCE = 2
"""These threads compete with the event loop for the GIL."""
MAX_RETRY_COUNT_DIGITS = 6
COUNT_PAGE = "messages/count_tokens"
REQUEST_ID = "x-request-id"
REQUEST_ID_FORM = re.compile(r"[\x21-\x7e]{1,128}")

T = TypeVar("T")
Page = Callable[[Request], Coroutine[Any, Any, Response]]


class _RequestIds:
    """Gives every request an id, its client's or a new one, and returns it in the response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if REQUEST_ID_FORM.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, f"{request.url.path}: {error.detail}").response(request)


async def _failed(request: Request, error: Exception) -> Response:
    log.error("request %s failed with %r", request.state.request_id, error)
    message = f"failed with {type(error).__name__}; see the worker's log"
    return ApiError(500, message, should_retry=False).response(request)


class RequestLimits:
    """Limits on one request of a session, and the threads for large ones: parsing and tokenizing
    some MiB takes seconds, and must not block the event loop, which also drives the engines."""

    def __init__(self, serving: Serving) -> None:
        self.max_values = BASE_VALUES + serving.max_tokens
        bytes_per_token = CHARACTERS_PER_TOKEN * BYTES_PER_CHARACTER
        self.max_body_bytes = min(
            MAX_BODY_BYTES, BASE_BODY_BYTES + bytes_per_token * serving.max_tokens
        )
        self.bodies = BodyRoom(MAX_OPEN_BYTES)
        self._large = asyncio.Semaphore(MAX_LARGE_AT_ONCE)

    async def read(self, body: bytes, work: Callable[[], T]) -> T:
        """The result of `work`, run in a thread if `body` is large."""
        if len(body) <= LARGE_BODY_BYTES:
            return work()
        async with self._large:
            return await asyncio.to_thread(work)


class _Api:
    """The routes of an endpoint."""

    def __init__(self, sessions: Sessions, groups: ExternalGroups, admin_key: str) -> None:
        self._sessions = sessions
        self._groups = groups
        self._admin_key = admin_key
        self._limits = RequestLimits(sessions.serving)

    def app(self) -> ASGIApp:
        pages: list[tuple[str, Page, str]] = [
            ("health", self.health, "GET"),
            ("groups", self.open_group, "POST"),
            ("groups/{group_id}", self.group, "GET"),
            ("sessions/{session_id}/reward", self.reward, "POST"),
        ]
        for start in ("v1", "sessions/{key}/v1"):
            pages += [
                (f"{start}/chat/completions", self._page_of(ChatTurn, ChatRequest), "POST"),
                (f"{start}/completions", self._page_of(CompletionTurn, CompletionRequest), "POST"),
                (f"{start}/responses", self._page_of(ResponsesTurn, ResponsesRequest), "POST"),
                (f"{start}/messages", self._page_of(MessagesTurn, MessagesRequest), "POST"),
                (f"{start}/{COUNT_PAGE}", self._page_of(MessagesTurn, CountRequest), "POST"),
                (f"{start}/models", self.models, "GET"),
                (f"{start}/models/{{model:path}}", self.models, "GET"),
            ]
        routes = [Route(f"/{page}", endpoint, methods=[method]) for page, endpoint, method in pages]
        handlers: dict[Any, Any] = {
            ApiError: _refused,
            HTTPException: _http_error,
            Exception: _failed,
        }
        return _RequestIds(Starlette(routes=routes, exception_handlers=handlers))

    # The model ------------------------------------------------------------------------------------

    def _page_of(self, turn: Callable[[Session, T], Turn], kind: type[T]) -> Page:
        """The page on which a body of this kind asks the model for a turn."""

        async def page(request: Request) -> Response:
            session, most = self._session(request), self._limits.max_body_bytes
            async with AsyncExitStack() as held:
                async with session.reading:
                    await held.enter_async_context(self._limits.bodies.place(request, most))
                    body = await read_body(request, most)
                return await self._serve_body(
                    body, request, session, lambda: turn(session, decode(body, kind))
                )

        return page

    async def _serve_body(
        self, body: bytes, request: Request, session: Session, make_turn: Callable[[], Turn]
    ) -> Response:
        page = request.url.path.rpartition("/v1/")[2]
        role = _role_of(self._key(request))

        def fingerprint_of() -> bytes:
            return hashlib.sha256(f"{role} {page}\n".encode() + body).digest()

        def read() -> tuple[Turn, bytes]:
            if has_more_values(body, most := self._limits.max_values):
                raise refuse("body", f"holds more than {most} values", code="too_many_values")
            turn = make_turn()
            turn.role = role
            return turn, fingerprint_of()

        session.check_requests(fingerprint_of)
        with session.activity():
            turn, fingerprint = await self._limits.read(body, read)
            if page == COUNT_PAGE:
                prompt = await self._limits.read(body, turn.render)
                return JSONResponse({"input_tokens": len(prompt)})
            is_retry = _is_retry(request) and not session.was_refused(fingerprint)
            fingerprints = [fingerprint + index.to_bytes() for index in range(turn.n)]
            known = self._first_completions(request, fingerprints, is_retry)
            if len(known) < turn.n:
                await turn.check_form()
                prompt = await self._limits.read(body, turn.render)
                known = self._first_completions(request, fingerprints, is_retry)
                missing = [one for one in fingerprints if one not in known]
                known |= zip(missing, turn.begin(prompt, missing), strict=True)
            completions = [known[one] for one in fingerprints]
            if turn.is_streamed:
                return Stream(turn, completions)
            async with AsyncExitStack() as reading:
                for completion in completions:
                    await reading.enter_async_context(completion.reading())
                await unless_gone(request.receive, asyncio.wait([one.task for one in completions]))
                if any(one.is_running for one in completions):  # its client disconnected
                    return Response(status_code=499)
                for completion in completions:
                    await ended(completion, session)
                return JSONResponse(turn.result(completions))

    def _first_completions(
        self, request: Request, fingerprints: Sequence[bytes], is_retry: bool
    ) -> dict[bytes, PendingCompletion]:
        """For a retry, the completions to the original request. Raises ApiError if the session has
        ended meanwhile."""
        session = self._session(request)
        found = {one: session.again(one) for one in fingerprints} if is_retry else {}
        return {one: completion for one, completion in found.items() if completion is not None}

    async def models(self, request: Request) -> Response:
        if not self._is_admin(request):
            self._session(request)
        name = self._sessions.serving.model
        about = {"id": name, "object": "model", "created": 0, "owned_by": "leash"}
        asked = request.path_params.get("model")
        if asked is None:
            return JSONResponse({"object": "list", "data": [about]})
        if asked != name:
            raise ApiError(404, f"there is no model {asked!r} here", code="model_not_found")
        return JSONResponse(about)

    # Sessions and groups --------------------------------------------------------------------------

    async def open_group(self, request: Request) -> Response:
        """A credit and the next prompt; waits until there is one."""
        self._check_admin(request)
        asked = decode(await read_body(request, MAX_SMALL_BODY_BYTES) or b"{}", GroupRequest)
        group = self._groups.request()
        is_told = False
        try:
            async with asyncio.timeout(asked.timeout_s):
                await unless_gone(request.receive, asyncio.wait([group.opened]))
            if not group.opened.done():
                return Response(status_code=499)
            group.opened.result()
            is_told = True
        except TimeoutError as error:
            raise ApiError(
                503,
                f"no group could be admitted within {asked.timeout_s:g} s: "
                f"{self._groups.waits_for}",
                code="no_credit",
                should_retry=False,
            ) from error
        finally:
            if not is_told:
                group.withdraw()
        about = group.describe(str(request.base_url).rstrip("/"))
        if asked.stream:
            return GroupStream(group, about, self._sessions.serving.keep_alive_s)
        return JSONResponse(about)

    async def group(self, request: Request) -> Response:
        """Where a group stands, or how it ended."""
        self._check_admin(request)
        group_id = request.path_params["group_id"]
        if (group := self._groups.find(group_id)) is None:
            raise ApiError(404, f"there is no group {group_id!r}", code="no_such_group")
        return JSONResponse({**group.status(), "in_buffer": await group.state_in_buffer()})

    async def reward(self, request: Request) -> Response:
        """Ends a session. Posting the same reward again is allowed."""
        session_id = request.path_params["session_id"]
        with contextlib.suppress(SessionOver):  # a closed one may have had this same reward
            self._session_named(request, session_id)  # before the body is read
        outcome = _read_outcome(await read_body(request, MAX_SMALL_BODY_BYTES))
        try:
            session = self._session_named(request, session_id)
        except SessionOver as over:
            if over.closed.outcome == outcome:
                return self._rewarded(session_id, outcome)
            raise
        if session.num_turns == 0:
            raise ApiError(409, "the model gave no token in this session", should_retry=False)
        if not session.outcome.done():
            try:
                session.episode(end="done", outcome=outcome)
            except EpisodeFailed as error:
                raise refuse(
                    "advantages" if outcome.advantages else "rewards", str(error)
                ) from error
            session.outcome.set_result(outcome)
        elif session.outcome.result() != outcome:
            raise ApiError(409, "a different reward was already posted", should_retry=False)
        return self._rewarded(session_id, outcome)

    def _rewarded(self, session_id: str, outcome: Outcome) -> Response:
        group = self._groups.find(session_id.rpartition(".")[0])
        about = None if group is None else group.status()
        return JSONResponse({"session": session_id, "reward": outcome.reward, "group": about})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "num_sessions": len(self._sessions)})

    # Keys -----------------------------------------------------------------------------------------

    def _session(self, request: Request) -> Session:
        return self._sessions.find(self._key(request))

    @staticmethod
    def _key(request: Request) -> str:
        key: str | None = request.path_params.get("key")
        return _bearer(request) if key is None else key

    def _session_named(self, request: Request, session_id: str) -> Session:
        if self._is_admin(request):
            return self._sessions.find_by_id(session_id)
        try:
            session = self._sessions.find(_bearer(request))
        except SessionOver as over:
            if over.closed.session_id == session_id:
                raise
            session = None
        if session is None or session.session_id != session_id:
            raise ApiError(401, "this key belongs to another session", code="invalid_api_key")
        return session

    def _is_admin(self, request: Request) -> bool:
        if "key" in request.path_params:
            return False
        return hmac.compare_digest(_bearer(request).encode(), self._admin_key.encode())

    def _check_admin(self, request: Request) -> None:
        if not self._is_admin(request):
            raise ApiError(401, "this request needs the admin key", code="invalid_api_key")


def _bearer(request: Request) -> str:
    """The key, which Anthropic's clients may send in a header of its own."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        key = request.headers.get("x-api-key", "")
    if not key.strip():
        words = "a request needs the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        raise ApiError(401, words, code="invalid_api_key")
    return key.strip()


def _role_of(key: str) -> str:
    """The role whose key a session's is, with a dot and the role's name behind it."""
    _, dot, role = key.partition(".")
    if dot and not ROLE.fullmatch(role):
        words = f"the role {role!r:.100} in the key must have the form {ROLE.pattern}"
        raise ApiError(401, words, code="invalid_api_key")
    return role


def _is_retry(request: Request) -> bool:
    """Returns whether this is a retry of an official client."""
    name = "x-stainless-retry-count"
    count = request.headers.get(name, "0")
    if not count.isdecimal() or len(count) > MAX_RETRY_COUNT_DIGITS:
        raise refuse(name, f"must be a number of requests, not {shown(count)}")
    return int(count) > 0


def _read_outcome(body: bytes) -> Outcome:
    posted = decode(body, Reward)
    try:
        check_parts([*posted.parts, *posted.rewards, *posted.advantages])
    except ValueError as error:
        raise refuse("parts", str(error)) from error
    if posted.reward is None and not (posted.rewards or posted.advantages):
        raise refuse("reward", "must be a number, or give rewards or advantages by role")
    return Outcome(**structs.asdict(posted))


CLOSE_S = 5


class Endpoint:
    """Serves `sessions` and `groups` from `start` to `close`."""

    url: str
    """Without the /v1; set by `start`."""

    def __init__(
        self,
        serving: Serving,
        *,
        host: str,
        port: int = 0,
        admin_key: str | None = None,
        limits: HttpLimits | None = None,
    ) -> None:
        """`port` 0 takes a free one. Without `admin_key` one is generated."""
        self.sessions = Sessions(serving)
        self.groups = ExternalGroups(self.sessions)
        self.admin_key = admin_key or f"sk-leash-admin-{secrets.token_urlsafe(24)}"
        self._limits = limits or HttpLimits()
        self._host = host
        self._port = port
        self._server: uvicorn.Server | None = None
        self.serving: asyncio.Task[None] | None = None
        """Once it is started; ends with `close`, or with the error that ended it before."""

    async def start(self) -> None:
        """Starts to accept requests. Raises ValueError naming the address if it is taken."""
        # At once, so that no client that has the address is refused.
        listening, self.url = listen_for("rollout.openai.port", self._host, self._port)
        app = _Api(self.sessions, self.groups, self.admin_key).app()
        count = self.sessions.serving.count
        self._server = _Server(ServerConfig(app, self._limits, close_s=CLOSE_S, count=count))
        self.serving = asyncio.create_task(self._serve(self._server, listening))

    async def _serve(self, server: _Server, listening: socket.socket) -> None:
        await server.serve(sockets=[listening])
        if not server.should_exit:
            raise RuntimeError(f"the endpoint at {self.url} has ended")

    def write_address(self, path: Path) -> None:
        """Writes the address and the admin key, for programs with access to the run's folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"url": self.url, "admin_key": self.admin_key}) + "\n"
        # A temporary file can be read by its owner only.
        with NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)

    async def close(self) -> None:
        """Ends every session and stops listening. May be called twice."""
        self.groups.close()
        await self.sessions.close_all("the run has ended")
        self.groups.end_all("the run has ended")
        if self._server is None or self.serving is None:
            return
        self._server.should_exit = True
        await asyncio.wait([self.serving], timeout=2 * CLOSE_S)
        await end_tasks([self.serving])


class _Server(uvicorn.Server):
    """Leaves signals to the worker."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
