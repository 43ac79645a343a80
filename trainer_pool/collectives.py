"""Small collectives for flags, numbers and short texts among the trainer's ranks.

No pickle: everything is a flat tensor, on the device of the process group's backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore


@dataclass(kw_only=True, slots=True, frozen=True)
class Collectives:
    """One rank's end of the default process group; every rank must make the same calls."""

    rank: int
    num_ranks: int
    device: torch.device
    store: TCPStore | None = field(default=None, repr=False)
    """The store of the ranks' rendezvous; a thread takes a clone."""

    def broadcast_flags(self, flags: Sequence[bool]) -> list[bool]:
        """Rank 0's flags; on other ranks only the length of `flags` matters."""
        flat = torch.tensor(flags, dtype=torch.uint8, device=self.device)
        dist.broadcast(flat, src=0)
        return [bool(flag) for flag in flat.tolist()]

    def gather(self, values: Tensor) -> Tensor:
        """[K] of every rank as [num_ranks, K] in float64 on the CPU, in rank order."""
        mine = values.to(self.device, torch.float64)
        every = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(every, mine)
        return torch.stack(every).cpu()

    def gather_texts(self, text: str) -> list[str]:
        """The text of every rank, in rank order; for at most a few thousand characters."""
        mine = torch.tensor(list(text.encode()), dtype=torch.uint8)
        lengths = self.gather(torch.tensor([len(mine)]))[:, 0].int().tolist()
        if not any(lengths):
            return [""] * self.num_ranks
        padded = torch.nn.functional.pad(mine, (0, max(lengths) - len(mine)))
        every = self.gather(padded)
        return [
            bytes(row[:length].to(torch.uint8).tolist()).decode()
            for row, length in zip(every, lengths, strict=True)
        ]

    def barrier(self) -> None:
        dist.barrier()
