"""The replay buffer in Redis, between the rollout pool and the trainer pool.

    admit          push           lease             consume            ack
    ------> running ----> ready ----------> leased --------> consumed ------> acked
               |       |    |  <-----------    |  reconcile     |
            abandon    |    |   nack, sweep,   |<---------------'
                       |    |   reconcile      |
                       +----+------------------+----> dropped:REASON   stale, lineage, full, ...
                                               '----> quarantined      leased too often, unreadable

Each verb is an atomic, idempotent script with bounded work: after a lost reply, a timeout or a
crash, call it again. Between any two of them

    pushed = acked + consumed + dropped + quarantined + ready + leased
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from time import monotonic
from typing import Any, NamedTuple, cast

from buffer.errors import BufferFullError, taken_over
from buffer.lease import (
    BatchNotReady,
    Formed,
    LeaseRequest,
    Payload,
    form_in_time,
    new_token,
    renew_until_lost,
)
from buffer.push import PendingPush, PushBatches, PushReply, Space
from buffer.redis.client import BufferRedis, DamagedRunError
from buffer.redis.durability import Durability
from buffer.redis.keys import Keys, check_group_id
from buffer.redis.payloads import Blocks
from buffer.redis.replies import is_number, number, readable, setting_number, texts
from buffer.redis.scripts import Argument, Scripts
from buffer.redis.wakeups import Deadline, WakeStreams
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
    parse_events,
    parse_stats,
    quarantined_prompt,
    read_prompt,
    write_prompt,
)
from buffer.staleness import Leash, parse_rollbacks
from buffer.types import PromptRef, Rerun, TrajectoryGroup
from buffer.wire.chunks import join_payload, num_chunks
from configs.schema import BufferConfig

BOUND = 32
"""Groups that one script call may move: far below 10 ms even at a busy server."""
_MAX_IDS = 128
"""Ids that one script call may get."""
_KEPT_BYTES = 1 << 20
"""Of kept tokens that one script call may get, or one part."""
_EVENTS_AT_ONCE = 500


class NoRoom(NamedTuple):
    """There is no credit for a group now."""

    last_wake: str
    """Last entry of wake:room; wait for a later one."""
    in_use: int
    limit: int


class ReplayBuffer:
    """A client of one run's buffer, created in and used from one event loop.

    buffer = await connect_buffer(url, run, settings)
    admission = await buffer.admit("group-1", timeout_s=60)         # a worker
    await buffer.push(group)
    lease = await buffer.lease(step=1, version=0, ...)              # a trainer rank
    await buffer.consume(lease, lease.group_ids)
    """

    def __init__(
        self, redis: BufferRedis, run: str, settings: BufferConfig, shard: int = 0
    ) -> None:
        """`redis` comes from `connect`; `close` closes its connections too.

        Of `settings` it takes the timeouts and the compression. `shard` selects the hash tag.
        """
        self.keys = Keys(run, shard)
        self._redis = redis
        self._scripts = Scripts(redis, self.keys)
        self._wake = WakeStreams(redis)
        self._pushes = PushBatches(self._scripts, self.keys, BOUND)
        self._durability = Durability(redis, self.keys("marker"), self._wake)
        self._line = asyncio.Lock()
        """Held by the blocked push that waits for room; the others queue for it in order."""
        self._blocks = Blocks()
        self._lease_ms = int(1000 * settings.lease_timeout_s)
        self._wait_timeout_s = settings.wait_timeout_s
        self._compress = settings.compress
        self._lineage = ""

    async def open(
        self,
        settings: BufferConfig,
        groups_per_step: int,
        oversampling: float = 1.0,
        replaced: Collection[str] = (),
        gradient_accumulation_steps: int = 1,
    ) -> None:
        """Creates the run's settings in Redis. Existing settings are kept, but those named in
        `replaced`.

        `oversampling` (rollout.oversampling) multiplies the number of groups that may be admitted;
        so does `gradient_accumulation_steps` (trainer.gradient_accumulation_steps).

        Raises ValueError if the capacity is below the groups of one version, or the number of
        shards differs from the run's.
        """
        groups_per_version = groups_per_step * gradient_accumulation_steps
        check_settings(settings, groups_per_version, 1, await self.setting("num_shards"))
        await self.create(
            settings, groups_per_step, oversampling, replaced, gradient_accumulation_steps
        )

    async def create(
        self,
        settings: BufferConfig,
        groups_per_step: int,
        oversampling: float,
        replaced: Collection[str],
        gradient_accumulation_steps: int,
    ) -> None:
        """`open` of one shard, without the checks."""
        await self._scripts.load()  # only the controller's user may
        initial = initial_settings(
            settings, groups_per_step, self.keys.shard, oversampling, gradient_accumulation_steps
        )
        async with self._redis.pipeline(transaction=True) as pipe:
            for name, value in initial.items():
                pipe.hsetnx(self.keys("settings"), name, value)
            if tuned := sorted({*replaced} - initial.keys()):  # by `change_settings`, before
                pipe.hdel(self.keys("settings"), *tuned)
            await pipe.execute()
        if changed := {name: initial[name] for name in replaced if name in initial}:
            await self.change_settings(changed)
        await self._scripts.run("run_state/note_server")

    # Rollout side ----------------------------------------------------------------------------

    async def admit(self, group_id: str, timeout_s: float) -> Admission:
        """Waits for room, and takes a credit for the group.

        Use the returned id from then on: with several shards it names the shard that had room. A
        credit expires if it is not renewed for `lease_timeout_s`. Raises TimeoutError that says how
        full the buffer is.
        """
        check_group_id(group_id)
        deadline = Deadline(timeout_s)
        while isinstance(reply := await self.try_admit(group_id), NoRoom):
            if not deadline.left_s:
                raise no_room(group_id, timeout_s, reply.in_use, reply.limit)
            await self._wake.wait({self.keys.wake("room"): reply.last_wake}, deadline.left_s)
        return reply

    async def try_admit(self, group_id: str) -> Admission | NoRoom:
        """A credit for the group if there is room now; a repeated call renews the credit."""
        try:
            reply = await self._scripts.run("rollout/admit_group", group_id, self._lease_ms)
        except asyncio.CancelledError:  # the caller does not know whether it has a credit
            await asyncio.shield(self.abandon(group_id, "stopped"))
            raise
        if reply[0] == b"admitted":
            return Admission(group_id, int(reply[1]))
        return NoRoom(reply[1].decode(), int(reply[2]), int(reply[3]))

    async def begin(self, group_id: str, prompt: PromptRef, worker: int, position: int) -> bool:
        """Records atomically an admitted group's prompt and its worker's position in its tasks.

        From then on the prompt survives the worker: if the group's credit expires or the worker is
        reclaimed, the prompt runs again, and a late push of the group is a duplicate. The third
        time this happens to a prompt it is quarantined. False, with nothing recorded, if the group
        is not running.
        """
        arguments = (group_id, write_prompt(prompt), worker, position)
        return bool(await self._scripts.run("rollout/begin_group", *arguments))

    async def fail(self, group_id: str, prompt: PromptRef, max_failures: int) -> Failure | None:
        """Ends a running group that could not be completed; its prompt runs again.

        After `max_failures` of one prompt, at any workers, the prompt is quarantined instead. None,
        with nothing changed, if the group was not running.
        """
        reply = await self._scripts.run(
            "rollout/fail_group", group_id, write_prompt(prompt), max_failures
        )
        if reply is None:
            return None
        return Failure(num_failures=int(reply[0]), is_quarantined=bool(reply[1]))

    async def reclaim(self, worker: int, *, counts_as_death: bool = True) -> int:
        """Ends all groups that a restarted worker ran before; their prompts run again.

        These are the groups whose ids begin with "<worker>-": call it before the worker admits any.
        `counts_as_death`: False if the whole run had ended, which is no fault of a prompt. Returns
        the number of groups.
        """
        cursor, total = "0", 0
        while True:
            reply = await self._scripts.run(
                "rollout/reclaim_worker",
                f"{worker}-",
                cursor,
                _MAX_IDS,
                self._lease_ms,
                int(counts_as_death),
            )
            cursor, total = reply[0].decode(), total + int(reply[1])
            if cursor == "0":
                return total

    async def renew_credits(self, group_ids: Collection[str]) -> int:
        """Renews the credits of running groups; returns how many are still running."""
        return await self._sum("rollout/renew_credits", (self._lease_ms,), list(group_ids))

    async def abandon(
        self,
        group_id: str,
        reason: str,
        rerun: Rerun = Rerun.never,
        prompt: PromptRef | None = None,
    ) -> bool:
        """Frees the credit of a running group that will never be pushed, and counts it by reason.

        `rerun` says whether `prompt` (None: that of `begin`, if any) runs again; then a late push
        of the group is a duplicate. False if the group was not running: it was pushed, or its
        credit had expired.
        """
        assert prompt is not None or rerun is not Rerun.as_stale, "name the prompt"
        text = "" if prompt is None else write_prompt(prompt)
        arguments = (group_id, reason, rerun.value, text)
        return bool(await self._scripts.run("rollout/abandon_group", *arguments))

    async def push(self, group: TrajectoryGroup, timeout_s: float | None = None) -> PushResult:
        """Stores a finished group.

        If the buffer is full it waits (on_full=block; raises TimeoutError after `timeout_s`), drops
        the stalest ready groups, or raises BufferFullError. Raises ValueError if the group cannot
        be encoded or is larger than the capacity.
        """
        pending = PendingPush(group, self._compress)
        deadline = Deadline(self._wait_timeout_s if timeout_s is None else timeout_s)
        if not self._line.locked():
            reply = await self._send(pending)
            if reply.word != "full":
                return PushResult(reply.word)
            if reply.on_full == "error":
                raise BufferFullError(pending.full(reply))
        # Payloads are large: a refused one is sent again only when there is room, and only by the
        # first in the queue, so that a hundred blocked groups do not race for one place.
        blocked_at = monotonic()
        try:
            async with asyncio.timeout(deadline.left_s):
                await self._line.acquire()
        except TimeoutError:
            raise pending.timeout(deadline, await self._space(pending.num_bytes)) from None
        try:
            while True:
                self._wake.check_open()  # `close` may have ended the push before this one
                while not (space := await self._space(pending.num_bytes)).has_room:
                    if not deadline.left_s:
                        raise pending.timeout(deadline, space)
                    seen = {self.keys.wake("room"): space.last_wake}
                    await self._wake.wait(seen, deadline.left_s)
                pending.blocked_ms = max(1, int(1000 * (monotonic() - blocked_at)))
                reply = await self._send(pending)
                if reply.word != "full":  # else another process was faster
                    return PushResult(reply.word)
        finally:
            self._line.release()

    async def _send(self, pending: PendingPush) -> PushReply:
        await self._durability.note_server()
        while True:
            reply = await self._pushes.send(pending)
            if reply.word == "too_large":
                raise ValueError(pending.too_large(reply))
            if reply.word not in ("missing", "again"):
                return reply

    async def _space(self, num_bytes: int) -> Space:
        """Whether there is room now for a push of so many bytes."""
        reply = await self._scripts.run("rollout/check_room", num_bytes)
        return Space(bool(reply[0]), reply[1].decode(), int(reply[2]), int(reply[3]))

    async def flush(self, timeout_s: float) -> bool:
        """Waits until everything this object pushed is on disk, and on a replica if there is one.

        False on timeout, or if the server was restarted since: groups that it lost count as running
        again, and their prompts will run again.
        """
        return await self._durability.flush(timeout_s)

    async def take_retry(self, group_id: str | None = None) -> PromptRef | None:
        """The next prompt to run again, or None.

        With a running group it comes from the group's shard and atomically becomes the group's
        prompt, as by `begin`, so that it is not lost if the worker dies.
        """
        token = secrets.token_hex(8) if group_id is None else ""
        reply = await self._scripts.run("rollout/take_retry", token, group_id or "")
        return None if reply is None else read_prompt(readable(reply))

    async def keep_tokens(
        self, group_id: str, oldest: int | None, parts: Mapping[str, bytes]
    ) -> bool:
        """Keeps named parts of a running group's tokens with its prompt; `oldest` is the oldest
        version that sampled one of them.

        They outlive the group if its worker dies or is stopped (`abandon` with the reason "stopped"
        and Rerun.always), until the prompt is suspected of having killed two. From now on the group
        counts as one of `oldest`. False, with nothing kept, if the group is not running, or if
        on_stale=wait could not wait for one so old.
        """
        version = "" if oldest is None else oldest
        for some in _split_parts(parts):
            arguments = [argument for part in some for argument in part]
            if await self._scripts.run("rollout/keep_tokens", group_id, version, *arguments) != 1:
                return False
        return True

    async def kept_tokens(self, group_id: str, prompt: PromptRef) -> dict[str, bytes]:
        """All parts kept with the prompt of this running group."""
        name = self.keys(f"kept:{prompt.index} {prompt.task}")
        found = cast("dict[bytes, bytes]", await self._redis.hgetall(name))
        return {readable(part): tokens for part, tokens in found.items()}

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
        """This rank's share of the step's global batch; waits until the batch can be formed.

        The first rank that finds `num_groups` fresh groups forms the batch; after `batch_timeout_s`
        `min_groups` suffice, if it is not None. Every rank that leases the same step gets its share
        of that batch, also on a repeated call; shares are balanced by tokens + `pair_cost` *
        pairs of tokens (`TrajectoryGroup.num_pairs`). A group is fresh if it
        lags behind `version` by at most max_staleness; stale groups are dropped, or with
        on_stale=mask_tokens have their over-age tokens masked out of the loss. A group that cannot
        be decoded is quarantined and missing.

        Raises TimeoutError that says what is missing, ValueError if the step was consumed or was
        leased with other arguments, and NotOwnerError if another lineage took over since this
        object reconciled.
        """
        enough = num_groups if min_groups is None else min_groups
        request = LeaseRequest(
            step, version, num_groups, num_shares, self._lineage, enough, pair_cost
        )
        request.check(share)
        batch = await form_in_time(
            partial(self._form, lease_token=new_token()),
            request,
            self._wake,
            timeout_s=timeout_s,
            batch_timeout_s=batch_timeout_s,
        )
        groups = await self.open_groups(batch, batch.share_of(share, num_shares))
        return batch.lease(request, groups)

    async def _form(self, request: LeaseRequest, lease_token: str) -> Formed | BatchNotReady:
        """The step's batch; forms it with this token if there is none yet."""
        step, version, num_groups, num_shares, lineage, enough, pair_cost = request
        arguments = (step, version, num_groups, num_shares, self._lease_ms, lease_token, lineage)
        while True:
            reply = await self._scripts.run(
                "trainer/form_batch", *arguments, BOUND, enough, repr(pair_cost)
            )
            match reply[0].decode():
                case "leased":
                    return Formed.parse(reply[1:])
                case "wait":
                    _, last_wake, ready, until_ms, blocking, at = reply
                    seen = {self.keys.wake("batch"): last_wake.decode()}
                    return BatchNotReady(
                        seen, int(ready), int(until_ms), readable(blocking), int(at)
                    )
                case "done":
                    raise request.is_consumed()
                case "conflict":
                    raise request.conflict(*map(int, reply[1:]))
                case "not_owner":
                    raise request.taken_over()

    async def open_groups(self, batch: Formed, group_ids: Sequence[str]) -> list[TrajectoryGroup]:
        """Fetches and decodes groups of a batch. Undecodable groups are quarantined."""
        groups = []
        for group_id, payload in zip(group_ids, await self._payloads(group_ids), strict=True):
            reason = "payload_missing"  # deleted by hand; the script ignores a dropped group
            if payload is not None:
                try:
                    groups.append(batch.open(group_id, payload))
                    continue
                except ValueError:
                    reason = "undecodable"
            await self._scripts.run("trainer/quarantine_group", batch.lease_token, reason, group_id)
        return groups

    async def _payloads(self, group_ids: Sequence[str]) -> list[Payload | None]:
        """The payload of each group; None if it is gone, b"" if it is damaged."""
        if not group_ids:
            return []
        keys = [self.keys.payload(group_id) for group_id in group_ids]
        try:
            return [
                None if first is None else await self._joined(key, first)
                for key, first in zip(keys, await self._values(keys), strict=True)
            ]
        except (DamagedRunError, ValueError):  # one damaged group must not affect the others
            if len(group_ids) == 1:
                return [b""]
            return [payload for i in group_ids for payload in await self._payloads([i])]

    async def _joined(self, key: str, first: memoryview) -> Payload:
        more = num_chunks(first)
        if not more:
            return first
        return join_payload(first, await self._values([f"{key}:{i + 1}" for i in range(more)]))

    async def _values(self, keys: Sequence[str]) -> list[memoryview | None]:
        return cast("list[memoryview | None]", await self._redis.receive(keys, self._blocks.take))

    async def validate(self, lease: Lease, version: int) -> frozenset[str]:
        """Ids of the batch that may be trained at `version`. Call it just before the step.

        Applies the current max_staleness, drops the other groups and renews the lease. Groups that
        now need more of their tokens masked return to ready. Empty if the lease was lost: lease the
        step again.
        """
        arguments = (version, lease.lease_token, self._lease_ms, _masked_below(lease))
        kept: list[str] = []
        for part in _parts(lease.group_ids):
            kept += texts(await self._scripts.run("trainer/validate_lease", *arguments, *part))
        return frozenset(kept)

    async def renew(self, lease: Lease) -> int:
        """Extends a lease. Returns the number of groups that it still holds, 0 if it was lost."""
        arguments = (lease.lease_token, self._lease_ms)
        return await self._sum("trainer/renew_lease", arguments, lease.group_ids)

    async def keep_renewed(self, lease: Lease) -> None:
        """Renews the lease until it is lost or this is cancelled."""
        await renew_until_lost(self.renew, lease, self._lease_ms)

    async def consume(self, lease: Lease, group_ids: Collection[str]) -> int:
        """Marks groups as trained; returns the number of groups consumed by this lease.

        0 if the lease was lost: the groups are ready again or leased anew.
        """
        arguments = (lease.lease_token, lease.step, lease.version, _masked_below(lease))
        return await self._sum("trainer/consume_groups", arguments, sorted(group_ids))

    async def ack(self, upto_step: int, lineage: str | None = None) -> int:
        """Deletes groups of all steps up to one whose checkpoint is durable; returns how many.

        Raises NotOwnerError, with nothing changed, if `lineage` is not the buffer's current one.
        """
        total = 0
        while True:
            reply = await self._scripts.run("trainer/ack_steps", upto_step, lineage or "", BOUND)
            if reply[0] == b"not_owner":
                raise taken_over(f"lineage={lineage!r} acknowledges step {upto_step}")
            number_acked, is_more = reply
            total += int(number_acked)
            if not is_more:
                return total

    async def nack(self, lease: Lease, reason: str) -> int:
        """Returns the unconsumed groups of a lease to ready; returns how many."""
        arguments = (lease.lease_token, reason)
        return await self._sum("trainer/return_groups", arguments, lease.group_ids)

    async def publish_version(self, version: int) -> None:
        """Sets the trainer's version.

        Raises ValueError if it is below the last one, and NotOwnerError if another lineage took
        over since this object reconciled.
        """
        reply = await self._scripts.run("trainer/publish_version", version, self._lineage)
        if reply[0] == b"not_owner":
            raise taken_over(f"lineage={self._lineage!r} publishes version {version}")
        if reply[0] == b"older":
            raise ValueError(
                f"version={version}: {int(reply[1])} was published before, and versions only grow"
            )

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
        """Takes over the buffer for a trainer that starts or restores, before its first lease.

        `lineage` is new with every start; trainers of older lineages are fenced out. `step` and
        `version` are the checkpoint's (0 and 0 for none). Its weights are published again as
        `resume_version`, which must be above every published version unless `version` is the
        newest. Groups in the checkpoint (consumed up to `step`, or in `consumed_group_ids`) are
        acked; all other consumed or leased groups return to ready. Groups of versions between the
        two, whose weights no longer exist, are dropped; older ones are renumbered so that they keep
        their distance. After a crash, call again with the same arguments: the result covers all
        calls of this lineage.

        A trainer that goes on from a copy in memory names the step of the last checkpoint on disk,
        whose groups `consumed_group_ids` are: those consumed between the two stay consumed.

        Raises NotOwnerError if a later lineage took over, ValueError if `resume_version` was used.
        """
        durable = step if durable_step is None else durable_step
        await self.begin_reconcile(lineage, step, version, resume_version, durable)
        return await self.finish_reconcile(lineage, consumed_group_ids)

    async def begin_reconcile(
        self, lineage: str, step: int, version: int, resume_version: int, durable_step: int
    ) -> None:
        """Makes `lineage` the owner and fences out older ones.

        No batch is formed until `finish_reconcile` is done.
        """
        arguments = (lineage, step, version, resume_version, durable_step)
        reply = await self._scripts.run("trainer/begin_reconcile", *arguments)
        if reply[0] == b"behind":
            raise ValueError(
                f"resume_version={resume_version}: version {int(reply[1])} was published "
                "before; resume above it, for a number never names other weights"
            )
        if reply[0] == b"not_owner":
            raise taken_over(f"lineage={lineage!r} restores a checkpoint")

    async def finish_reconcile(
        self, lineage: str, consumed_group_ids: Collection[str]
    ) -> Reconciled:
        """Acks the groups in the checkpoint, then sorts the rest in bounded parts."""
        for part in _parts(sorted(consumed_group_ids)):
            if not await self._scripts.run("trainer/ack_reconciled", lineage, *part):
                raise taken_over(f"lineage={lineage!r} restores a checkpoint")
        while True:
            reply = await self._scripts.run("trainer/reconcile_groups", lineage, BOUND)
            if reply[0] == b"not_owner":
                raise taken_over(f"lineage={lineage!r} restores a checkpoint")
            is_more, acked, requeued, dropped, quarantined = map(int, reply)
            if not is_more:
                self._lineage = lineage
                return Reconciled(
                    acked=acked, requeued=requeued, dropped=dropped, quarantined=quarantined
                )

    async def are_consumed(self, group_ids: Collection[str]) -> bool:
        """Whether the step of each is done, and no checkpoint has been acknowledged since."""
        for part in _parts(sorted(group_ids)):
            if None in await self._redis.zmscore(self.keys("consumed"), list(part)):
                return False
        return True

    async def task_progress(self, step: int) -> TaskProgress:
        """What of the prompts has been begun, and what of these no step up to `step` has trained.

        Reads the server once, for a time that grows with the number of groups in the buffer.
        """
        positions, prompts = await self._scripts.run("inspect/list_prompts", step)
        pairs = zip(positions[::2], positions[1::2], strict=True)
        return TaskProgress(
            positions={int(worker): number(at) for worker, at in pairs if is_number(worker)},
            untrained=tuple(read_prompt(readable(text)) for text in prompts),
        )

    async def restore_progress(self, progress: TaskProgress) -> None:
        """Continues with a task's prompts in a server that has lost the run: those of `progress`
        that are untrained run first. Does nothing in a buffer that has begun any."""
        positions = [number for pair in progress.positions.items() for number in pair]
        prompts = [write_prompt(prompt) for prompt in progress.untrained]
        await self._scripts.run(
            "run_state/restore_prompts", len(progress.positions), *positions, *prompts
        )

    # Either side -----------------------------------------------------------------------------

    async def sweep(self) -> int:
        """Expires leases and credits, and drops stale ready groups; returns how many it moved."""
        total = 0
        while True:
            moved = await self._scripts.run("run_state/sweep_groups", BOUND, self._lease_ms)
            total += sum(map(int, moved))
            if max(moved) < BOUND:
                return total

    async def stats(self) -> BufferStats:
        """The buffer's counts, read atomically per shard."""
        return parse_stats(await self._scripts.run("inspect/read_stats"))

    async def group_state(self, group_id: str) -> str | None:
        """The state of a pushed group, as "ready" or "acked"; None for an unknown one, and
        `buffer.remember_s` after its end."""
        state = cast(
            "bytes | None", await self._redis.hget(self.keys(f"group:{group_id}"), "state")
        )
        return None if state is None else readable(state)

    async def events(self, group_id: str) -> list[GroupEvent]:
        """The group's events that are still in the audit stream, oldest first."""
        found: list[GroupEvent] = []
        position = "-"
        while position:
            arguments = (group_id, position, _EVENTS_AT_ONCE)
            next_position, entries = await self._scripts.run("inspect/read_events", *arguments)
            found += parse_events(entries)
            position = next_position.decode()
        return found

    async def change_settings(self, values: Mapping[str, str | int]) -> None:
        """Changes live settings of a running job, by their name without the section.

        Every value must be one that a launch would take. A lower max_staleness applies from the
        next sweep or lease.
        """
        pairs = [part for pair in values.items() for part in pair]
        await self._scripts.run("run_state/change_settings", *pairs)

    async def get_max_staleness(self) -> int:
        value = await self.setting("max_staleness")
        return value if value is not None else (await self.stats()).max_staleness

    async def get_leash(self) -> Leash:
        """What decides whether a token may still be trained."""
        found = await self._redis.hmget(self.keys("settings"), ["max_staleness", "gaps"])
        bound, gaps = cast("list[bytes | None]", found)
        if bound is None:
            return Leash(max_staleness=await self.get_max_staleness())
        return Leash(
            max_staleness=int(setting_number("max_staleness", readable(bound))),
            rollbacks=parse_rollbacks(readable(gaps or b"")),
        )

    async def setting(self, name: str) -> int | None:
        """An integer setting of the run; None before the run is opened."""
        value = cast("bytes | None", await self._redis.hget(self.keys("settings"), name))
        return None if value is None else int(setting_number(name, readable(value)))

    async def close(self) -> None:
        """Ends every wait in this object with BufferClosedError and closes the connections."""
        await self.end_waits()
        await self._redis.aclose()

    async def end_waits(self) -> None:
        await self._wake.close()
        await self._pushes.close()

    # Quarantine ------------------------------------------------------------------------------

    async def quarantined(self) -> list[QuarantinedGroup]:
        """The groups in quarantine, oldest first."""
        found: list[Any] = await self._redis.zrange(
            self.keys("quarantined"), 0, -1, withscores=True
        )
        groups = []
        for part in _parts(found):
            async with self._redis.pipeline(transaction=False) as pipe:
                for group_id, _ in part:
                    name = self.keys.group(readable(group_id))
                    pipe.hmget(name, ["why", "leases", "tokens"])
                replies = await pipe.execute(raise_on_error=False)
            for (group_id, at_ms), fields in zip(part, replies, strict=True):
                if isinstance(fields, Exception):  # overwritten by another client
                    fields = (b"damaged", None, None)
                why, leases, tokens = fields
                if why is not None:  # else it has just left
                    groups.append(
                        QuarantinedGroup(
                            group_id=readable(group_id),
                            at=int(at_ms) / 1000 if abs(at_ms) < 2**53 else 0.0,
                            reason=readable(why),
                            attempts=number(leases),
                            num_tokens=number(tokens),
                        )
                    )
        return groups

    async def release(self, group_id: str) -> bool:
        """Returns a quarantined group to ready, as if it had never been leased.

        False if it was not in quarantine. Raises ValueError if its data is incomplete.
        """
        reply = await self._scripts.run("inspect/release_group", group_id)
        if reply == -1:
            raise ValueError(
                f"group {group_id}: its data in Redis was deleted or overwritten, so that it "
                "cannot be trained; discard it"
            )
        return bool(reply)

    async def discard(self, group_id: str) -> bool:
        """Drops a quarantined group; False if it was not in quarantine."""
        return bool(await self._scripts.run("inspect/discard_group", group_id))

    async def quarantined_prompts(self) -> list[QuarantinedPrompt]:
        """The prompts that failed too often or killed two workers, oldest first."""
        found = cast(
            "dict[bytes, bytes]", await self._redis.hgetall(self.keys("quarantined_prompts"))
        )
        prompts = []
        for name, text in found.items():
            with suppress(ValueError):  # not written by us
                prompts.append(quarantined_prompt(readable(name), readable(text)))
        return sorted(prompts, key=lambda prompt: prompt.at)

    async def release_prompt(self, task: str, index: int) -> bool:
        """Runs a quarantined prompt again, with a clean record; False if it was not there."""
        return bool(await self._scripts.run("inspect/release_prompt", task, index, 1))

    async def discard_prompt(self, task: str, index: int) -> bool:
        """Removes a quarantined prompt without running it again; False if it was not there."""
        return bool(await self._scripts.run("inspect/release_prompt", task, index, 0))

    async def _sum(self, script: str, arguments: Sequence[Argument], ids: Sequence[str]) -> int:
        total = 0
        for part in _parts(ids):
            total += int(await self._scripts.run(script, *arguments, *part))
        return total


