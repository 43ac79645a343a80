"""The ranks of the ZeRO-3 tests: processes that take part in a scenario and write what they saw.

    python -m tests.support.zero3.program FOLDER

For each line "SCENARIO NUM_RANKS" of its input it forks that many ranks and prints their exit
codes; torch, DeepSpeed and what these load at first use are imported once for all of them.
SCENARIO+FIELD+... is a scenario with these settings of the trainer on. `FOLDER` holds the model,
the batches of all ranks and, in `receivers.json`, the receiver of two ranks; results go to
`FOLDER/SCENARIO-NUM_RANKS`. The scenario "loop" runs a whole `TrainerRank` on the Redis server
named in `redis.txt`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import resource
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer
import numpy as np
import torch
import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (loaded with the model)
from deepspeed.utils import safe_get_full_optimizer_state

from buffer.run_state import STREAM_START
from buffer.types import TrajectoryGroup
from buffer.wire.codec import decode_group
from configs.algorithm_schema import (
    ADVANTAGES,
    AGGREGATIONS,
    MASKS,
    TEACHER_COLUMN,
    WEIGHTS,
    AdvantageConfig,
    AlgorithmConfig,
    CorrectionConfig,
    KLConfig,
    StreamConfig,
)
from configs.choices import Backend, Dtype, KLPlace, Proximal
from configs.schema import TrainerConfig, WarmStartConfig, WeightSyncConfig
from tests.support.blocking import BlockingRunState
from tests.support.trainer.loop_scene import (
    HEAD_TOKENS,
    LOOP_STEPS,
    TIMEOUT_S,
    WEIGHTS_KEY,
    head_row,
    loop_spec,
)
from trainer_pool.algorithms.registry import Algorithm
from trainer_pool.collectives import Collectives
from trainer_pool.data.packing import fill_up, pack
from trainer_pool.data.rows import StepBatch
from trainer_pool.guard import MIN_NORMS, Update, UpdateGuard
from trainer_pool.metrics import StepStats
from trainer_pool.model import zero3
from trainer_pool.model.zero3 import RankAddress, Zero3Engine, join_ranks, leave_ranks
from trainer_pool.rank import TrainerRank
from trainer_pool.state.checkpoint import CheckpointStore, TrainState
from trainer_pool.state.peer_copies import PeerCopies
from trainer_pool.state.shards import ShardReader, restore_rng
from trainer_pool.state.writer import CheckpointWriter, SaveReport
from trainer_pool.step import Accumulation, train_step
from trainer_pool.types import SupervisedExample, TrainerSpec, WarmStartReport
from trainer_pool.warm_start import warm_start
from weight_sync.engine import CheckpointEngine
from weight_sync.types import Record

NUM_STEPS = 4
SAVE_AFTER = 2
SYNCHRONOUS_RATE = 1e-3
GSPO = AlgorithmConfig(
    loss="gspo",
    # Wider than usual: whether a ratio beside a bound is clipped would hang on rounding.
    clip_low=0.04,
    clip_high=0.05,
    aggregation="sequence_mean_token_mean",
    correction=CorrectionConfig(kinds=["tis_geometric"]),
)


def config_for(num_ranks: int) -> TrainerConfig:
    return TrainerConfig(
        num_ranks=num_ranks,
        groups_per_step=4,
        num_minibatches=2 if num_ranks < 4 else 1,
        micro_batch_tokens=48,  # few rows a pass, so that the ranks differ in the number of passes
        learning_rate=1e-2,
        max_grad_norm=0.5,
        warm_start=WarmStartConfig(num_steps=3, batch_size=5),
    )


OPTIMIZER = TrainerConfig(
    num_ranks=2,
    groups_per_step=2,
    adam_beta1=0.5,
    adam_beta2=0.7,
    adam_epsilon=0.01,
    weight_decay=0.3,
    max_grad_norm=0.0,
    gradient_checkpointing=True,
)


def algorithms() -> dict[str, AlgorithmConfig]:
    """Every loss, aggregation, correction and advantage of ours in some combination."""
    rollout, none = Proximal.rollout, CorrectionConfig(kinds=[])
    cases = {
        loss: AlgorithmConfig(loss=loss, correction=none, proximal=proximal)
        for loss, proximal in (
            ("ppo", rollout),
            ("cispo", rollout),
            ("sapo", rollout),
            ("reinforce", Proximal.recomputed),
            ("importance_sampling", Proximal.recomputed),
            ("dppo_tv", Proximal.recomputed),
            ("dppo_kl", Proximal.recomputed),
            ("supervised", Proximal.recomputed),
        )
    }
    cases["gspo"] = AlgorithmConfig(
        loss="gspo", clip_low=0.05, clip_high=0.05, proximal=rollout, correction=none
    )
    cases["log_linear"] = AlgorithmConfig(proximal=Proximal.log_linear)
    for kind in (*WEIGHTS, *MASKS):
        # So wide that some of each group are kept: rollouts of this test are those of no policy.
        bounds = CorrectionConfig(
            kinds=[kind],
            normalize=kind == "tis_sequence",
            geometric_low=0.5,
            geometric_high=2.0,
            product_high=1e3,
            veto_below=0.4,
        )
        cases[kind] = AlgorithmConfig(correction=bounds)
    for aggregation in AGGREGATIONS:
        cases[aggregation] = AlgorithmConfig(aggregation=aggregation, aggregation_length=30)
    near = {"weight": 0.1, "estimator": "k2"}
    cases["kl_in_loss"] = AlgorithmConfig(kl=KLConfig(**near))
    cases["kl_in_reward"] = AlgorithmConfig(kl=KLConfig(**near, where=KLPlace.reward))
    cases["streams"] = AlgorithmConfig(
        policy_weight=0.5,
        streams={
            "teacher": StreamConfig(loss="teacher_kl", aggregation="sequence_mean_token_mean"),
            "good": StreamConfig(weight=0.3, min_reward=0.5),
        },
    )
    for kind in ADVANTAGES:
        parts = {"right": 1.0} if kind == "gdpo" else {}
        cases[kind] = AlgorithmConfig(advantage=AdvantageConfig(kind=kind, part_weights=parts))
    return cases


def with_graded_rewards(group: TrajectoryGroup) -> TrajectoryGroup:
    """No two episodes have the same reward, which is its one part as well; and a teacher."""
    rewards = [t.reward + 0.1 * t.episode for t in group.trajectories]
    graded = (
        replace(
            t,
            reward=reward,
            reward_parts={"right": reward},
            columns={TEACHER_COLUMN: -1 - (t.tokens % 5).astype(np.float32)},
        )
        for t, reward in zip(group.trajectories, rewards, strict=True)
    )
    return replace(group, trajectories=tuple(graded))


def recorded(stats: StepStats) -> dict[str, float | int | str]:
    """Its record without the speed, which differs from machine to machine."""
    return replace(stats, speed={}).record()


def read_batch(folder: Path, step: int, rank: int, num_ranks: int) -> StepBatch:
    groups = [decode_group(p.read_bytes()) for p in sorted(folder.glob(f"batch-{step}-*.group"))]
    shares = {
        1: [groups],
        2: [groups[:1], groups[1:]],
        4: [[group] for group in groups],
    }[num_ranks]
    return StepBatch(
        version=step, group_ids=tuple(g.group_id for g in groups), groups=tuple(shares[rank])
    )


def part_of(batch: StepBatch, group_ids: Collection[str]) -> StepBatch:
    return StepBatch(
        version=batch.version,
        group_ids=tuple(group_ids),
        groups=tuple(group for group in batch.groups if group.group_id in group_ids),
    )


def without_trained_tokens(group: TrajectoryGroup) -> TrajectoryGroup:
    """As if the engine had told NaN for each."""
    trajectories = (
        replace(trajectory, rollout_logprobs=np.full_like(trajectory.rollout_logprobs, np.nan))
        for trajectory in group.trajectories
    )
    return replace(group, trajectories=tuple(trajectories))


def less_likely(group: TrajectoryGroup) -> TrajectoryGroup:
    """As if the policy had come to prefer its tokens by e^3."""
    trajectories = (
        replace(t, rollout_logprobs=t.rollout_logprobs - 3 * t.loss_mask)
        for t in group.trajectories
    )
    return replace(group, trajectories=tuple(trajectories))


def with_common_beginning(group: TrajectoryGroup) -> TrajectoryGroup:
    """Each trajectory behind the same 20 tokens, which are its own group's."""
    beginning = (np.arange(20) * (3 + int(group.group_id[-1])) % 251).astype(np.int32)
    return replace(
        group,
        trajectories=tuple(
            replace(
                trajectory,
                tokens=np.concatenate([beginning, trajectory.tokens]),
                loss_mask=np.pad(trajectory.loss_mask, (20, 0)),
                rollout_logprobs=np.pad(trajectory.rollout_logprobs, (20, 0)),
                prompt_length=trajectory.prompt_length + 20,
                version_spans=tuple(
                    replace(span, start=span.start + 20, end=span.end + 20)
                    for span in trajectory.version_spans
                ),
            )
            for trajectory in group.trajectories
        ),
    )


