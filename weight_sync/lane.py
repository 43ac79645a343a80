"""A daemon thread that carries out one call after the other, for an event loop to await."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class Lane:
    """Unlike a ThreadPoolExecutor's, its thread never holds up the end of the process."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put(partial(_carry_out, future, call))
        return future

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # what it holds must not live on while the lane waits

    def close(self, timeout_s: float) -> None:
        """End the thread after the calls so far; if they take longer, it is left behind."""
        self._calls.put(None)
        self._thread.join(timeout_s)


def _carry_out(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
        del future, call  # the error's traceback holds this frame: they would keep each other alive
