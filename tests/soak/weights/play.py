"""A trainer, its receivers and a run in Redis, with the checks after each fault."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from buffer.connect import connect_buffer
from buffer.run_state import RunState
from configs.schema import BufferConfig
from tests.soak.weights.fleet import Fleet, Receiver
from tests.soak.weights.model import RENEWED_EVERY
from tests.soak.weights.scene import Scene
from tests.soak.weights.trainer import Touch, Trainer
from weight_sync.buckets import plan_buckets
from weight_sync.types import Transfer

HANG_S = 60.0
"""Nothing that a play waits for takes longer, on a machine that does more than this. On an idle one
a lost member costs its silence of 3 s and a new epoch."""


@dataclass(slots=True)
class Play:
    scene: Scene
    fleet: Fleet
    dice: random.Random
    trainer: Trainer
    version: int = -1
    took_s: list[float] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    """Bucket indexes at which something was done."""

    @property
    def state(self) -> RunState:
        return self.fleet.state

    def next_version(self, *, is_full: bool) -> int:
        """Full: every element is new, so all bytes travel; else the changed ones may do."""
        self.version += 1
        if is_full:
            self.version += -self.version % RENEWED_EVERY
        elif self.version % RENEWED_EVERY == 0:
            self.version += 1
        return self.version

    def any_bucket(self, rank: int) -> int:
        """One that this rank sends when all bytes travel."""
        layout = self.scene.layout
        transfer = Transfer(
            version=0,
            base_version=None,
            layout_digest=layout.digest,
            wire_bytes=tuple(layout.stream_bytes(r) for r in range(layout.num_ranks)),
            bucket_bytes=self.scene.bucket_bytes,
        )
        buckets = plan_buckets(layout, transfer)
        return self.dice.choice([each.index for each in buckets if each.rank == rank])

    def any_rank(self) -> int:
        return self.dice.randrange(self.scene.num_ranks)

    def any_receiver(self) -> Receiver:
        return self.fleet.receivers[self.dice.choice(sorted(self.fleet.receivers))]

    @contextlib.asynccontextmanager
    async def at_a_bucket(self, rank: int) -> AsyncIterator[int]:
        """The block runs while `rank` stands before sending a bucket of a new version."""
        self.version = self.next_version(is_full=True)
        touch = Touch("meet", self.any_bucket(rank))
        self.trainer.publish(self.version, rank=rank, touch=touch)
        bucket: int = await self.trainer.ranks[rank].hears("at_bucket", HANG_S)
        self.buckets.append(bucket)
        yield bucket
        with contextlib.suppress(OSError):  # the rank may be dead by now
            self.trainer.ranks[rank].go_on()

    async def publish(self, *, is_full: bool) -> None:
        self.trainer.publish(self.next_version(is_full=is_full))
        await self.published()

    async def published(self) -> None:
        """All ranks have taken their snapshots."""
        for rank in self.trainer.ranks:
            await rank.hears("published", HANG_S)

    async def converge(self) -> None:
        """All receivers show the newest version, and no reader ever saw a torn one."""
        self.took_s.append(await self.fleet.converged(self.version, HANG_S))
        assert await self.state.available_version() == self.version
        self.check()

    def check(self) -> None:
        assert not self.fleet.sightings.torn, "\n".join(self.fleet.sightings.torn)

    async def new_trainer(self) -> None:
        await self.trainer.end()
        self.trainer = Trainer(self.scene)
        await self.trainer.ready()

    @property
    def summary(self) -> str:
        return (
            f"{len(self.took_s)} times, at buckets {sorted(self.buckets)}; survivors converged "
            f"within {max(self.took_s, default=0.0):.1f} s; "
            f"{self.fleet.sightings.num_compared} staged files compared"
        )


@contextlib.asynccontextmanager
async def play(scene: Scene, stage: Path, seed: int) -> AsyncIterator[Play]:
    """A new run with two receivers and a first version that both of them show."""
    print(f"LEASH_SOAK_SEED={seed}")
    buffer = await connect_buffer(scene.url, scene.run, BufferConfig())
    await buffer.open(BufferConfig(), groups_per_step=4)
    await buffer.close()
    state = await RunState.connect(scene.url, scene.run, BufferConfig())
    fleet, dice = Fleet(scene=scene, state=state, stage=stage), random.Random(seed)
    trainer = Trainer(scene)
    each = Play(scene=scene, fleet=fleet, dice=dice, trainer=trainer)
    began = time.monotonic()
    try:
        await asyncio.gather(fleet.add("receiver-0"), fleet.add("receiver-1"), trainer.ready())
        await each.publish(is_full=True)
        await each.converge()
        each.took_s.clear()
        yield each
        each.check()
        print(f"{each.summary}; {time.monotonic() - began:.0f} s in all")
    finally:
        await each.trainer.end()
        await fleet.close()
        await state.close()
