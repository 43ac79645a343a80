"""Refuses requests that cannot fit before any work is spent on them.

Parsing and tokenizing some MiB of JSON takes seconds. It must not block the event loop, which also
drives the engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from host.http_server import BodyRoom, has_more_values
from rollout_pool.endpoint.errors import refuse
from rollout_pool.endpoint.sessions import CHARACTERS_PER_TOKEN, Serving

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

T = TypeVar("T")


class RequestLimits:
    """Limits on one request of a session, and the threads for large ones."""

    def __init__(self, serving: Serving) -> None:
        self._max_values = BASE_VALUES + serving.max_tokens
        bytes_per_token = CHARACTERS_PER_TOKEN * BYTES_PER_CHARACTER
        self.max_body_bytes = min(
            MAX_BODY_BYTES, BASE_BODY_BYTES + bytes_per_token * serving.max_tokens
        )
        self.bodies = BodyRoom(MAX_OPEN_BYTES)
        self._large = asyncio.Semaphore(MAX_LARGE_AT_ONCE)

    def check_values(self, body: bytes) -> None:
        """Raises ApiError for JSON with more values than a request can need."""
        if has_more_values(body, self._max_values):
            problem = f"holds more than {self._max_values} values"
            raise refuse("body", problem, code="too_many_values")

    async def read(self, body: bytes, work: Callable[[], T]) -> T:
        """The result of `work`, run in a thread if `body` is large."""
        if len(body) <= LARGE_BODY_BYTES:
            return work()
        async with self._large:
            return await asyncio.to_thread(work)
