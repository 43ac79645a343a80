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
from collections.abc import Sequence
from dataclasses import replace

from configs.choices import RewardScope
from configs.rollout_schema import TaskConfig
from rollout_pool.episodes.episode import Episode
from rollout_pool.rewards.reward import Reward, class_of, parts_of
from rollout_pool.rewards.service import RemoteFailure
from rollout_pool.rewards.types import Columns, PartScore, Score, ScoringPool, encode_request
from rollout_pool.tasks.mixture import for_each_member, member_of
from rollout_pool.tasks.task import Prompt, Task

log = logging.getLogger(__name__)


class EpisodeScorer:
    """The `Scorer` of a run: each episode by the rewards of its prompt's task. Used in one event
    loop.

    Example: with task.rewards={right: {kind: task}, short: {kind: function, weight: 0.1, ...}}, of
    which the task gives 1 and the function 0.5, the score is reward=1.05 with
    parts={"right": 1.0, "short": 0.5}.
    """

    def __init__(self, config: TaskConfig, *, task: Task, pool: ScoringPool) -> None:
        """`pool` is not closed by `close`. Raises ValueError naming the setting at fault."""
        self._task = task
        self._queue = WaitMeter()
        self.num_open = 0
        """Episodes whose rewards are awaited."""
        self._members = for_each_member(
            config, task, lambda *member: _MemberScorer(*member, pool=pool, queue=self._queue)
        )

    @property
    def waited_s(self) -> float:
        """Seconds in which at least one episode waited for a free scoring process."""
        return self._queue.seconds

    async def score(self, prompt: Prompt, episode: Episode) -> Score:
        name, own = member_of(self._task, prompt)
        self.num_open += 1
        try:
            return await self._members[name].score(own, episode)
        finally:
            self.num_open -= 1

    async def score_group(
        self, prompt: Prompt, episodes: Sequence[Episode], scores: Sequence[Score]
    ) -> Sequence[Score]:
        name, own = member_of(self._task, prompt)
        return await self._members[name].score_group(own, episodes, scores)

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in self._members.values()))


class _MemberScorer:
    """The sum of the rewards of one task, of a mixture or of the run."""

    def __init__(
        self, member: str, config: TaskConfig, task: Task, *, pool: ScoringPool, queue: WaitMeter
    ) -> None:
        every = {
            name: class_of(reward)(name, reward, task) for name, reward in parts_of(config).items()
        }
        self._of_groups = {n: r for n, r in every.items() if r.config.of is RewardScope.group}
        self._rewards = {n: r for n, r in every.items() if n not in self._of_groups}
        self._chooses = not config.rewards and "task" in self._rewards  # see parts_of
        self._pool = pool
        self._prefix = f"{member}/" if member else ""
        self._queue = queue
        self._failed_before: set[str] = set()

    async def score(self, prompt: Prompt, episode: Episode) -> Score:
        """Never raises for a failed part, which counts as 0 and is logged; if its service failed,
        the episode is unscored; if one cannot judge the completion, it is left open."""
        rewards = self._rewards
        if self._chooses:
            is_own = episode.env_reward is not None or episode.rewards or episode.lacks_rewards
            name = "env" if is_own else "task"
            rewards = {name: rewards[name]}
        works = [self._part(name, reward, prompt, episode) for name, reward in rewards.items()]
        # One needs no task of its own.
        scores = await asyncio.gather(*works) if len(works) > 1 else [await one for one in works]
        failures: dict[str, str] = {}
        columns: Columns = ()
        for name, score in zip(rewards, scores, strict=True):
            columns = columns or score.columns
            if score.failure is not None:
                failures[name] = score.failure
                self._log_failure(prompt, name, score.failure)
        open_parts = (n for n, score in zip(rewards, scores, strict=True) if score.is_left_open)

        def summed(role: str | None) -> tuple[float, dict[str, float]]:
            total, parts = 0.0, dict(episode.env_parts)
            for (name, reward), score in zip(rewards.items(), scores, strict=True):
                if reward.config.gives_reward:
                    value = score.value if role is None else score.by_role.get(role, score.value)
                    parts.update({f"{name}/{one}": value for one, value in score.parts.items()})
                    parts[name] = value
                    total += reward.config.weight * value
            return total, parts

        total, parts = summed(None)
        roles = {role: summed(role) for one in scores for role in one.by_role}
        return Score(
            reward=total,
            parts=parts,
            failures=failures,
            is_unscored=any(score.is_unscored for score in scores),
            left_open=next(open_parts, None),
            columns=columns,
            by_role={role: Score(reward=own, parts=parts) for role, (own, parts) in roles.items()},
        )

    async def score_group(
        self, prompt: Prompt, episodes: Sequence[Episode], scores: Sequence[Score]
    ) -> Sequence[Score]:
        works = [self._part(name, one, prompt, *episodes) for name, one in self._of_groups.items()]
        for (name, reward), part in zip(
            self._of_groups.items(), await asyncio.gather(*works), strict=True
        ):
            if part.failure is not None:
                self._log_failure(prompt, name, part.failure)
                failed = {name: part.failure}
                # 0 for each would say that they are equally good.
                scores = [
                    replace(one, failures={**one.failures, **failed}, is_unscored=True)
                    for one in scores
                ]
                continue
            scores = [
                replace(one, left_open=one.left_open or name)
                if value is None
                else one.plus(name, reward.config.weight, value)
                for one, value in zip(scores, part.of_group, strict=True)
            ]
        return scores

    def _log_failure(self, prompt: Prompt, part: str, why: str) -> None:
        # The first one is a warning: a function with a bug fails for every episode.
        level = logging.INFO if part in self._failed_before else logging.WARNING
        self._failed_before.add(part)
        log.log(level, "prompt %d: no %s: %s", prompt.index, part, why)

    async def _part(
        self, name: str, reward: Reward, prompt: Prompt, *episodes: Episode
    ) -> PartScore:
        if reward.is_in_process(reward.config):
            request = encode_request(
                self._prefix + name, prompt, *episodes, with_messages=reward.reads_messages
            )
            came = time.monotonic()
            score = await self._pool.score(request)
            self._queue.add(came, came + score.waited_s)
            return score
        try:
            return await reward.score(prompt, episodes[0], secrets.token_hex(16))
        except RemoteFailure as error:
            return PartScore(failure=str(error), is_unscored=True)
        except Exception as error:  # must not fail other episodes
            log.warning("prompt %d: %s", prompt.index, name, exc_info=error)
            why = f"{type(error).__name__}: {error}"[:500]
            return PartScore(failure=why, is_unscored=True)

    async def close(self) -> None:
        await asyncio.gather(*(reward.close() for reward in self._rewards.values()))


class WaitMeter:
    """Measures the time during which at least one episode waited."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._until = 0.0

    def add(self, start: float, end: float) -> None:
        """An episode waited from `start` to `end`. Call it roughly in the order of `end`."""
        self.seconds += max(0.0, end - max(start, self._until))
        self._until = max(self._until, end)
