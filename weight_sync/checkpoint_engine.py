"""The checkpoint engine: sends the policy's versions from the trainer's ranks to every receiver.

    training thread of each rank     send ─► copy own shards ─► back to training
    sender thread of each rank                     │ encode, send, as the coordinator commands
    coordinator thread of rank 0                   └─► receivers ─► mark available ─► release

A publish has four acts. The trainer announces the version in the buffer. Every rank sends its
shards. The coordinator marks the version available when the first receiver has it whole. Each
receiver that has it whole releases it; from then on the engines beside it may take it.

Training waits only for the copy. The ranks exchange only the choice of the snapshot buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from configs.schema import WeightSyncConfig
from host.loop_thread import LoopClosedError, LoopThread
from host.network import own_address_towards
from tensors.layout import Layout
from tensors.snapshots import Shard, Snapshots
from weight_sync.coordinator.coordinator import Availability, Coordinator
from weight_sync.group import open_store, resolve_backend, store_at
from weight_sync.group_thread import SerialThread
from weight_sync.sender.control import ControlError, ControlGroup, RankControl
from weight_sync.sender.rank import Sender, SendingRank
from weight_sync.sender.snapshot_buffers import SnapshotBuffers
from weight_sync.timeouts import Timeouts
from weight_sync.types import NUM_SNAPSHOTS, Captured, GroupSpec, VersionBoard, WeightSyncError

_CLOSE_S = 5.0
OpenBoard = Callable[[], Awaitable[VersionBoard]]


class CheckpointEngine:
    """One trainer rank's end. Call it from the training thread only, except `close` and the waits.

    Every rank creates one and sends its shards after each update:

        weight_sender = CheckpointEngine(layout, config, rank=rank, ...)
        weight_sender.send(0, shards())             # returns after the copy, before the bytes leave
        weight_sender.wait_committed(0, timeout_s)  # every live engine serves version 0
        for version in range(1, num_steps + 1):
            ...                                     # forward and backward passes
            weight_sender.protect_copy()            # the copy of the last version is done
            optimizer.step()
            weight_sender.send(version, shards())
        weight_sender.drain(num_steps, timeout_s)   # the last version is available and recorded
        weight_sender.close()

    Rank 0 is a rank like the others that also runs the coordinator.
    """

    def __init__(
        self,
        layout: Layout,
        config: WeightSyncConfig,
        *,
        rank: int,
        run: str,
        host: str,
        key: str,
        uses_gpu: bool,
        open_board: OpenBoard,
        control_timeout_s: float,
    ) -> None:
        """Collective, on the `layout.num_ranks` ranks of torch's default group.

        Rank 0 listens on `host` for the other ranks and the receivers, whose HTTP API requires
        `key`. `open_board` is called on rank 0 only, in the event loop that uses the board.
        `control_timeout_s` bounds the silence of a rank. Raises WeightSyncError.
        """
        self._timeouts = Timeouts(config=config, layout=layout, control_s=control_timeout_s)
        backend = resolve_backend(config.backend, uses_gpu=uses_gpu)
        self._snapshots = Snapshots(layout, rank, NUM_SNAPSHOTS, should_pin=uses_gpu)
        device = torch.device("cpu")
        if backend == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        sender = Sender(rank, config, device)
        sending = SendingRank(self._timeouts, rank, self._snapshots, sender)
        store = _meet(layout.num_ranks, rank, host, control_timeout_s)
        meet = partial(
            ControlGroup,
            store,
            rank=rank,
            num_ranks=layout.num_ranks,
            address=own_address_towards(host),
        )
        # Rank 0's training thread may have to wait for a free buffer first.
        choice_s = control_timeout_s + self._timeouts.encode_s
        self._choices = meet(f"leash-{run}/choices", timeout_s=choice_s)
        control = meet(f"leash-{run}/commands", timeout_s=control_timeout_s)
        self._version = -1
        self._coordinator: _CoordinatorThread | None = None
        self._commands: _CommandThread | None = None
        if rank == 0:
            group = GroupSpec(
                epoch=0,
                host=host,
                port=store.port,
                name=f"leash-{run}",
                num_senders=layout.num_ranks,
                receivers=(),
                backend=backend,
                timeout_s=config.timeout_s,
                num_chains=config.num_chains,
            )
            self._coordinator = _CoordinatorThread(
                self._timeouts, sending, control, group, key, open_board, store
            )
        else:
            self._commands = _CommandThread(control, sending)

    def send(self, version: int, shards: Iterable[Shard]) -> Captured:
        """Collective: copy this rank's shards of `version`, which are sent while training goes on.

        An earlier version that is still waiting to be sent is skipped. Raises WeightSyncError, with
        the cause, if versions can no longer be sent, and ValueError if `version` is not greater
        than the last one or if the shards are not the layout's.
        """
        if version <= self._version:
            raise ValueError(f"version {version} was sent after {self._version}: must grow")
        start = time.monotonic()
        buffer = self._choose_buffer()
        snapshot_at, chosen = time.time(), time.monotonic()
        self._snapshots.capture(buffer, version, shards)
        captured = Captured(
            buffer=buffer,
            version=version,
            wait_s=chosen - start,
            snapshot_s=time.monotonic() - chosen,
            snapshot_at=snapshot_at,
        )
        self._version = version
        if self._coordinator is not None:
            self._coordinator.captured(captured)
        return captured

    def _choose_buffer(self) -> int:
        """The snapshot buffer that rank 0 has chosen for all ranks."""
        if self._coordinator is None:
            assert self._commands is not None
            self._commands.check()
            choice = self._choices.receive()
            if "error" in choice:
                raise WeightSyncError(choice["error"])
            return int(choice["buffer"])
        try:
            buffer = self._coordinator.buffers.choose(self._timeouts.encode_s)
        except WeightSyncError as error:
            if not isinstance(error.__cause__, ControlError):
                self._choices.broadcast({"error": str(error)})
            raise
        self._choices.broadcast({"buffer": buffer})
        return buffer

    def protect_copy(self) -> None:
        """Call before the weights change, to protect the copy of the last version."""
        self._snapshots.protect_copy()

    def wait_committed(self, version: int, timeout_s: float) -> None:
        """Wait until every live engine serves `version` or later. Returns at once on ranks > 0.

        Raises WeightSyncError that says what is missing, or why nothing can be sent any more.
        """
        if self._coordinator is not None:
            self._coordinator.wait(lambda a: a.wait_committed(version, timeout_s))

    def drain(self, version: int, timeout_s: float) -> None:
        """Wait until `version` is available and recorded. Returns at once on ranks > 0.

        Also waits for engines, but not longer than weight_sync.commit_timeout_s. Raises
        WeightSyncError if it was not available in time, or if nothing can be sent any more.
        """
        if self._coordinator is not None:
            self._coordinator.wait(lambda a: a.drain(version, timeout_s))

    def close(self) -> None:
        """End the threads and leave all groups. Versions that are not available yet are lost."""
        if self._coordinator is not None:
            self._coordinator.close()
        if self._commands is not None:
            self._commands.close()
        self._choices.close()


class _CoordinatorThread:
    """Rank 0's coordinator in a thread of its own, which also carries out its commands."""

    def __init__(
        self,
        timeouts: Timeouts,
        sending: SendingRank,
        control: ControlGroup,
        group: GroupSpec,
        key: str,
        open_board: OpenBoard,
        store: TCPStore,
    ) -> None:
        self.buffers = SnapshotBuffers(NUM_SNAPSHOTS)
        self._control = control
        self._sending = sending
        self._error: BaseException | None = None
        self._waits: set[asyncio.Task[None]] = set()

        async def make_coordinator() -> Coordinator:
            return Coordinator(
                timeouts,
                buffers=self.buffers,
                ranks=RankControl(self._sending.handle, control, timeouts.control_s),
                board=await open_board(),
                group=group,
                store=store,
                key=key,
            )

        self._loop = LoopThread("weights-coordinator")
        self._running = contextlib.ExitStack()
        try:
            self._coordinator = self._loop.run(make_coordinator())
        except BaseException:
            self._loop.stop()
            raise
        self._running.enter_context(self._loop.running(self._coordinate()))

    async def _coordinate(self) -> None:
        try:
            await self._coordinator.run()
        except asyncio.CancelledError:
            self._fail(WeightSyncError("the checkpoint engine was closed"))
        except BaseException as error:
            self._fail(_cause(error))
        # Only now: a trainer that waits on the board would get the error of its end, not the cause.
        await self._coordinator.close()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self.buffers.fail(error)
        for task in self._waits:
            task.cancel()

    def captured(self, captured: Captured) -> None:
        """A version is ready to be sent."""
        self.buffers.captured(captured)
        self._coordinator.wake()

    def wait(self, begin: Callable[[Availability], Coroutine[Any, Any, None]]) -> None:
        """Wait in the coordinator's loop. Raises WeightSyncError if sending has ended."""

        async def wait() -> None:
            if self._error is not None:
                raise LoopClosedError
            task = asyncio.create_task(begin(self._coordinator.availability))
            self._waits.add(task)
            task.add_done_callback(self._waits.discard)
            await task

        try:
            self._loop.run(wait())
        except LoopClosedError:
            raise WeightSyncError(f"weights cannot be sent: {self._error}") from self._error

    def close(self) -> None:
        self._loop.stop()  # which cancels the coordinator
        self._running.close()
        self._control.close()


class _CommandThread:
    """Any other rank's thread, which carries out the coordinator's commands."""

    def __init__(self, control: ControlGroup, sending: SendingRank) -> None:
        self._control = control
        self._sending = sending
        self._thread = SerialThread("weights-sender")
        self._serving = self._thread.submit(self._serve)

    def _serve(self) -> None:
        with contextlib.closing(self._control):
            self._control.serve(self._sending.handle)

    def check(self) -> None:
        if self._serving.done() and (error := self._serving.exception()) is not None:
            raise WeightSyncError(f"weights cannot be sent: {error}") from error

    def close(self) -> None:
        self._thread.close(_CLOSE_S)  # it ends at rank 0's command, or when rank 0 is gone


def _meet(num_ranks: int, rank: int, host: str, timeout_s: float) -> TCPStore:
    """A connection to a store on rank 0; its port is broadcast in the default group."""
    if rank == 0:
        store = open_store(host, timeout_s)
    if num_ranks > 1:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        port = torch.tensor([store.port if rank == 0 else 0], dtype=torch.int64, device=device)
        dist.broadcast(port, src=0)
        if rank > 0:
            store = store_at(host, int(port), timeout_s)
    return store


def _cause(error: BaseException) -> BaseException:
    """The first error inside a task group's."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
