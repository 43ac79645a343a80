"""The type of a result that another process is still computing."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Protocol, TypeVar

T = TypeVar("T")


class Pending(Protocol[T]):
    """Ray's reference to a result, with the result's type, which Ray does not state.

    Its future raises the errors of the other process.
    """

    def future(self) -> Future[T]: ...


async def value(pending: Pending[T]) -> T:
    """Wait for the result. Raises the errors of the other process."""
    return await asyncio.wrap_future(pending.future())
