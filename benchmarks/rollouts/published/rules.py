"""Four more published rules, each a change of the counter's: groups flow, batches are trained.

    quota      (verl, fully async with partial rollouts) the engines get weights every 4 steps, all
               paused for the transfer, and between two transfers no more groups begin than 1.5
               times what these steps train, less what was left over
    window     (torchtitan, RolloutGroupWorkBuffer) a group takes a place until the engines have the
               weights that it trained; an ended one may overtake only within a window of two
               batches from the oldest that was not taken. Weights change under what runs
    requeue    (tinker-cookbook, as it was) whatever has room begins; what is too old when a batch
               is put together is thrown away, and its prompt runs again, behind a batch of others
    repack     (Laminar) each engine has answers of its own and the weights it began with. When
               nothing waits at some of them, their last answers move to as few as have places for
               them (best fit, among engines with the same weights); the others take the newest
               weights and new prompts. Its buffer has no bound; here it has the counter's

The window has one step less of admission; all the same it may train what is a step too old.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.rollouts.published.rivals import Continuous, Run, Trainer
from benchmarks.rollouts.work import Job, WorkSize
from rollout_pool.sampling.sample import Clock, Completer, Interrupted, Sample

QUOTA_SURPLUS, WINDOW_BATCHES = 0.5, 2
REPACK_DEPTH = 2
"""Answers that an engine begins with, for each of its places."""


class Quota(Continuous):
    steps_a_version = 4
    _num_before = 0
    """Groups that had begun before the last transfer and did not count as left over."""

    def may_begin(self) -> bool:
        trained = self.steps_a_version * self.size.batch_groups
        return self.num_begun - self._num_before < trained * (1 + QUOTA_SURPLUS)

    async def after_step(self) -> None:
        self.version += 1
        if self.version % self.steps_a_version:
            return
        assert self.trainer.hold is not None
        await self.trainer.hold()
        await asyncio.sleep(self.trainer.transfer_s)
        await self.trainer.commit()
        self._num_before = self.num_begun - len(self.running) - len(self.ended)


class Window(Continuous):
    def __init__(
        self, jobs: Sequence[Job], completer: Completer, size: WorkSize, trainer: Trainer
    ) -> None:
        super().__init__(jobs, completer, size, trainer)
        self._taken: list[Run] = []
        self._head, self._phase = -1, 0
        """The oldest group that was not taken, and how many of its batch had been when it became
        that."""

    def may_begin(self) -> bool:
        most = (self.version + self.size.max_staleness) * self.size.batch_groups
        return self.num_begun < most

    def pick(self, wanted: int) -> list[Run]:
        while len(self._taken) < wanted:
            places = [run.job.index for run in (*self.running, *self.ended)]
            if (head := min(places, default=0)) != self._head:
                self._head, self._phase = head, len(self._taken)
            end = head + WINDOW_BATCHES * self.size.batch_groups - self._phase
            takeable = [run for run in self.ended if run.job.index < end]
            if not takeable:
                return []
            self._taken.append(min(takeable, key=lambda run: run.job.index))
            self.ended.remove(self._taken[-1])
        taken, self._taken = self._taken, []
        return taken


class Requeue(Continuous):
    def may_begin(self) -> bool:
        return True

    def pick(self, wanted: int) -> list[Run]:
        ended, self.ended = self.ended, deque()
        for run in ended:
            if self.version - run.version <= self.size.max_staleness:
                self.ended.append(run)
                continue
            self.tally.wasted_tokens += run.num_tokens + run.num_lost
            again = Run(run.job, num_put_off=run.num_put_off + 1)
            self.waiting.insert(self.size.batch_groups, again)
        return super().pick(wanted)


@dataclass(slots=True, eq=False)
class _Engine:
    number: int
    version: int = 0
    is_loading: bool = False
    samples: dict[Sample, int] = field(default_factory=dict)
    """With their lengths."""

    @property
    def open_samples(self) -> list[Sample]:
        return [one for one, length in self.samples.items() if len(one.output_ids) < length]


class Repack(Continuous):
    def __init__(
        self, jobs: Sequence[Job], completer: Completer, size: WorkSize, trainer: Trainer
    ) -> None:
        super().__init__(jobs, completer, size, trainer)
        self._engines = [_Engine(number) for number in range(size.scale_engines)]
        self._places = size.max_running // size.scale_engines

    async def complete(self, sample: Sample, clock: Clock | None = None) -> None:
        while sample.finish_reason is None:
            try:
                await super().complete(sample, clock)
            except Interrupted:
                continue

    def feed(self) -> None:
        if not self.waiting or not self.may_begin():
            return
        self._repack()
        for engine in self._engines:
            if not engine.is_loading and not engine.open_samples:
                engine.is_loading = True
                self.tasks.create_task(self._begin(engine))

    async def _begin(self, engine: _Engine) -> None:
        if engine.version < self.version:
            engine.version = self.version
            assert self.trainer.load is not None
            await self.trainer.load(engine.number, engine.version)
        engine.samples.clear()
        most = REPACK_DEPTH * self._places - self.size.group_size
        while self.waiting and self.may_begin() and len(engine.samples) <= most:
            run = self.waiting.popleft()
            run.begin()
            for sample, length in zip(run.samples, run.job.lengths, strict=True):
                sample.engine = f"engine-{engine.number}"
                engine.samples[sample] = length
            self.start(run)
        engine.is_loading = False

    def _repack(self) -> None:
        """Their KV cache always has room for as many as there are places."""
        numbers = {one: len(one.open_samples) for one in self._engines if not one.is_loading}
        idle = [one for one, number in numbers.items() if 0 < number < self._places]
        for source in sorted(idle, key=lambda one: numbers[one]):
            fitting = [
                one
                for one in idle
                if one is not source
                and one.version == source.version
                and numbers[one]
                and numbers[one] + numbers[source] <= self._places
            ]
            if not fitting:
                continue
            target = max(fitting, key=lambda one: numbers[one])
            for sample in source.open_samples:
                target.samples[sample] = source.samples.pop(sample)
                sample.engine = f"engine-{target.number}"
                self.interrupt(sample)
            numbers[target] += numbers[source]
            numbers[source] = 0

    async def after_step(self) -> None:
        self.version += 1
