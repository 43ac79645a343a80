"""The least that a buffer in Redis can cost: bare SET and GET of the same bytes, by our client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from redis.asyncio import Redis

from benchmarks.groups import GroupMaker
from benchmarks.team import IN_FLIGHT, Team
from buffer.redis.connection import connect
from buffer.wire.codec import encode_group


@dataclass(slots=True)
class MakeRaw:
    """SETs or GETs `num_keys` keys in turn, as many at once as a producer of ours pushes."""

    url: str
    prefix: str
    num_tokens: int
    num_keys: int
    is_setter: bool

    def __call__(self) -> _Raw:
        return _Raw(self)


class _Raw:
    def __init__(self, spec: MakeRaw) -> None:
        self._spec = spec
        self._payload = encode_group(GroupMaker(spec.num_tokens).make("raw-group"))
        self._loop = asyncio.new_event_loop()
        self._redis: Redis = self._loop.run_until_complete(connect(spec.url))
        if spec.is_setter:
            self._loop.run_until_complete(self._run(spec.num_keys))

    def work(self, num_groups: int) -> None:
        self._loop.run_until_complete(self._run(num_groups))

    async def _run(self, num_groups: int) -> None:
        numbers = iter(range(num_groups))

        async def one_after_the_other() -> None:
            for number in numbers:
                key = f"{self._spec.prefix}:{number % self._spec.num_keys}"
                if self._spec.is_setter:
                    await self._redis.set(key, self._payload)
                else:
                    value = await self._redis.get(key)
                    assert isinstance(value, bytes) and len(value) == len(self._payload)

        await asyncio.gather(*(one_after_the_other() for _ in range(IN_FLIGHT)))


def raw_team(url: str, num_tokens: int, num_keys: int, server_cpu_s: Any) -> Team:
    prefixes = [f"raw-{uuid4().hex[:6]}" for _ in range(2)]
    setters = [MakeRaw(url, prefix, num_tokens, num_keys, True) for prefix in prefixes]
    getters = [MakeRaw(url, prefix, num_tokens, num_keys, False) for prefix in prefixes]
    return Team([*setters, *getters], server_cpu_s)
