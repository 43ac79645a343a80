"""The same training work by this project and by TRL: seconds, tokens, and what was learnt.

python -m benchmarks.loops.end_to_end --rivals build/parity     # half an hour on two cores
python -m benchmarks.loops.end_to_end --works quickstart --rounds 3
python -m benchmarks.loops.end_to_end --short                   # a few steps; without TRL

Model to begin with, prompts and their order, rewards, optimizer, number and size of groups are the
same; each has all cores of this machine. In each round they run one after the other in a random
order.

    leash         the launch of a user: engines, buffer, ranks, at the default max_staleness of 2
    leash_1       the same at max_staleness 1, if --who names it
    synchronous   the same at max_staleness 0
    TRL           GRPOTrainer with transformers' own generate, which is synchronous

Seconds are from the command to its end; a step's are the median of those between two steps' ends,
the first ones left out. CPU seconds are the whole machine's while it ran: leave it alone. The bound
is the time that the steps' CPU seconds take if all cores are busy; of the bound is that over the
time that they took.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import psutil
import torch
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.loops import launches
from benchmarks.loops.launches import LAST_REWARDS
from benchmarks.loops.work import WORKS, Work, load
from benchmarks.report import Report
from configs.schema import Config
from controller.metrics.history import read_metrics
from rollout_pool.tasks.registry import build_task

STALENESS = {"leash": 2, "leash_1": 1, "synchronous": 0}


@dataclass(kw_only=True, slots=True, frozen=True)
class Step:
    ended_s: float
    """Since the command."""
    reward: float
    num_tokens: float
    """Tokens of its answers."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Run:
    seconds: float
    cpu_s: float
    steps: Sequence[Step]
    busy: Sequence[tuple[float, float]]
    """Seconds since the command, and CPU seconds of the machine since its start."""
    accuracy: float
    """Share of the held-out prompts whose greedy answer is right; 0 for work without answers."""

    @property
    def step_s(self) -> float:
        return launches.step_s([step.ended_s for step in self.steps])

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers over the seconds from the first step's end to the last's."""
        tokens = sum(step.num_tokens for step in self.steps[1:])
        return tokens / (self.steps[-1].ended_s - self.steps[0].ended_s)

    @property
    def of_bound(self) -> float:
        """From the first step's end to the last's."""
        there = [self.steps[0].ended_s, self.steps[-1].ended_s]
        first, last = np.interp(there, [at for at, _ in self.busy], [cpu for _, cpu in self.busy])
        return float(last - first) / (psutil.cpu_count() or 1) / (there[1] - there[0])

    def seconds_to(self, goal: float | None) -> float | None:
        """Until the mean of the last rewards is `goal`; None: never."""
        rewards = [step.reward for step in self.steps]
        return launches.reached(goal, rewards, [step.ended_s for step in self.steps])


def train(who: str, name: str, work: Work, folder: Path, seed: int, rivals: Path) -> Run:
    began = time.time()
    with busy_cores(began) as busy:
        if who == "TRL":
            command = [sys.executable, "-m", "benchmarks.loops.trl_loop", name, str(folder)]
            command += [str(rivals.resolve()), str(seed)]
            launches.run_to_its_end(command, folder / "trl.log")
        else:
            launches.train(work, folder, seed, [f"buffer.max_staleness={STALENESS[who]}"])
    seconds, cpu_s = busy[-1][0], busy[-1][1] - busy[0][1]
    config = load(work, folder)
    answers = config.trainer.groups_per_step * config.rollout.group_size
    trained = folder / ("trl" if who == "TRL" else "run/final_model")
    steps = [
        Step(
            ended_s=step["t"] - began,
            reward=step["reward"],
            num_tokens=step["tokens"] * answers,
        )
        for step in (steps_of_trl(folder) if who == "TRL" else steps_of_run(folder))
    ]
    assert len(steps) == work.num_steps, f"{who} made {len(steps)} steps"
    found = accuracy(config, folder, trained) if work.goal is not None else 0.0
    shutil.rmtree(folder / "run", ignore_errors=True)
    return Run(seconds=seconds, cpu_s=cpu_s, steps=steps, busy=busy, accuracy=found)


def steps_of_trl(folder: Path) -> Iterator[dict[str, Any]]:
    for line in (folder / "trl.log").read_text().splitlines():
        if line.startswith('{"t"'):
            yield json.loads(line)


def steps_of_run(folder: Path) -> Iterator[dict[str, Any]]:
    for step in read_metrics(folder / "run" / "metrics.jsonl", "step"):
        tokens = step.number("response_length_mean")
        yield {"t": step.t, "reward": step.number("reward_mean"), "tokens": tokens}


@contextmanager
def busy_cores(began: float) -> Iterator[list[tuple[float, float]]]:
    """`Run.busy`, ten times a second until the block ends."""
    looks, is_over = list[tuple[float, float]](), threading.Event()

    def look() -> None:
        times = psutil.cpu_times()
        busy = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
        looks.append((time.time() - began, busy))

    def watch() -> None:
        while not is_over.wait(0.1):
            look()

    look()
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield looks
    finally:
        is_over.set()
        watching.join()
        look()


@torch.no_grad()
def accuracy(config: Config, folder: Path, path: Path) -> float:
    task = build_task(config.task)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    prompts = [*task.eval_prompts()]
    asked = tokenizer([one.text for one in prompts], return_tensors="pt", padding=True)
    length = config.rollout.max_response_tokens
    answers = model.generate(**asked, max_new_tokens=length, do_sample=False)
    answers = tokenizer.batch_decode(
        answers[:, asked.input_ids.shape[1] :], skip_special_tokens=True
    )
    return mean(score >= 1 for score in map(task.score, prompts, answers))


def compare(report: Report, name: str, work: Work, given: argparse.Namespace) -> None:
    runs: dict[str, list[Run]] = {who: [] for who in given.who}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        launches.prepare(work, folder)
        for seed in range(given.rounds):
            for who in random.Random(seed).sample(given.who, len(given.who)):
                run = train(who, name, work, folder, seed, given.rivals)
                runs[who].append(run)
                report.say(f"{name}, {who}: {run.seconds:.1f} s, a step {run.step_s:.3f} s")
    columns = ["", "s in all", "s a step", "tokens/s", "CPU s"]
    columns += ["of the bound", "last rewards"]
    columns += ["s to the goal", "accuracy"] if work.goal is not None else []
    title = f"{work.title}; {work.num_steps} steps; medians of {given.rounds}"
    table = Table(*columns, title=title)
    for who, ended in runs.items():
        figures = {
            "seconds": median(run.seconds for run in ended),
            "step_s": median(run.step_s for run in ended),
            "tokens_per_s": median(run.tokens_per_s for run in ended),
            "cpu_s": median(run.cpu_s for run in ended),
            "of_bound": median(run.of_bound for run in ended),
            "reward": median(mean(s.reward for s in run.steps[-LAST_REWARDS:]) for run in ended),
        }
        if work.goal is not None:
            reached = [seconds for run in ended if (seconds := run.seconds_to(work.goal))]
            figures["goal_s"] = median(reached) if len(reached) == len(ended) else float("nan")
            figures["accuracy"] = median(run.accuracy for run in ended)
        table.add_row(who, *(f"{value:.3g}" for value in figures.values()))
        for figure, value in figures.items():
            if value == value:
                report.note(f"{name}_{who}_{figure}".lower(), value)
    report.show(table)
    if {"leash", "TRL"} <= runs.keys():
        ratio = median(run.step_s for run in runs["leash"]) / median(r.step_s for r in runs["TRL"])
        bound = 2.0 if name == "quickstart" else 1.0
        report.target(f"{name}_step_over_trl", ratio, "<=", bound, "seconds a step, over TRL's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a few steps; the figures mean little")
    parser.add_argument("--works", nargs="*", choices=[*WORKS], default=[*WORKS])
    parser.add_argument("--who", nargs="*", default=["leash", "synchronous", "TRL"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rivals", type=Path, default=Path("build/parity"))
    given = parser.parse_args()
    works = {name: WORKS[name] for name in given.works}
    if given.short:
        settings = ["trainer.warm_start.num_steps=0"]
        works = {"quickstart": replace(WORKS["quickstart"], num_steps=3, settings=settings)}
        given.rounds, given.who = 1, ["leash"]
    if "TRL" in given.who and not (given.rivals / "trl").is_dir():
        parser.error(
            f"--rivals={given.rivals}: TRL is not installed there; `make bench-e2e` does it"
        )
    report = Report("End to end")
    for name, work in works.items():
        compare(report, name, work, given)
    report.close()


if __name__ == "__main__":
    main()
