"""From one prompt to one group: n episodes, each scored as soon as it ends.

player ──┬─ episode 3 ended ─► scorer ─┐
         ├─ episode 0 ended ─► scorer ─┼─► group, when all n are there
         └─ ...                        ┘

A group is indivisible: it has all its n episodes, or it fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from buffer.types import PromptRef, SamplingParams, Trajectory, TrajectoryGroup
from rollout_pool.cancelling import end_tasks
from rollout_pool.episodes.episode import Episode
from rollout_pool.episodes.runner import EpisodeAsk, EpisodeFailed, go_on
from rollout_pool.rewards.score import Score, Scorer
from rollout_pool.sampling.sample import Sample, SampleFailed
from rollout_pool.worker.player import Player
from rollout_pool.worker.prompts import TokenizedPrompt


class GroupFailed(RuntimeError):
    """One of a group's episodes could not be had, so there is no group; the message says why."""


@dataclass(kw_only=True, slots=True)
class _Ended:
    """The numbers of samples that have ended, added up."""

    num_tokens: int = 0
    longest: int = 0
    oldest_version: int | None = None
    num_failures: int = 0
    num_refused: int = 0
    num_wasted: int = 0

    def add(self, sample: Sample) -> None:
        self.num_tokens += len(sample.output_ids)
        self.longest = max(self.longest, len(sample.output_ids))
        self.num_failures += sample.num_failures
        self.num_refused += sample.num_refused
        self.num_wasted += sample.num_wasted
        if (version := sample.oldest_version) is not None:
            known = self.oldest_version
            self.oldest_version = version if known is None else min(known, version)


@dataclass(kw_only=True, slots=True, eq=False)
class Flight:
    """A group that is being generated, and how far it is."""

    group_id: str
    ref: PromptRef
    prompt: TokenizedPrompt
    rank: int = 0
    """Its place among the groups: the lowest is served first."""
    may_go_on: Callable[[Sample], Awaitable[None]] = go_on
    """Awaited before an interrupted sample is completed."""
    player: Player | None = None
    """Plays its episodes in place of the generator's."""
    on_give_up: Callable[[str], None] | None = None
    """Called with the reason before its episodes are ended early."""
    samples: set[Sample] = field(default_factory=set)
    """Those under way. Of one that has ended only its numbers are kept: prompts are long."""
    started: float = field(default_factory=time.monotonic)
    num_unscored: int = 0
    """Episodes of whose reward a part could not be had."""
    num_env_errors: int = 0
    """Episodes that the environment broke off."""
    _ended: _Ended = field(default_factory=_Ended, init=False)

    def note_sample(self, sample: Sample) -> None:
        """One of its samples is about to be asked for."""
        sample.rank = self.rank  # which may have changed since its episode began
        self.samples.add(sample)

    def note_end(self, sample: Sample) -> None:
        """One of its samples has ended, and nothing will change in it any more."""
        if sample in self.samples:
            self.samples.remove(sample)
            self._ended.add(sample)

    def give_up(self, why: str) -> None:
        """There will be no group: its episodes are about to be ended."""
        if self.on_give_up is not None:
            self.on_give_up(why)

    @property
    def oldest_version(self) -> int | None:
        """Of the tokens sampled so far; None before the first."""
        versions = [self._ended.oldest_version, *(one.oldest_version for one in self.samples)]
        return min((version for version in versions if version is not None), default=None)

    @property
    def num_tokens(self) -> int:
        """Sampled so far."""
        return self._ended.num_tokens + sum(len(one.output_ids) for one in self.samples)

    @property
    def longest(self) -> int:
        """Tokens of its longest sample so far."""
        return max([self._ended.longest, *(len(one.output_ids) for one in self.samples)])

    @property
    def num_failures(self) -> int:
        """Requests that failed."""
        return self._ended.num_failures + sum(one.num_failures for one in self.samples)

    @property
    def num_running(self) -> int:
        """Samples that have not ended, interrupted ones too."""
        return sum(sample.finish_reason is None for sample in self.samples)

    @property
    def num_refused(self) -> int:
        """Answers refused for their log-probabilities."""
        return self._ended.num_refused + sum(one.num_refused for one in self.samples)

    @property
    def num_wasted(self) -> int:
        """Tokens that were sampled and lost on the way."""
        return self._ended.num_wasted + sum(one.num_wasted for one in self.samples)


class GroupGenerator:
    """Makes groups of `group_size` episodes, any number of groups at once."""

    def __init__(
        self,
        *,
        player: Player,
        scorer: Scorer,
        sampling: SamplingParams,
        group_size: int,
    ) -> None:
        self._player = player
        self._scorer = scorer
        self._sampling = sampling
        self._group_size = group_size

    async def run(self, flight: Flight) -> TrajectoryGroup:
        """The finished group; `flight` is kept up to date meanwhile.

        When it is cancelled, its episodes and their scoring end first. Raises GroupFailed.
        """
        # All begin in the same turn of the event loop, so that their requests can go out as one.
        members = [
            asyncio.create_task(self._member(flight, place)) for place in range(self._group_size)
        ]
        try:
            trajectories = await asyncio.gather(*members)
        except (SampleFailed, EpisodeFailed, GroupFailed) as error:
            flight.give_up(str(error))
            if isinstance(error, GroupFailed):
                raise
            raise GroupFailed(
                f"group {flight.group_id} of prompt {flight.ref.index}: {error}"
            ) from error
        finally:
            await end_tasks(members)
        return TrajectoryGroup(
            group_id=flight.group_id,
            prompt=flight.ref,
            trajectories=tuple(one for of_member in trajectories for one in of_member),
            sampling=self._sampling,
        )

    async def _member(self, flight: Flight, place: int) -> list[Trajectory]:
        prompt = flight.prompt.prompt
        ask = EpisodeAsk(
            session=f"{flight.group_id}.{place}",
            sampling=self._sampling,
            rank=flight.rank,
            on_sample=flight.note_sample,
            on_end=flight.note_end,
            may_go_on=flight.may_go_on,
        )
        episode = await (flight.player or self._player).run(prompt, ask)
        flight.num_env_errors += episode.error is not None
        score = await self._scorer.score(prompt, episode)
        flight.num_unscored += bool(score.failures)
        if score.is_unscored:
            raise GroupFailed(
                f"group {flight.group_id} of prompt {flight.ref.index}: episode {place} could not "
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
