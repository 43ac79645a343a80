"""The processes that get killed, the trainer job and the producers, and their restarts."""

from __future__ import annotations

import signal
from multiprocessing.process import BaseProcess
from pathlib import Path
from uuid import uuid4

from tests.soak.crash import processes
from tests.soak.crash.meeting import Meeting
from tests.soak.crash.producer import run_producer
from tests.soak.crash.rank import run_rank
from tests.soak.crash.scenario import Scenario


class Failure(AssertionError):
    """A process ended by itself with an error."""


class TrainerJob:
    """All ranks of one trainer. If one dies, all restart with a new lineage."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self.num_lives = 0
        self.meeting: Meeting
        self.ranks: list[BaseProcess] = []
        self._start()

    def kill_one(self, rank: int) -> None:
        self.supervise()  # an error of its own must not go unseen in what follows
        processes.kill(self.ranks[rank])
        processes.join(self.ranks[rank], 10)
        self._end()
        self._start()

    @property
    def has_ended(self) -> bool:
        return all(rank.exitcode == 0 for rank in self.ranks)

    def supervise(self) -> None:
        for number, rank in enumerate(self.ranks):
            if rank.exitcode:
                log = self._log(number).read_text()[-4000:]
                raise Failure(f"rank {number} ended with {rank.exitcode}:\n{log}")

    def stop(self) -> None:
        self._end()

    def _start(self) -> None:
        self.num_lives += 1
        lineage = uuid4().hex[:12]
        path = self._scenario.folder / f"{lineage}.sock"
        self.meeting = Meeting(path, self._scenario.num_ranks)
        self.ranks = [
            processes.start(self._log(rank), run_rank, self._scenario, lineage, rank, path)
            for rank in range(self._scenario.num_ranks)
        ]

    def _end(self) -> None:
        for rank in self.ranks:
            processes.kill(rank)
        for rank in self.ranks:
            assert processes.join(rank, 10) in (0, -signal.SIGKILL, 1)
        self.meeting.close()

    def _log(self, rank: int) -> Path:
        return self._scenario.folder / f"rank-{rank}.log"


class Producers:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self.all = [self._start(number) for number in range(scenario.num_producers)]

    def kill_one(self, number: int) -> None:
        self.supervise()
        processes.kill(self.all[number])
        processes.join(self.all[number], 10)
        self.all[number] = self._start(number)

    @property
    def have_ended(self) -> bool:
        return all(producer.exitcode == 0 for producer in self.all)

    def supervise(self) -> None:
        for number, producer in enumerate(self.all):
            if producer.exitcode:
                log = self._log(number).read_text()[-4000:]
                raise Failure(f"producer {number} ended with {producer.exitcode}:\n{log}")

    def stop(self) -> None:
        for producer in self.all:
            processes.kill(producer)
        for producer in self.all:
            processes.join(producer, 10)

    def _start(self, number: int) -> BaseProcess:
        return processes.start(self._log(number), run_producer, self._scenario, number)

    def _log(self, number: int) -> Path:
        return self._scenario.folder / f"producer-{number}.log"
