"""A baseline for commits: SGLang's own broadcast, fed from the staged file by a local sender.

What other systems do across a fleet. Receives and loads alternate in the scheduler's thread, so the
engine decodes nothing while bytes move. Always gloo: nccl refuses two members on one GPU.
"""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from pathlib import Path

import httpx
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    PrefixStore,
    _new_process_group_helper,
    _world,
)

from benchmarks import KEY
from configs.schema import WeightSyncConfig
from rollout_pool.engines.engine import Strategy
from rollout_pool.engines.sglang.engine import SGLangEngine
from rollout_pool.engines.sglang.strategies import StagedFile
from weight_sync.group import open_store

_HOST = "127.0.0.1"
_BEGIN = "/begin_weight_update"


class SGLangBroadcast(Strategy):
    """Used as the strategies of weight_sync.commit are, for one running engine of one GPU or CPU.

    strategy = SGLangBroadcast(engine, WeightSyncConfig())
    await strategy.check()
    report = await Committer(engine.client, strategy, PauseMode.resubmit).commit(1, folder)
    await strategy.close()
    """

    name = "direct"

    def __init__(self, engine: SGLangEngine, config: WeightSyncConfig) -> None:
        self._config = config
        self._group_name = f"direct-{engine.spec.name}"
        self._group: dist.ProcessGroup | None = None
        self._has_session = False
        self._http = httpx.AsyncClient(
            base_url=engine.info.url,
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=config.timeout_s,
            trust_env=False,
        )

    async def check(self) -> None:
        """Every SGLang server supports it; newer ones want an update to be begun and ended."""
        self._has_session = _BEGIN in (await self._http.get("/openapi.json")).json()["paths"]

    async def prepare(self, folder: Path) -> None:
        if self._group is None:
            await self._join()

    async def load(self, version: int, folder: Path) -> None:
        staged = await asyncio.to_thread(StagedFile.open, folder)
        if self._has_session:
            await self._post(_BEGIN, {})
        for batch in staged.batches(self._config.bucket_bytes):
            # If one end fails, the other waits until the group's timeout or the server's end.
            await asyncio.gather(
                self._receive(batch, version), asyncio.to_thread(self._broadcast, batch)
            )
        if self._has_session:
            await self._post("/end_weight_update", {})

    async def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await asyncio.to_thread(dist.destroy_process_group, group)
        await self._http.aclose()

    async def _join(self) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = await asyncio.to_thread(open_store, _HOST, self._config.timeout_s)
        body = {
            "master_address": _HOST,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": self._group_name,
            "backend": "gloo",
        }
        _, self._group = await asyncio.gather(
            self._post("/init_weights_update_group", body),
            asyncio.to_thread(_meet, store, self._group_name, self._config.timeout_s),
        )

    async def _receive(self, batch: StagedFile, version: int) -> None:
        """The engine receives one broadcast, the concatenated tensors of a batch, and loads it."""
        body = {
            "names": [tensor.name for tensor in batch.tensors],
            "dtypes": [tensor.dtype for tensor in batch.tensors],
            "shapes": [list(tensor.shape) for tensor in batch.tensors],
            "group_name": self._group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "abort_all_requests": False,
            "weight_version": str(version),
        }
        await self._post("/update_weights_from_distributed", body)

    def _broadcast(self, batch: StagedFile) -> None:
        dist.broadcast(torch.from_numpy(batch.data), 0, self._group)

    async def _post(self, path: str, body: dict[str, object]) -> None:
        (await self._http.post(path, json=body)).raise_for_status()


def _meet(store: TCPStore, name: str, timeout_s: float) -> dist.ProcessGroup:
    """The sender's end of a group of two, which SGLang's rank joins as the second member.

    Blocks until it has. Raises torch's DistStoreError after `timeout_s`.
    """
    # SGLang joins through torch's `_new_process_group_helper`, with the group's name as key prefix.
    # The sender has to do the same, or the two would look under different keys.
    group, _ = _new_process_group_helper(
        2,
        0,
        [],
        Backend("gloo"),
        PrefixStore(name, store),
        group_name=GroupName(name),
        backend_options=None,
        timeout=timedelta(seconds=timeout_s),
    )
    assert isinstance(group, dist.ProcessGroup)
    _world.pg_group_ranks[group] = {rank: rank for rank in range(2)}
    return group
