"""A process's member of the weight groups: a thread, and the buffers for buckets in transfer.

gloo sends and receives host memory, so a bucket that belongs in one place needs no buffer:

    gloo    stream ──────────► wire ──────────► its place in the file, or a buffer first
    nccl    stream ─► buffer ─► wire ─► buffer ─► the same            (buffers on the GPU)

NCCL blocks as long as a peer is stopped: while a group connects, and at the first bucket that two
members exchange. It also keeps per-thread state of a failed operation. So a dedicated thread makes
all calls on a group. A thread that fails or exceeds its time limit is abandoned with its group, and
the next epoch gets a new one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from tensors.host_memory import HostMemory
from weight_sync.group import WeightGroup, epoch_name, member_name
from weight_sync.types import GroupSpec, WeightSyncError

T = TypeVar("T")

_LEAVE_S = 5.0
"""Longest wait for a group to close; after that it closes in the background."""


class GroupThread:
    """Joins one epoch after the other. One caller at a time, except for `spec` and `leave`."""

    def __init__(self, name: str, num_buffers: int, device: torch.device) -> None:
        """`name` is that of the thread; `device`: a GPU where the groups are nccl, else the CPU."""
        self._name = name
        self._device = device
        self.staging = Staging(num_buffers, device)
        self._thread: SerialThread | None = None
        self._group: WeightGroup | None = None
        self._leaving = threading.Lock()  # guards both, while another thread leaves

    @property
    def spec(self) -> GroupSpec | None:
        """The current epoch's; None between epochs."""
        group = self._group
        return None if group is None else group.spec

    def join(self, spec: GroupSpec, rank: int) -> None:
        """Leave the last epoch and join the one of `spec`; returns when every member has.

        Raises WeightSyncError, at the latest after twice `spec.timeout_s`: once for the members to
        find each other, once for NCCL to connect them.
        """
        with self._leaving:
            last, self._group = self._group, None

        def join() -> WeightGroup:
            if last is not None:
                last.close()
            with self.staging.on_cuda_stream():
                return WeightGroup.join(spec, rank, device=self._device)

        self._group = self._call(
            join,
            2 * spec.timeout_s,
            f"{epoch_name(spec)} did not form: all members joined, but one stopped",
            too_late=_close_result,
        )

    def run(self, steps: Callable[[WeightGroup], None], limit_s: float) -> None:
        """Run `steps` on the group. If they fail, this process leaves it: no member waits for it.

        Raises WeightSyncError, at the latest after `limit_s`, which must exceed the sum of all
        waits inside `steps`.
        """
        group = self._group
        assert group is not None, "join() comes first"

        def run() -> None:
            # The error is raised anew below: the first one's traceback would keep alive frames that
            # refer to Works, and with them gloo's sockets.
            try:
                with self.staging.on_cuda_stream():
                    return steps(group)
            except WeightSyncError as error:
                failure = str(error)
            except RuntimeError as error:  # from torch, outside of `naming`
                failure = (
                    f"{member_name(group.spec, group.rank)} in {epoch_name(group.spec)}: {error}"
                )
            except BaseException:
                group.close()
                raise
            group.close()
            raise WeightSyncError(failure)

        try:
            self._call(run, limit_s, f"{epoch_name(group.spec)} was given up: a member stopped")
        except BaseException:
            self._group = None
            if group.is_open:  # `steps` are still blocked in a call: closing the group ends it
                _close_in_background(group, 0.0)
            raise

    def leave(self, epoch: int | None = None) -> None:
        """Leave the current group, if any, and only if it is of this `epoch`; from any thread.
        `join` may be called again."""
        with self._leaving:
            if epoch is not None and (self.spec is None or self.spec.epoch != epoch):
                return
            group, self._group = self._group, None
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.close(0.0)
        if group is not None:
            _close_in_background(group, _LEAVE_S)

    def _call(
        self,
        call: Callable[[], T],
        limit_s: float,
        what_failed: str,
        too_late: Callable[[Future[T]], None] | None = None,
    ) -> T:
        """`too_late` receives the result of a call that ends after its time limit."""
        with self._leaving:  # a thread that is closed in between would never run the call
            thread = self._thread = self._thread or SerialThread(self._name)
            future = thread.submit(call)
        try:
            if not wait([future], min(limit_s, threading.TIMEOUT_MAX)).done:
                if too_late is not None:
                    future.add_done_callback(too_late)
                raise WeightSyncError(f"{what_failed} ({self._name}, within {limit_s:g} s)")
            return future.result()
        except BaseException:
            self._thread = None
            thread.close(0.0)
            raise
        finally:
            del future, call  # an error's traceback refers to this frame


