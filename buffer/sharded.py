"""Several complete buffers, each under its own hash tag, used as one.

With several shards an admitted group's id ends in `@<shard>`, the shard that had room. Any other id
is placed by its hash. Both are pure functions of the id, so every process finds a group without a
lookup. The first shard is the home shard: it records the groups of each step's batch, and changes
that must hold in all shards are written to it last. A batch is formed like this:

    home     lock the step ──── a record of its batch? ──> what is still held, shard by shard
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
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from math import inf
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

from buffer.lease import (
    BatchNotReady,
    Formed,
    LeaseRequest,
    form_in_time,
    new_token,
    renew_until_lost,
)
from buffer.redis.client import BufferRedis
from buffer.redis.keys import check_group_id
from buffer.redis.replies import optional_int, parse_renumbered, readable, texts
from buffer.redis.wakeups import Deadline, WakeStreams
from buffer.replay_buffer import BOUND, ReplayBuffer, check_settings, no_room
from buffer.results import (
    Admission,
    BufferStats,
    Failure,
    GroupEvent,
    Lease,
    PushResult,
    QuarantinedGroup,
    QuarantinedPrompt,
    Reconciled,
    TaskProgress,
)
from buffer.staleness import Leash
from buffer.types import PromptRef, Rerun, TrajectoryGroup
from configs.schema import BufferConfig

FORMING_MS = 10_000
"""Time limit for forming a batch (some round trips). Groups taken by a dead rank return then."""
_MAX_FRUITLESS = 3
"""Attempts in a row in which none of the chosen groups could be taken."""
_MARK = "@"

T = TypeVar("T")


def shard_of(group_id: str, num_shards: int) -> int:
    """Index of the shard that holds the group."""
    if num_shards == 1:
        return 0
    _, mark, number = group_id.rpartition(_MARK)
    # A number that another count of shards could have given is an ordinary part of the name.
    if mark and number.isdecimal() and int(number) < num_shards:
        return int(number)
    return crc32(group_id.encode()) % num_shards


def id_in_shard(group_id: str, shard: int, num_shards: int) -> str:
    """The id of a group that is admitted to `shard`.

    Raises ValueError if the id contains '@' already, which would make its shard ambiguous.
    """
    if num_shards == 1:
        return group_id
    if _MARK in group_id:
        raise ValueError(
            f"group_id={group_id!r}: with buffer.shards={num_shards}, ids to admit must not "
            "contain '@' (it marks the shard)"
        )
    return f"{group_id}{_MARK}{shard}"


def ids_by_shard(group_ids: Iterable[str], num_shards: int) -> dict[int, list[str]]:
    """The ids of each shard that has any, in their order."""
    parts: dict[int, list[str]] = {}
    for group_id in group_ids:
        parts.setdefault(shard_of(group_id, num_shards), []).append(group_id)
    return parts


class Record(NamedTuple):
    """The home shard's record of a step's batch."""

    lease_token: str
    version: int
    num_groups: int
    num_shares: int
    ids: tuple[str, ...]
    costs: tuple[int, ...]
    mask_below_version: int | None
    is_done: bool


class Candidate(NamedTuple):
    key: float
    """The smallest comes first; comparable across shards."""
    group_id: str


class Peek(NamedTuple):
    """What a shard could contribute to a batch."""

    candidates: tuple[Candidate, ...]
    ready: int
    last_wake: str
    until_ms: int
    blocking: str
    blocking_version: int


class Taken(NamedTuple):
    """Groups of one shard that were just leased."""

    ids: tuple[str, ...]
    """The requested groups that were ready and fresh, in the requested order."""
    costs: tuple[int, ...]
    deadline_ms: int
    mask_below_version: int | None
    renumbered: Mapping[str, tuple[int, ...]]


class Held(NamedTuple):
    """The part of a batch that is still held in one shard."""

    ids: frozenset[str]
    num_consumed: int
    """If it is not 0, the step is done."""
    deadline_ms: int
    renumbered: Mapping[str, tuple[int, ...]]


class Shard(ReplayBuffer):
    """One shard, with the verbs that form a batch from several."""

    async def lock_step(
        self, request: LeaseRequest, token: str, lock_ms: int, void_token: str = ""
    ) -> Record | BatchNotReady | None:
        """At the home shard: the record of the step's batch. None: the caller has the lock now.

        `void_token` is the token of a recorded batch of which nothing is held any more.
        """
        arguments = (request.step, token, lock_ms, request.lineage, void_token)
        word, *rest = await self._scripts.run("shards/lock_step", *arguments)
        match word.decode():
            case "locked":
                return None
            # busy: another rank is forming it. Waiting for the lock has its own wake stream, or
            # ranks that find no batch would wake each other for ever.
            case "wait":
                return BatchNotReady({self.keys.wake("batch"): rest[0].decode()})
            case "busy":
                seen = {self.keys.wake("forming"): rest[0].decode()}
                return BatchNotReady(seen, until_ms=int(rest[1]))
            case "done":
                raise request.is_consumed()
            case "not_owner":
                raise request.taken_over()
        lease_token, version, num_groups, num_shares, ids, costs, mask_below, is_done = rest
        return Record(
            readable(lease_token),
            int(version),
            int(num_groups),
            int(num_shares),
            texts(ids),
            tuple(map(int, costs)),
            optional_int(mask_below),
            bool(is_done),
        )

    async def unlock(self, token: str) -> bool:
        """Releases the lock without a batch; False if it was not held."""
        return bool(await self._scripts.run("shards/unlock_step", token))

    async def peek(self, version: int, limit: int, wanted: int = 0) -> Peek:
        """At most `limit` groups that this shard could contribute to a batch at `version`.

        With `wanted`, a push signals wake:batch once so many groups are ready here.
        """
        while True:
            reply = await self._scripts.run("shards/peek_groups", version, limit, BOUND, wanted)
            if reply[0] != b"again":
                break
        _, chosen, ready, last_wake, until_ms, blocking, at = reply
        pairs = zip(chosen[::2], chosen[1::2], strict=True)
        candidates = tuple(Candidate(float(key), readable(group_id)) for group_id, key in pairs)
        rest = (last_wake.decode(), int(until_ms), readable(blocking), int(at))
        return Peek(candidates, int(ready), *rest)

    async def take(
        self, request: LeaseRequest, token: str, lease_ms: int, ids: Sequence[str]
    ) -> Taken:
        """Leases the groups that are ready and fresh, in one call however many there are."""
        arguments = (request.version, token, lease_ms, request.step, repr(request.pair_cost))
        reply = await self._scripts.run("shards/take_groups", *arguments, *ids)
        taken, costs, deadline, mask_below, renumbered = reply
        return Taken(
            texts(taken),
            tuple(map(int, costs)),
            int(deadline),
            optional_int(mask_below),
            parse_renumbered(renumbered),
        )

    async def give_back(self, token: str, ids: Sequence[str]) -> None:
        """Returns groups of a batch that is not formed after all."""
        await self._sum("trainer/return_groups", (token, "incomplete"), ids)

    async def record(self, request: LeaseRequest, formed: Formed) -> bool:
        """At the home shard: records the step's batch and releases the lock.

        False if the lock was lost, so another rank forms the batch: return the groups.
        """
        mask_below = formed.mask_below_version
        reply = await self._scripts.run(
            "shards/record_batch",
            request.step,
            request.version,
            request.num_groups,
            request.num_shares,
            formed.lease_token,
            " ".join(formed.ids),
            " ".join(map(str, formed.costs)),
            "" if mask_below is None else mask_below,
            formed.lease_token,
        )
        return bool(reply)

    async def held(self, token: str, ids: Sequence[str]) -> Held:
        """Which of these groups are still leased with the token, and how many are consumed."""
        reply = await self._scripts.run("shards/list_held", token, *ids)
        held, num_consumed, deadline, renumbered = reply
        renumbered = parse_renumbered(renumbered)
        return Held(frozenset(texts(held)), int(num_consumed), int(deadline), renumbered)

    async def mark_done(self, lease: Lease) -> None:
        """At the home shard: marks the step as done, even if it has none of the step's groups."""
        arguments = (lease.lease_token, lease.step, lease.version, "")
        await self._scripts.run("trainer/consume_groups", *arguments)


