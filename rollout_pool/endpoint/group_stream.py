"""The response to a program that stays connected while it runs its group.

POST /groups {"stream": true} ──► the group ──► comments ──► how it ended
                                      │
                 the program dies ────┴──► its sessions are closed, its group is given up
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from rollout_pool.cancelling import unless_gone
from rollout_pool.endpoint.groups import ExternalGroup
from rollout_pool.endpoint.stream import EventStream, event_of, is_set_within


class GroupStream(EventStream):
    """A group as server-sent events. Its program is taken for dead when it disconnects."""

    def __init__(self, group: ExternalGroup, about: Mapping[str, Any], keep_alive_s: float) -> None:
        super().__init__()
        self._group = group
        self._about = about
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self.send_events(send))
        finally:
            self._group.withdraw()  # without effect once all its rewards are posted

    async def events(self) -> AsyncGenerator[bytes]:
        yield event_of(self._about)
        while not await is_set_within(self._group.has_ended, self._keep_alive_s):
            yield b": the group is open\n\n"
        yield event_of(self._group.status())
