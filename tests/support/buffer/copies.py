"""Copies of admission calls, as a network may deliver them once more, at any time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from buffer.redis.scripts import Scripts


class Copies:
    """Notes each call of admission, so that a copy of it can be sent later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, are_twice: bool = False) -> None:
        """`are_twice`: a second copy follows each call at once, and must get the same reply."""
        self.calls: list[Callable[[], Awaitable[Any]]] = []
        send = Scripts._run

        async def noted(scripts: Scripts, name: str, kind: Any, command: bytes) -> Any:
            if name == "rollout/admit_groups":
                self.calls.append(lambda: send(scripts, name, kind, command))
            reply = await send(scripts, name, kind, command)
            if name == "rollout/admit_groups" and are_twice:
                assert await self.calls[-1]() == reply
            return reply

        monkeypatch.setattr(Scripts, "_run", noted)
