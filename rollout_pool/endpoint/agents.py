"""Runs an agent, a user's program that calls the model by itself, as an episode.

run(prompt, request) ──► session ──► agent(session, prompt) ──► reward ──► Episode
                                    │     ▲
                                    ▼     │  OpenAI's API
                                  endpoint, engines
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rollout_pool.cancelling import BackgroundTasks, contained, end_tasks
from rollout_pool.endpoint.sessions import Outcome, Session, Sessions
from rollout_pool.episodes.environment import Step
from rollout_pool.episodes.episode import Episode, EpisodeFailed, EpisodeRequest
from rollout_pool.tasks.agent import Agent, SessionHandle
from rollout_pool.tasks.source import EpisodeSource
from rollout_pool.tasks.task import Prompt

log = logging.getLogger(__name__)


class AgentRunner(EpisodeSource):
    """Runs episodes with `agent`. Settings: task.episode_timeout_s,
    rollout.openai.session_timeout_s. `url`: where the endpoint of `sessions` listens."""

    def __init__(self, agent: Agent, sessions: Sessions, url: str) -> None:
        self._agent = agent
        self._sessions = sessions
        self._url = url
        self._acting = BackgroundTasks()

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
        await self._acting.end()

    async def _play(self, session: Session, prompt: Prompt) -> Episode:
        acting = self._acting.spawn(self._act(session, prompt))
        try:
            await session.wait_end(acting)
            if not acting.done():
                await session.cut_short()
        finally:
            await end_tasks([acting])
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
            with contained("the agent"):
                returned = await self._agent(handle, prompt)
        finally:
            await handle.close()
        if isinstance(returned, Step) and returned.observation is None:
            return Outcome(
                reward=returned.reward,
                parts=returned.info,
                rewards=returned.rewards,
                advantages=returned.advantages,
            )
        reward, parts = returned if isinstance(returned, tuple) else (returned, {})
        if isinstance(reward, bool | int | float) and isinstance(parts, Mapping):
            return Outcome(
                reward=float(reward), parts={name: float(part) for name, part in parts.items()}
            )
        raise TypeError(
            f"the agent returned {returned!r}; it must return its reward, a number, a pair of "
            "the reward and its named parts, or a Step without an observation"
        )
