"""Agents: programs that call the model by themselves, a user's or a task's own."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import httpx

from configs.rollout_schema import TaskConfig
from host.network import NO_TLS
from host.user_code import load_callable
from rollout_pool.episodes.environment import Step
from rollout_pool.episodes.episode import ROLE
from rollout_pool.tasks.task import Prompt, Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI

AgentReward = float | tuple[float, Mapping[str, float]] | Step
"""An agent's reward of its episode, alone or with named parts, or as an environment gives it."""


@dataclass(kw_only=True, slots=True, eq=False)
class SessionHandle:
    """How an agent reaches the model: the address and key of one episode."""

    session_id: str
    base_url: str
    """For any client of OpenAI's API, with `api_key`."""
    keyed_url: str = field(repr=False)
    """`base_url` with the key in its path, for clients that can't send one."""
    anthropic_url: str
    """For any client of Anthropic's API, with `api_key`."""
    api_key: str = field(repr=False)
    model: str
    _clients: list[AsyncOpenAI] = field(default_factory=list, init=False, repr=False)

    def of_role(self, role: str) -> SessionHandle:
        """The same for one role of the episode: what it reaches the model by, is this role's.
        Raises ValueError for what is no name of a role, and if this is a role's already."""
        if not ROLE.fullmatch(role) or "." in self.api_key:
            raise ValueError(
                f"of_role({role!r:.100}): a name must have the form {ROLE.pattern}; call of_role "
                "of the handle that the agent was given"
            )
        url, key = self.keyed_url.replace(self.api_key, f"{self.api_key}.{role}"), self.api_key
        handle = replace(self, api_key=f"{key}.{role}", keyed_url=url)
        handle._clients = self._clients  # all are closed with the episode
        return handle

    def client(self) -> AsyncOpenAI:
        """A client without timeout or retries. Closed with the episode."""
        from openai import AsyncOpenAI

        # One connection pool per client: httpx searches a shared pool of thousands slowly.
        transport = httpx.AsyncHTTPTransport(verify=NO_TLS, trust_env=False)
        client = AsyncOpenAI(
            base_url=self.base_url,
            api_key=self.api_key,
            timeout=None,
            max_retries=0,
            http_client=httpx.AsyncClient(transport=transport, timeout=None, trust_env=False),
        )
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


Agent = Callable[[SessionHandle, Prompt], Awaitable[AgentReward]]


def load_agent(name: str) -> Agent:
    """The function that `task.agent` names. Raises ValueError naming the setting."""
    agent: Agent = load_callable(name, "task.agent")
    called = agent if inspect.isroutine(agent) else type(agent).__call__
    if not inspect.iscoroutinefunction(called):
        raise ValueError(
            f"task.agent={name!r}: must be an async function of (session, prompt); run "
            "blocking code in asyncio.to_thread inside it"
        )
    return agent


@runtime_checkable
class AgentTask(Protocol):
    """A task that brings its own agent, as an environment of the verifiers library does."""

    async def run_agent(self, session: SessionHandle, prompt: Prompt) -> AgentReward: ...
    async def start(self) -> None:
        """Starts what its episodes need."""
        ...

    async def close(self) -> None:
        """Ends what it has started. Called once."""
        ...


def find_agent(config: TaskConfig, task: Task) -> Agent | None:
    """The agent that runs the episodes of `task` (task.agent); None if an environment does.

    Raises ValueError naming task.agent if it does not exist or is no async function.
    """
    if config.agent is not None:
        return load_agent(config.agent)
    return task.run_agent if isinstance(task, AgentTask) else None
