"""Two producer and two consumer processes that persist over rounds, and the cost of a round."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

_CONTEXT = multiprocessing.get_context("forkserver")
# Members are forked from a process that has imported these once, instead of each for itself.
_CONTEXT.set_forkserver_preload(["ray", "torch", "transformers"])
_ROUND_S = 300.0

IN_FLIGHT = 32
"""Groups that a producer pushes at once, as a rollout worker with as many generations does."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Round:
    """One measured round."""

    num_groups: int
    seconds: float
    producer_cpu_s: float
    consumer_cpu_s: float
    middle_cpu_s: float
    """Of the server or the queue's process."""

    @property
    def groups_per_s(self) -> float:
        return self.num_groups / self.seconds


class Worker(Protocol):
    """Made in its own process; `work` is one round of so many groups."""

    def work(self, num_groups: int) -> None: ...


class Team:
    """Each of `workers` is called in a process of its own to make a Worker.

    The first half of them produce. `middle_cpu_s` reads the CPU time of what stands between.
    """

    def __init__(
        self, workers: list[Callable[[], Worker]], middle_cpu_s: Callable[[], float]
    ) -> None:
        self._middle_cpu_s = middle_cpu_s
        self._channels: list[Any] = []
        self._processes = []
        for make in workers:
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(make, theirs), daemon=True)
            process.start()
            self._channels.append(ours)
            self._processes.append(process)
        self._gather()

    def play(self, num_groups: int) -> Round:
        """All workers begin at once; the round is over when the last one is done."""
        middle = self._middle_cpu_s()
        began = time.perf_counter()
        for channel in self._channels:
            channel.send(num_groups // 2)
        cpu_s = self._gather()
        seconds = time.perf_counter() - began
        half = len(cpu_s) // 2
        return Round(
            num_groups=num_groups,
            seconds=seconds,
            producer_cpu_s=sum(cpu_s[:half]),
            consumer_cpu_s=sum(cpu_s[half:]),
            middle_cpu_s=self._middle_cpu_s() - middle,
        )

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _gather(self) -> list[float]:
        replies = []
        for channel in self._channels:
            if not channel.poll(_ROUND_S):
                raise TimeoutError(f"a worker did not finish its round in {_ROUND_S:g} s")
            reply = channel.recv()
            if isinstance(reply, str):
                raise RuntimeError(reply)
            replies.append(reply)
        return replies


def barrier(num_parties: int) -> Any:
    return _CONTEXT.Barrier(num_parties)


def _serve(make: Callable[[], Worker], channel: Any) -> None:
    try:
        worker = make()
        channel.send(0.0)
        while True:
            num_groups = channel.recv()
            before = time.process_time()
            worker.work(num_groups)
            channel.send(time.process_time() - before)
    except EOFError:
        return
    except BaseException:
        channel.send(traceback.format_exc())
