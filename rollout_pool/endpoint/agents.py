"""Runs an agent, a user's program that calls the model by itself, as an episode.

run(prompt, request) ──► session ──► agent(session, prompt) ──► reward ──► Episode
                                    │     ▲
                                    ▼     │  OpenAI's API
                                  endpoint, engines
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import httpx

from configs.dotted import load_callable
from configs.rollout_schema import TaskConfig
from rollout_pool.cancelling import end_tasks
from rollout_pool.endpoint.sessions import Outcome, Session, Sessions
from rollout_pool.episodes.episode import Episode
from rollout_pool.episodes.request import EpisodeFailed, EpisodeRequest
from rollout_pool.tasks.source import EpisodeSource
from rollout_pool.tasks.task import Prompt, Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI

log = logging.getLogger(__name__)

_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Endpoints speak plain HTTP; without this, each client would load the system's certificates."""
Answered = float | tuple[float, Mapping[str, float]]


@dataclass(kw_only=True, slots=True, eq=False)
class SessionHandle:
    """How an agent reaches the model: the address and key of one episode."""

    session_id: str
    base_url: str
    """For any client of OpenAI's API, with `api_key`."""
    keyed_url: str = field(repr=False)
    """`base_url` with the key in its path, for clients that can't send one."""
    api_key: str = field(repr=False)
    model: str
    _clients: list[AsyncOpenAI] = field(default_factory=list, init=False, repr=False)

    def client(self) -> AsyncOpenAI:
        """A client without timeout or retries. Closed with the episode."""
        from openai import AsyncOpenAI

        # One connection pool per client: httpx searches a shared pool of thousands slowly.
        transport = httpx.AsyncHTTPTransport(verify=_NO_TLS, trust_env=False)
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


Agent = Callable[[SessionHandle, Prompt], Awaitable[Answered]]


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

    async def run_agent(self, session: SessionHandle, prompt: Prompt) -> Answered: ...
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


class AgentRunner(EpisodeSource):
    """Runs episodes with `agent`. Settings: task.episode_timeout_s,
    rollout.openai.session_timeout_s. `url`: where the endpoint of `sessions` listens."""

    def __init__(self, agent: Agent, sessions: Sessions, url: str) -> None:
        self._agent = agent
        self._sessions = sessions
        self._url = url
        self._acting: set[asyncio.Task[Outcome]] = set()

    async def run(self, prompt: Prompt, request: EpisodeRequest) -> Episode:
        """The finished episode; what the agent returned is its env_reward.

        If the agent raises, it ends with "env_error" and is scored for what it has. Raises
        SessionLost if the agent never called the model, SampleFailed or TimeoutError if it failed
        because sampling failed, and the agent's own EpisodeFailed.
        """
        session = self._sessions.open(request)
        try:
            return await self._play(session, prompt)
        finally:
            await self._sessions.close(session, "its episode has ended")

    async def close(self) -> None:
        """Cancels the running agents and their episodes."""
        await end_tasks(self._acting)

    async def _play(self, session: Session, prompt: Prompt) -> Episode:
        acting = asyncio.create_task(self._act(session, prompt))
        self._acting.add(acting)
        try:
            await session.wait_end(acting)
            if not acting.done():
                await session.cut_short()
        finally:
            await end_tasks([acting])
            self._acting.discard(acting)
        if acting.cancelled():
            return session.episode(end="episode_timeout", outcome=None)
        if (error := acting.exception()) is None:
            return session.episode(end="done", outcome=acting.result())
        if session.failure is not None:
            raise session.failure
        if isinstance(error, EpisodeFailed):  # what it has says nothing of the model
            raise error
        if session.is_full:
            return session.episode(end="length", outcome=None)
        log.info("%s: the agent failed", session.session_id, exc_info=error)
        words = f"{type(error).__name__}: {error}"
        return session.episode(end="env_error", outcome=None, error=words)

    async def _act(self, session: Session, prompt: Prompt) -> Outcome:
        handle = SessionHandle(session_id=session.session_id, **session.address(self._url))
        try:
            returned = await self._agent(handle, prompt)
        except (SystemExit, KeyboardInterrupt) as error:  # they would end the worker's loop
            raise RuntimeError(f"the agent tried to end the process: {error!r}") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RuntimeError("the agent cancelled itself") from error
        finally:
            await handle.close()
        reward, parts = returned if isinstance(returned, tuple) else (returned, {})
        if isinstance(reward, bool | int | float) and isinstance(parts, Mapping):
            return Outcome(
                reward=float(reward), parts={name: float(part) for name, part in parts.items()}
            )
        raise TypeError(
            f"the agent returned {returned!r}; it must return its reward, a number, or a pair of "
            "the reward and its named parts"
        )
