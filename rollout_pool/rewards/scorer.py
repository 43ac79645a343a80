"""The reward of an episode: named parts, scored concurrently, and their weighted sum.

          ┌─ task, function, code_tests ──► scoring process
episode ──┼─ env ──► known already               ──► sum of weight x part ──► Score
          └─ http, judge, teacher ──► service
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from buffer.types import FloatArray
from configs.choices import RewardKind
from configs.rollout_schema import RewardConfig, TaskConfig
from rollout_pool.episodes.episode import Episode
from rollout_pool.rewards.http import HttpReward
from rollout_pool.rewards.judge import Judge
from rollout_pool.rewards.service import RemoteFailure
from rollout_pool.rewards.teacher import Teacher
from rollout_pool.rewards.types import Score, ScoringPool, encode_request
from rollout_pool.tasks.task import Prompt, Task

log = logging.getLogger(__name__)

IN_PROCESS = (RewardKind.task, RewardKind.function, RewardKind.code_tests)
_SERVICES: dict[RewardKind, type[HttpReward | Judge | Teacher]] = {
    RewardKind.http: HttpReward,
    RewardKind.judge: Judge,
    RewardKind.teacher: Teacher,
}
Columns = tuple[Mapping[str, FloatArray], ...]


@dataclass(kw_only=True, slots=True)
class _Part:
    """The result of one part."""

    value: float = 0.0
    failure: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further named numbers."""
    columns: Columns = ()


def needs_processes(config: TaskConfig) -> bool:
    """Whether a part, or without parts the task, may be scored in a scoring process."""
    return not config.rewards or any(r.kind in IN_PROCESS for r in config.rewards.values())


class EpisodeScorer:
    """The `Scorer` of `task.rewards`. Used in one event loop."""

    def __init__(self, config: TaskConfig, *, task: Task, pool: ScoringPool) -> None:
        """`pool` is not closed by `close`. Raises ValueError naming the setting at fault."""
        self._rewards = config.rewards
        self._task = task
        self._pool = pool
        teachers = [n for n, r in config.rewards.items() if r.kind is RewardKind.teacher]
        if len(teachers) > 1:
            raise ValueError(
                f"task.rewards.{teachers[1]}.kind=teacher: there is one already, and a trajectory "
                "has one column of teacher log-probabilities; remove one of them"
            )
        self._services = {
            name: _SERVICES[reward.kind](name, reward)
            for name, reward in config.rewards.items()
            if reward.kind in _SERVICES
        }
        self._queue = WaitMeter()

    @property
    def waited_s(self) -> float:
        """Seconds in which at least one episode waited for a free scoring process."""
        return self._queue.seconds

    async def score(self, prompt: Prompt, episode: Episode) -> Score:
        """Never raises for a failed part, which counts as 0 and is logged; if its service failed,
        the episode is unscored."""
        rewards = self._rewards or _usual(episode)
        answers = await asyncio.gather(
            *(self._part(name, reward, prompt, episode) for name, reward in rewards.items())
        )
        total = 0.0
        parts: dict[str, float] = dict(episode.env_parts)
        failures: dict[str, str] = {}
        columns: Columns = ()
        is_unscored = False
        for (name, reward), answer in zip(rewards.items(), answers, strict=True):
            columns = columns or answer.columns
            if answer.failure is not None:
                failures[name] = answer.failure
                is_unscored |= reward.kind in _SERVICES
                log.info("prompt %d: no %s: %s", prompt.index, name, answer.failure)
            if reward.kind is RewardKind.teacher:
                continue
            total += reward.weight * answer.value
            parts |= {f"{name}/{inner}": value for inner, value in answer.parts.items()}
            parts[name] = answer.value
        return Score(
            reward=total,
            parts=parts,
            failures=failures,
            is_unscored=is_unscored,
            columns=columns,
        )

    async def _part(
        self, name: str, reward: RewardConfig, prompt: Prompt, episode: Episode
    ) -> _Part:
        if reward.kind is RewardKind.env:
            if episode.env_reward is None:
                return _Part(failure="the environment gave no reward")
            return _Part(value=episode.env_reward)
        if reward.kind in IN_PROCESS:
            return await self._in_process(name, reward, prompt, episode)
        try:
            return await self._at_service(name, prompt, episode)
        except RemoteFailure as error:
            return _Part(failure=str(error))
        except Exception as error:  # must not fail other episodes
            log.warning("prompt %d: %s", prompt.index, name, exc_info=error)
            return _Part(failure=f"{type(error).__name__}: {error}"[:500])

    async def _in_process(
        self, name: str, reward: RewardConfig, prompt: Prompt, episode: Episode
    ) -> _Part:
        request = encode_request(
            name if name in self._rewards else "",
            prompt,
            episode,
            with_messages=reward.kind is RewardKind.function,
        )
        came = time.monotonic()
        score = await self._pool.score(request)
        self._queue.add(came, came + score.waited_s)
        return _Part(value=score.value, failure=score.failure)

    async def _at_service(self, name: str, prompt: Prompt, episode: Episode) -> _Part:
        key = secrets.token_hex(16)
        match self._services[name]:
            case HttpReward() as service:
                value, parts = await service.score(prompt, episode, key)
                return _Part(value=value, parts=parts)
            case Judge() as judge:
                solution = self._solution(prompt) if judge.needs_solution else ""
                return _Part(value=await judge.score(prompt.text, episode.answer, solution, key))
            case Teacher() as teacher:
                return _Part(columns=tuple(await teacher.columns(episode.branches, key)))

    def _solution(self, prompt: Prompt) -> str:
        try:
            return self._task.solution(prompt)
        except Exception as error:  # a user's task, or a data set without solutions
            why = f"{type(error).__name__}: {error}"
            raise RemoteFailure(f"no solution for the judge: {why}"[:500]) from error

    async def close(self) -> None:
        await asyncio.gather(*(service.close() for service in self._services.values()))


def _usual(episode: Episode) -> dict[str, RewardConfig]:
    """The default reward: the environment's if it gave one, else the task's score."""
    kind = RewardKind.task if episode.env_reward is None else RewardKind.env
    return {kind.name: RewardConfig(kind=kind)}


class WaitMeter:
    """Measures the time during which at least one episode waited."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._until = 0.0

    def add(self, start: float, end: float) -> None:
        """An episode waited from `start` to `end`. Call it roughly in the order of `end`."""
        self.seconds += max(0.0, end - max(start, self._until))
        self._until = max(self._until, end)
