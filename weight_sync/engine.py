"""The checkpoint engine: sends the policy's versions from the trainer's ranks to every receiver.

    training thread of each rank     publish ─► copy own shards ─► back to training
    sender thread of each rank                        │ encode, send, as the coordinator commands
    coordinator thread of rank 0                      └─► receivers ─► published ─► engines commit

Training waits only for the copy. The ranks exchange only the choice of the snapshot buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from configs.schema import WeightSyncConfig
from weight_sync.coordinator.coordinator import Coordinator
from weight_sync.coordinator.versions import Published
from weight_sync.group import open_store, resolve_backend
from weight_sync.interfaces import own_address_towards
from weight_sync.layout import Layout
from weight_sync.sender.commands import ControlError, ControlGroup, Ranks
from weight_sync.sender.rank import Sender, SendingRank
from weight_sync.sender.snapshot import Shard, Snapshots
from weight_sync.sender.snapshot_buffers import Captured, SnapshotBuffers
from weight_sync.timeouts import Timeouts
from weight_sync.types import (
    NUM_SNAPSHOTS,
    GroupSpec,
    PublishReport,
    VersionBoard,
    WeightSyncError,
)

_CLOSE_S = 5.0
OpenBoard = Callable[[], Awaitable[VersionBoard]]


class CheckpointEngine:
    """One trainer rank's end. Call it from the training thread only, except `close` and the waits.

    Every rank creates one and publishes after each update:

        engine = CheckpointEngine(layout, config, rank=rank, ...)
        engine.publish(0, shards())           # returns after the copy, before the bytes are sent
        engine.wait_committed(0, timeout_s)   # every live engine serves version 0
        for version in range(1, num_steps + 1):
            ...                               # forward and backward passes
            engine.guard()                    # the copy of the last version is done
            optimizer.step()
            engine.publish(version, shards())
        engine.drain(num_steps, timeout_s)    # the last version is published and recorded
        engine.close()

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
        self._rank = rank
        self._timeouts = Timeouts(config=config, layout=layout, control_s=control_timeout_s)
        backend = resolve_backend(config.backend, uses_gpu=uses_gpu)
        self._snapshots = Snapshots(layout, rank, NUM_SNAPSHOTS, should_pin=uses_gpu)
        sender = Sender(rank, config, _sender_device(backend))
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
            )
            self._coordinator = _CoordinatorThread(
                self._timeouts, sending, control, group, key, open_board, store
            )
        else:
            self._commands = _CommandThread(control, sending)

    def publish(self, version: int, shards: Iterable[Shard]) -> PublishReport:
        """Collective: copy this rank's shards of `version`, which are sent while training goes on.

        An earlier version that is still waiting to be sent is skipped. Raises WeightSyncError, with
        the cause, if versions can no longer be sent, and ValueError if `version` is not greater
        than the last one or if the shards are not the layout's.
        """
        if version <= self._version:
            raise ValueError(f"version {version} was published after {self._version}: must grow")
        start = time.monotonic()
        buffer = self._choose_buffer()
        snapshot_at, chosen = time.time(), time.monotonic()
        self._snapshots.capture(buffer, version, shards)
        snapshot_s = time.monotonic() - chosen
        self._version = version
        if self._coordinator is not None:
            self._coordinator.captured(
                Captured(
                    buffer=buffer,
                    version=version,
                    snapshot_s=snapshot_s,
                    wait_s=chosen - start,
                    snapshot_at=snapshot_at,
                )
            )
        return PublishReport(
            version=version,
            num_bytes=self._snapshots.num_bytes,
            snapshot_s=snapshot_s,
            wait_s=chosen - start,
        )

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
            buffer = self._coordinator.buffers.take(self._timeouts.encode_s)
        except WeightSyncError as error:
            if not isinstance(error.__cause__, ControlError):
                self._choices.broadcast({"error": str(error)})
            raise
        self._choices.broadcast({"buffer": buffer})
        return buffer

    def guard(self) -> None:
        """Call before the weights change, to protect the copy of the last version."""
        self._snapshots.guard()

    def wait_committed(self, version: int, timeout_s: float) -> None:
        """Wait until every live engine serves `version` or later. Returns at once on ranks > 0.

        Raises WeightSyncError that says what is missing, or why nothing can be sent any more.
        """
        if self._coordinator is not None:
            self._coordinator.wait(lambda p: p.wait_committed(version, timeout_s), timeout_s)

    def drain(self, version: int, timeout_s: float) -> None:
        """Wait until `version` is published and recorded. Returns at once on ranks > 0.

        Also waits for engines, but not longer than weight_sync.commit_timeout_s. Raises
        WeightSyncError if it was not published in time, or if nothing can be sent any more.
        """
        if self._coordinator is not None:
            self._coordinator.wait(lambda p: p.drain(version, timeout_s), timeout_s)

    def close(self) -> None:
        """End the threads and leave all groups. Unpublished versions are lost."""
        if self._coordinator is not None:
            self._coordinator.close()
        if self._commands is not None:
            self._commands.close()
        self._choices.close()


