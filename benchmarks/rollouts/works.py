"""Part WORKS: ten rules that schedule rollouts, ours twice, on six works, at emulated engines.

The engines, the clock, the colocated schedules and `of the bound` are those of part SCALE, with 6
engines of 16 places and 2 GPUs that train; a step takes 16 groups of 4 answers. A work says how
long its answers are and what a step's training takes, as a share of the generation of its tokens at
full engines; an answer of several turns leaves its engine between them, and a reward comes that
long after the last token. No rule trains what is more than 8 steps old, but partial rollouts, which
put a prompt off twice, the counter, which trains what comes, and quota and repack, which bound the
number alone.

`age` is the trainer's version less that of a group's oldest token, mean and most; `wasted` the
tokens that were thrown away; `trained length` the mean answer trained, over that of the same number
of prompts in their order. Rules that carry something from step to step are measured in the later
half of the steps.

Part RULES plays the same under a virtual clock, for ten times as many steps, so that what lay ready
at the begin of the measured half counts for little. `early length` is the trained length of the
first 12 steps.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from rich.table import Table

from benchmarks.report import Report
from benchmarks.rollouts.published.rules import Quota, Repack, Requeue, Window
from benchmarks.rollouts.scale import (
    GPU,
    SCHEDULES,
    Schedule,
    mean_and_token_s,
    measure_schedule,
    measured,
    num_jobs,
    with_steps,
)
from benchmarks.rollouts.task import Pauses
from benchmarks.rollouts.virtual import Ours, play_virtually
from benchmarks.rollouts.work import NO_PAUSES, WorkSize, draw_jobs


class Work(NamedTuple):
    median: int
    p99_over_p50: float
    training: float
    """Seconds of a token's training, over those of its generation at full engines."""
    pauses: Pauses = NO_PAUSES


WORKS = {
    "balanced": Work(6000, 3.0, 1.0),
    "generation_bound": Work(6000, 4.0, 0.3),
    "training_bound": Work(6000, 4.0, 2.0),
    "long_tailed": Work(5000, 9.5, 0.75),
    "multi_turn": Work(6000, 4.0, 0.75, Pauses(turns=4, turn_s=10.0)),
    "reward_heavy": Work(6000, 4.0, 0.75, Pauses(reward_s=30.0)),
}
RULES = {
    "ours": SCHEDULES["ours"],
    "in_place": SCHEDULES["in_place"],
    "colocated": SCHEDULES["colocated"],
    "sync": SCHEDULES["sync"],
    "one_off": SCHEDULES["one_off"],
    "partial": SCHEDULES["partial"],
    "quota": Schedule("quota a transfer, as verl", Quota.play),
    "counter": SCHEDULES["counter"],
    "window": Schedule("windowed FIFO, as torchtitan", Window.play, retracts=False),
    "requeue": Schedule("what is old runs again, as tinker", Requeue.play, retracts=False),
    "repack": Schedule("last answers move, as Laminar", Repack.play, retracts=False),
}
RULES_COLUMNS = ("", "of the bound", "age", "oldest", "wasted", "early length", "trained length")
COLUMNS = ("", "s a step", "ours over it", "of the bound", "age", "wasted", "trained length")


async def measure_works(size: WorkSize, folder: Path, report: Report) -> None:
    for name, work in WORKS.items():
        await _measure_work(name, work, sized(size, work), folder, report)


def sized(size: WorkSize, work: Work) -> WorkSize:
    size = dataclasses.replace(
        size,
        scale_speed=size.works_speed,
        scale_engines=size.works_engines,
        scale_groups=size.works_groups,
        scale_steps=size.works_steps,
    )
    turns, turn_s, reward_s = work.pauses
    return dataclasses.replace(
        size,
        group_size=4,
        batch_groups=size.scale_groups,
        num_groups=num_jobs(size),
        median_tokens=work.median // GPU.tokens,
        p99_over_p50=work.p99_over_p50,
        longest=31_744 // GPU.tokens,
        max_staleness=size.scale_staleness,
        max_running=size.works_places,
        pauses=Pauses(turns, turn_s / size.scale_speed, reward_s / size.scale_speed),
        oversampling=1.5,
    )


