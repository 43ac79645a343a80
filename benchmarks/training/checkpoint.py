"""Measures what a checkpoint costs training: our copy of the state, and DeepSpeed's own.

python -m benchmarks.training.checkpoint            # two ranks, 113M parameters; a minute
python -m benchmarks.training.checkpoint --short    # a tiny model; the figures mean little
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

import numpy as np
import torch

from benchmarks.ranks import free_port, join
from benchmarks.report import Report
from benchmarks.team import Member
from benchmarks.weights.model import folder_in_memory
from configs.schema import ScratchModelConfig, TrainerConfig
from trainer_pool.data.packing import Row, pack
from trainer_pool.model.scratch import build_scratch_model
from trainer_pool.model.zero3 import Zero3Policy
from trainer_pool.state.checkpoint import CheckpointStore, TrainState
from trainer_pool.state.peer_copies import PeerCopies
from trainer_pool.state.shards import ShardReader
from trainer_pool.state.writer import CheckpointWriter

NUM_RANKS = 2
SMALL = ScratchModelConfig(
    hidden_size=768,
    intermediate_size=3072,
    num_layers=12,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
)
TINY = ScratchModelConfig()
TIMEOUT_S = 120.0


@dataclass(kw_only=True, slots=True, frozen=True)
class Costs:
    """Seconds of one rank in one round."""

    copy_s: float
    """Its pieces of the state into warm memory, and nothing else."""
    stall_s: float
    """Until training goes on."""
    durable_s: float
    step_s: float
    step_beside_s: float
    """A step that begins when the copy is done."""
    deepspeed_s: float
    """DeepSpeed's save_checkpoint, for which training stands still."""
    memory_copy_s: float
    """A copy to the host's memory, for which training stands still."""
    read_memory_s: float
    """Until the state of that copy is restored."""
    read_disk_s: float
    """The same from the checkpoint, whose files the system still has in memory."""
    num_bytes: int


