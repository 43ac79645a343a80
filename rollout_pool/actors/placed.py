"""The base of the pool's actors: where one runs, whether it was told to end, whether it died."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from concurrent.futures import Future, InvalidStateError
from typing import Self

import ray
from ray.util.placement_group import PlacementGroup, get_current_placement_group

from configs.environment import PROCESS_VARIABLE
from host.network import is_loopback


class PlacedActor:
    """An actor that Ray starts again when its process dies, on another node if it must.

    SIGTERM, which the processes of a machine get before it is taken away, does not end it, as Ray
    would: the controller lets it leave. A second one ends it at once.
    """

    _notice: Future[None]

    def __new__(cls, *_: object, **__: object) -> Self:
        # Ray calls this in the process's main thread, the only one that may set a handler, and has
        # set its own before; `__init__` and all else run in the thread of the event loop.
        self = super().__new__(cls)
        self._notice = Future()
        self._notice.set_running_or_notify_cancel()  # else a call that is cancelled cancels it

        def note(number: int, _: object) -> None:
            signal.signal(number, signal.SIG_DFL)
            self._note_notice()

        if PROCESS_VARIABLE in os.environ:  # `ray.remote` makes an instance in the controller, too
            signal.signal(signal.SIGTERM, note)
        return self

    def _note_notice(self) -> None:
        with contextlib.suppress(InvalidStateError):  # it is not the first
            self._notice.set_result(None)

    async def notify(self) -> None:
        """Does what SIGTERM does."""
        self._note_notice()

    async def wait_notice(self) -> None:
        """Returns once this process was told to end."""
        await asyncio.wrap_future(self._notice)

    async def group(self) -> PlacementGroup:
        """Its place."""
        group = get_current_placement_group()
        assert group is not None
        return group

    async def node(self) -> str:
        """Id of the node where it runs."""
        return str(ray.get_runtime_context().get_node_id())

    async def wait_lost(self) -> None:
        """Never returns; Ray raises at the reference when this process has died."""
        await asyncio.Event().wait()

    async def pid(self) -> int:
        return os.getpid()


def log_to_stderr() -> None:
    """Standard error goes to the process's log. Silences httpx, which logs every request."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)


def listen_host(host: str) -> str:
    """`host` if it is loopback, else the address of this actor's node."""
    return host if is_loopback(host) else str(ray.util.get_node_ip_address())
