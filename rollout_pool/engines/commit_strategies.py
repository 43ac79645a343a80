"""The ways in which an engine takes a staged version; `commit_ipc` holds the one for GPUs alone.

| weight_sync.commit | the load, while the engine stands still                              |
| staged_disk        | the engine reads the staged file through its own loader              |
| direct             | this process broadcasts the staged file to SGLang's own endpoint     |
| ipc                | the engine copies from a buffer in GPU memory that this process fills |
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from configs.choices import CommitStrategy
from configs.schema import WeightSyncConfig
from rollout_pool.engines.commit import Strategy
from rollout_pool.engines.commit_ipc import Ipc
from rollout_pool.engines.sglang_client import SGLangClient
from rollout_pool.engines.staged_file import Batch, StagedFile
from rollout_pool.sampling.engine_client import EngineError
from weight_sync.types import GroupSpec

if TYPE_CHECKING:
    import torch.distributed as dist


def make_strategy(
    client: SGLangClient, config: WeightSyncConfig, *, tp_size: int, host: str
) -> Strategy:
    """What weight_sync.commit asks for, for one server, which listens on `host`."""
    match config.commit:
        case CommitStrategy.staged_disk:
            return StagedDisk(client, config.commit_timeout_s)
        case CommitStrategy.direct:
            return Direct(client, config, tp_size=tp_size, host=host)
        case CommitStrategy.ipc:
            return Ipc(client, config, tp_size=tp_size)


class StagedDisk:
    """The engine's own loader reads the staged file: no byte passes through this process."""

    name = "staged_disk"

    def __init__(self, client: SGLangClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    async def check(self) -> None:
        if not await self._client.can_update_from_disk():
            raise ValueError(
                "weight_sync.commit=staged_disk: this SGLang server loads nothing from a folder; "
                "use weight_sync.commit=direct or a newer SGLang"
            )

    async def prepare(self, folder: Path) -> None:
        """Nothing: the bytes are where the engine reads them."""

    async def load(self, version: int, folder: Path) -> None:
        await self._client.update_from_disk(str(folder), version, self._timeout_s)

    async def close(self) -> None:
        """Nothing is held."""


class Direct:
    """SGLang's own broadcast: receive and load share the scheduler's thread, batch by batch.

    What others do to a whole fleet; here the sender is local. Always gloo, for nccl refuses two
    members on one GPU. The baseline that the other strategies are measured against.
    """

    name = "direct"

    def __init__(
        self, client: SGLangClient, config: WeightSyncConfig, *, tp_size: int, host: str
    ) -> None:
        self._client = client
        self._config = config
        self._tp_size = tp_size
        self._host = host
        self._spec: GroupSpec | None = None
        self._group: dist.ProcessGroup | None = None
        self._wants_session = False

    async def check(self) -> None:
        """It works with every SGLang server."""
        self._wants_session = await self._client.wants_update_session()

    async def prepare(self, folder: Path) -> None:
        if self._group is None:
            await self._join()

    async def load(self, version: int, folder: Path) -> None:
        staged = await asyncio.to_thread(StagedFile.open, folder)
        if self._wants_session:
            await self._client.begin_update()
        assert self._spec is not None, "prepare() comes first"
        for batch in staged.batches(self._config.bucket_bytes):
            # If one end fails, the other one's wait ends at the group's timeout or with the server.
            await asyncio.gather(
                self._client.receive(batch.tensors, self._spec, version),
                asyncio.to_thread(self._broadcast, batch),
            )
        if self._wants_session:
            await self._client.end_update()

    async def close(self) -> None:
        if self._group is not None:
            await asyncio.to_thread(self._leave)

    async def _join(self) -> None:
        # torch is a second of start-up and 200 MB: only who broadcasts pays for it.
        from weight_sync.group import join_as_sglang_sender, open_store

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the engine is on this machine
        timeout_s = self._config.timeout_s
        store = await asyncio.to_thread(open_store, self._host, timeout_s)
        name = self._client.name
        spec = GroupSpec(
            epoch=0,
            host=self._host,
            port=store.port,
            name=f"direct-{name}",
            num_senders=1,
            receivers=tuple(f"{name}.{rank}" for rank in range(self._tp_size)),
            backend="gloo",
            timeout_s=timeout_s,
        )
        try:
            _, self._group = await asyncio.gather(
                self._client.join_broadcast(spec),
                asyncio.to_thread(
                    join_as_sglang_sender,
                    store,
                    name=spec.name,
                    world_size=spec.world_size,
                    backend=spec.backend,
                    timeout_s=timeout_s,
                ),
            )
        except RuntimeError as error:  # torch's DistStoreError is one
            raise EngineError(f"{name} did not meet its sender: {error}") from error
        self._spec = spec

    def _broadcast(self, batch: Batch) -> None:
        import torch
        import torch.distributed as dist

        dist.broadcast(torch.from_numpy(batch.data), 0, self._group)

    def _leave(self) -> None:
        import torch.distributed as dist

        group, self._group = self._group, None
        dist.destroy_process_group(group)
