"""Part SCALE: an emulated run as AReaL's with 1.5B parameters, engines and trainer, by schedule.

AReaL published (blog/AReaL_v0_3.md and benchmark/ of its repository): 128 GPUs, 512 prompts of 16
answers a step, at most 31,744 tokens, 1,000 steps in 41.0 h synchronously and in 14.8 h
asynchronously. Here is a sixth of it: 16 GPUs generate and 5.3 train; a colocated schedule has all
for each phase in turn. Assumed: the lengths (lognormal, median 5,000, one in a hundred above
47,500 before the cut), 0.4 MFU, 10 s to change phases in a colocated run.

A request of the emulation stands for 4, so that an engine has 32 at once, and a token for 128
(`gpu_engine.ROOFLINES`). With a request for 16 an engine has 8: some get several of the longest
answers at once, whose KV cache is then read 16 times a step, and all wait for these. Engines are
behind real HTTP, in one process. A version is taken by all engines at once; what runs is computed
again. Measured are the steps after the first ones, in which the pools fill. `bound` is what the
longer of generation and training takes, if the engines are always full, nothing is computed twice
and no step waits; the efficiency is the bound's time over the time taken. `trained length` is the
mean answer trained, over the mean of all drawn. The simulation (controller/simulate) gets the same
work.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import httpx
import psutil
from rich.table import Table

from benchmarks import KEY
from benchmarks.report import Report
from benchmarks.rollouts.gpu import gpus_at
from benchmarks.rollouts.gpu_engine import ROOFLINES, Roofline
from benchmarks.rollouts.published.rivals import (
    Continuous,
    Run,
    Trainer,
    run_batches,
    run_one_off,
    run_partial,
    run_stream,
)
from benchmarks.rollouts.scene import pool_at
from benchmarks.rollouts.strategies import Rival
from benchmarks.rollouts.work import Job, Tally, WorkSize, draw_jobs
from configs.choices import OnStale
from controller.simulate.events import Setting, simulate
from controller.simulate.machine import Machine
from rollout_pool.cancelling import end_tasks
from rollout_pool.engines.engine import EngineInfo
from rollout_pool.engines.sglang.client import SGLangClient
from rollout_pool.sampling.engine_watch import poll_load
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sampler import Sampler

MODEL = "1.5b"
GPU = ROOFLINES[MODEL]
COLUMNS = (
    "", "s a step", "ours over it", "of the bound", "trained length", "worker's core", "engines'",
)  # fmt: skip
MFU, SWITCH_S, LOAD_EVERY_S, WIRE_BYTES_PER_S = 0.4, 10.0, 4.0, 10e9


class Schedule(NamedTuple):
    what: str
    rival: Rival | None = None
    """None: ours."""
    is_colocated: bool = False
    retracts: bool = True
    """False: what runs keeps its KV cache when weights change."""
    has_memory: bool = True
    """A step depends on the steps before: it is measured in the later half alone."""


SCHEDULES = {
    "ours": Schedule("max_staleness, on_stale=wait"),
    "in_place": Schedule("the same with weight_sync=in_place", retracts=False),
    "sync": Schedule("synchronous, disaggregated", run_batches, has_memory=False),
    "colocated": Schedule("synchronous, colocated", run_batches, True, has_memory=False),
    "partial": Schedule("colocated, partial rollouts", run_partial, True),
    "one_off": Schedule("one step off-policy", run_one_off, has_memory=False),
    "stream": Schedule("first to end, the rest given up", run_stream),
    "counter": Schedule("admitted by number, as AReaL", Continuous.play),
}


@dataclass(kw_only=True, frozen=True)
class _Emulated(Machine):
    """The emulated engines and their trainer, for the simulation."""

    roofline: Roofline
    trained_s: float
    """Seconds of training for a token of the emulation."""

    def token_s(self, num_running: float, num_tokens: float) -> float:
        return self.roofline.step_s(num_running, num_tokens)

    def prefill_s(self, num_tokens: float) -> float:
        return self.roofline.prefill_s(round(num_tokens))

    def train_s(self, num_tokens: float) -> float:
        return num_tokens * self.trained_s

    @property
    def places(self) -> float:
        return self.roofline.capacity

    @property
    def load_s(self) -> float:
        return self.roofline.load_s


class _EnoughError(Exception):
    pass


class Fleet(Protocol):
    """Emulated engines, which take versions all at once."""

    async def hold(self) -> None: ...

    async def next(self) -> None: ...

    async def load(self, number: int, version: int) -> None:
        """One engine alone takes a version."""


@dataclass(kw_only=True, slots=True)
class _Fleet:
    """A fleet behind HTTP."""

    http: httpx.AsyncClient
    retracts: bool
    urls: Sequence[str]
    version: int = 0

    async def hold(self, version: int | None = None, port: int | None = None) -> None:
        what = {"retracts": self.retracts, "version": version, "port": port}
        (await self.http.post("/take", json=what)).raise_for_status()

    async def next(self) -> None:
        self.version += 1
        await self.hold(self.version)

    async def load(self, number: int, version: int) -> None:
        await self.hold(version, httpx.URL(self.urls[number]).port)


@dataclass(kw_only=True, frozen=True)
class _Steps(Trainer):
    """Ends after so many steps, whatever still runs."""

    num_steps: int
    tallies: list[Tally]

    async def step(self, tally: Tally, runs: Sequence[Run], steps_a_version: int = 1) -> None:
        await super().step(tally, runs, steps_a_version)
        if tally.num_steps >= self.num_steps:
            self.tallies.append(tally)
            raise _EnoughError


async def measure_scale(size: WorkSize, folder: Path, report: Report) -> None:
    trainers = size.scale_engines / 3
    size = dataclasses.replace(
        size,
        group_size=16,
        batch_groups=size.scale_groups,
        num_groups=num_jobs(size),
        median_tokens=5000 // GPU.tokens,
        p99_over_p50=9.5,
        longest=31_744 // GPU.tokens,
        max_staleness=size.scale_staleness,
        max_running=size.scale_places,
    )
    jobs = draw_jobs(size, seed=0)
    mean, generate_s = mean_and_token_s(size, jobs)
    flops = 6 * GPU.parameters * GPU.tokens * GPU.requests
    train_s = flops / (trainers * 989e12 * MFU)
    bound = 1 / max(generate_s, train_s)
    tokens = mean * size.group_size * size.batch_groups
    report.say(
        f"a step: {tokens * generate_s:.1f} s of generation, {tokens * train_s:.1f} s of training"
    )
    rates: dict[str, float] = {}
    title = f"{size.scale_engines} engines emulated, {size.scale_speed:g} times the clock"
    table = Table(title=title)
    for column in COLUMNS:
        table.add_column(column)
    for name, schedule in SCHEDULES.items():
        found = await measure_schedule(name, schedule, size, jobs, folder, train_s)
        rate = rates[name] = found.rate
        bias = found.mean / (mean * size.group_size)
        report.note(f"scale_of_bound_{name}", rate / bound)
        report.note(f"scale_length_{name}", bias)
        figures = (rates["ours"] / rate, rate / bound, bias, *found.cpu)
        row = (f"{tokens / rate:.1f}", *(f"{figure:.2f}" for figure in figures))
        report.say(f"{name}: {', '.join(row)}")
        table.add_row(f"{name}: {schedule.what}", *row)
    report.show(table)
    simulated = _simulated_rate(size, jobs, train_s)
    how = "rate of ours over that of the simulation"
    report.target("scale_simulated_ours", rates["ours"] / simulated, ">=", 0.95, how)
    report.target("scale_of_bound", rates["ours"] / bound, ">=", 0.95, "overlap efficiency of ours")
    for name, rate in rates.items():
        if SCHEDULES[name].rival is not None:
            least = {"sync": 2.8, "partial": 1.2}.get(name, 1.0)
            how = "trained tokens/s of ours over it"
            report.target(f"scale_vs_{name}", rates["ours"] / rate, ">=", least, how)


def num_jobs(size: WorkSize) -> int:
    """Enough, whatever a schedule puts off or has in flight at its end."""
    return size.scale_groups * (size.scale_steps + 2 * size.scale_staleness + 2)


def mean_and_token_s(size: WorkSize, jobs: Sequence[Job]) -> tuple[float, float]:
    """The mean answer, and the seconds that all engines take for a token if they are full."""
    lengths = [length for job in jobs for length in job.lengths]
    mean = sum(lengths) / len(lengths)
    # A running answer holds half its tokens on average, and the longer it is, the longer it runs.
    held = sum(length**2 for length in lengths) / (2 * len(lengths) * mean)
    step_s = GPU.step_s(size.max_running, size.max_running * held)
    return mean, step_s / (size.max_running * size.scale_engines)


class Measured(NamedTuple):
    rate: float
    """Tokens trained for a second of the emulated clock."""
    mean: float
    """Tokens of a trained group."""
    mean_in_turn: float
    """The same for the same number of prompts in their order."""
    age: float
    """Steps since a group's oldest token, of trained groups."""
    oldest: int
    wasted: float
    cpu: tuple[float, float] = (0.0, 0.0)


