"""Reads groups out of the buffer for inspection: one group, or all of them into a dump file.

A dump changes nothing and may be loaded into another run. It holds the groups that each shard held
at one moment (the moments of several shards are milliseconds apart), each once, with its state and
hash at the time it was read. A group that was acked or dropped before it was read is left out and
counted as gone. Groups that arrive meanwhile are not included.

A checkpoint has a dump too; buffer/dump/load.py reads them back.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from redis.asyncio import Redis

from buffer.dump.file import (
    STATES,
    DumpedGroup,
    DumpedShard,
    DumpedTokens,
    DumpHeader,
    State,
    write_dump,
)
from buffer.redis.client import DamagedRunError
from buffer.redis.keys import Keys
from buffer.redis.replies import number, readable, setting_number
from buffer.redis.scripts import RunNotOpenError
from buffer.shard_routes import shard_of
from buffer.types import TrajectoryGroup
from buffer.wire.chunks import MAX_CHUNKS, join_payload, num_chunks
from buffer.wire.codec import decode_group

_BATCH_GROUPS = 256
_BATCH_BYTES = 32 * 2**20
"""Bounds of one request, so that other clients' commands run in between."""
_MAX_SHARDS = 16_384  # as many as a cluster has slots


@dataclass(kw_only=True, slots=True, frozen=True)
class DumpReport:
    """The contents of the file that `dump_buffer` wrote."""

    groups: Mapping[str, int]
    """By state."""
    gone: int
    """Groups that were acked or dropped before they were read."""
    bytes: int
    """Size of the file."""


async def dump_buffer(redis: Redis, run: str, path: Path) -> DumpReport:
    """Writes all groups that the run's buffer holds to a new file.

    Only reads. The ids are read in one transaction per shard, which blocks the server for about
    5 ms per 100,000 groups; payloads follow in batches. Raises RunNotOpenError, and OSError that
    names the file.
    """
    held = cast("bytes", await redis.hget(Keys(run)("settings"), "num_shards") or b"1")
    num_shards = setting_number("num_shards", readable(held))
    if not 1 <= num_shards <= _MAX_SHARDS:
        raise DamagedRunError(f"{run}: no run has {num_shards:g} shards, as its settings say")
    shards = [Keys(run, shard) for shard in range(int(num_shards))]
    pictures = [await _picture(redis, keys) for keys in shards]
    header = DumpHeader(run=run, created=time.time(), shards=[picture for picture, _ in pictures])
    with write_dump(path, header) as dump:
        for keys, (_, ids) in zip(shards, pictures, strict=True):
            async for group in _fetch_groups(redis, keys, ids):
                if group is None:
                    dump.num_gone += 1
                else:
                    dump.write(group)
        for keys in shards:
            async for tokens in _fetch_tokens(redis, keys):
                dump.write_tokens(tokens)
    return DumpReport(groups=dict(dump.counts), gone=dump.num_gone, bytes=path.stat().st_size)


async def _picture(redis: Redis, keys: Keys) -> tuple[DumpedShard, list[str]]:
    """The shard's settings, counters and group ids at one moment."""
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hgetall(keys("settings"))
        pipe.hgetall(keys("stats"))
        pipe.hgetall(keys("failures"))
        pipe.hgetall(keys("quarantined_prompts"))
        for state in STATES:
            pipe.zrange(keys(state), 0, -1)
        settings, stats, failures, quarantined, *ids = await pipe.execute()
    if not settings:
        raise RunNotOpenError(
            f"there is no {keys('settings')} in this Redis: check the run's name and the URL"
        )
    picture = DumpedShard(
        settings=_texts(settings),
        stats=_texts(stats),
        failures=_texts(failures),
        quarantined_prompts=_texts(quarantined),
    )
    return picture, [readable(group_id) for of_state in ids for group_id in of_state]


