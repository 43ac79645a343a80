"""Which agent plays a task: a program that talks to the model by itself, through the endpoint.

Setting: task.agent. An environment of the verifiers library is one too.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from configs.rollout_schema import TaskConfig
from rollout_pool.endpoint.agents import Agent, Answered, SessionHandle, load_agent
from rollout_pool.tasks.task import Prompt, Task


@runtime_checkable
class AgentTask(Protocol):
    """A task that brings its own agent."""

    async def run_agent(self, session: SessionHandle, prompt: Prompt) -> Answered: ...


def find_agent(config: TaskConfig, task: Task) -> Agent | None:
    """Who plays the episodes of `task`; None if an environment does.

    Raises ValueError naming task.agent for one that does not exist or is no async function.
    """
    if config.agent is not None:
        return load_agent(config.agent)
    return task.run_agent if isinstance(task, AgentTask) else None
