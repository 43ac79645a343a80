"""The buffers for buckets in transfer.

gloo sends and receives host memory, so a bucket that belongs in one place needs no buffer:

    gloo    stream ──────────► wire ──────────► its place in the file, or a buffer first
    nccl    stream ─► buffer ─► wire ─► buffer ─► the same            (buffers on the GPU)
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
        """Host memory for a bucket from the GPU that belongs in more than one place."""
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Order copies and the sends that depend on them, without waiting for other kernels."""
        with contextlib.ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(self._device))
                stack.enter_context(torch.cuda.stream(self._stream))
            yield

    def upload(self, turn: int, part: Tensor) -> Tensor:
        """`part` (host, uint8) as it can be sent; for a GPU, in the buffer of this `turn`."""
        if self._stream is None:
            return part
        buffer = self._buffer(turn, part.numel())
        return buffer.copy_(part, non_blocking=True)

    def room(self, turn: int, num_bytes: int, place: Tensor | None) -> Tensor:
        """Where to receive a bucket: its place in host memory, or the buffer of this `turn`."""
        if self._stream is None and place is not None:
            return place
        return self._buffer(turn, num_bytes)

    def download(self, wire: Tensor, place: Tensor | None) -> Tensor:
        """The received bytes in host memory: in `place` if the bucket has one."""
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
