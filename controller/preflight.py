"""Looks at what a run is given before anything is started, so that bad input costs seconds."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path

import torch

from configs.choices import RewardKind
from configs.rollout_schema import TaskConfig
from configs.schema import Config
from controller.plan import DEFAULT_STAGE_DIR, Plan, make_plan
from rollout_pool.engines.engine import shared_memory_bytes
from rollout_pool.envs.env import SingleTurn
from rollout_pool.sandbox import SandboxError, cost_of_missing, protections
from rollout_pool.tasks.agents import find_agent
from rollout_pool.tasks.dotted import load_callable
from rollout_pool.tasks.environments import PYTHON, environment_factory
from rollout_pool.tasks.programs import CodeTask
from rollout_pool.tasks.task import Task, build_task
from rollout_pool.tokenizer import load_tokenizer
from trainer_pool.checkpoint_names import check_names, parameter_names

log = logging.getLogger(__name__)

SURE_SHARE = 0.9
"""Of an estimated size: a model is hardly smaller."""


def check_inputs(config: Config) -> None:
    """Raises ValueError for a task, a model or a number of GPUs that cannot be had."""
    num_gpus, promised = torch.cuda.device_count(), config.cluster.num_gpus
    if config.cluster.ray_address is None and promised is not None and promised > num_gpus:
        raise ValueError(
            f"cluster.num_gpus={promised}: this machine has {num_gpus}; with more than that there "
            "is only a plan (make dry-run)"
        )
    plan = plan_here(config)
    if config.cluster.ray_address is None:
        check_shared_memory(plan.config, plan)
    check_task(config.task)
    if (path := config.model.path) is not None:
        trust = config.model.trust_remote_code
        load_tokenizer(path, trust_remote_code=trust)
        if Path(path).is_dir():  # else its files are yet to come: the trainer looks at them
            check_names(path, parameter_names(path, trust_remote_code=trust))


def plan_here(config: Config) -> Plan:
    """The plan on this machine, or on `cluster.num_gpus` GPUs; those of a cluster that was not
    asked count as there. Raises ValueError as `make_plan` does."""
    num_gpus = config.cluster.num_gpus
    if num_gpus is None and config.cluster.ray_address is None:
        num_gpus = torch.cuda.device_count()
    return make_plan(config, num_gpus, os.cpu_count() or 1, gpu_memory())


def gpu_memory() -> int | None:
    """Of this machine's first GPU."""
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def check_shared_memory(config: Config, plan: Plan) -> None:
    """Raises ValueError if this machine's shared memory cannot take what a run keeps there."""
    staged = Path(config.weight_sync.stage_dir or DEFAULT_STAGE_DIR)
    folder = next(path for path in (staged, *staged.parents) if path.exists())
    slots = config.weight_sync.num_staged
    size = (plan.model.num_params or 0) * getattr(torch, plan.serving_dtype).itemsize
    # Sizes that a model's name tells are rounded.
    needed = int(SURE_SHARE * slots * size)
    what = f"{slots} slots of about {size} bytes"
    if str(folder) == DEFAULT_STAGE_DIR:
        needed += config.rollout.num_engines * shared_memory_bytes(config.rollout.engine.tp_size)
        what += " and what SGLang keeps there"
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"weight_sync.stage_dir: no room in {folder} for {what} ({needed} bytes together), "
            f"{free} bytes are free; remove what lies there, make it larger (in a container: "
            "--shm-size), or choose a larger file system"
        )


def check_task(config: TaskConfig) -> None:
    """Raises ValueError for a task that cannot be built, an environment of its first prompt that
    cannot be made, an agent, a tool or a reward function that does not exist, and rewards that such
    a task cannot give."""
    task = build_task(config)
    if find_agent(config, task) is None:
        make_environment = environment_factory(config, task)
        try:
            make_environment(task.example(0))
        except Exception as error:
            name = f"task.env={config.env!r}" if config.env else f"task.kind={config.kind.name}"
            raise ValueError(
                f"{name}: made no environment of prompt 0: {type(error).__name__}: {error}"
            ) from error
        _check_env_rewards(config, task)
    for name, reward in config.rewards.items():
        if reward.function is not None:
            load_callable(reward.function, f"task.rewards.{name}.function")
        if reward.kind is RewardKind.code_tests and not isinstance(task, CodeTask):
            raise ValueError(
                f"task.rewards.{name}.kind=code_tests: the prompts of task.kind={config.kind.name} "
                "have no tests; those of task.kind=code have, or score by task.rewards."
                f"{name}.kind=task"
            )
    _check_sandbox(config)


def _check_env_rewards(config: TaskConfig, task: Task) -> None:
    """Of an environment that asks once and wants one answer it is known."""
    if config.env is not None or type(task.environment(task.example(0))) is not SingleTurn:
        return
    for name, reward in config.rewards.items():
        if reward.kind is RewardKind.env:
            raise ValueError(
                f"task.rewards.{name}.kind=env: the environment of task.kind={config.kind.name} "
                f"gives no reward; set task.rewards.{name}.kind=task, or name an environment in "
                "task.env"
            )


def _check_sandbox(config: TaskConfig) -> None:
    tested = [
        f"task.rewards.{name}.kind={reward.kind.name}"
        for name, reward in config.rewards.items()
        if reward.kind is RewardKind.code_tests
    ]
    if PYTHON in config.tools:
        tested.append(f"task.tools={PYTHON}")
    if not tested:
        return
    try:
        layers = asyncio.run(protections())
    except SandboxError as error:
        raise ValueError(f"{tested[0]}: {error}") from error
    if (cost := cost_of_missing(layers)) is not None:
        log.warning("%s: %s", tested[0], cost)
