"""Checks that the model's programs can be run, here or at a service."""

from __future__ import annotations

import asyncio
import logging

from configs.choices import RewardKind
from configs.rollout_schema import TaskConfig
from rollout_pool.rewards.code_tests import limits_of, local_sandbox
from rollout_pool.rewards.remote_sandbox import check_remote_sandbox
from rollout_pool.sandbox.run import LocalSandbox, SandboxError, SandboxLimits, cost_of_missing
from rollout_pool.tasks.environments import PYTHON
from rollout_pool.tasks.mixture import Mixture
from rollout_pool.tasks.task import Task

log = logging.getLogger(__name__)


def check_sandbox(config: TaskConfig) -> None:
    """Raises ValueError if this machine cannot run the programs of rewards and tools safely."""
    tested = {
        f"task.rewards.{name}.kind={reward.kind.name}": (
            local_sandbox(reward, f"task.rewards.{name}"),
            limits_of(reward),
        )
        for name, reward in config.rewards.items()
        if reward.kind is RewardKind.code_tests and reward.url is None
    }
    if PYTHON in config.tools:
        tested[f"task.tools={PYTHON}"] = LocalSandbox(), SandboxLimits()
    warnings: dict[str, str] = {}
    for setting, (sandbox, limits) in tested.items():
        try:
            layers = asyncio.run(sandbox.protections(limits))
        except SandboxError as error:
            raise ValueError(f"{setting}: {error}") from error
        if (cost := cost_of_missing(layers)) is not None:
            warnings.setdefault(cost, setting)
    for cost, setting in warnings.items():
        log.warning("%s: %s", setting, cost)


def check_remote_sandboxes(config: TaskConfig, task: Task) -> None:
    """Raises ValueError for a service that does not run the programs of a reward."""
    if isinstance(task, Mixture):
        for name, member in task.members.items():
            with task.named_in_errors(name):
                check_remote_sandboxes(member.config, member.task)
        return
    for name, reward in config.rewards.items():
        if reward.kind is RewardKind.code_tests and reward.url is not None:
            asyncio.run(check_remote_sandbox(name, reward, limits_of(reward)))
