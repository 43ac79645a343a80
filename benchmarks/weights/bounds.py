"""Bounds of every transfer: a plain socket, gloo's own sends and receives, and memcpy.

Down a chain, as ours goes: the sender's bytes go to receiver 0, which hands them on to receiver 1.
Received bytes land in a few warm buffers and nowhere else; nothing is checked, nothing is placed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.weights.model import SharedWeights, map_file

_CHUNK = 1 << 20
_MEETING_S = 60.0


@dataclass(kw_only=True, slots=True, frozen=True)
class Stage:
    """The weights, and a folder on tmpfs, that all processes of a path share."""

    weights: SharedWeights
    folder: Path
    num_receivers: int
    bucket_bytes: int

    def places(self, receiver: int) -> Tensor:
        """A receiver's place for its copy: warm, and the same for all the paths that take turns."""
        return map_file(self.folder / f"receiver-{receiver}", self.weights.num_bytes)


def prepare() -> None:
    """Give a process of any path one thread, since there are more processes than cores."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def join_gloo(stage: Stage, name: str, rank: int, world_size: int) -> None:
    """The process's default group, with a meeting place of its own."""
    prepare()
    dist.init_process_group(
        "gloo", init_method=f"file://{stage.folder / name}", rank=rank, world_size=world_size
    )


class SocketMember:
    """Member 0 sends, the others receive; each but the last hands on."""

    def __init__(self, stage: Stage, name: str, rank: int) -> None:
        prepare()
        self._num_bytes = stage.weights.num_bytes
        self._source = memoryview(stage.weights.open().numpy().data) if rank == 0 else None
        self._chunk = memoryview(bytearray(_CHUNK))
        self._before, self._behind = None, None
        listener = None
        if rank > 0:
            listener = socket.create_server(("127.0.0.1", 0))
            port = stage.folder / f"{name}-{rank}"
            port.with_suffix(".new").write_text(str(listener.getsockname()[1]))
            port.with_suffix(".new").rename(port)
        if rank < stage.num_receivers:
            self._behind = _connect(stage.folder / f"{name}-{rank + 1}")
        if listener is not None:
            with listener:
                listener.settimeout(_MEETING_S)
                self._before, _ = listener.accept()

    def work(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            if self._source is not None:
                assert self._behind is not None
                self._behind.sendall(self._source)
                self._behind.recv(1)  # the last one has all
            else:
                self._receive()

    def _receive(self) -> None:
        assert self._before is not None
        missing = self._num_bytes
        while missing:
            length = self._before.recv_into(self._chunk, min(missing, _CHUNK))
            assert length, "the sender went away"
            if self._behind is not None:
                self._behind.sendall(self._chunk[:length])
            missing -= length
        if self._behind is not None:
            self._behind.recv(1)
        self._before.sendall(b".")


def _connect(port_file: Path) -> socket.socket:
    deadline = time.monotonic() + _MEETING_S
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            return socket.create_connection(("127.0.0.1", int(port_file.read_text())), _MEETING_S)
        time.sleep(0.01)
    raise TimeoutError(f"no member wrote {port_file}")


class GlooMember:
    """Does what SocketMember does over gloo: `depth` buckets are on their way at once."""

    def __init__(self, stage: Stage, name: str, rank: int, depth: int = 2) -> None:
        join_gloo(stage, name, rank, 1 + stage.num_receivers)
        size, total = stage.bucket_bytes, stage.weights.num_bytes
        self._lengths = [min(size, total - start) for start in range(0, total, size)]
        self._size = size
        self._depth = depth
        self._rank = rank
        self._is_last = rank == stage.num_receivers
        self._source = stage.weights.open() if rank == 0 else None
        self._buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(depth)]
        self._done = torch.zeros(1, dtype=torch.uint8)

    def work(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            if self._source is not None:
                self._send(self._source)
            else:
                self._receive()
            if not self._is_last:
                dist.recv(self._done, self._rank + 1)
            if self._rank:
                dist.send(self._done, self._rank - 1)

    def _send(self, source: Tensor) -> None:
        in_flight: deque[dist.Work] = deque()
        for index, length in enumerate(self._lengths):
            if len(in_flight) == self._depth:
                in_flight.popleft().wait()
            start = index * self._size
            in_flight.append(_started(dist.isend(source[start : start + length], self._rank + 1)))
        for work in in_flight:
            work.wait()

    def _receive(self) -> None:
        """Receives and hands on, each with up to `depth` buckets at once."""
        buffers = [
            self._buffers[index % self._depth][:length]
            for index, length in enumerate(self._lengths)
        ]
        arriving: deque[dist.Work] = deque()
        leaving: deque[dist.Work] = deque()
        for index in range(len(buffers) + self._depth - 1):
            if index < len(buffers):
                if len(leaving) == self._depth:  # this buffer's last bytes must have left
                    leaving.popleft().wait()
                arriving.append(_started(dist.irecv(buffers[index], self._rank - 1)))
            done = index - self._depth + 1
            if done < 0:
                continue
            arriving.popleft().wait()
            if not self._is_last:
                leaving.append(_started(dist.isend(buffers[done], self._rank + 1)))
        for work in leaving:
            work.wait()


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is no member of the group"
    return work


class Memcpy:
    """One thread that copies all weights to the places of receiver 0."""

    def __init__(self, stage: Stage) -> None:
        prepare()
        self._source, self._places = stage.weights.open(), stage.places(0)

    def work(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            self._places.copy_(self._source)
