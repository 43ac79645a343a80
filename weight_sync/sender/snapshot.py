"""A rank's shards as they were at one publish, in warm host memory that is used again and again.

    ds_tensor of each parameter ──cast, copy──► buffer 0  [embed r | q r | k r | ...]  in flight
                                                buffer 1  [embed r | q r | k r | ...]  being filled

A buffer is laid out as the rank's stream, so that it is sent as it lies there. On a GPU the copies
run on a stream of their own beside training; `guard` is what the weights wait for before they
change.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weight_sync.layout import Layout
from weight_sync.types import WeightSyncError

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every GPU of the process."""


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Shard:
    """What one rank owns of one parameter."""

    name: str
    """Of the parameter, as in the layout."""
    tensor: Tensor
    """[n] elements in the parameter's own dtype: the rank's piece, without padding."""


class _Copying:
    """A copy on the current stream of the GPU, from one event to the other."""

    def __init__(self) -> None:
        self.began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.began.record()

    def wait(self) -> float:
        """Returns the seconds that it took."""
        self.ended.synchronize()
        return float(self.began.elapsed_time(self.ended)) / 1000


@dataclass(slots=True)
class _Buffer:
    stream: Tensor
    """[stream_bytes] uint8, pinned where there is a GPU."""
    views: dict[str, Tensor]
    """Each piece of `stream`, as [n] of its serving dtype, by the name of its parameter."""
    copying: _Copying | None = None
    """On a GPU: the copy into it, which may still be under way."""
    copy_s: float = 0.0
    version: int | None = None
    """None while it is being filled."""


class Snapshots:
    """The snapshot buffers of one rank.

    One thread captures, another one reads; which buffer may be overwritten is decided elsewhere
    (`weight_sync.sender.snapshot_buffers`).
    """

    def __init__(
        self, layout: Layout, rank: int, num_buffers: int = 2, *, should_pin: bool = False
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._buffers = [_allocate(layout, rank, should_pin) for _ in range(num_buffers)]
        self._side = torch.cuda.Stream() if should_pin else None  # type: ignore[no-untyped-call]
        self._last: _Copying | None = None
        self._changed = threading.Condition()  # guards each buffer's version and copy

    @property
    def num_bytes(self) -> int:
        """Of one buffer."""
        return self._layout.stream_bytes(self._rank)

    def capture(self, slot: int, version: int, shards: Iterable[Shard]) -> None:
        """Fill a buffer with `version`, cast to the dtypes of the layout.

        On a GPU the copies may still be under way at the return. Raises ValueError unless `shards`
        holds exactly the pieces that the layout gives to this rank.
        """
        buffer = self._buffers[slot]
        with self._changed:
            buffer.version = None
        start = time.perf_counter()
        if self._side is None:
            self._fill(buffer, shards)
        else:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self._last = _Copying()
                self._fill(buffer, shards)
                self._last.ended.record()
        with self._changed:
            buffer.copying = self._last
            buffer.copy_s = time.perf_counter() - start
            buffer.version = version
            self._changed.notify_all()

    def _fill(self, buffer: _Buffer, shards: Iterable[Shard]) -> None:
        missing = dict(buffer.views)
        for shard in shards:
            view = missing.pop(shard.name, None)
            if view is None:
                if shard.tensor.numel() == 0 and shard.name in self._names:
                    continue  # of a small parameter the last ranks own nothing
                raise ValueError(f"shard of {shard.name!r}: not in the layout, or given twice")
            if view.shape != shard.tensor.shape:
                raise ValueError(
                    f"shard of {shard.name!r} has shape {list(shard.tensor.shape)}; rank "
                    f"{self._rank} owns {len(view)} of its elements"
                )
            view.copy_(shard.tensor, non_blocking=True)
        if missing:
            raise ValueError(f"rank {self._rank} gave no shard of {', '.join(sorted(missing))}")

    @property
    def _names(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self._layout.tensors)

    def guard(self) -> None:
        """To be called before the weights change: what was captured is then safe from it.

        On a GPU the current stream, not the caller, waits for the copies: what is called before the
        update alone, such as the passes through the model, does not wait for them.
        """
        if self._last is not None:
            torch.cuda.current_stream().wait_event(self._last.ended)

    def stream(self, slot: int, version: int, timeout_s: float) -> Tensor:
        """[stream_bytes] uint8 of `version`, when all of it is there.

        Raises WeightSyncError if this rank does not capture it into `slot` within `timeout_s`.
        """
        buffer = self._buffers[slot]
        with self._changed:
            if not self._changed.wait_for(lambda: buffer.version == version, timeout_s):
                raise WeightSyncError(
                    f"trainer rank {self._rank} did not capture version {version} within "
                    f"{timeout_s:g} s: its snapshot buffer {slot} holds version {buffer.version}"
                )
            copying = buffer.copying
        if copying is not None:
            buffer.copy_s = copying.wait()
        return buffer.stream

    def copy_s(self, slot: int) -> float:
        """Seconds that the copy took whose `stream` was asked for: on a GPU, beside training."""
        return self._buffers[slot].copy_s


class _HostMemory(mmap.mmap):
    """Whole pages, in no file, for as long as a tensor uses them.

    torch's own allocator of pinned memory takes the next power of two: up to twice as much.
    """

    pinned_at: int | None = None

    def __new__(cls, num_bytes: int) -> _HostMemory:
        return super().__new__(
            cls, -1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )

    def pin(self, address: int) -> None:
        """`address` is its own. Raises CudaError if the system refuses."""
        torch.cuda.check_error(_cudart().cudaHostRegister(address, len(self), _PORTABLE))
        self.pinned_at = address

    def __del__(self) -> None:
        if self.pinned_at is not None:
            with contextlib.suppress(Exception):  # at its end the process may have left the GPU
                _cudart().cudaHostUnregister(self.pinned_at)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _allocate(layout: Layout, rank: int, should_pin: bool) -> _Buffer:
    num_bytes = layout.stream_bytes(rank)
    memory = _HostMemory(num_bytes)
    stream = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
    # Written once: the first write to fresh memory is many times slower than the next ones.
    stream.zero_()
    if should_pin:
        memory.pin(stream.data_ptr())
    views = {}
    for piece in layout.pieces[rank]:
        tensor = layout.tensors[piece.tensor]
        part = stream[piece.stream_start : piece.stream_stop]
        views[tensor.name] = part.view(getattr(torch, tensor.dtype))
    return _Buffer(stream=stream, views=views)
