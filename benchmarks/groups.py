"""Groups of a given size, as a rollout worker makes them, and their bytes."""

from __future__ import annotations

import numpy as np
import torch

from buffer.types import PromptRef, Trajectory, TrajectoryGroup, VersionSpan

_PROMPT = PromptRef(task="bench", index=0)


class GroupMaker:
    """Makes groups of `size` trajectories of `num_tokens`, sampled wholly by version 0."""

    def __init__(self, num_tokens: int, size: int = 8) -> None:
        dice = np.random.default_rng(0)
        prompt_length = num_tokens // 8
        self._trajectories = tuple(
            _trajectory(dice, num_tokens, prompt_length, i) for i in range(size)
        )

    def make(self, group_id: str) -> TrajectoryGroup:
        return TrajectoryGroup(group_id=group_id, prompt=_PROMPT, trajectories=self._trajectories)


def _trajectory(
    dice: np.random.Generator, num_tokens: int, prompt_length: int, episode: int
) -> Trajectory:
    mask = np.ones(num_tokens, np.uint8)
    mask[:prompt_length] = 0
    logprobs = np.where(mask, -dice.exponential(0.5, num_tokens), 0).astype(np.float32)
    return Trajectory(
        tokens=dice.integers(0, 150_000, num_tokens).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=logprobs,
        version_spans=(VersionSpan(version=0, start=prompt_length, end=num_tokens),),
        prompt_length=prompt_length,
        reward=1.0,
        finish_reason="stop",
        episode=episode,
    )


def padded_tensors(group: TrajectoryGroup) -> dict[str, torch.Tensor]:
    """The group as verl's agent loop hands it on: [n, T] tensors of 8 bytes a number."""
    tokens = torch.stack([torch.from_numpy(t.tokens.astype(np.int64)) for t in group.trajectories])
    mask = torch.stack([torch.from_numpy(t.loss_mask.astype(np.int64)) for t in group.trajectories])
    logprobs = torch.stack([torch.from_numpy(t.rollout_logprobs) for t in group.trajectories])
    prompt_length = group.trajectories[0].prompt_length
    return {
        "prompts": tokens[:, :prompt_length].clone(),
        "responses": tokens[:, prompt_length:].clone(),
        "response_mask": mask[:, prompt_length:].clone(),
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "position_ids": torch.arange(tokens.shape[1]).repeat(len(tokens), 1),
        "rollout_log_probs": logprobs[:, prompt_length:].clone(),
        "rm_scores": torch.zeros_like(logprobs[:, prompt_length:]),
    }
