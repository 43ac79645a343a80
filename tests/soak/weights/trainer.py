"""Trainer ranks as processes of their own: the real checkpoint engine, with weights made up.

On command a rank touches one bucket of a publish: it flips a byte of it, or stops before it and
wait while the play does something terrible.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from buffer.run_state import RunState
from configs.schema import BufferConfig
from tests.soak.crash import processes
from tests.soak.weights.model import Weights
from tests.soak.weights.scene import Scene
from weight_sync import group_thread
from weight_sync.checkpoint_engine import CheckpointEngine
from weight_sync.group import WeightGroup

_TOUCH_S = 30.0


@dataclass(slots=True)
class Touch:
    """A fault in the first bucket from `bucket` on that this rank sends; once."""

    kind: str
    """"meet": wait for the play; "flip": one of its bytes arrives wrong."""
    bucket: int


class TouchedGroup(WeightGroup):
    """A weight group with injectable faults."""

    touch: ClassVar[Touch | None] = None
    channel: ClassVar[Any]
    go_on: ClassVar[threading.Event]

    def send(self, tensor: Tensor, dst: int, tag: int) -> Any:
        touch = TouchedGroup.touch
        if touch is not None and tag >= touch.bucket:
            TouchedGroup.touch = None
            self.channel.send(("at_bucket", tag))
            if touch.kind == "flip":
                tensor = tensor.clone()
                tensor[len(tensor) // 2] ^= 1
            else:
                assert self.go_on.wait(_TOUCH_S), "the play forgot this rank"
                self.go_on.clear()
        return super().send(tensor, dst, tag)


def serve(scene: Scene, team: str, rank: int, channel: Any) -> None:
    """A rank's main loop: publishes the versions it is sent until the channel ends."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{scene.folder}/{team}",
        rank=rank,
        world_size=scene.num_ranks,
    )
    TouchedGroup.channel, TouchedGroup.go_on = channel, threading.Event()
    group_thread.WeightGroup = TouchedGroup  # type: ignore[misc]

    async def open_board() -> RunState:
        return await RunState.connect(scene.url, scene.run, BufferConfig())

    engine = CheckpointEngine(
        scene.layout,
        scene.config,
        rank=rank,
        run=scene.run,
        host="127.0.0.1",
        key=scene.key,
        uses_gpu=False,
        open_board=open_board,
        control_timeout_s=10.0,
    )
    weights = Weights(scene.tensors)
    channel.send(("ready", os.getpid()))
    for command in _commands(channel):
        version = command["version"]
        TouchedGroup.touch = command["touch"]
        try:
            report = engine.send(version, weights.shards(version, rank, scene.num_ranks))
            channel.send(("published", report.snapshot_s))
        except Exception as error:
            channel.send(("failed", f"{type(error).__name__}: {error}"))
    engine.close()


def _commands(channel: Any) -> Any:
    """Publishes, in turn; "go_on" is for the thread that sends."""
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen() -> None:
        while True:
            try:
                command = channel.recv()
            except (EOFError, OSError):
                command = None
            if command == "go_on":
                TouchedGroup.go_on.set()
                continue
            commands.put(command)
            if command is None:
                return

    threading.Thread(target=listen, daemon=True).start()
    return iter(commands.get, None)


class Rank:
    """One rank, seen from the play."""

    def __init__(self, scene: Scene, team: str, rank: int) -> None:
        self.channel, theirs = processes.pipe()
        self.log = scene.folder / f"{team}-{rank}.log"
        self.process: BaseProcess = processes.start(self.log, serve, scene, team, rank, theirs)
        theirs.close()
        self._messages: dict[str, asyncio.Queue[Any]] = {}
        asyncio.get_running_loop().add_reader(self.channel.fileno(), self._listen)

    def _listen(self) -> None:
        try:
            kind, what = self.channel.recv()
        except (EOFError, OSError):
            kind, what = "ended", None
            asyncio.get_running_loop().remove_reader(self.channel.fileno())
        self._queue(kind).put_nowait(what)

    def _queue(self, kind: str) -> asyncio.Queue[Any]:
        return self._messages.setdefault(kind, asyncio.Queue())

    async def hears(self, kind: str, timeout_s: float) -> Any:
        """The rank's next message of this kind: ready, at_bucket, published, failed, ended."""
        async with asyncio.timeout(timeout_s):
            return await self._queue(kind).get()

    def publish(self, version: int, touch: Touch | None = None) -> None:
        self.channel.send({"version": version, "touch": touch})

    def go_on(self) -> None:
        self.channel.send("go_on")

    def signal(self, number: int) -> None:
        processes.kill(self.process, number)

    async def end(self) -> None:
        """Kills it in whatever state it is."""
        self.signal(signal.SIGKILL)
        await asyncio.to_thread(processes.join, self.process, 10)
        asyncio.get_running_loop().remove_reader(self.channel.fileno())
        self.channel.close()


class Trainer:
    """All ranks of one life of the trainer."""

    _num_lives = 0

    def __init__(self, scene: Scene) -> None:
        Trainer._num_lives += 1
        team = f"trainer-{Trainer._num_lives}"
        self.ranks = [Rank(scene, team, rank) for rank in range(scene.num_ranks)]

    async def ready(self, timeout_s: float = 60.0) -> None:
        for rank in self.ranks:
            await rank.hears("ready", timeout_s)

    def publish(self, version: int, *, rank: int = 0, touch: Touch | None = None) -> None:
        """Sends a publish to all ranks; `touch` is for one of them."""
        for index, each in enumerate(self.ranks):
            each.publish(version, touch if index == rank else None)

    async def end(self) -> None:
        await asyncio.gather(*(rank.end() for rank in self.ranks))
