"""A trainer rank in this process, with real receiver processes beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from scene_board import MemoryBoard
from scene_gate import Gate
from scene_model import BUCKET_BYTES, cast_weights, scene_layout, scene_shards

from configs.choices import Backend
from configs.schema import WeightSyncConfig
from weight_sync.engine import CheckpointEngine
from weight_sync.layout import Layout
from weight_sync.receiver.client import ReceiverClient, ReceiverStatus
from weight_sync.receiver.process import ReceiverProcess
from weight_sync.types import PublishReport, ReceiverSpec

KEY = "a-key"
TIMEOUT_S = 30.0


class Node:
    """A receiver's process, as one node of the rollout pool has it, and an engine that follows."""

    def __init__(self, name: str, folder: Path, board: MemoryBoard, timeout_s: float) -> None:
        self.name = name
        self._board = board
        spec = ReceiverSpec(
            name=name,
            host="127.0.0.1",
            folder=str(folder / name),
            num_slots=2,
            num_buffers=2,
            timeout_s=timeout_s,
            min_bandwidth=50e6,
            key=KEY,
        )
        self.process = ReceiverProcess(spec, folder / f"{name}.log")
        self.client: ReceiverClient | None = None
        self._follower: asyncio.Task[None] | None = None
        self._gate: Gate | None = None

    async def put_gate(self) -> Gate:
        """From here on the coordinator reaches it through a gate."""
        assert self.client is not None
        self._gate = Gate(self.client.url)
        self._board.registered[self.name] = await self._gate.start()
        return self._gate

    async def start(self) -> None:
        info = await self.process.start()
        self.client = ReceiverClient(self.name, info.url, KEY)
        self._board.registered[self.name] = info.url
        self._follower = asyncio.create_task(self._follow(self.client))

    async def _follow(self, client: ReceiverClient) -> None:
        version = -1
        while True:
            staged = await client.newest(version, timeout_s=TIMEOUT_S)
            if staged is not None:
                assert staged.version > version
                version = staged.version
                self._board.set_engine(f"engine-of-{self.name}", version)

    async def status(self) -> ReceiverStatus:
        assert self.client is not None
        return await self.client.status(timeout_s=TIMEOUT_S)

    async def weights(self, version: int) -> dict[str, torch.Tensor]:
        """What an engine would load, which must be `version`."""
        assert self.client is not None
        staged = await self.client.newest(version - 1, timeout_s=TIMEOUT_S)
        assert staged is not None and staged.version == version
        return load_file(Path(staged.path) / "model.safetensors")

    async def wait_received(self, num_buckets: int) -> None:
        """Until a transfer is under way and so many of its buckets are here."""
        async with asyncio.timeout(TIMEOUT_S):
            while (await self.status()).received < num_buckets:
                await asyncio.sleep(0.001)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.info.pid, number)

    async def die(self) -> None:
        """As a machine that is lost: nobody forgets it on the board."""
        self.signal(signal.SIGKILL)
        await self.process.wait_dead()
        await self._stop_following()

    async def _stop_following(self) -> None:
        self._board.engines.pop(f"engine-of-{self.name}", None)
        self._board.changed()
        if self._follower is not None and self.client is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
            await self.client.close()
        self._follower = None

    async def close(self) -> None:
        await self._stop_following()
        if self._gate is not None:
            await self._gate.close()
        if self.client is not None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
            await self.process.stop()


class Scene:
    """Rank 0 of one, the board, and the nodes that a test has started."""

    def __init__(self, folder: Path, layout: Layout, config: WeightSyncConfig) -> None:
        self.layout = layout
        self.config = config
        self.board = MemoryBoard()
        self.share = 0.01
        """Of the elements that change from one version to the next."""
        self._folder = folder
        self._nodes: list[Node] = []
        self.engine = CheckpointEngine(
            layout,
            config,
            rank=0,
            run="scene",
            host="127.0.0.1",
            key=KEY,
            uses_gpu=False,
            open_board=self._open_board,
            control_timeout_s=TIMEOUT_S,
        )

    async def _open_board(self) -> MemoryBoard:
        return self.board

    async def add(self, *names: str) -> list[Node]:
        nodes = [Node(name, self._folder, self.board, self.config.timeout_s) for name in names]
        self._nodes += nodes
        await asyncio.gather(*(node.start() for node in nodes))
        return nodes

    async def publish(self, version: int) -> PublishReport:
        shards = scene_shards(self.layout, 0, version, self.share)
        return await asyncio.to_thread(self.engine.publish, version, iter(shards))

    async def publish_at_once(self, versions: range) -> None:
        """One right after the other, as fast as they can be copied."""
        shards = {v: scene_shards(self.layout, 0, v, self.share) for v in versions}
        for version in versions:
            self.engine.publish(version, shards[version])

    async def committed(self, version: int, timeout_s: float = TIMEOUT_S) -> None:
        await asyncio.to_thread(self.engine.wait_committed, version, timeout_s)

    async def publish_records(self, version: int) -> list[dict[str, Any]]:
        """Of all publishes up to `version`, which is complete then."""
        await asyncio.to_thread(self.engine.drain, version, TIMEOUT_S)
        return self.board.of_kind("publish")

    async def check(self, node: Node, version: int) -> None:
        """Bit by bit, what `node` offers is what the trainer had at `version`."""
        expected = cast_weights(self.layout, version, self.share)
        found = await node.weights(version)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name

    async def close(self) -> None:
        await asyncio.to_thread(self.engine.close)
        await asyncio.gather(*(node.close() for node in self._nodes))


@contextlib.asynccontextmanager
async def scene(folder: Path, *, num_rows: int = 700, **settings: object) -> AsyncIterator[Scene]:
    config = WeightSyncConfig(
        **{  # type: ignore[arg-type]
            "backend": Backend.gloo,
            "bucket_bytes": BUCKET_BYTES,
            "timeout_s": 10.0,
            "full_every": 1,
            **settings,
        }
    )
    made = Scene(folder, scene_layout(1, num_rows), config)
    try:
        yield made
    finally:
        await made.close()
