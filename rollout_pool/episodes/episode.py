"""A finished episode: its tokens, assembled turn by turn, and its conversation.

    turn 1   [prompt | answer]                                          branch 0
    turn 2   [prompt | answer | observation | answer]                   extends it
    turn 3   [summary | answer]                                         begins branch 1

An episode is one branch as long as each turn's prompt extends the previous tokens; an edited or
summarised history begins a new branch. A token counts as the model's own only in the branch in
which it was sampled, so none is trained twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from buffer.types import VersionSpan
from rollout_pool.episodes.env import Message
from rollout_pool.sampling.sample import Sample

MAX_PARTS = 100
"""Named parts of a reward that a program or a service gives; each becomes a metric."""
MAX_PART_CHARS = 200


@dataclass(kw_only=True, slots=True, eq=False)
class Branch:
    """One token sequence: a prompt, and turns that each extend it.

    All lists but the spans have the same length T; positions count from the first prompt token.
    """

    tokens: list[int]
    loss_mask: list[int]
    """1 where the model wrote the token."""
    logprobs: list[float]
    """0 elsewhere."""
    candidates: list[Sequence[int]]
    """`Sample.candidates` of the model's tokens; empty elsewhere, and without truncated sampling.
    """
    version_spans: list[VersionSpan]
    prompt_length: int
    finish_reason: str
    """Why its last turn ended."""
    temperatures: list[float] = field(default_factory=list)
    """Those at which the model's tokens were sampled, 1 elsewhere; empty: all at the group's."""


@dataclass(kw_only=True, slots=True, eq=False)
class Episode:
    """A finished episode."""

    branches: list[Branch]
    """One, or several where the history was rewritten; each has a sampled token."""
    messages: tuple[Message, ...]
    """The whole conversation at the end of the last branch."""
    end: str
    """"done", "max_turns", "length" (no room for another turn), "turn_timeout", "episode_timeout",
    "env_error"."""
    num_turns: int
    env_reward: float | None = None
    """Sum of the environment's rewards; None if it gave none."""
    env_parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    """The message of what the environment raised."""

    @property
    def answer(self) -> str:
        """The model's last message."""
        mine = [message for message in self.messages if message.role == "assistant"]
        return mine[-1].content if mine else ""


def check_parts(names: Collection[str]) -> None:
    """Raises ValueError for names of parts that are too many, too long, or no Unicode text."""
    if len(names) > MAX_PARTS:
        raise ValueError(f"a reward has at most {MAX_PARTS} parts, not {len(names)}")
    for name in names:
        if len(name) > MAX_PART_CHARS or not name.isprintable():  # a lone surrogate is not
            raise ValueError(
                f"{name[:MAX_PART_CHARS]!a}: the name of a part has at most {MAX_PART_CHARS} "
                "characters, all of them printable"
            )


def add_turn(branches: list[Branch], sample: Sample) -> None:
    """Adds the answer of an ended sample, which has a token, to the branches of an episode.

    It extends the longest branch that the sample's prompt extends, or begins a new one.
    """
    prompt, length = sample.prompt, len(sample.output_ids)
    assert length > 0 and len(sample.logprobs) == length and sample.finish_reason is not None
    assert len(sample.candidates) == length * sample.has_candidates
    assert sum(span.end - span.start for span in sample.version_spans) == length
    extended = [branch for branch in branches if prompt[: len(branch.tokens)] == branch.tokens]
    branch = max(extended, key=lambda branch: len(branch.tokens), default=None)
    if branch is None:
        branch = Branch(
            tokens=[],
            loss_mask=[],
            logprobs=[],
            candidates=[],
            version_spans=[],
            prompt_length=len(prompt),
            finish_reason=sample.finish_reason,
        )
        branches.append(branch)
    given = prompt[len(branch.tokens) :]
    branch.tokens += [*given, *sample.output_ids]
    branch.loss_mask += [0] * len(given) + [1] * length
    branch.logprobs += [0.0] * len(given) + sample.logprobs
    branch.candidates += [()] * len(given)
    branch.candidates += sample.candidates or [()] * length
    branch.temperatures += [1.0] * len(given) + [sample.sampling.temperature] * length
    branch.version_spans += [
        VersionSpan(
            version=span.version, start=len(prompt) + span.start, end=len(prompt) + span.end
        )
        for span in sample.version_spans
    ]
    branch.finish_reason = sample.finish_reason
