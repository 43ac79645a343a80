"""Receivers as real processes, each with a reader that compares every version.

A reader stands where an engine's follower stands: it waits for a released version, holds it, reads
the whole staged file and says in Redis that it serves it. What it reads must equal the trainer's
weights bit for bit, whatever happened to the transfer.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from buffer.run_state import RunState
from tests.soak.weights.model import Weights
from tests.soak.weights.scene import Scene
from weight_sync.receiver.client import ReceiverClient, StagedVersion
from weight_sync.receiver.process import ReceiverProcess
from weight_sync.types import ReceiverSpec, WeightSyncError

_POLL_S = 2.0
_CALL_S = 20.0


@dataclass(slots=True)
class Sightings:
    """Everything that the readers have seen."""

    weights: Weights
    torn: list[str] = field(default_factory=list)
    served: dict[str, int] = field(default_factory=dict)
    num_compared: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def compare(self, who: str, staged: StagedVersion) -> None:
        header = self.weights.layout.file_header
        found = (Path(staged.path) / "model.safetensors").read_bytes()
        with self._lock:
            expected = self.weights.file_data(staged.version).numpy().tobytes()
        self.num_compared += 1
        data = found.removeprefix(header)
        if len(data) == len(found) or data != expected:
            wrong = sum(a != b for a, b in zip(data, expected, strict=False))
            self.torn.append(f"{who}: version {staged.version} differs in {wrong} bytes")

    async def saw(self, who: str, version: int) -> None:
        async with self.changed:
            if version <= self.served.get(who, -1):
                self.torn.append(f"{who}: version {version} after {self.served[who]}")
            self.served[who] = version
            self.changed.notify_all()


def own_address(receiver: str) -> str:
    """Each receiver has its own, as a machine has: engines follow the one at theirs."""
    return f"127.0.0.{1 + int(receiver.rpartition('-')[2])}"


class Receiver:
    """One receiver that can be killed, stopped and restarted in its own folder."""

    def __init__(
        self, scene: Scene, name: str, state: RunState, sightings: Sightings, stage: Path
    ) -> None:
        self.name = name
        self._scene, self._state, self._sightings = scene, state, sightings
        self._process = ReceiverProcess(
            ReceiverSpec(
                name=name,
                host=own_address(name),
                folder=str(stage),
                num_slots=scene.config.num_staged,
                num_buffers=scene.config.num_buffers,
                timeout_s=scene.config.timeout_s,
                min_bandwidth=scene.config.min_bandwidth,
                key=scene.key,
            ),
            scene.folder / f"{name}.log",
        )
        self._client: ReceiverClient | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def client(self) -> ReceiverClient:
        assert self._client is not None, "start() comes first"
        return self._client

    async def start(self) -> None:
        url = await self._process.start()
        if self._client is not None:  # that of the process before
            await self._client.close()
        self._client = ReceiverClient(self.name, url, self._scene.key)
        self._sightings.served.pop(self.name, None)
        await self._state.register_receiver(self.name, url)
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        newest = -1
        while True:
            try:
                staged = await self.client.newest(newest, timeout_s=_POLL_S)
                if staged is None:
                    continue
                await self.client.hold(staged.version, "reader", 30.0, timeout_s=_CALL_S)
                await asyncio.to_thread(self._sightings.compare, self.name, staged)
                await self.client.let_go(staged.version, "reader", timeout_s=_CALL_S)
            except WeightSyncError:  # dead or stopped, or this version made way for a newer one
                await asyncio.sleep(0.05)
                continue
            newest = staged.version
            await self._state.record_commits({self.name: newest})
            await self._sightings.saw(self.name, newest)

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    async def die(self) -> None:
        """SIGKILL, even if it is stopped."""
        await self._end_reader()
        self.signal(signal.SIGKILL)
        await self._process.wait_dead()

    async def _end_reader(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None
            await self._state.forget_engine(self.name)

    async def leave(self) -> None:
        """Ends it in order: it is unregistered, and its folder is removed."""
        await self._end_reader()
        await self._state.forget_receiver(self.name)
        await self._process.stop()
        if self._client is not None:
            await self._client.close()


@dataclass(slots=True)
class Fleet:
    scene: Scene
    state: RunState
    stage: Path
    """Folder on tmpfs, with one folder a receiver."""
    sightings: Sightings = field(init=False)
    receivers: dict[str, Receiver] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sightings = Sightings(Weights(self.scene.tensors))

    async def add(self, name: str, stage: Path | None = None) -> Receiver:
        folder = stage or self.stage / name
        receiver = Receiver(self.scene, name, self.state, self.sightings, folder)
        self.receivers[name] = receiver
        await receiver.start()
        return receiver

    async def remove(self, name: str) -> None:
        await self.receivers.pop(name).leave()

    async def converged(self, version: int, timeout_s: float) -> float:
        """Waits until all receivers show `version` or a later one; returns the seconds it took."""
        began = time.monotonic()
        served = self.sightings.served

        def are_all_there() -> bool:
            return all(served.get(name, -1) >= version for name in self.receivers)

        try:
            async with asyncio.timeout(timeout_s), self.sightings.changed:
                await self.sightings.changed.wait_for(are_all_there)
        except TimeoutError:
            raise AssertionError(
                f"no convergence on version {version} within {timeout_s:g} s: {dict(served)}; "
                f"published {await self.state.available_version()}"
            ) from None
        return time.monotonic() - began

    async def close(self) -> None:
        for name in list(self.receivers):
            await self.remove(name)
