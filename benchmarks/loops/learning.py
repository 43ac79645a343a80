"""Reward over wall time and over trained tokens, by the rule that schedules rollouts.

python -m benchmarks.loops.learning                         # 33 launches: half an hour on two cores
python -m benchmarks.loops.learning --works calculator --seeds 2 --policies synchronous "ours 2"
python -m benchmarks.loops.learning --short                 # one launch of a few steps

Each run is a launch of a user, with the same engine, trainer, buffer, algorithm, prompts and model
to begin with; only the settings of benchmarks/loops/policies.py differ. `ours K` is this project's
own rule at max_staleness K, the others are what its settings can say of published ones:
docs/performance.md names their sources and the points in which they differ. One launch runs after
the other, the policies of each seed in a random order.

A launch's figures are kept in --folder, so that an interrupted benchmark goes on; remove the folder
to measure again. Seconds are since the first step's wait for its batch: what a start takes is the
same for all. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from rich.table import Table

from benchmarks.loops import launches
from benchmarks.loops.cells import Cell, measure_missing, plain, results_of
from benchmarks.loops.policies import BASELINE, POLICIES
from benchmarks.loops.work import CALCULATOR, QUICKSTART, Work
from benchmarks.report import Report

WORKS = {"quickstart": QUICKSTART, "calculator": CALCULATOR}
RECORD_ALL = "rollout.log_rate=1"
"""The answers of every group, for their lengths and versions."""
COLUMNS = {
    "learning": {
        "step_s": "s a step",
        "goal_s": "s to the goal",
        "goal_tokens": "tokens to it",
        "reward": "last rewards",
        "accuracy": "held out",
    },
    "of what it learns": {
        "staleness": "staleness",
        "staleness_max": "most",
        "waited": "trainer waits",
        "wasted": "wasted",
        "length": "length",
        "mixed": "mixed",
    },
}
"""Wasted: fraction of the generated tokens that failed, were stopped or became too old. Length:
mean of the trained answers over that of the completed ones. Mixed: fraction of the completed
answers that several versions sampled."""
OVER_STEPS = {"goal_s": "seconds", "goal_tokens": "tokens"}
"""Where the mean of the last rewards is the goal."""
DEFAULT = "ours 2"


def cells_of(name: str, work: Work, policies: Sequence[str], num_seeds: int) -> list[Cell]:
    return [
        (name, work.num_steps, policy, seed)
        for seed in range(num_seeds)
        for policy in random.Random(seed).sample(policies, len(policies))
    ]


def measure(
    report: Report,
    name: str,
    work: Work,
    folder: Path,
    cells: Sequence[Cell],
    policies: Mapping[str, Sequence[str]] = POLICIES,
    read: Callable[[Path], dict[str, Any]] = launches.read_run,
) -> None:
    place = folder / name

    def train(cell: Cell) -> dict[str, Any]:
        *_, policy, seed = cell
        if not (place / "model").exists():
            place.mkdir(parents=True, exist_ok=True)
            launches.prepare(work, place)
        run = launches.train(work, place, int(seed), [RECORD_ALL, *policies[str(policy)]])
        found = read(run)
        shutil.rmtree(run)
        report.say(f"{name}, {policy}, seed {seed}: {found['step_s']:.3f} s a step")
        return found

    measure_missing(folder, cells, train)


Found = Mapping[str, Sequence[dict[str, Any]]]
"""The runs of each policy."""


def summarize(report: Report, name: str, work: Work, found: Found) -> None:
    for title, columns in COLUMNS.items():
        title = f"{work.title}, {work.num_steps} steps: {title}"
        table = Table("", *columns.values(), title=title)
        for policy, runs in found.items():
            cells = {column: figures(work, runs, column) for column in columns}
            table.add_row(policy, *map(shown, cells.values()))
            for column, values in cells.items():
                if not isnan(fmean(values)):
                    report.note(f"{name}_{plain(policy)}_{column}", fmean(values))
        report.show(table)
    if {DEFAULT, BASELINE} <= found.keys():
        (seconds, reward), (base_seconds, base_reward) = (
            [fmean(figures(work, found[policy], column)) for column in ("goal_s", "reward")]
            for policy in (DEFAULT, BASELINE)
        )
        how = f"of the last rewards, by {DEFAULT} against {BASELINE}"
        report.target(f"{name}_lost", base_reward - reward, "<=", 0.02, how)
        if not isnan(speedup := base_seconds / seconds):
            how = f"seconds to the goal, {BASELINE} over {DEFAULT}"
            report.target(f"{name}_speedup", speedup, ">=", 1.0, how)


def figures(work: Work, runs: Sequence[Mapping[str, Any]], column: str) -> list[float]:
    """The figure of each run; NaN where one never reached the goal or measured nothing."""
    found = [run.get(column) for run in runs]
    if over := OVER_STEPS.get(column):
        found = [launches.reached(work.goal, run["rewards"], run[over]) for run in runs]
    return [nan if value is None else value for value in found]


def shown(values: Sequence[float]) -> str:
    """Mean and deviation of the seeds."""
    if isnan(fmean(values)):
        return ""
    spread = f" ± {pstdev(values):.2g}" if len(values) > 1 else ""
    return f"{fmean(values):.3g}{spread}"


def draw(path: Path, work: Work, found: Found) -> None:
    figure, (over_time, over_tokens) = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    ours = [policy for policy in found if policy.startswith("ours")]
    others = [policy for policy in found if policy not in ours and policy != BASELINE]
    for policy, runs in found.items():
        style: dict[str, Any] = {"color": "black", "linewidth": 2}
        if policy in ours:
            style = {"color": plt.colormaps["viridis"](ours.index(policy) / len(ours))}
        elif policy in others:
            style = {"color": f"C{others.index(policy)}", "linestyle": "--"}
        plot_mean(over_time, runs, "seconds", label=policy, **style)
        plot_mean(over_tokens, runs, "tokens", **style)
    over_time.set_xlabel("seconds of training")
    over_tokens.set_xlabel("trained tokens")
    over_time.set_ylabel(f"mean reward of {launches.LAST_REWARDS} steps")
    over_time.legend(fontsize="small")
    figure.suptitle(work.title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_mean(axes: Axes, runs: Sequence[Mapping[str, Any]], over: str, **style: Any) -> None:
    """The mean of the runs' curves, as far as the shortest one reaches."""
    width = launches.LAST_REWARDS
    ats = [run[over][width - 1 :] for run in runs]
    rewards = [np.convolve(run["rewards"], np.full(width, 1 / width), "valid") for run in runs]
    grid = np.linspace(max(at[0] for at in ats), min(at[-1] for at in ats), 200)
    axes.plot(grid, np.mean([*map(np.interp, [grid] * len(ats), ats, rewards)], 0), **style)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="one launch of a few steps")
    parser.add_argument("--folder", type=Path, default=Path("build/learning"))
    parser.add_argument("--works", nargs="*", choices=[*WORKS], default=["quickstart"])
    parser.add_argument("--policies", nargs="*", choices=[*POLICIES], default=[*POLICIES])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="instead of the works' own")
    given = parser.parse_args()
    works = {name: WORKS[name] for name in given.works}
    if given.steps:
        works = {name: replace(work, num_steps=given.steps) for name, work in works.items()}
    with tempfile.TemporaryDirectory() as scratch:
        if given.short:
            given.folder, given.seeds, given.policies = Path(scratch), 1, ["quota per sync"]
            settings = ["trainer.warm_start.num_steps=0"]
            works = {"quickstart": replace(QUICKSTART, num_steps=5, settings=settings)}
        report = Report("Learning by schedule")
        for name, work in works.items():
            cells = cells_of(name, work, given.policies, given.seeds)
            measure(report, name, work, given.folder.resolve(), cells)
            found = {
                policy: results_of(given.folder, (cell for cell in cells if policy in cell))
                for policy in given.policies
            }
            summarize(report, name, work, found)
            draw(given.folder / f"{name}.png", work, found)
            report.say(f"{given.folder / name}.png has the plot")
    report.close()


if __name__ == "__main__":
    main()
