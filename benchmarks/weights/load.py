"""Real SGLang servers under load, and the time of each decoding step.

An engine decodes all its running requests in one batch, a token each a step. So one request whose
every token is streamed tells when each step ended, and the others need not be streamed at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks import KEY
from buffer.types import SamplingParams
from processes import tree
from rollout_pool.engines.sglang.client import SGLangClient
from rollout_pool.engines.sglang.engine import SGLangEngine
from rollout_pool.sampling.sample import Sample

PROMPT_LENGTH = 16
_STEADY_STEPS = 6
_STEADY_S = 120.0


@dataclass(kw_only=True, slots=True, frozen=True)
class FleetSize:
    num_engines: int = 2
    hidden: int = 768
    layers: int = 12
    vocab: int = 16_384
    num_requests: int = 7
    """Running at once at each engine, besides the one that is streamed."""
    num_tokens: int = 32
    """Tokens that each request generates; after a commit those so far are computed anew."""
    num_publishes: int = 6
    num_bare_loads: int = 4
    undisturbed_s: float = 1.5
    """Between two publishes."""


SHORT = FleetSize(
    num_engines=1, hidden=128, layers=2, vocab=512, num_requests=3, num_tokens=96,
    num_publishes=2, num_bare_loads=1, undisturbed_s=0.2,
)  # fmt: skip


def pin(pid: int, cores: Collection[int]) -> None:
    """The whole family runs on these cores from here on, threads that live already too."""
    for process in tree.family(pid):
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores)


@dataclass(slots=True)
class Pulse:
    """The time by `time.perf_counter` at which each decoding step of an engine ended."""

    steps: list[float] = field(default_factory=list)

    def per_second(self, spans: list[tuple[float, float]]) -> float:
        """Steps a second inside the spans; a step's time is its own, also where it is cut."""
        ends = np.array(self.steps)
        counts = np.arange(len(ends))
        inside = sum(np.interp(b, ends, counts) - np.interp(a, ends, counts) for a, b in spans)
        return float(inside) / sum(b - a for a, b in spans)


class Load:
    """Keeps an engine busy: as soon as one request is over the next one begins."""

    def __init__(self, engine: SGLangEngine, size: FleetSize) -> None:
        self.pulse = Pulse()
        self.samples: list[Sample] = []
        self._client: SGLangClient = engine.client
        self._streaming = SGLangClient(
            engine.spec.name, self._client.url, key=KEY, request_timeout_s=120, stream_interval=1
        )
        self._size = size
        self._dice = random.Random(engine.spec.name)
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_running(self) -> int:
        """Requests in the engine's batch."""
        return self._size.num_requests + 1

    async def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._sample(index)) for index in range(self._size.num_requests)
        ]
        self._tasks.append(asyncio.create_task(self._stream()))
        await self.steady()

    async def steady(self) -> None:
        """Until it decodes again: after a commit all that is running is first computed anew."""
        seen = len(self.pulse.steps)
        async with asyncio.timeout(_STEADY_S):
            while len(self.pulse.steps) < seen + _STEADY_STEPS:
                await asyncio.sleep(0.01)
        self.check()

    def note_version(self, version: int) -> None:
        """The engine serves it: as a worker's router tells its clients."""
        for client in (self._client, self._streaming):
            client.note_version(version)

    def check(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        self.check()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._streaming.close()

    def _new_sample(self, num_tokens: int) -> Sample:
        return Sample(
            sample_id=f"{self._client.name}-{next(self._numbers)}",
            prompt=[self._dice.randrange(self._size.vocab) for _ in range(PROMPT_LENGTH)],
            sampling=SamplingParams(temperature=1.0),
            max_new_tokens=num_tokens,
        )

    async def _sample(self, index: int) -> None:
        # Not all at once: their ends, and the prefills of the next ones, spread over the time.
        num_tokens = self._size.num_tokens * (index + 1) // self._size.num_requests
        while True:
            sample = self._new_sample(num_tokens)
            await self._client.generate_tokens(sample, f"{sample.sample_id}!")
            self.samples.append(sample)
            num_tokens = self._size.num_tokens

    async def _stream(self) -> None:
        while True:
            sample, seen = self._new_sample(self._size.num_tokens), 0

            def on_arrival(sample: Sample = sample) -> None:
                nonlocal seen
                now, length = time.perf_counter(), len(sample.output_ids)
                self.pulse.steps.extend([now] * (length - seen))
                seen = length

            await self._streaming.generate_tokens(sample, f"{sample.sample_id}!", on_arrival)


async def bare_loads(engine: SGLangEngine, path: str, version: int, number: int) -> list[float]:
    """Seconds of /update_weights_from_disk with nothing else going on; the first warms up."""
    seconds = []
    for _ in range(number + 1):
        began = time.perf_counter()
        await engine.client.update_from_disk(path, version, 600.0)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def worst_difference(
    model: torch.nn.Module,
    tensors_of: Callable[[int], dict[str, torch.Tensor]],
    samples: list[Sample],
) -> float:
    """Largest gap between the engine's log-probabilities and Hugging Face's, where each token is
    scored under the version that its span names."""
    spans = [(sample, span) for sample in samples for span in sample.version_spans]
    worst, loaded = 0.0, -1
    for sample, span in sorted(spans, key=lambda pair: pair[1].version):
        if span.version != loaded:
            model.load_state_dict(tensors_of(span.version), strict=False)  # lm_head is tied
            loaded = span.version
        output = sample.output_ids[: span.end]
        with torch.no_grad():
            logits = model(torch.tensor([[*sample.prompt, *output]])).logits
        scores = logits[0, len(sample.prompt) - 1 : -1].log_softmax(-1)
        expected = scores.gather(1, torch.tensor(output)[:, None])[:, 0]
        gaps = (torch.tensor(sample.logprobs[: span.end]) - expected).abs()
        worst = max(worst, gaps[span.start :].max().item())
    return worst
