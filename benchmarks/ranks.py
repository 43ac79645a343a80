"""Ranks of the trainer on this machine, in the processes of a benchmark."""

from __future__ import annotations

import os
from socket import create_server

import torch

from configs.choices import Backend
from trainer_pool.collectives import Collectives, RankAddress, join_ranks


def free_port() -> int:
    with create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def join(
    rank: int, num_ranks: int, port: int, timeout_s: float, *, uses_gpu: bool = False
) -> tuple[RankAddress, Collectives]:
    """This process becomes the rank, on the CPU with one thread; rank 0 listens on the port. It
    returns when all have joined."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if not uses_gpu:
        torch.set_num_threads(1)
    address = RankAddress(
        rank=rank, num_ranks=num_ranks, host="127.0.0.1", port=port, uses_gpu=uses_gpu
    )
    backend = Backend.auto if uses_gpu else Backend.gloo
    listener = create_server(("127.0.0.1", port)) if rank == 0 else None
    return address, join_ranks(address, backend, timeout_s, listener)
