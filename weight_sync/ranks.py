"""All ranks of the trainer as the coordinator on rank 0 sees them: one command, every answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from weight_sync.control import ControlError, ControlGroup, Message
from weight_sync.lane import Lane
from weight_sync.types import WeightSyncError

_ANSWER_S = 5.0
"""For an answer's way back, beyond what the command itself may take."""


class RankError(WeightSyncError):
    """A rank could not carry out a command, and said why."""


class Ranks:
    """Used in one event loop. Commands run one after the other, each on all ranks at once."""

    def __init__(
        self,
        handle: Callable[[Message], Message | None],
        control: ControlGroup | None,
        control_s: float,
    ) -> None:
        """`handle` carries out rank 0's own part; `control` leads to the others, if there are any.

        `control_s`: longest that an idle rank may take to answer.
        """
        self._handle = handle
        self._control = control
        self._control_s = control_s
        self._mine = Lane("weights-sender")
        self._theirs = Lane("weights-control")
        self._is_free = asyncio.Lock()

    async def command(self, message: Message, timeout_s: float) -> list[Message]:
        """The result of each rank, in their order.

        Raises RankError naming the ranks that failed, and ControlError, which is final, if one did
        not answer.
        """
        async with self._is_free:
            mine = self._mine.submit(partial(self._handle, message))
            theirs = self._theirs.submit(partial(self._call, message, timeout_s + _ANSWER_S))
            try:
                async with asyncio.timeout(timeout_s + _ANSWER_S + self._control_s):
                    others = await asyncio.wrap_future(theirs)
                    reply = await asyncio.wrap_future(mine)
            except TimeoutError as error:
                raise ControlError(
                    f"trainer rank 0 did not {message['do']} within {timeout_s:g} s"
                ) from error
        replies = [reply or {"result": {}}, *others]
        if errors := [str(reply["error"]) for reply in replies if "error" in reply]:
            raise RankError("; ".join(errors))
        return [reply["result"] for reply in replies]

    def _call(self, message: Message, timeout_s: float) -> list[Message]:
        return [] if self._control is None else self._control.call(message, timeout_s)

    async def keep_alive(self, every_s: float) -> None:
        """Never returns: tells the other ranks, while they are idle, that this one is there."""
        while True:
            await asyncio.sleep(every_s)
            if not self._is_free.locked():
                await self.command({"do": "noop"}, self._control_s)

    async def close(self, timeout_s: float) -> None:
        """The other ranks stop serving, at the latest when this one's group is gone."""
        try:
            async with asyncio.timeout(timeout_s), self._is_free:
                mine = self._mine.submit(partial(self._handle, {"do": "close"}))
                if self._control is not None:
                    tell = partial(self._control.tell, {"do": "close"})
                    await asyncio.wrap_future(self._theirs.submit(tell))
                await asyncio.wrap_future(mine)
        except (TimeoutError, WeightSyncError):
            pass  # a rank or a receiver is gone or stuck, which can hold up nothing any more
        self._mine.close(0)
        self._theirs.close(0)
