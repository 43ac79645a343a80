"""From one prompt to one group: n samples, each scored as soon as it ends.

sampler ──┬─ sample 3 ended ─► reward process ─┐
          ├─ sample 0 ended ─► reward process ─┼─► group, when all n are there
          └─ ...                               ┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from buffer.types import PromptRef, Trajectory, TrajectoryGroup, VersionSpan
from rollout_pool.generation import BadLogprobs, FirstToken, Generation, Refused
from rollout_pool.prompts import TokenizedPrompt, Tokenizer
from rollout_pool.rewards.pool import RewardPool
from rollout_pool.sampling import Sampler


@dataclass(kw_only=True, slots=True, eq=False)
class Flight:
    """A group that is being generated, and how far it is."""

    group_id: str
    ref: PromptRef
    prompt: TokenizedPrompt
    oldest_version: int | None = None
    """Version of the oldest token sampled so far."""
    num_tokens: int = 0
    """Sampled, in samples that have ended."""
    num_refused: int = 0
    """Samples refused for their log-probabilities."""
    num_unscored: int = 0
    """Samples whose scorer failed; their reward is 0."""

    def note_version(self, version: int) -> None:
        known = self.oldest_version
        self.oldest_version = version if known is None else min(known, version)


class GroupGenerator:
    """Makes groups of `group_size` samples, any number of groups at once."""

    def __init__(
        self, sampler: Sampler, rewards: RewardPool, tokenizer: Tokenizer, group_size: int
    ) -> None:
        self._sampler = sampler
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._group_size = group_size

    async def run(self, flight: Flight) -> TrajectoryGroup:
        """The finished group; `flight` is kept up to date meanwhile.

        When it is cancelled, the engine is told to stop. Raises SamplesFailed.
        """
        scoring: dict[int, asyncio.Task[Trajectory]] = {}
        prompts = [flight.prompt.tokens] * self._group_size
        try:
            async with aclosing(self._sampler.run(flight.group_id, prompts)) as events:
                async for event in events:
                    match event:
                        case FirstToken(version=version):
                            flight.note_version(version)
                        case Refused(error=error):
                            flight.num_refused += isinstance(error, BadLogprobs)
                        case Generation(index=sample):
                            scoring[sample] = asyncio.create_task(self._score(flight, event))
            trajectories = [await scoring[sample] for sample in range(self._group_size)]
        finally:
            for task in scoring.values():
                task.cancel()
            await asyncio.gather(*scoring.values(), return_exceptions=True)
        return TrajectoryGroup(
            group_id=flight.group_id, prompt=flight.ref, trajectories=tuple(trajectories)
        )

    async def _score(self, flight: Flight, generation: Generation) -> Trajectory:
        flight.num_tokens += len(generation.output_ids)
        flight.note_version(min(span.version for span in generation.version_spans))
        text = self._tokenizer.decode(generation.output_ids, skip_special_tokens=True)
        score = await self._rewards.score(flight.prompt.prompt, text)
        flight.num_unscored += score.failure is not None
        return make_trajectory(flight.prompt.tokens, generation, score.reward)


def make_trajectory(prompt: Sequence[int], generation: Generation, reward: float) -> Trajectory:
    """One turn: the prompt's tokens are given, those of `generation` are the model's own."""
    start, length = len(prompt), len(prompt) + len(generation.output_ids)
    loss_mask = np.zeros(length, np.uint8)
    loss_mask[start:] = 1
    logprobs = np.zeros(length, np.float32)
    logprobs[start:] = generation.logprobs
    return Trajectory(
        tokens=np.asarray([*prompt, *generation.output_ids], np.int32),
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        version_spans=tuple(
            VersionSpan(version=span.version, start=start + span.start, end=start + span.end)
            for span in generation.version_spans
        ),
        prompt_length=start,
        reward=reward,
        finish_reason=generation.finish_reason,
    )
