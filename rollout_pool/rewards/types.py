"""Scores of episodes, and the format of requests to scoring processes.

A request is one line of JSON, encoded once where the episode ended and decoded once in the process
that scores it; everything between passes on the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import msgspec
from msgspec import convert, to_builtins

from buffer.types import FloatArray
from configs.rollout_schema import TaskConfig
from rollout_pool.episodes.conversation import Message
from rollout_pool.episodes.episode import Episode
from rollout_pool.tasks.task import Prompt

T = TypeVar("T")
Columns = tuple[Mapping[str, FloatArray], ...]


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
    """A service that the reward needs gave no usable response: the reward is unknown and must not
    be trained on. If the completion is at fault (scorer crash, timeout), the part is 0."""
    left_open: str | None = None
    """The part that did not judge the episode (returned None): it is left out of its group."""
    columns: Columns = ()
    """Further per-token columns of each branch, such as a teacher's log-probabilities."""
    by_role: Mapping[str, Score] = field(default_factory=dict)
    """The scores of roles with rewards of their own, of which this one has the mean; a role that is
    missing here is left out of the group. Empty: all trajectories have this one."""

    def plus(self, part: str, weight: float, value: float) -> Score:
        """With a further part."""
        return replace(
            self,
            reward=self.reward + weight * value,
            parts={**self.parts, part: value},
            by_role={role: own.plus(part, weight, value) for role, own in self.by_role.items()},
        )

    @property
    def reasons(self) -> str:
        """All failures as text, by part."""
        return "; ".join(f"{name}: {why}" for name, why in self.failures.items())


class Scorer(Protocol):
    """Scores single episodes as they end, and groups. Implementation: EpisodeScorer (scorer.py)."""

    async def score(self, prompt: Prompt, episode: Episode) -> Score:
        """Never raises for an error of an episode or a service: see `Score.failures`."""
        ...

    async def score_group(
        self, prompt: Prompt, episodes: Sequence[Episode], scores: Sequence[Score]
    ) -> Sequence[Score]:
        """Adds the parts that score all episodes of a group together to the `scores` that the
        episodes have. If such a part fails, each of them is unscored."""
        ...


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class PartScore:
    """The result of one part. If there is a `failure`, or `is_left_open`, `value` is 0."""

    value: float = 0.0
    failure: str | None = None
    is_unscored: bool = False
    """A service failed: see Score."""
    is_left_open: bool = False
    """The completion cannot be judged."""
    waited_s: float = 0.0
    """Time for which requests of others kept all scoring processes busy."""
    of_group: tuple[float | None, ...] = ()
    """The values of all episodes, of a part that scores whole groups; None for one left open."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further named numbers from a service."""
    columns: Columns = ()
    """See Score."""
    by_role: Mapping[str, float] = field(default_factory=dict)
    """The values of roles, of which `value` is the mean; without those that cannot be judged."""


class ScoringPool(Protocol):
    """Scoring processes of the worker (RewardPool in pool.py), or of actors on other hosts
    (RemoteScoring in scorer_actors.py)."""

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
    """Number of the model's messages."""
    num_tokens: int
    """Number of tokens that the model wrote."""
    env_reward: float | None
    """Sum of the environment's rewards; None if it gave none."""
    end: str
    """"done", or why it was broken off: see Episode.end."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PartRequest:
    part: str
    """Its name in task.rewards, in a mixture after that of its task and a slash."""
    prompt: Prompt
    episodes: tuple[EpisodeView, ...]
    """One, or all of a group."""

    @property
    def episode(self) -> EpisodeView:
        return self.episodes[0]


def encode_request(part: str, prompt: Prompt, *episodes: Episode, with_messages: bool) -> bytes:
    """One line of JSON. Without messages the scorer sees only the model's last one."""
    views = tuple(
        EpisodeView(
            messages=episode.messages if with_messages else (),
            answer=episode.answer,
            num_turns=episode.num_turns,
            num_tokens=episode.num_tokens,
            env_reward=episode.env_reward,
            end=episode.end,
        )
        for episode in episodes
    )
    request = PartRequest(part=part, prompt=prompt, episodes=views)
    try:
        return msgspec.json.encode(request)
    except (UnicodeEncodeError, TypeError):  # lone surrogates of a model's text, keys like None
        return encode(request)


def part_of(request: bytes) -> bytes:
    """The bytes before the prompt, the same for all requests of a part."""
    return request[: request.find(b',"prompt":')]


@dataclass(kw_only=True, slots=True, frozen=True)
class Setup:
    """The first line that a process reads."""

    config: TaskConfig
    data: dict[str, str]
    """Identifies the data of the run: see registry.check_data."""
    timeout_s: float
    """For one part."""


def encode(value: PartRequest | Setup) -> bytes:
    return json.dumps(to_builtins(value), separators=(",", ":")).encode()


def decode(line: str, kind: type[T]) -> T:
    return convert(json.loads(line), kind)
