"""One rank of the trainer: the loop from leased groups to published weights.

    rollout pool ─► [ready] ─ lease ─► validate ─► train_step ─┬► publish_version, consume
                       ▲                                       ├► copy of the shards ─► engines
                       └── stale: dropped or run again         └► copy ─► checkpoint ─► ack

Every rank runs this loop. Rank 0 decides for all of them which groups may still be trained, and
records metrics. Weights are sent in the background; the loop waits only for the copy.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from socket import socket
from uuid import uuid4

import torch

from buffer.connect import connect_buffer
from buffer.export import dump_buffer
from buffer.loop_thread import LoopThread
from buffer.redis.connection import connect
from buffer.results import Lease, TaskProgress
from buffer.roles import TrainerBuffer
from buffer.run_state import RunState
from configs.checks import live_names, with_live
from configs.choices import LrSchedule
from configs.schema import TrainerConfig
from processes.leftovers import list_path, write_list
from trainer_pool.algorithms.registry import Algorithm
from trainer_pool.collectives import Collectives
from trainer_pool.data.rows import StepBatch
from trainer_pool.guard import UpdateGuard
from trainer_pool.metrics import StepStats
from trainer_pool.model.checkpoint_names import check_engines_agree
from trainer_pool.model.zero3 import RankAddress, Zero3Engine, join_ranks, leave_ranks
from trainer_pool.state.checkpoint import (
    CheckpointStore,
    TrainState,
    check_checkpoint,
    read_state,
)
from trainer_pool.state.peer_copies import Copy, PeerCopies
from trainer_pool.state.shards import ShardReader, restore_rng
from trainer_pool.state.writer import CheckpointWriter, SaveReport
from trainer_pool.step import Accumulation, train_step
from trainer_pool.types import (
    FINAL_MODEL,
    KEPT_REFERENCE,
    Restored,
    SupervisedExample,
    TrainerSpec,
    TrainReport,
    WarmStartReport,
)
from trainer_pool.warm_start import warm_start
from weight_sync.engine import CheckpointEngine
from weight_sync.types import PublishReport, VersionBoard

log = logging.getLogger(__name__)


class TrainerRank:
    """The policy's shards on this rank, and its connections to the buffer and to the engines.

    All ranks make the same calls; only `stop` and `close` are not collective. An actor of
    `TrainerPool` uses it like this:

        trainer = TrainerRank(spec, address, listener)   # joins the other ranks, loads the model
        trainer.warm_start(examples)                     # optional, before any engine starts
        trainer.connect()                                # from here on receivers are served
        trainer.publish_initial()                        # returns when engines serve version 0
        report = trainer.train()                         # all steps, or until `stop`
        trainer.publish_last()                           # returns when engines serve its weights
        trainer.export()                                 # for from_pretrained
        trainer.close()
    """

    def __init__(self, spec: TrainerSpec, address: RankAddress, listener: socket | None) -> None:
        """Join the other ranks and load the model; rank 0 passes the rendezvous' `listener`."""
        torch.manual_seed(spec.seed)
        config = spec.config
        self._spec = spec
        self._algorithm = Algorithm.load(spec.algorithm)
        self._guard = UpdateGuard(config)
        self._accumulation = Accumulation() if config.gradient_accumulation_steps > 1 else None
        self._host = address.host
        self._ranks: Collectives = join_ranks(address, config.backend, config.timeout_s, listener)
        self._engine = Zero3Engine(
            spec.model_path, config, address, trust_remote_code=spec.trust_remote_code
        )
        cost = self._engine.cost
        self._pair_cost = cost.per_pair / cost.per_token
        self._loop = LoopThread("redis")
        self._buffer: TrainerBuffer = self._loop.run(
            connect_buffer(spec.redis_url, spec.run, spec.buffer, waits=True)
        )
        self._run_state = self._loop.run(
            RunState.connect(spec.redis_url, spec.run, spec.buffer, waits=True)
        )
        self._weights: CheckpointEngine | None = None
        self._store = CheckpointStore(
            Path(spec.run_dir) / "checkpoints",
            num_kept=config.keep_checkpoints,
            keep_every=config.keep_checkpoint_every,
        )
        self._writer = CheckpointWriter(
            self._store,
            self._engine.state_layout(),
            self._ranks,
            uses_gpu=spec.uses_gpu,
            timeout_s=config.timeout_s,
            on_end=self._end_checkpoint,
            dump_groups=self._dump_groups if config.checkpoint_groups else None,
        )
        self._stop_requested = threading.Event()
        self._is_working = False
        (self._lineage, *_) = self._ranks.gather_texts(uuid4().hex)  # rank 0's
        self._step = 0
        self._version = 0
        self._published = -1
        """The last version that the engines get."""
        self._saved_step = -1
        self._unsaved: list[tuple[int, tuple[str, ...]]] = []
        """Steps that no durable checkpoint contains, with their groups."""
        self._unsaved_lock = threading.Lock()
        self._copies: PeerCopies | None = None
        if config.memory_copy_every is not None:
            write_list(
                list_path(Path(spec.run_dir), f"trainer-{self._ranks.rank}"), [spec.copies_dir]
            )
            self._copies = PeerCopies(
                Path(spec.copies_dir),
                self._engine.state_layout(),
                self._ranks,
                timeout_s=config.timeout_s,
            )
        self._restored: TrainState | None = None
        self._durable: TrainState | None = None
        """State of the checkpoint on disk that is the last one."""
        if spec.resume_from is not None:
            self._restore(Path(spec.resume_from))
        elif self._copies is not None:
            self._copies.clear(kept=None)

    def _restore(self, folder: Path) -> None:
        """Continue from the checkpoint in `folder`, or from a later copy in memory;
        `publish_initial` then reconciles the buffer with it."""
        self._durable = state = read_state(folder)
        copy, only = self._find_copy(state.step), None
        if copy is not None:
            folder, state, only = copy.folder, copy.state, self._ranks.rank
            self._unsaved = [entry for entry in copy.unsaved if entry[0] > self._durable.step]
        else:
            check_checkpoint(folder, self._ranks.rank, self._ranks.num_ranks)
        self._restored = state
        with ShardReader(folder, only) as reader:
            self._engine.restore_state(reader, state.num_updates)
            if reader.layout.num_ranks == self._ranks.num_ranks:
                restore_rng(folder, self._ranks.rank)
        self._step, self._saved_step = state.step, self._durable.step
        # The newest of all shards: a trainer that died as it published had reached only some.
        known = self._loop.run(self._buffer.stats()).trainer_version
        # Redis may have lost the newest, and the run's history lags behind.
        noted = self._ranks.gather_texts(str(self._store.noted_version() if self._is_lead else -1))
        newest = max(known, self._spec.newest_version, int(noted[0]))
        # A number that has named other weights since is never used again.
        self._version = state.version if state.version >= newest else newest + 1

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
        (is_known,) = self._ranks.broadcast_flags([is_known])
        copy = copy if is_known else None
        self._copies.clear(kept=copy)
        return copy

    @property
    def restored(self) -> Restored:
        """Where training goes on."""
        from_memory = self._durable is not None and self._step > self._durable.step
        return Restored(step=self._step, from_memory=from_memory)

    @property
    def _is_lead(self) -> bool:
        return self._ranks.rank == 0

    def warm_start(self, examples: Sequence[SupervisedExample]) -> WarmStartReport:
        """Learn from examples before RL; see `trainer_pool.warm_start`."""
        return warm_start(self._engine, self._ranks, examples, self._spec.config)

    def connect(self) -> None:
        """Create the checkpoint engine. Receivers may register before or after."""
        spec = self._spec

        async def open_board() -> VersionBoard:
            return await RunState.connect(spec.redis_url, spec.run, spec.buffer, waits=True)

        self._weights = CheckpointEngine(
            self._engine.layout(spec.serving_dtype),
            spec.weight_sync,
            rank=self._ranks.rank,
            run=spec.run,
            host=self._host,
            key=spec.weights_key,
            uses_gpu=spec.uses_gpu,
            open_board=open_board,
            control_timeout_s=spec.config.timeout_s,
        )

    def publish_initial(self) -> PublishReport:
        """Publish the first weights, and wait until the engines serve them: version 0, or those of
        a checkpoint, as a new version if later ones were published.

        Raises WeightSyncError naming the engines that did not commit it in `trainer.timeout_s`.
        """
        if self._algorithm.needs_reference:
            self._hold_reference()
        if self._is_lead:
            # From here on the buffer rejects an earlier trainer of this run.
            restored, durable = self._restored, self._durable
            self._loop.run(
                self._buffer.reconcile(
                    self._lineage,
                    step=self._step,
                    version=self._version if restored is None else restored.version,
                    resume_version=self._version,
                    consumed_group_ids=() if durable is None else durable.consumed_group_ids,
                    durable_step=None if durable is None else durable.step,
                )
            )
            self._announce_version()
        report = self._publish_weights()
        self._sending.wait_committed(self._version, self._spec.config.timeout_s)
        return report

    def _hold_reference(self) -> None:
        """Load the reference: that of the settings, or the policy that RL began with. After a warm
        start, a resumed run finds that policy in the run's folder."""
        kl, path = self._algorithm.config.kl, self._spec.model_path
        if kl.reference is not None:
            path = kl.reference
        elif self._spec.config.warm_start.num_steps:
            path = str(Path(self._spec.run_dir) / KEPT_REFERENCE)
            if self._restored is None:
                self._engine.export(Path(path))
                self._ranks.barrier()
        self._engine.hold_reference(path, offload=kl.offload)

    @property
    def _sending(self) -> CheckpointEngine:
        assert self._weights is not None, "connect() comes first"
        return self._weights

    def stop(self) -> None:
        """End `train` after the current step, with a checkpoint; thread-safe."""
        self._stop_requested.set()

    def train(self) -> TrainReport:
        """Run all steps; then the last checkpoint is on disk, if the disk took it.

        Raises TimeoutError if the rollout pool delivers no batch in time, and WeightSyncError if
        versions do not reach the engines.
        """
        with self._working():
            return self._train()

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._is_working = True
        try:
            yield
        finally:
            self._is_working = False

    def _train(self) -> TrainReport:
        start = time.perf_counter()
        if self._saved_step < self._step:
            self._checkpoint()  # so that a run can go on from its first step, too
        while self._step < self._spec.config.num_steps and not self._should_stop():
            self._run_version()
        if self._saved_step < self._step:
            self._checkpoint()
        self._writer.finish()
        return TrainReport(
            num_steps=self._step,
            version=self._version,
            was_stopped=self._step < self._spec.config.num_steps,
            seconds=time.perf_counter() - start,
        )

    def publish_last(self) -> None:
        """Wait until the engines serve the last version: the last evaluation is to use it. Raises
        WeightSyncError if it does not reach them."""
        with self._working():
            if self._published < self._version:
                self._publish_weights()
            self._sending.drain(self._version, self._spec.config.timeout_s)

    def export(self) -> None:
        """Write the policy for `from_pretrained` into the run's folder. Raises OSError."""
        with self._working():
            self._engine.export(Path(self._spec.run_dir) / FINAL_MODEL)

    def _should_stop(self) -> bool:
        # Only rank 0's flag counts: all ranks must leave the loop after the same step.
        return self._ranks.broadcast_flags([self._stop_requested.is_set()])[0]

    def _run_version(self) -> None:
        """Make the next version: in one step, or in those whose gradients add up."""
        config, version = self._spec.config, self._version
        batches: list[tuple[Lease, tuple[str, ...]]] = []
        with ExitStack() as renewals:
            while True:
                clock, times = _Clock(), _StepTimes()
                lease, kept_ids = self._lease()
                times.lease_wait_s = clock.lap()
                # It is held until the update, which may take longer than the lease.
                renewals.enter_context(self._loop.running(self._buffer.keep_renewed(lease)))
                batches.append((replace(lease, groups=()), kept_ids))  # they are large
                is_update = (self._step + 1) % config.gradient_accumulation_steps == 0
                stats = self._train_batch(lease, kept_ids, is_update)
                self._compare_engines(stats)
                self._step += 1
                if is_update:
                    break
                times.step_s = clock.lap()
                self._record(version, stats, times)
        self._version += 1
        self._hand_over(batches)
        times.step_s = clock.lap()
        if self._step % (config.gradient_accumulation_steps * config.publish_every) == 0:
            report = self._publish_weights()
            times.snapshot_s, times.snapshot_wait_s = report.snapshot_s, report.wait_s
        clock.lap()
        is_due = self._step % config.checkpoint_every == 0
        if is_due or self._step == config.num_steps:
            times.checkpoint_wait_s = self._checkpoint()
        times.checkpoint_s = clock.lap()
        every = config.memory_copy_every
        if self._copies is not None and every is not None and self._step % every == 0:
            times.memory_copy_error = self._copy_to_memory(self._copies)
            times.memory_copy_s = clock.lap()
        self._record(version, stats, times)

    def _lease(self) -> tuple[Lease, tuple[str, ...]]:
        """This rank's share of the next batch, and the groups of the batch that may be trained.

        Leases again if no group may be trained, or if the ranks got different batches because a
        lease expired between their calls.
        """
        names = live_names(TrainerConfig)
        config = with_live(self._spec.config, self._loop.run(self._run_state.live_settings(names)))
        while True:
            lease = self._loop.run(
                self._run_state.while_moving(
                    lambda: self._buffer.lease(
                        step=self._step + 1,
                        version=self._version,
                        num_groups=config.groups_per_step,
                        share=self._ranks.rank,
                        num_shares=self._ranks.num_ranks,
                        timeout_s=self._spec.buffer.wait_timeout_s,
                        min_groups=config.min_groups_per_step,
                        batch_timeout_s=config.batch_timeout_s,
                        pair_cost=self._pair_cost,
                    )
                )
            )
            if len(set(self._ranks.gather_texts(lease.lease_token))) > 1:
                continue
            kept_ids = self._still_trainable(lease)
            if kept_ids:
                return lease, kept_ids

    def _still_trainable(self, lease: Lease) -> tuple[str, ...]:
        kept = frozenset[str]()
        if self._is_lead:
            kept = self._loop.run(self._buffer.validate(lease, self._version))
        flags = self._ranks.broadcast_flags([group_id in kept for group_id in lease.group_ids])
        return tuple(
            group_id for group_id, is_kept in zip(lease.group_ids, flags, strict=True) if is_kept
        )

    def _train_batch(self, lease: Lease, kept_ids: tuple[str, ...], is_update: bool) -> StepStats:
        config = self._spec.config
        if self._accumulation is not None:
            self._accumulation.is_complete = is_update
        kept = set(kept_ids)
        batch = StepBatch(
            version=self._version,
            group_ids=kept_ids,
            groups=tuple(group for group in lease.groups if group.group_id in kept),
        )
        stats = train_step(
            self._engine,
            self._ranks,
            batch,
            config,
            self._algorithm,
            learning_rate=learning_rate(self._step, config),
            before_update=self._guard_copies,
            guard=self._guard,
            accumulation=self._accumulation,
        )
        # A group that no rank had must not be counted as trained.
        assert stats.num_groups == len(kept_ids), (stats.num_groups, kept_ids)
        return stats

    def _guard_copies(self) -> None:
        self._sending.guard()
        self._writer.guard()

    def _compare_engines(self, stats: StepStats) -> None:
        """Check that engines and trainer agree, on the tokens that engines sampled with the version
        being trained.

        Raises RuntimeError if their log-probabilities differ too much.
        """
        if stats.logprob_diff_tokens:
            check_engines_agree(
                stats.logprob_diff_mean,
                stats.logprob_diff_tokens,
                self._published_names(),
                self._spec.max_logprob_diff,
            )

    def _published_names(self) -> Iterator[str]:
        # A generator: only an error needs them, and the check is made in every step.
        for tensor in self._engine.layout(self._spec.serving_dtype).tensors:
            yield tensor.name

    def _hand_over(self, batches: Sequence[tuple[Lease, tuple[str, ...]]]) -> None:
        """Announce the new version, then free the credits of the trained groups; on rank 0."""
        if not self._is_lead:
            return
        self._announce_version()
        for lease, kept_ids in batches:
            num_consumed = self._loop.run(self._buffer.consume(lease, kept_ids))
            if num_consumed < len(kept_ids):
                raise RuntimeError(
                    f"step {lease.step} lost its lease: Redis could not be reached for "
                    f"buffer.lease_timeout_s={self._spec.buffer.lease_timeout_s:g}, and "
                    f"{len(kept_ids) - num_consumed} of its groups went back to the buffer, where "
                    "they would be trained again; start again from the last checkpoint"
                )
            with self._unsaved_lock:
                self._unsaved.append((lease.step, kept_ids))

    def _announce_version(self) -> None:
        """The number is on disk first: a Redis that loses it must not let others have it."""
        try:
            self._store.note_version(self._version)
        except OSError as error:
            log.warning("version %d is not noted on disk: %s", self._version, error)
        self._loop.run(self._buffer.publish_version(self._version))

    def _publish_weights(self) -> PublishReport:
        """Copy this rank's shards; they are sent while training continues."""
        self._published = self._version
        return self._sending.publish(self._version, self._engine.shards())

    def _checkpoint(self) -> float:
        """Copy all shards; they are written while training continues.

        Returns the seconds that it waited for the previous checkpoint to be written.
        """
        progress = TaskProgress(positions={}, untrained=())
        if self._is_lead:
            progress = self._loop.run(self._buffer.task_progress(self._step))
        wait_s = self._writer.save(self._state(progress), self._engine.state_shards())
        self._saved_step = self._step
        return wait_s

    def _copy_to_memory(self, copies: PeerCopies) -> str | None:
        """Returns why this step has no copy; None if it has one."""
        with self._unsaved_lock:
            unsaved = list(self._unsaved)
        nothing = TaskProgress(positions={}, untrained=())  # Redis knows it
        return copies.save(self._state(nothing), unsaved, self._engine.state_shards())

    def _state(self, progress: TaskProgress) -> TrainState:
        with self._unsaved_lock:
            group_ids = tuple(group_id for _, ids in self._unsaved for group_id in ids)
        return TrainState(
            step=self._step,
            version=self._version,
            num_updates=self._engine.num_updates,
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

    def _end_checkpoint(self, report: SaveReport) -> None:
        """Acknowledge the groups that a durable checkpoint contains; on rank 0, in the checkpoint's
        thread."""
        step = report.state.step
        if report.error is None:
            self._loop.run(self._buffer.ack(step, self._lineage))
            with self._unsaved_lock:
                self._unsaved = [entry for entry in self._unsaved if entry[0] > step]
        record: dict[str, float | int | str] = {
            "step": step,
            "bytes": report.num_bytes,
            "write_s": report.write_s,
        }
        if report.error is not None:
            record["error"] = report.error
        elif report.groups_error is not None:
            record["groups_error"] = report.groups_error
        self._loop.run(self._run_state.append_metrics(record, kind="checkpoint"))

    def _record(self, version: int, stats: StepStats, times: _StepTimes) -> None:
        if not self._is_lead:
            return
        waits = {
            "rollout": times.lease_wait_s,
            "weight_sync": times.snapshot_wait_s + times.snapshot_s,
        }
        for waited_on, seconds in waits.items():
            self._loop.run(self._run_state.add_wait("trainer", waited_on, seconds))
        record: dict[str, float | int | str] = {
            "step": self._step,
            "version": version,  # the one that was trained
            **stats.record(),
            "lease_wait_s": times.lease_wait_s,
            "step_s": times.step_s,
            "snapshot_s": times.snapshot_s,
            "snapshot_wait_s": times.snapshot_wait_s,
            "checkpoint_s": times.checkpoint_s,
            "checkpoint_wait_s": times.checkpoint_wait_s,
        }
        if self._copies is not None:
            record["memory_copy_s"] = times.memory_copy_s
        if times.memory_copy_error is not None:
            record["memory_copy_error"] = times.memory_copy_error
        self._loop.run(self._run_state.append_metrics(record, kind="step"))

    def close(self) -> None:
        """End all waits in the buffer and leave all process groups; the rank is unusable then."""
        self.stop()
        self._loop.stop(self._buffer.close(), self._run_state.close())
        if self._is_working:
            # It may be inside a collective, whose group must stay until the process ends.
            return
        if self._weights is not None:
            self._weights.close()
        self._engine.close()
        leave_ranks()


def learning_rate(step: int, config: TrainerConfig) -> float:
    """The rate of step 0, 1, ...: it rises linearly to `learning_rate` at step `lr_warmup_steps`,
    then follows `lr_schedule` to `lr_min_ratio` of it at the last step."""
    peak, num_warmup = config.learning_rate, config.lr_warmup_steps
    if step <= num_warmup:
        return peak * (step + 1) / (num_warmup + 1)
    done = (step - num_warmup) / (config.num_steps - 1 - num_warmup)
    match config.lr_schedule:
        case LrSchedule.constant:
            left = 1.0
        case LrSchedule.linear:
            left = 1 - done
        case LrSchedule.cosine:
            left = (1 + math.cos(math.pi * done)) / 2
    return peak * (left + (1 - left) * config.lr_min_ratio)


@dataclass(kw_only=True, slots=True)
class _StepTimes:
    """How one step's time was spent on this rank."""

    lease_wait_s: float = 0.0
    step_s: float = 0.0
    snapshot_s: float = 0.0
    snapshot_wait_s: float = 0.0
    checkpoint_s: float = 0.0
    checkpoint_wait_s: float = 0.0
    """The part of `checkpoint_s` in which the previous checkpoint was still being written."""
    memory_copy_s: float = 0.0
    memory_copy_error: str | None = None


class _Clock:
    """Measures seconds between calls of `lap`."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds
