"""Scores of episodes, and the format of requests to scoring processes.

A request is one line of JSON, encoded once where the episode ended and decoded once in the process
that answers it; everything between passes on the bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from buffer.types import FloatArray
from configs.choices import RewardKind, TaskKind, ToolParser
from configs.rollout_schema import RewardConfig, TaskConfig
from rollout_pool.episodes.env import Message, ToolCall
from rollout_pool.episodes.episode import Episode
from rollout_pool.tasks.task import Prompt


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Score:
    """The reward of one episode."""

    reward: float
    """The weighted sum of the parts."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Unweighted, by name."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Failed part -> reason; it counts as 0 in the sum."""
    is_unscored: bool = False
    """A service that the reward needs gave no usable answer: the reward is unknown and must not be
    trained on. If the completion is at fault (scorer crash, timeout), the part is 0."""
    columns: tuple[Mapping[str, FloatArray], ...] = ()
    """Further per-token columns of each branch, such as a teacher's log-probabilities."""

    @property
    def reasons(self) -> str:
        """All failures as text, by part."""
        return "; ".join(f"{name}: {why}" for name, why in self.failures.items())


class Scorer(Protocol):
    """Scores single episodes as they end."""

    async def score(self, prompt: Prompt, episode: Episode) -> Score:
        """Never raises for an error of an episode or a service: see `Score.failures`."""
        ...


@dataclass(kw_only=True, slots=True, frozen=True)
class PartScore:
    """If there is a `failure`, `value` is 0."""

    value: float
    failure: str | None = None
    waited_s: float = 0.0
    """Time until a scoring process was free."""


class ScoringPool(Protocol):
    """Scoring processes of the worker, or of actors on other hosts."""

    async def start(self) -> None:
        """Waits until all are ready. Raises ValueError if the task refuses its config."""
        ...

    async def score(self, request: bytes) -> PartScore:
        """Scores one part. Never raises if a request breaks its process."""
        ...

    async def close(self) -> None: ...


@dataclass(kw_only=True, slots=True, frozen=True)
class EpisodeView:
    """An episode as a user's reward function sees it."""

    messages: tuple[Message, ...]
    """The whole conversation."""
    answer: str
    """The model's last message."""
    num_turns: int
    """Number of the model's answers."""
    env_reward: float | None
    """Sum of the environment's rewards; None if it gave none."""
    end: str
    """"done", or why it was broken off: see Episode.end."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PartRequest:
    part: str
    """Key in task.rewards; "" is the task's own score."""
    prompt: Prompt
    episode: EpisodeView


def encode_request(part: str, prompt: Prompt, episode: Episode, *, with_messages: bool) -> bytes:
    """One line of JSON. Without messages the scorer sees only the answer."""
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


def encode_setup(factory: str, config: TaskConfig, timeout_s: float) -> bytes:
    """The first line that a process reads."""
    setup = {"factory": factory, "config": dataclasses.asdict(config), "timeout_s": timeout_s}
    return json.dumps(setup, default=lambda choice: choice.name).encode()


def decode_setup(line: str) -> tuple[str, TaskConfig, float]:
    setup = json.loads(line)
    fields = setup["config"]
    rewards = {
        name: RewardConfig(**{**reward, "kind": RewardKind[reward["kind"]]})
        for name, reward in fields.pop("rewards").items()
    }
    kind, parser = TaskKind[fields.pop("kind")], ToolParser[fields.pop("tool_parser")]
    config = TaskConfig(**fields, kind=kind, tool_parser=parser, rewards=rewards)
    return setup["factory"], config, setup["timeout_s"]
