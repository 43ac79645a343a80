"""The reward of an episode: named parts, scored concurrently, and their weighted sum.

          ┌─ task, function, code_tests ──► scoring process
episode ──┼─ env ──► known already               ──► sum of weight x part ──► Score
          └─ http, judge, teacher, code_tests with a url ──► service
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

from configs.choices import RewardKind, TaskKind
from configs.rollout_schema import RewardConfig, TaskConfig
from rollout_pool.episodes.episode import Episode
from rollout_pool.rewards.code_tests import code_task, score_answer
from rollout_pool.rewards.http import HttpReward
from rollout_pool.rewards.judge import Judge
from rollout_pool.rewards.remote_sandbox import RemoteSandbox
from rollout_pool.rewards.service import RemoteFailure
from rollout_pool.rewards.teacher import Teacher
from rollout_pool.rewards.types import (
    Columns,
    PartScore,
    PartService,
    Score,
    ScoringPool,
    encode_request,
)
from rollout_pool.tasks.mixture import Mixture
from rollout_pool.tasks.task import Prompt, Task

log = logging.getLogger(__name__)

IN_PROCESS = (RewardKind.task, RewardKind.function, RewardKind.code_tests)


def needs_processes(config: TaskConfig) -> bool:
    """Whether a part, or without parts the task, may be scored in a scoring process."""
    rewards = [_rewards(one) for one in config.by_name.values()]
    return any(not one or any(is_in_process(r) for r in one.values()) for one in rewards)


def is_in_process(reward: RewardConfig) -> bool:
    if reward.kind is RewardKind.code_tests:
        return reward.url is None
    return reward.kind in IN_PROCESS


def make_scorer(config: TaskConfig, task: Task, pool: ScoringPool) -> EpisodeScorer | MixtureScorer:
    """`pool` is not closed by its `close`. Raises ValueError naming the setting at fault."""
    if isinstance(task, Mixture):
        return MixtureScorer(task, pool)
    return EpisodeScorer(config, task=task, pool=pool)


class RemoteTests:
    """Runs the tests of the model's programs at a sandbox service."""

    def __init__(self, part: str, config: RewardConfig, task: Task) -> None:
        """Raises ValueError for a task without tests, or if the service's key is missing."""
        self._config = config
        self._task = code_task(task, f"task.rewards.{part}")
        self._sandbox = RemoteSandbox(part, config)

    async def score(self, prompt: Prompt, episode: Episode, key: str) -> PartScore:
        """Raises RemoteFailure if a test could not be run: the program is not at fault."""
        total_s = self._config.timeout_s
        value = await score_answer(
            self._task, self._config, prompt, episode.answer, self._sandbox, total_s
        )
        return PartScore(value=value)

    async def close(self) -> None:
        await self._sandbox.close()


_SERVICES: dict[RewardKind, Callable[[str, RewardConfig, Task], PartService]] = {
    RewardKind.http: HttpReward,
    RewardKind.judge: Judge,
    RewardKind.teacher: Teacher,
    RewardKind.code_tests: RemoteTests,
}


