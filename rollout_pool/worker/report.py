"""Reports the load of a worker's engines and its waits: to the run's counters and its metrics.

counters    totals: what was waited for, what the prefix caches saved, times of requests
`engine`    a record per engine: its load now, and what happened since the record before
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from buffer.run_state import RunState
from configs.run_files import Scalar
from rollout_pool.sampling.engine_client import EngineClient
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sampler import Sampler

REPORT_S = 2.0
RECORDS_PER_S = 10.0
"""Limit of all workers together: with many engines and workers the records come less often, since
the run keeps only its last 10,000 in Redis."""


@dataclass(kw_only=True, eq=False)
class WorkerReporter:
    index: int
    num_workers: int
    state: RunState
    waited_for_rewards_s: Callable[[], float]
    """Total time that episodes waited for a scoring process."""
    scoring: Callable[[], int]
    """Number of episodes whose rewards are awaited."""
    clients: Mapping[str, EngineClient]
    """The connections to the engines that there are now, by name."""
    router: Router
    sampler: Sampler
    every_s: float = REPORT_S
    _waited_s: float = field(default=0.0, init=False)
    _counted: Counter[str] = field(default_factory=Counter, init=False)
    _recorded: dict[str, Counter[str]] = field(default_factory=dict, init=False)
    """Totals of each engine at its last record."""
    _known: dict[str, EngineClient] = field(default_factory=dict, init=False)

    async def run(self) -> None:
        """Never returns. Raises what the connection to Redis raises."""
        next_records = time.monotonic()
        while True:
            await asyncio.sleep(self.every_s)
            self._look_for_new()
            await self._count()
            if time.monotonic() >= next_records:
                num_records = len(self.clients) * self.num_workers
                next_records = time.monotonic() + max(self.every_s, num_records / RECORDS_PER_S)
                for client in self._known.values():
                    await self.state.append_metrics(self._record(client), "engine")

    def _look_for_new(self) -> None:
        """A new connection begins its totals at 0."""
        before, self._known = self._known, dict(self.clients)
        for name, client in before.items():
            if self._known.get(name) is not client:
                self._recorded.pop(name, None)
                for total in _totals(client):
                    self._counted.pop(f"{total}:{name}", None)

    async def _count(self) -> None:
        if (newly := self.waited_for_rewards_s() - self._waited_s) > 0:
            await self.state.add_wait("rollout", "rewards", newly)
            self._waited_s += newly
        seen = Counter(self.sampler.counted)
        for client in self._known.values():
            for name, total in _totals(client).items():
                seen[f"{name}:{client.name}"] = total
        await self.state.count_all(seen - self._counted)
        self._counted = seen

    def _record(self, client: EngineClient) -> dict[str, Scalar]:
        engine, totals = self.router.engines.get(client.name), _totals(client)
        new = totals - self._recorded.get(client.name, Counter())
        self._recorded[client.name] = totals
        load, prompts = engine.load if engine else None, new["prompt_tokens"]
        counters = client.counters
        logprobs, counters.num_logprobs = counters.num_logprobs, Counter()
        not_finite, counters.num_not_finite = counters.num_not_finite, Counter()
        return {
            "engine": client.name,
            "worker": self.index,
            "running": load.num_running if load else math.nan,
            "queued": load.num_queued if load else math.nan,
            "kv_usage": load.kv_usage if load else math.nan,
            "limit": engine.limit if engine else math.nan,
            "in_flight": engine.num_in_flight if engine else 0,
            "evaluating": engine.num_evaluating if engine else 0,
            "scoring": self.scoring(),
            "prefix_hit_rate": 1 - new["prefilled_tokens"] / prompts if prompts else math.nan,
            "preemptions": new["preemptions"],
            "logprobs": json.dumps(logprobs),
            "logprobs_not_finite": json.dumps(not_finite),
        }


def _totals(client: EngineClient) -> Counter[str]:
    counters = client.counters
    totals = Counter(
        prompt_tokens=counters.num_prompt_tokens,
        prefilled_tokens=counters.num_prefilled,
        preemptions=counters.num_preemptions,
    )
    totals["engine_queue_s"] = counters.queue_s  # type: ignore[assignment]  # seconds are floats
    return totals
