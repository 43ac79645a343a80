"""Remembers which engine holds the prefix of a session."""

from __future__ import annotations

from collections import OrderedDict

MAX_SESSIONS = 65_536
"""Of which the least recently used are forgotten first; that costs a prefill, nothing else."""


class StickySessions:
    """The home of each session, by engine name."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._homes: OrderedDict[str, str] = OrderedDict()

    def home(self, session: str) -> str | None:
        return self._homes.get(session)

    def settle(self, session: str, engine: str) -> None:
        self._homes[session] = engine
        self._homes.move_to_end(session)
        if len(self._homes) > self._max_sessions:
            self._homes.popitem(last=False)

    def lose(self, engine: str) -> None:
        """The engine holds nothing any more."""
        for session in [s for s, home in self._homes.items() if home == engine]:
            del self._homes[session]
