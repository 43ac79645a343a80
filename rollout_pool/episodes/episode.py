"""A finished episode: its tokens, assembled turn by turn, and its conversation.

    turn 1   [prompt | answer]                                          branch 0
    turn 2   [prompt | answer | observation | answer]                   extends it
    turn 3   [summary | answer]                                         begins branch 1

An episode is one branch as long as each turn's prompt extends the previous tokens; an edited or
summarised history begins a new branch. A token counts as the model's own only in the branch in
which it was sampled, so none is trained twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from buffer.types import VersionSpan
from rollout_pool.episodes.env import Message


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
    version_spans: list[VersionSpan]
    prompt_length: int
    finish_reason: str
    """Why its last turn ended."""


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


class Branches:
    """The branches of one episode, in the order in which they began."""

    def __init__(self) -> None:
        self._branches: list[Branch] = []

    def add_turn(
        self,
        prompt: Sequence[int],
        output_ids: Sequence[int],
        logprobs: Sequence[float],
        version_spans: Sequence[VersionSpan],
        finish_reason: str,
    ) -> None:
        """Adds an answer of n >= 1 tokens to `prompt`.

        `logprobs` has n numbers; `version_spans` cover [0, n), counted from the answer's first
        token. It extends the longest branch that `prompt` extends, or begins a new one.
        """
        length = len(output_ids)
        assert length > 0 and len(logprobs) == length
        assert sum(span.end - span.start for span in version_spans) == length
        tokens = list(prompt)
        branch = self._extended_by(tokens)
        if branch is None:
            branch = Branch(
                tokens=[],
                loss_mask=[],
                logprobs=[],
                version_spans=[],
                prompt_length=len(tokens),
                finish_reason=finish_reason,
            )
            self._branches.append(branch)
        num_given = len(tokens) - len(branch.tokens)
        branch.tokens += [*tokens[len(branch.tokens) :], *output_ids]
        branch.loss_mask += [0] * num_given + [1] * length
        branch.logprobs += [0.0] * num_given + list(logprobs)
        branch.version_spans += [
            VersionSpan(
                version=span.version, start=len(tokens) + span.start, end=len(tokens) + span.end
            )
            for span in version_spans
        ]
        branch.finish_reason = finish_reason

    def _extended_by(self, prompt: list[int]) -> Branch | None:
        extended = [
            branch for branch in self._branches if prompt[: len(branch.tokens)] == branch.tokens
        ]
        return max(extended, key=lambda branch: len(branch.tokens), default=None)

    def finish(self) -> list[Branch]:
        """All branches; none if no turn was added."""
        return list(self._branches)
