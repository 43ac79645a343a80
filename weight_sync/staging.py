"""The buffers that buckets lie in while they are on the wire.

gloo sends and receives host memory, so a bucket that is whole in its place needs no buffer at all:

    gloo    stream ──────────► wire ──────────► place in the file, or a buffer and then its places
    nccl    stream ─► buffer ─► wire ─► buffer ─► the same         (buffers on the GPU)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


class Staging:
    """A ring of buffers, kept warm from one publish to the next. Used by one thread."""

    def __init__(self, num_buffers: int, device: torch.device) -> None:
        self._device = device
        self._ring = [torch.empty(0, dtype=torch.uint8)] * num_buffers
        self._host = torch.empty(0, dtype=torch.uint8)
        """Where a bucket of the GPU comes down that does not go to one place."""
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Copies, and sends of what they bring, are ordered among themselves and wait for no one
        else's kernels."""
        with contextlib.ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(self._device))
                stack.enter_context(torch.cuda.stream(self._stream))
            yield

    def upload(self, turn: int, part: Tensor) -> Tensor:
        """`part` (host, uint8) where it can be sent from; for the GPU in the buffer of `turn`."""
        if self._stream is None:
            return part
        buffer = self._buffer(turn, part.numel())
        return buffer.copy_(part, non_blocking=True)

    def room(self, turn: int, num_bytes: int, place: Tensor | None) -> Tensor:
        """Where a bucket can be received: its place in host memory, or the buffer of `turn`."""
        if self._stream is None and place is not None:
            return place
        return self._buffer(turn, num_bytes)

    def download(self, wire: Tensor, place: Tensor | None) -> Tensor:
        """What was received, in host memory: in `place` if it has one."""
        if self._stream is None:
            return wire
        if place is None:
            if self._host.numel() < wire.numel():
                self._host = torch.empty(wire.numel(), dtype=torch.uint8, pin_memory=True)
            place = self._host[: wire.numel()]
        place.copy_(wire, non_blocking=True)
        self._stream.synchronize()
        return place

    def _buffer(self, turn: int, num_bytes: int) -> Tensor:
        index = turn % len(self._ring)
        if self._ring[index].numel() < num_bytes:
            self._ring[index] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._ring[index][:num_bytes]
