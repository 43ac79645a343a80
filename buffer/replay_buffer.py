"""The replay buffer in Redis: where the rollout pool and the trainer pool meet.

    admit          push           lease           consume            ack
    ------> running ----> ready <---------> leased ------> consumed ------> acked
               |       |    |   nack, sweep    |
            abandon    +----+------------------+----> dropped:stale (push, lease, validate, sweep)

Each verb is one atomic script at the server, bounded in work and idempotent: after a lost reply, a
timeout or a crash, send it again. Between any two of them

    pushed = acked + consumed + dropped + quarantined + ready + leased
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from uuid import uuid4

from redis.asyncio import Redis

from buffer.cancellation import cancellable
from buffer.codec import decode_group, encode_group
from buffer.keys import Keys, check_group_id
from buffer.lease import Lease, PushResult
from buffer.lua import Scripts
from buffer.shares import split_by_tokens
from buffer.stats import BufferStats, parse_stats
from buffer.types import PromptRef, TrajectoryGroup
from buffer.wakeups import Deadline, WakeStreams
from configs.schema import BufferConfig

__all__ = ["BufferStats", "Lease", "PushResult", "ReplayBuffer"]

_ORPHAN_EXPIRY_MS = 600_000  # a payload whose push never committed disappears by itself
_BOUND = 256  # groups that one script call may move


class ReplayBuffer:
    """One run's buffer as one process sees it. Made in, and used from, one event loop."""

    def __init__(self, redis: Redis, run: str, *, lease_timeout_s: float) -> None:
        """`redis` comes from `connect`; `close` closes its connections too."""
        self._redis = redis
        self._keys = Keys(run)
        self._scripts = Scripts(redis, self._keys)
        self._wake = WakeStreams(redis)
        self._lease_timeout_ms = int(1000 * lease_timeout_s)

    async def open(self, settings: BufferConfig, groups_per_step: int) -> None:
        """Creates the run's settings in Redis. Those that exist already stay as they are."""
        initial = {
            "max_staleness": settings.max_staleness,
            "on_stale": settings.on_stale.value,
            "max_retries": settings.max_retries,
            "selector": settings.selector.value,
            "groups_per_step": groups_per_step,
            "trainer_version": 0,
            "acked_step": -1,
            "wanted": 0,
        }
        async with self._redis.pipeline(transaction=True) as pipe:
            for name, value in initial.items():
                pipe.hsetnx(self._keys("settings"), name, str(value))
            await cancellable(pipe.execute())

    # Rollout side ----------------------------------------------------------------------------

    async def admit(self, group_id: str, timeout_s: float) -> int:
        """Waits for room, takes a credit for the group and returns the trainer's version.

        Raises TimeoutError that says how full the buffer is.
        """
        check_group_id(group_id)
        deadline = Deadline(timeout_s)
        while True:
            reply = await self._scripts.run("admit", group_id)
            if reply[0] == b"admitted":
                return int(reply[1])
            _, seen, in_use, limit = reply
            if not deadline.left_s:
                raise TimeoutError(
                    f"no room for group {group_id} within {timeout_s:g} s: {in_use} groups are "
                    f"running, ready or leased and {limit} may be; the trainer consumed none"
                )
            await self._wake.wait(self._keys.wake("room"), seen.decode(), deadline.left_s)

    async def abandon(self, group_id: str, reason: str, requeue: PromptRef | None = None) -> None:
        """Frees the credit of a running group that will never be pushed, and counts it by reason.

        `requeue` names the prompt if the group was stopped for being too old: it is then run again
        under the same rules as that of a stale group that was pushed.
        """
        prompt = ("", 0, 0) if requeue is None else (requeue.task, requeue.index, requeue.attempt)
        await self._scripts.run("abandon", group_id, reason, *prompt)

    async def push(self, group: TrajectoryGroup) -> PushResult:
        """Hands a finished group over. Raises ValueError if the group cannot be encoded."""
        payload = encode_group(group)
        prompt = group.prompt
        metadata = (
            check_group_id(group.group_id),
            group.min_version,
            group.num_tokens,
            sum(t.num_trainable_tokens for t in group.trajectories),
            len(payload),
            *(prompt.task, prompt.index, prompt.attempt),
        )
        key = self._keys.payload(group.group_id)
        while True:
            reply = await self._scripts.run_after_set(
                "push", key, payload, _ORPHAN_EXPIRY_MS, *metadata
            )
            if reply[0] != b"missing":  # an old orphan expired between SET NX and the commit
                return PushResult(reply[0].decode())

    async def take_retry(self) -> PromptRef | None:
        """A prompt to run again before the stream's next one, if there is any."""
        reply = await self._scripts.run("take_retry", uuid4().hex)
        if reply is None:
            return None
        attempt, index, task = reply.decode().split(" ", 2)
        return PromptRef(task=task, index=int(index), attempt=int(attempt))

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
        if it lags behind `version` by no more than max_staleness; stale ones are dropped.

        Raises TimeoutError that says what is missing, and ValueError if the step is consumed
        already, or was leased with other arguments.
        """
        if not 0 <= share < num_shares <= num_groups:
            raise ValueError(
                f"share={share}, num_shares={num_shares}, num_groups={num_groups}: "
                "0 <= share < num_shares <= num_groups must hold"
            )
        deadline = Deadline(timeout_s)
        request = (step, version, num_groups, num_shares, self._lease_timeout_ms)
        while True:
            reply = await self._scripts.run("lease", *request, uuid4().hex, _BOUND)
            match reply[0]:
                case b"leased":
                    return await self._receive(step, version, share, num_shares, reply)
                case b"done":
                    raise ValueError(
                        f"step={step}: its groups were consumed before; lease a later step"
                    )
                case b"conflict":
                    raise ValueError(
                        f"step={step} was leased with version, num_groups, num_shares = "
                        f"{', '.join(x.decode() for x in reply[1:])}; ranks must ask for the same"
                    )
                case b"wait":
                    await self._wait_for_batch(step, num_groups, timeout_s, deadline, reply)

    async def _wait_for_batch(
        self, step: int, num_groups: int, timeout_s: float, deadline: Deadline, reply: list[Any]
    ) -> None:
        _, seen, ready, expires_ms = reply
        if not deadline.left_s:
            raise TimeoutError(
                f"step {step} waited {timeout_s:g} s for {num_groups} fresh groups from the "
                f"rollout pool: {ready} are ready"
            )
        # Nobody sends an event when a lease expires: wake up for it.
        until_expiry_s = expires_ms / 1000 if expires_ms >= 0 else deadline.left_s
        block_s = min(deadline.left_s, until_expiry_s)
        await self._wake.wait(self._keys.wake("batch"), seen.decode(), block_s)

    async def _receive(
        self, step: int, version: int, share: int, num_shares: int, reply: list[Any]
    ) -> Lease:
        _, owner, deadline_ms, ids, tokens, held = reply
        mine = split_by_tokens([int(number) for number in tokens], num_shares)[share]
        held_ids = set(held)
        wanted = [ids[i].decode() for i in mine if ids[i] in held_ids]
        return Lease(
            step=step,
            version=version,
            owner=owner.decode(),
            group_ids=tuple(group_id.decode() for group_id in ids),
            groups=await self._fetch(wanted, owner.decode()),
            deadline=float(deadline_ms) / 1000,
        )

    async def _fetch(self, group_ids: Sequence[str], owner: str) -> tuple[TrajectoryGroup, ...]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for group_id in group_ids:
                pipe.get(self._keys.payload(group_id))
            payloads = await cancellable(pipe.execute())
        groups = []
        for group_id, payload in zip(group_ids, payloads, strict=True):
            if payload is not None:
                groups.append(decode_group(payload))
            elif await self._is_held(group_id, owner):
                raise RuntimeError(
                    f"group {group_id} is leased but its payload is gone: somebody deleted "
                    f"{self._keys.payload(group_id)}, or the server lost data"
                )
            # else a sibling rank's validate has just dropped it
        return tuple(groups)

    async def _is_held(self, group_id: str, owner: str) -> bool:
        held = await self._redis.hmget(self._keys(f"group:{group_id}"), ["state", "owner"])
        return held == [b"leased", owner.encode()]

    async def validate(self, lease: Lease, version: int) -> frozenset[str]:
        """Ids of the batch that may be trained at `version`, seen just before the step.

        Drops the others, by the max_staleness of this moment, and renews the lease. Empty if the
        lease was lost: lease the step again.
        """
        kept = await self._scripts.run(
            "validate", version, lease.owner, self._lease_timeout_ms, *lease.group_ids
        )
        return frozenset(group_id.decode() for group_id in kept)

    async def consume(self, lease: Lease, group_ids: Collection[str]) -> int:
        """Marks groups as trained; returns how many of them are, by this lease.

        0 for a lease that was lost meanwhile: the groups are ready again or somebody else's.
        """
        return int(
            await self._scripts.run(
                "consume", lease.owner, lease.step, lease.version, *sorted(group_ids)
            )
        )

    async def ack(self, upto_step: int) -> int:
        """Forgets groups of all steps up to one whose checkpoint is durable; returns how many."""
        return await self._repeat("ack", upto_step)

    async def nack(self, lease: Lease, reason: str) -> int:
        """Gives the groups of a lease back that are not consumed; returns how many went back."""
        return int(await self._scripts.run("nack", lease.owner, reason, *lease.group_ids))

    async def publish_version(self, version: int) -> None:
        """Tells everybody the trainer's version. Raises ValueError if it is below the last one."""
        reply = await self._scripts.run("publish", version)
        if reply[0] == b"older":
            raise ValueError(
                f"version={version}: {int(reply[1])} was published before, and versions only grow"
            )

    # Either side -----------------------------------------------------------------------------

    async def sweep(self) -> int:
        """Returns expired leases to ready and drops stale ready groups; how many it moved."""
        total = 0
        while True:
            expired, dropped = map(int, await self._scripts.run("sweep", _BOUND))
            total += expired + dropped
            if max(expired, dropped) < _BOUND:
                return total

    async def _repeat(self, script: str, *arguments: int) -> int:
        total = 0
        while True:
            moved = int(await self._scripts.run(script, *arguments, _BOUND))
            total += moved
            if moved < _BOUND:
                return total

    async def stats(self) -> BufferStats:
        """The buffer's numbers, all of one moment."""
        return parse_stats(await self._scripts.run("stats"))

    async def set_max_staleness(self, value: int) -> None:
        """Changes the bound of a running job: higher at once, lower at the next sweep or lease.

        Raises ValueError for a negative value.
        """
        if value < 0:
            raise ValueError(f"buffer.max_staleness={value}: must be at least 0")
        await self._scripts.run("tune", value)

    async def get_max_staleness(self) -> int:
        return (await self.stats()).max_staleness

    async def close(self) -> None:
        """Ends every wait in this object with BufferClosedError and closes the connections."""
        self._wake.close()
        await self._redis.aclose()
