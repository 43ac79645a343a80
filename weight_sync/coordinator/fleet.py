"""The receivers of a run as the coordinator sees them: which are registered, and which answer."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from weight_sync.layout import Transfer
from weight_sync.receiver.client import ReceiverClient, ReceiverStatus
from weight_sync.timeouts import Timeouts
from weight_sync.types import VersionBoard, WeightSyncError

T = TypeVar("T")

MAX_MISSES = 2
"""Status requests in a row that a receiver may leave unanswered before it is excluded."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Member:
    """A receiver that answered just now."""

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
    """Receivers by name. Used in one event loop."""

    def __init__(self, board: VersionBoard, timeouts: Timeouts, key: str) -> None:
        self._board = board
        self._timeouts = timeouts
        self._key = key
        self._clients: dict[str, ReceiverClient] = {}
        self._silent: WeakSet[ReceiverClient] = WeakSet()
        """Gave no answer the last time; only `watch_silent` goes on asking them."""
        self._retired: list[ReceiverClient] = []
        """No longer registered, but a request may still be under way."""
        self._under_way: Counter[ReceiverClient] = Counter()
        self._reported_failures: WeakKeyDictionary[ReceiverClient, set[str]] = WeakKeyDictionary()
        """Events reported for a receiver since it was last healthy."""

    async def registered(self) -> list[ReceiverClient]:
        """In the order of their names, which is that of the chain."""
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
        done = [client for client in self._retired if not self._under_way[client]]
        for client in done:
            self._retired.remove(client)
            del self._under_way[client]
            await client.close()

    # Which of them answer -------------------------------------------------------------------------

    async def members(self, clients: Iterable[ReceiverClient]) -> list[Member]:
        """Those that answer, without asking the ones that did not the last time."""
        return await self._answering(client for client in clients if client not in self._silent)

    async def watch_silent(self, every_s: float) -> None:
        """Never returns. Notices when a silent receiver answers again."""
        while True:
            await asyncio.sleep(every_s)
            for member in await self._answering(set(self._silent) & set(self._clients.values())):
                await self.report("came_back", member.name, "it answers again")

    async def _answering(self, clients: Iterable[ReceiverClient]) -> list[Member]:
        asked = list(clients)
        answers = await asyncio.gather(*map(self._look, asked))
        members = []
        for client, answer in zip(asked, answers, strict=True):
            if isinstance(answer, WeightSyncError):
                await self._exclude(client, answer)
            else:
                self._silent.discard(client)
                members.append(Member(client=client, status=answer))
        return members

    async def _look(self, client: ReceiverClient) -> ReceiverStatus | WeightSyncError:
        """Its status, or the error. A status takes no work, so its timeout is short."""
        self._under_way[client] += 1
        try:
            return await client.status(timeout_s=self._timeouts.status_s)
        except WeightSyncError as error:
            return error
        finally:
            self._under_way[client] -= 1

    async def _exclude(self, client: ReceiverClient, error: WeightSyncError) -> None:
        """Reported once, until it answers again."""
        if client not in self._silent:
            self._silent.add(client)
            await self.report("excluded", client.name, str(error))

    # Requests to them -----------------------------------------------------------------------------

    async def call(self, client: ReceiverClient, request: Coroutine[Any, Any, T]) -> T:
        """Await the result of a long request for as long as `client` answers status requests.

        Raises the request's own errors. After MAX_MISSES unanswered status requests it excludes the
        client and raises their WeightSyncError.
        """
        # A stopped process, or a lost machine, keeps its connections open. Only the status requests
        # distinguish it from one that is working.
        task = asyncio.ensure_future(request)
        self._under_way[client] += 1
        num_missed = 0
        try:
            while True:
                if not num_missed:
                    await asyncio.wait([task], timeout=self._timeouts.status_s)
                looking = None if task.done() else await self._look(client)
                if task.done():
                    return task.result()
                num_missed = num_missed + 1 if isinstance(looking, WeightSyncError) else 0
                if isinstance(looking, WeightSyncError) and num_missed == MAX_MISSES:
                    await self._exclude(client, looking)
                    raise looking
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._under_way[client] -= 1

    async def ask(
        self,
        clients: Iterable[ReceiverClient],
        question: Callable[[ReceiverClient], Awaitable[T]],
        event: str,
    ) -> dict[ReceiverClient, T]:
        """The answers of all that gave one; a refusal is reported as a failure named `event`."""
        asked = list(clients)
        answers = await asyncio.gather(*map(question, asked), return_exceptions=True)
        given: dict[ReceiverClient, T] = {}
        for client, answer in zip(asked, answers, strict=True):
            if isinstance(answer, WeightSyncError):
                await self.report_failure(client, event, str(answer))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                given[client] = answer
        return given

    # What happened to them -----------------------------------------------------------------------

    async def report_failure(self, client: ReceiverClient, event: str, detail: str) -> None:
        """Report an event once, however often it recurs, until `mark_healthy`."""
        reported = self._reported_failures.setdefault(client, set())
        # The exclusion of a silent receiver has been reported already.
        if event not in reported and client not in self._silent:
            reported.add(event)
            await self.report(event, client.name, detail)

    def mark_healthy(self, client: ReceiverClient) -> None:
        self._reported_failures.pop(client, None)

    async def report(self, event: str, who: str | Collection[str], detail: str) -> None:
        """Write a `weights_event` record."""
        name = who if isinstance(who, str) else ", ".join(sorted(who))
        record = {"event": event, "who": name, "detail": detail}
        await self._board.append_metrics(record, "weights_event")

    async def close(self) -> None:
        for client in (*self._clients.values(), *self._retired):
            await client.close()
