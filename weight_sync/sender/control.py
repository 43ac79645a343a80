"""Commands from the coordinator on rank 0 to all trainer ranks, independent of training.

    command({"do": "send", ...}) ──┬──► rank 0  handle ──────────► {...} ──┐
                                   ├──► rank 1  serve: handle ──► {...} ──┼──► [{...}, {...}, {...}]
                                   └──► rank 2  serve: handle ──► {...} ──┘

Commands have their own gloo group; a message is JSON, sent as its length and its bytes. Any failure
of the group is final: a rank that is dead or does not respond cannot train either.
"""

# Not through the rendezvous store, though every rank is connected to it: a store does not notice
# that a client has died, while the peers of a gloo group notice at once.

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store

from weight_sync.group import gloo_group
from weight_sync.group_thread import SerialThread
from weight_sync.types import WeightSyncError

Message = dict[str, Any]
"""JSON."""

_MAX_MESSAGE_BYTES = 2**30
_REPLY_S = 5.0
"""Added to a command's own timeout, for the reply's transfer."""


class ControlError(WeightSyncError):
    """A rank of the trainer is gone or did not reply in time; names it."""


class RankError(WeightSyncError):
    """A rank failed to carry out a command; names the reason."""


class RankControl:
    """Rank 0's control of all trainer ranks, itself included. Used in one event loop.

    Commands run one after the other, each on all ranks at once.
    """

    def __init__(
        self,
        handle: Callable[[Message], Message | None],
        control: ControlGroup,
        control_s: float,
    ) -> None:
        """`handle` carries out rank 0's own part; `control` reaches the other ranks.

        `control_s`: longest time that an idle rank may take to reply.
        """
        self._handle = handle
        self._control = control
        self._control_s = control_s
        self._mine = SerialThread("weights-sender")
        self._theirs = SerialThread("weights-control")
        self._is_free = asyncio.Lock()

    async def command(self, message: Message, timeout_s: float) -> list[Message]:
        """The result of each rank, in rank order.

        Raises RankError naming the ranks that failed. Raises ControlError, which is final, if one
        did not reply.
        """
        async with self._is_free:
            mine = self._mine.submit(partial(self._handle, message))
            theirs = self._theirs.submit(partial(self._control.call, message, timeout_s + _REPLY_S))
            try:
                async with asyncio.timeout(timeout_s + _REPLY_S + self._control_s):
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

    async def keep_alive(self, every_s: float) -> None:
        """Never returns. Shows idle ranks that this one is alive."""
        while True:
            await asyncio.sleep(every_s)
            if not self._is_free.locked():
                await self.command({"do": "noop"}, self._control_s)

    async def close(self, timeout_s: float) -> None:
        """Stop the other ranks' `serve`, at the latest when this rank's group is gone."""
        try:
            async with asyncio.timeout(timeout_s), self._is_free:
                mine = self._mine.submit(partial(self._handle, {"do": "close"}))
                broadcast = partial(self._control.broadcast, {"do": "close"})
                await asyncio.wrap_future(self._theirs.submit(broadcast))
                await asyncio.wrap_future(mine)
        except (TimeoutError, WeightSyncError):
            pass  # a rank or a receiver is gone or stuck, and must not delay the end
        finally:
            self._mine.close(0)
            self._theirs.close(0)


class ControlGroup:
    """One rank's end of the group. Not thread-safe: each thread needs a group of its own."""

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        rank: int,
        num_ranks: int,
        address: str,
        timeout_s: float,
    ) -> None:
        """Meet the other ranks in `store`, whose keys under `name` belong to this group alone.

        `address`: this machine's address for the other ranks. `timeout_s` bounds the rendezvous and
        the silence of a rank. Raises ControlError.
        """
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._group: ProcessGroup | None = None
        if num_ranks == 1:
            return  # there is no rank to send to
        try:
            self._group = gloo_group(PrefixStore(name, store), rank, num_ranks, address, timeout_s)
        except RuntimeError as error:
            raise ControlError(
                f"the {num_ranks} trainer ranks did not meet within {timeout_s:g} s: {error}"
            ) from error

    # Rank 0 --------------------------------------------------------------------------------------

    def broadcast(self, message: Message) -> None:
        """Send `message` to all other ranks, which get it from `receive`."""
        payload = _encode(message)
        for peer in range(1, self._num_ranks):
            self._send_to(peer, payload, self._timeout_s)

    def call(self, message: Message, timeout_s: float) -> list[Message]:
        """Replies of the other ranks' `serve` handlers, in rank order."""
        self.broadcast(message)
        deadline = time.monotonic() + timeout_s
        return [
            self._receive_from(peer, max(0.001, deadline - time.monotonic()))
            for peer in range(1, self._num_ranks)
        ]

    # The others ----------------------------------------------------------------------------------

    def receive(self) -> Message:
        """The next message of rank 0."""
        return self._receive_from(0, self._timeout_s)

    def serve(self, handle: Callable[[Message], Message | None]) -> None:
        """Reply to rank 0's calls until `handle` returns None, which gets no reply.

        Raises ControlError if rank 0 does not call within `timeout_s`.
        """
        while (reply := handle(self.receive())) is not None:
            self._send_to(0, _encode(reply), self._timeout_s)

    # Both ----------------------------------------------------------------------------------------

    def _send_to(self, peer: int, payload: Tensor, timeout_s: float) -> None:
        group = self._open
        length = torch.tensor([payload.numel()], dtype=torch.int64)
        try:
            # Both sends start before the first wait, so a message costs one round trip.
            works = [group.send([part], peer, 0) for part in (length, payload)]
            for work in works:
                work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise self._failure("sending to", peer, timeout_s) from error

    def _receive_from(self, peer: int, timeout_s: float) -> Message:
        group = self._open
        limit = timedelta(seconds=timeout_s)
        length = torch.empty(1, dtype=torch.int64)
        try:
            group.recv([length], peer, 0).wait(limit)
            num_bytes = int(length)
            if not 0 < num_bytes <= _MAX_MESSAGE_BYTES:
                raise ControlError(f"trainer rank {peer} announced a message of {num_bytes} bytes")
            payload = torch.empty(num_bytes, dtype=torch.uint8)
            group.recv([payload], peer, 0).wait(limit)
        except ControlError:
            raise
        except RuntimeError as error:
            raise self._failure("receiving from", peer, timeout_s) from error
        message: Message = json.loads(payload.numpy().tobytes())
        return message

    @property
    def _open(self) -> ProcessGroup:
        if self._group is None:
            raise ControlError("the control group of the trainer ranks was closed")
        return self._group

    def _failure(self, doing: str, peer: int, timeout_s: float) -> ControlError:
        return ControlError(
            f"trainer rank {self._rank}, {doing} rank {peer}: it is gone, or was silent for "
            f"{timeout_s:g} s"
        )

    def close(self) -> None:
        """End the other ranks' waits with an error. Not to be called while this rank waits."""
        self._group = None  # gloo closes its sockets with the last reference


def _encode(message: Message) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
