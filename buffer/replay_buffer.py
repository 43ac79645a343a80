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
import logging
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, cast

from redis.exceptions import ResponseError

from buffer.errors import RunPausedError, taken_over
from buffer.lease import Leasing
from buffer.push import PendingPush, Pushes
from buffer.redis.client import BufferConnectionError, BufferRedis
from buffer.redis.deadline import Deadline
from buffer.redis.durability import Durability
from buffer.redis.keys import Keys, check_group_id
from buffer.redis.replies import Reply, is_number, number, readable, setting_number
from buffer.redis.scripts import BOUND
from buffer.redis.wakeups import Wake
from buffer.results import (
    Admission,
    BufferStats,
    EventsPart,
    Failure,
    GroupEvent,
    Lease,
    NewGroup,
    PushResult,
    QuarantinedGroup,
    QuarantinedPrompt,
    Reconciled,
    StatsReply,
    TaskProgress,
    quarantined_prompt,
    read_prompt,
    read_stats,
    sum_stats,
    write_prompt,
)
from buffer.shard_routes import (
    TO_ALL,
    Route,
    at_group,
    by_lease,
    ids_by_shard,
    merge,
    nothing,
    only,
    unite,
)
from buffer.staleness import Leash, parse_rollbacks
from buffer.types import PromptRef, Rerun, TrajectoryGroup
from configs.checks import live_text
from configs.schema import BufferConfig

CAPACITIES = ("capacity_groups", "capacity_bytes")
"""Settings of which a shard has its part."""
_MAX_IDS = 128
"""Ids that one script call may get."""
_KEPT_BYTES = 1 << 20
"""Kept tokens that one script call may get, unless one part alone has more."""
_EVENTS_AT_ONCE = 500

_log = logging.getLogger(__name__)


class Credits(Reply):
    """The reply to an admission: credits, or what to wait for."""

    prompts: tuple[str, ...]
    """One for each group that got a credit; "" for none."""
    version: int
    """The trainer's current version."""
    seen: Wake = ("", "")
    """Without a credit, what to wait for, and how full the shard is."""
    in_use: int = 0
    limit: int = 0
    is_paused: bool = False


class Outcome(Reply):
    """The reply to a trainer that names a version."""

    word: Literal["announced", "same", "older", "begun", "behind", "not_owner"]
    newest: int = 0
    """The version that was announced before, for older and behind."""


