"""Senders and receivers as real processes, meeting in real gloo groups over loopback."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wire_model import make_transfer, model_layout

from weight_sync.group import open_store
from weight_sync.receiver.client import ReceiverClient
from weight_sync.receiver.process import ReceiverProcess
from weight_sync.types import GroupSpec, ReceiverSpec

KEY = "the-key-of-this-run"
CALL_S = 30.0


def receiver_spec(name: str, folder: Path, timeout_s: float = 30.0) -> ReceiverSpec:
    return ReceiverSpec(
        name=name,
        host="127.0.0.1",
        folder=str(folder / name),
        num_slots=2,
        num_buffers=2,
        timeout_s=timeout_s,
        min_bandwidth=50e6,
        key=KEY,
    )


class SenderProcess:
    """Runs wire_sender.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, rank: int) -> SenderProcess:
        script = Path(__file__).parent / "wire_sender.py"
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(script), str(rank)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
        )
        sender = cls(process)
        assert "ready" in await sender.hear()
        return sender

    async def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(CALL_S):
            reply: dict[str, Any] = json.loads(await self.process.stdout.readline())
        return reply

    def tell(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")

    async def stop(self) -> None:
        if self.process.returncode is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        await self.process.wait()


class WireFleet:
    """Drives epochs and transfers by hand, in place of the coordinator."""

    def __init__(self, folder: Path, senders: Sequence[SenderProcess], timeout_s: float) -> None:
        self._folder = folder
        self.senders = list(senders)
        self._timeout_s = timeout_s
        self._store = open_store("127.0.0.1", 30.0)
        self.layout = model_layout(len(senders))
        self.receivers: dict[str, ReceiverProcess] = {}
        self.clients: dict[str, ReceiverClient] = {}
        self.epoch = 0
        self._members: tuple[str, ...] = ()

    async def start_receiver(self, name: str) -> None:
        if name not in self.receivers:
            spec = receiver_spec(name, self._folder, self._timeout_s)
            self.receivers[name] = ReceiverProcess(spec, self._folder / f"{name}.log")
        info = await self.receivers[name].start()
        if name in self.clients:
            await self.clients[name].close()
        self.clients[name] = ReceiverClient(name, info.url, KEY)
        await self.clients[name].set_layout(self.layout, timeout_s=CALL_S)

    def signal_receiver(self, name: str, number: signal.Signals) -> None:
        os.kill(self.receivers[name].info.pid, number)

    def next_epoch(self, *receivers: str, timeout_s: float) -> GroupSpec:
        """Of all senders and these receivers."""
        self.epoch += 1
        self._members = receivers
        return GroupSpec(
            epoch=self.epoch,
            host="127.0.0.1",
            port=self._store.port,
            name="leash-test",
            num_senders=len(self.senders),
            receivers=receivers,
            backend="gloo",
            timeout_s=timeout_s,
        )

    def tell_join(self, sender: SenderProcess, spec: GroupSpec) -> None:
        sender.tell(do="join", spec=asdict(spec), timeout_s=self._timeout_s)

    async def join(self, *receivers: str, timeout_s: float = 10.0) -> None:
        spec = self.next_epoch(*receivers, timeout_s=timeout_s)
        for sender in self.senders:
            self.tell_join(sender, spec)
        await asyncio.gather(
            *(self.clients[name].join(spec, timeout_s=CALL_S) for name in receivers)
        )
        assert [await sender.hear() for sender in self.senders] == [{}] * len(self.senders)

    def send(self, version: int, base: int | None, first: int = 0, **tampering: int) -> None:
        """Tells every sender to begin; the last rank is the one that tampers."""
        order = {"do": "send", "version": version, "base_version": base, "first": first}
        for sender in self.senders[:-1]:
            sender.tell(**order)
        self.senders[-1].tell(**order, **tampering)

    def receive(
        self, version: int, base: int | None = None, first: int = 0
    ) -> dict[str, asyncio.Task[Any]]:
        transfer = make_transfer(self.layout, version, base)
        return {
            name: asyncio.create_task(
                self.clients[name].receive(transfer, self.epoch, first, timeout_s=CALL_S)
            )
            for name in self._members
        }

    async def close(self) -> None:
        """The senders stay, for the next test."""
        for client in self.clients.values():
            await client.close()
        await asyncio.gather(*(receiver.stop() for receiver in self.receivers.values()))
