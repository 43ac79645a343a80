"""Reads the server's state at the end key by key, without the buffer's own code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import redis

_LIVE = {"ready", "leased", "consumed", "quarantined"}
_SINGLE = {
    *("settings", "stats", "running", "credits", "ready", "order", "leased", "consumed"),
    *("quarantined", "retries", "batches", "events", "lineages", "reconcile", "engine_versions"),
    *("waits", "counters", "metrics", "phase", "tasks", "calls"),
    *(f"wake:{name}" for name in ("room", "batch", "version", "forming")),
}
"""Keys that a shard has once; `find_violations` checks their content."""
_BATCH = 1000


@dataclass(kw_only=True, slots=True)
class Evidence:
    states: dict[str, str] = field(default_factory=dict)
    """State of every group that the server knows, by id."""
    orphans: list[str] = field(default_factory=list)
    """Orphaned keys that would stay for ever."""
    num_expiring: int = 0
    """Payloads whose push was never committed; they expire within minutes."""
    num_keys: Counter[str] = field(default_factory=Counter)
    """By kind."""

    def ids(self, *states: str) -> set[str]:
        return {i for i, state in self.states.items() if state.split(":")[0] in states}


def collect(url: str, run: str) -> Evidence:
    client = redis.Redis.from_url(url, decode_responses=True, socket_timeout=60.0)
    try:
        return _collect(client, run)
    finally:
        client.close()


def _collect(client: redis.Redis, run: str) -> Evidence:
    found = Evidence()
    kinds: dict[str, list[tuple[str, str, str]]] = {}
    for key in client.scan_iter(match=f"{{leash:{run}*", count=_BATCH):
        match = re.fullmatch(r"(\{leash:[^}]+\}):(([a-z_]+)(?::(.*))?)", key)
        assert match, key
        prefix, name, kind, rest = match.groups()
        found.num_keys[kind] += 1
        if name not in _SINGLE:
            kinds.setdefault(kind, []).append((prefix, key, rest))
    for keys in _batches(kinds.pop("group", [])):
        for (_, key, group_id), state, ttl in _states(client, keys):
            found.states[group_id] = state
            if (state in _LIVE) != (ttl == -1):
                found.orphans.append(f"{key}: state {state}, time to live {ttl}")
    for keys in _batches(kinds.pop("payload", [])):
        for (_, key, group_id), ttl in _lifetimes(client, keys):
            if found.states.get(group_id, "") in _LIVE:
                if ttl != -1:
                    found.orphans.append(f"{key}: of a living group, time to live {ttl}")
            elif ttl == -1:
                found.orphans.append(f"{key}: {found.states.get(group_id)}")
            else:
                found.num_expiring += 1
    batches = set(client.zrange(f"{{leash:{run}}}:batches", 0, -1))
    for keys in _batches([item for rest in kinds.values() for item in rest]):
        for (_, key, rest), ttl in _lifetimes(client, keys):
            is_batch = ":lease:" in key and rest in batches
            if ttl == -1 and not is_batch:
                found.orphans.append(key)
    return found


Found = tuple[str, str, str]


def _batches(keys: list[Found]) -> Iterator[list[Found]]:
    for start in range(0, len(keys), _BATCH):
        yield keys[start : start + _BATCH]


def _states(client: redis.Redis, keys: list[Found]) -> Iterator[tuple[Found, str, int]]:
    pipe = client.pipeline(transaction=False)
    for _, key, _ in keys:
        pipe.hget(key, "state")
        pipe.ttl(key)
    replies = pipe.execute()
    yield from zip(keys, replies[::2], replies[1::2], strict=True)


def _lifetimes(client: redis.Redis, keys: list[Found]) -> Iterator[tuple[Found, int]]:
    pipe = client.pipeline(transaction=False)
    for _, key, _ in keys:
        pipe.ttl(key)
    yield from zip(keys, pipe.execute(), strict=True)


def judge(found: Evidence, trained: list[str], acknowledged: Mapping[str, str]) -> list[str]:
    """Describes all violations. `trained` is the surviving lineage, in order."""
    wrong = [f"orphan key {key}" for key in found.orphans]
    twice = [group_id for group_id, number in Counter(trained).items() if number > 1]
    wrong += [f"{group_id} was trained more than once" for group_id in twice]
    acked = found.ids("acked")
    wrong += [f"{i} was trained, but is {found.states.get(i)}" for i in set(trained) - acked]
    wrong += [f"{i} is acked, but no checkpoint contains it" for i in acked - set(trained)]
    wrong += [
        f"the push of {i} got the reply {answer!r}, but the buffer does not have it"
        for i, answer in acknowledged.items()
        if i not in found.states
    ]
    # Consumed or leased ones would belong to a job that has ended.
    wrong += [f"{i} is still {found.states[i]}" for i in found.ids("consumed", "leased")]
    return wrong
