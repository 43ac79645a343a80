"""The type of a result that another process still works on."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol, TypeVar

T = TypeVar("T")


class Pending(Protocol[T]):
    """Ray's reference to a result, with the result's type, which Ray does not state.

    What went wrong in the other process is raised where its future is awaited.
    """

    def future(self) -> Future[T]: ...
