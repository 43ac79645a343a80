"""Several complete buffers, each under its own hash tag, used as one.

The verbs come from ReplayBuffer, along the routes that they carry there; this file has those that
need more. The first shard is the home shard: it records the groups of each step's batch, and
changes that must hold in all shards are written to it last. A batch is formed like this:

    home     lock the step ──── a record of its batch? ──> what is still leased, shard by shard
               │ none
    all      peek: what would each shard give, in the selector's order?
               │ merge: the best `num_groups` of all, so a dry shard's part comes from the others
    each     take: ready -> leased, with a short deadline
               │
    home     record the batch, give the lock back
               │
    each     renew: the whole deadline

Nothing is atomic across shards. The lock, and groups taken but not yet recorded, expire after some
seconds, so a rank that dies while forming a batch leaves only groups that return by themselves.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from itertools import chain
from typing import Any, TypeVar
from zlib import crc32

from msgspec.structs import astuple

from buffer.lease import BatchNotReady, Formed, LeaseRequest, Paused, Refused, Renumbered
from buffer.redis.client import BufferRedis
from buffer.redis.replies import Reply
from buffer.redis.scripts import BOUND
from buffer.redis.wakeups import Wake
from buffer.replay_buffer import ReplayBuffer, in_shard
from buffer.results import Lease, NewGroup, Reconciled, TaskProgress
from buffer.shard_routes import ROUTES, Route, id_in_shard, ids_by_shard
from buffer.types import TrajectoryGroup
from configs.schema import BufferConfig

FORMING_MS = 10_000
"""Time limit for forming a batch (some round trips). Groups taken by a dead rank return then."""
_MAX_FRUITLESS = 3
"""Attempts in a row in which none of the chosen groups could be taken."""
T = TypeVar("T")


class Record(Reply, tag="batch"):
    """The home shard's record of a step's batch."""

    lease_token: str
    version: int
    num_groups: int
    num_shares: int
    ids: tuple[str, ...]
    costs: tuple[int, ...]
    mask_below_version: int | None
    is_done: bool


class Locked(Reply, tag="locked"):
    """The caller has the lock now."""


class Peek(Reply):
    """The groups that a shard could contribute to a batch."""

    candidates: tuple[tuple[float, str], ...]
    """Key and id, the smallest key first; keys are comparable across shards."""
    ready: int
    seen: Wake
    until_ms: int
    blocking: str
    blocking_version: int


class Taken(Reply):
    """Groups of one shard that were just leased."""

    ids: tuple[str, ...]
    """The requested groups that were ready and fresh, in the requested order."""
    costs: tuple[int, ...]
    mask_below_version: int | None
    renumbered: Renumbered


class StillLeased(Reply):
    """The part of a batch that is still leased in one shard."""

    ids: frozenset[str]
    num_consumed: int
    """If it is not 0, the step is done."""
    renumbered: Renumbered


class Shard(ReplayBuffer):
    """One shard, with the verbs that form a batch from several."""

    async def lock_step(
        self, request: LeaseRequest, token: str, lock_ms: int, void_token: str | None = None
    ) -> Record | BatchNotReady | Locked:
        """At the home shard: the record of the step's batch, or the lock to form one.

        `void_token` is the token of a recorded batch of which nothing is leased any more.
        """
        reply: Record | BatchNotReady | Locked | Refused | Paused = await self._scripts.run(
            "shards/lock_step",
            Record | BatchNotReady | Locked | Refused | Paused,
            lease=request,
            token=token,
            lock_ms=lock_ms,
            void_token=void_token,
        )
        if isinstance(reply, Refused | Paused):
            raise reply.error(request)
        return reply

    async def unlock(self, token: str) -> bool:
        """Releases the lock without a batch; False if it was not held."""
        return await self._scripts.run("shards/unlock_step", bool, token=token)

    async def peek(self, version: int, limit: int, wanted: int = 0) -> Peek:
        """At most `limit` groups that this shard could contribute to a batch at `version`.

        With `wanted`, a push signals wake:batch once so many groups are ready here.
        """
        while True:
            peek: Peek | None = await self._scripts.run(
                "shards/peek_groups",
                Peek | None,
                version=version,
                limit=limit,
                bound=BOUND,
                wanted=wanted,
            )
            if peek is not None:
                return peek

    async def take(
        self, request: LeaseRequest, token: str, lease_ms: int, ids: Sequence[str]
    ) -> Taken:
        """Leases the groups that are ready and fresh, in one call however many there are."""
        return await self._scripts.run(
            "shards/take_groups",
            Taken,
            lease=request,
            lease_token=token,
            lease_ms=lease_ms,
            group_ids=ids,
        )

    async def record(self, request: LeaseRequest, formed: Formed) -> bool:
        """At the home shard: records the step's batch and releases the lock.

        False if the lock was lost, so another rank forms the batch: return the groups.
        """
        return await self._scripts.run(
            "shards/record_batch",
            bool,
            lease=request,
            lease_token=formed.lease_token,
            ids=formed.ids,
            costs=formed.costs,
            mask_below_version=formed.mask_below_version,
        )

    async def still_leased(self, token: str, ids: Sequence[str]) -> StillLeased:
        """Which of these groups are still leased with the token, and how many are consumed."""
        return await self._scripts.run(
            "shards/list_held", StillLeased, lease_token=token, group_ids=ids
        )

    async def mark_done(self, lease: Lease) -> None:
        """At the home shard: marks the step as done, even if it has none of the step's groups."""
        await self._scripts.run(
            "trainer/consume_groups",
            int,
            lease_token=lease.lease_token,
            step=lease.step,
            version=lease.version,
            group_ids=[],
        )


