"""Processes that persist over the rounds of a benchmark, and the cost of a round."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any, Protocol

_CONTEXT = multiprocessing.get_context("forkserver")
_ROUND_S = 300.0

IN_FLIGHT = 32
"""Groups that a producer pushes at once, as a rollout worker with as many generations does."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Round:
    """One measured round."""

    num_groups: int
    seconds: float
    producer_cpu_s: float = 0.0
    consumer_cpu_s: float = 0.0
    middle_cpu_s: float = 0.0
    """CPU seconds of the server's or the queue's process."""
    results: tuple[Any, ...] = ()
    """The workers' return values."""

    @property
    def groups_per_s(self) -> float:
        return self.num_groups / self.seconds


class Worker(Protocol):
    """Made in its own process; `work` is one round, of so many groups."""

    def work(self, number: int) -> Any: ...


def _start_fork_server() -> None:
    """Members are forked from a process that has imported what this one has."""
    ours = [name for name in sys.modules if name.startswith("benchmarks.")]
    _CONTEXT.set_forkserver_preload(ours)
    forkserver.ensure_running()


class Member:
    """A process that makes a Worker and lets it work."""

    def __init__(self, make: Callable[[], Worker]) -> None:
        _start_fork_server()
        self._channel, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(make, theirs), daemon=True)
        self._process.start()
        self.begin = self._channel.send

    def result(self, limit_s: float = _ROUND_S) -> tuple[float, Any]:
        """CPU seconds of the round that was begun, and what it returned; the first is the start."""
        if not self._channel.poll(limit_s):
            raise TimeoutError(f"a worker did not finish its round in {limit_s:g} s")
        reply = self._channel.recv()
        if isinstance(reply, str):
            raise RuntimeError(reply)
        cpu_s, result = reply
        return cpu_s, result

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(make: Callable[[], Worker], channel: Any) -> None:
    try:
        worker = make()
        channel.send((0.0, None))
        while True:
            number = channel.recv()
            before = time.process_time()
            result = worker.work(number)
            channel.send((time.process_time() - before, result))
    except EOFError:
        return
    except BaseException:
        channel.send(traceback.format_exc())


class Team:
    """Members that begin each round at once; the first half of them produce.

    `middle_cpu_s` reads the CPU time of what stands between producers and consumers.
    """

    def __init__(
        self,
        workers: Sequence[Callable[[], Worker]],
        middle_cpu_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._middle_cpu_s = middle_cpu_s
        self._members = [Member(make) for make in workers]
        self._gather()

    def play(self, num_groups: int) -> Round:
        """The round is over when the last one is done."""
        middle = self._middle_cpu_s()
        began = time.perf_counter()
        for member in self._members:
            member.begin(num_groups // 2)
        cpu_s, results = zip(*self._gather(), strict=True)
        seconds = time.perf_counter() - began
        half = len(cpu_s) // 2
        return Round(
            num_groups=num_groups,
            seconds=seconds,
            producer_cpu_s=sum(cpu_s[:half]),
            consumer_cpu_s=sum(cpu_s[half:]),
            middle_cpu_s=self._middle_cpu_s() - middle,
            results=results,
        )

    def close(self) -> None:
        for member in self._members:
            member.close()

    def _gather(self) -> list[tuple[float, Any]]:
        return [member.result() for member in self._members]


def barrier(num_parties: int) -> Any:
    return _CONTEXT.Barrier(num_parties)


@contextmanager
def local_ray(store_bytes: int) -> Iterator[None]:
    import ray  # the other parts of this module run where it is not installed

    _start_fork_server()  # it imports while Ray starts
    ray.init(
        num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=store_bytes
    )
    try:
        yield
    finally:
        ray.shutdown()


async def in_flight(
    call: Callable[[int], Awaitable[object]], number: int, at_once: int = IN_FLIGHT
) -> None:
    """Calls it with 0 to `number` - 1, so many at once."""
    numbers = iter(range(number))

    async def one_after_the_other() -> None:
        for each in numbers:
            await call(each)

    await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
