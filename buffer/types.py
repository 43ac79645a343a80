"""Trajectories and their groups, which go from the rollout pool to the trainer pool.

Example: a prompt of 3 tokens and a response of 4, the last two sampled after a commit:

    tokens           [ 5  6  7 | 10 11 12  2]
    loss_mask        [ 0  0  0 |  1  1  1  1]
    rollout_logprobs [ 0  0  0 | -1 -2 -1 -3]
    version_spans    (7, 3, 5) (8, 5, 7)        -> min_version 7
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
MaskArray = NDArray[np.uint8]

CANDIDATES_COLUMN = "candidates"
"""Column [T, k] int32 of a trajectory whose sampling is truncated: the ids among which each token
was drawn, then -1; all -1 where the model did not sample."""
TEMPERATURE_COLUMN = "temperature"
"""Column [T] float32 of a trajectory with tokens that were sampled at another temperature than
their group's: that of each token, 1 where the model did not sample."""
ROUTES_COLUMN = "routes"
"""Column [T, layers * experts of a token] uint8 or uint16 of a trajectory of a mixture of experts:
the experts to which the engine sent each token, by layer; all 0 where they are not known, as of the
last token, since the experts of a token differ."""
ADVANTAGE_COLUMN = "advantage"
"""Column [T] float32 of a trajectory whose environment gave its role a finished advantage."""
MAX_VERSION = 2**21 - 1
"""The highest policy version: the buffer's index orders groups by version * 2^32 + a sequence
number, which Redis keeps as a double, exact below 2^53."""


def digest_of(picture: bytes) -> str:
    """SHA-256 of a picture's file, in hexadecimal digits."""
    return sha256(picture).hexdigest()


class Rerun(Enum):
    """The rule by which the prompt of an abandoned group runs again."""

    never = "never"
    as_stale = "as_stale"
    """By the rules for stale groups (buffer.on_stale, buffer.max_retries)."""
    always = "always"
    """Regardless of these rules, and without counting as a retry."""


@dataclass(kw_only=True, slots=True, frozen=True)
class VersionSpan:
    """Tokens [start, end) of a trajectory were sampled by policy `version`."""

    version: int
    start: int
    end: int

    def __post_init__(self) -> None:
        assert self.version >= 0 and 0 <= self.start < self.end, self


@dataclass(kw_only=True, slots=True, frozen=True)
class SamplingParams:
    """How tokens were sampled; the defaults sample from the policy's own distribution."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def is_truncated(self) -> bool:
        """A token is drawn from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k != -1 or self.min_p > 0


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Trajectory:
    """T consecutive tokens; `loss_mask` marks the model's own.

    An episode is one trajectory, or several if its history was rewritten.
    """

    tokens: IntArray
    """[T] the prompt and everything after it."""
    loss_mask: MaskArray
    """[T] 1 where the model sampled the token and it is trained on."""
    rollout_logprobs: FloatArray
    """[T] natural log-probability under the policy that sampled it; 0 where loss_mask is 0."""
    version_spans: tuple[VersionSpan, ...]
    """Ascending and disjoint; together they cover at least the tokens with loss_mask 1."""
    prompt_length: int
    reward: float
    finish_reason: str
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    episode: int = 0
    """Index of the episode in its group."""
    role: str = ""
    """Which of the episode's roles wrote it; empty in an episode without roles."""
    columns: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)
    """Further typed per-token columns, each [T] or [T, k]."""
    pictures: tuple[str, ...] = ()
    """Digests of the pictures whose places are among its tokens, in order: `digest_of`."""

    def __post_init__(self) -> None:
        length = len(self.tokens)
        assert self.loss_mask.shape == self.rollout_logprobs.shape == (length,)
        assert 0 <= self.prompt_length <= length
        assert all(len(column) == length for column in self.columns.values())

    @property
    def player(self) -> tuple[int, str]:
        """Its episode and role. Trajectories of one player have the same reward, which counts once
        among those of its role in the group, and share the weight of one trajectory."""
        return self.episode, self.role

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def is_finished(self) -> bool:
        """It has a finished advantage, which no baseline changes."""
        return ADVANTAGE_COLUMN in self.columns

    @property
    def num_trainable_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def min_version(self) -> int | None:
        """Version of the oldest trainable token; None if no token is trainable."""
        return min(self.tokens_by_version, default=None)

    @property
    def tokens_by_version(self) -> Mapping[int, int]:
        """Number of trainable tokens of each version that sampled any, oldest version first."""
        counts: dict[int, int] = {}
        for span in self.version_spans:
            trainable = int(np.count_nonzero(self.loss_mask[span.start : span.end]))
            if trainable:
                counts[span.version] = counts.get(span.version, 0) + trainable
        return counts if len(counts) < 2 else dict(sorted(counts.items()))

    def token_versions(self) -> IntArray:
        """[T] policy version of each token, -1 where no policy sampled it."""
        versions = np.full(self.num_tokens, -1, np.int32)
        for span in self.version_spans:
            versions[span.start : span.end] = span.version
        return versions


