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
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
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
    num_jobs,
)
from benchmarks.rollouts.task import Pauses
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
    mean, token_s = mean_and_token_s(size, jobs)
    tokens = mean * size.group_size * size.batch_groups
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
