"""Tells an answer: at once, or in server-sent events while it is written.

Whoever reads may go away at any moment. What that means for the answer is the answer's business
(see `Answer.reading`); here it only ends the telling.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollout_pool.cancelling import end_tasks
from rollout_pool.endpoint.answers import Answer
from rollout_pool.endpoint.errors import ApiError
from rollout_pool.endpoint.results import Turn, about, usage
from rollout_pool.endpoint.sessions import Session
from rollout_pool.sampling.sample import Interrupted, SampleFailed

T = TypeVar("T")


async def ended(answer: Answer, session: Session) -> None:
    """Waits for the end of `answer`, however long that takes. Raises ApiError if it has none."""
    await answer.wait()
    error = None if answer.task.cancelled() else answer.task.exception()
    if answer.task.cancelled() or answer.is_dropped or isinstance(error, Interrupted):
        why = "its client was gone for too long, or its time is up"
        if session.over_because is not None:
            why = f"session {session.session_id} is over: {session.over_because}"
        raise ApiError(
            410, f"this answer was given up: {why}", code="session_over", should_retry=False
        )
    if isinstance(error, SampleFailed | TimeoutError):
        # The engines were asked as often as the settings allow: asking again is no use.
        raise ApiError(
            503, f"no engine gave an answer: {error}", code="sample_failed", should_retry=False
        ) from error
    if error is not None:
        raise error


class Stream(Response):
    """An answer as server-sent events."""

    def __init__(self, turn: Turn, answer: Answer) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._turn = turn
        self._answer = answer
        self._request_id = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._request_id = scope["state"]["request_id"]
        await unless_gone(receive, self._tell(send))

    async def _tell(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async with self._answer.reading(), aclosing(self._events()) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[bytes]:
        turn, answer = self._turn, self._answer
        told = 0
        for choice in turn.opening():
            yield self._chunk(choice)
        while answer.is_running:
            if not await answer.wait_news(told, turn.session.serving.keep_alive_s):
                yield b": the model has nothing new yet\n\n"
            elif len(answer.sample.output_ids) > told:
                for choice in turn.piece(answer, told):
                    yield self._chunk(choice)
                told = len(answer.sample.output_ids)
        try:
            await ended(answer, turn.session)
        except ApiError as error:
            yield _event(error.body(self._request_id))
            return
        for choice in turn.ending(answer, told):
            yield self._chunk(choice)
        if turn.delivery.wants_usage:
            yield _event(
                {**about(turn, answer, is_chunk=True), "choices": [], "usage": usage(answer)}
            )
        yield b"data: [DONE]\n\n"

    def _chunk(self, choice: Mapping[str, Any]) -> bytes:
        # Usage is null in all chunks but the last, if it was asked for.
        extra = {"usage": None} if self._turn.delivery.wants_usage else {}
        body = about(self._turn, self._answer, is_chunk=True)
        return _event({**body, "choices": [choice], **extra})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None, and `work` cancelled, if the client goes away before."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_wait_gone(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await end_tasks([working, leaving])


async def settled(future: asyncio.Future[Any]) -> None:
    """Until `future` is done, however it ended; it is not cancelled with the wait."""
    await asyncio.wait([future])


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