async def _measure_work(
    name: str, work: Work, size: WorkSize, folder: Path, report: Report
) -> None:
    jobs = draw_jobs(size, seed=0)
    length, token_s = mean_and_token_s(size, jobs)
    tokens = length * size.group_size * size.batch_groups
    bound_s = tokens * token_s * max(1.0, work.training)
    title = f"{name.replace('_', ' ')}: a step generates for {tokens * token_s:.1f} s and trains"
    table = Table(title=f"{title} for {tokens * token_s * work.training:.1f} s")
    for column in COLUMNS:
        table.add_column(column)
    rates: dict[str, float] = {}
    for rule, schedule in RULES.items():
        found = await measure_schedule(rule, schedule, size, jobs, folder, token_s * work.training)
        rates[rule] = found.rate
        step_s, length = tokens / found.rate, found.mean / found.mean_in_turn
        report.note(f"works_of_bound_{rule}_{name}", bound_s / step_s)
        report.note(f"works_age_{rule}_{name}", found.age)
        report.note(f"works_wasted_{rule}_{name}", found.wasted)
        report.note(f"works_length_{rule}_{name}", length)
        row = (
            f"{step_s:.1f}",
            f"{rates['ours'] / found.rate:.2f}",
            f"{bound_s / step_s:.2f}",
            f"{found.age:.1f} ({found.oldest})",
            f"{found.wasted:.1%}",
            f"{length:.2f}",
        )
        report.say(f"{name}, {rule}: {', '.join(row)}")
        table.add_row(f"{rule}: {schedule.what}", *row)
    report.show(table)
    best = max((rule for rule in rates if RULES[rule].rival), key=lambda rule: rates[rule])
    how = f"{name}: trained tokens/s of ours over the fastest other, {best}"
    report.target(f"works_vs_best_{name}", rates["ours"] / rates[best], ">=", 1.0, how)


async def measure_rules(size: WorkSize, folder: Path, report: Report) -> None:
    at_once = dataclasses.replace(size, works_speed=1.0, works_steps=size.rules_steps)
    for name, work in WORKS.items():
        table = Table(title=name.replace("_", " "))
        for column in RULES_COLUMNS:
            table.add_column(column)
        one = sized(at_once, work)
        rates = {rule: await _play(rule, name, one, table, report) for rule in RULES}
        report.show(table)
        for ours in ("ours", "in_place"):
            # A version costs those more that compute again what it finds running.
            kind = [rule for rule, one in RULES.items() if one.retracts is RULES[ours].retracts]
            best = max((rule for rule in kind if RULES[rule].rival), key=lambda rule: rates[rule])
            how = f"{name}: {ours} over the fastest other of its kind, {best}"
            report.target(f"rules_{ours}_{name}", rates[ours] / rates[best], ">=", 1.0, how)


async def _play(rule: str, name: str, size: WorkSize, table: Table, report: Report) -> float:
    """The part of the bound, mean of the seeds."""
    training, schedule = WORKS[name].training, RULES[rule]
    if schedule.rival is None:
        schedule = schedule._replace(rival=Ours.play)
    played = with_steps(schedule, size)
    plays = list[tuple[float, ...]]()
    for seed in size.rules_seeds:
        # Partial rollouts train more than a batch once prompts have been put off twice.
        jobs = draw_jobs(dataclasses.replace(size, num_groups=2 * size.num_groups), seed)
        _, token_s = mean_and_token_s(size, jobs)
        tally = await asyncio.to_thread(play_virtually, schedule, played, jobs, token_s * training)
        found = measured(schedule, played, jobs, tally, tally.wasted_tokens)
        first = tally.lengths[: 12 * size.batch_groups]
        early = sum(first) / sum(job.num_tokens for job in jobs[: len(first)])
        rate, length = found.rate * token_s * max(1.0, training), found.mean / found.mean_in_turn
        plays.append((rate, found.age, max(tally.ages), found.wasted, early, length))
    report.say(f"{name}, {rule}: {', '.join(f'{play[0]:.3f}' for play in plays)}")
    means: list[float] = [mean(column) for column in zip(*plays, strict=True)]
    for column, figure in zip(RULES_COLUMNS[1:], means, strict=True):
        report.note(f"rules_{column.replace(' ', '_')}_{rule}_{name}", figure)
    table.add_row(f"{rule}: {schedule.what}", *(f"{figure:.3f}" for figure in means))
    return means[0]
