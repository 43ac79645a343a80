"""Writes checkpoints beside training.

    training     wait for the previous one ── copy of the shards ──► next step
    thread                                        └── write, sync ──► reported to rank 0
    of rank 0    all are written ── groups, state, rename, sync ──► durable: its groups are
                                    acknowledged

Training waits only for the copy. An error of the disk costs the checkpoint, not the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore

from configs.run_files import Scalar
from tensors.layout import Layout
from tensors.snapshots import Shard, Snapshots
from trainer_pool.collectives import Collectives
from trainer_pool.state.checkpoint import GROUPS_FILE, CheckpointStore, Checksum, TrainState
from trainer_pool.state.shards import (
    capture_rng,
    rng_file,
    shard_file,
    write_layout,
    write_pieces,
)

_SYNC_BYTES = 256 * 2**20
"""Written between two syncs, so that the last one does not find everything still in memory."""


@dataclass(kw_only=True, slots=True, frozen=True)
class _Notice:
    """A rank's report to rank 0 on its files."""

    error: str | None = None
    shards: Checksum | None = None


class CheckpointWriter:
    """One rank's part in a run's checkpoints. All ranks make the same calls but `protect_copy`.

    Example:

        writer = CheckpointWriter(store, policy.state.layout(), ranks, ..., on_end=acknowledge)
        writer.save(state, policy.state.shards())   # returns when they are copied
        ...                                         # steps; call `protect_copy` before updates
        writer.finish()                             # durable, or reported to `on_end`
    """

    def __init__(
        self,
        store: CheckpointStore,
        layout: Layout,
        ranks: Collectives,
        *,
        uses_gpu: bool,
        timeout_s: float,
        on_end: Callable[[TrainState, dict[str, Scalar]], None],
        dump_groups: Callable[[Path], None] | None = None,
    ) -> None:
        """Takes host memory for this rank's state, pinned with `uses_gpu`. `timeout_s`: for rank 0
        to wait for the others' files. `on_end`, and `dump_groups` to write the buffer's groups to a
        file, are called on rank 0, in a thread. The record that `on_end` gets has `error` if there
        is no checkpoint of this step, and `groups_error` if it is without the buffer's groups;
        `write_s` is the time from the end of the copy until it was durable."""
        assert ranks.store is not None
        self._store = store
        self._layout = layout
        self._ranks = ranks
        # A waiting client blocks all its callers. (torch's stubs do not know `clone`.)
        self._notices: TCPStore = ranks.store.clone()  # type: ignore[attr-defined]
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._dump_groups = dump_groups
        self._snapshots = Snapshots(layout, ranks.rank, 1, should_pin=uses_gpu)
        self._num_saves = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, state: TrainState, shards: Iterable[Shard]) -> float:
        """Copy `shards` and begin to write them; returns the seconds that it waited for the
        previous checkpoint."""
        began = time.perf_counter()
        self.finish()
        wait_s = time.perf_counter() - began
        self._num_saves += 1
        error = self._begin(state)
        if not self._ranks.broadcast_flag(error is None):
            if error is not None:
                none = {"step": state.step, "bytes": 0, "write_s": 0.0}
                self._on_end(state, {**none, "error": error})
            return wait_s
        self._snapshots.capture(0, self._num_saves, shards)
        # Here, not in the thread: by then the next step may have drawn numbers.
        rng = capture_rng()
        self._thread = threading.Thread(
            target=self._run, args=(self._num_saves, state, rng), name="checkpoint", daemon=True
        )
        self._thread.start()
        return wait_s

    def protect_copy(self) -> None:
        """Call before the weights change: on a GPU they may still be being copied."""
        self._snapshots.protect_copy()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is durable, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _begin(self, state: TrainState) -> str | None:
        try:
            if self._ranks.rank == 0:
                self._store.begin(state.step)
        except OSError as error:
            return str(error)
        return None

    def _run(self, number: int, state: TrainState, rng: str) -> None:
        try:
            began = time.perf_counter()
            self._write(number, state, rng)
            if self._ranks.rank == 0:
                groups_error = self._write_groups(state)
                error = self._conclude(number, state)
                record: dict[str, Scalar] = {
                    "step": state.step,
                    "bytes": self._layout.num_bytes,
                    "write_s": time.perf_counter() - began,
                }
                if error is not None:
                    record["error"] = error
                elif groups_error is not None:
                    record["groups_error"] = groups_error
                self._on_end(state, record)
        except BaseException as error:  # raised in the training thread
            self._error = error

    def _write(self, number: int, state: TrainState, rng: str) -> None:
        rank = self._ranks.rank
        try:
            stream = self._snapshots.stream(0, number, self._timeout_s)
            folder = self._store.writing_folder(state.step)
            parts = torch.split(stream, _SYNC_BYTES)
            shards = write_pieces(folder, self._layout, rank, parts, should_sync=True)
            notice = _Notice(shards=shards)
            rng_file(folder, rank).write_text(rng)
        except OSError as error:
            notice = _Notice(error=f"trainer-{rank}: {error}")
        self._notices.set(_key(number, rank), msgspec.json.encode(notice).decode())

    def _write_groups(self, state: TrainState) -> str | None:
        """Returns why it could not."""
        try:
            if self._dump_groups is not None:
                self._dump_groups(self._store.writing_folder(state.step) / GROUPS_FILE)
        except Exception as error:  # whatever it is: the checkpoint is of use without them
            return str(error) or type(error).__name__
        return None

    def _conclude(self, number: int, state: TrainState) -> str | None:
        """Commits the checkpoint if all ranks have written; returns why not."""
        keys = [_key(number, rank) for rank in range(self._ranks.num_ranks)]
        try:
            for rank, key in enumerate(keys):
                try:
                    self._notices.wait([key], timedelta(seconds=self._timeout_s))
                except RuntimeError as error:
                    raise TimeoutError(
                        f"trainer-{rank} did not write its part within trainer.timeout_s="
                        f"{self._timeout_s:g}"
                    ) from error
            notices = [msgspec.json.decode(self._notices.get(key), type=_Notice) for key in keys]
            if failed := [notice.error for notice in notices if notice.error is not None]:
                raise OSError("; ".join(failed))
            folder = self._store.writing_folder(state.step)
            write_layout(folder, self._layout)
            shards = {
                shard_file(folder, rank).name: notice.shards
                for rank, notice in enumerate(notices)
                if notice.shards is not None
            }
            self._store.commit(state, shards)
        except OSError as error:  # a TimeoutError is one
            self._store.discard(state.step)
            return str(error)
        finally:
            for key in keys:
                self._notices.delete_key(key)
        return None


def _key(number: int, rank: int) -> str:
    return f"checkpoint/{number}/{rank}"
