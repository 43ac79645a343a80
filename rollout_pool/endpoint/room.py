"""Refuses what cannot have room before any work is spent on it.

To parse some MiB of JSON and to count the tokens of it takes seconds. The event loop that the
engines are driven from must not stand still for so long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from rollout_pool.endpoint.errors import ApiError
from rollout_pool.endpoint.sessions import Serving, Session

CHARACTERS_PER_TOKEN = 16
"""Of a text as a whole no tokenizer has so many, however long its longest tokens are."""
BYTES_PER_CHARACTER = 6
r"""In JSON: a character can be spelled \u00e9."""
BASE_BODY_BYTES = 2**20
MAX_BODY_BYTES = 16 * 2**20
BASE_VALUES = 50_000
LARGE_BODY_BYTES = 16 * 1024
"""A larger request is read and tokenized in a thread."""
MAX_LARGE_AT_ONCE = 2
"""Threads that are busy with requests share Python's lock with the event loop."""

T = TypeVar("T")


class RequestRoom:
    """The room for one request of a session, and the threads for large ones."""

    def __init__(self, serving: Serving) -> None:
        self._max_values = BASE_VALUES + serving.max_tokens
        bytes_per_token = CHARACTERS_PER_TOKEN * BYTES_PER_CHARACTER
        self.max_body_bytes = min(
            MAX_BODY_BYTES, BASE_BODY_BYTES + bytes_per_token * serving.max_tokens
        )
        self._large = asyncio.Semaphore(MAX_LARGE_AT_ONCE)

    def check_values(self, body: bytes) -> None:
        """Raises ApiError for JSON of more values than a request can need.

        json.loads holds Python's lock until it has made all of them, in a thread too.
        """
        if body.count(b",") + body.count(b"[") + body.count(b"{") <= self._max_values:
            return
        # Most of them may stand inside of strings, in code for example.
        unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
        is_many = unescaped.count(b'"') > 4 * self._max_values
        outside = b"" if is_many else b"".join(unescaped.split(b'"')[::2])
        num_values = outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        if is_many or num_values > self._max_values:
            problem = f"holds more than {self._max_values} values"
            raise ApiError(400, f"body: {problem}", param="body", code="too_many_values")

    async def read(self, body: bytes, work: Callable[[], T]) -> T:
        """The result of `work` on a request with this body."""
        if len(body) <= LARGE_BODY_BYTES:
            return work()
        async with self._large:
            return await asyncio.to_thread(work)


def check_characters(session: Session, number: int, param: str) -> None:
    """Raises ApiError for a conversation of so many characters that it can't have room."""
    most = session.serving.max_tokens
    if number > CHARACTERS_PER_TOKEN * most:
        words = f"{number} characters, more than {CHARACTERS_PER_TOKEN} for each of them"
        raise _no_room(session, words, param)


def check_parts(session: Session, number: int, param: str) -> None:
    """The same for a conversation of so many messages, calls and tools: each takes a token."""
    if number > session.serving.max_tokens:
        raise _no_room(session, f"{number} messages, tool calls and tools", param)


def _no_room(session: Session, words: str, param: str) -> ApiError:
    session.is_full = True
    return ApiError(
        400,
        f"This model's maximum context length is {session.serving.max_tokens} tokens "
        "(rollout.max_prompt_tokens + rollout.max_response_tokens). The conversation has " + words,
        param=param,
        code="context_length_exceeded",
    )
