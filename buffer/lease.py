"""A lease: the step's batch is formed or found, and this rank's share of it is fetched and decoded.

LeaseRequest ──> form_batch ──> BatchNotReady ──> wait for an event, ask again
                     │
                   Formed ──> the ids of this rank's share ──> payloads ──> groups ──> Lease
"""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Sequence
from math import inf
from typing import Literal

import msgspec

from buffer.errors import NotOwnerError, RunPausedError, taken_over
from buffer.redis.client import BufferRedis, DamagedRunError
from buffer.redis.deadline import Deadline
from buffer.redis.keys import Keys
from buffer.redis.payloads import Blocks
from buffer.redis.replies import Reply
from buffer.redis.scripts import BOUND, Scripts
from buffer.redis.wakeups import Wake, WakeStreams
from buffer.results import Lease
from buffer.staleness import mask_over_age, renumber
from buffer.types import TrajectoryGroup
from buffer.wire.chunks import join_payload, num_chunks
from buffer.wire.codec import decode_group

Payload = bytes | memoryview
Renumbered = tuple[tuple[str, tuple[int, ...]], ...]
"""Groups whose payload has version numbers from before a rollback: the new numbers of the versions
with trainable tokens, in ascending order of the old."""


class LeaseRequest(msgspec.Struct, frozen=True):
    """The arguments of a lease that all ranks of a step share."""

    step: int
    version: int
    num_groups: int
    num_shares: int
    lineage: str
    enough: int
    """So many groups suffice now; `num_groups` until a full batch is no longer waited for."""
    pair_cost: float
    """Cost of a pair of tokens in attention, in that of a token; it balances the shares."""

    def check(self, share: int) -> None:
        if not 0 <= share < self.num_shares <= self.num_groups:
            raise ValueError(
                f"share={share}, num_shares={self.num_shares}, num_groups={self.num_groups}: "
                "0 <= share < num_shares <= num_groups must hold"
            )
        if not self.num_shares <= self.enough <= self.num_groups:
            raise ValueError(
                f"min_groups={self.enough}, num_shares={self.num_shares}, "
                f"num_groups={self.num_groups}: num_shares <= min_groups <= num_groups must hold"
            )


class Refused(Reply, tag="refused"):
    """No batch will be formed for this request."""

    reason: Literal["done", "not_owner", "conflict"]
    version: int = 0
    num_groups: int = 0
    num_shares: int = 0
    """For conflict: the arguments of the lease before."""

    def error(self, request: LeaseRequest) -> ValueError | NotOwnerError:
        if self.reason == "not_owner":
            return taken_over(f"lineage={request.lineage!r} leases step {request.step}")
        if self.reason == "done":
            return ValueError(
                f"step={request.step}: its groups were consumed before; lease a later step"
            )
        return ValueError(
            f"step={request.step} was leased with version, num_groups, num_shares = "
            f"{self.version}, {self.num_groups}, {self.num_shares}; ranks must ask for the same"
        )


class Paused(Reply, tag="paused"):
    """The run is paused, and the step has no batch yet."""

    def error(self, request: LeaseRequest) -> RunPausedError:
        return RunPausedError(f"step {request.step} has no batch: the run is paused")


class Again(Reply, tag="again"):
    """The bound of clean-up was reached."""


class BatchNotReady(Reply, tag="wait"):
    """Why there is no batch yet, and what to wait for."""

    seen: tuple[Wake, ...]
    ready: int = 0
    until_ms: int = -1
    """Milliseconds after which to retry even without an event; -1 for never."""
    blocking: str = ""
    """The running group that the step waits for (on_stale=wait)."""
    blocking_version: int = 0

    def shortage(self, request: LeaseRequest, timeout_s: float) -> str:
        text = (
            f"step {request.step} waited {timeout_s:g} s for {request.enough} fresh groups "
            f"from the rollout pool: {self.ready} are ready"
        )
        if self.blocking:
            text += (
                f"; buffer.on_stale=wait delays the step for group {self.blocking}, which "
                f"started at version {self.blocking_version} and would be too old afterwards"
            )
        return text


class Formed(Reply, tag="leased"):
    """A leased batch."""

    lease_token: str
    ids: tuple[str, ...]
    """The whole batch as it was formed."""
    costs: tuple[int, ...]
    """Cost of each group in `ids` in passes, in tokens."""
    still_leased: frozenset[str]
    """The groups that are still leased with the token."""
    mask_below_version: int | None
    """Tokens sampled before this version get masked; None unless on_stale is mask_tokens."""
    renumbered: Renumbered

    def share_of(self, share: int, num_shares: int) -> list[str]:
        """Ids of one rank's share that are still leased."""
        mine = split_by_cost(self.costs, num_shares)[share]
        return [self.ids[i] for i in mine if self.ids[i] in self.still_leased]

    def open(self, group_id: str, payload: Payload) -> TrajectoryGroup:
        """The group as it is trained. Raises ValueError if the payload is not this group."""
        group = decode_group(payload)
        if group.group_id != group_id:
            raise ValueError(f"holds group {group.group_id!r}")
        for name, numbers in self.renumbered:
            if name == group_id:
                group = renumber(group, numbers)
        if self.mask_below_version is None:
            return group
        return mask_over_age(group, self.mask_below_version)

    def lease(self, request: LeaseRequest, groups: Sequence[TrajectoryGroup]) -> Lease:
        return Lease(
            step=request.step,
            version=request.version,
            lease_token=self.lease_token,
            group_ids=self.ids,
            groups=tuple(groups),
            mask_below_version=self.mask_below_version,
        )


