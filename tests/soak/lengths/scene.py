"""One run of the soak of trained lengths: its settings, and how long its answers are.

A length is drawn whenever an answer begins: also when a prompt runs again, or a stopped sample
begins again without its tokens. A part of the variance belongs to the prompt. The first draw of
each sample is what a trainer without any bias would see.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import KEY
from configs.choices import OnStale, TailPolicy, TaskKind
from configs.rollout_schema import EngineConfig, RolloutConfig, TaskConfig
from configs.schema import BufferConfig
from rollout_pool.types import RolloutSpec
from tests.support.rollout import rollout_spec

ENGINE = "engine-0"
RUN = "lengths"
TASK = f"{Path(__file__).with_name('task.py')}:LengthTask"
P99 = 2.326
"""Standard deviations of a normal distribution above its median."""
OF_PROMPT = 0.3
"""Share of the variance that belongs to the prompt."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Policy:
    """The settings whose bias is measured."""

    max_staleness: int
    on_stale: OnStale = OnStale.requeue
    tail: TailPolicy = TailPolicy.continue_across_versions
    keep_partial: bool = True
    oversampling: float = 1.0
    filters: bool = False

    @property
    def is_unbiased(self) -> bool:
        """By design: no group is given up or masked for its age or its rewards, no sample begins
        again."""
        keeps_all = self.on_stale is OnStale.wait or self.max_staleness == 0
        return keeps_all and self.keep_partial and not self.filters

    @property
    def words(self) -> list[str]:
        """max_staleness, on_stale, tail, and all that is not a default."""
        others = [] if self.keep_partial else ["keep_partial=false"]
        others += [f"oversampling={self.oversampling:g}"] if self.oversampling > 1 else []
        others += ["filter_zero_variance"] if self.filters else []
        on_stale, tail = self.on_stale.value, self.tail.value
        return [str(self.max_staleness), on_stale, tail, ", ".join(others)]


@dataclass(kw_only=True, slots=True, frozen=True)
class Scene:
    folder: Path
    policy: Policy
    seed: int
    num_prompts: int
    """The first ones of the stream. It goes on behind them, so that none is the last to run."""
    group_size: int = 4
    groups_per_step: int
    places: int = 64
    """Requests that the engine decodes at once."""
    speed: float = 8.0
    """Seconds of the emulated GPU per second."""
    median_tokens: int = 24
    p99_over_p50: float = 20.0
    longest: int = 1024
    keep_every_tokens: int = 16
    checkpoint_every: int = 3

    @property
    def draws(self) -> Path:
        return self.folder / "draws.jsonl"

    @property
    def buffer(self) -> BufferConfig:
        return BufferConfig(
            max_staleness=self.policy.max_staleness,
            on_stale=self.policy.on_stale,
            wait_timeout_s=120.0,
        )

    def rollout(self, redis_url: str) -> RolloutSpec:
        policy = self.policy
        return rollout_spec(
            config=RolloutConfig(
                group_size=self.group_size,
                tail=policy.tail,
                keep_partial=policy.keep_partial,
                keep_every_tokens=self.keep_every_tokens,
                oversampling=policy.oversampling,
                filter_zero_variance=policy.filters,
                max_prompt_tokens=64,
                max_response_tokens=self.longest,
                log_rate=0.0,
                engine=EngineConfig(max_running_requests=self.places),
            ),
            task=TaskConfig(
                kind=TaskKind.custom, factory=TASK, params={"right_below": self.median_tokens}
            ),
            buffer=self.buffer,
            redis_url=redis_url,
            run=RUN,
            run_dir=str(self.folder),
            seed=self.seed,
            engine_key=KEY,
            weights_key=KEY,
        )

    def length(self, index: int, place: int, number: int) -> int:
        """The `number`-th draw for this sample of the prompt."""
        sigma = math.log(self.p99_over_p50) / P99
        of_prompt = random.Random(f"{self.seed} {index}").gauss()
        own = random.Random(f"{self.seed} {index} {place} {number}").gauss()
        z = math.sqrt(OF_PROMPT) * of_prompt + math.sqrt(1 - OF_PROMPT) * own
        return min(self.longest, max(1, round(self.median_tokens * math.exp(sigma * z))))


@dataclass(slots=True, frozen=True)
class Draw:
    index: int
    """The prompt's index."""
    place: int
    group_id: str
    length: int


@dataclass(slots=True)
class Draws:
    """All draws of a run so far, over all its workers' lives."""

    scene: Scene
    _counts: Counter[tuple[int, int]] = field(default_factory=Counter)
    _last: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for draw in read_draws(self.scene):
            self._counts[draw.index, draw.place] += 1
            self._last[draw.index, draw.place] = draw.length

    def draw(self, index: int, place: int, group_id: str, *, again: bool = False) -> int:
        """`again`: the last length, for a sample that goes on in another group."""
        number = self._counts[index, place]
        self._counts[index, place] += 1
        last = self._last.get((index, place)) if again else None
        length = last if last is not None else self.scene.length(index, place, number)
        self._last[index, place] = length
        with self.scene.draws.open("a") as file:  # one line, one write: whole or absent
            file.write(json.dumps([index, place, group_id, length]) + "\n")
        return length


def read_draws(scene: Scene) -> Iterator[Draw]:
    """In their order."""
    if scene.draws.exists():
        with scene.draws.open() as file:
            yield from (Draw(*json.loads(line)) for line in file)
