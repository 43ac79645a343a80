"""Serves the sandbox of this machine over HTTP, on the wire of SandboxFusion.

POST /run_code     with the key, if there is one: see RunRequest
GET  /v1/ping      with none
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from msgspec import Meta, ValidationError, convert
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from host.http_server import BodyRoom, has_more_values, read_body
from rollout_pool.cancelling import unless_gone
from rollout_pool.sandbox.run import Sandbox, SandboxError, SandboxLimits, SandboxResult

MAX_BODY_BYTES = 64 * 2**20
MAX_VALUES = 1000
"""JSON values in a request, those of ignored fields too."""
MAX_OPEN = 1024
"""Requests at a time; most of them wait for their turn."""
MAX_OPEN_BYTES = 512 * 2**20
"""Bytes of their bodies together."""
_TIMEOUTS = ("cpu_time", "wall_time")


@dataclass(kw_only=True, slots=True, frozen=True)
class Language:
    """The sandbox for the programs of one language."""

    sandbox: Sandbox
    limits: SandboxLimits
    """A request may ask for less than this time and memory."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RunRequest:
    """One program and its input. Other fields of SandboxFusion, as compile_timeout, are ignored."""

    code: str
    language: str
    stdin: str | None = None
    run_timeout: float | None = None
    """In seconds; None is what the service allows."""
    memory_limit_MB: int = -1
    """Not above 0: what the service allows."""
    statements_at: Annotated[int, Meta(ge=0)] | None = None
    """Where statements that test the program begin in `code`: they run in an own process."""
    files: dict[str, Any] = field(default_factory=dict)
    """Must be empty."""


def make_app(languages: Mapping[str, Language], key: str, *, max_open: int = MAX_OPEN) -> Starlette:
    """`key`: the bearer token of requests; "" admits all. Requests above `max_open` get 429."""
    service = _Service(languages, key, max_open)
    return Starlette(
        routes=[
            Route("/run_code", service.run_code, methods=["POST"]),
            Route("/v1/ping", service.ping, methods=["GET"]),
        ]
    )


class _Service:
    def __init__(self, languages: Mapping[str, Language], key: str, max_open: int) -> None:
        self._languages = languages
        self._key = key
        self._max_open = max_open
        self._num_open = 0
        self._bodies = BodyRoom(MAX_OPEN_BYTES)

    async def ping(self, request: Request) -> Response:
        return JSONResponse("pong")

    async def run_code(self, request: Request) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._key and not hmac.compare_digest(given.encode(), self._key.encode()):
            raise HTTPException(401, "the key is missing or wrong")
        if self._num_open >= self._max_open:
            why = f"{self._max_open} programs are running or waiting"
            raise HTTPException(429, why, {"Retry-After": "1"})
        self._num_open += 1
        try:
            async with self._bodies.place(request, MAX_BODY_BYTES):
                asked = _parsed(await read_body(request, MAX_BODY_BYTES))
                result = await unless_gone(request.receive, self._run(asked))
            return Response(status_code=499) if result is None else JSONResponse(result)
        finally:
            self._num_open -= 1

    async def _run(self, asked: RunRequest) -> dict[str, object]:
        language = self._languages.get(asked.language)
        if language is None:
            names = ", ".join(self._languages)
            raise HTTPException(422, f"language={asked.language!r}: there is none here but {names}")
        limits = _within(language.limits, asked)
        at = len(asked.code) if asked.statements_at is None else asked.statements_at
        try:
            result = await language.sandbox.run(
                asked.code[:at],
                stdin=asked.stdin or "",
                limits=limits,
                statements=None if asked.statements_at is None else asked.code[at:],
            )
        except SandboxError as error:
            return {"status": "SandboxError", "message": str(error)}
        return _response_body(result)


def _parsed(body: bytes) -> RunRequest:
    if has_more_values(body, MAX_VALUES):
        raise HTTPException(422, f"the request holds more than {MAX_VALUES} values")
    try:
        asked = convert(json.loads(body), RunRequest)
    except (ValidationError, ValueError, RecursionError) as error:
        raise HTTPException(422, f"the request cannot be read: {error}") from error
    if asked.files:
        raise HTTPException(422, "files: this service gives programs no files")
    return asked


def _within(most: SandboxLimits, asked: RunRequest) -> SandboxLimits:
    # Not the lower one of both: a test would fail by a limit that its run does not know.
    wall_time_s = most.wall_time_s if asked.run_timeout is None else asked.run_timeout
    if not 0 < wall_time_s <= most.wall_time_s:
        raise HTTPException(
            422,
            f"run_timeout={wall_time_s:g}: at most {most.wall_time_s:g} s are allowed here",
        )
    memory_bytes = asked.memory_limit_MB * 2**20
    if memory_bytes > most.memory_bytes:
        most_mb = most.memory_bytes // 2**20
        raise HTTPException(
            422, f"memory_limit_MB={asked.memory_limit_MB}: at most {most_mb} are allowed here"
        )
    return replace(
        most,
        wall_time_s=wall_time_s,
        memory_bytes=memory_bytes if memory_bytes > 0 else most.memory_bytes,
    )


def _response_body(result: SandboxResult) -> dict[str, object]:
    has_failed = result.reason is not None
    command = {
        "status": "TimeLimitExceeded" if result.reason in _TIMEOUTS else "Finished",
        # A program that was killed for its output may have ended by itself.
        "return_code": (result.exit_code or 1) if has_failed else 0,
        "execution_time": result.seconds,
        "stdout": result.stdout,
        "stderr": result.stderr,
    }
    is_compiled = result.reason != "compile"
    return {
        "status": "Failed" if has_failed else "Success",
        "message": result.explanation,
        "compile_result": None if is_compiled else command,
        "run_result": command if is_compiled else None,
    }
