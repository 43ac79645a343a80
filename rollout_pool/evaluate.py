"""Greedy answers to the held-out prompts, while generation goes on at the same engines."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing

from rollout_pool.generation import Generation
from rollout_pool.prompts import PromptReader, TokenizedPrompt, Tokenizer
from rollout_pool.rewards.pool import RewardPool
from rollout_pool.sampling import Sampler
from rollout_pool.tasks.task import Task
from rollout_pool.types import EvalReport

BATCH = 16
"""Prompts in one call."""
CALLS_AT_ONCE = 8
"""Keeps the engines' queues short for the groups that the trainer waits for."""
FULL_SCORE = 0.999


class Evaluator:
    """Asks every held-out prompt once. `sampler` must be greedy."""

    def __init__(
        self,
        *,
        sampler: Sampler,
        rewards: RewardPool,
        tokenizer: Tokenizer,
        reader: PromptReader,
        task: Task,
    ) -> None:
        self._sampler = sampler
        self._rewards = rewards
        self._tokenizer = tokenizer
        prompts = (reader.read(prompt) for prompt in task.eval_prompts())
        self._prompts = [prompt for prompt in prompts if prompt is not None]
        if not self._prompts:
            raise ValueError(
                "rollout.max_prompt_tokens: every held-out prompt is longer and was skipped; "
                "raise the limit"
            )

    async def run(self, version: int) -> EvalReport:
        """`version`: the oldest policy version that may have written a token; waits for it.

        Raises SamplesFailed, and RuntimeError if an older version was still served.
        """
        started = time.perf_counter()
        turn = asyncio.Semaphore(CALLS_AT_ONCE)
        batches = [self._prompts[i : i + BATCH] for i in range(0, len(self._prompts), BATCH)]
        answers = await asyncio.gather(*(self._answer(batch, turn, version) for batch in batches))
        scores = [score for batch, _ in answers for score in batch]
        versions = [served for _, batch in answers for served in batch]
        if min(versions) < version:
            raise RuntimeError(
                f"version {min(versions)} was served in an evaluation of version {version}"
            )
        return EvalReport(
            version_min=min(versions),
            version_max=max(versions),
            accuracy=sum(score >= FULL_SCORE for score in scores) / len(scores),
            score_mean=sum(scores) / len(scores),
            num_prompts=len(scores),
            seconds=time.perf_counter() - started,
        )

    async def _answer(
        self, prompts: Sequence[TokenizedPrompt], turn: asyncio.Semaphore, version: int
    ) -> tuple[list[float], set[int]]:
        """Scores, and the versions that wrote a token."""
        scoring: list[asyncio.Task[float]] = []
        versions: set[int] = set()
        call = f"eval-{uuid.uuid4().hex[:12]}"
        answers = self._sampler.run(call, [p.tokens for p in prompts], min_version=version)
        async with turn, aclosing(answers) as events:
            async for event in events:
                if isinstance(event, Generation):
                    versions |= {span.version for span in event.version_spans}
                    score = self._score(prompts[event.index], event)
                    scoring.append(asyncio.create_task(score))
        return list(await asyncio.gather(*scoring)), versions

    async def _score(self, prompt: TokenizedPrompt, generation: Generation) -> float:
        text = self._tokenizer.decode(generation.output_ids, skip_special_tokens=True)
        return (await self._rewards.score(prompt.prompt, text)).reward
