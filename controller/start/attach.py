"""Finds the Redis, the Ray and the pools of a run whose controller was killed, for the next one."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

import ray

from buffer.redis.server import EmbeddedServer
from configs.environment import RUN_VARIABLE
from configs.schema import Config
from controller.buffer_access import BufferAddress, opened_state
from controller.run_dir import RunDir
from controller.start.placement import RayCluster, rejoin_ray
from controller.start.ray_keeper import RayKeeper
from rollout_pool.pool import RolloutPool
from trainer_pool.pool import TrainerPool

TRAINING, EVALUATING_RESULT = "training", "evaluating the result"
ATTACHABLE = (TRAINING, EVALUATING_RESULT)
"""Phases in which the pools work by themselves."""
ANSWER_S = 20.0
"""Longest wait for an actor's reply. One that Ray is starting again replies once it has started."""


class NotAttachableError(RuntimeError):
    """Something of the run is gone; the message says what."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Attachment:
    """All that goes on without a controller."""

    redis_url: str
    server: EmbeddedServer | None
    """The Redis that was started for the run."""
    cluster: RayCluster
    trainer: TrainerPool
    rollout: RolloutPool


def find_attachment(run_dir: RunDir, config: Config) -> Attachment:
    """Raises NotAttachableError: the run can only be resumed then."""
    try:
        return _find(run_dir, config)
    except Exception as error:  # whatever is wrong with it, the checkpoint is not
        ray.shutdown()
        why = f"{error.args[0]} is gone" if isinstance(error, KeyError) else str(error)
        why = why.partition("\n")[0] or type(error).__name__
        fix = "it goes on from its last checkpoint" if run_dir.has_checkpoint else "launch it again"
        raise NotAttachableError(f"cannot attach to {run_dir.name} ({why}); {fix}") from error


def _find(run_dir: RunDir, config: Config) -> Attachment:
    keeper, url = RayKeeper.find(run_dir), run_dir.read_redis_url()
    if keeper is None or url is None:
        raise LookupError("no keeper of its Ray lives" if keeper is None else "no Redis")
    os.environ[RUN_VARIABLE] = run_dir.run_id
    server = None
    if config.buffer.url is None:
        folder, log = run_dir.path / "redis", run_dir.log_of("redis")
        server = EmbeddedServer.adopt(folder, config.buffer, log, url)
    address = BufferAddress(url=url, run=run_dir.name, settings=config.buffer)
    phase = asyncio.run(_phase(address))
    if phase not in ATTACHABLE:
        raise LookupError(f"its controller died while {phase or 'starting'}")
    cluster = rejoin_ray(config, run_dir, keeper)
    actors = {name: ray.get_actor(name) for name in ray.util.list_named_actors()}
    trainer = TrainerPool.adopt(actors, ANSWER_S)
    has_teacher = config.task.served_teacher is not None
    rollout = RolloutPool.adopt(actors, ANSWER_S, has_teacher=has_teacher)
    cluster.groups += [trainer.place, rollout.worker_group(ANSWER_S)]
    return Attachment(
        redis_url=url, server=server, cluster=cluster, trainer=trainer, rollout=rollout
    )


async def _phase(address: BufferAddress) -> str:
    async with opened_state(address) as state:
        return await state.phase()
