"""Evaluates the policy on the held-out prompts, while generation continues at the same engines.

With an engine held at the version, all samples are from that version; without, from it or later
ones, as the report says.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from buffer.types import SamplingParams
from configs.rollout_schema import EvalConfig, TaskConfig
from rollout_pool.cancelling import end_tasks
from rollout_pool.episodes.episode import Episode, EpisodeFailed, EpisodeRequest
from rollout_pool.rewards.types import Scorer
from rollout_pool.sampling.engine_client import EngineError
from rollout_pool.sampling.group_samples import GroupSamples
from rollout_pool.sampling.sample import Priority, SampleFailed
from rollout_pool.tasks.source import EpisodeSource
from rollout_pool.tasks.task import Prompt
from rollout_pool.types import EvalReport

log = logging.getLogger(__name__)

EPISODES_AT_ONCE = 128
"""Limit, so that groups for the trainer do not queue behind an evaluation."""
ROUNDING = 1e-6
"""A sample whose weighted sum is this close below rollout.eval.full_score is still correct."""
MAX_FAILED = 0.05
"""An evaluation fails if so large a share of the prompts got no completion; one of several prompts
may always fail."""


class EvaluationFailed(RuntimeError):
    """Too many of the held-out prompts got no completion, or none could be scored."""


@dataclass(kw_only=True, slots=True, frozen=True)
class _ScoredSample:
    task: str
    score: float
    versions: frozenset[int]
    unscored: str | None


@dataclass(kw_only=True, slots=True)
class _Target:
    """The engine that one evaluation uses; None, for any engine, once the held one has failed."""

    engine: str | None


class Evaluator:
    """Samples every held-out prompt of a set `config.num_samples` times."""

    def __init__(
        self,
        *,
        episode_source: EpisodeSource,
        scorer: Scorer,
        prompts: Sequence[Prompt],
        config: EvalConfig,
        further: Mapping[str, Evaluator],
    ) -> None:
        """`further`: those of the further sets by name, which run after this one."""
        self._further = further
        self._episode_source = episode_source
        self._scorer = scorer
        self._num_samples = config.num_samples
        self._full_score = config.full_score - ROUNDING * max(1, abs(config.full_score))
        self._sampling = SamplingParams(
            temperature=config.temperature, top_p=config.top_p, top_k=config.top_k
        )
        self._prompts = prompts
        if not self._prompts:
            raise ValueError(
                "rollout.max_prompt_tokens: every held-out prompt is longer and was skipped; "
                "raise the limit"
            )

    async def run(self, version: int, engine: str | None = None) -> EvalReport:
        """`version`: the oldest policy version that may sample a token; waits for it.

        `engine` is held at that version and serves all requests; if it fails, any engine serves
        the rest. Of a further set that fails the report has the reason. Raises EvaluationFailed,
        and RuntimeError if an older version was still served.
        """
        report = await self._run(version, engine)
        of_sets, failed = {}, {}
        for name, evaluator in self._further.items():
            try:
                of_sets[name] = await evaluator._run(version, engine)
            except EvaluationFailed as error:
                failed[name] = str(error)
        return replace(report, of_sets=of_sets, failed_sets=failed)

    async def _run(self, version: int, engine: str | None) -> EvalReport:
        started = time.perf_counter()
        target, turn = _Target(engine=engine), asyncio.Semaphore(EPISODES_AT_ONCE)
        name = f"eval-{uuid.uuid4().hex[:12]}"
        asked = [
            asyncio.create_task(
                self._score_sample(prompt, f"{name}.{number}.{i}", version, target, turn)
            )
            for number, prompt in enumerate(self._prompts)
            for i in range(self._num_samples)
        ]
        try:
            samples = await asyncio.gather(*asked)
        finally:
            await end_tasks(asked)
        by_prompt = [
            samples[i : i + self._num_samples] for i in range(0, len(samples), self._num_samples)
        ]
        complete = [[a for a in some if a is not None] for some in by_prompt if None not in some]
        num_failed = len(self._prompts) - len(complete)
        if num_failed >= max(2, MAX_FAILED * len(self._prompts)) or not complete:
            raise EvaluationFailed(
                f"{num_failed} of {len(self._prompts)} held-out prompts got no answer, which is "
                f"{MAX_FAILED:.0%} or more: see the worker's log"
            )
        why = [sample.unscored for some in complete for sample in some]
        if None not in why:
            raise EvaluationFailed(f"no answer could be scored; the first: {why[0]}")
        return self._report(complete, num_failed, started)

    def _report(
        self, samples: Sequence[Sequence[_ScoredSample]], num_failed: int, started: float
    ) -> EvalReport:
        scored = [[a for a in of_prompt if a.unscored is None] for of_prompt in samples]
        every = [sample for of_prompt in scored for sample in of_prompt]
        versions = {version for sample in every for version in sample.versions}
        is_right = [[a.score >= self._full_score for a in of_prompt] for of_prompt in scored]
        # A prompt with some unscored samples counts with its others.
        by_size = {
            k: enough
            for k in sample_sizes(self._num_samples)
            if (enough := [some for some in is_right if len(some) >= k])
        }
        by_task: dict[str, list[bool]] = {}
        for sample, right in zip(every, chain.from_iterable(is_right), strict=True):
            by_task.setdefault(sample.task, []).append(right)
        return EvalReport(
            version_min=min(versions),
            version_max=max(versions),
            accuracy=sum(map(sum, is_right)) / len(every),
            score_mean=sum(sample.score for sample in every) / len(every),
            num_prompts=len(samples),
            seconds=time.perf_counter() - started,
            num_samples=self._num_samples,
            num_failed=num_failed,
            num_unscored=sum(map(len, samples)) - len(every),
            mean_at_k={k: _mean([sum(some[:k]) / k for some in e]) for k, e in by_size.items()},
            pass_at_k={
                k: _mean([pass_at_k(len(some), sum(some), k) for some in e])
                for k, e in by_size.items()
            },
            accuracy_of={name: _mean(right) for name, right in by_task.items()}
            if len(by_task) > 1
            else {},
        )

    async def _score_sample(
        self, prompt: Prompt, session: str, version: int, target: _Target, turn: asyncio.Semaphore
    ) -> _ScoredSample | None:
        """None if the sample failed."""
        async with turn:
            try:
                episode = await self._play(prompt, session, version, target)
            except (SampleFailed, EpisodeFailed, TimeoutError) as error:
                log.warning("held-out prompt %d got no answer: %s", prompt.index, error)
                return None
        score = await self._scorer.score(prompt, episode)
        unscored = score.reasons if score.is_unscored else None
        if score.left_open is not None:
            unscored = f"{score.left_open} did not judge it"
        if unscored is not None:
            log.warning("an answer to held-out prompt %d is unscored: %s", prompt.index, unscored)
        return _ScoredSample(
            task=prompt.task, score=score.reward, versions=_versions(episode), unscored=unscored
        )

    async def _play(self, prompt: Prompt, session: str, version: int, target: _Target) -> Episode:
        if (engine := target.engine) is not None:
            try:
                episode = await self._episode(prompt, session, version, engine)
                if min(_versions(episode)) >= version:
                    return episode
                error: Exception | str = "it serves an older version"  # it was restarted
            except (SampleFailed, EngineError, TimeoutError) as failure:
                error = failure
            if target.engine is not None:
                log.warning(
                    "evaluation of version %d continues without %s: %s", version, engine, error
                )
            target.engine = None
            session += ".again"
        episode = await self._episode(prompt, session, version, None)
        if (oldest := min(_versions(episode))) < version:
            raise RuntimeError(f"version {oldest} was served in an evaluation of version {version}")
        return episode

    async def _episode(
        self, prompt: Prompt, session: str, version: int, engine: str | None
    ) -> Episode:
        request = EpisodeRequest(
            session=session,
            sampling=self._sampling,
            samples=GroupSamples(group=f"held-out {prompt.index}"),
            priority=Priority.evaluation,
            min_version=version,
            engine=engine,
        )
        return await self._episode_source.run(prompt, request)


def evaluator_of(
    task: TaskConfig,
    usual: EvalConfig,
    prompts: Sequence[Prompt],
    *,
    episode_source: EpisodeSource,
    scorer: Scorer,
) -> Evaluator:
    """The evaluator of all held-out prompts, with one for each of `task.eval_sets`. Raises
    ValueError for a set without prompts."""
    sets = task.eval_sets

    def make(name: str, config: EvalConfig, further: Mapping[str, Evaluator]) -> Evaluator:
        own = [p for p in prompts if (p.task if p.task in sets else "") == name]
        return Evaluator(
            episode_source=episode_source,
            scorer=scorer,
            prompts=own,
            config=config,
            further=further,
        )

    return make("", usual, {n: make(n, one.answered(usual), {}) for n, one in sets.items()})


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Probability that one of k samples is correct, given n samples of which c are.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1).
    """
    assert 0 <= num_right <= num_samples and 1 <= k <= num_samples
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def sample_sizes(num_samples: int) -> list[int]:
    """1, 2, 4, ... and `num_samples`."""
    return sorted({*(2**i for i in range(num_samples.bit_length())), num_samples})


def _versions(episode: Episode) -> frozenset[int]:
    """Versions of all sampled tokens; each branch has one."""
    return frozenset(span.version for branch in episode.branches for span in branch.version_spans)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
