"""What an episode is worth, and one part of it on its way to a scoring process and back.

A request is one line of JSON, written once where the episode ended and read once by the process
that answers it; whatever lies between hands on the bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from buffer.types import FloatArray
from rollout_pool.episodes.env import Message, ToolCall
from rollout_pool.episodes.episode import Episode
from rollout_pool.tasks.task import Prompt


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Score:
    """Of one episode."""

    reward: float
    """The weighted sum of the parts."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Unweighted, by name."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Part -> why it could not be had; it counts as 0 in the sum."""
    is_unscored: bool = False
    """A service that the reward needs gave no usable answer: what the episode is worth is not
    known, and nothing may be learned from it. Where the completion itself is to blame (it broke its
    scorer, or took too long in it) the part is an honest 0."""
    columns: tuple[Mapping[str, FloatArray], ...] = ()
    """For each branch further per-token columns, such as a teacher's log-probabilities; empty if
    there are none."""

    @property
    def reasons(self) -> str:
        """Of all failures, by part."""
        return "; ".join(f"{name}: {why}" for name, why in self.failures.items())


class Scorer(Protocol):
    """Scores episodes as they end, each by itself, while others still go on."""

    async def score(self, prompt: Prompt, episode: Episode) -> Score:
        """Never raises for what an episode or a remote service did: see `Score.failures`."""
        ...


@dataclass(kw_only=True, slots=True, frozen=True)
class PartScore:
    """`failure` says why there is no honest value; `value` is then 0."""

    value: float
    failure: str | None = None
    waited_s: float = 0.0
    """Until a scoring process was free."""


class ScoringPool(Protocol):
    """Scoring processes: a worker's own, or those of actors on other hosts."""

    async def start(self) -> None:
        """Until all are ready. Raises ValueError if the task refuses its config."""
        ...

    async def score(self, request: bytes) -> PartScore:
        """Of one part. Never raises for what a request does to a process."""
        ...

    async def close(self) -> None: ...


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
