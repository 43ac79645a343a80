"""One rank of the trainer: the loop from leased groups to weights that are sent.

    rollout pool ─► [ready] ─ lease ─► validate ─► train_step ─┬► announce the version, consume
                       ▲                                       ├► copy of the shards ─► engines
                       └── stale: dropped or run again         └► copy ─► checkpoint ─► ack

Every rank runs this loop. Rank 0 decides for all of them which groups may still be trained, and
records metrics; `recovery.py` has what a resume goes on from. Weights are sent in the background;
the loop waits only for the copy.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from socket import socket

import torch

from buffer.connect import connect_buffer
from buffer.errors import RunPausedError
from buffer.probes import Probes
from buffer.replay_buffer import ReplayBuffer
from buffer.results import Lease
from buffer.run_state import RunState
from configs.checks import live_names, with_live
from configs.run_files import Scalar
from configs.schema import TrainerConfig
from host.loop_thread import LoopThread
from trainer_pool.algorithms.registry import Algorithm
from trainer_pool.collectives import Collectives, RankAddress, RankWaits, join_ranks, leave_ranks
from trainer_pool.critic import Critic, CriticStep
from trainer_pool.data.rows import StepBatch
from trainer_pool.data.trained import TrainedLog
from trainer_pool.guard import UpdateGuard
from trainer_pool.learning_rate import learning_rate
from trainer_pool.metrics import check_engines_agree
from trainer_pool.model.routers import check_gates
from trainer_pool.model.zero3 import Zero3Policy
from trainer_pool.recovery import Recovery
from trainer_pool.speed import shown_ranks
from trainer_pool.step import Accumulation, score_probes, train_step
from trainer_pool.types import (
    FINAL_MODEL,
    KEPT_REFERENCE,
    SupervisedExample,
    TrainerSpec,
    TrainReport,
    WarmStartReport,
)
from trainer_pool.warm_start import warm_start
from weight_sync.checkpoint_engine import CheckpointEngine
from weight_sync.types import Captured, VersionBoard

PAUSED_LOOK_S = 1.0
"""While a run is paused, the ranks look for a request to stop so often."""
PROBE_EVERY = 50
"""Versions that are sent from one comparison of engines and trainer to the next; besides, the first
two."""


_PAUSED = "paused"
"""In the place of a batch's token, which is hexadecimal."""


@dataclass(kw_only=True, slots=True)
class StepTimes:
    """The times of one step on this rank."""

    lease_wait_s: float = 0.0
    """Waiting for rollouts."""
    lease_ranks_s: float = 0.0
    """Waiting for ranks that came later to the lease."""
    step_s: float = 0.0
    snapshot_s: float = 0.0
    snapshot_wait_s: float = 0.0
    checkpoint_s: float = 0.0
    checkpoint_wait_s: float = 0.0
    """The part of `checkpoint_s` in which the previous checkpoint was still being written."""
    memory_copy_s: float = 0.0
    memory_copy_error: str | None = None


