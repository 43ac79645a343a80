"""The response to a program that stays connected while it runs its group.

POST /groups {"stream": true} ──► the group ──► comments ──► how it ended
                                      │
                 the program dies ────┴──► its sessions are closed, its group is given up
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollout_pool.endpoint.groups import ExternalGroup
from rollout_pool.endpoint.stream import unless_gone


class GroupStream(Response):
    """A group as server-sent events. Its program is taken for dead when it disconnects."""

    def __init__(self, group: ExternalGroup, about: Mapping[str, Any], keep_alive_s: float) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._group = group
        self._about = about
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        finally:
            self._group.withdraw()  # without effect once all its rewards are posted

    async def _send(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async with aclosing(self._events()) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[bytes]:
        yield _event(self._about)
        while not self._group.has_ended.is_set():
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    await self._group.has_ended.wait()
            except TimeoutError:
                yield b": the group is open\n\n"
        yield _event(self._group.status())


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
