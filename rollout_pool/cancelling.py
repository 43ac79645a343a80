"""Cancels tasks reliably, and keeps users' code from ending more than itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")

CANCEL_AGAIN_S = 0.5


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], again_s: float = CANCEL_AGAIN_S) -> None:
    """Cancel `tasks` every `again_s` until all have ended. Ignores what they raise."""
    # Once may not be enough: asyncio.wait_for, which redis-py uses, swallows a cancellation that
    # arrives as it finishes (github.com/python/cpython/issues/86296, fixed in 3.12).
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=again_s)


class BackgroundTasks:
    """Tasks that nobody awaits. They are referenced until they end, as asyncio demands."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait(self, limit_s: float) -> None:
        """Returns once all have ended, or after `limit_s`."""
        if self._tasks:
            await asyncio.wait({*self._tasks}, timeout=limit_s)

    async def end(self) -> None:
        await end_tasks(self._tasks)


@contextlib.contextmanager
def contained(who: str) -> Iterator[None]:
    """Runs a user's code, which `who` names. Raises RuntimeError if it exits or cancels itself."""
    # An exit would end the worker's loop, and a cancellation would look like the end of the run.
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{who} tried to end the process: {error!r}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError(f"{who} cancelled itself") from error


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None, with `work` cancelled, if the client disconnects first."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_wait_gone(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await end_tasks([working, leaving])


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