class Leasing:
    """A client of one shard that leases; the other verbs are ReplayBuffer's."""

    def __init__(self, redis: BufferRedis, keys: Keys, lease_timeout_s: float) -> None:
        self.keys = keys
        self._redis = redis
        self._scripts = Scripts(redis, keys)
        self._wake = WakeStreams(redis)
        self._blocks = Blocks()
        self._lease_ms = int(1000 * lease_timeout_s)
        self._lineage = ""

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
        leased with other arguments, RunPausedError if the run is paused and no rank has this batch,
        and NotOwnerError if another lineage took over since this object reconciled.
        """
        enough = num_groups if min_groups is None else min_groups
        request = LeaseRequest(
            step, version, num_groups, num_shares, self._lineage, enough, pair_cost
        )
        request.check(share)
        batch = await self._form_in_time(request, Deadline(timeout_s), Deadline(batch_timeout_s))
        groups = await self.open_groups(batch, batch.share_of(share, num_shares))
        return batch.lease(request, groups)

    async def _form_in_time(
        self, request: LeaseRequest, deadline: Deadline, full: Deadline
    ) -> Formed:
        """The step's batch: a full one until `full`, then one of `request.enough` groups."""
        token = secrets.token_hex(8)
        while True:
            waits_for_full = full.left_s > 0
            enough = request.num_groups if waits_for_full else request.enough
            wanted = msgspec.structs.replace(request, enough=enough)
            batch = await self._form(wanted, token)
            if isinstance(batch, Formed):
                return batch
            # A smaller batch is asked for once, also if the reply about a full one took all the
            # time.
            is_next_smaller = waits_for_full and not full.left_s
            if not (deadline.left_s or is_next_smaller):
                raise TimeoutError(batch.shortage(wanted, deadline.timeout_s))
            left_s = min(deadline.left_s, full.left_s if waits_for_full else inf)
            if batch.until_ms >= 0:  # no event is sent when a lease expires
                left_s = min(left_s, batch.until_ms / 1000)
            await self._wake.wait(batch.seen, left_s)

    async def _form(self, request: LeaseRequest, token: str) -> Formed | BatchNotReady:
        """The step's batch; forms it with this token if there is none yet."""
        while True:
            reply: Formed | BatchNotReady | Again | Refused | Paused = await self._scripts.run(
                "trainer/form_batch",
                Formed | BatchNotReady | Again | Refused | Paused,
                lease=request,
                lease_token=token,
                lease_ms=self._lease_ms,
                bound=BOUND,
            )
            if isinstance(reply, Refused | Paused):
                raise reply.error(request)
            if not isinstance(reply, Again):
                return reply

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
            await self.quarantine(batch.lease_token, group_id, reason)
        return groups

    async def quarantine(self, lease_token: str, group_id: str, reason: str) -> bool:
        """Quarantines a group that its rank cannot use; False if the lease does not hold it."""
        return await self._scripts.run(
            "trainer/quarantine_group",
            bool,
            lease_token=lease_token,
            group_id=group_id,
            reason=reason,
        )

    async def _payloads(self, group_ids: Sequence[str]) -> list[Payload | None]:
        """The payload of each group; None if it is gone, b"" if it is damaged."""
        if not group_ids:
            return []
        keys = [self.keys.payload(group_id) for group_id in group_ids]
        try:
            firsts = await self._redis.receive(keys, self._blocks.allocate)
            return [
                None if first is None else await self._joined(key, first)
                for key, first in zip(keys, firsts, strict=True)
            ]
        except (DamagedRunError, ValueError):  # one damaged group must not affect the others
            if len(group_ids) == 1:
                return [b""]
            return [payload for i in group_ids for payload in await self._payloads([i])]

    async def _joined(self, key: str, first: memoryview) -> Payload:
        rest = [f"{key}:{i + 1}" for i in range(num_chunks(first))]
        if not rest:
            return first
        return join_payload(first, await self._redis.receive(rest, self._blocks.allocate))


def split_by_cost(costs: Sequence[int], num_shares: int) -> tuple[tuple[int, ...], ...]:
    """Indices of `costs` in `num_shares` shares, each ascending and none empty.

    Longest processing time first (Graham 1969): the largest group goes to the lightest share. The
    heaviest share is at most 4/3 - 1/(3 num_shares) of the optimum. A pure function, so ranks that
    know the same batch split it identically without communicating.

    Raises ValueError if there are fewer groups than shares.
    """
    if not 1 <= num_shares <= len(costs):
        raise ValueError(
            f"num_shares={num_shares} with {len(costs)} groups: every rank needs at least one"
        )
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    # The size breaks ties, so that groups without cost spread out too.
    lightest = [(0, 0, share) for share in range(num_shares)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, size, share = heapq.heappop(lightest)
        shares[share].append(index)
        heapq.heappush(lightest, (load + costs[index], size + 1, share))
    return tuple(tuple(sorted(share)) for share in shares)