class Clock:
    """Measures seconds between calls of `lap`, and those of them in which other ranks were waited
    for."""

    def __init__(self) -> None:
        self.ranks_s = 0.0
        self._last, self._waited_s = time.perf_counter(), RankWaits.seconds

    def lap(self) -> float:
        now, waited_s = time.perf_counter(), RankWaits.seconds
        seconds, self._last = now - self._last, now
        self.ranks_s, self._waited_s = min(seconds, waited_s - self._waited_s), waited_s
        return seconds


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
        self._parts = self._ranks.in_groups(config.sequence_parallel_size)
        """The ranks as those that have a part of the batch: the ranks of a sequence group are one.
        """
        lora = spec.lora
        if lora is not None and spec.resume_from is not None:  # its checkpoint has the adapter
            lora = replace(lora, resume_from=None)
        self._policy = Zero3Policy(
            spec.model_path,
            config,
            address,
            trust_remote_code=spec.trust_remote_code,
            lora=lora,
        )
        self._critic: Critic | None = None
        if (critic := spec.algorithm.critic) is not None:
            self._critic = Critic(
                critic.path or spec.model_path,
                config,
                address,
                self._policy.config,
                trust_remote_code=spec.trust_remote_code,
            )
        balance = spec.algorithm.load_balancing_weight
        check_gates(f"model.path={spec.model_path!r}", self._policy.gates, balance)
        self._trained: TrainedLog | None = None
        # Ranks of a sequence group train the same groups.
        if spec.log_rate and self._ranks.rank % self._parts.width == 0:
            folder = Path(spec.run_dir)
            self._trained = TrainedLog(folder, self._parts.rank, spec.log_rate, spec.seed)
        cost = self._policy.cost
        self._pair_cost = cost.per_pair / cost.per_token
        self._loop = LoopThread("redis")
        self._buffer: ReplayBuffer = self._loop.run(
            connect_buffer(spec.redis_url, spec.run, spec.buffer, waits=True)
        )
        self._run_state = self._loop.run(
            RunState.connect(spec.redis_url, spec.run, spec.buffer, waits=True)
        )
        self._connected_sender: CheckpointEngine | None = None
        self._stop_requested = threading.Event()
        self._is_working = False
        self._peak_rate = config.learning_rate
        """`learning_rate` as rank 0 has last read it."""
        self._recovery = Recovery(
            *(spec, self._policy, self._critic, self._ranks),
            *(self._loop, self._buffer, self._run_state),
        )
        self.restored = self._recovery.restored
        """The step at which training goes on."""
        self._step = self.restored.step
        self._version = self._recovery.version
        self._lane = ""
        """The times of this rank's last step, which the next collective takes to rank 0."""
        self._waited_s = 0.0
        self._sent_version = -1
        self._num_sent = 0

    @property
    def _is_lead(self) -> bool:
        return self._ranks.rank == 0

    def warm_start(self, examples: Sequence[SupervisedExample]) -> WarmStartReport:
        """Learn from examples before RL; see `trainer_pool.warm_start`."""
        with self._working():
            return warm_start(self._policy, self._parts, examples, self._spec.config)

    def connect(self) -> None:
        """Create the checkpoint engine. Receivers may register before or after."""
        spec = self._spec

        async def open_board() -> VersionBoard:
            return await RunState.connect(spec.redis_url, spec.run, spec.buffer, waits=True)

        self._connected_sender = CheckpointEngine(
            self._policy.state.served_layout(spec.serving_dtype),
            spec.weight_sync,
            rank=self._ranks.rank,
            run=spec.run,
            host=self._host,
            key=spec.weights_key,
            uses_gpu=spec.uses_gpu,
            open_board=open_board,
            control_timeout_s=spec.config.timeout_s,
        )

    def publish_initial(self) -> Captured:
        """Publish the first weights, and wait until the engines serve them: version 0, or those of
        a checkpoint, as a new version if later ones were announced.

        Raises WeightSyncError naming the engines that did not commit it in `trainer.timeout_s`.
        """
        if self._algorithm.needs_reference:
            self._hold_reference()
        if self._critic is not None and self._spec.resume_from is None:
            assert self._spec.algorithm.critic is not None
            if self._spec.algorithm.critic.path is None:
                self._critic.begin_as(self._policy.state)
        if self._is_lead:
            self._recovery.reconcile()
            self._announce_version()
        report = self._send_weights()
        self._weight_sender.wait_committed(self._version, self._spec.config.timeout_s)
        self._leave_probes()
        return report

    def _hold_reference(self) -> None:
        """Load the reference: that of the settings, or the policy that RL began with. After a warm
        start, a resumed run finds that policy in the run's folder."""
        kl, lora = self._algorithm.config.kl, self._spec.lora
        path = self._spec.model_path if lora is None else None
        begins_with_adapter = lora is not None and lora.resume_from is not None
        if kl.reference is not None:
            path = kl.reference
        elif self._spec.config.warm_start.num_steps or begins_with_adapter:
            path = str(Path(self._spec.run_dir) / KEPT_REFERENCE)
            if self._spec.resume_from is None:
                self._policy.export(Path(path))
                self._ranks.barrier()
        self._policy.hold_reference(path, offload=kl.offload)

    @property
    def _weight_sender(self) -> CheckpointEngine:
        assert self._connected_sender is not None, "connect() comes first"
        return self._connected_sender

    def stop(self) -> None:
        """End `train` after the current step, with a checkpoint; thread-safe."""
        self._stop_requested.set()

    def train(self) -> TrainReport:
        """Run all steps; then the last checkpoint is on disk, if the disk took it.

        Raises TimeoutError if the rollout pool delivers no batch in time, and WeightSyncError if
        versions do not reach the engines.
        """
        config = self._spec.config
        with self._working():
            self._checkpoint_unsaved()  # so that a run can go on from its first step, too
            self._waited_s = RankWaits.seconds
            while self._step < config.num_steps and not self._should_stop():
                self._run_version()
            self._record_lanes(self._ranks.gather_texts(self._lane))
            self._checkpoint_unsaved()
            self._recovery.writer.finish()
        was_stopped = self._step < config.num_steps
        return TrainReport(num_steps=self._step, version=self._version, was_stopped=was_stopped)

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._is_working = True
        try:
            yield
        finally:
            self._is_working = False

    def _checkpoint_unsaved(self) -> None:
        if self._recovery.saved_step < self._step:
            self._recovery.checkpoint(step=self._step, version=self._version)

    def publish_last(self) -> None:
        """Wait until the engines serve the last version: the last evaluation is to use it. Raises
        WeightSyncError if it does not reach them."""
        with self._working():
            if self._sent_version < self._version:
                self._send_weights()
            self._weight_sender.drain(self._version, self._spec.config.timeout_s)

    def export(self) -> None:
        """Write the policy for `from_pretrained` into the run's folder. Raises OSError."""
        with self._working():
            self._policy.export(Path(self._spec.run_dir) / FINAL_MODEL)

    def _should_stop(self) -> bool:
        # Only rank 0's flag counts: all ranks must leave the loop after the same step.
        return self._ranks.broadcast_flag(self._stop_requested.is_set())

    def _run_version(self) -> None:
        """Make the next version: in one step, or in those whose gradients add up. None is made if
        the run is to stop while it is paused."""
        config, version = self._spec.config, self._version
        batches: list[tuple[Lease, tuple[str, ...]]] = []
        with ExitStack() as renewals:
            while True:
                clock, times = Clock(), StepTimes()
                if (leased := self._lease(clock)) is None:
                    self._step -= len(batches)  # nothing of an update that is not complete counts
                    return
                lease, kept_ids = leased
                times.lease_wait_s = clock.lap() - clock.ranks_s
                times.lease_ranks_s = clock.ranks_s
                # It is held until the update, which may take longer than the lease.
                renewals.enter_context(self._loop.running(self._buffer.keep_renewed(lease)))
                batches.append((replace(lease, groups=()), kept_ids))  # they are large
                is_update = (self._step + 1) % config.gradient_accumulation_steps == 0
                stats = self._train_batch(lease, kept_ids, is_update)
                self._step += 1
                if is_update:
                    break
                times.step_s = clock.lap()
                self._record(version, stats, times)
        self._version += 1
        self._hand_over(batches)
        times.step_s = clock.lap()
        if self._step % (config.gradient_accumulation_steps * config.publish_every) == 0:
            report = self._send_weights()
            times.snapshot_s, times.snapshot_wait_s = report.snapshot_s, report.wait_s
        clock.lap()
        self._secure(times, clock)
        self._record(version, stats, times)

    def _secure(self, times: StepTimes, clock: Clock) -> None:
        """Copy the state for a checkpoint, and to memory, where this step has one."""
        config, here = self._spec.config, {"step": self._step, "version": self._version}
        if self._step % config.checkpoint_every == 0 or self._step == config.num_steps:
            times.checkpoint_wait_s = self._recovery.checkpoint(**here)
        times.checkpoint_s = clock.lap()
        every = config.memory_copy_every
        if every is not None and self._step % every == 0:
            times.memory_copy_error = self._recovery.copy_to_memory(**here)
            times.memory_copy_s = clock.lap()

    def _record(self, version: int, stats: dict[str, Scalar], times: StepTimes) -> None:
        """Add the completed step, which trained `version`, to `metrics.jsonl`; on rank 0."""
        parts = {part: float(stats.get(f"step_{part}_s", 0.0)) for part in ("passes", "update")}
        waited_s, self._waited_s = RankWaits.seconds - self._waited_s, RankWaits.seconds
        lane = {
            "at": time.time(),
            "lease": times.lease_wait_s,
            "ranks": waited_s,
            "rest": times.step_s - float(stats["step_ranks_s"]) - sum(parts.values()),
            **parts,
            "snapshot_wait": times.snapshot_wait_s,
            "snapshot": times.snapshot_s,
            "checkpoint": times.checkpoint_s,
        }
        self._lane = json.dumps({k: round(v, 4) for k, v in lane.items()}, separators=(",", ":"))
        if not self._is_lead:
            return
        waits = {
            "rollout": times.lease_wait_s,
            "weight_sync": times.snapshot_wait_s + times.snapshot_s,
        }
        for waited_on, seconds in waits.items():
            self._loop.run(self._run_state.add_wait("trainer", waited_on, seconds))
        record: dict[str, Scalar] = {
            "step": self._step,
            "version": version,
            **stats,
            "logprob_diff_bound": self._spec.max_logprob_diff,
            **asdict(times),
        }
        if self._spec.config.memory_copy_every is None:
            del record["memory_copy_s"]
        if times.memory_copy_error is None:
            del record["memory_copy_error"]
        self._loop.run(self._run_state.append_metrics(record, kind="step"))

    def _record_lanes(self, texts: Sequence[str]) -> None:
        """Add the times of the ranks' last step to `metrics.jsonl`, if there are several."""
        self._lane = ""
        if not self._is_lead or len(texts) == 1 or not all(texts):
            return
        lanes = [json.loads(text) for text in texts]
        waits = [lane["ranks"] for lane in lanes]
        shown = shown_ranks(waits)
        of_parts = {part: [lanes[rank][part] for rank in shown] for part in lanes[0]}
        record: dict[str, Scalar] = {
            "step": self._step,
            "slowest": waits.index(min(waits)),
            "waited_s": max(waits),
            "lanes": json.dumps({"rank": shown, **of_parts}),
        }
        self._loop.run(self._run_state.append_metrics(record, kind="ranks"))

    def _lease(self, clock: Clock) -> tuple[Lease, tuple[str, ...]] | None:
        """This rank's part of the next batch, and the groups of the batch that may be trained. None
        if the run is to stop while it is paused; `clock` does not count the pause.

        Leases again if no group may be trained, or if the ranks got different batches because a
        lease expired between their calls.
        """
        while True:
            lease = self._try_lease()
            kept_ids, are_paused = self._still_trainable(lease)
            if lease is not None and kept_ids:
                return lease, kept_ids
            if are_paused:
                self._loop.run(self._run_state.wait_unpaused(PAUSED_LOOK_S))
                if self._should_stop():
                    return None
                clock.lap()
                self._waited_s = RankWaits.seconds

    def _try_lease(self) -> Lease | None:
        """None if the run is paused, and no rank has the batch."""
        config = self._live_config()
        try:
            return self._loop.run(
                self._run_state.retry_while_run_moves(
                    lambda: self._buffer.lease(
                        step=self._step + 1,
                        version=self._version,
                        num_groups=config.groups_per_step,
                        share=self._parts.rank,
                        num_shares=self._parts.num_ranks,
                        timeout_s=self._spec.buffer.wait_timeout_s,
                        min_groups=config.min_groups_per_step,
                        batch_timeout_s=config.batch_timeout_s,
                        pair_cost=self._pair_cost,
                    )
                )
            )
        except RunPausedError:
            return None

    def _live_config(self) -> TrainerConfig:
        texts = self._loop.run(self._run_state.live_settings(live_names(TrainerConfig)))
        return with_live(self._spec.config, texts)

    def _still_trainable(self, lease: Lease | None) -> tuple[tuple[str, ...], bool]:
        """The groups of the batch that may be trained, as rank 0 finds; and whether all ranks have
        none because the run is paused. No groups if the ranks did not lease the same batch, or
        those of a sequence group the same groups: one of them may have found a payload that was
        gone when the next one looked. Also takes the learning rate from rank 0: each rank might
        read another one while it changes."""
        ids = () if lease is None else lease.group_ids
        own = " ".join(group.group_id for group in lease.groups) if lease else ""
        mine = f"{lease.lease_token if lease else _PAUSED} {sha256(own.encode()).hexdigest()[:16]}"
        kept, rate = frozenset[str](), self._peak_rate
        if self._is_lead and lease is not None:
            kept = self._loop.run(self._buffer.validate(lease, self._version))
            rate = self._live_config().learning_rate
        flags = "".join("01"[group_id in kept] for group_id in ids)
        # One collective for all of it: each is a wait for the slowest rank.
        said = self._ranks.gather_texts(f"{mine} {rate!r} -{flags} -{self._lane}")
        replies = [text.rsplit(maxsplit=3) for text in said]
        self._record_lanes([lane[1:] for *_, lane in replies])
        texts, width = [text for text, *_ in replies], self._parts.width
        tokens = {text.split()[0] for text in texts}
        of_groups = [set(texts[i : i + width]) for i in range(0, len(texts), width)]
        if len(tokens) > 1 or any(len(group) > 1 for group in of_groups):
            return (), False
        _, of_lead, flags, _ = replies[0]
        self._peak_rate = float(of_lead)
        fresh = (i for i, flag in zip(ids, flags[1:], strict=True) if flag == "1")
        return tuple(fresh), lease is None

    def _train_batch(
        self, lease: Lease, kept_ids: tuple[str, ...], is_update: bool
    ) -> dict[str, Scalar]:
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
            self._policy,
            self._parts,
            batch,
            config,
            self._algorithm,
            learning_rate=learning_rate(self._step, replace(config, learning_rate=self._peak_rate)),
            before_update=self._protect_copies,
            guard=self._guard,
            accumulation=self._accumulation,
            critic=self._critic_step(),
            trained=self._trained,
        )
        if self._trained is not None:
            self._trained.write(step=self._step + 1, version=self._version)
        # A group that no rank had must not be counted as trained.
        assert stats["num_groups"] == len(kept_ids), (stats["num_groups"], kept_ids)
        check_engines_agree(
            # NaN, which agrees, if engines sampled no token with it.
            float(stats["logprob_diff_mean"]),
            int(stats["logprob_diff_tokens"]),
            self._served_names(),
            self._spec.max_logprob_diff,
        )
        return stats

    def _critic_step(self) -> CriticStep | None:
        if self._critic is None:
            return None
        critic = self._spec.algorithm.critic
        assert critic is not None
        config = replace(self._spec.config, learning_rate=critic.learning_rate)
        return CriticStep(
            critic=self._critic,
            config=critic,
            learning_rate=learning_rate(self._step, config),
            holds_policy=self._step < critic.warmup_steps,
        )

    def _protect_copies(self) -> None:
        self._weight_sender.protect_copy()
        self._recovery.writer.protect_copy()

    def _served_names(self) -> Iterator[str]:
        # A generator: only an error needs them, and the check is made in every step.
        for tensor in self._policy.state.served_layout(self._spec.serving_dtype).tensors:
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
                    f"step {lease.step} lost its lease, which was not renewed for "
                    f"buffer.lease_timeout_s={self._spec.buffer.lease_timeout_s:g} (warnings in "
                    "the logs of the ranks may say why), and "
                    f"{len(kept_ids) - num_consumed} of its groups went back to the buffer, where "
                    "they would be trained again; start again from the last checkpoint"
                )
            self._recovery.add_consumed(lease.step, kept_ids)

    def _announce_version(self) -> None:
        self._recovery.note_version(self._version)  # on disk first
        self._loop.run(self._buffer.announce_version(self._version))

    def _send_weights(self) -> Captured:
        """Copy this rank's shards; they are sent while training continues."""
        number, self._num_sent = self._num_sent, self._num_sent + 1
        if number == 1 or (number and number % PROBE_EVERY == 0):
            self._leave_probes()  # before an engine commits them
        self._sent_version = self._version
        return self._weight_sender.send(self._version, self._policy.state.served_shards())

    def _leave_probes(self) -> None:
        """Score the probes with the weights of this version, for the engines to compare."""
        spec = self._spec
        if not spec.probe_text:
            return
        logprobs = score_probes(self._policy, spec.probe_text, spec.config, self._parts)
        if self._is_lead:
            probes = Probes(
                version=self._version,
                text=spec.probe_text,
                logprobs=logprobs,
                most=spec.max_probe_diff,
            )
            self._loop.run(self._run_state.leave_probes(probes))

    def close(self) -> None:
        """End all waits in the buffer and leave all process groups; the rank is unusable then."""
        self.stop()
        if self._trained is not None:
            self._trained.close()
        self._loop.stop(self._buffer.close(), self._run_state.close())
        if self._is_working:
            # It may be inside a collective, whose group must stay until the process ends.
            return
        if self._connected_sender is not None:
            self._connected_sender.close()
        if self._critic is not None:
            self._critic.close()
        self._policy.close()
        leave_ranks()
