"""A teacher's log-probability of every token of an episode, for on-policy distillation.

Requested from /completions of an OpenAI-compatible server that returns prompt log-probabilities
(SGLang, vLLM): the tokens are the prompt, which is echoed; the one sampled token is ignored.

    tokens             5     6     7    10
    token_logprobs   null  -1.2  -0.3  -2.0  | -0.7     of the sampled one
    teacher_logprobs   0   -1.2  -0.3  -2.0             position t: of token t, given those before

The teacher must have the student's vocabulary: tokens are sent as ids.
"""

from __future__ import annotations

import asyncio

import numpy as np

from buffer.types import FloatArray
from rollout_pool.episodes.episode import Episode
from rollout_pool.rewards.service import RemoteFailure, RemoteService
from rollout_pool.rewards.types import PartScore
from rollout_pool.tasks.task import Prompt

COLUMN = "teacher_logprobs"


class Teacher(RemoteService):
    path = "/completions"

    async def score(self, prompt: Prompt, episode: Episode, key: str) -> PartScore:
        """One [T] column for each branch, 0 at its first token."""
        tokens = [branch.tokens for branch in episode.branches]
        columns = (self._column(one, f"{key}-{place}") for place, one in enumerate(tokens))
        return PartScore(columns=tuple({COLUMN: c} for c in await asyncio.gather(*columns)))

    async def _column(self, tokens: list[int], key: str) -> FloatArray:
        body = {
            "model": self.config.model,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 1.0,
            "echo": True,
            "logprobs": 1,
        }
        return read_logprobs(await self.ask(body, key), len(tokens))


def read_logprobs(answer: dict[str, object], num_tokens: int) -> FloatArray:
    """[num_tokens]. Raises RemoteFailure if the server did not return the prompt's."""
    try:
        given = answer["choices"][0]["logprobs"]["token_logprobs"]  # type: ignore[index]
    except (KeyError, IndexError, TypeError) as error:
        raise RemoteFailure("the teacher gave no log-probabilities") from error
    if not isinstance(given, list) or len(given) not in (num_tokens, num_tokens + 1):
        number = len(given) if isinstance(given, list) else 0
        raise RemoteFailure(
            f"the teacher gave {number} log-probabilities for {num_tokens} tokens: its server must "
            "echo the prompt's (SGLang and vLLM do), and accept token ids"
        )
    if not all(isinstance(logprob, int | float) for logprob in given[1:num_tokens]):
        raise RemoteFailure("the teacher omitted the log-probabilities of some tokens")
    logprobs = np.asarray([0.0, *given[1:num_tokens]], np.float32)
    if not np.isfinite(logprobs).all() or (logprobs > 0).any():
        raise RemoteFailure("the teacher gave invalid log-probabilities")
    return logprobs
