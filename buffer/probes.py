"""Texts by which trainer and engines show that they compute the same policy (pure).

    ████████████████████████▓▓▓▓  a text of real prompts, as long as the longest trajectory
    ██████████▓▓▓▓  ███▓▓▓▓  ...  and its beginnings, each half as long as the one before

Each side gives the last tokens (▓) their log-probabilities, at temperature 1. The lengths tell
where the two part: a feature such as a sliding window shows only beyond some length.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from configs.run_files import Scalar

COMPARED_TOKENS = 256
"""At the end of each. All of them would cost an engine the logits of whole texts at once."""
SHORTEST = 8


def beginnings(num_tokens: int) -> list[tuple[int, int]]:
    """The length of each, the shortest first, and where its compared tokens begin."""
    lengths = [num_tokens]
    while lengths[0] >= 2 * SHORTEST:
        lengths.insert(0, lengths[0] // 2)
    return [(length, max(1, length - COMPARED_TOKENS)) for length in lengths]


@dataclass(kw_only=True, slots=True, frozen=True)
class Probes:
    """A text, and the trainer's log-probabilities of it with the weights of one version."""

    version: int
    text: Sequence[int]
    logprobs: Sequence[Sequence[float]]
    """For each beginning, its compared tokens' log-probabilities."""
    most: float
    """Mean difference, in nats, that the dtypes of both sides explain."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Probes | None:
        """None for what no trainer has written."""
        try:
            found = cls(**json.loads(text))
            is_whole = found.compare("itself", found.logprobs).problem is None
        except (ValueError, TypeError, RecursionError):
            return None
        return found if is_whole else None

    @property
    def texts(self) -> list[tuple[list[int], int]]:
        """Each beginning, and where its compared tokens begin."""
        return [(list(self.text[:length]), start) for length, start in beginnings(len(self.text))]

    def compare(self, engine: str, logprobs: Sequence[Sequence[float]]) -> Agreement:
        """`logprobs`: those of `engine`, in the order of the trainer's."""
        with np.errstate(invalid="ignore"):  # infinite on both sides
            apart = [np.abs(np.subtract(*two)) for two in zip(self.logprobs, logprobs, strict=True)]
        found = {
            length: _Apart(float(one.mean()), float(one.max()))
            for (length, _), one in zip(beginnings(len(self.text)), apart, strict=True)
        }
        return Agreement(engine=engine, version=self.version, most=self.most, found=found)


@dataclass(slots=True, frozen=True)
class _Apart:
    """|trainer - engine|, in nats a token."""

    mean: float
    largest: float


@dataclass(kw_only=True, slots=True, frozen=True)
class Agreement:
    """How far an engine's log-probabilities are from the trainer's."""

    engine: str
    version: int
    most: float
    found: dict[int, _Apart]
    """By length, the shortest first."""

    @property
    def mean(self) -> float:
        """At the length at which it is largest."""
        return max(apart.mean for apart in self.found.values())

    @property
    def problem(self) -> str | None:
        """The error for the user; None if they agree."""
        # Not above: a NaN is no agreement.
        parting = [n for n, apart in self.found.items() if not apart.mean <= self.most]
        if not parting:
            return None
        first, agreed = parting[0], max((n for n in self.found if n < parting[0]), default=0)
        apart = self.found[first]
        fix = (
            "Their weights differ (the engine's log names those that its loader has skipped), or "
            "one side ignores a field of config.json or has another by rollout.engine.extra_args"
        )
        if agreed:
            fix = (
                f"At {agreed} tokens they agree, so they part at a length: one side ignores a "
                "field of config.json such as sliding_window or rope_parameters; correct it, or "
                f"set rollout.max_prompt_tokens + rollout.max_response_tokens to at most {agreed}"
            )
        return (
            f"engines and trainer do not compute the same policy. Of a text of {first} tokens, "
            f"{self.engine} (the engines' side, SGLang) and the trainer's side (transformers) give "
            f"the last tokens log-probabilities that differ by {apart.mean:.2g} nats on average "
            f"and {apart.largest:.2g} at most, at version {self.version}; their dtypes explain "
            f"{self.most:g} on average. {fix}"
        )

    def record(self) -> dict[str, Scalar]:
        """Flat, for the metrics."""
        values: dict[str, Scalar] = {
            "engine": self.engine,
            "version": self.version,
            "mean": self.mean,
            "largest": max(apart.largest for apart in self.found.values()),
            "most": self.most,
        }
        return values if self.problem is None else {**values, "error": self.problem}
