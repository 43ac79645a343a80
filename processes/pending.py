"""Results that another process, or a thread, is still computing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Pending(Protocol[T]):
    """Ray's reference to a result, with the result's type, which Ray does not state.

    Its future raises the errors of the other process.
    """

    def future(self) -> Future[T]: ...


async def value(pending: Pending[T]) -> T:
    """Wait for the result. Raises the errors of the other process."""
    return await asyncio.wrap_future(pending.future())


def in_thread(call: Callable[..., T], *args: Any) -> asyncio.Future[T]:
    """`in_background` for an event loop."""
    return asyncio.wrap_future(in_background(call, *args))


def in_background(call: Callable[..., T], *args: Any) -> Future[T]:
    """The result of a call that may block, in a thread for which the end of a run does not wait."""
    done = Future[T]()
    done.set_running_or_notify_cancel()  # else a waiter that is cancelled would cancel it

    def work() -> None:
        try:
            done.set_result(call(*args))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return done
