"""A reward from the task itself: its score of the model's last message."""

from __future__ import annotations

from configs.rollout_schema import RewardConfig
from rollout_pool.rewards.function import as_reward
from rollout_pool.rewards.reward import PartScorer, Reward
from rollout_pool.tasks.task import Task


class TaskScore(Reward):
    def __init__(self, part: str, config: RewardConfig, task: Task) -> None:
        self.config = config
        self._task = task

    @classmethod
    def is_in_process(cls, config: RewardConfig) -> bool:
        return True

    def load(self, timeout_s: float) -> PartScorer:
        score, what = self._task.score, f"task.factory: score of {self._task.name}"
        return lambda request: as_reward(score(request.prompt, request.episode.answer), what)


KIND = TaskScore
