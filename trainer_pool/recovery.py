"""A rank's checkpoints on disk and copies in memory, and the way back to them after a death.

    consumed groups ─► unsaved ─┬► checkpoint, beside training ─► durable ─► ack
                                └► copy in host memory

A resumed trainer starts at the newest of the two that is whole on all ranks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from uuid import uuid4

from buffer.dump.export import dump_buffer
from buffer.redis.connection import connect
from buffer.replay_buffer import ReplayBuffer
from buffer.results import TaskProgress
from buffer.run_state import RunState
from configs.run_files import Scalar
from host.loop_thread import LoopThread
from processes.leftovers import list_path, write_list
from trainer_pool.collectives import Collectives
from trainer_pool.critic import Critic
from trainer_pool.model.sharded_state import joint_layout, joint_shards
from trainer_pool.model.zero3 import Zero3Policy
from trainer_pool.state.checkpoint import (
    CheckpointStore,
    TrainState,
    check_checkpoint,
    read_state,
)
from trainer_pool.state.peer_copies import Copy, PeerCopies
from trainer_pool.state.shards import ShardReader, restore_rng
from trainer_pool.state.writer import CheckpointWriter
from trainer_pool.types import Restored, TrainerSpec

log = logging.getLogger(__name__)

_UNKNOWN = TaskProgress(positions={}, untrained=())


class Recovery:
    """One rank's part in checkpoints and copies. All ranks make the same calls,
    but only rank 0 calls `reconcile`, `note_version` and `add_consumed`.

    Example:

        recovery = Recovery(spec, policy, None, ranks, ...)   # restores, if resumed
        recovery.reconcile()
        ...                                             # step 13 makes version 12
        recovery.note_version(12)
        recovery.add_consumed(13, ("g1", "g2"))
        recovery.checkpoint(step=13, version=12)
        recovery.writer.finish()                        # durable; g1 and g2 are acknowledged
    """

    def __init__(
        self,
        spec: TrainerSpec,
        policy: Zero3Policy,
        critic: Critic | None,
        ranks: Collectives,
        loop: LoopThread,
        buffer: ReplayBuffer,
        run_state: RunState,
    ) -> None:
        """Restores the state in `spec.resume_from`, or that of a later copy in memory."""
        config = spec.config
        self._spec = spec
        self._policy = policy
        self._critic = critic
        self._states = [one.state for one in (policy, critic) if one is not None]
        self._ranks = ranks
        self._loop = loop
        self._buffer = buffer
        self._run_state = run_state
        self._store = CheckpointStore(
            Path(spec.run_dir) / "checkpoints",
            num_kept=config.keep_checkpoints,
            keep_every=config.keep_checkpoint_every,
        )
        self.writer = CheckpointWriter(
            self._store,
            joint_layout(self._states),
            ranks,
            uses_gpu=spec.uses_gpu,
            timeout_s=config.timeout_s,
            on_end=self._end_checkpoint,
            dump_groups=self._dump_groups if config.checkpoint_groups else None,
        )
        (self._lineage, *_) = ranks.gather_texts(uuid4().hex)  # rank 0's
        self._unsaved: list[tuple[int, tuple[str, ...]]] = []
        """Steps that no durable checkpoint contains, with their groups."""
        self._unsaved_lock = threading.Lock()
        self._copies = self._open_copies() if config.memory_copy_every is not None else None
        self._state: TrainState | None = None
        """The state that was restored; None for a run that begins."""
        self._durable: TrainState | None = None
        """The state of the checkpoint on disk: the one restored, or older than a restored copy."""
        self.saved_step = -1
        """The newest step whose checkpoint was begun."""
        self.version = 0
        """Version of the weights that training goes on with."""
        if spec.resume_from is not None:
            self._restore(Path(spec.resume_from))
        elif self._copies is not None:
            self._copies.clear(kept=None)

    def _open_copies(self) -> PeerCopies:
        spec, rank = self._spec, self._ranks.rank
        write_list(list_path(Path(spec.run_dir), f"trainer-{rank}"), [spec.copies_dir])
        return PeerCopies(
            Path(spec.copies_dir),
            joint_layout(self._states),
            self._ranks,
            timeout_s=spec.config.timeout_s,
        )

    def _restore(self, folder: Path) -> None:
        """Continue from the checkpoint in `folder`, or from a later copy in memory."""
        self._durable = state = read_state(folder)
        copy, only = self._find_copy(state.step), None
        if copy is not None:
            folder, state, only = copy.folder, copy.state, self._ranks.rank
            self._unsaved = [entry for entry in copy.unsaved if entry[0] > self._durable.step]
        else:
            check_checkpoint(folder, self._ranks.rank, self._ranks.num_ranks)
        self._state = state
        with ShardReader(folder, only) as reader:
            self._policy.state.restore(reader, state.num_updates)
            if self._critic is not None:
                self._critic.state.restore(reader, state.critic_updates)
            if reader.layout.num_ranks == self._ranks.num_ranks:
                restore_rng(folder, self._ranks.rank)
        self.saved_step = self._durable.step
        # The newest of all shards: a trainer that died as it announced one had reached only some.
        known = self._loop.run(self._buffer.stats()).trainer_version
        # Redis may have lost the newest, and the run's history lags behind.
        noted = self._ranks.gather_texts(str(self._store.noted_version() if self._is_lead else -1))
        newest = max(known, self._spec.newest_version, int(noted[0]))
        # A number that has named other weights since is never used again.
        self.version = state.version if state.version >= newest else newest + 1

    def _find_copy(self, durable_step: int) -> Copy | None:
        """The newest copy in memory, if it may be used; the others are removed."""
        if self._copies is None:
            return None
        copy = self._copies.newest(after=durable_step) if self._spec.may_use_copies else None
        # A Redis server that was killed may have lost that the copy's groups were consumed, and
        # would hand them out again; the checkpoint on disk lists its own.
        is_known = copy is not None
        if copy is not None and self._is_lead:
            ids = [name for step, names in copy.unsaved if step > durable_step for name in names]
            is_known = self._loop.run(self._buffer.are_consumed(ids))
        copy = copy if self._ranks.broadcast_flag(is_known) else None
        self._copies.clear(kept=copy)
        return copy

    @property
    def _is_lead(self) -> bool:
        return self._ranks.rank == 0

    @property
    def restored(self) -> Restored:
        """The step at which training goes on."""
        step = 0 if self._state is None else self._state.step
        from_memory = self._durable is not None and step > self._durable.step
        return Restored(step=step, from_memory=from_memory)

    def reconcile(self) -> None:
        """Take the buffer back to the step that was restored; from here on it rejects an earlier
        trainer of this run."""
        state, durable = self._state, self._durable
        self._loop.run(
            self._buffer.reconcile(
                self._lineage,
                step=self.restored.step,
                version=self.version if state is None else state.version,
                resume_version=self.version,
                consumed_group_ids=() if durable is None else durable.consumed_group_ids,
                durable_step=None if durable is None else durable.step,
            )
        )

    def note_version(self, version: int) -> None:
        """Write the number to disk: a Redis that loses it must not let other weights have it."""
        try:
            self._store.note_version(version)
        except OSError as error:
            log.warning("version %d is not noted on disk: %s", version, error)

    def add_consumed(self, step: int, group_ids: tuple[str, ...]) -> None:
        """Keep the groups of `step` until a durable checkpoint contains it."""
        with self._unsaved_lock:
            self._unsaved.append((step, group_ids))

    def checkpoint(self, *, step: int, version: int) -> float:
        """Copy all shards; they are written while training continues.

        Returns the seconds that it waited for the previous checkpoint to be written.
        """
        progress = _UNKNOWN
        if self._is_lead:
            progress = self._loop.run(self._buffer.task_progress(step))
        state = self._train_state(step, version, progress)
        wait_s = self.writer.save(state, joint_shards(self._states))
        self.saved_step = step
        return wait_s

    def copy_to_memory(self, *, step: int, version: int) -> str | None:
        """Copy all shards to host memory (trainer.memory_copy_every). Returns why this step has no
        copy; None if it has one."""
        assert self._copies is not None
        with self._unsaved_lock:
            unsaved = list(self._unsaved)
        state = self._train_state(step, version, _UNKNOWN)  # Redis knows it
        return self._copies.save(state, unsaved, joint_shards(self._states))

    def _train_state(self, step: int, version: int, progress: TaskProgress) -> TrainState:
        with self._unsaved_lock:
            group_ids = tuple(group_id for _, ids in self._unsaved for group_id in ids)
        return TrainState(
            step=step,
            version=version,
            num_updates=self._policy.state.num_updates,
            critic_updates=0 if self._critic is None else self._critic.state.num_updates,
            lineage=self._lineage,
            consumed_group_ids=group_ids,
            task_positions=dict(progress.positions),
            untrained_prompts=progress.untrained,
        )

    def _dump_groups(self, file: Path) -> None:
        """Write the buffer's groups to `file`; on rank 0, in the checkpoint's thread, which has
        connections of its own."""
        spec = self._spec

        async def dump() -> None:
            async with asyncio.timeout(spec.config.timeout_s):
                redis = await connect(spec.redis_url, tls_ca_file=spec.buffer.tls_ca_file)
                try:
                    await dump_buffer(redis, spec.run, file)
                finally:
                    await redis.aclose()

        asyncio.run(dump())

    def _end_checkpoint(self, state: TrainState, record: dict[str, Scalar]) -> None:
        """Acknowledge the groups that a durable checkpoint contains; on rank 0, in the checkpoint's
        thread."""
        if "error" not in record:
            self._loop.run(self._buffer.ack(state.step, self._lineage))
            with self._unsaved_lock:
                self._unsaved = [entry for entry in self._unsaved if entry[0] > state.step]
        self._loop.run(self._run_state.append_metrics(record, kind="checkpoint"))