@dataclass(kw_only=True, slots=True, frozen=True)
class PromptRef:
    """Identifies one prompt of a task stream, so that it can be run again.

    `index` is its position in the stream; the task rebuilds the prompt from it.
    """

    task: str
    index: int
    attempt: int = 0
    """How often its group has gone stale."""
    reruns: int = 0
    """How often a worker, or the process of its environment, died while running it. Not stored with
    a pushed group: a prompt whose group was completed kills none."""

    @property
    def is_suspect(self) -> bool:
        """Its worker runs it alone: two processes that ran it have died. If one more does,
        it is quarantined."""
        return self.reruns >= 2


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class TrajectoryGroup:
    """The n trajectories of one prompt; pushed, leased and trained as one."""

    group_id: str
    prompt: PromptRef
    trajectories: tuple[Trajectory, ...]
    sampling: SamplingParams = SamplingParams()
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    """The files of its trajectories' pictures by digest: each is kept once, however many
    trajectories show it."""

    def __post_init__(self) -> None:
        assert self.trajectories, self.group_id

    @property
    def num_tokens(self) -> int:
        return sum(t.num_tokens for t in self.trajectories)

    @property
    def num_pairs(self) -> int:
        """Pairs of a token and one before it, which attention computes: T²/2 of each trajectory."""
        return sum(t.num_tokens**2 for t in self.trajectories) // 2

    @property
    def num_bytes(self) -> int:
        """Size of its arrays: exact in memory, approximate in Redis."""
        total = 0
        for t in self.trajectories:
            total += t.tokens.nbytes + t.loss_mask.nbytes + t.rollout_logprobs.nbytes
            for column in t.columns.values():
                total += column.nbytes
        return total + sum(map(len, self.pictures.values()))

    def pictures_of(self, trajectory: Trajectory) -> tuple[bytes, ...]:
        """The files of its pictures, in the order of their places."""
        return tuple(self.pictures[digest] for digest in trajectory.pictures)

    @property
    def num_trainable_tokens(self) -> int:
        return sum(t.num_trainable_tokens for t in self.trajectories)

    @property
    def rewards_by_player(self) -> Mapping[tuple[int, str], float]:
        """Reward of each player, in the order of their first trajectories."""
        return {t.player: t.reward for t in self.trajectories}

    @property
    def roles(self) -> list[str]:
        """In alphabetical order; one, the empty one, without roles."""
        return sorted({t.role for t in self.trajectories})

    @property
    def teaches(self) -> bool:
        """Rewards of a role differ between its episodes, or there is a finished advantage."""
        rewards = {(role, reward) for (_, role), reward in self.rewards_by_player.items()}
        return len(rewards) > len(self.roles) or any(
            t.columns[ADVANTAGE_COLUMN].any() for t in self.trajectories if t.is_finished
        )

    @property
    def tokens_by_version(self) -> Mapping[int, int]:
        """Number of trainable tokens of each version that sampled any, oldest version first."""
        counts: dict[int, int] = {}
        for trajectory in self.trajectories:
            for version, number in trajectory.tokens_by_version.items():
                counts[version] = counts.get(version, 0) + number
        return dict(sorted(counts.items()))

    @property
    def min_version(self) -> int:
        """Version of the group's oldest trainable token, which the staleness gate checks."""
        versions = self.tokens_by_version
        assert versions, f"group {self.group_id} has no trainable token"
        return min(versions)