class Rank:
    """A rank of the trainer; its first work is the warm-up."""

    def __init__(self, folder: Path, memory: Path, rank: int, port: int) -> None:
        address, self._ranks = join(rank, NUM_RANKS, port, TIMEOUT_S)
        self._policy = Zero3Policy(
            str(folder / "model"), TrainerConfig(num_ranks=NUM_RANKS), address
        )
        self._folder = folder
        self._writer = CheckpointWriter(
            CheckpointStore(folder / "checkpoints"),
            self._policy.state.layout(),
            self._ranks,
            uses_gpu=False,
            timeout_s=TIMEOUT_S,
            on_end=lambda state, record: None,
        )
        self._copies = PeerCopies(
            memory, self._policy.state.layout(), self._ranks, timeout_s=TIMEOUT_S
        )
        self._warm = [torch.zeros_like(shard.tensor) for shard in self._policy.state.shards()]

    def work(self, number: int) -> Costs:
        step_s = self._timed(self._step)
        copy_s = self._timed(self._copy)
        began = time.perf_counter()
        stall_s = self._timed(partial(self._save, number))
        step_beside_s = self._timed(self._step)
        self._writer.finish()
        self._ranks.barrier()
        durable_s = time.perf_counter() - began
        deepspeed_s = self._timed(self._save_by_deepspeed)
        memory_copy_s = self._timed(partial(self._copy_to_memory, number))
        copy, (_, state) = self._copies.newest(after=0), self._latest()
        assert copy is not None and (copy.state.step, state.step) == (number, number)
        read_memory_s = self._timed(partial(self._restore, copy.folder))
        read_disk_s = self._timed(partial(self._restore, self._latest()[0]))
        return Costs(
            copy_s=copy_s,
            stall_s=stall_s,
            durable_s=durable_s,
            step_s=step_s,
            step_beside_s=step_beside_s,
            deepspeed_s=deepspeed_s,
            memory_copy_s=memory_copy_s,
            read_memory_s=read_memory_s,
            read_disk_s=read_disk_s,
            num_bytes=self._policy.state.layout().num_bytes,
        )

    def _timed(self, what: Callable[[], None]) -> float:
        self._ranks.barrier()
        began = time.perf_counter()
        what()
        return time.perf_counter() - began

    def _copy(self) -> None:
        for warm, shard in zip(self._warm, self._policy.state.shards(), strict=True):
            warm.copy_(shard.tensor)

    def _save(self, step: int) -> None:
        self._writer.save(self._state(step), self._policy.state.shards())

    def _copy_to_memory(self, step: int) -> None:
        why = self._copies.save(self._state(step), [], self._policy.state.shards())
        assert why is None, why

    def _state(self, step: int) -> TrainState:
        return TrainState(
            step=step,
            version=step,
            num_updates=self._policy.state.num_updates,
            lineage="one",
            consumed_group_ids=(),
            task_positions={},
            untrained_prompts=(),
        )

    def _latest(self) -> tuple[Path, TrainState]:
        found = CheckpointStore(self._folder / "checkpoints").latest()
        assert found is not None
        return found

    def _restore(self, folder: Path) -> None:
        with ShardReader(folder) as reader:
            self._policy.state.restore(reader, self._policy.state.num_updates)

    def _step(self) -> None:
        row = Row(
            tokens=np.random.default_rng(0).integers(0, 256, 128).astype(np.int32),
            loss_mask=np.array([0] + [1] * 127, np.uint8),
            rollout_logprobs=np.zeros(128, np.float32),
        )
        (batch,) = pack([row], 128)
        scores = self._policy.score(batch)
        self._writer.protect_copy()
        self._policy.backward(-scores.logprobs.mean())
        self._policy.step(1e-5)

    def _save_by_deepspeed(self) -> None:
        self._policy._deepspeed.save_checkpoint(str(self._folder / "deepspeed"), tag="one")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a tiny model, few rounds")
    is_short = parser.parse_args().short
    report = Report("checkpoint")
    with (
        tempfile.TemporaryDirectory() as name,
        folder_in_memory() as memory,
    ):
        folder = Path(name)
        build_scratch_model(TINY if is_short else SMALL, folder / "model", 0)
        port = free_port()
        ranks = [Member(partial(Rank, folder, memory, rank, port)) for rank in range(NUM_RANKS)]
        try:
            for rank in ranks:
                rank.result()
            rounds = [measure(ranks, number) for number in range(1, 3 if is_short else 8)][1:]
        finally:
            for rank in ranks:
                rank.close()
    report_costs(report, [costs for both in rounds for costs in both])
    report.close()


def measure(ranks: list[Member], number: int) -> list[Costs]:
    for rank in ranks:
        rank.begin(number)
    return [rank.result()[1] for rank in ranks]


def report_costs(report: Report, costs: list[Costs]) -> None:
    def middle(name: str) -> float:
        return float(median(getattr(each, name) for each in costs))

    report.row("state of all ranks", f"{costs[0].num_bytes / 1e6:.0f} MB")
    names = ("copy_s", "stall_s", "durable_s", "deepspeed_s", "step_s", "step_beside_s")
    for name in (*names, "memory_copy_s", "read_memory_s", "read_disk_s"):
        report.figure(name, middle(name), "median of all rounds and ranks")
    copies = middle("copy_s")
    report.target(
        "stall_vs_copy", middle("stall_s") / copies, "<=", 1.3, "stands still, against the copy"
    )
    report.figure("memory_copy_vs_copy", middle("memory_copy_s") / copies, "to /dev/shm")
    report.figure("deepspeed_vs_copy", middle("deepspeed_s") / copies, "save_checkpoint")
    report.figure(
        "step_beside_vs_step", middle("step_beside_s") / middle("step_s"), "while it is written"
    )


if __name__ == "__main__":
    main()
