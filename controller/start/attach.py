"""What a controller takes over from one that was killed: the run's Redis, its Ray and its pools."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup

from buffer.redis.server import EmbeddedServer
from configs.environment import LOG_DIR_VARIABLE, RUN_VARIABLE
from configs.schema import Config
from controller.buffer_access import BufferAddress, open_state
from controller.run_dir import RunDir
from controller.start.placement import RayCluster, rejoin_ray
from controller.start.ray_keeper import RayKeeper
from controller.start.teacher import served_teacher
from controller.watch import supervise
from rollout_pool.pool import RolloutPool
from trainer_pool.pool import TrainerPool
from trainer_pool.types import TrainerSpec

TRAINING, EVALUATING_RESULT = "training", "evaluating the result"
ATTACHABLE = (TRAINING, EVALUATING_RESULT)
"""Phases in which the pools work by themselves."""
ANSWER_S = 20.0
"""For each question to the actors. One that Ray is starting again answers once it has started."""


class NotAttachableError(RuntimeError):
    """Something of the run is gone; the message says what."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Attachment:
    """All that goes on without a controller."""

    config: Config
    redis_url: str
    server: EmbeddedServer | None
    """The Redis that was started for the run."""
    cluster: RayCluster
    trainer: TrainerPool
    trainer_spec: TrainerSpec
    ranks: PlacementGroup
    rollout: RolloutPool


def find_attachment(run_dir: RunDir, config: Config) -> Attachment:
    """Raises NotAttachableError: the run can only be resumed then."""
    try:
        return _find(run_dir, config)
    except Exception as error:  # whatever is wrong with it, the checkpoint is not
        ray.shutdown()
        why = f"{error.args[0]} is gone" if isinstance(error, KeyError) else str(error)
        why = why.partition("\n")[0] or type(error).__name__
        raise NotAttachableError(
            f"cannot attach to {run_dir.name} ({why}); "
            + (
                "it goes on from its last checkpoint"
                if run_dir.has_checkpoint
                else "launch it again"
            )
        ) from error


def _find(run_dir: RunDir, config: Config) -> Attachment:
    if (teacher := served_teacher(config)) is not None:
        raise LookupError(f"the teacher of task.rewards.{teacher[0]} ended with its controller")
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
    environment = {RUN_VARIABLE: run_dir.run_id, LOG_DIR_VARIABLE: str(run_dir.logs)}
    log = run_dir.log_of("ray")
    cluster = rejoin_ray(config, environment, supervise.SETUP_HOOK, run_dir, keeper, log)
    actors = {name: ray.get_actor(name) for name in ray.util.list_named_actors()}
    trainer, spec = TrainerPool.adopt(actors, ANSWER_S)
    rollout = RolloutPool.adopt(actors, ANSWER_S)
    ranks = trainer.group(ANSWER_S)
    cluster.groups += [ranks, rollout.worker_group(ANSWER_S)]
    return Attachment(
        config=config,
        redis_url=url,
        server=server,
        cluster=cluster,
        trainer=trainer,
        trainer_spec=spec,
        ranks=ranks,
        rollout=rollout,
    )


async def _phase(address: BufferAddress) -> str:
    state = await open_state(address)
    try:
        return await state.phase()
    finally:
        await state.close()
