"""A version board in memory, with engines that take what their receiver offers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from configs.run_files import Scalar


class MemoryBoard:
    """Satisfies `VersionBoard`. Any thread may change it; who waits is in the coordinator's."""

    def __init__(self) -> None:
        self.registered: dict[str, str] = {}
        self.engines: dict[str, int] = {}
        self.staged: list[tuple[str, int]] = []
        self.available: list[int] = []
        self.records: list[dict[str, Any]] = []
        self.is_lost = self.is_closed = False
        self.num_waits = 0
        """Waits for engines."""
        self.on_record: Callable[[dict[str, Any]], None] = lambda record: None
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def changed(self) -> None:
        for loop, event in list(self._waiting):
            loop.call_soon_threadsafe(event.set)

    def set_engine(self, name: str, version: int) -> None:
        self.engines[name] = version
        self.changed()

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in list(self.records) if record["kind"] == kind]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [record for record in self.of_kind("weights_event") if record["event"] == name]

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        event = asyncio.Event()
        entry = asyncio.get_running_loop(), event
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await event.wait()
                    event.clear()
        except TimeoutError:
            told = [record for record in self.records if record["kind"] == "weights_event"]
            raise TimeoutError(f"not within {timeout_s:g} s; events: {told}") from None
        finally:
            self._waiting.remove(entry)

    async def receivers(self) -> dict[str, str]:
        if self.is_lost:
            raise ConnectionError("the board is lost")
        return dict(self.registered)

    async def engine_versions(self) -> dict[str, int]:
        return dict(self.engines)

    async def record_staged(self, receiver: str, version: int) -> None:
        self.staged.append((receiver, version))
        self.changed()

    async def mark_available(self, version: int) -> None:
        assert any(staged == version for _, staged in self.staged), "available before it is staged"
        self.available.append(version)
        self.changed()

    async def wait_engines_at(self, version: int, timeout_s: float) -> Mapping[str, int]:
        self.num_waits += 1
        self.changed()
        try:
            await self.wait_until(lambda: self._serve(version), timeout_s)
        except TimeoutError:
            raise TimeoutError(f"engines behind version {version}: {self.engines}") from None
        finally:
            self.num_waits -= 1
        return dict(self.engines)

    def _serve(self, version: int) -> bool:
        if self.is_closed:
            raise RuntimeError("the board was closed during this call")
        return bool(self.engines) and min(self.engines.values()) >= version

    async def append_metrics(self, record: Mapping[str, Scalar], kind: str) -> None:
        self.records.append({"kind": kind, **record})
        self.on_record(self.records[-1])
        self.changed()

    async def close(self) -> None:
        self.is_closed = True
        self.changed()
        while self.num_waits:  # they end before connections are closed
            await asyncio.sleep(0)
