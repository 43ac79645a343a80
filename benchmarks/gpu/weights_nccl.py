"""The checkpoint engine over NCCL: the same sender and receivers, bit-exact, and GB/s.

    python -m benchmarks.gpu.weights_nccl [--receivers 2] [--shape 0.5B|1.5B|7B] [--publishes 6]

Shards lie on a GPU, travel over an nccl weight group to real receiver processes, and are compared
byte for byte in the file that each of them stages: in full, as a delta, and after a receiver was
killed in the middle. One GPU will do, for correctness: NCCL refuses two members on one GPU, unless
it is 2.30.3 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1 is set, or each process has an NCCL_HOSTID of
its own, by which it takes the others to be on other machines and meets them over sockets. Both are
set here, so the rates of one GPU say nothing about NCCL between several.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import KEY
from benchmarks.gpu.device import require_gpu
from benchmarks.report import Report
from benchmarks.weights.model import SHAPES, folder_in_memory
from benchmarks.weights.ours import MemoryBoard, checkpoint_engine, receiver_in
from configs.choices import Backend
from configs.schema import WeightSyncConfig
from tensors.layout import Layout
from tensors.snapshots import Shard
from weight_sync.checkpoint_engine import CheckpointEngine
from weight_sync.receiver.client import ReceiverClient
from weight_sync.receiver.process import ReceiverProcess

_WAIT_S = 300.0
_CHUNK = 1 << 26


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--publishes", type=int, default=6)
    arguments = parser.parse_args()
    num_gpus = require_gpu("benchmarks.gpu.weights_nccl")
    report = Report("checkpoint engine over NCCL")
    layout = Layout.of(SHAPES[arguments.shape].tensors("bfloat16"), 1)
    report.say(f"{layout.num_bytes / 1e9:.2f} GB to {arguments.receivers} receivers")
    with asyncio.Runner() as runner, folder_in_memory() as folder:
        config = WeightSyncConfig(backend=Backend.nccl, full_every=3, timeout_s=20.0)
        with receivers(runner, folder, arguments.receivers, config, num_gpus) as processes:
            play(report, runner, layout, config, processes, arguments.publishes)
    report.close()


@contextmanager
def receivers(
    runner: asyncio.Runner, folder: Path, number: int, config: WeightSyncConfig, num_gpus: int
) -> Iterator[list[ReceiverProcess]]:
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    processes = []
    for index in range(number):
        if num_gpus < 1 + number:
            os.environ["NCCL_HOSTID"] = f"receiver-{index}"
        device = f"cuda:{(1 + index) % num_gpus}"
        process = receiver_in(folder, f"receiver-{index}", config, device)
        runner.run(process.start())
        processes.append(process)
    if num_gpus < 1 + number:
        os.environ["NCCL_HOSTID"] = "trainer"
    try:
        yield processes
    finally:
        for process in processes:
            runner.run(process.stop())


def play(
    report: Report,
    runner: asyncio.Runner,
    layout: Layout,
    config: WeightSyncConfig,
    processes: list[ReceiverProcess],
    num_publishes: int,
) -> None:
    torch.cuda.set_device(0)
    values = torch.empty(layout.num_bytes // 2, dtype=torch.bfloat16, device="cuda").normal_()
    shards = [
        Shard(name=spec.name, tensor=values[start // 2 : start // 2 + spec.num_elements])
        for spec, start in zip(layout.tensors, layout.offsets, strict=False)
    ]
    board = MemoryBoard({each.spec.name: each.url for each in processes})

    async def open_board() -> MemoryBoard:
        return board

    engine = checkpoint_engine(layout, config, run="nccl", open_board=open_board, uses_gpu=True)
    rates, stalls = [], []
    for version in range(num_publishes):
        if version:
            change(values, 1.0 if version % 3 == 2 else 0.01)
        began = time.perf_counter()
        engine.send(version, shards)
        stalls.append(time.perf_counter() - began)
        engine.protect_copy()
        board.wait_for(version)
        if version:  # the first one also meets, and touches every page
            rates.append(layout.num_bytes / (board.available_at - began) / 1e9)
        compare(runner, processes, values, version)
    report.figure("gb_per_s", max(rates), "of the model, best publish until visible (or its delta)")
    report.figure("snapshot_s", min(stalls), "`send`, best")
    if len(processes) > 1:
        change(values, 1.0)
        kill_in_the_middle(runner, engine, board, shards, processes, num_publishes)
        compare(runner, processes[1:], values, num_publishes)
        report.row("a receiver was killed in the middle", "the others are bit-exact")
    engine.close()
    report.row("staged files compared byte for byte", f"{num_publishes * len(processes)}")


def change(values: Tensor, share: float) -> None:
    """New numbers for about this share of the elements."""
    for part in torch.split(values, _CHUNK):
        fresh = torch.randn_like(part)
        if share < 1:
            fresh = torch.where(torch.rand(len(part), device="cuda") < share, fresh, part)
        part.copy_(fresh)
    torch.cuda.synchronize()


def compare(
    runner: asyncio.Runner, processes: list[ReceiverProcess], values: Tensor, version: int
) -> None:
    """Raises AssertionError unless every receiver shows exactly `values`."""

    async def path_of(process: ReceiverProcess) -> Path:
        client = ReceiverClient(process.spec.name, process.url, KEY)
        staged = await client.newest(version - 1, timeout_s=_WAIT_S)
        await client.close()
        assert staged is not None and staged.version == version, staged
        return Path(staged.path) / "model.safetensors"

    for process in processes:
        path = runner.run(path_of(process))
        whole = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        header = 8 + int.from_bytes(whole[:8].numpy().tobytes(), "little")
        found = whole[header:].view(torch.bfloat16)
        pairs = zip(torch.split(values, _CHUNK), torch.split(found, _CHUNK), strict=True)
        for mine, theirs in pairs:
            same = torch.equal(mine.cpu().view(torch.int16), theirs.view(torch.int16))
            assert same, f"{process.spec.name}: version {version} is not the trainer's"


def kill_in_the_middle(
    runner: asyncio.Runner,
    engine: CheckpointEngine,
    board: MemoryBoard,
    shards: list[Shard],
    processes: list[ReceiverProcess],
    version: int,
) -> None:
    """SIGKILL of the first of the chain while bytes move."""
    victim = threading.Timer(random.uniform(0.05, 0.3), os.kill, (processes[0].pid, signal.SIGKILL))
    engine.send(version, shards)
    victim.start()
    board.wait_for(version)
    victim.join()
    runner.run(processes[0].wait_dead())


if __name__ == "__main__":
    main()
