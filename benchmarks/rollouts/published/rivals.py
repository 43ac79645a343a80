"""Five published ways to schedule rollouts, over the same client and the same engine as ours.

    batches    a batch of groups is asked for; the next one begins when the last answer is there and
               the step is trained
    one_off    one step off-policy: the next batch is generated while the step trains (verl's
               one_step_off_policy)
    stream     prompts are fed without pause and the first batch to end is taken; what is unfinished
               then is given up, and its prompts are put off to later batches (dynamic sampling by
               over-provisioning)
    partial    the same, but what is unfinished is interrupted and resumed in the next batch
               (partial rollouts of colocated systems)
    counter    no more groups begin than (versions + 1 + max_staleness) batches have; the first
               batch to end is trained while all others go on, and new weights interrupt and resume
               them (AReaL: max_head_offpolicyness, interruptible generation)

In all but the last new weights are committed between two batches, when nothing is decoding. A
prompt may be put off twice; then its batch waits for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.rollouts.work import Job, Tally, WorkSize, new_sample, now
from rollout_pool.cancelling import end_tasks
from rollout_pool.sampling.sample import Clock, Completer, Interrupted, Sample

MAX_PUT_OFF = 2


@dataclass(kw_only=True, slots=True, frozen=True)
class Trainer:
    """Training and commits, for which a schedule waits between batches."""

    step_s: float
    """A training step, without the engine."""
    commit: Callable[[], Awaitable[None]]
    """The engine takes new weights."""
    token_s: float = 0.0
    """Seconds that a token adds to a step."""
    hold: Callable[[], Awaitable[None]] | None = None
    """Stops what runs in the engines themselves, which compute it again after the commit: the same
    for them as if the client interrupted it, without a request for each answer."""
    load: Callable[[int, int], Awaitable[None]] | None = None
    """One engine alone takes weights: its number and the version."""
    transfer_s: float = 0.0
    """Weights on their way, for schedules whose engines wait meanwhile."""

    async def step(self, tally: Tally, runs: Sequence[Run], steps_a_version: int = 1) -> None:
        ages = [tally.num_steps - steps_a_version * run.oldest_version for run in runs]
        await asyncio.sleep(self.step_s + self.token_s * sum(run.num_tokens for run in runs))
        for run in runs:
            assert run.num_tokens == run.job.num_tokens, (run.num_tokens, run.job)
            tally.wasted_tokens += run.num_lost
        tally.deliver([run.num_tokens for run in runs], ages)


@dataclass(slots=True, eq=False)
class Run:
    """A group under way."""

    job: Job
    num_put_off: int = 0
    samples: list[Sample] = field(default_factory=list)
    version: int = 0
    """The trainer's, when it began."""

    async def go(self, completer: Completer) -> None:
        self.begin()
        both = zip(self.samples, self.job.lengths, strict=True)
        plays = [self._play(completer, *one) for one in both if one[0].finish_reason is None]
        ends = await asyncio.gather(*plays, return_exceptions=True)
        for error in sorted(filter(None, ends), key=lambda e: isinstance(e, Interrupted)):
            raise error  # an interruption only if there is nothing worse
        await asyncio.sleep(self.job.pauses.reward_s)  # after that of its last answer

    def begin(self) -> None:
        if not self.samples:
            members = range(len(self.job.lengths))
            self.samples = [new_sample(self.job, m, self.num_put_off) for m in members]

    async def _play(self, completer: Completer, sample: Sample, length: int) -> None:
        """The turns of an answer are one sample, which goes on where the turn before has ended."""
        for end in self.job.pauses.ends(length):
            if sample.finish_reason is not None:
                await asyncio.sleep(self.job.pauses.turn_s)
            if len(sample.output_ids) < end:
                sample.max_new_tokens, sample.finish_reason = end, None
                await completer.complete(sample)

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.output_ids) for sample in self.samples)

    @property
    def oldest_version(self) -> int:
        return min(span.version for sample in self.samples for span in sample.version_spans)

    @property
    def num_lost(self) -> int:
        return sum(sample.num_wasted for sample in self.samples)


async def run_batches(
    jobs: Sequence[Job], completer: Completer, size: WorkSize, trainer: Trainer
) -> Tally:
    tally = Tally(now())
    for runs in _batches(jobs, size):
        await asyncio.gather(*(run.go(completer) for run in runs))
        await trainer.step(tally, runs)
        await trainer.commit()
    return tally


async def run_one_off(
    jobs: Sequence[Job], completer: Completer, size: WorkSize, trainer: Trainer
) -> Tally:
    tally = Tally(now())
    async with asyncio.TaskGroup() as tasks:
        training: asyncio.Task[None] | None = None
        for runs in _batches(jobs, size):
            await asyncio.gather(*(run.go(completer) for run in runs))
            if training is not None:
                await training
                await trainer.commit()
            training = tasks.create_task(trainer.step(tally, runs))
    return tally


async def run_stream(
    jobs: Sequence[Job], completer: Completer, size: WorkSize, trainer: Trainer
) -> Tally:
    return await _FirstToEnd(jobs, completer, size, trainer, keeps_tokens=False).run()