def examples() -> list[SupervisedExample]:
    dice = np.random.default_rng(5)
    lengths = [4, 30, 7, 12, 3, 21, 9]
    return [
        SupervisedExample(
            tokens=dice.integers(0, 256, length).astype(np.int32),
            loss_mask=np.array([0, 0] + [1] * (length - 2), np.uint8),
        )
        for length in lengths
    ]


class NoticeBoard:
    """A board in memory, beside which every engine serves what is published."""

    def __init__(self, receivers: dict[str, str]) -> None:
        self._receivers = receivers
        self.published: list[int] = []

    async def receivers(self) -> dict[str, str]:
        return self._receivers

    async def engine_versions(self) -> dict[str, int]:
        return {"engine": self.published[-1]} if self.published else {}

    async def record_staged(self, receiver: str, version: int) -> None:
        pass

    async def publish_weights(self, version: int) -> None:
        self.published.append(version)

    async def wait_engines_at(self, version: int, timeout_s: float) -> dict[str, int]:
        return await self.engine_versions()

    async def append_metrics(self, record: Record, kind: str) -> None:
        pass

    async def close(self) -> None:
        pass


def refuse(file: Path) -> None:
    raise ConnectionError(f"no Redis for {file.name}")


class Scenario:
    """What the ranks do together; `results` is the same on each."""

    def __init__(self, folder: Path, output: Path, engine: Zero3Engine, ranks: Collectives) -> None:
        self.folder = folder
        self.output = output
        self.engine = engine
        self.ranks = ranks
        self.config = config_for(ranks.num_ranks)
        self.algorithm = Algorithm.load(AlgorithmConfig())
        self.results: dict[str, object] = {"steps": []}
        self.gradients: dict[str, np.ndarray] = {}
        self.store = CheckpointStore(folder / f"checkpoints-{ranks.num_ranks}")
        self.saved: list[SaveReport] = []
        self.writer = CheckpointWriter(
            self.store,
            engine.state_layout(),
            ranks,
            uses_gpu=False,
            timeout_s=60.0,
            on_end=self.saved.append,
            dump_groups=lambda file: self.dump_groups(file),
        )
        self.dump_groups: Callable[[Path], object] = lambda file: file.write_bytes(b"groups")

    def whole_run(self) -> None:
        if self.ranks.num_ranks == 1:
            self.train(0, NUM_STEPS)
        else:
            self.train_and_publish()
        self.write()
        self.step_without_gradient()
        self.step_with_nan()
        self.warm_start()

    def resume(self) -> None:
        self.restore(2)
        self.train(SAVE_AFTER, NUM_STEPS)
        self.write()

    def masters(self) -> None:
        """How far the last norm's weights, which are 1 in bfloat16, have moved after one update and
        after many that are each below what bfloat16 can add to 1."""
        (batch,) = pack([head_row(0), head_row(1)], HEAD_TOKENS)
        moved = []
        for update in range(1, 81):
            self.engine.backward(self.engine.score(batch).logprobs.sum())
            self.engine.step(1e-4)
            if update in (1, 80):
                norm = self.weights()["model.norm.weight"]
                assert norm.dtype is torch.bfloat16
                moved.append(float((norm.float() - 1).abs().max()))
        self.results["moved"] = moved

    def offloaded(self) -> None:
        """Like `whole_run`, and in `offloaded` where deepspeed itself has put what."""
        optimizer = self.engine._engine.optimizer
        flat = optimizer.fp32_partitioned_groups_flat[0]
        self.results["offloaded"] = {
            "optimizer": optimizer.offload_optimizer and optimizer.subgroup_to_device == {0: "cpu"},
            "parameters": optimizer.offload_param
            and bool(optimizer.param_groups_fp16_flat_cpu_memory),
            "has_gradient_on_host": flat.grad is not None,
        }
        self.store.folder = self.folder / "checkpoints-offloaded"
        self.whole_run()

    def offloaded_again(self) -> None:
        """From the checkpoint of `offloaded`."""
        self.restore_from(self.folder / "checkpoints-offloaded")
        self.train(SAVE_AFTER, NUM_STEPS, save_after=())
        self.write()

    def reshard(self) -> None:
        """From 2 ranks to 4, and to 1; what each has of the state is written again."""
        self.restore({4: 2, 1: 4}[self.ranks.num_ranks])
        self.save(SAVE_AFTER)
        self.writer.finish()
        for name, tensor in self.engine.named_tensors():  # what the next pass would see
            self.results[name] = float(tensor.double().sum())

    def frozen(self) -> None:
        """Part of the model is not trained, and differs from the model in the folder: two ranks
        train and save it, four read theirs, and one rank those of the four."""
        self.store.folder = self.folder / f"checkpoints-frozen-{self.ranks.num_ranks}"
        if self.ranks.num_ranks == 2:
            for parameter in self.engine._engine.module.parameters():
                if not parameter.requires_grad:
                    parameter.ds_tensor.data.add_(0.25)
            self.train(0, SAVE_AFTER)
        else:
            source = self.folder / f"checkpoints-frozen-{ {4: 2, 1: 4}[self.ranks.num_ranks] }"
            self.restore_from(source)
            self.save(SAVE_AFTER)
            self.writer.finish()
        self.write()

    def dropout(self) -> None:
        """Train on from the last checkpoint, if there is one, with a model and steps that draw
        random numbers."""
        self.store.folder = self.folder / "checkpoints-dropout"
        for layer in self.engine._engine.module.model.layers:
            layer.self_attn.attention_dropout = 0.2
        found, first = self.store.latest(), 0
        if found is not None:
            self.restore_from(self.store.folder)
            restore_rng(found[0], self.ranks.rank)
            first = found[1].step
        draws: list[float] = []

        def draw() -> None:
            draws.extend((random.random(), random.gauss(), np.random.standard_normal()))

        self.train(first, NUM_STEPS, before_update=draw)
        self.results |= {"first": first, "draws": draws}
        self.write()

    def chain(self) -> None:
        """Train on from the last checkpoint, if there is one, with one after each step.

        `kill.json` may name a rank that is killed at a moment: right before its n-th update, write,
        sync or renaming of a file.
        """
        self.store.folder = self.folder / "checkpoints-chain"
        found, first = self.store.latest(), 0
        if found is not None:
            with ShardReader(found[0]) as reader:
                self.engine.restore_state(reader, found[1].num_updates)
            first = found[1].step
        with self.killed_at_a_moment():
            self.train(first, NUM_STEPS, save_after=range(1, NUM_STEPS + 1))
        self.results["first"] = first
        self.write()

    @contextlib.contextmanager
    def killed_at_a_moment(self) -> Iterator[None]:
        kill = json.loads((self.folder / "kill.json").read_text())
        if kill["rank"] != self.ranks.rank:
            yield
            return
        moments = itertools.count(1)

        def before(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                if next(moments) == kill["moment"]:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return wrapped

        with contextlib.ExitStack() as patches:
            for owner, name in (
                (self.engine, "step"),
                *((os, name) for name in ("write", "fsync", "rename", "replace")),
            ):
                patches.enter_context(patch.object(owner, name, before(getattr(owner, name))))
            yield

    def full_disk(self) -> None:
        """Rank 1 can write nothing: its checkpoint fails, training goes on, the next succeeds."""
        self.store.folder = self.folder / "checkpoints-full"
        self.save(1)
        self.writer.finish()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if self.ranks.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        self.train(0, 1, save_after=())
        self.save(2)
        self.train(1, 2, save_after=())
        self.writer.finish()
        latest = self.store.latest()
        assert latest is not None
        self.results["latest_then"] = latest[1].step
        self.results["left"] = sorted(path.name for path in self.store.folder.iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        self.save(3)
        self.writer.finish()
        # The groups are written on rank 0: they alone may fail.
        self.dump_groups = refuse
        self.save(4)
        self.writer.finish()
        self.results["errors"] = [report.error for report in self.saved]
        self.results["groups_errors"] = [report.groups_error for report in self.saved]
        folders = [self.store.folder / f"step-{step:06d}" for step in (3, 4)]
        self.results["has_groups"] = [(folder / "groups.dump").exists() for folder in folders]

    def optimizer(self) -> None:
        """Updates with OPTIMIZER; in `errors` the largest difference from torch's AdamW on the
        whole weights with the same gradients, and in `forwards` how often a layer ran forward."""
        model = self.engine._engine.module
        forwards: list[int] = []
        model.model.layers[0].register_forward_pre_hook(lambda *_: forwards.append(1))
        whole = {name: tensor.clone() for name, tensor in self.engine.named_tensors()}
        adam = torch.optim.AdamW(
            whole.values(), betas=(0.5, 0.7), eps=0.01, weight_decay=0.3, fused=False
        )
        (batch,) = pack([head_row(0), head_row(1)], HEAD_TOKENS)
        errors = []
        for rate in (0.1, 0.02):
            logprobs = self.engine.score(batch).logprobs
            self.engine.backward(logprobs.square().mean() / self.ranks.num_ranks)
            for name, parameter in model.named_parameters():
                whole[name].grad = deepspeed.utils.safe_get_full_grad(parameter).clone()
            self.engine.step(rate)
            adam.param_groups[0]["lr"] = rate
            adam.step()
            mine = self.engine.named_tensors()
            errors.append(max(float((t - whole[n]).abs().max()) for n, t in mine))
        self.results |= {"errors": errors, "forwards": len(forwards)}

    def copies(self) -> None:
        """Each rank has a machine of its own, and that of rank 1 is lost with its copy of step 2.
        In `same` whether the ranks that go on from rank 0's machine train to the same weights."""
        folder = self.folder / f"memory-{self.ranks.rank}"
        layout = self.engine.state_layout()
        copies = PeerCopies(folder, layout, self.ranks, timeout_s=60.0)
        self.train(0, SAVE_AFTER, save_after=())
        for step in (1, SAVE_AFTER):
            unsaved = [(SAVE_AFTER, ("a", "b"))] if self.ranks.rank == 0 else []
            state = self.state(step)
            while copies.save(state, unsaved, self.engine.state_shards()) is not None:
                pass  # the one before is being sent
        assert copies._thread is not None
        copies._thread.join()
        kept = [sorted(path.name for path in folder.iterdir())]
        self.train(SAVE_AFTER, NUM_STEPS, save_after=())
        expected = {name: tensor.clone() for name, tensor in self.engine.named_tensors()}

        self.ranks.barrier()
        if self.ranks.rank == 1:
            shutil.rmtree(folder)
        (folder / "step-000003").mkdir(parents=True)  # of one that died while it copied
        copies = PeerCopies(folder, layout, self.ranks, timeout_s=60.0)
        assert copies.newest(after=SAVE_AFTER) is None
        found = copies.newest(after=1)
        assert found is not None and found.state == self.state(SAVE_AFTER, found.state.num_updates)
        with ShardReader(found.folder, only=self.ranks.rank) as reader:
            self.engine.restore_state(reader, found.state.num_updates)
        copies.clear(kept=found)
        kept.append(sorted(path.name for path in folder.iterdir()))
        self.train(SAVE_AFTER, NUM_STEPS, save_after=())
        again = dict(self.engine.named_tensors())
        same = all(torch.equal(tensor, expected[name]) for name, tensor in again.items())
        self.results |= {"same": same, "kept": kept, "unsaved": found.unsaved}

    def restore(self, num_ranks: int) -> None:
        """The state that so many ranks have saved."""
        self.restore_from(self.folder / f"checkpoints-{num_ranks}")

    def restore_from(self, folder: Path) -> None:
        found = CheckpointStore(folder).latest()
        assert found is not None
        with ShardReader(found[0]) as reader:
            self.engine.restore_state(reader, found[1].num_updates)

    def save(self, step: int) -> None:
        self.writer.save(self.state(step), self.engine.state_shards())

    def state(self, step: int, num_updates: int | None = None) -> TrainState:
        return TrainState(
            step=step,
            version=step,
            num_updates=self.engine.num_updates if num_updates is None else num_updates,
            lineage="one",
            consumed_group_ids=(),
            task_positions={},
            untrained_prompts=(),
        )

    def train_and_publish(self) -> None:
        """Every step's weights as bfloat16, in full and as deltas; waits for the last one only."""
        board = NoticeBoard(json.loads((self.folder / "receivers.json").read_text()))

        async def open_board() -> NoticeBoard:
            return board

        weights = CheckpointEngine(
            self.engine.layout("bfloat16"),
            WeightSyncConfig(bucket_bytes=5_000, full_every=3, max_delta_density=0.5),
            rank=self.ranks.rank,
            run="zero3",
            host="127.0.0.1",
            key=WEIGHTS_KEY,
            uses_gpu=False,
            open_board=open_board,
            control_timeout_s=60.0,
        )
        weights.publish(0, self.engine.shards())
        weights.wait_committed(0, 60.0)
        self.train(
            0,
            NUM_STEPS,
            weights.guard,
            lambda version: weights.publish(version, self.engine.shards()),
        )
        weights.wait_committed(NUM_STEPS, 60.0)
        self.results["num_tensors"] = len(self.engine.layout("bfloat16").tensors)
        self.results["published"] = board.published
        self.ranks.barrier()
        weights.close()

    def train(
        self,
        first: int,
        last: int,
        before_update: Callable[[], None] = lambda: None,
        after_step: Callable[[int], object] = lambda version: None,
        save_after: Collection[int] = (SAVE_AFTER,),
    ) -> None:
        steps = []
        calls: list[str] = []

        def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def note(*arguments: Any, **named: Any) -> Any:
                calls.append(name)
                return call(*arguments, **named)

            return note

        for step in range(first, last):
            batch = read_batch(self.folder, step, self.ranks.rank, self.ranks.num_ranks)
            with (
                patch.object(self.engine, "backward", noted("backward", self.engine.backward)),
                patch.object(self.engine, "step", noted("step", self.engine.step)),
            ):
                stats = train_step(
                    self.engine,
                    self.ranks,
                    batch,
                    self.config,
                    self.algorithm,
                    learning_rate=1e-2,
                    before_update=noted("before_update", before_update),
                )
            steps.append(recorded(stats))
            if step + 1 in save_after:
                self.save(step + 1)  # the next steps do not wait for the disk
            after_step(step + 1)
        self.writer.finish()
        self.results["steps"] = steps
        self.results["calls"] = calls

    def step_without_gradient(self) -> None:
        """Every group's rewards are equal, while Adam holds the moments of the steps before."""
        batch = read_batch(self.folder, 0, self.ranks.rank, self.ranks.num_ranks)
        groups = tuple(
            replace(group, trajectories=tuple(replace(t, reward=1.0) for t in group.trajectories))
            for group in batch.groups
        )
        weights, moments = self.weights(), self.moments()
        assert max(float(moment.abs().max()) for moment in moments) > 0
        stats = train_step(
            self.engine,
            self.ranks,
            replace(batch, groups=groups),
            self.config,
            self.algorithm,
            learning_rate=1e-2,
            before_update=lambda: None,
        )
        self.results["step_without_gradient"] = recorded(stats)
        self.results["changed_without_gradient"] = [
            *(name for name, now in self.weights().items() if not torch.equal(weights[name], now)),
            *("a moment" for a, b in zip(moments, self.moments(), strict=True) if (a != b).any()),
        ]

    def step_with_nan(self) -> None:
        """At this temperature the log-probabilities of the first group, of the first update and of
        rank 0, are NaN."""
        batch = read_batch(self.folder, 0, self.ranks.rank, self.ranks.num_ranks)
        first, groups = batch.group_ids[0], list(batch.groups)
        for place, group in enumerate(groups):
            if group.group_id == first:
                groups[place] = replace(group, sampling=replace(group.sampling, temperature=1e-44))
        stats = train_step(
            self.engine,
            self.ranks,
            replace(batch, groups=tuple(groups)),
            self.config,
            self.algorithm,
            learning_rate=1e-2,
            before_update=lambda: None,
        )
        self.results["step_with_nan"] = recorded(stats)
        self.results["is_finite_after_nan"] = all(
            bool(weight.isfinite().all()) for weight in self.weights().values()
        )

    def packings(self) -> None:
        """One step, without moving the weights, for several sizes of passes; the trajectories of a
        group begin with the same tokens."""
        batch = read_batch(self.folder, 0, self.ranks.rank, self.ranks.num_ranks)
        groups = tuple(with_common_beginning(group) for group in batch.groups)
        packings: list[tuple[int, bool, dict[str, object]]] = []
        self.results |= {"packings": packings, "cost": asdict(self.engine.cost)}
        for micro_batch_tokens, share_prefixes in itertools.product((50, 97, 4096), (False, True)):
            stats = train_step(
                self.engine,
                self.ranks,
                replace(batch, groups=groups),
                replace(
                    self.config,
                    num_minibatches=1,
                    micro_batch_tokens=micro_batch_tokens,
                    share_prefixes=share_prefixes,
                ),
                self.algorithm,
                learning_rate=0.0,
                before_update=lambda: None,
            )
            packings.append((micro_batch_tokens, share_prefixes, recorded(stats)))

    def head(self) -> None:
        """A gradient of log-probabilities and entropies, in two passes of which rank 1 has nothing
        to train on in the second; then a NaN that appears in a layer's backward pass."""
        if self.ranks.rank == 0:
            mine = pack([head_row(i) for i in range(4)], HEAD_TOKENS)
        else:
            mine = pack([head_row(4), head_row(5)], HEAD_TOKENS)
        batches = fill_up(mine, 2)
        for batch in batches:
            scores = self.engine.score(batch)
            loss = (
                (scores.logprobs * batch.advantages_N - 0.5 * scores.entropy) * batch.mask_N
            ).sum()
            self.engine.backward(loss)
        self.results["passes_of_rank_1"] = [float(b.mask_N.sum()) for b in batches]
        norm = self.engine.step(0.0)
        assert norm is not None
        # Adam's first moment, from nothing, is the clipped gradient.
        clipped = self.config.max_grad_norm / norm
        for name, parameter in self.engine._engine.module.named_parameters():
            moment = safe_get_full_optimizer_state(parameter, "exp_avg")
            gradient = moment / (1 - self.config.adam_beta1) / min(1.0, clipped)
            self.gradients[name] = gradient.numpy()
        self.step_with_planted_nan()
        self.step_over_the_limit()
        self.steps_under_a_guard()
        self.write()

    def step_over_the_limit(self) -> None:
        """An update is skipped because of its norm; the next one is made."""
        before, moments = self.weights(), self.moments()
        (batch,) = pack([head_row(0), head_row(1)], HEAD_TOKENS)
        changed = []
        for limit in (1e-9, 1e9):
            self.engine.backward(self.engine.score(batch).logprobs.square().mean())
            norm = self.engine.step(1e-2, norm_limit=limit)
            now = self.weights()
            changed.append(
                (
                    norm,
                    sum(not torch.equal(before[name], now[name]) for name in before),
                    sum(
                        not torch.equal(a, b) for a, b in zip(moments, self.moments(), strict=True)
                    ),
                )
            )
        self.results["changed_over_and_within_the_limit"] = changed

    def steps_under_a_guard(self) -> None:
        """By step what each rank counts and how many tensors change: its effective sample size is
        low, also the next one's, which ends the run; its norm is a spike; it is made.

        The tokens of each rank alone have nearly equal weights.
        """
        batch = read_batch(self.folder, 0, self.ranks.rank, self.ranks.num_ranks)
        if self.ranks.rank == 0:
            batch = replace(batch, groups=tuple(less_likely(group) for group in batch.groups))
        config = replace(self.config, num_minibatches=1)

        def step(guard: UpdateGuard) -> list[list[float]]:
            weights, moments = self.weights(), self.moments()
            stats = train_step(
                self.engine,
                self.ranks,
                batch,
                config,
                self.algorithm,
                learning_rate=1e-2,
                before_update=lambda: None,
                guard=guard,
            )
            changed = [
                sum(not torch.equal(weights[name], now) for name, now in self.weights().items()),
                sum(not torch.equal(a, b) for a, b in zip(moments, self.moments(), strict=True)),
            ]
            found = [stats.grad_norm, stats.num_low_ess, stats.num_spikes, *changed]
            return self.ranks.gather(torch.tensor(found, dtype=torch.float64)).tolist()

        few = UpdateGuard(replace(config, min_ess=0.5, max_skipped_updates=2))
        steps = [step(few)]
        try:
            step(few)
        except RuntimeError as error:
            self.results["guard_error"] = str(error)
        norm = steps[0][0][0]
        for usual in (norm / 3, norm):
            guard = UpdateGuard(replace(config, max_grad_spike=2.0))
            for _ in range(MIN_NORMS):
                guard.note(Update(usual))
            steps.append(step(guard))
        self.results["steps_under_a_guard"] = steps

    def reference(self) -> None:
        """Scores of the policy and of a reference, in turn, before and after an update; the
        gradient with a pass of the reference in between, and without."""
        try:
            self.engine.hold_reference(str(self.folder / "wide"), offload=False)
        except ValueError as error:
            self.results["refused"] = str(error)
        self.engine.hold_reference(str(self.folder / "other"), offload=True)
        (batch,) = pack([head_row(0), head_row(1)], HEAD_TOKENS)
        scores: dict[str, list[list[float]]] = {"policy": [], "reference": []}
        norms = []
        for rate in (0.0, 0.0, 1e-2):  # only the last update moves the policy
            if rate or not norms:
                with self.engine.reference():
                    scores["reference"].append(self.engine.score(batch).logprobs.tolist())
            logprobs = self.engine.score(batch).logprobs
            self.engine.backward(logprobs.square().mean() / self.ranks.num_ranks)
            norms.append(self.engine.step(rate))
            with torch.no_grad():
                scores["policy"].append(self.engine.score(batch).logprobs.tolist())
        self.results |= {**scores, "norms": norms}

    def step_with_planted_nan(self) -> None:
        """In the backward pass of rank 1's first token; its forward pass is finite."""
        batch = read_batch(self.folder, 0, self.ranks.rank, self.ranks.num_ranks)
        passes: list[Any] = []
        planted = [-1]

        def plant(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
            if output.requires_grad and planted == [-1]:
                first = passes[-1].places_N[:1]
                output.register_hook(lambda grad: grad.index_fill(1, first, math.nan))
                planted[:] = passes[-1].groups_N[:1].tolist()

        def noted(micro_batch: Any, score: Callable[..., Any] = self.engine.score) -> Any:
            passes.append(micro_batch)
            return score(micro_batch)

        with contextlib.ExitStack() as plants:
            plants.enter_context(patch.object(self.engine, "score", noted))
            if self.ranks.rank == 1:
                handle = self.engine._engine.module.model.norm.register_forward_hook(plant)
                plants.callback(handle.remove)
            before = self.weights()
            config = replace(self.config, num_minibatches=1)
            stats = train_step(
                self.engine,
                self.ranks,
                batch,
                config,
                self.algorithm,
                learning_rate=1e-2,
                before_update=lambda: None,
            )
        culprits = self.ranks.gather(torch.tensor(planted))
        self.results["planted_in"] = batch.group_ids[int(culprits[1])]
        self.results["step_with_planted_nan"] = recorded(stats)
        self.results["changed_by_planted_nan"] = [
            name for name, now in self.weights().items() if not torch.equal(before[name], now)
        ]

    def warm_start(self) -> None:
        report = warm_start(self.engine, self.ranks, examples(), self.config)
        self.results["warm_start_losses"] = [report.loss_first, report.loss_last]
        self.results["largest_moment_left"] = max(float(m.abs().max()) for m in self.moments())

    def synchronous(self, algorithm: AlgorithmConfig, num_minibatches: int) -> None:
        """Train on the batches that the plain loop left in the folder."""
        settings = replace(self.config, num_minibatches=num_minibatches)
        chosen, step, steps = Algorithm.load(algorithm), 0, []
        while list(self.folder.glob(f"batch-{step}-*.group")):
            batch = read_batch(self.folder, step, self.ranks.rank, self.ranks.num_ranks)
            stats = train_step(
                self.engine,
                self.ranks,
                batch,
                settings,
                chosen,
                learning_rate=SYNCHRONOUS_RATE,
                before_update=lambda: None,
            )
            steps.append(recorded(stats))
            step += 1
        self.results["steps"] = steps
        self.write()

    def algorithms(self) -> None:
        """The gradient of each update of a step with each algorithm; at a learning rate of 0 one
        does not change the next. One rank has a single micro-batch, several have several."""
        config = replace(
            self.config,
            groups_per_step=8,  # of which the batch has four
            num_minibatches=2,
            micro_batch_tokens=2000 if self.ranks.num_ranks == 1 else 97,
            share_prefixes=self.ranks.num_ranks == 4,
        )
        batch = read_batch(self.folder, 1, self.ranks.rank, self.ranks.num_ranks)
        groups = (with_graded_rewards(with_common_beginning(group)) for group in batch.groups)
        batch = replace(batch, groups=tuple(groups))
        gradients: dict[str, np.ndarray] = {}
        self.engine.hold_reference(str(self.folder / "other"), offload=False)
        for name, algorithm in algorithms().items():

            def note(name: str = name) -> None:
                update = sum(key.startswith(f"{name}:") for key in gradients)
                parts = [
                    deepspeed.utils.safe_get_full_grad(parameter).flatten()
                    for parameter in self.engine._engine.module.parameters()
                ]
                gradients[f"{name}:{update}"] = torch.cat(parts).double().numpy()

            stats = train_step(
                self.engine,
                self.ranks,
                batch,
                config,
                Algorithm.load(algorithm),
                learning_rate=0.0,
                before_update=note,
            )
            self.results[name] = recorded(stats)
        if self.ranks.rank == 0:
            self.output.mkdir(exist_ok=True)
            np.savez(self.output / "gradients.npz", **gradients)

    def accumulation(self) -> None:
        """What a step leaves in Adam's first moments, and the norm of its gradient: with the whole
        batch, and with parts of it one after the other, of which the last has no token to train."""
        whole = read_batch(self.folder, 1, self.ranks.rank, self.ranks.num_ranks)
        parts = [part_of(whole, whole.group_ids[:1]), part_of(whole, whole.group_ids[1:])]
        untrained = [without_trained_tokens(group) for group in parts[0].groups]
        parts.append(replace(parts[0], groups=tuple(untrained)))
        config = replace(self.config, num_minibatches=1)
        for aggregation in AGGREGATIONS:
            length = 20 if aggregation == "sequence_mean_token_sum_norm" else None
            algorithm = Algorithm.load(
                AlgorithmConfig(aggregation=aggregation, aggregation_length=length)
            )
            found = []
            for batches in ([whole], parts):
                self.engine.reset_optimizer()
                accumulation = Accumulation() if len(batches) > 1 else None
                for batch in batches:
                    if accumulation is not None:
                        accumulation.is_complete = batch is batches[-1]
                    stats = train_step(
                        self.engine,
                        self.ranks,
                        batch,
                        config,
                        algorithm,
                        learning_rate=0.0,
                        before_update=lambda: None,
                        accumulation=accumulation,
                    )
                states = self.engine._engine.optimizer.optimizer.state.values()
                moments = torch.cat([state["exp_avg"].flatten() for state in states])
                found.append((stats.grad_norm, moments.clone(), stats.num_updates))
            (norm, expected, _), (norm_of_parts, of_parts, num_updates) = found
            self.results[aggregation] = {
                "norms": [norm, norm_of_parts],
                "updates": num_updates,
                "difference": float((of_parts - expected).norm() / expected.norm()),
            }

    def moments(self) -> list[torch.Tensor]:
        states = self.engine._engine.optimizer.optimizer.state.values()
        return [value.clone() for state in states for value in state.values()]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.engine.named_tensors()}

    def write(self) -> None:
        weights = self.weights()
        self.engine.export(self.output / "export")
        if self.ranks.rank == 0:
            np.savez(
                self.output / "weights.npz", **{k: v.float().numpy() for k, v in weights.items()}
            )
            if self.gradients:
                np.savez(self.output / "gradients.npz", **self.gradients)


@contextlib.contextmanager
def frozen_layers() -> Iterator[None]:
    """The MLPs of the model that is loaded are not trained."""
    load = zero3._load

    def load_frozen(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".mlp." not in name)
        return model

    with patch.object(zero3, "_load", load_frozen):
        yield


def run_loop(
    folder: Path, listener: socket.socket | None, address: RankAddress, *, is_resumed: bool
) -> None:
    """Warm start, version 0, LOOP_STEPS or more; ends because rank 0 is stopped.

    Resumed, it goes on from the last checkpoint but one; then two steps make a version, and the
    engines get every other one.
    """
    spec = loop_spec(folder, (folder / "redis.txt").read_text())
    if is_resumed:
        *_, before_last, _ = sorted((Path(spec.run_dir) / "checkpoints").glob("step-*"))
        config = replace(spec.config, gradient_accumulation_steps=2, publish_every=2)
        spec = replace(spec, resume_from=str(before_last), config=config)
    trainer = TrainerRank(spec, address, listener)
    warm = WarmStartReport(loss_first=0.0, loss_last=0.0, num_steps=0, seconds=0.0)
    if not is_resumed:
        warm = trainer.warm_start(examples()[:1])
    trainer.connect()
    initial = trainer.publish_initial()
    if address.rank == 0:
        threading.Thread(target=stop_after, args=(trainer, spec), daemon=True).start()
    else:
        trainer.stop()  # only rank 0's word counts
    report = trainer.train()
    trainer.close()
    results = {"warm_start": asdict(warm), "initial": asdict(initial), "report": asdict(report)}
    output = Path(spec.run_dir)
    name = "again" if is_resumed else "rank"
    (output / f"{name}-{address.rank}.json").write_text(json.dumps(results))


def stop_after(trainer: TrainerRank, spec: TrainerSpec) -> None:
    run_state = BlockingRunState(spec.redis_url, spec.run, spec.buffer)
    num_steps, last, enough = 0, STREAM_START, LOOP_STEPS
    if spec.resume_from is not None:
        enough = 7
        while entries := run_state.read_metrics(last, 0):
            last = entries[-1].id
    while num_steps < enough:
        entries = run_state.read_metrics(last, TIMEOUT_S)
        num_steps += sum(entry.kind == "step" for entry in entries)
        last = entries[-1].id
    trainer.stop()
    run_state.close()


def run_rank(folder: Path, listener: socket.socket, name: str, rank: int, num_ranks: int) -> None:
    host, port = listener.getsockname()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    address = RankAddress(rank=rank, num_ranks=num_ranks, host=host, port=port, uses_gpu=False)
    if rank != 0:
        listener.close()
    if name in ("loop", "loop_again"):
        own = listener if rank == 0 else None
        run_loop(folder, own, address, is_resumed=name == "loop_again")
        return
    ranks = join_ranks(address, Backend.gloo, 60.0, listener if rank == 0 else None)
    config = OPTIMIZER if name == "optimizer" else config_for(num_ranks)
    kind, *offloads = name.split("+")
    config = replace(config, **dict.fromkeys(offloads, True))
    if kind == "masters":
        config = replace(config, dtype=Dtype.bfloat16)
    with frozen_layers() if name == "frozen" else contextlib.nullcontext():
        engine = Zero3Engine(str(folder / "model"), config, address)
    output = folder / f"{name}-{num_ranks}"
    scenario = Scenario(folder, output, engine, ranks)
    {
        "whole_run": scenario.whole_run,
        "resume": scenario.resume,
        "masters": scenario.masters,
        "offloaded": scenario.offloaded,
        "offloaded_again": scenario.offloaded_again,
        "reshard": scenario.reshard,
        "frozen": scenario.frozen,
        "dropout": scenario.dropout,
        "chain": scenario.chain,
        "full_disk": scenario.full_disk,
        "optimizer": scenario.optimizer,
        "copies": scenario.copies,
        "packings": scenario.packings,
        "head": scenario.head,
        "reference": scenario.reference,
        "algorithms": scenario.algorithms,
        "accumulation": scenario.accumulation,
        "grpo": lambda: scenario.synchronous(AlgorithmConfig(), 1),
        "grpo_twice": lambda: scenario.synchronous(AlgorithmConfig(), 2),
        "gspo": lambda: scenario.synchronous(GSPO, 1),
        "gspo_twice": lambda: scenario.synchronous(GSPO, 2),
    }[kind]()
    if rank == 0:
        output.mkdir(exist_ok=True)
        (output / "results.json").write_text(json.dumps(scenario.results))
    ranks.barrier()
    engine.close()
    leave_ranks()


def fork_rank(folder: Path, listener: socket.socket, name: str, rank: int, num_ranks: int) -> int:
    """Its process id."""
    pid = os.fork()
    if pid != 0:
        return pid
    code = 1
    try:
        log = os.open(folder / f"{name}-{num_ranks}-{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        run_rank(folder, listener, name, rank, num_ranks)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    for line in sys.stdin:
        name, num_ranks = line.split()[0], int(line.split()[1])
        with socket.create_server(("127.0.0.1", 0)) as listener:
            pids = [
                fork_rank(Path(sys.argv[1]), listener, name, rank, num_ranks)
                for rank in range(num_ranks)
            ]
        print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids), flush=True)


if __name__ == "__main__":
    main()