async def measure_schedule(
    name: str, schedule: Schedule, size: WorkSize, jobs: Sequence[Job], folder: Path, train_s: float
) -> Measured:
    one = with_steps(schedule, size)
    tally, cpu = await _run(name, schedule, one, jobs, folder, train_s)
    lost = tally.lost_tokens if schedule.rival is None else tally.wasted_tokens
    return measured(schedule, one, jobs, tally, lost)._replace(cpu=cpu)


def with_steps(schedule: Schedule, size: WorkSize) -> WorkSize:
    num_steps = size.scale_steps if schedule.has_memory else max(2, size.scale_steps // 3)
    return dataclasses.replace(size, num_groups=num_steps * size.batch_groups)


def measured(
    schedule: Schedule, size: WorkSize, jobs: Sequence[Job], tally: Tally, lost: int
) -> Measured:
    num_steps = size.num_groups // size.batch_groups
    first = size.batch_groups * (num_steps // 2 if schedule.has_memory else 1)
    there = slice(first, size.num_groups)
    trained, ages = tally.lengths[there], tally.ages[there]
    seconds = (tally.ends[size.num_groups - 1] - tally.ends[first - 1]) * size.scale_speed
    return Measured(
        rate=sum(trained) / seconds,
        mean=sum(trained) / len(trained),
        mean_in_turn=sum(job.num_tokens for job in jobs[there]) / len(trained),
        age=sum(ages) / len(ages),
        oldest=max(ages),
        wasted=lost / (lost + tally.used_tokens),
    )


def _simulated_rate(size: WorkSize, jobs: Sequence[Job], trained_s: float) -> float:
    """Tokens of the later half of the steps, for a second of the emulated clock."""
    machine = _Emulated(
        gpu="H100",
        num_params=GPU.parameters,
        active_params=GPU.parameters,
        kv_elements=GPU.kv_bytes / 2,
        tp_size=1,
        max_running=size.max_running,
        wire_bytes_per_s=float("inf"),
        roofline=GPU,
        trained_s=trained_s,
    )
    setting = Setting(
        machine=machine,
        num_engines=size.scale_engines,
        num_trainer_gpus=1,
        num_steps=size.scale_steps,
        groups_per_step=size.batch_groups,
        prompt_tokens=0,  # shorter than the 128 for which a token stands
        max_staleness=size.max_staleness,
        on_stale=OnStale.wait,
        max_commits=size.scale_engines,
    )
    lengths = iter([job.lengths for job in jobs])
    outcome = simulate(setting, partial(next, lengths, ()))
    return sum(outcome.trained[outcome.half * size.batch_groups :]) / outcome.seconds


async def _run(
    name: str, schedule: Schedule, size: WorkSize, jobs: Sequence[Job], folder: Path, token_s: float
) -> tuple[Tally, tuple[float, float]]:
    """The tally, and the share of a core that this process and the engines took."""
    number, step_s, token_s = division(schedule, size, token_s)
    async with AsyncExitStack() as closing:
        engines = await closing.enter_async_context(
            gpus_at(folder, size.scale_speed, size.max_running, MODEL, number)
        )
        http = await closing.enter_async_context(
            httpx.AsyncClient(base_url=engines[0].url, trust_env=False, timeout=120.0)
        )
        fleet = _Fleet(http=http, retracts=schedule.retracts, urls=[one.url for one in engines])
        began, before = time.perf_counter(), _cpu_s(engines[0].pid)
        if schedule.rival is None:
            pool = await closing.enter_async_context(
                pool_at(
                    folder,
                    engines[0],
                    size,
                    jobs,
                    name=f"scale-{name}",
                    commits=fleet,
                    load_every_s=LOAD_EVERY_S,
                )
            )
            pool.train_s, pool.token_s, pool.engines = step_s, token_s, [e.name for e in engines]
            for engine in engines:
                await pool.state.register_engine(engine.name, engine.url)
            await pool.state.record_commits(dict.fromkeys(pool.engines, 0))
            tally = await pool.run(size.num_groups)
        else:
            sampler = await closing.enter_async_context(_sampler(size, engines))
            tally = await play_rule(schedule, sampler, fleet, size, jobs, (step_s, token_s))
        seconds = time.perf_counter() - began
        ours, theirs = (b - a for a, b in zip(before, _cpu_s(engines[0].pid), strict=True))
        return tally, (ours / seconds, theirs / seconds)


def division(schedule: Schedule, size: WorkSize, token_s: float) -> tuple[int, float, float]:
    """The engines, and the seconds of the clock of a step and of each of its tokens."""
    number, step_s = size.scale_engines, 0.0
    if schedule.is_colocated:
        number, token_s, step_s = number + number // 3, token_s / 4, SWITCH_S
    return number, step_s / size.scale_speed, token_s / size.scale_speed


async def play_rule(
    schedule: Schedule,
    sampler: Sampler,
    fleet: Fleet,
    size: WorkSize,
    jobs: Sequence[Job],
    seconds: tuple[float, float],
) -> Tally:
    """Another rule than ours, or ours as one of them."""
    trainer = _Steps(
        step_s=seconds[0],
        token_s=seconds[1],
        commit=fleet.next,
        hold=fleet.hold,
        load=fleet.load,
        transfer_s=2 * GPU.parameters / WIRE_BYTES_PER_S / size.scale_speed,
        num_steps=size.num_groups // size.batch_groups,
        tallies=[],
    )
    # A rule counts the places of all engines.
    num_places = size.max_running * len(sampler.router.engines)
    others = asyncio.all_tasks()
    assert schedule.rival is not None
    try:
        await schedule.rival(
            jobs, sampler, dataclasses.replace(size, max_running=num_places), trainer
        )
    except* _EnoughError:
        pass
    await end_tasks(asyncio.all_tasks() - others)
    return trainer.tallies[0]


def _cpu_s(pid: int) -> tuple[float, float]:
    times = psutil.Process(pid).cpu_times()
    return time.process_time(), times.user + times.system


@asynccontextmanager
async def _sampler(size: WorkSize, engines: Sequence[EngineInfo]) -> AsyncIterator[Sampler]:
    clients = [SGLangClient(e.name, e.url, key=KEY, request_timeout_s=600.0) for e in engines]
    router = Router(clients, 600.0, max_running_requests=size.max_running)
    router.follow({e.name: 0 for e in engines}, trainer=0, max_staleness=0)
    polls = [asyncio.create_task(poll_load(router, c, LOAD_EVERY_S)) for c in clients]
    try:
        yield Sampler(router, max_retries=2)
    finally:
        await end_tasks(polls)
        for client in clients:
            await client.close()
