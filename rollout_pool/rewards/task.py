"""A reward from the task itself: its score of the model's last message."""

from __future__ import annotations

from configs.rollout_schema import RewardConfig
from rollout_pool.rewards.function import as_reward
from rollout_pool.rewards.reward import PartScorer, Reward


class TaskScore(Reward):
    @classmethod
    def is_in_process(cls, config: RewardConfig) -> bool:
        return True

    def load(self, timeout_s: float) -> PartScorer:
        assert self.task is not None, self.part
        score, what = self.task.score, f"task.factory: score of {self.task.name}"
        return lambda request: as_reward(score(request.prompt, request.episode.answer), what)


KIND = TaskScore
