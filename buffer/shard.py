"""One complete buffer at one hash tag: every verb is one script, or SETs and a script.

No waits and no codec here: `ReplayBuffer` waits, encodes and spreads groups over shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from buffer.redis.batching import Batcher, Message
from buffer.redis.client import BufferRedis, DamagedRunError
from buffer.redis.keys import Keys
from buffer.redis.payloads import Allocate, Blocks
from buffer.redis.replies import (
    AckReply,
    Admitted,
    Candidate,
    Formed,
    HeldReply,
    Locked,
    NoRoom,
    NotFormed,
    Peek,
    PublishReply,
    PushRecord,
    PushReply,
    QuarantinedRecord,
    ReconcileBegun,
    ReconcileReply,
    Space,
    StepRecord,
    SweptReply,
    TakenReply,
    number,
    parse_formed,
    parse_held,
    parse_locked,
    parse_peek,
    parse_push,
    parse_taken,
    readable,
    texts,
)
from buffer.redis.scripts import Argument, Scripts
from buffer.results import (
    BufferStats,
    Failure,
    GroupEvent,
    QuarantinedPrompt,
    parse_events,
    parse_stats,
    quarantined_prompt,
    read_prompt,
    write_prompt,
)
from buffer.types import PromptRef, Rerun
from buffer.wire.chunks import join_payload, num_chunks

__all__ = [
    "BOUND",
    "AckReply",
    "Admitted",
    "Candidate",
    "Formed",
    "HeldReply",
    "Locked",
    "NoRoom",
    "NotFormed",
    "Peek",
    "PublishReply",
    "PushRecord",
    "PushReply",
    "QuarantinedRecord",
    "ReconcileBegun",
    "ReconcileReply",
    "Shard",
    "Space",
    "StepRecord",
    "SweptReply",
    "TakenReply",
]

BOUND = 32
"""Groups that one call of a script may move: far below 10 ms, also at a busy server."""
_MAX_IDS = 128
"""Ids that one call of a script may be given."""
_ORPHAN_EXPIRY_MS = 600_000
"""A payload whose push never committed disappears by itself."""
_EVENTS_AT_ONCE = 500

MakeGroup = Callable[[Allocate], tuple[PushRecord, Sequence[bytes | memoryview]]]
"""What to store: the record, and what `split_payload` makes of the payload. A payload lies in the
memory that it is given, which is good until the push is answered."""


class Shard:
    """One shard's verbs. Each may be sent again after a lost reply, with the effect of once."""

    def __init__(self, redis: BufferRedis, keys: Keys) -> None:
        """`redis` stays the caller's."""
        self._redis = redis
        self._scripts = Scripts(redis, keys)
        self._pushes = Batcher(partial(self._scripts.exchange, "rollout/push_groups", (BOUND,)))
        self._blocks = Blocks()
        self.keys = keys

    async def open(self, initial: Mapping[str, str]) -> None:
        """Creates the settings (see `initial_settings`). Those that exist already stay.

        Loads the scripts too, for those who may not: all but the controller's user.
        """
        await self._scripts.load()
        async with self._redis.pipeline(transaction=True) as pipe:
            for name, value in initial.items():
                pipe.hsetnx(self.keys("settings"), name, value)
            await pipe.execute()

    async def close(self) -> None:
        """Ends the pushes that are under way with BufferClosedError."""
        await self._pushes.close()

    # Rollout side ----------------------------------------------------------------------------

    async def admit(self, group_id: str, credit_ms: int) -> Admitted | NoRoom:
        """Takes a credit for the group; a second call for it renews the credit."""
        reply = await self._scripts.run("rollout/admit_group", group_id, credit_ms)
        if reply[0] == b"admitted":
            return Admitted(int(reply[1]))
        return NoRoom(reply[1].decode(), int(reply[2]), int(reply[3]))

    async def renew_credits(self, ids: Sequence[str], credit_ms: int) -> int:
        """How many of the groups are running; their credits last longer now."""
        return await self._sum("rollout/renew_credits", (credit_ms,), ids)

    async def abandon(
        self,
        group_id: str,
        reason: str,
        rerun: Rerun = Rerun.never,
        prompt: PromptRef | None = None,
    ) -> bool:
        """Frees the credit of a group that will never be pushed; False if it had none."""
        assert (prompt is None) == (rerun is Rerun.never), "name the prompt that is to run again"
        text = "" if prompt is None else write_prompt(prompt)
        arguments = (group_id, reason, rerun.value, text)
        return bool(await self._scripts.run("rollout/abandon_group", *arguments))

    async def begin(self, group_id: str, prompt: PromptRef, worker: int, position: int) -> bool:
        """Notes a running group's prompt and its worker's position; False if it is not running."""
        reply = await self._scripts.run(
            "rollout/begin_group", group_id, write_prompt(prompt), worker, position
        )
        return bool(reply)

    async def fail(self, group_id: str, prompt: PromptRef, max_failures: int) -> Failure | None:
        """Ends a running group that could not be completed; None if it was not running."""
        reply = await self._scripts.run(
            "rollout/fail_group", group_id, write_prompt(prompt), max_failures
        )
        if reply is None:
            return None
        return Failure(num_failures=int(reply[0]), is_quarantined=bool(reply[1]))

    async def reclaim(self, prefix: str, bound: int = _MAX_IDS) -> int:
        """Ends the running groups whose ids begin so; their prompts run again. How many."""
        cursor, total = "0", 0
        while True:
            reply = await self._scripts.run("rollout/reclaim_worker", prefix, cursor, bound)
            cursor, total = reply[0].decode(), total + int(reply[1])
            if cursor == "0":
                return total

    async def push(self, make: MakeGroup, num_bytes: int, blocked_ms: int = 0) -> PushReply:
        """Stores a group, which is made when it is sent and may be made again.

        `num_bytes` is about how large it is. `blocked_ms` is counted with the call that stores it
        (0: it was not blocked).
        """

        def message(allocate: Allocate) -> Message:
            record, chunks = make(allocate)
            first = self.keys.payload(record.group_id)
            values = [(first, chunks[0])]
            values += [(f"{first}:{number}", chunk) for number, chunk in enumerate(chunks[1:], 1)]
            arguments = (*record.arguments, len(chunks) - 1, blocked_ms)
            return self._scripts.after_sets(values, _ORPHAN_EXPIRY_MS, *arguments)

        return parse_push(await self._pushes.send(message, num_bytes))

    async def has_space(self, num_bytes: int) -> Space:
        """Whether a push of so many bytes would find room now."""
        has_room, last_wake, groups, in_use = await self._scripts.run(
            "rollout/check_room", num_bytes
        )
        return Space(bool(has_room), last_wake.decode(), int(groups), int(in_use))

    async def take_retry(self, token: str, group_id: str = "") -> PromptRef | None:
        """A prompt to run again; the same token gets the same one.

        With a running group it is noted as that group's, and the group is the token.
        """
        reply = await self._scripts.run("rollout/take_retry", token, group_id)
        return None if reply is None else read_prompt(readable(reply))

    # Trainer side: a batch in one shard ------------------------------------------------------

    async def form(
        self,
        *,
        step: int,
        version: int,
        num_groups: int,
        num_shares: int,
        lease_ms: int,
        owner: str,
        lineage: str = "",
        bound: int = BOUND,
    ) -> Formed | NotFormed:
        """The step's batch, formed with this owner if there is none yet."""
        return parse_formed(
            await self._scripts.run(
                "trainer/form_batch",
                step,
                version,
                num_groups,
                num_shares,
                lease_ms,
                owner,
                lineage,
                bound,
            )
        )

    # Trainer side: a batch in several shards -------------------------------------------------

    async def lock_step(
        self, step: int, token: str, lock_ms: int, *, lineage: str = "", void_owner: str = ""
    ) -> Locked | StepRecord | NotFormed:
        """At the home shard: the record of the step's batch, else the lock to form it.

        `void_owner`: the caller saw that nothing of this owner's batch is held any more.
        """
        return parse_locked(
            await self._scripts.run("shards/lock_step", step, token, lock_ms, lineage, void_owner)
        )

    async def unlock(self, token: str) -> bool:
        """Gives the lock back without a batch; False if it was not held."""
        return bool(await self._scripts.run("shards/unlock_step", token))

    async def peek(self, version: int, limit: int, bound: int = BOUND, wanted: int = 0) -> Peek:
        """What this shard would give to a batch at `version`, at most `limit` groups.

        With `wanted` a push wakes wake:batch once so many are ready here.
        """
        return parse_peek(
            await self._scripts.run("shards/peek_groups", version, limit, bound, wanted)
        )

    async def take(
        self, version: int, ids: Sequence[str], owner: str, lease_ms: int, step: int
    ) -> TakenReply:
        """Leases those of the groups that are ready and fresh. One call, however many they are."""
        return parse_taken(
            await self._scripts.run("shards/take_groups", version, owner, lease_ms, step, *ids)
        )

    async def record(
        self,
        *,
        step: int,
        version: int,
        num_groups: int,
        num_shares: int,
        owner: str,
        ids: Sequence[str],
        tokens: Sequence[int],
        oldest: int | None,
        token: str,
    ) -> bool:
        """At the home shard: keeps the step's batch and gives the lock back.

        False if the lock was lost meanwhile: another rank forms the batch, give the groups back.
        """
        batch = (" ".join(ids), " ".join(map(str, tokens)), "" if oldest is None else oldest)
        return bool(
            await self._scripts.run(
                "shards/record_batch", step, version, num_groups, num_shares, owner, *batch, token
            )
        )

    async def held(self, owner: str, ids: Sequence[str]) -> HeldReply:
        """What an owner still has of these groups."""
        return parse_held(await self._scripts.run("shards/list_held", owner, *ids))

    # Trainer side: a batch in hand -----------------------------------------------------------

    async def validate(
        self, *, version: int, owner: str, lease_ms: int, oldest: int | None, ids: Sequence[str]
    ) -> list[str]:
        """The ids that may be trained at `version`; renews them and drops the others.

        `oldest` is what the batch was formed with: tokens before it are masked already.
        """
        masked_below = "" if oldest is None else oldest
        kept: list[str] = []
        for part in _parts(ids):
            arguments = (version, owner, lease_ms, masked_below, *part)
            kept += texts(await self._scripts.run("trainer/validate_lease", *arguments))
        return kept

    async def renew(self, owner: str, lease_ms: int, ids: Sequence[str]) -> int:
        """Extends the deadline of the groups that the owner still holds; how many they are."""
        return await self._sum("trainer/renew_lease", (owner, lease_ms), ids)

    async def consume(
        self, *, owner: str, step: int, version: int, oldest: int | None, ids: Sequence[str]
    ) -> int:
        """Marks groups as trained; how many are, by this owner.

        No ids, at the home shard: marks the step as done whose groups lie elsewhere.
        """
        masked_below = "" if oldest is None else oldest
        arguments = (owner, step, version, masked_below)
        if not ids:
            return int(await self._scripts.run("trainer/consume_groups", *arguments))
        return await self._sum("trainer/consume_groups", arguments, ids)

    async def ack(self, upto_step: int, lineage: str = "", bound: int = BOUND) -> AckReply:
        """Forgets consumed groups of steps up to this one. `lineage`: only if it is the owner."""
        reply = await self._scripts.run("trainer/ack_steps", upto_step, lineage, bound)
        if reply[0] == b"not_owner":
            return AckReply(0, is_owner=False, is_more=False)
        return AckReply(int(reply[0]), is_owner=True, is_more=bool(reply[1]))

    async def nack(self, owner: str, reason: str, ids: Sequence[str]) -> int:
        """Gives back what the owner still holds; how many went back."""
        return await self._sum("trainer/return_groups", (owner, reason), ids)

    # Quarantine ------------------------------------------------------------------------------

    async def quarantine(self, owner: str, reason: str, group_id: str) -> bool:
        """Puts a group that the owner cannot use aside; True if it is in quarantine now."""
        return bool(await self._scripts.run("trainer/quarantine_group", owner, reason, group_id))

    async def quarantined(self) -> list[QuarantinedRecord]:
        """The groups in quarantine, the longest there first."""
        found: list[Any] = await self._redis.zrange(
            self.keys("quarantined"), 0, -1, withscores=True
        )
        records = []
        for start in range(0, len(found), _MAX_IDS):
            part = found[start : start + _MAX_IDS]
            async with self._redis.pipeline(transaction=False) as pipe:
                for group_id, _ in part:
                    name = self.keys.group(readable(group_id))
                    pipe.hmget(name, ["why", "leases", "tokens"])
                replies = await pipe.execute(raise_on_error=False)
            for (group_id, at_ms), fields in zip(part, replies, strict=True):
                if isinstance(fields, Exception):  # overwritten while it was here
                    fields = (b"damaged", None, None)
                why, leases, tokens = fields
                if why is not None:  # else it has just left
                    at_ms = int(at_ms) if abs(at_ms) < 2**53 else 0
                    record = (at_ms, readable(why), number(leases), number(tokens))
                    records.append(QuarantinedRecord(readable(group_id), *record))
        return records

    async def release(self, group_id: str) -> bool:
        """quarantined -> ready, with all its attempts; False if it was not there.

        Raises ValueError if too little is left of it for that.
        """
        reply = await self._scripts.run("inspect/release_group", group_id)
        if reply == -1:
            raise ValueError(
                f"group {group_id}: what Redis held of it was deleted or overwritten, so that it "
                "cannot be trained; discard it"
            )
        return bool(reply)

    async def discard(self, group_id: str) -> bool:
        """quarantined -> dropped; False if it was not there."""
        return bool(await self._scripts.run("inspect/discard_group", group_id))

    async def quarantined_prompts(self) -> list[QuarantinedPrompt]:
        """The prompts in quarantine, in no order."""
        found = cast(
            "dict[bytes, bytes]", await self._redis.hgetall(self.keys("quarantined_prompts"))
        )
        prompts = []
        for name, text in found.items():
            with suppress(ValueError):  # none that we have written
                prompts.append(quarantined_prompt(readable(name), readable(text)))
        return prompts

    async def release_prompt(self, task: str, index: int, *, run_again: bool) -> bool:
        """A prompt leaves the quarantine; False if it was not there."""
        return bool(await self._scripts.run("inspect/release_prompt", task, index, int(run_again)))

    # Versions and lineage --------------------------------------------------------------------

    async def publish(self, version: int, lineage: str = "") -> PublishReply:
        """Makes `version` the trainer's."""
        reply = await self._scripts.run("trainer/publish_version", version, lineage)
        return PublishReply(reply[0].decode(), int(reply[1]) if len(reply) > 1 else version)

    async def reconcile_begin(
        self, lineage: str, *, step: int, version: int, resume_version: int
    ) -> ReconcileBegun:
        """Makes `lineage` the owner; from here on every older one is fenced out.

        Until `reconcile` has nothing more to do no batch is formed.
        """
        reply = await self._scripts.run(
            "trainer/begin_reconcile", lineage, step, version, resume_version
        )
        return ReconcileBegun(reply[0].decode(), *map(int, reply[1:]))

    async def reconcile_acked(self, lineage: str, ids: Sequence[str]) -> bool:
        """Acknowledges groups that the checkpoint contains; False if `lineage` is not the owner."""
        for part in _parts(ids):
            if not await self._scripts.run("trainer/ack_reconciled", lineage, *part):
                return False
        return True

    async def reconcile(self, lineage: str, bound: int = BOUND) -> ReconcileReply:
        """One part of sorting what was in hand; call it until there is no more."""
        reply = await self._scripts.run("trainer/reconcile_groups", lineage, bound)
        if reply[0] == b"not_owner":
            return ReconcileReply(is_owner=False, is_more=False)
        is_more, acked, requeued, dropped, quarantined = reply
        return ReconcileReply(True, bool(is_more), acked, requeued, dropped, quarantined)

    # Either side -----------------------------------------------------------------------------

    async def sweep(self, bound: int = BOUND) -> SweptReply:
        """Ends expired credits and leases and drops stale ready groups."""
        expired, dropped, credits = map(
            int, await self._scripts.run("run_state/sweep_groups", bound)
        )
        return SweptReply(expired, dropped, credits, max(expired, dropped, credits) == bound)

    async def tune(self, max_staleness: int) -> None:
        await self._scripts.run("run_state/set_max_staleness", max_staleness)

    async def stats(self) -> BufferStats:
        """The shard's numbers, all of one moment."""
        return parse_stats(await self._scripts.run("inspect/read_stats"))

    async def events(self, group_id: str) -> list[GroupEvent]:
        """What one group lived through, as far back as the audit stream goes."""
        found: list[GroupEvent] = []
        position = "-"
        while position:
            reply = await self._scripts.run(
                "inspect/read_events", group_id, position, _EVENTS_AT_ONCE
            )
            found += parse_events(reply[1])
            position = reply[0].decode()
        return found

    async def payloads(self, ids: Sequence[str]) -> list[bytes | memoryview | None]:
        """The payload of each group, None if it is gone.

        ValueError if a chunk is missing, or the key holds something else than bytes.
        """
        if not ids:
            return []
        keys = [self.keys.payload(group_id) for group_id in ids]
        try:
            return [
                None if first is None else await self._joined(key, first)
                for key, first in zip(keys, await self._values(keys), strict=True)
            ]
        except DamagedRunError as error:
            raise ValueError(str(error)) from error

    async def _joined(self, key: str, first: memoryview) -> bytes | memoryview:
        number = num_chunks(first)
        if not number:
            return first
        return join_payload(first, await self._values([f"{key}:{i + 1}" for i in range(number)]))

    async def _values(self, keys: Sequence[str]) -> list[memoryview | None]:
        return cast("list[memoryview | None]", await self._redis.receive(keys, self._blocks.take))

    async def _sum(self, script: str, arguments: Sequence[Argument], ids: Sequence[str]) -> int:
        total = 0
        for part in _parts(ids):
            total += int(await self._scripts.run(script, *arguments, *part))
        return total


def _parts(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), _MAX_IDS):
        yield ids[start : start + _MAX_IDS]
