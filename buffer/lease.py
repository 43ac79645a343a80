"""Hands a trainer rank its share of a step's batch: form it or wait, fetch, check, mask."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from buffer.balance import split_by_tokens
from buffer.errors import NotOwnerError
from buffer.redis.wakeups import Deadline, WakeStreams
from buffer.results import Lease
from buffer.shard import Formed, NotFormed, Shard
from buffer.shards import ShardSet
from buffer.staleness import mask_over_age, renumber
from buffer.types import TrajectoryGroup
from buffer.wire.codec import decode_group

Payload = bytes | memoryview


class LeaseRequest(NamedTuple):
    """What the ranks ask for; the same at each of them."""

    step: int
    version: int
    num_groups: int
    num_shares: int
    lease_ms: int
    lineage: str


class BatchNotReady(NamedTuple):
    """Why there is no batch yet, and what to wait for."""

    seen: Mapping[str, str]
    """Wake streams, with the entry to wait behind."""
    ready: int
    until_ms: int
    """Milliseconds until it is worth to look again in any case; -1 for never."""
    blocking: str = ""
    """The running group that is waited for (on_stale=wait); its version follows."""
    blocking_version: int = 0


class BatchFormer(Protocol):
    async def form(self, request: LeaseRequest) -> Formed | BatchNotReady:
        """The step's batch, formed now if there is none. Raises what `refusal` makes of a no."""


class OneShardFormer:
    """Forms batches where all groups are in one shard: one script does it all."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    async def form(self, request: LeaseRequest) -> Formed | BatchNotReady:
        owner = new_owner()
        while True:
            reply = await self._shard.form(**request._asdict(), owner=owner)
            if isinstance(reply, Formed):
                return reply
            if reply.word == "wait":
                seen = {self._shard.keys.wake("batch"): reply.last_wake}
                return BatchNotReady(
                    seen, reply.ready, reply.until_ms, reply.blocking, reply.blocking_version
                )
            if reply.word != "again":
                raise refusal(request, reply)


def new_owner() -> str:
    """A new lease token."""
    return secrets.token_hex(8)


def refusal(request: LeaseRequest, reply: NotFormed) -> Exception:
    """The error for a lease that cannot be had by waiting."""
    step = request.step
    match reply.word:
        case "done":
            return ValueError(f"step={step}: its groups were consumed before; lease a later step")
        case "conflict":
            return ValueError(
                f"step={step} was leased with version, num_groups, num_shares = {reply.version}, "
                f"{reply.num_groups}, {reply.num_shares}; ranks must ask for the same"
            )
        case "not_owner":
            return NotOwnerError(
                f"step={step}: another trainer took this buffer over; end this one"
            )
        case word:
            raise AssertionError(word)


class Leasing:
    """Leases, as one process asks for them."""

    def __init__(self, shards: ShardSet, former: BatchFormer, wake: WakeStreams) -> None:
        self._shards = shards
        self._former = former
        self._wake = wake

    async def lease(self, request: LeaseRequest, share: int, timeout_s: float) -> Lease:
        """See ReplayBuffer.lease."""
        deadline = Deadline(timeout_s)
        while True:
            reply = await self._former.form(request)
            if isinstance(reply, Formed):
                return await self._receive(request, share, reply)
            if not deadline.left_s:
                raise TimeoutError(_shortage(request, reply, timeout_s))
            # No event is sent when a lease expires: wake up for it.
            until_s = reply.until_ms / 1000 if reply.until_ms >= 0 else deadline.left_s
            await self._wake.wait(reply.seen, min(deadline.left_s, until_s))

    async def _receive(self, request: LeaseRequest, share: int, formed: Formed) -> Lease:
        mine = split_by_tokens(formed.tokens, request.num_shares)[share]
        wanted = [formed.ids[i] for i in mine if formed.ids[i] in formed.held]
        payloads = await self._fetch(wanted)
        groups = []
        for group_id in wanted:
            group = await self._open(group_id, payloads[group_id], formed)
            if group is not None:
                groups.append(group)
        return Lease(
            step=request.step,
            version=request.version,
            owner=formed.owner,
            group_ids=formed.ids,
            groups=tuple(groups),
            oldest=formed.oldest,
            deadline=formed.deadline_ms / 1000,
        )

    async def _fetch(self, group_ids: Sequence[str]) -> Mapping[str, Payload | None]:
        async def fetch(shard: Shard, ids: list[str]) -> Iterable[tuple[str, Payload | None]]:
            return zip(ids, await _payloads(shard, ids), strict=True)

        return {
            i: payload
            for part in await self._shards.holding(group_ids, fetch)
            for i, payload in part
        }

    async def _open(
        self, group_id: str, payload: Payload | None, formed: Formed
    ) -> TrajectoryGroup | None:
        """The group as it is to be trained; None if it had to be put away."""
        if payload is None:
            # Deleted by hand; or dropped since by a sibling's validate: then this does nothing.
            await self._put_away(group_id, formed.owner, "payload_missing")
            return None
        try:
            group = decode_group(payload)
            if group.group_id != group_id:
                raise ValueError(f"holds group {group.group_id!r}")
            if group_id in formed.renumbered:
                group = renumber(group, formed.renumbered[group_id])
        except ValueError:
            await self._put_away(group_id, formed.owner, "undecodable")
            return None
        return group if formed.oldest is None else mask_over_age(group, formed.oldest)

    async def _put_away(self, group_id: str, owner: str, reason: str) -> None:
        await self._shards.of(group_id).quarantine(owner, reason, group_id)


async def _payloads(shard: Shard, ids: Sequence[str]) -> list[Payload | None]:
    try:
        return await shard.payloads(ids)
    except ValueError:  # the chunks of one do not fit together: it must not spoil the others
        if len(ids) == 1:
            return [b""]
        return [payload for i in ids for payload in await _payloads(shard, [i])]


def _shortage(request: LeaseRequest, not_ready: BatchNotReady, timeout_s: float) -> str:
    text = (
        f"step {request.step} waited {timeout_s:g} s for {request.num_groups} fresh groups from "
        f"the rollout pool: {not_ready.ready} are ready"
    )
    if not_ready.blocking:
        text += (
            f"; buffer.on_stale=wait holds the step back for group {not_ready.blocking}, which "
            f"began at version {not_ready.blocking_version} and would be too old afterwards"
        )
    return text
