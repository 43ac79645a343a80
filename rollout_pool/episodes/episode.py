"""An episode when it is over: its tokens, put together turn by turn, and its conversation.

    turn 1   [prompt | answer]                                          branch 0
    turn 2   [prompt | answer | observation | answer]                   extends it
    turn 3   [summary | answer]                                         begins branch 1

An episode is one branch as long as each turn's prompt extends the tokens that are there; where its
history is edited or summarised a new one begins. A token counts as the model's own only in the
branch in which it was sampled, so none is trained twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from buffer.types import VersionSpan
from rollout_pool.episodes.env import Message


@dataclass(kw_only=True, slots=True, eq=False)
class Branch:
    """Tokens in one piece: a prompt, and turns that each extend what was there before.

    Lists of the same length T but for the spans; positions count from the first prompt token.
    """

    tokens: list[int]
    loss_mask: list[int]
    """1 where the model wrote the token."""
    logprobs: list[float]
    """0 where it did not."""
    version_spans: list[VersionSpan]
    prompt_length: int
    finish_reason: str
    """How its last turn ended."""


@dataclass(kw_only=True, slots=True, eq=False)
class Episode:
    """A finished episode."""

    branches: list[Branch]
    """One, or several where the history was rewritten; each has a token that the model wrote."""
    messages: tuple[Message, ...]
    """The whole conversation as it was at the end of the last branch."""
    end: str
    """"done", "max_turns", "length" (no room for another turn), "turn_timeout", "episode_timeout",
    "env_error"."""
    num_turns: int
    env_reward: float | None = None
    """Sum of what the environment gave; None if it gave nothing."""
    env_parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    """What the environment raised, in words."""

    @property
    def answer(self) -> str:
        """The model's last words."""
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
        """One answer of n tokens, at least 1, to `prompt`.

        `logprobs` has n numbers; `version_spans` cover [0, n), counted from the answer's first
        token. Of several branches that `prompt` extends, the longest is taken.
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