class Staging:
    """A ring of buffers, kept warm from one publish to the next. Used by one thread."""

    def __init__(self, num_buffers: int, device: torch.device) -> None:
        self._device = device
        self._ring = [torch.empty(0, dtype=torch.uint8)] * num_buffers
        self._host = torch.empty(0, dtype=torch.uint8)
        """Host memory for a bucket from the GPU that belongs in more than one place."""
        self._cuda_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # As the group's own stream: never in a queue behind a kernel of the training.
            self._cuda_stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def on_cuda_stream(self) -> Iterator[None]:
        """Order copies and the sends that depend on them, without waiting for other kernels."""
        with contextlib.ExitStack() as stack:
            if self._cuda_stream is not None:
                stack.enter_context(torch.cuda.device(self._device))
                stack.enter_context(torch.cuda.stream(self._cuda_stream))
            yield

    def upload(self, turn: int, part: Tensor) -> Tensor:
        """`part` (host, uint8) as it can be sent; for a GPU, in the buffer of this `turn`."""
        if self._cuda_stream is None:
            return part
        buffer = self._buffer(turn, part.numel())
        return buffer.copy_(part, non_blocking=True)

    def room(self, turn: int, num_bytes: int, place: Tensor | None) -> Tensor:
        """Memory to receive a bucket in: its place on the host, or the buffer of this `turn`."""
        if self._cuda_stream is None and place is not None:
            return place
        return self._buffer(turn, num_bytes)

    def download(self, wire: Tensor, place: Tensor | None) -> Tensor:
        """The received bytes in host memory: in `place` if the bucket has one."""
        if self._cuda_stream is None:
            return wire
        if place is None:
            if self._host.numel() < wire.numel():
                memory = HostMemory(wire.numel())
                memory.pin()
                self._host = memory.tensor()
            place = self._host[: wire.numel()]
        place.copy_(wire, non_blocking=True)
        self._cuda_stream.synchronize()
        return place

    def _buffer(self, turn: int, num_bytes: int) -> Tensor:
        index = turn % len(self._ring)
        if self._ring[index].numel() < num_bytes:
            self._ring[index] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._ring[index][:num_bytes]


class SerialThread:
    """A daemon thread that runs one call after the other.

    Unlike the threads of a ThreadPoolExecutor it never delays the end of the process.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put(partial(_carry_out, future, call))
        return future

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # its references must not stay alive while the thread waits

    def close(self, timeout_s: float) -> None:
        """End the thread after the calls so far; if they take longer, it is abandoned."""
        self._calls.put(None)
        self._thread.join(timeout_s)


def _carry_out(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
        del future, call  # the error's traceback refers to this frame: a cycle


def _close_result(future: Future[WeightGroup]) -> None:
    """Close a group that formed after its caller had given up."""
    if not future.cancelled() and future.exception() is None:
        future.result().close()


def _close_in_background(group: WeightGroup, wait_s: float) -> None:
    """NCCL's abort waits for whatever its communicator is doing, possibly for ever."""
    closing = threading.Thread(target=group.close, name="weights-leaving", daemon=True)
    closing.start()
    closing.join(wait_s)