def quota(limit: int, shard: int, num_shards: int) -> int:
    """One shard's part of a limit; the parts of all shards add up to it."""
    whole, rest = divmod(limit, num_shards)
    return whole + (shard < rest)


def initial_settings(
    config: BufferConfig,
    groups_per_step: int,
    shard: int,
    oversampling: float,
    gradient_accumulation_steps: int,
) -> dict[str, str | int]:
    """Fields of one shard's `settings`; limits are split into quotas, "" for no limit."""

    def part(limit: int | None) -> str | int:
        return "" if limit is None else quota(limit, shard, config.shards)

    return {
        "max_staleness": config.max_staleness,
        "on_stale": config.on_stale.value,
        "max_retries": config.max_retries,
        "selector": config.selector.value,
        "capacity_groups": part(config.capacity_groups),
        "capacity_bytes": part(config.capacity_bytes),
        "on_full": config.on_full.value,
        "max_attempts": config.max_attempts,
        "remember_s": repr(config.remember_s),
        "audit_length": config.audit_length,
        "groups_per_step": groups_per_step,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "oversampling": repr(float(oversampling)),
        "shard": shard,
        "num_shards": config.shards,
        "trainer_version": 0,
        "acked_step": -1,
        "wanted": 0,
        "lineage": "",
        "gaps": "",
        "num_gaps": 0,
    }


