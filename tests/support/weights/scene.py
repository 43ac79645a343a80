"""A trainer rank in this process, with real receiver processes beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from configs.choices import Backend
from configs.schema import WeightSyncConfig
from tensors.layout import Layout, TensorSpec
from tests.support.weights.forked_receivers import ForkedChild
from tests.support.weights.gate import Gate
from tests.support.weights.known_weights import (
    BUCKET_BYTES,
    cast_weights,
    scene_layout,
    scene_shards,
)
from tests.support.weights.memory_board import MemoryBoard
from tests.support.weights.receiver_specs import KEY, receiver_spec
from weight_sync.checkpoint_engine import CheckpointEngine
from weight_sync.group_thread import Staging
from weight_sync.receiver.client import ReceiverClient, ReceiverStatus
from weight_sync.receiver.process import ReceiverProcess
from weight_sync.types import Captured, WeightSyncError

TIMEOUT_S = 120.0
EMPTY = Layout.of([TensorSpec(name="none", dtype="float32", shape=(1,))], 1)
"""Makes a receiver forget the versions of another layout."""


class Receivers:
    """Receiver processes that go from test to test, because a start takes seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[tuple[str, float], ReceiverProcess] = {}

    async def get(self, name: str, timeout_s: float) -> ReceiverProcess:
        """A running one that has staged nothing."""
        process = self._processes.get((name, timeout_s))
        if process is None:
            spec = receiver_spec(name, self._folder / f"{timeout_s:g}", timeout_s)
            log_path = self._folder / f"{name}-{timeout_s:g}.log"
            process = ReceiverProcess(spec, log_path, ForkedChild)
            self._processes[name, timeout_s] = process
            await process.start()
        try:
            await set_layout(process, EMPTY)
        except WeightSyncError:  # the last test has killed it
            await process.stop()
            await process.start()
        return process

    async def close(self) -> None:
        await asyncio.gather(*(process.stop() for process in self._processes.values()))


async def set_layout(process: ReceiverProcess, layout: Layout) -> None:
    client = ReceiverClient(process.spec.name, process.url, KEY)
    try:
        await client.set_layout(layout, timeout_s=TIMEOUT_S)
    finally:
        await client.close()


class Node:
    """A receiver's process, as one node of the rollout pool has it, and an engine that follows."""

    def __init__(self, process: ReceiverProcess, board: MemoryBoard) -> None:
        self.name = process.spec.name
        self._board = board
        self.process = process
        self.client: ReceiverClient | None = None
        self._has_died = False
        self._follower: asyncio.Task[None] | None = None
        self._gate: Gate | None = None

    async def put_gate(self) -> Gate:
        """From here on the coordinator reaches it through a gate."""
        assert self.client is not None
        self._gate = Gate(self.client.url)
        self._board.registered[self.name] = await self._gate.start()
        return self._gate

    async def start(self, loses_answers_to: str | None = None) -> None:
        """From here on the coordinator may meet it. Starts the process again if it died."""
        if self._has_died:
            await self.process.start()
        self.client = ReceiverClient(self.name, self.process.url, KEY)
        if loses_answers_to is None:
            self._board.registered[self.name] = self.process.url
        else:
            (await self.put_gate()).loses_answers_to = loses_answers_to
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
        """The tensors that an engine would load; they must be of `version`."""
        assert self.client is not None
        staged = await self.client.newest(version - 1, timeout_s=TIMEOUT_S)
        assert staged is not None and staged.version == version
        return load_file(Path(staged.path) / "model.safetensors")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    async def die(self) -> None:
        """Like a lost machine: it stays registered on the board."""
        self.signal(signal.SIGKILL)
        await self.process.wait_dead()
        self._has_died = True
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
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)


class WaitingStaging(Staging):
    """Sends four buckets, and the next one when `go_on` is set."""

    def __init__(self) -> None:
        super().__init__(0, torch.device("cpu"))
        self.came, self.go_on = threading.Event(), threading.Event()

    def upload(self, turn: int, part: torch.Tensor) -> torch.Tensor:
        if turn == 4:
            self.came.set()
            assert self.go_on.wait(TIMEOUT_S)
        return super().upload(turn, part)


class Scene:
    """Rank 0 of one, the board, and the nodes that a test has started."""

    def __init__(self, receivers: Receivers, layout: Layout, config: WeightSyncConfig) -> None:
        self.layout = layout
        self.config = config
        self.board = MemoryBoard()
        self.share = 0.01
        """Fraction of the elements that change from one version to the next."""
        self._receivers = receivers
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

    async def get(self, name: str) -> Node:
        """A node that the coordinator does not know yet."""
        process = await self._receivers.get(name, self.config.timeout_s)
        self._nodes.append(Node(process, self.board))
        return self._nodes[-1]

    async def add(self, *names: str) -> list[Node]:
        nodes = await asyncio.gather(*map(self.get, names))
        await asyncio.gather(*(node.start() for node in nodes))
        return list(nodes)

    async def publish(self, version: int) -> Captured:
        shards = scene_shards(self.layout, 0, version, self.share)
        return await asyncio.to_thread(self.engine.send, version, iter(shards))

    @contextlib.asynccontextmanager
    async def publishing(self, version: int) -> AsyncIterator[None]:
        """Some buckets of `version` are sent; the next one only when the block has ended."""
        group_thread = self.engine._coordinator._sending._sender.group_thread  # type: ignore[union-attr]
        usual, group_thread.staging = group_thread.staging, (waiting := WaitingStaging())
        try:
            await self.publish(version)
            assert await asyncio.to_thread(waiting.came.wait, TIMEOUT_S)
            yield
        finally:
            waiting.go_on.set()
            group_thread.staging = usual

    async def publish_at_once(self, versions: range) -> None:
        """One right after the other, as fast as they can be copied."""
        shards = {v: scene_shards(self.layout, 0, v, self.share) for v in versions}
        for version in versions:
            self.engine.send(version, shards[version])

    async def committed(self, version: int, timeout_s: float = TIMEOUT_S) -> None:
        await asyncio.to_thread(self.engine.wait_committed, version, timeout_s)

    async def deliver(self, version: int, *nodes: Node) -> None:
        """Publishes it, waits for the engines, and checks what these nodes offer."""
        await self.publish(version)
        await self.committed(version)
        for node in nodes:
            await self.check(node, version)

    async def event(self, name: str) -> None:
        """Until an event of this name is on record."""
        await self.board.wait_until(lambda: bool(self.board.events(name)), TIMEOUT_S)

    async def publish_records(self, version: int) -> list[dict[str, Any]]:
        """The records of all publishes up to `version`, which is complete then."""
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
async def scene(receivers: Receivers, **settings: object) -> AsyncIterator[Scene]:
    config = WeightSyncConfig(
        **{  # type: ignore[arg-type]
            "backend": Backend.gloo,
            "bucket_bytes": BUCKET_BYTES,
            "timeout_s": 10.0,
            "full_every": 1,
            **settings,
        }
    )
    made = Scene(receivers, scene_layout(1), config)
    try:
        yield made
    finally:
        await made.close()
