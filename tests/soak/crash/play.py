"""One soak run from its first group to its last: its processes, the watcher, and the verdict."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from buffer.results import BufferStats
from tests.soak.crash.checkpoints import CheckpointChain
from tests.soak.crash.evidence import collect, judge
from tests.soak.crash.jobs import Producers, TrainerJob
from tests.soak.crash.push_notes import PushNotes
from tests.soak.crash.scenario import Scenario
from tests.support.blocking import BlockingReplayBuffer

HANG_S = 90.0
_SWEEP_EVERY_S = 0.5
_LOOK_EVERY_S = 0.005


class Watch:
    """Checks conservation continuously, and fails when nothing moves."""

    def __init__(self, buffer: BlockingReplayBuffer) -> None:
        self._buffer = buffer
        self._moved_at = time.monotonic()
        self._swept_at = 0.0
        self._before: tuple[int, ...] = ()
        self.num_looks = 0

    def look(self) -> BufferStats:
        stats = self._buffer.stats()
        self.num_looks += 1
        assert stats.is_conserved, f"groups are not conserved: {stats}"
        now = time.monotonic()
        if now - self._swept_at > _SWEEP_EVERY_S:
            self._buffer.sweep()
            self._swept_at = now
        progress = (stats.pushed, stats.trained, stats.trainer_version, stats.running)
        if progress != self._before:
            self._before, self._moved_at = progress, now
        assert now - self._moved_at < HANG_S, f"nothing moved for {HANG_S:g} s: {stats}"
        return stats


@dataclass(kw_only=True, slots=True)
class Outcome:
    faults: list[str]
    """Each violation in words."""
    num_acknowledged: int
    num_trained: int
    """Groups in the surviving lineage."""
    summary: str


class Play:
    """Producers and a trainer at `scenario.url`; the watch connects to `direct_url`."""

    def __init__(self, scenario: Scenario, direct_url: str) -> None:
        self._scenario, self._direct_url = scenario, direct_url
        self._buffer = scenario.at(direct_url).blocking_buffer()
        self._buffer.open(scenario.settings, scenario.groups_per_step)
        self._watch = Watch(self._buffer)
        self._began = time.monotonic()
        self.producers, self.trainer = Producers(scenario), TrainerJob(scenario)

    def run(self, act: Callable[[int], None]) -> Outcome:
        """Calls `act` with the number of pushed groups repeatedly, until all are trained."""
        producers, trainer = self.producers, self.trainer
        try:
            while not (producers.have_ended and trainer.has_ended):
                stats = self._watch.look()
                act(stats.pushed)
                producers.supervise()
                trainer.supervise()
                is_dry = stats.ready < self._scenario.groups_per_step and not stats.leased
                if producers.have_ended and is_dry:
                    trainer.meeting.is_over.set()
                time.sleep(_LOOK_EVERY_S)
            # The credits of killed producers expire.
            while (stats := self._watch.look()).running:
                time.sleep(0.1)
            faults = [f"invariant: {text}" for text in self._buffer.find_violations()]
        finally:
            producers.stop()
            trainer.stop()
            self._buffer.close()
        return self._outcome(faults, stats)

    def _outcome(self, faults: list[str], stats: BufferStats) -> Outcome:
        scenario = self._scenario
        acknowledged: dict[str, str] = {}
        for number in range(scenario.num_producers):
            notes = PushNotes(scenario.folder / f"producer-{number}.notes")
            acknowledged |= notes.acknowledged
            notes.close()
        trained = CheckpointChain(scenario.folder).trained()
        found = collect(self._direct_url, scenario.run)
        return Outcome(
            faults=faults + judge(found, trained, acknowledged),
            num_acknowledged=len(acknowledged),
            num_trained=len(trained),
            summary=(
                f"{time.monotonic() - self._began:.0f} s: {len(acknowledged)} pushes acknowledged "
                f"({dict(Counter(acknowledged.values()))}), {len(trained)} groups trained in the "
                f"surviving lineage, {self.trainer.num_lives} lives of the trainer, "
                f"{self._watch.num_looks} looks at the law; states "
                f"{dict(Counter(found.states.values()))}; {found.num_expiring} payloads expire; "
                f"{stats}"
            ),
        )
