"""Copies of a rank's shards at each publish, in warm host memory that is reused.

    ds_tensor of each parameter ──cast, copy──► buffer 0  [embed r | q r | k r | ...]  in flight
                                                buffer 1  [embed r | q r | k r | ...]  being filled

A buffer has the layout of the rank's stream, so it can be sent as it is. On a GPU the copies run in
parallel to training on their own CUDA stream; call `protect_copy` before the weights change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tensors.host_memory import HostMemory
from tensors.layout import Layout


class SnapshotError(RuntimeError):
    """A rank did not capture the version; the message names both."""


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Shard:
    """One rank's part of one parameter."""

    name: str
    """Name of the parameter in the layout."""
    tensor: Tensor
    """[n] elements in the parameter's own dtype: the rank's piece, without padding."""


class _Copying:
    """A copy on the current CUDA stream, between two events."""

    def __init__(self) -> None:
        self.began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.began.record()

    def wait(self) -> float:
        """Returns the seconds that the copy took."""
        self.ended.synchronize()
        return float(self.began.elapsed_time(self.ended)) / 1000


@dataclass(slots=True)
class _Buffer:
    stream: Tensor
    """[stream_bytes] uint8, pinned where there is a GPU and the system allows it."""
    views: dict[str, Tensor]
    """Each parameter's piece of `stream` by its name, as [n] elements of the serving dtype."""
    copying: _Copying | None = None
    """The copy into this buffer, which may still be running; None without a GPU."""
    copy_s: float = 0.0
    version: int | None = None
    """None while it is being filled."""


class Snapshots:
    """The snapshot buffers of one rank. One thread captures and another one reads.

        snapshots = Snapshots(layout, rank=0)
        snapshots.capture(0, version=7, shards)        # into buffer 0
        snapshots.protect_copy()                       # before the optimizer changes the weights
        stream = snapshots.stream(0, 7, timeout_s=60)  # in another thread, until version 7 is there

    Whoever captures must know that nobody reads the buffer any more.
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

    def capture(self, index: int, version: int, shards: Iterable[Shard]) -> None:
        """Fill a buffer with `version`, cast to the layout's dtypes.

        On a GPU the copies may still be running when this returns. Raises ValueError unless
        `shards` holds exactly the pieces that the layout assigns to this rank.
        """
        buffer = self._buffers[index]
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
        missing, names = dict(buffer.views), {tensor.name for tensor in self._layout.tensors}
        for shard in shards:
            view = missing.pop(shard.name, None)
            if view is None:
                if shard.tensor.numel() == 0 and shard.name in names:
                    continue  # the last ranks own nothing of a small parameter
                raise ValueError(f"shard of {shard.name!r}: not in the layout, or given twice")
            if view.shape != shard.tensor.shape:
                raise ValueError(
                    f"shard of {shard.name!r} has shape {list(shard.tensor.shape)}; rank "
                    f"{self._rank} owns {len(view)} of its elements"
                )
            view.copy_(shard.tensor, non_blocking=True)
        if missing:
            raise ValueError(f"rank {self._rank} gave no shard of {', '.join(sorted(missing))}")

    def protect_copy(self) -> None:
        """Call before the weights change, to protect the last capture."""
        # On a GPU the current stream waits for the copies, not the caller: work enqueued before
        # this, such as forward and backward passes, overlaps with them.
        if self._last is not None:
            torch.cuda.current_stream().wait_event(self._last.ended)

    def stream(self, index: int, version: int, timeout_s: float) -> Tensor:
        """Wait until `version` is captured completely; returns its stream, [stream_bytes] uint8.

        Raises SnapshotError if this rank does not capture it into the buffer within `timeout_s`.
        """
        buffer = self._buffers[index]
        with self._changed:
            if not self._changed.wait_for(lambda: buffer.version == version, timeout_s):
                raise SnapshotError(
                    f"trainer rank {self._rank} did not capture version {version} within "
                    f"{timeout_s:g} s: its snapshot buffer {index} holds version {buffer.version}"
                )
            copying = buffer.copying
        if copying is not None:
            buffer.copy_s = copying.wait()
        return buffer.stream

    def copy_s(self, index: int) -> float:
        """Duration of the copy in seconds; on a GPU, valid after `stream` returned."""
        return self._buffers[index].copy_s


def _allocate(layout: Layout, rank: int, should_pin: bool) -> _Buffer:
    num_bytes = layout.stream_bytes(rank)
    memory = HostMemory(num_bytes)
    stream = memory.tensor()[:num_bytes]
    # The first write to fresh memory is many times slower than later ones: do it now.
    stream.zero_()
    if should_pin:
        memory.pin()
    views = {}
    for piece in layout.pieces[rank]:
        tensor = layout.tensors[piece.tensor]
        part = stream[piece.stream_start : piece.stream_stop]
        views[tensor.name] = part.view(getattr(torch, tensor.dtype))
    return _Buffer(stream=stream, views=views)