class EpisodeScorer:
    """The `Scorer` of `task.rewards`. Used in one event loop."""

    def __init__(
        self,
        config: TaskConfig,
        *,
        task: Task,
        pool: ScoringPool,
        queue: WaitMeter | None = None,
        member: str = "",
    ) -> None:
        """`pool` is not closed by `close`. `queue` measures the waits for it, of other tasks too.
        `member`: the task's name in a mixture. Raises ValueError naming the setting at fault."""
        self._rewards = _rewards(config)
        self._pool = pool
        self._prefix = f"{member}/" if member else ""
        self._services = {
            name: _SERVICES[reward.kind](name, reward, task)
            for name, reward in config.rewards.items()
            if reward.kind in _SERVICES and not is_in_process(reward)
        }
        self._queue = queue or WaitMeter()
        self._failed_before: set[str] = set()

    @property
    def waited_s(self) -> float:
        """Seconds in which at least one episode waited for a free scoring process."""
        return self._queue.seconds

    async def score(self, prompt: Prompt, episode: Episode) -> Score:
        """Never raises for a failed part, which counts as 0 and is logged; if its service failed,
        the episode is unscored; if one cannot judge the answer, it is left open."""
        rewards = self._rewards or _usual(episode)
        answers = await asyncio.gather(
            *(self._part(name, reward, prompt, episode) for name, reward in rewards.items())
        )
        total = 0.0
        parts: dict[str, float] = dict(episode.env_parts)
        failures: dict[str, str] = {}
        columns: Columns = ()
        is_unscored = False
        left_open: str | None = None
        for (name, reward), answer in zip(rewards.items(), answers, strict=True):
            columns = columns or answer.columns
            if answer.failure is not None:
                failures[name] = answer.failure
                is_unscored |= name in self._services
                self._log_failure(prompt, name, answer.failure)
            if answer.is_left_open:
                left_open = left_open or name
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
            left_open=left_open,
            columns=columns,
        )

    def _log_failure(self, prompt: Prompt, part: str, why: str) -> None:
        # The first one is a warning: a function with a bug fails for every episode.
        level = logging.INFO if part in self._failed_before else logging.WARNING
        self._failed_before.add(part)
        log.log(level, "prompt %d: no %s: %s", prompt.index, part, why)

    async def _part(
        self, name: str, reward: RewardConfig, prompt: Prompt, episode: Episode
    ) -> PartScore:
        if reward.kind is RewardKind.env:
            if episode.env_reward is None:
                return PartScore(failure="the environment gave no reward")
            return PartScore(value=episode.env_reward)
        if is_in_process(reward):
            return await self._in_process(name, reward, prompt, episode)
        try:
            return await self._services[name].score(prompt, episode, secrets.token_hex(16))
        except RemoteFailure as error:
            return PartScore(failure=str(error))
        except Exception as error:  # must not fail other episodes
            log.warning("prompt %d: %s", prompt.index, name, exc_info=error)
            return PartScore(failure=f"{type(error).__name__}: {error}"[:500])

    async def _in_process(
        self, name: str, reward: RewardConfig, prompt: Prompt, episode: Episode
    ) -> PartScore:
        request = encode_request(
            self._prefix + (name if name in self._rewards else ""),
            prompt,
            episode,
            with_messages=reward.kind is RewardKind.function,
        )
        came = time.monotonic()
        score = await self._pool.score(request)
        self._queue.add(came, came + score.waited_s)
        return score

    async def close(self) -> None:
        await asyncio.gather(*(service.close() for service in self._services.values()))


class MixtureScorer:
    """Scores each episode by the rewards of its prompt's task."""

    def __init__(self, mixture: Mixture, pool: ScoringPool) -> None:
        self._mixture = mixture
        self._queue = WaitMeter()
        self._scorers: dict[str, EpisodeScorer] = {}
        for name, member in mixture.members.items():
            with mixture.named_in_errors(name):
                self._scorers[name] = EpisodeScorer(
                    member.config, task=member.task, pool=pool, queue=self._queue, member=name
                )

    @property
    def waited_s(self) -> float:
        return self._queue.seconds

    async def score(self, prompt: Prompt, episode: Episode) -> Score:
        member, own = self._mixture.of(prompt)
        return await self._scorers[member.name].score(own, episode)

    async def close(self) -> None:
        await asyncio.gather(*(scorer.close() for scorer in self._scorers.values()))


def _rewards(config: TaskConfig) -> dict[str, RewardConfig]:
    """Empty if they depend on the episode."""
    if config.kind is TaskKind.verifiers and not config.rewards:  # no process could score it
        return {RewardKind.env.name: RewardConfig(kind=RewardKind.env)}
    return config.rewards


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
