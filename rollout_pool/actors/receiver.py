"""The actor of the weight receiver of one node."""

from __future__ import annotations

import asyncio
import os

from rollout_pool.actors.placed import PlacedActor, listen_host, log_to_stderr
from rollout_pool.engines.receiver_keeper import ReceiverKeeper
from rollout_pool.types import RolloutSpec


class ReceiverActor(PlacedActor, ReceiverKeeper):
    """The receiver of one node. Its death never ends the run: `keep` runs again."""

    def __init__(self, spec: RolloutSpec, name: str) -> None:
        log_to_stderr()
        super().__init__(spec, name, listen_host(spec.host))
        self._keeping: asyncio.Task[str] | None = None

    async def keep(self, gpu_ids: list[str]) -> str:
        """`run`, which Ray calls again after it has restarted this actor, and a controller that
        attaches. `gpu_ids`: those of the node's first engine; each chain uses one."""
        if self._keeping is None:
            if gpu_ids:
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
            self._keeping = asyncio.create_task(self.run())
        return await asyncio.shield(self._keeping)
