"""Which shards a verb of the buffer goes to, and how their results become one.

Each verb of ReplayBuffer carries its route as a decorator, which changes nothing in a buffer of one
shard. ShardedReplayBuffer gets the verb from it:

    @Route(at_group, only)
    async def begin(self, group_id: str, ...) -> bool: ...     the shard that holds the group

    @Route(by_lease, sum)
    async def renew(self, lease: Lease) -> int: ...            the shards of a lease, added up

An admitted group's id ends in `@<shard>`, the shard that had room; any other id is placed by its
hash. Both are pure functions of the id, so every process finds a group without a lookup.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from zlib import crc32

from buffer.results import Lease
from buffer.types import TrajectoryGroup

_MARK = "@"

V = TypeVar("V", bound=Callable[..., Any])


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


TO_ALL = None
"""The split of a verb that goes with the whole call to all shards."""
ROUTES: dict[str, Route] = {}
"""The route of each verb that has one; the others are written out in ShardedReplayBuffer."""


@dataclass(slots=True, frozen=True)
class Route:
    """The way over the shards of the verb that it decorates."""

    split: Callable[[Any, int], Mapping[int, Any]] | None
    """From a call's first argument and the number of shards: the shards that it goes to, each with
    its part of that argument; or TO_ALL."""
    join: Callable[[list[Any]], Any]
    """Makes one result of the shards' results."""
    is_home_last: bool = False
    """One shard after another, the home shard last: what it holds then holds in all."""

    def __call__(self, verb: V) -> V:
        ROUTES[verb.__name__] = self
        return verb

    async def send(
        self, shards: Sequence[Any], verb: str, given: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Any:
        """Calls the verb of the shards on this route, and joins what they return."""
        if self.split is None:
            calls = [(shard, given) for shard in shards]
        else:
            parts = self.split(given[0], len(shards))
            calls = [(shards[k], (part, *given[1:])) for k, part in parts.items()]
        if self.is_home_last:
            calls = [*calls[1:], calls[0]]
            return self.join([await getattr(one, verb)(*args, **options) for one, args in calls])
        sent = (getattr(shard, verb)(*args, **options) for shard, args in calls)
        return self.join(list(await asyncio.gather(*sent)))


def at_group(target: str | TrajectoryGroup, num_shards: int) -> dict[int, Any]:
    """To the shard that holds the group of the first argument."""
    group_id = target if isinstance(target, str) else target.group_id
    return {shard_of(group_id, num_shards): target}


def by_lease(lease: Lease, num_shards: int) -> dict[int, Lease]:
    """To the shards that hold groups of a lease, each with its part."""
    return {
        k: replace(lease, group_ids=tuple(ids), groups=())
        for k, ids in ids_by_shard(lease.group_ids, num_shards).items()
    }


def only(results: list[Any]) -> Any:
    """The result of the one shard that was called."""
    return results[0]


def nothing(_: list[Any]) -> None:
    """Joins the results of a verb that returns none."""


def merge(results: list[list[Any]]) -> list[Any]:
    """Joins lists of what was quarantined, oldest first."""
    return sorted((item for part in results for item in part), key=lambda item: item.at)


def unite(results: list[frozenset[str]]) -> frozenset[str]:
    return frozenset[str]().union(*results)