async def run_partial(
    jobs: Sequence[Job], completer: Completer, size: WorkSize, trainer: Trainer
) -> Tally:
    return await _FirstToEnd(jobs, completer, size, trainer, keeps_tokens=True).run()


def _batches(jobs: Sequence[Job], size: WorkSize) -> Iterator[list[Run]]:
    for first in range(0, len(jobs), size.batch_groups):
        yield [Run(job) for job in jobs[first : first + size.batch_groups]]


class _FirstToEnd:
    """Batches of those groups that end first."""

    def __init__(
        self,
        jobs: Sequence[Job],
        completer: Completer,
        size: WorkSize,
        trainer: Trainer,
        *,
        keeps_tokens: bool,
    ) -> None:
        self._waiting = deque(Run(job) for job in jobs)
        self._put_off: deque[Run] = deque()
        self._completer = completer
        self._size = size
        self._trainer = trainer
        self._keeps_tokens = keeps_tokens
        self._running: dict[asyncio.Task[None], Run] = {}
        self._tally = Tally(now())

    async def run(self) -> Tally:
        while self._waiting or self._put_off or self._running:
            runs = await self._batch()
            await self._trainer.step(self._tally, runs)
            await self._trainer.commit()
        return self._tally

    async def _batch(self) -> list[Run]:
        done: list[Run] = []
        num_left = len(self._waiting) + len(self._put_off) + len(self._running)
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
        return done

    def _feed(self) -> None:
        """As many groups as fill the engine; those that were put off most come first."""
        room = int(self._size.oversampling * self._size.max_running) // self._size.group_size
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
        """Unfinished samples give their places up."""
        if self._keeps_tokens and self._trainer.hold is not None:
            await self._trainer.hold()
            for run in self._running.values():
                run.num_put_off += 1
            return
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


class Continuous:
    """Groups are admitted by number; what runs goes on under each new version."""

    steps_a_version = 1

    def __init__(
        self, jobs: Sequence[Job], completer: Completer, size: WorkSize, trainer: Trainer
    ) -> None:
        self.waiting = deque(Run(job) for job in jobs)
        self.completer = completer
        self.size = size
        self.trainer = trainer
        self.running: set[Run] = set()
        self.ended: deque[Run] = deque()
        self.num_begun = 0
        self.version = 0
        """Steps that were trained."""
        self.tally = Tally(now())
        self.tasks = asyncio.TaskGroup()
        self._serves = asyncio.Event()
        """Clear while the engine takes a version."""
        self._serves.set()
        self._one_ended = asyncio.Event()

    @classmethod
    async def play(
        cls, jobs: Sequence[Job], completer: Completer, size: WorkSize, trainer: Trainer
    ) -> Tally:
        return await cls(jobs, completer, size, trainer).run()

    async def run(self) -> Tally:
        num_left = len(self.waiting)
        async with self.tasks:
            while num_left:
                wanted = min(self.size.batch_groups, num_left)
                while not (runs := self.pick(wanted)):
                    self.feed()
                    self._one_ended.clear()
                    await self._one_ended.wait()
                self.feed()
                await self.trainer.step(self.tally, runs, self.steps_a_version)
                num_left -= wanted
                await self.after_step()
                self.feed()
        return self.tally

    def may_begin(self) -> bool:
        """One group more, if there is room for it."""
        most = (self.version + 1 + self.size.max_staleness) * self.size.batch_groups
        return self.num_begun < most

    def pick(self, wanted: int) -> list[Run]:
        """The next batch; none while it is not there."""
        if len(self.ended) < wanted:
            return []
        return [self.ended.popleft() for _ in range(wanted)]

    def feed(self) -> None:
        while self.waiting and self.may_begin() and self._has_room:
            self.start(self.waiting.popleft())

    def start(self, run: Run) -> None:
        run.version = self.version
        self.num_begun += 1
        self.running.add(run)
        self.tasks.create_task(self._go(run))

    @property
    def _has_room(self) -> bool:
        """For an answer more, so that no place stays empty: the others of its group wait. Of the
        running ones only answers that have not ended count."""
        open_samples = sum(
            sample.finish_reason is None for run in self.running for sample in run.samples
        )
        new = sum(self.size.group_size for run in self.running if not run.samples)
        return open_samples + new < self.size.max_running

    async def complete(self, sample: Sample, clock: Clock | None = None) -> None:
        await self.completer.complete(sample, clock)
        self.feed()

    def interrupt(self, sample: Sample) -> None:
        self.completer.interrupt(sample)

    async def _go(self, run: Run) -> None:
        while True:
            await self._serves.wait()
            try:
                await run.go(self)
                break
            except Interrupted:
                continue
        self.running.remove(run)
        self.ended.append(run)
        self.feed()
        self._one_ended.set()

    async def after_step(self) -> None:
        """All engines take the new version."""
        if self.trainer.hold is not None:
            await self.trainer.hold()
            await self.trainer.commit()
            self.version += 1
            return
        self._serves.clear()
        for run in self.running:
            for sample in run.samples:
                if sample.finish_reason is None:
                    self.interrupt(sample)
        await self.trainer.commit()
        self.version += 1
        self._serves.set()