async def _fetch_groups(
    redis: Redis, keys: Keys, ids: Sequence[str]
) -> AsyncIterator[DumpedGroup | None]:
    """Each group, or None if it is no longer held."""
    for first in range(0, len(ids), _BATCH_GROUPS):
        some = ids[first : first + _BATCH_GROUPS]
        async with redis.pipeline(transaction=False) as pipe:
            for group_id in some:
                pipe.hmget(keys(f"group:{group_id}"), ["bytes", "chunks"])
            replies = await pipe.execute(raise_on_error=False)
        sizes = [
            (0, 0) if isinstance(of, Exception) else (number(of[0]), min(number(of[1]), MAX_CHUNKS))
            for of in replies
        ]
        for batch in _batches(list(zip(some, sizes, strict=True))):
            for group in await _fetch(redis, keys, batch):
                yield group


async def _fetch_tokens(redis: Redis, keys: Keys) -> AsyncIterator[DumpedTokens]:
    for name in cast("dict[bytes, bytes]", await redis.hgetall(keys("kept"))):
        prompt = readable(name)
        parts = cast("dict[bytes, bytes]", await redis.hgetall(keys(f"kept:{prompt}")))
        if parts:
            found = {readable(part): tokens for part, tokens in parts.items()}
            yield DumpedTokens(prompt=prompt, parts=found)


def _batches(groups: Sequence[tuple[str, tuple[int, int]]]) -> Iterable[list[tuple[str, int]]]:
    """Splits the groups into batches of at most _BATCH_BYTES (or one group): (id, num_chunks)."""
    batch: list[tuple[str, int]] = []
    total = 0
    for group_id, (size, chunks) in groups:
        if batch and total + size > _BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append((group_id, chunks))
        total += size
    if batch:
        yield batch


async def _fetch(
    redis: Redis, keys: Keys, batch: Sequence[tuple[str, int]]
) -> list[DumpedGroup | None]:
    # Payload before hash: a payload does not change while its group is held, so if the hash then
    # says that the group is held, the two belong together.
    async with redis.pipeline(transaction=False) as pipe:
        for group_id, num_chunks in batch:
            payload = keys.payload(group_id)
            pipe.mget([payload, *(f"{payload}:{i}" for i in range(1, num_chunks + 1))])
            pipe.hgetall(keys(f"group:{group_id}"))
        replies = await pipe.execute(raise_on_error=False)
    return [
        # A key that was overwritten by someone else counts as gone.
        None if isinstance(fields, Exception) else _dumped(group_id, _texts(fields), values)
        for (group_id, _), values, fields in zip(batch, replies[::2], replies[1::2], strict=True)
    ]


def _dumped(
    group_id: str, fields: dict[str, str], values: Sequence[bytes | None]
) -> DumpedGroup | None:
    state = fields.get("state", "")
    if state not in STATES:
        return None
    first, *rest = values
    try:
        payload = b"" if first is None else bytes(join_payload(first, rest))
    except ValueError:  # incomplete: of no use
        payload = b""
    return DumpedGroup(
        group_id=group_id, state=cast("State", state), fields=fields, payload=payload
    )


def _texts(fields: Mapping[Any, Any]) -> dict[str, str]:
    return {readable(name): readable(value) for name, value in fields.items()}


async def read_payload(
    redis: Redis, run: str, group_id: str, num_shards: int
) -> TrajectoryGroup | None:
    """The group with the versions it was pushed with; None if it is not held (any more).

    Raises ValueError if its payload is damaged.
    """
    key = Keys(run, shard_of(group_id, num_shards)).payload(group_id)
    first = cast("bytes | None", await redis.get(key))
    if first is None:
        return None
    rest = [f"{key}:{number}" for number in range(1, num_chunks(first) + 1)]
    chunks = cast("list[bytes | None]", await redis.mget(rest) if rest else [])
    if None in chunks:
        return None  # it was dropped between the two
    return decode_group(join_payload(first, chunks))
