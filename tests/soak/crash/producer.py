"""A producer process: many concurrent groups, each from its credit to its acknowledged push."""

from __future__ import annotations

import asyncio
import random
from uuid import uuid4

from buffer.connect import Buffer
from buffer.types import PromptRef
from tests.soak.crash.push_notes import Attempt, PushNotes
from tests.soak.crash.scenario import Scenario
from tests.soak.crash.synthetic import synthetic_group

_TASK = "soak"
_ABANDONED = 0.01  # share of the groups that are given up
_LAGGING = 0.1  # share that an engine one version behind begins
_REPEATED = 0.02  # share that is pushed twice on purpose


def run_producer(scenario: Scenario, number: int) -> None:
    asyncio.run(_Producer(scenario, number).run())


class _Producer:
    def __init__(self, scenario: Scenario, number: int) -> None:
        self._scenario = scenario
        self._number = number
        self._life = uuid4().hex[:6]
        self._dice = random.Random()
        self._notes = PushNotes(scenario.folder / f"producer-{number}.notes")
        self._count = 0
        self._running: set[str] = set()
        self._buffer: Buffer

    async def run(self) -> None:
        self._buffer = await self._scenario.buffer()
        renewal = asyncio.create_task(self._renew())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._push_again())
                for _ in range(self._scenario.in_flight):
                    group.create_task(self._produce())
            async with asyncio.timeout(60):
                while not await self._buffer.flush(30.0):
                    pass  # the server was killed since: it may have lost some
        finally:
            renewal.cancel()
            await asyncio.gather(renewal, return_exceptions=True)
            await self._buffer.close()
            self._notes.close()

    async def _push_again(self) -> None:
        """Pushes again what the previous process was pushing when it died."""
        for attempt in list(self._notes.unacknowledged.values()):
            await self._push(attempt)

    async def _produce(self) -> None:
        while self._count_wanted() > 0:
            self._count += 1
            name = f"{self._number}-{self._life}-{self._count}"
            new = PromptRef(task=_TASK, index=self._number * 10_000_000 + self._count)
            admission = await self._buffer.admit(name, self._scenario.wait_timeout_s)
            prompt = admission.prompt or new
            group_id, version = admission.group_id, admission.version
            self._running.add(group_id)
            try:
                await asyncio.sleep(self._dice.expovariate(1 / self._scenario.generate_s))
                if self._dice.random() < _ABANDONED:
                    await self._buffer.abandon(group_id, "gave_up")
                    continue
                await self._push(
                    Attempt(
                        group_id=group_id,
                        index=prompt.index,
                        attempt=prompt.attempt,
                        versions=self._versions(version),
                    )
                )
            finally:
                self._running.discard(group_id)

    def _count_wanted(self) -> int:
        return self._scenario.groups_per_producer - len(self._notes.acknowledged)

    def _versions(self, admitted_at: int) -> tuple[int, ...]:
        if admitted_at > 0 and self._dice.random() < _LAGGING:
            return (admitted_at - 1, admitted_at)
        return (admitted_at,)

    async def _push(self, attempt: Attempt) -> None:
        self._notes.trying(attempt)
        prompt = PromptRef(task=_TASK, index=attempt.index, attempt=attempt.attempt)
        group = synthetic_group(attempt.group_id, prompt, attempt.versions)
        result = await self._buffer.push(group, self._scenario.wait_timeout_s)
        self._notes.acknowledge(attempt.group_id, result.value)
        if self._dice.random() < _REPEATED:
            again = await self._buffer.push(group, self._scenario.wait_timeout_s)
            assert again.value == "duplicate", again

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._scenario.lease_timeout_s / 4)
            if self._running:
                await self._buffer.renew_credits(sorted(self._running))