class ShardedReplayBuffer(ReplayBuffer):
    """ReplayBuffer over several shards, each with its quota of every limit.

    buffer = await connect_buffer(url, run, BufferConfig(shards=3))
    admission = await buffer.admit("group-1", timeout_s=60)         # group-1@2: shard 2 had room
    lease = await buffer.lease(step=1, version=0, ...)              # the best groups of all three

    It is a client of the home shard itself: what it inherits without a route happens there.
    """

    def __init__(self, redis: BufferRedis, run: str, settings: BufferConfig) -> None:
        """As ReplayBuffer's. `settings.shards` is the number that the run was opened with."""
        super().__init__(redis, run, settings)
        self.shards = tuple(Shard(redis, run, settings, k) for k in range(settings.shards))
        self.num_shards = len(self.shards)
        self._home = self.shards[0]
        self._home_last = (*self.shards[1:], self._home)
        """Order for writes that must hold in all shards before the home shard has them."""

    async def _holding(
        self, group_ids: Iterable[str], call: Callable[[Shard, list[str]], Awaitable[T]]
    ) -> list[T]:
        """Calls each shard that holds any of these groups with its own."""
        parts = ids_by_shard(group_ids, self.num_shards)
        return list(await asyncio.gather(*(call(self.shards[k], ids) for k, ids in parts.items())))

    async def create(self, values: Mapping[str, str | int], replaced: Collection[str]) -> None:
        for shard in self._home_last:  # once the home shard has settings, all shards are open
            await shard.create(values, replaced)

    async def change_settings(
        self, values: Mapping[str, str | int], expected: Mapping[str, str] | None = None
    ) -> bool:
        # The home shard decides: without its consent no other is changed. One that breaks off in
        # between is made whole by a repeat.
        for shard in self._home_last if expected is None else self.shards:
            own = in_shard(values, shard.keys.shard, self.num_shards)
            if not await shard.change_settings(own, expected if shard is self._home else None):
                return False
        return True

    def _places(
        self, groups: Sequence[NewGroup]
    ) -> Iterable[tuple[ReplayBuffer, Sequence[NewGroup]]]:
        # The first shard to try: the same for a retry, evenly spread over many ids.
        first, number = crc32(groups[0].group_id.encode()), self.num_shards
        for k in (k % number for k in range(first, first + number)):
            own = [one._replace(group_id=id_in_shard(one.group_id, k, number)) for one in groups]
            yield self.shards[k], own

    async def open_groups(self, batch: Formed, group_ids: Sequence[str]) -> list[TrajectoryGroup]:
        opened = await self._holding(group_ids, lambda shard, ids: shard.open_groups(batch, ids))
        groups = {group.group_id: group for group in chain.from_iterable(opened)}
        return [groups[i] for i in group_ids if i in groups]

    async def _form(self, request: LeaseRequest, token: str) -> Formed | BatchNotReady:
        void_token = None
        while True:
            reply = await self._home.lock_step(request, token, FORMING_MS, void_token)
            if isinstance(reply, BatchNotReady):
                return reply
            if isinstance(reply, Record):
                formed = await self._resume(request, reply)
                if formed is not None:
                    return formed
                void_token = reply.lease_token  # nothing of it is leased any more: form a new one
                continue
            try:
                outcome = await self._gather(request, token)
            except BaseException:
                await asyncio.shield(self._home.unlock(token))
                raise
            if outcome is not None:
                return outcome

    async def _resume(self, request: LeaseRequest, record: Record) -> Formed | None:
        """The recorded batch with the groups that are still leased; None if none is."""
        replies = await self._holding(
            record.ids, lambda shard, ids: shard.still_leased(record.lease_token, ids)
        )
        if record.is_done or any(reply.num_consumed for reply in replies):
            raise Refused("done").error(request)
        found = frozenset[str]().union(*(reply.ids for reply in replies))
        if not found:
            return None
        arguments = (record.version, record.num_groups, record.num_shares)
        if arguments != (request.version, request.num_groups, request.num_shares):
            raise Refused("conflict", *arguments).error(request)
        return Formed(
            lease_token=record.lease_token,
            ids=record.ids,
            costs=record.costs,
            still_leased=found,
            mask_below_version=record.mask_below_version,
            renumbered=tuple(chain.from_iterable(reply.renumbered for reply in replies)),
        )

    async def _gather(self, request: LeaseRequest, token: str) -> Formed | BatchNotReady | None:
        """Forms the batch under the lock; None if the lock was lost."""
        taken: dict[str, int] = {}
        replies: list[Taken] = []
        num_fruitless = 0
        short_ms = min(FORMING_MS, self._lease_ms)
        while len(taken) < request.enough:
            chosen = await self._choose(request, num_taken=len(taken))
            if num_fruitless == _MAX_FRUITLESS and not isinstance(chosen, BatchNotReady):
                # `ready` lists ids that are not groups of that shard: retry a little later.
                chosen = BatchNotReady((), len(chosen), FORMING_MS // 10)
            if isinstance(chosen, BatchNotReady):
                await self._give_back(token, taken)
                await self._home.unlock(token)
                return chosen
            new = await self._holding(
                chosen, lambda shard, ids: shard.take(request, token, short_ms, ids)
            )
            num_fruitless = 0 if any(reply.ids for reply in new) else num_fruitless + 1
            replies += new
            costs = {i: n for reply in new for i, n in zip(reply.ids, reply.costs, strict=True)}
            # In the order chosen; a sweep may have dropped some between the peek and the take.
            taken |= {i: costs[i] for i in chosen if i in costs}
        masked = [r.mask_below_version for r in replies if r.mask_below_version is not None]
        formed = Formed(
            lease_token=token,
            ids=tuple(taken),
            costs=tuple(taken.values()),
            still_leased=frozenset(taken),
            mask_below_version=max(masked, default=None),
            renumbered=tuple(chain.from_iterable(reply.renumbered for reply in replies)),
        )
        if not await self._home.record(request, formed):
            await self._give_back(token, taken)
            return None
        await self.renew(formed.lease(request, ()))
        return formed

    async def _give_back(self, token: str, group_ids: Iterable[str]) -> None:
        """Returns groups of a batch that is not formed after all."""
        await self._holding(group_ids, lambda shard, ids: shard.give_back(token, ids, "incomplete"))

    async def _choose(self, request: LeaseRequest, num_taken: int) -> list[str] | BatchNotReady:
        """Ids of the groups that the selector puts first over all shards, to fill the batch or, if
        there are fewer, to reach what suffices."""
        number, enough = request.num_groups - num_taken, request.enough - num_taken
        peeks = await self._peek(request, number, [0] * self.num_shards)
        while (missing := enough - sum(len(peek.candidates) for peek in peeks)) > 0:
            # If `missing` groups arrive, at least one shard gets `part` of them and signals. If
            # the numbers changed meanwhile, the thresholds must be set again.
            part, before = -(-missing // self.num_shards), [peek.ready for peek in peeks]
            peeks = await self._peek(request, number, [ready + part for ready in before])
            if [peek.ready for peek in peeks] == before:
                break
        blocking_version, blocking = min(
            ((peek.blocking_version, peek.blocking) for peek in peeks if peek.blocking),
            default=(0, ""),
        )
        candidates = [group_id for _, group_id in heapq.merge(*(p.candidates for p in peeks))]
        if len(candidates) >= enough and not blocking:
            return candidates[:number]
        return BatchNotReady(
            tuple(peek.seen for peek in peeks),
            sum(peek.ready for peek in peeks),
            min((peek.until_ms for peek in peeks if peek.until_ms >= 0), default=-1),
            blocking,
            blocking_version,
        )

    async def _peek(self, request: LeaseRequest, limit: int, wanted: Sequence[int]) -> list[Peek]:
        return await asyncio.gather(
            *(
                shard.peek(request.version, limit, threshold)
                for shard, threshold in zip(self.shards, wanted, strict=True)
            )
        )

    async def consume(self, lease: Lease, group_ids: Collection[str]) -> int:
        total = sum(await self._holding(group_ids, lambda shard, ids: shard.consume(lease, ids)))
        if total:
            await self._home.mark_done(lease)
        return total

    async def task_progress(self, step: int) -> TaskProgress:
        parts = await asyncio.gather(*(shard.task_progress(step) for shard in self.shards))
        positions = dict[int, int]()
        for part in parts:
            for worker, position in part.positions.items():
                positions[worker] = max(position, positions.get(worker, 0))
        return TaskProgress(
            positions=positions,
            untrained=tuple(prompt for part in parts for prompt in part.untrained),
        )

    async def restore_progress(self, progress: TaskProgress) -> None:
        for k, shard in enumerate(self.shards):
            untrained = progress.untrained[k :: self.num_shards]
            await shard.restore_progress(replace(progress, untrained=untrained))

    async def begin_reconcile(
        self, lineage: str, step: int, version: int, resume_version: int, durable_step: int
    ) -> None:
        # The shards' trainer versions differ if a trainer died while it announced one. Call the
        # shard with the newest first, which may refuse the new version.
        versions = await asyncio.gather(
            *(shard.setting("trainer_version") for shard in self.shards)
        )
        for k in sorted(range(self.num_shards), key=lambda k: -(versions[k] or 0)):
            shard = self.shards[k]
            await shard.begin_reconcile(lineage, step, version, resume_version, durable_step)

    async def finish_reconcile(
        self, lineage: str, consumed_group_ids: Collection[str]
    ) -> Reconciled:
        consumed = ids_by_shard(consumed_group_ids, self.num_shards)
        parts = [
            await shard.finish_reconcile(lineage, consumed.get(shard.keys.shard, ()))
            for shard in self._home_last
        ]
        self._lineage = lineage
        return Reconciled(*map(sum, zip(*map(astuple, parts), strict=True)))

    async def end_waits(self) -> None:
        await super().end_waits()
        for shard in self.shards:
            await shard.end_waits()


def _along(verb: str, route: Route) -> Callable[..., Awaitable[Any]]:
    async def call(self: ShardedReplayBuffer, *given: Any, **options: Any) -> Any:
        return await route.send(self.shards, verb, given, options)

    return wraps(getattr(ReplayBuffer, verb))(call)


for _verb, _route in ROUTES.items():
    setattr(ShardedReplayBuffer, _verb, _along(_verb, _route))