def check_settings(
    settings: BufferConfig, groups_per_version: int, num_shards: int, there: int | None
) -> None:
    """`there` is the number of shards that the run was opened with, None if it was not."""
    if settings.shards != num_shards or (there is not None and there != num_shards):
        raise ValueError(
            f"buffer.shards={settings.shards}: this ReplayBuffer has {num_shards}, and the run "
            f"in Redis {there or 'none yet'}; a run keeps the number that it began with"
        )
    capacity = settings.capacity_groups
    if capacity is not None and capacity < groups_per_version:
        raise ValueError(
            f"buffer.capacity_groups={capacity}: what one update trains on, trainer.groups_per_step"
            f" * trainer.gradient_accumulation_steps = {groups_per_version} groups, would never "
            "fit; raise it to at least that"
        )


def no_room(group_id: str, timeout_s: float, in_use: int, limit: int) -> TimeoutError:
    return TimeoutError(
        f"no room for group {group_id} within {timeout_s:g} s: {in_use} groups are "
        f"running, ready or leased and {limit} may be; the trainer consumed none"
    )


def _masked_below(lease: Lease) -> int | str:
    return "" if lease.mask_below_version is None else lease.mask_below_version


def _split_parts(parts: Mapping[str, bytes]) -> Iterator[list[tuple[str, bytes]]]:
    """The parts in calls of bounded size; one call without parts if there are none."""
    some: list[tuple[str, bytes]] = []
    num_bytes = 0
    for part in parts.items():
        if some and (num_bytes + len(part[1]) > _KEPT_BYTES or len(some) == _MAX_IDS):
            yield some
            some, num_bytes = [], 0
        some.append(part)
        num_bytes += len(part[1])
    yield some


def _parts(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), _MAX_IDS):
        yield items[start : start + _MAX_IDS]
