"""The receivers of a run as the coordinator sees them.

Which are registered, which respond, which have released the available version, and which are left
alone for a while because they keep failing.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from weight_sync.receiver.client import ReceiverClient, ReceiverStatus
from weight_sync.timeouts import Timeouts
from weight_sync.types import Transfer, VersionBoard, WeightSyncError

T = TypeVar("T")

MAX_MISSES = 2
"""Status requests in a row that a receiver may leave unanswered before it is excluded."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Member:
    """A receiver that has just responded."""

    client: ReceiverClient
    status: ReceiverStatus

    @property
    def name(self) -> str:
        return self.client.name

    def has_released(self, version: int) -> bool:
        return self.status.newest is not None and self.status.newest >= version

    def num_placed(self, transfer: Transfer) -> float:
        """Number of the transfer's buckets that it has; infinite if the version is whole."""
        if self.status.layout_digest != transfer.layout_digest:
            return 0
        if transfer.version in self.status.complete:
            return math.inf
        return self.status.received if self.status.receiving == transfer else 0


class Fleet:
    """Receivers by name. Used in one event loop.

    clients = await fleet.registered()
    members = await fleet.members(clients)    # silent ones are reported and left out
    await fleet.call(members[0].client, members[0].client.join(spec, timeout_s=60.0))
    await fleet.release(members[0].client, 7)
    """

    def __init__(self, board: VersionBoard, timeouts: Timeouts, key: str) -> None:
        self._board = board
        self._timeouts = timeouts
        self._key = key
        self._clients: dict[str, ReceiverClient] = {}
        self._silent: WeakSet[ReceiverClient] = WeakSet()
        """Did not respond the last time; only `watch_silent` keeps probing them."""
        self._retired: list[ReceiverClient] = []
        """No longer registered, but a request may still be in flight."""
        self._in_flight: Counter[ReceiverClient] = Counter()
        self._released: WeakKeyDictionary[ReceiverClient, int] = WeakKeyDictionary()
        """The newest version that a receiver is known to have released."""
        self._reported_failures: WeakKeyDictionary[ReceiverClient, set[str]] = WeakKeyDictionary()
        """Events reported for a receiver since it was last healthy."""

    async def registered(self) -> list[ReceiverClient]:
        """All receivers of the board, in the order of their names, which is that of the chain."""
        urls = await self._board.receivers()
        for name, client in list(self._clients.items()):
            if urls.get(name) != client.url:
                self._retired.append(self._clients.pop(name))
                self._silent.discard(client)
                self.mark_healthy(client)
        for name in sorted(urls.keys() - self._clients.keys()):
            self._clients[name] = ReceiverClient(name, urls[name], self._key)
        await self._close_retired()
        return [self._clients[name] for name in sorted(self._clients)]

    async def _close_retired(self) -> None:
        done = [client for client in self._retired if not self._in_flight[client]]
        for client in done:
            self._retired.remove(client)
            del self._in_flight[client]
            await client.close()

    # Which of them respond ------------------------------------------------------------------------

    async def members(self, clients: Iterable[ReceiverClient]) -> list[Member]:
        """Receivers that respond. One that did not the last time is not probed."""
        return await self._answering(client for client in clients if client not in self._silent)

    async def watch_silent(self, every_s: float) -> None:
        """Never returns. Notices when a silent receiver responds again."""
        while True:
            await asyncio.sleep(every_s)
            for member in await self._answering(set(self._silent) & set(self._clients.values())):
                await self.report("came_back", member.name, "it responds again")

    async def _answering(self, clients: Iterable[ReceiverClient]) -> list[Member]:
        probed = list(clients)
        # At once: until the probes start, `registered` may find one replaced, and close its client.
        self._in_flight.update(probed)
        try:
            replies = await asyncio.gather(*map(self._probe, probed))
        finally:
            self._in_flight.subtract(probed)
        members = []
        for client, reply in zip(probed, replies, strict=True):
            if isinstance(reply, WeightSyncError):
                await self._exclude(client, reply)
            else:
                self._silent.discard(client)
                members.append(Member(client=client, status=reply))
        return members

    async def _probe(self, client: ReceiverClient) -> ReceiverStatus | WeightSyncError:
        """Its status, or the error. A status takes no work, so its timeout is short."""
        try:
            return await client.status(timeout_s=self._timeouts.status_s)
        except WeightSyncError as error:
            return error

    async def _exclude(self, client: ReceiverClient, error: WeightSyncError) -> None:
        """Report it once, until it responds again."""
        if client not in self._silent:
            self._silent.add(client)
            if self._clients.get(client.name) is client:  # else another has taken its place
                await self.report("excluded", client.name, str(error))

    # Requests to them -----------------------------------------------------------------------------

    async def call(self, client: ReceiverClient, request: Coroutine[Any, Any, T]) -> T:
        """Await the result of a long request as long as `client` responds to status requests.

        Raises the request's own errors. After MAX_MISSES unanswered status requests it excludes the
        client and raises their WeightSyncError.
        """
        # The connections of a stopped process or a lost machine stay open. Only status requests
        # distinguish it from one that is working.
        task = asyncio.ensure_future(request)
        self._in_flight[client] += 1
        num_missed = 0
        try:
            while True:
                if not num_missed:
                    await asyncio.wait([task], timeout=self._timeouts.status_s)
                status = None if task.done() else await self._probe(client)
                if task.done():
                    return task.result()
                num_missed = num_missed + 1 if isinstance(status, WeightSyncError) else 0
                if isinstance(status, WeightSyncError) and num_missed == MAX_MISSES:
                    await self._exclude(client, status)
                    raise status
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._in_flight[client] -= 1

    async def ask(
        self,
        clients: Iterable[ReceiverClient],
        question: Callable[[ReceiverClient], Awaitable[T]],
        event: str,
    ) -> dict[ReceiverClient, T]:
        """Results by client; a WeightSyncError is reported as a failure named `event` instead."""
        called = list(clients)
        outcomes = await asyncio.gather(*map(question, called), return_exceptions=True)
        results: dict[ReceiverClient, T] = {}
        for client, outcome in zip(called, outcomes, strict=True):
            if isinstance(outcome, WeightSyncError):
                await self.report_failure(client, event, str(outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                results[client] = outcome
        return results

    async def release(self, client: ReceiverClient, version: int) -> bool:
        """Let this receiver's engines take an available version that it has whole.

        Returns False after a failure, which is reported; `CatchUp.tend` tries again.
        """
        try:
            timeout_s = self._timeouts.config.timeout_s
            await self.call(client, client.release(version, timeout_s=timeout_s))
        except WeightSyncError as error:
            await self.report_failure(client, "unreleased", str(error))
            return False
        self.note_released(client, version)
        self.mark_healthy(client)
        return True

    def note_released(self, client: ReceiverClient, version: int) -> None:
        self._released[client] = version

    def has_released(self, client: ReceiverClient, version: int) -> bool:
        """Returns whether it is known to have released this version or a later one."""
        return self._released.get(client, -1) >= version

    # What happened to them -----------------------------------------------------------------------

    async def report_failure(self, client: ReceiverClient, event: str, detail: str) -> None:
        """Report an event only once until `mark_healthy`."""
        reported = self._reported_failures.setdefault(client, set())
        # The exclusion of a silent receiver has been reported already.
        if event not in reported and client not in self._silent:
            reported.add(event)
            await self.report(event, client.name, detail)

    def mark_healthy(self, client: ReceiverClient) -> None:
        self._reported_failures.pop(client, None)

    async def report(self, event: str, who: str, detail: str) -> None:
        """Write a `weights_event` record."""
        record = {"event": event, "who": who, "detail": detail}
        await self._board.append_metrics(record, "weights_event")

    async def close(self) -> None:
        for client in (*self._clients.values(), *self._retired):
            await client.close()


class Backoff:
    """Pauses for keys that failed; the pause doubles with each failure in a row."""

    def __init__(
        self, first_s: float, most_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._clock = clock
        # Weak: a client that is no longer registered need not be removed here.
        self._failures: WeakKeyDictionary[object, tuple[int, float]] = WeakKeyDictionary()
        """Number of failures in a row, and until when to pause."""

    def failed(self, key: object) -> float:
        """Returns the seconds to pause from now on."""
        number, _ = self._failures.get(key, (0, 0.0))
        rest_s = min(self._most_s, self._first_s * 2.0 ** min(number, 60))
        self._failures[key] = number + 1, self._clock() + rest_s
        return rest_s

    def worked(self, key: object) -> None:
        self._failures.pop(key, None)

    def has_failed(self, key: object) -> bool:
        """Returns whether it failed since it last worked."""
        return key in self._failures

    def is_resting(self, key: object) -> bool:
        return key in self._failures and self._clock() < self._failures[key][1]