class _CoordinatorThread:
    """Rank 0's thread: the event loop of the coordinator, which also carries out its commands."""

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
        self._timeouts = timeouts
        self._sending = sending
        self._control = control
        self._group = group
        self._key = key
        self._open_board = open_board
        self._store = store  # the rendezvous of every epoch
        self._loop = asyncio.new_event_loop()
        self._coordinator: Future[Coordinator] = Future()
        self._error: BaseException | None = None
        self._main: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="weights-coordinator", daemon=True)
        self._thread.start()
        self._coordinator.result()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._main = self._loop.create_task(self._coordinate())
        try:
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            self._fail(WeightSyncError("the checkpoint engine was closed"))
        except BaseException as error:
            self._fail(_cause(error))
        finally:
            others = asyncio.all_tasks(self._loop)  # calls of `wait`
            for task in others:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*others, return_exceptions=True))
            self._loop.close()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self.buffers.fail(error)
        if not self._coordinator.done():
            self._coordinator.set_exception(error)

    async def _coordinate(self) -> None:
        board = await self._open_board()
        coordinator = Coordinator(
            self._timeouts,
            buffers=self.buffers,
            ranks=Ranks(self._sending.handle, self._control, self._timeouts.control_s),
            board=board,
            group=self._group,
            store=self._store,
            key=self._key,
        )
        self._coordinator.set_result(coordinator)
        await coordinator.run()

    def captured(self, captured: Captured) -> None:
        """A version is ready to be sent."""
        self.buffers.captured(captured)
        self._call(self._coordinator.result().wake)

    def _call(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: `take` raises its error
            self._loop.call_soon_threadsafe(call)

    def wait(
        self, begin: Callable[[Published], Coroutine[Any, Any, None]], timeout_s: float
    ) -> None:
        waiting = begin(self._coordinator.result().published)
        try:
            future = asyncio.run_coroutine_threadsafe(waiting, self._loop)
        except RuntimeError:  # the loop has ended
            waiting.close()
            raise self._broken() from self._error
        try:
            future.result(timeout_s + _CLOSE_S)
        except (CancelledError, TimeoutError):
            raise self._broken() from self._error

    def _broken(self) -> WeightSyncError:
        return WeightSyncError(f"weights cannot be sent: {self._error}")

    def close(self) -> None:
        if self._main is not None:
            self._call(self._main.cancel)
        self._thread.join(2 * _CLOSE_S)
        self._control.close()


class _CommandThread:
    """Any other rank's thread, which carries out the coordinator's commands."""

    def __init__(self, control: ControlGroup, sending: SendingRank) -> None:
        self._control = control
        self._sending = sending
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="weights-sender", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._control.serve(self._sending.handle)
        except BaseException as error:
            self._error = error
        finally:
            self._control.close()

    def check(self) -> None:
        if self._error is not None:
            raise WeightSyncError(f"weights cannot be sent: {self._error}") from self._error

    def close(self) -> None:
        self._thread.join(_CLOSE_S)  # it ends at rank 0's command, or when rank 0 is gone


def _meet(num_ranks: int, rank: int, host: str, timeout_s: float) -> TCPStore:
    """A connection to a store on rank 0; its port is broadcast in the default group."""
    if rank == 0:
        store = open_store(host, timeout_s)
    if num_ranks > 1:
        is_nccl = dist.get_backend() == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else None
        port = torch.tensor([store.port if rank == 0 else 0], dtype=torch.int64, device=device)
        dist.broadcast(port, src=0)
        if rank > 0:
            limit = timedelta(seconds=timeout_s)
            store = TCPStore(host, int(port), None, False, limit, wait_for_workers=False)
    return store


def _sender_device(backend: str) -> torch.device:
    if backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _cause(error: BaseException) -> BaseException:
    """The first error inside a task group's."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
