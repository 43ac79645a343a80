"""A rank that is alone in its group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from trainer_pool.collectives import Collectives


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collectives]:
    """The collectives of a single rank, over gloo."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Collectives(rank=0, num_ranks=1, device=torch.device("cpu"))
    dist.destroy_process_group()
