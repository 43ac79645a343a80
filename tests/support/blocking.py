"""The buffer and the run's state for tests and processes that are no coroutines."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from buffer.connect import connect_buffer
from buffer.run_state import RunState
from configs.schema import BufferConfig
from host.loop_thread import LoopThread
from tests.support.invariants import find_violations


class _Blocking:
    """Any method of the object is a blocking one here."""

    def __init__(self, connect: Coroutine[Any, Any, Any]) -> None:
        self._loop = LoopThread("test")
        try:
            self._target = self._loop.run(connect)
        except BaseException:
            self._loop.stop()
            raise

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._target, name)
        return lambda *args, **keywords: self._loop.run(method(*args, **keywords))

    def close(self) -> None:
        self._loop.stop(self._target.close())


class BlockingReplayBuffer(_Blocking):
    def __init__(self, url: str, run: str, settings: BufferConfig, *, waits: bool = False) -> None:
        super().__init__(connect_buffer(url, run, settings, waits=waits))

    def find_violations(self) -> list[str]:
        return self._loop.run(find_violations(self._target))


class BlockingRunState(_Blocking):
    def __init__(self, url: str, run: str, settings: BufferConfig) -> None:
        super().__init__(RunState.connect(url, run, settings))
