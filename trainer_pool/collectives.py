"""The process group of the trainer's ranks, with small collectives for flags, numbers and texts.

No pickle: everything is a flat tensor, on the device of the process group's backend.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from socket import socket

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from configs.choices import Backend
from weight_sync.group import store_at

_LENGTH_BYTES, _HEAD_BYTES = 4, 4092
"""Parts of a text's first message."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RankAddress:
    """This process's rank, and the address on which rank 0 listens."""

    rank: int
    num_ranks: int
    host: str
    port: int
    uses_gpu: bool

    @property
    def device(self) -> torch.device:
        # Ray shows each rank its own GPU only, so it is always device 0.
        return torch.device("cuda", 0) if self.uses_gpu else torch.device("cpu")


class RankWaits:
    """How long this process, one rank, stood in collectives of the trainer's ranks: for the bytes,
    and for a rank that came late.

    Counted are those of `Collectives` and of sequence groups, and those of ZeRO-3 that gather
    parameters and add up gradients; not its sum of the gradients' norm in an update. Nor, on GPUs,
    what the device waits inside a pass."""

    seconds = 0.0

    @classmethod
    @contextmanager
    def counted(cls) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            cls.seconds += time.perf_counter() - start


@dataclass(kw_only=True, slots=True, frozen=True)
class Collectives:
    """One rank's end of the default process group; every rank must make the same calls."""

    rank: int
    num_ranks: int
    device: torch.device
    width: int = 1
    """Processes that count as one rank: they make the same calls with the same values."""
    store: TCPStore | None = field(default=None, repr=False)
    """The store of the ranks' rendezvous; a thread takes a clone."""

    def in_groups(self, width: int) -> Collectives:
        """The same processes, of which `width` consecutive ones count as one rank: those of a
        sequence group, which have the same part of a batch."""
        return replace(
            self, rank=self.rank // width, num_ranks=self.num_ranks // width, width=width
        )

    @RankWaits.counted()
    def broadcast_flag(self, flag: bool) -> bool:
        """Rank 0's flag; that of another rank does not matter."""
        sent = torch.tensor([flag], dtype=torch.uint8, device=self.device)
        dist.broadcast(sent, src=0)
        return bool(sent.item())

    def gather(self, values: Tensor) -> Tensor:
        """[K] of every rank as [num_ranks, K] in float64 on the CPU, in rank order."""
        return self._gather(values.to(torch.float64))

    @RankWaits.counted()
    def _gather(self, values: Tensor) -> Tensor:
        mine = values.to(self.device)
        if self.num_ranks * self.width == 1:
            return torch.stack([mine]).cpu()
        every = [torch.empty_like(mine) for _ in range(self.num_ranks * self.width)]
        dist.all_gather(every, mine)
        return torch.stack(every[:: self.width]).cpu()

    def gather_texts(self, text: str) -> list[str]:
        """The text of every rank, in rank order; one collective for the usual length."""
        data = text.encode()
        head = len(data).to_bytes(_LENGTH_BYTES, "big") + data[:_HEAD_BYTES]
        heads = self._gather_bytes(head, _LENGTH_BYTES + _HEAD_BYTES)
        lengths = [int.from_bytes(other[:_LENGTH_BYTES], "big") for other in heads]
        texts = [other[_LENGTH_BYTES:] for other in heads]
        if (longest := max(lengths)) > _HEAD_BYTES:
            tails = self._gather_bytes(data[_HEAD_BYTES:], longest - _HEAD_BYTES)
            texts = [start + end for start, end in zip(texts, tails, strict=True)]
        return [found[:length].decode() for found, length in zip(texts, lengths, strict=True)]

    def _gather_bytes(self, data: bytes, size: int) -> list[bytes]:
        """The bytes of every rank, each filled up to `size`."""
        mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        return [bytes(row) for row in self._gather(mine).numpy()]

    @RankWaits.counted()
    def barrier(self) -> None:
        dist.barrier()


def join_ranks(
    address: RankAddress, backend: Backend, timeout_s: float, listener: socket | None
) -> Collectives:
    """Join the other ranks in torch's default process group; returns when all have joined.

    Rank 0 passes the socket that listens at `address`: torch would listen on all interfaces.
    """
    name = backend.value if backend is not Backend.auto else "nccl" if address.uses_gpu else "gloo"
    store = store_at(address.host, address.port, timeout_s, listener)
    dist.init_process_group(
        name,
        store=store,
        rank=address.rank,
        world_size=address.num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    device = address.device if name == "nccl" else torch.device("cpu")
    return Collectives(rank=address.rank, num_ranks=address.num_ranks, device=device, store=store)


def leave_ranks() -> None:
    """Close the default process group; a dead peer does not delay it."""
    if dist.is_initialized():
        dist.destroy_process_group()
