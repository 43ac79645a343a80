"""Memory and time of one long row in a training step, by what is computed again and by ranks.

python -m benchmarks.training.long_rows                     # 32,768 tokens; some minutes
python -m benchmarks.training.long_rows --tokens 131072 --ways tiled tiled_2_ranks

A Llama of two layers, small but for its MLP, in float32 over gloo. Every way gives a gradient of
the first one's norm. Beside the memory that a rank's passes take stands what `make dry-run` counts.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)  # what torch frees goes back to the system

import numpy as np

from benchmarks.ranks import free_port, join
from benchmarks.report import Report
from benchmarks.team import Member
from configs.load import load_config
from configs.schema import ScratchModelConfig, TrainerConfig
from controller.start.gpus import activation_bytes
from controller.start.model_size import model_size
from trainer_pool.data.packing import Row, pack
from trainer_pool.model.scratch import build_scratch_model
from trainer_pool.model.zero3 import Zero3Policy

MODEL = ScratchModelConfig(
    hidden_size=256,
    intermediate_size=2048,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
)
TIMEOUT_S = 1800.0
TILED = {"gradient_checkpointing": True, "mlp_tile_tokens": 1024}
WAYS: dict[str, dict[str, Any]] = {
    "kept": {},
    "recomputed": {"gradient_checkpointing": True},
    "tiled": TILED,
    "tiled_2_ranks": {**TILED, "num_ranks": 2, "sequence_parallel_size": 2},
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Pass:
    """A forward and a backward pass on one rank."""

    num_bytes: int
    """The most memory that the rank had at once, beyond what it had before."""
    seconds: float
    norm: float
    """The gradient's norm."""


class Rank:
    """A rank of the trainer; `work` is a pass over one row of so many tokens."""

    def __init__(self, folder: Path, config: TrainerConfig, rank: int, port: int) -> None:
        address, self._ranks = join(rank, config.ranks, port, TIMEOUT_S)
        self._policy = Zero3Policy(str(folder), config, address)

    def work(self, number: int) -> Pass:
        self._pass(64)  # what is there from a first pass on
        self._ranks.barrier()
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        began = time.perf_counter()
        norm = self._pass(number)
        seconds = time.perf_counter() - began
        return Pass(num_bytes=_resident("VmHWM") - before, seconds=seconds, norm=norm)

    def _pass(self, num_tokens: int) -> float:
        dice = np.random.default_rng(0)
        row = Row(
            tokens=dice.integers(0, 256, num_tokens).astype(np.int32),
            loss_mask=np.array([0] + [1] * (num_tokens - 1), np.uint8),
            rollout_logprobs=np.zeros(num_tokens, np.float32),
        )
        (batch,) = pack([row], num_tokens)
        self._policy.backward(-self._policy.score(batch).logprobs.mean())
        norm = self._policy.step(0.0)
        assert norm is not None
        return norm


def _resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--short", action="store_true", help="2,048 tokens, the first and last way")
    given = parser.parse_args()
    ways = ("kept", "tiled_2_ranks") if given.short else given.ways
    num_tokens = 2048 if given.short else given.tokens
    report = Report(f"a row of {num_tokens} tokens")
    first = None
    with tempfile.TemporaryDirectory() as folder:
        build_scratch_model(MODEL, Path(folder), 0)
        for way in ways:
            settings = {"num_ranks": 1, "micro_batch_tokens": num_tokens, **WAYS[way]}
            config = TrainerConfig(**settings)
            passes = measure(Path(folder), config, num_tokens)
            most = max(passes, key=lambda each: each.num_bytes)
            first = first or most
            report.figure(f"gb_{way}", most.num_bytes / 1e9, "a rank's passes, at their most")
            report.figure(f"counted_gb_{way}", counted(folder, config) / 1e9, "by make dry-run")
            report.figure(f"seconds_{way}", most.seconds, "forward and backward pass")
            apart = max(abs(each.norm / first.norm - 1) for each in passes)
            report.target(f"gradient_{way}", apart, "<=", 1e-5, "its norm, from the first way's")
    report.close()


def measure(folder: Path, config: TrainerConfig, num_tokens: int) -> list[Pass]:
    port = free_port()
    ranks = [Member(partial(Rank, folder, config, rank, port)) for rank in range(config.ranks)]
    try:
        for rank in ranks:
            rank.result()
        for rank in ranks:
            rank.begin(num_tokens)
        return [rank.result(TIMEOUT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.close()


def counted(folder: str, trainer: TrainerConfig) -> int:
    config = load_config(["model=pretrained", f"model.path={folder}"])
    config.trainer = trainer
    found = activation_bytes(config, model_size(config.model), uses_gpu=False)
    assert found is not None
    return found


if __name__ == "__main__":
    main()
