"""From one prompt to one group: n episodes, each scored as soon as it ends.

source ──┬─ episode 3 ended ─► scorer ─┐
         ├─ episode 0 ended ─► scorer ─┼─► group, when all n are there
         └─ ...                        ┘

A group is indivisible: it has all its n episodes, or it fails.
"""

from __future__ import annotations

import asyncio

import numpy as np

from buffer.types import SamplingParams, Trajectory, TrajectoryGroup
from rollout_pool.cancelling import end_tasks
from rollout_pool.episodes.episode import Episode
from rollout_pool.episodes.runner import EpisodeFailed, EpisodeRequest
from rollout_pool.rewards.score import Score, Scorer
from rollout_pool.sampling.sample import SampleFailed
from rollout_pool.worker.group_run import GroupRun


class GroupFailed(RuntimeError):
    """One of a group's episodes failed, so there is no group; the message says why."""


class GroupGenerator:
    """Makes groups of `group_size` episodes, any number of groups at once."""

    def __init__(
        self,
        *,
        scorer: Scorer,
        sampling: SamplingParams,
        group_size: int,
    ) -> None:
        self._scorer = scorer
        self._sampling = sampling
        self._group_size = group_size

    async def generate(self, run: GroupRun) -> TrajectoryGroup:
        """The finished group; `run` is kept up to date meanwhile.

        When it is cancelled, its episodes and their scoring end first. Raises GroupFailed.
        """
        # All begin in the same turn of the event loop, so that their requests can go out as one.
        members = [
            asyncio.create_task(self._member(run, place)) for place in range(self._group_size)
        ]
        try:
            trajectories = await asyncio.gather(*members)
        except (SampleFailed, EpisodeFailed, GroupFailed) as error:
            run.give_up(str(error))
            if isinstance(error, GroupFailed):
                raise
            raise GroupFailed(f"group {run.group_id} of prompt {run.ref.index}: {error}") from error
        finally:
            await end_tasks(members)
        return TrajectoryGroup(
            group_id=run.group_id,
            prompt=run.ref,
            trajectories=tuple(one for of_member in trajectories for one in of_member),
            sampling=self._sampling,
        )

    async def _member(self, run: GroupRun, place: int) -> list[Trajectory]:
        prompt = run.prompt
        request = EpisodeRequest(
            session=f"{run.group_id}.{place}",
            sampling=self._sampling,
            order=run.order,
            on_sample=run.note_sample,
            on_end=run.note_end,
            may_go_on=run.may_go_on,
        )
        episode = await run.source.run(prompt, request)
        score = await self._scorer.score(prompt, episode)
        run.num_unscored += bool(score.failures)
        if score.is_unscored:
            raise GroupFailed(
                f"group {run.group_id} of prompt {run.ref.index}: episode {place} could not "
                f"be scored: {score.reasons}"
            )
        return make_trajectories(episode, score, place)


def make_trajectories(episode: Episode, score: Score, place: int) -> list[Trajectory]:
    """One for each branch of a group's episode number `place`; all have the episode's reward.

    Where the episode as a whole was broken off, that is their finish reason.
    """
    columns = score.columns or tuple({} for _ in episode.branches)
    return [
        Trajectory(
            tokens=np.asarray(branch.tokens, np.int32),
            loss_mask=np.asarray(branch.loss_mask, np.uint8),
            rollout_logprobs=np.asarray(branch.logprobs, np.float32),
            version_spans=tuple(branch.version_spans),
            prompt_length=branch.prompt_length,
            reward=score.reward,
            finish_reason=branch.finish_reason if episode.end == "done" else episode.end,
            reward_parts=dict(score.parts),
            episode=place,
            columns=dict(of_branch),
        )
        for branch, of_branch in zip(episode.branches, columns, strict=True)
    ]