class ReplayBuffer(Leasing):
    """A client of one run's buffer, created in and used from one event loop.

    buffer = await connect_buffer(url, run, settings)
    admission = await buffer.admit("group-1", timeout_s=60)         # a worker
    await buffer.push(group)
    lease = await buffer.lease(step=1, version=0, ...)              # a trainer rank
    await buffer.consume(lease, lease.group_ids)
    """

    num_shards = 1

    def __init__(
        self, redis: BufferRedis, run: str, settings: BufferConfig, shard: int = 0
    ) -> None:
        """`redis` comes from `connect`; `close` closes its connections too.

        Of `settings` it takes the timeouts and the compression. `shard` selects the hash tag.
        """
        super().__init__(redis, Keys(run, shard), settings.lease_timeout_s)
        durability = Durability(redis, self.keys("marker"), self._wake)
        self._pushes = Pushes(self._scripts, self.keys, self._wake, durability)
        self._durability = durability
        self._wait_timeout_s = settings.wait_timeout_s
        self._compress = settings.compress
        self._caller, self._num_calls = secrets.token_hex(8), 0
        self._admitting = asyncio.Lock()

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

        Raises ValueError if the number of shards differs from the run's.
        """
        there = await self.setting("num_shards")
        if settings.shards != self.num_shards or there not in (None, self.num_shards):
            raise ValueError(
                f"buffer.shards={settings.shards}: this ReplayBuffer has {self.num_shards}, and "
                f"the run in Redis {there or 'none yet'}; a run keeps the number that it began with"
            )
        values = initial_settings(
            settings, groups_per_step, oversampling, gradient_accumulation_steps
        )
        await self.create(values, replaced)

    async def create(self, values: Mapping[str, str | int], replaced: Collection[str]) -> None:
        """`open` of one shard, without the checks; `values` are those of the run."""
        await self._scripts.load()  # only the controller's user may
        shard = self.keys.shard
        initial = {**in_shard(values, shard, int(values["num_shards"])), "shard": shard}
        async with self._redis.pipeline(transaction=True) as pipe:
            for name, value in initial.items():
                pipe.hsetnx(self.keys("settings"), name, value)
            if tuned := sorted({*replaced} - initial.keys()):  # by `change_settings`, before
                pipe.hdel(self.keys("settings"), *tuned)
            await pipe.execute()
        if changed := {name: initial[name] for name in replaced if name in initial}:
            await self.change_settings(changed)
        await self._scripts.run("run_state/note_server", int)

    # Rollout side ----------------------------------------------------------------------------

    async def admit(self, group_id: str, timeout_s: float) -> Admission:
        """`admit_groups` for one, without a new prompt."""
        [admission] = await self.admit_groups([NewGroup(group_id)], timeout_s)
        return admission

    async def admit_groups(
        self, groups: Sequence[NewGroup], timeout_s: float, worker: int | None = None
    ) -> list[Admission]:
        """Waits for room, and takes credits for the first of these groups, for all that have room.

        A prompt that waits to run again comes before the groups' own, with one credit alone. From
        then on a group's prompt survives the worker: see `begin`. Use the returned ids: with
        several shards they name the shard that had room. A credit expires if it is not renewed for
        `lease_timeout_s`. Raises TimeoutError that says how full the buffer is, and RunPausedError.
        """
        first = groups[0].group_id
        for group in groups:
            check_group_id(group.group_id)
        deadline = Deadline(timeout_s)
        while True:
            refused: list[Credits] = []
            for shard, own in self._places(groups):
                credits = await shard.try_admit(own, worker)
                if credits.prompts:
                    given = zip(own, credits.prompts, strict=False)  # those that had room
                    return [
                        Admission(
                            one.group_id, read_prompt(text) if text else None, credits.version
                        )
                        for one, text in given
                    ]
                refused.append(credits)
            # Shards are paused one after the other.
            if all(credits.is_paused for credits in refused):
                raise RunPausedError(f"group {first} does not begin: the run is paused")
            if not deadline.left_s:
                raise TimeoutError(
                    f"no room for group {first} within {timeout_s:g} s: "
                    f"{sum(credits.in_use for credits in refused)} groups are running, ready or "
                    f"leased and {sum(credits.limit for credits in refused)} may be; the trainer "
                    "consumed none"
                )
            await self._wake.wait([credits.seen for credits in refused], deadline.left_s)
            groups = groups[:1]  # meanwhile the others may have lost their room at the engines

    def _places(
        self, groups: Sequence[NewGroup]
    ) -> Iterable[tuple[ReplayBuffer, Sequence[NewGroup]]]:
        """The shards to try in turn, each with the groups by the ids that they would have there."""
        return [(self, groups)]

    async def try_admit(self, groups: Sequence[NewGroup], worker: int | None) -> Credits:
        """Credits for those groups that have room now."""
        try:
            async with self._admitting:  # a call with a number below the last one gets nothing
                self._num_calls += 1
                return await self._scripts.run(
                    "rollout/admit_groups",
                    Credits,
                    groups=[
                        {**one._asdict(), "prompt": one.prompt and write_prompt(one.prompt)}
                        for one in groups
                    ],
                    worker=worker or 0,
                    is_worker=worker is not None,
                    caller=self._caller_for(worker),
                    call=self._num_calls,
                    credit_ms=self._lease_ms,
                )
        except asyncio.CancelledError:  # the caller does not know which have a credit
            await asyncio.shield(self._call_off(groups, worker))
            raise

    def _caller_for(self, worker: int | None) -> str:
        return self._caller if worker is None else f"{self._caller}-{worker}"

    async def _call_off(self, groups: Sequence[NewGroup], worker: int | None) -> None:
        await self.try_admit([], worker)  # a copy that is still under way comes too late now
        for one in groups:
            await self.abandon(one.group_id, "stopped", Rerun.always)

    @Route(at_group, only)
    async def begin(self, group_id: str, prompt: PromptRef, worker: int, position: int) -> bool:
        """Records atomically an admitted group's prompt and its worker's position in its tasks.

        From then on the prompt survives the worker: if the group's credit expires or the worker is
        reclaimed, the prompt runs again, and a late push of the group is a duplicate. The third
        time this happens to a prompt it is quarantined. False, with nothing recorded, if the group
        is not running.
        """
        return await self._scripts.run(
            "rollout/begin_group",
            bool,
            group_id=group_id,
            prompt=write_prompt(prompt),
            worker=worker,
            position=position,
        )

    @Route(at_group, only)
    async def fail(self, group_id: str, prompt: PromptRef, max_failures: int) -> Failure | None:
        """Ends a running group that could not be completed; its prompt runs again.

        After `max_failures` of one prompt, at any workers, the prompt is quarantined instead. None,
        with nothing changed, if the group was not running.
        """
        found: Failure | None = await self._scripts.run(
            "rollout/fail_group",
            Failure | None,
            group_id=group_id,
            prompt=write_prompt(prompt),
            max_failures=max_failures,
        )
        return found

    @Route(TO_ALL, sum)
    async def reclaim(self, worker: int, *, counts_as_death: bool = True) -> int:
        """Ends all groups that a restarted worker ran before; their prompts run again.

        These are the groups whose ids begin with "<worker>-": call it before the worker admits any.
        From then on only this object admits groups for it.
        `counts_as_death`: False if the whole run had ended, which is no fault of a prompt. Returns
        the number of groups.
        """
        cursor, total = "0", 0
        while True:
            cursor, num_ended = await self._scripts.run(
                "rollout/reclaim_worker",
                tuple[str, int],
                worker=worker,
                caller=self._caller_for(worker),
                cursor=cursor,
                bound=_MAX_IDS,
                credit_ms=self._lease_ms,
                counts_as_death=counts_as_death,
            )
            total += num_ended
            if cursor == "0":
                return total

    @Route(ids_by_shard, sum)
    async def renew_credits(self, group_ids: Collection[str]) -> int:
        """Renews the credits of running groups; returns how many are still running."""
        return await self._sum("rollout/renew_credits", list(group_ids), credit_ms=self._lease_ms)

    @Route(at_group, only)
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
        return await self._scripts.run(
            "rollout/abandon_group",
            bool,
            group_id=group_id,
            reason=reason,
            rerun=rerun.value,
            prompt=None if prompt is None else write_prompt(prompt),
        )

    @Route(at_group, only)
    async def push(self, group: TrajectoryGroup, timeout_s: float | None = None) -> PushResult:
        """Stores a finished group.

        If the buffer is full it waits (on_full=block; raises TimeoutError after `timeout_s`), drops
        the stalest ready groups, or raises BufferFullError. Raises ValueError if the group cannot
        be encoded or is larger than the capacity.
        """
        limit_s = self._wait_timeout_s if timeout_s is None else timeout_s
        return await self._pushes.push(PendingPush(group, self._compress), limit_s)

    @Route(TO_ALL, all)
    async def flush(self, timeout_s: float) -> bool:
        """Waits until everything this object pushed is on disk, and on a replica if there is one.

        False on timeout, or if the server was restarted since: groups that it lost count as running
        again, and their prompts will run again.
        """
        return await self._durability.flush(timeout_s)

    @Route(at_group, only)
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
        for some in split_parts(parts):
            raw = [argument for part in some for argument in part]
            kept = await self._scripts.run(
                "rollout/keep_tokens", int, *raw, group_id=group_id, oldest=oldest
            )
            if kept != 1:
                return False
        return True

    @Route(at_group, only)
    async def kept_tokens(self, group_id: str, prompt: PromptRef) -> dict[str, bytes]:
        """All parts kept with the prompt of this running group."""
        name = self.keys(f"kept:{prompt.index} {prompt.task}")
        found = cast("dict[bytes, bytes]", await self._redis.hgetall(name))
        return {readable(part): tokens for part, tokens in found.items()}

    # Trainer side ----------------------------------------------------------------------------

    @Route(by_lease, unite)
    async def validate(self, lease: Lease, version: int) -> frozenset[str]:
        """Ids of the batch that may be trained at `version`. Call it just before the step.

        Applies the current max_staleness, drops the other groups and renews the lease. Groups that
        now need more of their tokens masked return to ready. Empty if the lease was lost: lease the
        step again.
        """
        fresh: list[str] = []
        for part in _parts(lease.group_ids):
            fresh += await self._scripts.run(
                "trainer/validate_lease",
                list[str],
                version=version,
                lease_token=lease.lease_token,
                lease_ms=self._lease_ms,
                mask_below_version=lease.mask_below_version,
                group_ids=part,
            )
        return frozenset(fresh)

    @Route(by_lease, sum)
    async def renew(self, lease: Lease) -> int:
        """Extends a lease. Returns the number of groups that it still holds, 0 if it was lost."""
        return await self._sum(
            "trainer/renew_lease",
            lease.group_ids,
            lease_token=lease.lease_token,
            lease_ms=self._lease_ms,
        )

    async def keep_renewed(self, lease: Lease) -> None:
        """Renews the lease until it is lost or this is cancelled."""
        while True:
            await asyncio.sleep(self._lease_ms / 3000)
            try:
                if await self.renew(lease) == 0:
                    return
            except (BufferConnectionError, ResponseError) as error:  # the lease may outlast this
                _log.warning("the lease of step %d is not renewed: %s", lease.step, error)

    async def consume(self, lease: Lease, group_ids: Collection[str]) -> int:
        """Marks groups as trained; returns the number of groups consumed by this lease.

        0 if the lease was lost: the groups are ready again or leased anew.
        """
        return await self._sum(
            "trainer/consume_groups",
            sorted(group_ids),
            lease_token=lease.lease_token,
            step=lease.step,
            version=lease.version,
            mask_below_version=lease.mask_below_version,
        )

    @Route(TO_ALL, sum, is_home_last=True)
    async def ack(self, upto_step: int, lineage: str | None = None) -> int:
        """Deletes groups of all steps up to one whose checkpoint is durable; returns how many.

        Raises NotOwnerError, with nothing changed, if `lineage` is not the buffer's current one.
        """
        total, is_more = 0, True
        while is_more:
            acked: tuple[int, bool] | None = await self._scripts.run(
                "trainer/ack_steps",
                tuple[int, bool] | None,
                step=upto_step,
                lineage=lineage or "",
                bound=BOUND,
            )
            if acked is None:
                raise taken_over(f"lineage={lineage!r} acknowledges step {upto_step}")
            total, is_more = total + acked[0], acked[1]
        return total

    @Route(by_lease, sum)
    async def nack(self, lease: Lease, reason: str) -> int:
        """Returns the unconsumed groups of a lease to ready; returns how many."""
        return await self.give_back(lease.lease_token, lease.group_ids, reason)

    async def give_back(self, lease_token: str, group_ids: Sequence[str], reason: str) -> int:
        """`nack` by the token alone."""
        return await self._sum(
            "trainer/return_groups", group_ids, lease_token=lease_token, reason=reason
        )

    @Route(TO_ALL, nothing, is_home_last=True)
    async def announce_version(self, version: int) -> None:
        """Sets the trainer's version.

        Raises ValueError if it is below the last one, and NotOwnerError if another lineage took
        over since this object reconciled.
        """
        outcome = await self._scripts.run(
            "trainer/announce_version", Outcome, version=version, lineage=self._lineage
        )
        if outcome.word == "not_owner":
            raise taken_over(f"lineage={self._lineage!r} announces version {version}")
        if outcome.word == "older":
            raise ValueError(
                f"version={version}: {outcome.newest} was announced before, and versions only grow"
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
        `resume_version`, which must be above every announced version unless `version` is the
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
        outcome = await self._scripts.run(
            "trainer/begin_reconcile",
            Outcome,
            lineage=lineage,
            step=step,
            version=version,
            resume_version=resume_version,
            durable_step=durable_step,
        )
        if outcome.word == "behind":
            raise ValueError(
                f"resume_version={resume_version}: version {outcome.newest} was announced "
                "before; resume above it, for a number never names other weights"
            )
        if outcome.word == "not_owner":
            raise taken_over(f"lineage={lineage!r} restores a checkpoint")

    async def finish_reconcile(
        self, lineage: str, consumed_group_ids: Collection[str]
    ) -> Reconciled:
        """Acks the groups in the checkpoint, then sorts the rest in bounded parts."""
        for part in _parts(sorted(consumed_group_ids)):
            if not await self._scripts.run(
                "trainer/ack_reconciled", bool, lineage=lineage, group_ids=part
            ):
                raise taken_over(f"lineage={lineage!r} restores a checkpoint")
        is_more = True
        while is_more:
            sorted_out: tuple[bool, Reconciled] | None = await self._scripts.run(
                "trainer/reconcile_groups",
                tuple[bool, Reconciled] | None,
                lineage=lineage,
                bound=BOUND,
            )
            if sorted_out is None:
                raise taken_over(f"lineage={lineage!r} restores a checkpoint")
            is_more, totals = sorted_out
        self._lineage = lineage
        return totals

    @Route(ids_by_shard, all)
    async def are_consumed(self, group_ids: Collection[str]) -> bool:
        """Returns whether each step is done and no checkpoint was acknowledged since."""
        for part in _parts(sorted(group_ids)):
            if None in await self._redis.zmscore(self.keys("consumed"), list(part)):
                return False
        return True

    async def task_progress(self, step: int) -> TaskProgress:
        """The prompts that were begun, and which of them no step up to `step` has trained.

        Reads the server once, for a time that grows with the number of groups in the buffer.
        """
        positions, prompts = await self._scripts.run(
            "inspect/list_prompts", tuple[list[str], list[str]], step=step
        )
        pairs = zip(positions[::2], positions[1::2], strict=True)
        return TaskProgress(
            positions={int(worker): number(at) for worker, at in pairs if is_number(worker)},
            untrained=tuple(map(read_prompt, prompts)),
        )

    async def restore_progress(self, progress: TaskProgress) -> None:
        """Continues with a task's prompts in a server that has lost the run: those of `progress`
        that are untrained run first. Does nothing in a buffer that has begun any."""
        await self._scripts.run(
            "run_state/restore_prompts",
            bool,
            positions=list(progress.positions.items()),
            prompts=[write_prompt(prompt) for prompt in progress.untrained],
        )

    # Either side -----------------------------------------------------------------------------

    @Route(TO_ALL, sum)
    async def sweep(self) -> int:
        """Expires leases and credits, and drops stale ready groups; returns how many it moved."""
        total = 0
        while True:
            moved = await self._scripts.run(
                "run_state/sweep_groups", list[int], bound=BOUND, credit_ms=self._lease_ms
            )
            total += sum(moved)
            if max(moved) < BOUND:
                return total

    @Route(TO_ALL, sum_stats)
    async def stats(self) -> BufferStats:
        """The buffer's counts, read atomically per shard."""
        return read_stats(await self._scripts.run("inspect/read_stats", StatsReply))

    @Route(at_group, only)
    async def group_state(self, group_id: str) -> str | None:
        """The state of a group, as "running" or "acked"; None for an unknown one, and
        `buffer.remember_s` after its end."""
        async with self._redis.pipeline(transaction=False) as pipe:
            # In this order: a push in between moves it from the one to the other.
            pipe.zscore(self.keys("running"), group_id)
            pipe.hget(self.keys.group(group_id), "state")
            running, state = await pipe.execute()
        return readable(state) if state else None if running is None else "running"

    @Route(at_group, only)
    async def events(self, group_id: str) -> list[GroupEvent]:
        """The group's events that are still in the audit stream, oldest first."""
        found: list[GroupEvent] = []
        position = "-"
        while position:
            part = await self._scripts.run(
                "inspect/read_events",
                EventsPart,
                group_id=group_id,
                first=position,
                bound=_EVENTS_AT_ONCE,
            )
            found += part.events()
            position = part.next
        return found

    async def change_settings(
        self, values: Mapping[str, str | int], expected: Mapping[str, str] | None = None
    ) -> bool:
        """Changes live settings of a running job, by their name without the section; none of them,
        and returns False, if those of `expected` have other values now.

        Every value must be one that a launch would take. A lower max_staleness applies from the
        next sweep or lease.
        """
        is_made = await self._scripts.run(
            "run_state/change_settings", int, values=values, expected=expected or {}
        )
        return bool(is_made)

    async def get_leash(self) -> Leash:
        """The bound on staleness and the rollbacks, which decide whether a token may be trained."""
        found = await self._redis.hmget(self.keys("settings"), ["max_staleness", "rollbacks"])
        bound, rollbacks = cast("list[bytes | None]", found)
        if bound is None:  # raises an error that says why
            return Leash(max_staleness=(await self.stats()).max_staleness)
        return Leash(
            max_staleness=int(setting_number("max_staleness", readable(bound))),
            rollbacks=parse_rollbacks(readable(rollbacks or b"")),
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

    @Route(TO_ALL, merge)
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

    @Route(at_group, only)
    async def release(self, group_id: str) -> bool:
        """Returns a quarantined group to ready, as if it had never been leased.

        False if it was not in quarantine. Raises ValueError if its data is incomplete.
        """
        reply = await self._scripts.run("inspect/release_group", int, group_id=group_id)
        if reply == -1:
            raise ValueError(
                f"group {group_id}: its data in Redis was deleted or overwritten, so that it "
                "cannot be trained; discard it"
            )
        return bool(reply)

    @Route(at_group, only)
    async def discard(self, group_id: str) -> bool:
        """Drops a quarantined group; False if it was not in quarantine."""
        return await self._scripts.run("inspect/discard_group", bool, group_id=group_id)

    @Route(TO_ALL, merge)
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

    @Route(TO_ALL, any)
    async def release_prompt(self, task: str, index: int) -> bool:
        """Runs a quarantined prompt again, with a clean record; False if it was not there."""
        return await self._end_quarantine(task, index, runs_again=True)

    @Route(TO_ALL, any)
    async def discard_prompt(self, task: str, index: int) -> bool:
        """Removes a quarantined prompt without running it again; False if it was not there."""
        return await self._end_quarantine(task, index, runs_again=False)

    async def _end_quarantine(self, task: str, index: int, runs_again: bool) -> bool:
        return await self._scripts.run(
            "inspect/release_prompt", bool, task=task, index=str(index), runs_again=runs_again
        )

    async def _sum(self, script: str, ids: Sequence[str], **request: Any) -> int:
        """The sum of the script's replies to the ids, some at a time."""
        total = 0
        for part in _parts(ids):
            total += await self._scripts.run(script, int, group_ids=part, **request)
        return total


def quota(limit: int, shard: int, num_shards: int) -> int:
    """One shard's part of a limit; the parts of all shards add up to it."""
    whole, rest = divmod(limit, num_shards)
    return whole + (shard < rest)


def in_shard(values: Mapping[str, str | int], shard: int, num_shards: int) -> dict[str, str | int]:
    """The settings of one shard: of each capacity its part."""
    parts = {
        name: quota(int(value), shard, num_shards)
        for name in CAPACITIES
        if is_number(str(value := values.get(name, "")))
    }
    return {**values, **parts}


def initial_settings(
    config: BufferConfig,
    groups_per_step: int,
    oversampling: float,
    gradient_accumulation_steps: int,
) -> dict[str, str | int]:
    """Fields of `settings`; each shard has its part of the capacities, and its number."""
    return {
        "max_staleness": config.max_staleness,
        "on_stale": config.on_stale.value,
        "paused": live_text(config.paused),
        "max_retries": config.max_retries,
        "selector": config.selector.value,
        "capacity_groups": live_text(config.capacity_groups),
        "capacity_bytes": live_text(config.capacity_bytes),
        "on_full": config.on_full.value,
        "max_attempts": config.max_attempts,
        "remember_s": repr(config.remember_s),
        "audit_length": config.audit_length,
        "groups_per_step": groups_per_step,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "oversampling": repr(float(oversampling)),
        "num_shards": config.shards,
        "trainer_version": 0,
        "acked_step": -1,
        "wanted": 0,
        "lineage": "",
        "rollbacks": "",
        "num_rollbacks": 0,
    }


def split_parts(parts: Mapping[str, bytes]) -> Iterator[list[tuple[str, bytes]]]:
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
