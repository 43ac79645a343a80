"""The least that a buffer in Redis can cost: bare SET and GET of the same bytes, by our client."""

from __future__ import annotations

import asyncio
from functools import partial
from uuid import uuid4

from benchmarks.replay_buffer.groups import GroupMaker
from benchmarks.replay_buffer.stage import Stage
from benchmarks.team import Team, in_flight
from buffer.redis.connection import connect
from buffer.wire.codec import encode_group


class RawClient:
    """SETs or GETs `num_keys` keys in turn, as many at once as a producer of ours pushes."""

    def __init__(
        self, url: str, prefix: str, num_tokens: int, num_keys: int, *, is_setter: bool
    ) -> None:
        self._prefix, self._num_keys = prefix, num_keys
        self._payload = encode_group(GroupMaker(num_tokens).make("raw-group"))
        self._runner = asyncio.Runner()
        self._redis = self._runner.run(connect(url))
        self._call = self._set if is_setter else self._get
        if is_setter:
            self.work(num_keys)

    def work(self, num_groups: int) -> None:
        self._runner.run(in_flight(self._call, num_groups))

    async def _set(self, number: int) -> None:
        await self._redis.set(f"{self._prefix}:{number % self._num_keys}", self._payload)

    async def _get(self, number: int) -> None:
        value = await self._redis.get(f"{self._prefix}:{number % self._num_keys}")
        assert isinstance(value, bytes) and len(value) == len(self._payload)


def raw_team(stage: Stage, num_tokens: int, num_keys: int) -> Team:
    prefixes = [f"raw-{uuid4().hex[:6]}" for _ in range(2)]
    return Team(
        [
            partial(RawClient, stage.url, prefix, num_tokens, num_keys, is_setter=is_setter)
            for is_setter in (True, False)
            for prefix in prefixes
        ],
        stage.cpu_s,
    )
