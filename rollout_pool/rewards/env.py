"""A reward from the environment: the sum over the steps of an episode."""

from __future__ import annotations

from configs.rollout_schema import TaskConfig
from rollout_pool.episodes.environment import SingleTurn
from rollout_pool.episodes.episode import Episode
from rollout_pool.rewards.reward import Reward
from rollout_pool.rewards.types import PartScore
from rollout_pool.tasks.agent import find_agent
from rollout_pool.tasks.task import Prompt, Task


class EnvReward(Reward):
    @classmethod
    def check(cls, part: str, config: TaskConfig, task: Task) -> None:
        """Refuses an environment of a single completion, which gives no reward itself."""
        if config.env is not None or find_agent(config, task) is not None:
            return
        if type(task.environment(task.example(0))) is SingleTurn:
            raise ValueError(
                f"task.rewards.{part}.kind=env: the environment of task.kind={config.kind.name} "
                f"gives no reward; set task.rewards.{part}.kind=task, or name an environment in "
                "task.env"
            )

    async def score(self, prompt: Prompt, episode: Episode, key: str) -> PartScore:
        if episode.rewards:
            # An episode that was broken off may lack some.
            by_role = {one.role: episode.rewards.get(one.role, 0.0) for one in episode.branches}
            judged = {role: value for role, value in by_role.items() if value is not None}
            return PartScore(
                value=sum(judged.values()) / max(len(judged), 1),
                is_left_open=not judged,
                parts=judged,
                by_role=judged,
            )
        if episode.env_reward is None:
            if episode.advantages or episode.lacks_rewards:
                return PartScore(value=0.0)
            return PartScore(failure="the environment gave no reward")
        return PartScore(value=episode.env_reward)


KIND = EnvReward
