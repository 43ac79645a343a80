"""Checks that the model's programs can be run on this machine."""

from __future__ import annotations

import asyncio
import logging

from configs.rollout_schema import TaskConfig
from rollout_pool.rewards.code_tests import limits_of, local_sandbox
from rollout_pool.sandbox.run import LocalSandbox, SandboxError, SandboxLimits, cost_of_missing
from rollout_pool.tasks.env_episodes import PYTHON

log = logging.getLogger(__name__)


def check_sandbox(config: TaskConfig) -> None:
    """Raises ValueError if this machine cannot run the programs of rewards and tools safely."""
    tested = {
        f"task.rewards.{name}.kind={reward.kind.name}": (
            local_sandbox(reward, f"task.rewards.{name}"),
            limits_of(reward),
        )
        for name, reward in config.rewards.items()
        if reward.runs_tests and reward.url is None
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
