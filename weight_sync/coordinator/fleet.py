"""The receivers of a run as the coordinator sees them: who is registered, and who answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from weight_sync.receiver.client import ReceiverClient, ReceiverStatus
from weight_sync.timeouts import Limits
from weight_sync.types import VersionBoard, WeightSyncError

T = TypeVar("T")

MAX_MISSES = 2
"""Signs of life in a row that a receiver may fail to give before nobody waits for it any more."""


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


class Fleet:
    """Receivers by name. Used in one event loop."""

    def __init__(self, board: VersionBoard, limits: Limits, key: str) -> None:
        self._board = board
        self._limits = limits
        self._key = key
        self._clients: dict[str, ReceiverClient] = {}
        self._silent: WeakSet[ReceiverClient] = WeakSet()
        """Who gave no answer the last time; `watch_silent` alone goes on asking them."""
        self._retired: list[ReceiverClient] = []
        """No longer registered, but perhaps with a request under way."""
        self._under_way: Counter[ReceiverClient] = Counter()
        self._troubles: WeakKeyDictionary[ReceiverClient, set[str]] = WeakKeyDictionary()
        """Events that were told and are not over."""

    async def registered(self) -> list[ReceiverClient]:
        """In the order of their names, which is that of the chain."""
        urls = await self._board.receivers()
        for name, client in list(self._clients.items()):
            if urls.get(name) != client.url:
                self._retired.append(self._clients.pop(name))
                self._silent.discard(client)
                self.is_well(client)
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

    # Who is there --------------------------------------------------------------------------------

    async def members(self, clients: Iterable[ReceiverClient]) -> list[Member]:
        """Those that answer, without a wait for who did not the last time."""
        return await self._answering(client for client in clients if client not in self._silent)

    async def watch_silent(self, every_s: float) -> None:
        """Never returns: notices when a member that gave no answer does again."""
        while True:
            await asyncio.sleep(every_s)
            for member in await self._answering(set(self._silent) & set(self._clients.values())):
                await self.tell("came_back", member.name, "it answers again")

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
        """Its status, or why there is none: it takes no work, so a moment is enough."""
        self._under_way[client] += 1
        try:
            return await client.status(timeout_s=self._limits.status_s)
        except WeightSyncError as error:
            return error
        finally:
            self._under_way[client] -= 1

    async def _exclude(self, client: ReceiverClient, error: WeightSyncError) -> None:
        """An event once, until it answers again."""
        if client not in self._silent:
            self._silent.add(client)
            await self.tell("excluded", client.name, str(error))

    # What is asked of them -----------------------------------------------------------------------

    async def call(self, client: ReceiverClient, request: Coroutine[Any, Any, T]) -> T:
        """The outcome of a request that may take long, as long as `client` shows signs of life.

        A process that is stopped, or a machine that is lost, holds its connections open: only this
        tells it from one that works. Raises what the request does, and after MAX_MISSES looks
        without an answer their WeightSyncError; the client is excluded then.
        """
        task = asyncio.ensure_future(request)
        self._under_way[client] += 1
        num_missed = 0
        try:
            while True:
                if not num_missed:
                    await asyncio.wait([task], timeout=self._limits.status_s)
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
        """The answers, asked for all at once; who refuses is in trouble, an `event`."""
        asked = list(clients)
        answers = await asyncio.gather(*map(question, asked), return_exceptions=True)
        given: dict[ReceiverClient, T] = {}
        for client, answer in zip(asked, answers, strict=True):
            if isinstance(answer, WeightSyncError):
                await self.trouble(client, event, str(answer))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                given[client] = answer
        return given

    # What happened to them -----------------------------------------------------------------------

    async def trouble(self, client: ReceiverClient, event: str, detail: str) -> None:
        """An event once, however often it is tried again, until `is_well`.

        Who was excluded has had its event.
        """
        told = self._troubles.setdefault(client, set())
        if event not in told and client not in self._silent:
            told.add(event)
            await self.tell(event, client.name, detail)

    def is_well(self, client: ReceiverClient) -> None:
        self._troubles.pop(client, None)

    async def tell(self, event: str, who: str | Collection[str], detail: str) -> None:
        """Leave a record of what happened to the members."""
        name = who if isinstance(who, str) else ", ".join(sorted(who))
        record = {"event": event, "who": name, "detail": detail}
        await self._board.append_metrics(record, "weights_event")

    async def close(self) -> None:
        for client in (*self._clients.values(), *self._retired):
            await client.close()