class ShardedReplayBuffer:
    """The verbs of ReplayBuffer over several shards, each with its quota of every limit."""

    def __init__(self, redis: BufferRedis, run: str, settings: BufferConfig) -> None:
        """As ReplayBuffer's. `settings.shards` is the number that the run was opened with."""
        self.shards = tuple(Shard(redis, run, settings, k) for k in range(settings.shards))
        self._home = self.shards[0]
        self._home_last = (*self.shards[1:], self._home)
        """Order for writes that must hold in all shards before the home shard has them."""
        self._redis = redis
        self._wake = WakeStreams(redis)
        self._lease_ms = int(1000 * settings.lease_timeout_s)
        self._lineage = ""

    def _of(self, group_id: str) -> Shard:
        return self.shards[shard_of(group_id, len(self.shards))]

    async def _each(self, call: Callable[[Shard], Awaitable[T]]) -> list[T]:
        """Replies of all shards, in their order."""
        return list(await asyncio.gather(*map(call, self.shards)))

    async def _holding(
        self, group_ids: Iterable[str], call: Callable[[Shard, list[str]], Awaitable[T]]
    ) -> list[T]:
        """Calls each shard that holds any of these groups with its own."""
        parts = ids_by_shard(group_ids, len(self.shards))
        return list(await asyncio.gather(*(call(self.shards[k], ids) for k, ids in parts.items())))

    async def _leased(self, lease: Lease, call: Callable[[Shard, Lease], Awaitable[T]]) -> list[T]:
        """Calls each shard of a lease with its part."""
        return await self._holding(
            lease.group_ids,
            lambda shard, ids: call(shard, replace(lease, group_ids=tuple(ids), groups=())),
        )

    async def open(
        self,
        settings: BufferConfig,
        groups_per_step: int,
        oversampling: float = 1.0,
        replaced: Collection[str] = (),
        gradient_accumulation_steps: int = 1,
    ) -> None:
        there = await self._home.setting("num_shards")
        check_settings(
            settings, groups_per_step * gradient_accumulation_steps, len(self.shards), there
        )
        for shard in self._home_last:  # once the home shard has settings, all shards are open
            await shard.create(
                settings, groups_per_step, oversampling, replaced, gradient_accumulation_steps
            )

    # Rollout side ----------------------------------------------------------------------------

    async def admit(self, group_id: str, timeout_s: float) -> Admission:
        check_group_id(group_id)
        deadline, num_shards = Deadline(timeout_s), len(self.shards)
        # The first shard to try: the same for a retry, evenly spread over many ids.
        first = crc32(group_id.encode())
        while True:
            seen, in_use, limit = dict[str, str](), 0, 0
            for k in (number % num_shards for number in range(first, first + num_shards)):
                shard = self.shards[k]
                reply = await shard.try_admit(id_in_shard(group_id, k, num_shards))
                if isinstance(reply, Admission):
                    return reply
                seen[shard.keys.wake("room")] = reply.last_wake
                in_use, limit = in_use + reply.in_use, limit + reply.limit
            if not deadline.left_s:
                raise no_room(group_id, timeout_s, in_use, limit)
            await self._wake.wait(seen, deadline.left_s)

    async def begin(self, group_id: str, prompt: PromptRef, worker: int, position: int) -> bool:
        return await self._of(group_id).begin(group_id, prompt, worker, position)

    async def fail(self, group_id: str, prompt: PromptRef, max_failures: int) -> Failure | None:
        return await self._of(group_id).fail(group_id, prompt, max_failures)

    async def reclaim(self, worker: int, *, counts_as_death: bool = True) -> int:
        return sum(
            await self._each(lambda shard: shard.reclaim(worker, counts_as_death=counts_as_death))
        )

    async def renew_credits(self, group_ids: Collection[str]) -> int:
        return sum(await self._holding(group_ids, Shard.renew_credits))

    async def abandon(
        self,
        group_id: str,
        reason: str,
        rerun: Rerun = Rerun.never,
        prompt: PromptRef | None = None,
    ) -> bool:
        return await self._of(group_id).abandon(group_id, reason, rerun, prompt)

    async def push(self, group: TrajectoryGroup, timeout_s: float | None = None) -> PushResult:
        return await self._of(group.group_id).push(group, timeout_s)

    async def flush(self, timeout_s: float) -> bool:
        return all(await self._each(lambda shard: shard.flush(timeout_s)))

    async def take_retry(self, group_id: str | None = None) -> PromptRef | None:
        if group_id is not None:
            return await self._of(group_id).take_retry(group_id)
        for shard in self.shards:
            prompt = await shard.take_retry()
            if prompt is not None:
                return prompt
        return None

    async def keep_tokens(
        self, group_id: str, oldest: int | None, parts: Mapping[str, bytes]
    ) -> bool:
        return await self._of(group_id).keep_tokens(group_id, oldest, parts)

    async def kept_tokens(self, group_id: str, prompt: PromptRef) -> dict[str, bytes]:
        return await self._of(group_id).kept_tokens(group_id, prompt)

    # Trainer side ----------------------------------------------------------------------------

    async def lease(
        self,
        *,
        step: int,
        version: int,
        num_groups: int,
        share: int,
        num_shares: int,
        timeout_s: float,
        min_groups: int | None = None,
        batch_timeout_s: float = inf,
        pair_cost: float = 0.0,
    ) -> Lease:
        enough = num_groups if min_groups is None else min_groups
        request = LeaseRequest(
            step, version, num_groups, num_shares, self._lineage, enough, pair_cost
        )
        request.check(share)
        batch = await form_in_time(
            self._form, request, self._wake, timeout_s=timeout_s, batch_timeout_s=batch_timeout_s
        )
        wanted = batch.share_of(share, num_shares)
        opened = await self._holding(wanted, lambda shard, ids: shard.open_groups(batch, ids))
        groups = {group.group_id: group for group in chain.from_iterable(opened)}
        return batch.lease(request, [groups[i] for i in wanted if i in groups])

    async def _form(self, request: LeaseRequest) -> Formed | BatchNotReady:
        """The step's batch, the same for every rank."""
        token, void_token = new_token(), ""
        while True:
            reply = await self._home.lock_step(request, token, FORMING_MS, void_token)
            if isinstance(reply, BatchNotReady):
                return reply
            if isinstance(reply, Record):
                formed = await self._resume(request, reply)
                if formed is not None:
                    return formed
                void_token = reply.lease_token  # nothing of it is held any more: form a new one
                continue
            try:
                outcome = await self._gather(request, token)
            except BaseException:
                await asyncio.shield(self._home.unlock(token))
                raise
            if outcome is not None:
                return outcome

    async def _resume(self, request: LeaseRequest, record: Record) -> Formed | None:
        """The recorded batch with the groups that are still held; None if none is."""
        replies = await self._holding(
            record.ids, lambda shard, ids: shard.held(record.lease_token, ids)
        )
        if record.is_done or any(reply.num_consumed for reply in replies):
            raise request.is_consumed()
        held = frozenset[str]().union(*(reply.ids for reply in replies))
        if not held:
            return None
        arguments = (record.version, record.num_groups, record.num_shares)
        if arguments != (request.version, request.num_groups, request.num_shares):
            raise request.conflict(*arguments)
        return Formed(
            lease_token=record.lease_token,
            deadline_ms=min(reply.deadline_ms for reply in replies if reply.ids),
            ids=record.ids,
            costs=record.costs,
            held=held,
            mask_below_version=record.mask_below_version,
            renumbered=_merged(replies),
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
                chosen = BatchNotReady({}, len(chosen), FORMING_MS // 10)
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
            deadline_ms=min(r.deadline_ms for r in replies if r.ids) + self._lease_ms - short_ms,
            ids=tuple(taken),
            costs=tuple(taken.values()),
            held=frozenset(taken),
            mask_below_version=max(masked, default=None),
            renumbered=_merged(replies),
        )
        if not await self._home.record(request, formed):
            await self._give_back(token, taken)
            return None
        await self.renew(formed.lease(request, ()))
        return formed

    async def _give_back(self, token: str, group_ids: Iterable[str]) -> None:
        await self._holding(group_ids, lambda shard, ids: shard.give_back(token, ids))

    async def _choose(self, request: LeaseRequest, num_taken: int) -> list[str] | BatchNotReady:
        """Ids of the groups that the selector puts first over all shards, to fill the batch or, if
        there are fewer, to reach what suffices."""
        number, enough = request.num_groups - num_taken, request.enough - num_taken
        peeks = await self._peek(request, number, [0] * len(self.shards))
        while (missing := enough - sum(len(peek.candidates) for peek in peeks)) > 0:
            # If `missing` groups arrive, at least one shard gets `share` of them and signals. If
            # the numbers changed meanwhile, the thresholds must be set again.
            share, before = -(-missing // len(self.shards)), [peek.ready for peek in peeks]
            peeks = await self._peek(request, number, [ready + share for ready in before])
            if [peek.ready for peek in peeks] == before:
                break
        blocking_version, blocking = min(
            ((peek.blocking_version, peek.blocking) for peek in peeks if peek.blocking),
            default=(0, ""),
        )
        candidates: list[Candidate] = list(heapq.merge(*(peek.candidates for peek in peeks)))
        if len(candidates) >= enough and not blocking:
            return [candidate.group_id for candidate in candidates[:number]]
        return BatchNotReady(
            {
                shard.keys.wake("batch"): peek.last_wake
                for shard, peek in zip(self.shards, peeks, strict=True)
            },
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

    async def validate(self, lease: Lease, version: int) -> frozenset[str]:
        kept = await self._leased(lease, lambda shard, part: shard.validate(part, version))
        return frozenset[str]().union(*kept)

    async def renew(self, lease: Lease) -> int:
        return sum(await self._leased(lease, Shard.renew))

    async def keep_renewed(self, lease: Lease) -> None:
        await renew_until_lost(self.renew, lease, self._lease_ms)

    async def consume(self, lease: Lease, group_ids: Collection[str]) -> int:
        total = sum(await self._holding(group_ids, lambda shard, ids: shard.consume(lease, ids)))
        if total:
            await self._home.mark_done(lease)
        return total

    async def ack(self, upto_step: int, lineage: str | None = None) -> int:
        return sum([await shard.ack(upto_step, lineage) for shard in self._home_last])

    async def nack(self, lease: Lease, reason: str) -> int:
        return sum(await self._leased(lease, lambda shard, part: shard.nack(part, reason)))

    async def publish_version(self, version: int) -> None:
        for shard in self._home_last:
            await shard.publish_version(version)

    async def task_progress(self, step: int) -> TaskProgress:
        parts = await self._each(lambda shard: shard.task_progress(step))
        positions = dict[int, int]()
        for part in parts:
            for worker, position in part.positions.items():
                positions[worker] = max(position, positions.get(worker, 0))
        return TaskProgress(
            positions=positions,
            untrained=tuple(prompt for part in parts for prompt in part.untrained),
        )

    async def are_consumed(self, group_ids: Collection[str]) -> bool:
        by_shard = ids_by_shard(group_ids, len(self.shards))
        return all([await self.shards[k].are_consumed(ids) for k, ids in by_shard.items()])

    async def restore_progress(self, progress: TaskProgress) -> None:
        for k, shard in enumerate(self.shards):
            untrained = progress.untrained[k :: len(self.shards)]
            await shard.restore_progress(replace(progress, untrained=untrained))

    async def reconcile(
        self,
        lineage: str,
        *,
        step: int,
        version: int,
        resume_version: int,
        consumed_group_ids: Collection[str] = (),
        durable_step: int | None = None,
    ) -> Reconciled:
        # The shards' trainer versions differ if a trainer died while it published. Call the shard
        # with the newest first, which may refuse the new version.
        versions = await self._each(lambda shard: shard.setting("trainer_version"))
        durable = step if durable_step is None else durable_step
        newest_first = sorted(range(len(self.shards)), key=lambda k: -(versions[k] or 0))
        for k in newest_first:
            await self.shards[k].begin_reconcile(lineage, step, version, resume_version, durable)
        consumed = ids_by_shard(consumed_group_ids, len(self.shards))
        parts = [
            await shard.finish_reconcile(lineage, consumed.get(shard.keys.shard, ()))
            for shard in self._home_last
        ]
        self._lineage = lineage
        return Reconciled(
            acked=sum(part.acked for part in parts),
            requeued=sum(part.requeued for part in parts),
            dropped=sum(part.dropped for part in parts),
            quarantined=sum(part.quarantined for part in parts),
        )

    # Either side -----------------------------------------------------------------------------

    async def sweep(self) -> int:
        return sum([await shard.sweep() for shard in self.shards])

    async def stats(self) -> BufferStats:
        return sum_stats(await self._each(Shard.stats))

    async def group_state(self, group_id: str) -> str | None:
        return await self._of(group_id).group_state(group_id)

    async def events(self, group_id: str) -> list[GroupEvent]:
        return await self._of(group_id).events(group_id)

    async def change_settings(self, values: Mapping[str, str | int]) -> None:
        for shard in self._home_last:  # what RunState.live_settings returns then holds in all
            await shard.change_settings(values)

    async def get_max_staleness(self) -> int:
        return await self._home.get_max_staleness()

    async def get_leash(self) -> Leash:
        return await self._home.get_leash()

    async def close(self) -> None:
        await self._wake.close()
        await self._each(Shard.end_waits)
        await self._redis.aclose()

    # Quarantine ------------------------------------------------------------------------------

    async def quarantined(self) -> list[QuarantinedGroup]:
        groups = chain.from_iterable(await self._each(Shard.quarantined))
        return sorted(groups, key=lambda group: group.at)

    async def release(self, group_id: str) -> bool:
        return await self._of(group_id).release(group_id)

    async def discard(self, group_id: str) -> bool:
        return await self._of(group_id).discard(group_id)

    async def quarantined_prompts(self) -> list[QuarantinedPrompt]:
        prompts = chain.from_iterable(await self._each(Shard.quarantined_prompts))
        return sorted(prompts, key=lambda prompt: prompt.at)

    async def release_prompt(self, task: str, index: int) -> bool:
        # It is in the shard of the group that failed last.
        return any(await self._each(lambda shard: shard.release_prompt(task, index)))

    async def discard_prompt(self, task: str, index: int) -> bool:
        return any(await self._each(lambda shard: shard.discard_prompt(task, index)))


def _merged(replies: Sequence[Taken | Held]) -> Mapping[str, tuple[int, ...]]:
    return {i: numbers for reply in replies for i, numbers in reply.renumbered.items()}


def sum_stats(parts: Sequence[BufferStats]) -> BufferStats:
    """The sum over all shards; values of the whole run are the home shard's."""
    home = parts[0]
    summed = {
        field.name: _summed(field.name, [getattr(part, field.name) for part in parts])
        for field in fields(BufferStats)
        if field.name not in _OF_THE_RUN
    }
    return replace(home, **summed)


_OF_THE_RUN = {
    "engine_versions",
    "engines_gone",
    "max_staleness",
    "max_staleness_largest",
    "groups_per_step",
    "gradient_accumulation_steps",
    "oversampling",
    "num_shards",
    "lineage",
}
# A trainer that died while it published left a version that only some shards know; it counts.
_LARGEST = {"trainer_version", "max_staleness_trained", "oldest_ready_age_s"}


def _summed(name: str, values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if name in _LARGEST:
        return max(known)
    if not isinstance(known[0], Mapping):
        return sum(known)
    merged: Counter[Any] = Counter()
    for mapping in known:
        merged.update(mapping)
    return dict(merged)
