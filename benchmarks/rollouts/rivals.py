"""Three published ways to schedule rollouts, over the same client and the same engine as ours.

    batches    a batch of groups is asked for; the next one begins when the last answer is there
    stream     prompts are fed without pause and the first batch to end is taken; what is unfinished
               then is given up, and its prompts are put off to later batches
    partial    the same, but what is unfinished is interrupted and resumed in the next batch

In all of them new weights are committed between two batches, when nothing is decoding. A prompt may
be put off twice; then its batch waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.rollouts.work import Job, Tally, WorkSize, new_sample
from rollout_pool.cancelling import end_tasks
from rollout_pool.sampling.sample import Completer, Interrupted, Sample

Commit = Callable[[], Awaitable[None]]
MAX_PUT_OFF = 2


@dataclass(slots=True, eq=False)
class _Run:
    """A group under way."""

    job: Job
    num_put_off: int = 0
    samples: list[Sample] = field(default_factory=list)

    async def go(self, completer: Completer) -> None:
        if not self.samples:
            members = range(len(self.job.lengths))
            self.samples = [new_sample(self.job, m, self.num_put_off) for m in members]
        left = [sample for sample in self.samples if sample.finish_reason is None]
        ends = await asyncio.gather(
            *(completer.complete(sample) for sample in left), return_exceptions=True
        )
        for error in sorted(filter(None, ends), key=lambda e: isinstance(e, Interrupted)):
            raise error  # an interruption only if there is nothing worse

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.output_ids) for sample in self.samples)

    @property
    def num_lost(self) -> int:
        return sum(sample.num_wasted for sample in self.samples)


async def run_batches(
    jobs: Sequence[Job], completer: Completer, size: WorkSize, commit: Commit
) -> Tally:
    tally = Tally(time.perf_counter())
    for first in range(0, len(jobs), size.batch_groups):
        runs = [_Run(job) for job in jobs[first : first + size.batch_groups]]
        await asyncio.gather(*(run.go(completer) for run in runs))
        _deliver(tally, runs)
        await commit()
    return tally


async def run_stream(
    jobs: Sequence[Job], completer: Completer, size: WorkSize, commit: Commit
) -> Tally:
    return await _FirstToEnd(jobs, completer, size, commit, keeps_tokens=False).run()


async def run_partial(
    jobs: Sequence[Job], completer: Completer, size: WorkSize, commit: Commit
) -> Tally:
    return await _FirstToEnd(jobs, completer, size, commit, keeps_tokens=True).run()


class _FirstToEnd:
    """Batches of those groups that end first."""

    def __init__(
        self,
        jobs: Sequence[Job],
        completer: Completer,
        size: WorkSize,
        commit: Commit,
        *,
        keeps_tokens: bool,
    ) -> None:
        self._waiting = deque(_Run(job) for job in jobs)
        self._put_off: deque[_Run] = deque()
        self._completer = completer
        self._size = size
        self._commit = commit
        self._keeps_tokens = keeps_tokens
        self._running: dict[asyncio.Task[None], _Run] = {}
        self._tally = Tally(time.perf_counter())

    async def run(self) -> Tally:
        while self._waiting or self._put_off:
            await self._batch()
            await self._commit()
        return self._tally

    async def _batch(self) -> None:
        done: list[_Run] = []
        num_left = len(self._waiting) + len(self._put_off)
        wanted = min(self._size.batch_groups, num_left)
        self._feed()
        while len(done) < wanted or self._must_wait:
            ended, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
                done.append(self._running.pop(task))
            if len(done) < wanted:
                self._feed()
        await self._stop()
        _deliver(self._tally, done)

    def _feed(self) -> None:
        """As many groups as fill the engine; those that were put off most come first."""
        room = self._size.max_running // self._size.group_size
        while len(self._running) < room and (self._waiting or self._put_off):
            due = self._put_off and (
                self._keeps_tokens or not self._waiting or self._is_last_chance
            )
            run = (self._put_off if due else self._waiting).popleft()
            self._running[asyncio.create_task(run.go(self._completer))] = run

    @property
    def _must_wait(self) -> bool:
        return any(run.num_put_off >= MAX_PUT_OFF for run in self._running.values())

    @property
    def _is_last_chance(self) -> bool:
        return self._put_off[0].num_put_off >= MAX_PUT_OFF

    async def _stop(self) -> None:
        """What is unfinished gives its place up."""
        if self._keeps_tokens:
            for run in self._running.values():
                for sample in run.samples:
                    self._completer.interrupt(sample)
            for result in await asyncio.gather(*self._running, return_exceptions=True):
                if result is not None and not isinstance(result, Interrupted):
                    raise result
        else:
            await end_tasks(self._running)
        for run in self._running.values():
            run.num_put_off += 1
            if not self._keeps_tokens:
                self._tally.wasted_tokens += run.num_tokens + run.num_lost
                run.samples = []
            self._put_off.append(run)
        self._running.clear()


def _deliver(tally: Tally, runs: Sequence[_Run]) -> None:
    for run in runs:
        assert run.num_tokens == run.job.num_tokens, (run.num_tokens, run.job)
        tally.wasted_tokens += run.num_lost
    tally.deliver([run.num_tokens for run in runs])
