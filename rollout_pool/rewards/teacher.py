"""A teacher's log-probability of every token of an episode, for on-policy distillation.

A URL that ends in /v1 is that of an OpenAI-compatible server which returns prompt log-probabilities
(vLLM, SGLang): the tokens are the prompt, which is echoed. Any other is that of an SGLang server.

    tokens             5     6     7    10
    token_logprobs   null  -1.2  -0.3  -2.0  | -0.7     of a sampled one, ignored
    teacher_logprobs   0   -1.2  -0.3  -2.0             position t: of token t, given those before

They are the teacher's at temperature 1. It must have the student's vocabulary: tokens are sent as
ids. `probe` finds out before a run starts, as far as the server shows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from buffer.types import FloatArray
from configs.rollout_schema import RewardConfig
from rollout_pool.engines.sglang.client import GENERATE_PATH
from rollout_pool.episodes.episode import Episode
from rollout_pool.episodes.tokenizer import Tokenizer
from rollout_pool.rewards.service import RemoteFailure, RemoteService
from rollout_pool.rewards.types import PartScore
from rollout_pool.sampling.engine_client import ROUNDING
from rollout_pool.tasks.task import Prompt, Task

COLUMN = "teacher_logprobs"
PROBE = "Two and three make 5; what do four and five make?"


class Teacher(RemoteService):
    max_values = 2**23  # four for each token

    def __init__(self, part: str, config: RewardConfig, task: Task | None) -> None:
        assert config.url is not None, part
        self._is_openai = config.url.rstrip("/").endswith("/v1")
        self.path = "/completions" if self._is_openai else GENERATE_PATH
        super().__init__(part, config, task)

    async def score(self, prompt: Prompt, episode: Episode, key: str) -> PartScore:
        """One [T] column for each branch, 0 at its first token."""
        asked = (
            self.read(branch.tokens, f"{key}-{place}")
            for place, branch in enumerate(episode.branches)
        )
        found = await asyncio.gather(*asked)
        return PartScore(columns=tuple({COLUMN: logprobs} for logprobs, _ in found))

    async def read(
        self, tokens: list[int], key: str, *, wants_texts: bool = False
    ) -> tuple[FloatArray, list[str] | None]:
        """[T] log-probabilities, and the texts of the tokens if the server tells them."""
        body: dict[str, object] = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_text_in_logprobs": wants_texts,
        }
        if self._is_openai:
            body = {
                "model": self.config.model,
                "prompt": tokens,
                "max_tokens": 1,
                "temperature": 1.0,
                "echo": True,
                "logprobs": 1,
            }
        response = await self.ask(body, key)
        try:
            if self._is_openai:
                found = response["choices"][0]["logprobs"]
                logprobs, texts = found["token_logprobs"], found.get("tokens")
            else:
                logprobs, texts = _sglang_logprobs(response, tokens)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise RemoteFailure("the teacher gave no log-probabilities") from error
        return check_logprobs(logprobs, len(tokens)), texts

    @classmethod
    async def probe(cls, part: str, config: RewardConfig, tokenizer: Tokenizer) -> None:
        """Raises ValueError for a teacher that cannot be reached, that gives no log-probabilities,
        or whose vocabulary is another."""
        what = f"task.rewards.{part}.url={config.url!r}"
        teacher = cls(part, config, None)
        try:
            tokens = tokenizer.encode(PROBE, add_special_tokens=False)
            try:
                _, texts = await teacher.read(tokens, "probe", wants_texts=True)
            except RemoteFailure:  # an SGLang server without a tokenizer has none
                _, texts = await teacher.read(tokens, "probe")
            if texts is not None and not _are_of(texts, tokens, tokenizer):
                shown = [tokenizer.decode([token]) for token in tokens[:4]]
                raise ValueError(
                    f"{what}: the teacher takes the student's tokens for others: {texts[:4]}, "
                    f"which are {shown} to the student; choose a teacher with the student's "
                    "vocabulary"
                )
            # The last id that the student may write.
            await teacher.read([*tokens, len(tokenizer) - 1], "probe")
        except RemoteFailure as error:
            raise ValueError(
                f"{what}: no log-probabilities for {len(tokens)} tokens of the student: {error}; "
                "start the teacher's server, correct the address, or choose one with the student's "
                "vocabulary"
            ) from error
        finally:
            await teacher.close()


def _sglang_logprobs(
    response: dict[str, Any], tokens: list[int]
) -> tuple[list[object], list[str] | None]:
    found = response["meta_info"]["input_token_logprobs"]
    logprobs = [logprob for logprob, *_ in found]
    ids = [token for _, token, *_ in found]
    texts = [text for _, _, text, *_ in found]
    if ids != tokens:
        raise RemoteFailure("the teacher gave the log-probabilities of other tokens")
    return logprobs, None if None in texts else texts


def check_logprobs(given: object, num_tokens: int) -> FloatArray:
    """[num_tokens]. Raises RemoteFailure if the server did not return the prompt's."""
    if not isinstance(given, list) or len(given) not in (num_tokens, num_tokens + 1):
        number = len(given) if isinstance(given, list) else 0
        raise RemoteFailure(
            f"the teacher gave {number} log-probabilities for {num_tokens} tokens: its server must "
            "echo the prompt's (SGLang and vLLM do), and accept token ids"
        )
    if not all(isinstance(logprob, int | float) for logprob in given[1:num_tokens]):
        raise RemoteFailure("the teacher omitted the log-probabilities of some tokens")
    try:
        logprobs = np.asarray([0.0, *given[1:num_tokens]], np.float32)
    except OverflowError as error:  # JSON's integers are of any size
        raise RemoteFailure("the teacher gave invalid log-probabilities") from error
    if not np.isfinite(logprobs).all() or (logprobs > ROUNDING).any():
        raise RemoteFailure("the teacher gave invalid log-probabilities")
    return np.minimum(logprobs, 0)


def _are_of(texts: Sequence[str], tokens: list[int], tokenizer: Tokenizer) -> bool:
    """Bytes of a character that is split over tokens have no text of their own; and some servers
    leave out spaces."""
    pairs = zip(texts, (tokenizer.decode([token]) for token in tokens), strict=False)
    return all(
        theirs.strip() == mine.strip() for theirs, mine in pairs if "\ufffd" not in theirs + mine
    )


KIND = Teacher
