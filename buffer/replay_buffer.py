"""The replay buffer in Redis: where the rollout pool and the trainer pool meet.

    admit          push           lease             consume            ack
    ------> running ----> ready ----------> leased --------> consumed ------> acked
               |       |    |  <-----------    |  reconcile     |
            abandon    |    |   nack, sweep,   |<---------------'
                       |    |   reconcile      |
                       +----+------------------+----> dropped:REASON   stale, lineage, full, ...
                                               '----> quarantined      leased too often, unreadable

Each verb is one atomic script a shard, bounded in work and idempotent: after a lost reply, a
timeout or a crash, send it again. Between any two of them

    pushed = acked + consumed + dropped + quarantined + ready + leased

With `shards` > 1 the groups are spread over complete buffers, each with its part of every limit.
The first is home: it keeps which groups a step's batch has, and is told last of what must hold in
all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Collection, Mapping
from typing import cast
from zlib import crc32

from buffer.durability import PushKeeper
from buffer.errors import BufferFullError, NotOwnerError
from buffer.lease import BatchFormer, LeaseRequest, Leasing, OneShardFormer
from buffer.push import Pusher
from buffer.quarantine import PromptQuarantine
from buffer.reconcile import take_over
from buffer.redis.client import BufferConnectionError, BufferRedis
from buffer.redis.connection import connect
from buffer.redis.keys import Keys, check_group_id
from buffer.redis.replies import readable, setting_number
from buffer.redis.settings import initial_settings
from buffer.redis.wakeups import Deadline, WakeStreams
from buffer.results import (
    Admission,
    BufferStats,
    Failure,
    GroupEvent,
    Lease,
    PushResult,
    QuarantinedGroup,
    Reconciled,
    sum_stats,
)
from buffer.shard import Admitted, Shard
from buffer.sharded_lease import ShardedFormer
from buffer.shards import ShardSet, id_in_shard, shard_of
from buffer.types import PromptRef, Rerun, TrajectoryGroup
from configs.schema import BufferConfig

__all__ = ["BufferFullError", "BufferStats", "Lease", "NotOwnerError", "PushResult", "ReplayBuffer"]


class ReplayBuffer:
    """One run's buffer as one process sees it. Made in, and used from, one event loop."""

    def __init__(
        self,
        redis: BufferRedis,
        run: str,
        *,
        lease_timeout_s: float,
        shards: int = 1,
        wait_timeout_s: float = 600.0,
        compress: bool = False,
    ) -> None:
        """`redis` comes from `connect`; `close` closes its connections too.

        `shards` must be what the run was opened with. `wait_timeout_s` is for pushes that do not
        name their own.
        """
        self._redis = redis
        self._wake = WakeStreams(redis)
        keys = [Keys(run, shard) for shard in range(shards)]
        self._shards = ShardSet([Shard(redis, k) for k in keys])
        self._pushers = [
            Pusher(shard, PushKeeper(redis, k("marker")), self._wake)
            for shard, k in zip(self._shards, keys, strict=True)
        ]
        former: BatchFormer = (
            ShardedFormer(self._shards) if shards > 1 else OneShardFormer(self._shards.home)
        )
        self._leasing = Leasing(self._shards, former, self._wake)
        self.prompt_quarantine = PromptQuarantine(self._shards)
        self._lease_ms = int(1000 * lease_timeout_s)
        self._wait_timeout_s = wait_timeout_s
        self._compress = compress
        self._lineage = ""

    @classmethod
    async def connect(cls, url: str, run: str, settings: BufferConfig) -> ReplayBuffer:
        """A buffer with connections of its own to `url`. Raises BufferConnectionError."""
        return cls(
            await connect(url, tls_ca_file=settings.tls_ca_file),
            run,
            lease_timeout_s=settings.lease_timeout_s,
            shards=settings.shards,
            wait_timeout_s=settings.wait_timeout_s,
            compress=settings.compress,
        )

    async def open(
        self, settings: BufferConfig, groups_per_step: int, oversampling: float = 1.0
    ) -> None:
        """Creates the run's settings in Redis. Those that exist already stay as they are.

        `oversampling` (rollout.oversampling): groups admitted for each that the leash has room for.

        Raises ValueError if they could never work: no room for one batch, or other shards than the
        run has.
        """
        num_shards = len(self._shards)
        there = await self._setting("num_shards")
        if settings.shards != num_shards or (there is not None and there != num_shards):
            raise ValueError(
                f"buffer.shards={settings.shards}: this ReplayBuffer has {num_shards}, and the run "
                f"in Redis {there or 'none yet'}; a run keeps the number that it began with"
            )
        capacity = settings.capacity_groups
        if capacity is not None and capacity < groups_per_step:
            raise ValueError(
                f"buffer.capacity_groups={capacity}: a batch of trainer.groups_per_step="
                f"{groups_per_step} would never fit; make it at least that"
            )
        for number, shard in reversed(list(enumerate(self._shards))):  # home last: then all is open
            await shard.open(
                initial_settings(settings, groups_per_step, number, num_shards, oversampling)
            )

    # Rollout side ----------------------------------------------------------------------------

    async def admit(self, group_id: str, timeout_s: float) -> Admission:
        """Waits for room, and takes a credit for the group.

        Use the id that it returns from then on: with several shards it names the one that had room.
        A credit that is not renewed for `lease_timeout_s` goes back. Raises TimeoutError that says
        how full the buffer is.
        """
        check_group_id(group_id)
        deadline, num_shards = Deadline(timeout_s), len(self._shards)
        # Where to begin: the same for a retry, and all shards in turn for many ids.
        first = crc32(group_id.encode())
        while True:
            seen, in_use, limit = dict[str, str](), 0, 0
            for k in (number % num_shards for number in range(first, first + num_shards)):
                name = id_in_shard(group_id, k, num_shards)
                try:
                    reply = await self._shards[k].admit(name, self._lease_ms)
                except asyncio.CancelledError:  # the caller does not know this name
                    await asyncio.shield(self._shards[k].abandon(name, "stopped"))
                    raise
                if isinstance(reply, Admitted):
                    return Admission(name, reply.version)
                seen[self._shards[k].keys.wake("room")] = reply.last_wake
                in_use, limit = in_use + reply.in_use, limit + reply.limit
            if not deadline.left_s:
                raise TimeoutError(
                    f"no room for group {group_id} within {timeout_s:g} s: {in_use} groups are "
                    f"running, ready or leased and {limit} may be; the trainer consumed none"
                )
            await self._wake.wait(seen, deadline.left_s)

    async def begin(self, group_id: str, prompt: PromptRef, worker: int, position: int) -> bool:
        """Notes, in one step, which prompt an admitted group runs and how far its worker is.

        From then on the prompt outlives the worker: if the group's credit expires, or the worker
        is reclaimed, the prompt runs again, and a late push of the group is a duplicate. The second
        time that this happens to a prompt it is put into quarantine. False, with nothing noted, if
        the group is not running.
        """
        return await self._shards.of(group_id).begin(group_id, prompt, worker, position)

    async def fail(self, group_id: str, prompt: PromptRef, max_failures: int) -> Failure | None:
        """Ends a running group that could not be completed; its prompt runs again.

        At `max_failures` of one prompt, by whichever worker, it goes to quarantine instead. None,
        with nothing changed, if the group was not running.
        """
        return await self._shards.of(group_id).fail(group_id, prompt, max_failures)

    async def reclaim(self, worker: int) -> int:
        """Ends all groups that a worker ran in an earlier life; how many. Their prompts run again.

        They are those whose ids begin with "<worker>-": call it before the worker admits any.
        """
        return sum(await self._shards.each(lambda shard: shard.reclaim(f"{worker}-")))

    async def renew_credits(self, group_ids: Collection[str]) -> int:
        """Keeps the credits of a worker's running groups; returns how many are still its own."""
        return await self._shards.sum(
            group_ids, lambda shard, ids: shard.renew_credits(ids, self._lease_ms)
        )

    async def abandon(
        self,
        group_id: str,
        reason: str,
        rerun: Rerun = Rerun.never,
        prompt: PromptRef | None = None,
    ) -> bool:
        """Frees the credit of a running group that will never be pushed, and counts it by reason.

        `rerun` says whether `prompt` runs again; then a push of the group that is still on its way
        is a duplicate. False if the group was not running: its push had arrived, or it had lost its
        credit.
        """
        return await self._shards.of(group_id).abandon(group_id, reason, rerun, prompt)

    async def push(self, group: TrajectoryGroup, timeout_s: float | None = None) -> PushResult:
        """Hands a finished group over, and keeps it until the server has it on disk.

        While the buffer is full it waits (on_full=block; TimeoutError after `timeout_s` tells what
        is full), drops the stalest ready groups, or raises BufferFullError. Raises ValueError if
        the group cannot be encoded, or is larger than all the room there is.
        """
        pusher = self._pushers[shard_of(group.group_id, len(self._shards))]
        timeout_s = self._wait_timeout_s if timeout_s is None else timeout_s
        return await pusher.push(group, timeout_s, compress=self._compress)

    async def flush(self, timeout_s: float) -> bool:
        """Waits until all that this object pushed is on disk; whether it came so far in time."""
        deadline = Deadline(timeout_s)
        return all([await pusher.flush(deadline.left_s) for pusher in self._pushers])

    async def take_retry(self, group_id: str | None = None) -> PromptRef | None:
        """A prompt to run again before the stream's next one, if there is any.

        With a running group it is one of the group's shard, and in the same step the group's own,
        as if by `begin`: a worker that dies then loses nothing.
        """
        if group_id is not None:
            return await self._shards.of(group_id).take_retry("", group_id)
        token = secrets.token_hex(8)
        for shard in self._shards:
            prompt = await shard.take_retry(token)
            if prompt is not None:
                return prompt
        return None

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
    ) -> Lease:
        """This rank's share of the step's global batch; waits until the batch can be formed.

        The first rank that finds `num_groups` fresh groups forms the batch; every rank that asks
        with the same step gets its share of that batch, also when it asks again. A group is fresh
        if it lags behind `version` by no more than max_staleness; stale ones are dropped, or with
        on_stale=mask_tokens come with their over-age tokens out of the loss. A group that cannot be
        read goes to quarantine and is missing.

        Raises TimeoutError that says what is missing, ValueError if the step is consumed already,
        or was leased with other arguments, and NotOwnerError if this object has reconciled and
        another lineage took over since.
        """
        if not 0 <= share < num_shares <= num_groups:
            raise ValueError(
                f"share={share}, num_shares={num_shares}, num_groups={num_groups}: "
                "0 <= share < num_shares <= num_groups must hold"
            )
        request = LeaseRequest(step, version, num_groups, num_shares, self._lease_ms, self._lineage)
        return await self._leasing.lease(request, share, timeout_s)

    async def validate(self, lease: Lease, version: int) -> frozenset[str]:
        """Ids of the batch that may be trained at `version`, seen just before the step.

        Drops the others, by the max_staleness of this moment, and renews the lease. Those that
        would need more of their tokens masked than were go back to ready. Empty if the lease was
        lost: lease the step again.
        """
        kept = await self._shards.holding(
            lease.group_ids,
            lambda shard, ids: shard.validate(
                version=version,
                owner=lease.owner,
                lease_ms=self._lease_ms,
                oldest=lease.oldest,
                ids=ids,
            ),
        )
        return frozenset(group_id for ids in kept for group_id in ids)

    async def renew(self, lease: Lease) -> int:
        """Extends the lease of a long step; how many groups it still holds, 0 if it was lost."""
        return await self._shards.sum(
            lease.group_ids, lambda shard, ids: shard.renew(lease.owner, self._lease_ms, ids)
        )

    async def keep_renewed(self, lease: Lease) -> None:
        """Renews the lease until this is cancelled, or the lease is lost."""
        while True:
            await asyncio.sleep(self._lease_ms / 3000)
            with contextlib.suppress(BufferConnectionError):  # the lease may outlast the outage
                if await self.renew(lease) == 0:
                    return

    async def consume(self, lease: Lease, group_ids: Collection[str]) -> int:
        """Marks groups as trained; returns how many of them are, by this lease.

        0 for a lease that was lost meanwhile: the groups are ready again or leased anew.
        """

        async def consume(shard: Shard, ids: list[str]) -> int:
            return await shard.consume(
                owner=lease.owner,
                step=lease.step,
                version=lease.version,
                oldest=lease.oldest,
                ids=ids,
            )

        total = await self._shards.sum(sorted(group_ids), consume)
        if total and len(self._shards) > 1:
            # The step is done, also if none of its groups is at home.
            await consume(self._shards.home, [])
        return total

    async def ack(self, upto_step: int, lineage: str | None = None) -> int:
        """Forgets groups of all steps up to one whose checkpoint is durable; returns how many.

        Raises NotOwnerError, with nothing changed, if `lineage` is not the buffer's current one.
        """
        total = 0
        for shard in self._shards.home_last:
            while True:
                reply = await shard.ack(upto_step, lineage or "")
                if not reply.is_owner:
                    raise NotOwnerError(
                        f"lineage={lineage!r} acknowledges step {upto_step}, but another trainer "
                        "took this buffer over; end this one"
                    )
                total += reply.count
                if not reply.is_more:
                    break
        return total

    async def nack(self, lease: Lease, reason: str) -> int:
        """Gives the groups of a lease back that are not consumed; returns how many went back."""
        return await self._shards.sum(
            lease.group_ids, lambda shard, ids: shard.nack(lease.owner, reason, ids)
        )

    async def publish_version(self, version: int) -> None:
        """Tells everybody the trainer's version.

        Raises ValueError if it is below the last one, and NotOwnerError if this object has
        reconciled and another lineage took over since.
        """
        for shard in self._shards.home_last:
            reply = await shard.publish(version, self._lineage)
            if reply.word == "not_owner":
                raise NotOwnerError(
                    f"lineage={self._lineage!r} publishes version {version}, but another trainer "
                    "took this buffer over; end this one"
                )
            if reply.word == "older":
                raise ValueError(
                    f"version={version}: {reply.version} was published before, and versions only "
                    "grow"
                )

    async def reconcile(
        self,
        lineage: str,
        *,
        step: int,
        version: int,
        resume_version: int,
        consumed_group_ids: Collection[str] = (),
    ) -> Reconciled:
        """Takes the buffer over for a trainer that starts or restores, before its first lease.

        `lineage` is new with every start; a trainer of an older one is fenced.
        `step` and `version` are those of the checkpoint (0 and 0 for none); it will be published as
        `resume_version`, which is above every version ever published unless `version` is the newest
        itself. Groups of the checkpoint are acked: those consumed up to `step`, and
        `consumed_group_ids`. Every other one that was consumed or leased returns to ready. Groups
        of versions between the two, whose weights no longer exist, are dropped; older ones are
        renumbered, so that they keep their distance. The result is that of all calls with this
        lineage; after a crash, call again with the same arguments.

        Raises NotOwnerError if a later lineage took over, and ValueError for a version that was
        used.
        """
        reconciled = await take_over(
            self._redis,
            self._shards,
            lineage,
            step=step,
            version=version,
            resume_version=resume_version,
            consumed_group_ids=consumed_group_ids,
        )
        self._lineage = lineage
        return reconciled

    # Either side -----------------------------------------------------------------------------

    async def sweep(self) -> int:
        """Tidies up; how many groups it moved.

        Expired leases return to ready, credits that were not renewed are given back, and ready
        groups that became stale are dropped.
        """
        total = 0
        for shard in self._shards:
            while True:
                swept = await shard.sweep()
                total += swept.expired + swept.dropped + swept.credits
                if not swept.is_more:
                    break
        return total

    async def quarantined(self) -> list[QuarantinedGroup]:
        """The groups in quarantine, the longest there first."""
        lists = await self._shards.each(Shard.quarantined)
        groups = [
            QuarantinedGroup(
                group_id=record.group_id,
                at=record.at_ms / 1000,
                reason=record.reason,
                attempts=record.attempts,
                num_tokens=record.num_tokens,
            )
            for records in lists
            for record in records
        ]
        return sorted(groups, key=lambda group: group.at)

    async def release(self, group_id: str) -> bool:
        """Gives a group in quarantine another chance: ready, as if it had never been leased."""
        return await self._shards.of(group_id).release(group_id)

    async def discard(self, group_id: str) -> bool:
        """Drops a group in quarantine."""
        return await self._shards.of(group_id).discard(group_id)

    async def stats(self) -> BufferStats:
        """The buffer's numbers; with one shard all of one moment, with several each shard's."""
        return sum_stats(await self._shards.each(Shard.stats))

    async def staleness_histogram(self) -> Mapping[int, int]:
        """Number of ready groups by how far they lag behind the trainer's version."""
        return (await self.stats()).by_staleness

    async def events(self, group_id: str) -> list[GroupEvent]:
        """What happened to a group, as far as the audit stream still tells; oldest first."""
        return await self._shards.of(group_id).events(group_id)

    async def set_max_staleness(self, value: int) -> None:
        """Changes the bound of a running job: higher at once, lower at the next sweep or lease.

        Raises ValueError for a negative value.
        """
        if value < 0:
            raise ValueError(f"buffer.max_staleness={value}: must be at least 0")
        for shard in self._shards.home_last:
            await shard.tune(value)

    async def get_max_staleness(self) -> int:
        value = await self._setting("max_staleness")
        return value if value is not None else (await self.stats()).max_staleness

    async def close(self) -> None:
        """Ends every wait in this object with BufferClosedError and closes the connections.

        What was pushed and is not known to be on disk is no longer kept: `flush` first.
        """
        await self._wake.close()
        for pusher in self._pushers:
            await pusher.close()
        await self._redis.aclose()

    async def _setting(self, name: str) -> int | None:
        """A setting of the home shard; None before the run is opened."""
        key = self._shards.home.keys("settings")
        value = cast("bytes | None", await self._redis.hget(key, name))
        return None if value is None else int(setting_number(name, readable(value)))
