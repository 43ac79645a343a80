"""One part of one episode's reward, on its way to a scoring process and back.

A request is one line of JSON, written once where the episode ended and read once by the process
that answers it; whatever lies between hands on the bytes.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Protocol

from rollout_pool.episodes.env import Message, ToolCall
from rollout_pool.episodes.episode import Episode
from rollout_pool.tasks.task import Prompt


@dataclass(kw_only=True, slots=True, frozen=True)
class PartScore:
    """`failure` says why there is no honest value; `value` is then 0."""

    value: float
    failure: str | None = None
    waited_s: float = 0.0
    """Until a scoring process was free."""


class ScoringPool(Protocol):
    """Scoring processes, wherever they are."""

    async def score(self, request: bytes) -> PartScore:
        """Of one part. Never raises for what a request does to a process."""
        ...


@dataclass(kw_only=True, slots=True, frozen=True)
class EpisodeView:
    """What a reward function of a user sees of an episode."""

    messages: tuple[Message, ...]
    """The whole conversation."""
    answer: str
    """The model's last words."""
    num_turns: int
    """Answers of the model."""
    env_reward: float | None
    """Sum of what the environment gave; None if it gave nothing."""
    end: str
    """"done", or why it was broken off: see Episode.end."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PartRequest:
    part: str
    """Key in task.rewards; "" is the task's own score."""
    prompt: Prompt
    episode: EpisodeView


def encode_request(part: str, prompt: Prompt, episode: Episode, *, with_messages: bool) -> bytes:
    """One line. Without its messages an episode is scored by its answer alone."""
    return json.dumps(
        {
            "part": part,
            "prompt": dataclasses.asdict(prompt),
            "answer": episode.answer,
            "num_turns": episode.num_turns,
            "env_reward": episode.env_reward,
            "end": episode.end,
            "messages": [dataclasses.asdict(m) for m in episode.messages if with_messages],
        }
    ).encode()


def decode_request(line: str) -> PartRequest:
    fields: dict[str, Any] = json.loads(line)
    return PartRequest(
        part=fields["part"],
        prompt=Prompt(**fields["prompt"]),
        episode=EpisodeView(
            messages=tuple(_message(message) for message in fields["messages"]),
            answer=fields["answer"],
            num_turns=fields["num_turns"],
            env_reward=fields["env_reward"],
            end=fields["end"],
        ),
    )


def _message(fields: dict[str, Any]) -> Message:
    calls = tuple(ToolCall(**call) for call in fields.pop("tool_calls"))
    return Message(**fields, tool_calls=calls)
