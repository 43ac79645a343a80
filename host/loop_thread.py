"""An event loop in a thread, for synchronous callers such as trainer ranks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class LoopClosedError(RuntimeError):
    """The event loop of a call was closed before its end."""


class LoopThread:
    """An event loop in a daemon thread; any thread may call its methods.

    loop = LoopThread("redis")
    buffer = loop.run(connect_buffer(url, run, settings))
    lease = loop.run(buffer.lease(step=1, version=0, ...))
    loop.stop(buffer.close())
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._lock = threading.Lock()
        """Held for a moment, to pass something to the loop or to end that for ever."""
        self._is_ending = False

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the loop and waits for its result."""
        future = self._start(coroutine)
        try:
            return future.result()
        except CancelledError:
            raise LoopClosedError("the event loop was closed during this call") from None
        except BaseException:  # Ctrl-C in the waiting thread must not leave the coroutine behind
            future.cancel()
            raise

    @contextmanager
    def running(self, coroutine: Coroutine[Any, Any, object]) -> Iterator[None]:
        """Runs a coroutine in the loop until the block ends, which cancels it."""
        future = self._start(coroutine)
        try:
            yield
        finally:
            future.cancel()

    def stop(self, *closing: Coroutine[Any, Any, object]) -> None:
        """Runs `closing`, cancels all other coroutines, then ends the loop and its thread.

        Pending `run` calls of other threads raise LoopClosedError. Stopping again does nothing.
        """
        if self._is_ending:
            for coroutine in closing:
                coroutine.close()
            return
        for coroutine in closing:
            self.run(coroutine)
        with self._lock:
            # What comes later is refused: a loop that has ended would let it wait for ever.
            self._is_ending = True
            cancelling = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
        cancelling.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if not self._is_ending:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise LoopClosedError("the event loop was closed before this call")


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
