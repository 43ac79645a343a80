"""A teacher's log-probability of every token of an episode, for on-policy distillation.

From /completions of an OpenAI-compatible server that gives log-probabilities of its prompt (SGLang,
vLLM): the tokens go in as the prompt, come back as an echo, and one token is sampled and left out.

    tokens             5     6     7    10
    token_logprobs   null  -1.2  -0.3  -2.0  | -0.7     of the sampled one
    teacher_logprobs   0   -1.2  -0.3  -2.0             position t: of token t, given those before

The teacher must have the student's vocabulary: tokens go there by number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from buffer.types import FloatArray
from configs.rollout_schema import RewardConfig
from rollout_pool.episodes.episode import Branch
from rollout_pool.rewards.service import RemoteFailure, RemoteService

COLUMN = "teacher_logprobs"


class Teacher:
    def __init__(self, part: str, config: RewardConfig) -> None:
        self._service = RemoteService(part, config, "/completions")
        self._model = config.model

    async def columns(self, branches: Sequence[Branch], key: str) -> list[dict[str, FloatArray]]:
        """One [T] column for each branch, 0 at its first token. Raises RemoteFailure."""
        asked = (self._ask(b.tokens, f"{key}-{place}") for place, b in enumerate(branches))
        return [{COLUMN: column} for column in await asyncio.gather(*asked)]

    async def close(self) -> None:
        await self._service.close()

    async def _ask(self, tokens: list[int], key: str) -> FloatArray:
        body = {
            "model": self._model,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 1.0,
            "echo": True,
            "logprobs": 1,
        }
        return read_logprobs(await self._service.ask(body, key), len(tokens))


def read_logprobs(answer: dict[str, object], num_tokens: int) -> FloatArray:
    """[num_tokens] Raises RemoteFailure if the server gave none of its prompt."""
    try:
        given = answer["choices"][0]["logprobs"]["token_logprobs"]  # type: ignore[index]
    except (KeyError, IndexError, TypeError) as error:
        raise RemoteFailure("the teacher gave no log-probabilities") from error
    if not isinstance(given, list) or len(given) not in (num_tokens, num_tokens + 1):
        number = len(given) if isinstance(given, list) else 0
        raise RemoteFailure(
            f"the teacher gave {number} log-probabilities for {num_tokens} tokens: its server must "
            "echo the prompt's (SGLang and vLLM do), and take tokens by number"
        )
    if not all(isinstance(logprob, int | float) for logprob in given[1:num_tokens]):
        raise RemoteFailure("the teacher left out log-probabilities of some tokens")
    logprobs = np.asarray([0.0, *given[1:num_tokens]], np.float32)
    if not np.isfinite(logprobs).all() or (logprobs > 0).any():
        raise RemoteFailure("the teacher gave log-probabilities that are none")
    return logprobs
