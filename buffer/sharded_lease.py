"""Forms a batch from the groups of several shards, so that every rank gets the same one.

    home     lock the step ──── a record of its batch? ──> who is still held, shard by shard
               │ none
    all      peek: what would each shard give, in the selector's order?
               │ merge: the best `num_groups` of all, so a dry shard's part comes from the others
    each     take: ready -> leased, with a short deadline
               │
    home     record the batch, give the lock back
               │
    each     renew: the whole deadline

No step spans two shards atomically. The lock and what was taken without a record have deadlines of
some seconds, so a former that dies half way leaves nothing behind but groups that return by
themselves.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Mapping, Sequence

from buffer.lease import BatchNotReady, LeaseRequest, new_owner, refusal
from buffer.shard import (
    Candidate,
    Formed,
    HeldReply,
    NotFormed,
    Peek,
    Shard,
    StepRecord,
    TakenReply,
)
from buffer.shards import ShardSet

FORMING_MS = 10_000
"""Time to form a batch in: some round trips. What a dead former took comes back after it."""
_MAX_FRUITLESS = 3
"""Times that all which was chosen may be gone, or damaged, when it is to be taken."""


class ShardedFormer:
    """Forms batches across shards; the first one is home to the record of each step."""

    def __init__(self, shards: ShardSet) -> None:
        self._shards = shards
        self._home = shards.home

    async def form(self, request: LeaseRequest) -> Formed | BatchNotReady:
        token, void_owner = new_owner(), ""
        while True:
            reply = await self._home.lock_step(
                request.step, token, FORMING_MS, lineage=request.lineage, void_owner=void_owner
            )
            if isinstance(reply, StepRecord):
                formed = await self._resume(request, reply)
                if formed is not None:
                    return formed
                void_owner = reply.owner  # none of it is held any more: form a new one
            elif isinstance(reply, NotFormed):
                if reply.word not in ("wait", "busy"):
                    raise refusal(request, reply)
                # Busy: another rank is forming it. Who waits for the lock has a wake stream of its
                # own, or ranks that find no batch would wake each other for ever.
                stream = "forming" if reply.word == "busy" else "batch"
                seen = {self._home.keys.wake(stream): reply.last_wake}
                return BatchNotReady(seen, reply.ready, reply.until_ms)
            else:
                try:
                    outcome = await self._gather(request, token)
                except BaseException:
                    await asyncio.shield(self._home.unlock(token))
                    raise
                if outcome is not None:
                    return outcome

    async def _resume(self, request: LeaseRequest, record: StepRecord) -> Formed | None:
        """The batch of an earlier call, as far as its owner still holds it; None if not at all."""
        replies = await self._shards.holding(
            record.ids, lambda shard, ids: shard.held(record.owner, ids)
        )
        if record.is_done or any(reply.num_consumed for reply in replies):
            raise refusal(request, NotFormed("done"))
        held = frozenset[str]().union(*(reply.ids for reply in replies))
        if not held:
            return None
        arguments = (record.version, record.num_groups, record.num_shares)
        if arguments != (request.version, request.num_groups, request.num_shares):
            raise refusal(
                request,
                NotFormed(
                    "conflict",
                    version=record.version,
                    num_groups=record.num_groups,
                    num_shares=record.num_shares,
                ),
            )
        return Formed(
            owner=record.owner,
            deadline_ms=min(reply.deadline_ms for reply in replies if reply.ids),
            ids=record.ids,
            tokens=record.tokens,
            held=held,
            oldest=record.oldest,
            renumbered=_merged(replies),
        )

    async def _gather(self, request: LeaseRequest, token: str) -> Formed | BatchNotReady | None:
        """Forms the batch under the lock; None if the lock was lost meanwhile."""
        taken: dict[str, int] = {}
        replies: list[TakenReply] = []
        num_fruitless = 0
        while len(taken) < request.num_groups:
            chosen_or_not_ready = await self._choose(request, request.num_groups - len(taken))
            if num_fruitless == _MAX_FRUITLESS and not isinstance(
                chosen_or_not_ready, BatchNotReady
            ):
                # Names in `ready` that are no groups of that shard: look again a little later.
                chosen_or_not_ready = BatchNotReady({}, len(chosen_or_not_ready), FORMING_MS // 10)
            if isinstance(chosen_or_not_ready, BatchNotReady):
                await self._give_back(token, list(taken))
                await self._home.unlock(token)
                return chosen_or_not_ready
            new = await self._take(request, token, chosen_or_not_ready)
            num_fruitless = 0 if any(reply.ids for reply in new) else num_fruitless + 1
            replies += new
            tokens = {i: n for reply in new for i, n in zip(reply.ids, reply.tokens, strict=True)}
            # In the order chosen; a sweep may have dropped some between the peek and the take.
            taken |= {i: tokens[i] for i in chosen_or_not_ready if i in tokens}
        oldest = max((r.oldest for r in replies if r.oldest is not None), default=None)
        is_recorded = await self._home.record(
            step=request.step,
            version=request.version,
            num_groups=request.num_groups,
            num_shares=request.num_shares,
            owner=token,
            ids=list(taken),
            tokens=list(taken.values()),
            oldest=oldest,
            token=token,
        )
        if not is_recorded:
            await self._give_back(token, list(taken))
            return None
        await self._shards.holding(
            taken, lambda shard, ids: shard.renew(token, request.lease_ms, ids)
        )
        return Formed(
            owner=token,
            deadline_ms=min(r.deadline_ms for r in replies if r.ids)
            + request.lease_ms
            - self._short_ms(request),
            ids=tuple(taken),
            tokens=tuple(taken.values()),
            held=frozenset(taken),
            oldest=oldest,
            renumbered=_merged(replies),
        )

    async def _choose(self, request: LeaseRequest, number: int) -> list[str] | BatchNotReady:
        """Ids of the `number` groups that the selector puts first, over all shards."""
        peeks = await self._peek(request, number, [0] * len(self._shards))
        while (missing := number - sum(len(peek.candidates) for peek in peeks)) > 0:
            # So many groups cannot come without this many at one shard: it will tell. Unless some
            # came or went just now: then it is another number that has to be told.
            share, before = -(-missing // len(self._shards)), [peek.ready for peek in peeks]
            peeks = await self._peek(request, number, [ready + share for ready in before])
            if [peek.ready for peek in peeks] == before:
                break
        blocking_version, blocking = min(
            ((peek.blocking_version, peek.blocking) for peek in peeks if peek.blocking),
            default=(0, ""),
        )
        candidates: list[Candidate] = list(heapq.merge(*(peek.candidates for peek in peeks)))
        if len(candidates) >= number and not blocking:
            return [candidate.group_id for candidate in candidates[:number]]
        return BatchNotReady(
            {
                shard.keys.wake("batch"): peek.last_wake
                for shard, peek in zip(self._shards, peeks, strict=True)
            },
            sum(peek.ready for peek in peeks),
            min((peek.until_ms for peek in peeks if peek.until_ms >= 0), default=-1),
            blocking,
            blocking_version,
        )

    async def _peek(self, request: LeaseRequest, limit: int, wanted: Sequence[int]) -> list[Peek]:
        async def peek(shard: Shard, threshold: int) -> Peek:
            while True:
                reply = await shard.peek(request.version, limit, wanted=threshold)
                if reply.word != "again":
                    return reply

        return list(await asyncio.gather(*map(peek, self._shards, wanted)))

    async def _take(
        self, request: LeaseRequest, owner: str, ids: Sequence[str]
    ) -> list[TakenReply]:
        lease_ms = self._short_ms(request)
        return await self._shards.holding(
            ids,
            lambda shard, part: shard.take(request.version, part, owner, lease_ms, request.step),
        )

    async def _give_back(self, owner: str, ids: Sequence[str]) -> None:
        await self._shards.holding(ids, lambda shard, part: shard.nack(owner, "incomplete", part))

    @staticmethod
    def _short_ms(request: LeaseRequest) -> int:
        return min(FORMING_MS, request.lease_ms)


def _merged(replies: Sequence[TakenReply | HeldReply]) -> Mapping[str, tuple[int, ...]]:
    return {i: numbers for reply in replies for i, numbers in reply.renumbered.items()}
