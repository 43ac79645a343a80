"""The checkpoint engine: brings the policy's versions from the trainer's ranks to every receiver.

    training thread of each rank     publish ─► copy own shards ─► back to training
    sender thread of each rank                        │ encode, send, as rank 0 commands
    coordinator, on rank 0                            └─► receivers ─► published ─► engines commit

Training waits for the copy alone; which of the two snapshot buffers it goes to is the one thing
that the ranks tell each other on the way.
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
from weight_sync.coordinator.broadcast import Courier
from weight_sync.coordinator.coordinator import Coordinator
from weight_sync.coordinator.fleet import Fleet
from weight_sync.coordinator.versions import Published
from weight_sync.group import forget_epochs, open_store, resolve_backend
from weight_sync.interfaces import own_address_towards
from weight_sync.layout import Layout
from weight_sync.sender.commands import ControlError, ControlGroup, Ranks
from weight_sync.sender.rank import Sender, SendingRank
from weight_sync.sender.snapshot import Shard, Snapshots
from weight_sync.sender.snapshot_buffers import Captured, Slots
from weight_sync.timeouts import Limits
from weight_sync.types import GroupSpec, PublishReport, VersionBoard, WeightSyncError

_NUM_SNAPSHOTS = 2
_CLOSE_S = 5.0
OpenBoard = Callable[[], Awaitable[VersionBoard]]


class CheckpointEngine:
    """One trainer rank's end. All but `close` and the waits are for the training thread."""

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
        """Collective: the `layout.num_ranks` ranks of torch's default group, if more than one.

        `host` is where rank 0 listens for the other ranks and the receivers, which ask for `key`.
        `open_board` is called on rank 0 only, in the event loop that the board is then used in.
        `control_timeout_s` bounds every silence of a rank. Raises WeightSyncError.
        """
        self._rank = rank
        self._limits = Limits(config=config, layout=layout, control_s=control_timeout_s)
        backend = resolve_backend(config.backend, uses_gpu=uses_gpu)
        self._snapshots = Snapshots(layout, rank, _NUM_SNAPSHOTS, should_pin=uses_gpu)
        sender = Sender(rank, config, _sender_device(backend))
        sending = SendingRank(self._limits, rank, self._snapshots, sender)
        store = _meet(layout.num_ranks, rank, host, control_timeout_s)
        self._choices = self._open_control(store, run, host, "choices", self._limits.encode_s)
        control = self._open_control(store, run, host, "commands", 0.0)
        self._version = -1
        self._lead: _Lead | None = None
        self._follower: _Follower | None = None
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
            self._lead = _Lead(self._limits, sending, control, group, key, open_board, store)
        else:
            assert control is not None
            self._follower = _Follower(control, sending)

    def _open_control(
        self, store: TCPStore, run: str, host: str, name: str, patience_s: float
    ) -> ControlGroup | None:
        if self._limits.layout.num_ranks == 1:
            return None
        return ControlGroup(
            store,
            f"leash-{run}/{name}",
            rank=self._rank,
            num_ranks=self._limits.layout.num_ranks,
            address=own_address_towards(host),
            timeout_s=self._limits.control_s + patience_s,
        )

    def publish(self, version: int, shards: Iterable[Shard]) -> PublishReport:
        """Collective: copy this rank's shards of `version`; they travel while training goes on.

        A version that nobody has begun to send yet is given up for this one. Raises WeightSyncError
        if versions cannot be sent any more, with the cause, and ValueError for a version that does
        not grow or for shards that are not the layout's.
        """
        if version <= self._version:
            raise ValueError(f"version {version} was published after {self._version}: must grow")
        start = time.monotonic()
        slot = self._choose_slot()
        snapshot_at, chosen = time.time(), time.monotonic()
        self._snapshots.capture(slot, version, shards)
        snapshot_s = time.monotonic() - chosen
        self._version = version
        if self._lead is not None:
            self._lead.slots.captured(
                Captured(
                    slot=slot,
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

    def _choose_slot(self) -> int:
        if self._lead is None:
            assert self._choices is not None and self._follower is not None
            self._follower.check()
            choice = self._choices.hear()
            if "error" in choice:
                raise WeightSyncError(choice["error"])
            return int(choice["slot"])
        try:
            slot = self._lead.slots.take(self._limits.encode_s)
        except WeightSyncError as error:
            if self._choices is not None and not isinstance(error.__cause__, ControlError):
                self._choices.tell({"error": str(error)})
            raise
        if self._choices is not None:
            self._choices.tell({"slot": slot})
        return slot

    def guard(self) -> None:
        """To be called before the weights change: the last version's copy is then safe from it."""
        self._snapshots.guard()

    def wait_committed(self, version: int, timeout_s: float) -> None:
        """Until every live engine serves `version` or a later one; at once on other ranks than 0.

        Raises WeightSyncError that names what is missing, or why nothing can be sent any more.
        """
        if self._lead is not None:
            self._lead.wait(lambda made: made.wait_committed(version, timeout_s), timeout_s)

    def drain(self, version: int, timeout_s: float) -> None:
        """Until `version` is published and recorded; at once on other ranks than 0.

        Waits for engines, too, but for none longer than weight_sync.commit_timeout_s. Raises
        WeightSyncError if it was not published in time, or why nothing can be sent any more.
        """
        if self._lead is not None:
            self._lead.wait(lambda made: made.drain(version, timeout_s), timeout_s)

    def close(self) -> None:
        """End the threads and leave all groups. What was not published by now never will be."""
        if self._lead is not None:
            self._lead.close()
        if self._follower is not None:
            self._follower.close()
        if self._choices is not None:
            self._choices.close()


class _Lead:
    """Rank 0's coordinator, in an event loop and a thread of its own."""

    def __init__(
        self,
        limits: Limits,
        sending: SendingRank,
        control: ControlGroup | None,
        group: GroupSpec,
        key: str,
        open_board: OpenBoard,
        store: TCPStore,
    ) -> None:
        self.slots = Slots(_NUM_SNAPSHOTS, self._on_pending)
        self._limits = limits
        self._sending = sending
        self._control = control
        self._epoch = group
        self._key = key
        self._open_board = open_board
        self._store = store  # the members of every epoch meet in it
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
            others = asyncio.all_tasks(self._loop)  # of `wait`
            for task in others:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*others, return_exceptions=True))
            self._loop.close()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self.slots.fail(error)
        if not self._coordinator.done():
            self._coordinator.set_exception(error)

    async def _coordinate(self) -> None:
        limits = self._limits
        board = await self._open_board()
        ranks = Ranks(self._sending.handle, self._control, limits.control_s)
        fleet = Fleet(board, limits, self._key)
        forget = partial(forget_epochs, self._store, self._epoch.name)
        courier = Courier(fleet, ranks, limits, self._epoch, forget)
        coordinator = Coordinator(
            limits, slots=self.slots, ranks=ranks, fleet=fleet, courier=courier, board=board
        )
        self._coordinator.set_result(coordinator)
        try:
            await coordinator.run()
        finally:
            await ranks.close(_CLOSE_S)
            await fleet.close()
            await board.close()

    def _on_pending(self) -> None:
        self._call(self._coordinator.result().wake)

    def _call(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: `take` says why
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
        if self._control is not None:
            self._control.close()


class _Follower:
    """Any other rank's thread, which serves rank 0's commands."""

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
        self._thread.join(_CLOSE_S)  # rank 0 ends it by command, or by being gone


def _meet(num_ranks: int, rank: int, host: str, timeout_s: float) -> TCPStore:
    """A connection to a store on rank 0, whose port the ranks learn through the default group."""
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
    """What a task group's error is about."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
