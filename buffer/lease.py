"""A rank's lease request, the batch formed for it, and how its groups are decoded."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from buffer.errors import NotOwnerError, taken_over
from buffer.redis.client import BufferConnectionError
from buffer.redis.replies import optional_int, parse_renumbered, readable, texts
from buffer.redis.wakeups import Deadline, WakeStreams
from buffer.results import Lease
from buffer.staleness import mask_over_age, renumber
from buffer.types import TrajectoryGroup
from buffer.wire.codec import decode_group

Payload = bytes | memoryview


class LeaseRequest(NamedTuple):
    """What a rank requests; all ranks of a step request the same."""

    step: int
    version: int
    num_groups: int
    num_shares: int
    lineage: str
    enough: int
    """So many groups suffice now; `num_groups` until a full batch is no longer waited for."""
    pair_cost: float
    """Of a pair of tokens in attention, in that of a token; by it the shares are balanced."""

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

    def is_consumed(self) -> ValueError:
        return ValueError(f"step={self.step}: its groups were consumed before; lease a later step")

    def conflict(self, version: int, num_groups: int, num_shares: int) -> ValueError:
        return ValueError(
            f"step={self.step} was leased with version, num_groups, num_shares = {version}, "
            f"{num_groups}, {num_shares}; ranks must ask for the same"
        )

    def taken_over(self) -> NotOwnerError:
        return taken_over(f"lineage={self.lineage!r} leases step {self.step}")


class BatchNotReady(NamedTuple):
    """Why there is no batch yet, and what to wait for."""

    seen: Mapping[str, str]
    """Wake streams, with the entry to wait behind."""
    ready: int = 0
    until_ms: int = -1
    """Milliseconds after which to retry even without an event; -1 for never."""
    blocking: str = ""
    """The running group that the step waits for (on_stale=wait)."""
    blocking_version: int = 0

    async def wait(self, wake: WakeStreams, at_most_s: float) -> None:
        """Waits until a retry may succeed."""
        # No event is sent when a lease expires: wake up for it.
        until_s = self.until_ms / 1000 if self.until_ms >= 0 else at_most_s
        await wake.wait(self.seen, min(at_most_s, until_s))

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


class Formed(NamedTuple):
    """A leased batch."""

    lease_token: str
    deadline_ms: int
    ids: tuple[str, ...]
    """The whole batch as it was formed."""
    costs: tuple[int, ...]
    """What each group in `ids` costs in passes, in tokens."""
    held: frozenset[str]
    """The groups that are still leased with the token."""
    mask_below_version: int | None
    """Tokens sampled before this version get masked; None unless on_stale is mask_tokens."""
    renumbered: Mapping[str, tuple[int, ...]]
    """Held groups whose payload has version numbers from before a rollback: the new numbers of its
    versions with trainable tokens, in ascending order of the old."""

    @classmethod
    def parse(cls, fields: Sequence[Any]) -> Formed:
        """Parses the reply of form_batch.lua."""
        lease_token, deadline, ids, costs, held, mask_below, renumbered = fields
        return cls(
            readable(lease_token),
            int(deadline),
            texts(ids),
            tuple(map(int, costs)),
            frozenset(texts(held)),
            optional_int(mask_below),
            parse_renumbered(renumbered),
        )

    def share_of(self, share: int, num_shares: int) -> list[str]:
        """Ids of one rank's share that are still held."""
        mine = split_by_cost(self.costs, num_shares)[share]
        return [self.ids[i] for i in mine if self.ids[i] in self.held]

    def open(self, group_id: str, payload: Payload) -> TrajectoryGroup:
        """The group as it is trained. Raises ValueError if the payload is not this group."""
        group = decode_group(payload)
        if group.group_id != group_id:
            raise ValueError(f"holds group {group.group_id!r}")
        if group_id in self.renumbered:
            group = renumber(group, self.renumbered[group_id])
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
            deadline=self.deadline_ms / 1000,
        )


async def form_in_time(
    form: Callable[[LeaseRequest], Awaitable[Formed | BatchNotReady]],
    request: LeaseRequest,
    wake: WakeStreams,
    *,
    timeout_s: float,
    batch_timeout_s: float,
) -> Formed:
    """The step's batch: a full one for `batch_timeout_s`, then one of `request.enough` groups.

    Raises TimeoutError that says what is missing.
    """
    deadline, full = Deadline(timeout_s), Deadline(batch_timeout_s)
    while True:
        waits_for_full = full.left_s > 0
        wanted = request._replace(enough=request.num_groups) if waits_for_full else request
        batch = await form(wanted)
        if isinstance(batch, Formed):
            return batch
        # A smaller batch is asked for once, also if the answer about a full one took all the time.
        is_next_smaller = waits_for_full and not full.left_s
        if not (deadline.left_s or is_next_smaller):
            raise TimeoutError(batch.shortage(wanted, timeout_s))
        await batch.wait(wake, min(deadline.left_s, full.left_s if waits_for_full else inf))


def new_token() -> str:
    """A new lease token."""
    return secrets.token_hex(8)


async def renew_until_lost(
    renew: Callable[[Lease], Awaitable[int]], lease: Lease, lease_ms: int
) -> None:
    while True:
        await asyncio.sleep(lease_ms / 3000)
        with contextlib.suppress(BufferConnectionError):  # the lease may outlast the outage
            if await renew(lease) == 0:
                return


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
