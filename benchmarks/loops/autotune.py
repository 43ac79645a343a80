"""Autotune beside fixed values of max_staleness, in launches of two works.

python -m benchmarks.loops.autotune                     # 30 launches: 40 minutes on two cores
python -m benchmarks.loops.autotune --short             # one seed instead of three
python -m benchmarks.loops.autotune --works spans --settings "fixed 2" "autotune from 8"

The quickstart learns more slowly here than it could, so that its goal comes after first changes.
The answers of the other work are 1 to 60 tokens long: a batch waits for its longest. Launches are
kept in --folder, as those of learning.py, which also says more of how they are made.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from numpy import nan_to_num
from rich.table import Table

from benchmarks.loops import launches, learning
from benchmarks.loops.cells import plain, results_of
from benchmarks.loops.work import QUICKSTART, SPANS
from benchmarks.report import Report
from controller.metrics.history import TUNED, numbers, of_kind, read_metrics

WORKS = {
    "quickstart": replace(QUICKSTART, num_steps=120, settings=["trainer.learning_rate=1e-4"]),
    "spans": SPANS,
}
SETTINGS = {f"fixed {k}": [f"buffer.max_staleness={k}"] for k in (0, 2, 8)}
SETTINGS |= {
    f"autotune from {k}": [f"buffer.max_staleness={k}", "buffer.autotune={steps: 10}"]
    for k in (2, 8)
}
COLUMNS = {"goal_s": "s to the goal", "all_s": "s in all", "reward": "last rewards"}


def read(run: Path) -> dict[str, Any]:
    """With `bounds`, the values of max_staleness and since which second; and `excess`: the most by
    which a step's oldest group exceeded each bound that was in force since the step before."""
    found, records = launches.read_run(run), read_metrics(run / "metrics.jsonl")
    steps, ends = of_kind(records, "step"), found["seconds"]
    bounds = [(-inf, of_kind(records, "buffer")[0].count("max_staleness"))]
    began, excess, since = steps[-1].t - ends[-1], -inf, 0.0
    bounds += [(one.t - began, int(str(one.values["after"]))) for one in of_kind(records, TUNED)]
    for end, staleness in zip(ends, numbers(steps, "staleness_max"), strict=True):
        # The record of a change may be a second later than the change.
        later = [value for t, value in bounds if since < t <= end + 1.0]
        in_force = [[value for t, value in bounds if t <= since][-1], *later]
        excess, since = max(excess, staleness - max(in_force)), end
    return {**found, "all_s": ends[-1], "bounds": bounds[1:], "excess": excess}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="one seed")
    parser.add_argument("--folder", type=Path, default=Path("build/autotune"))
    parser.add_argument("--works", nargs="*", choices=[*WORKS], default=[*WORKS])
    parser.add_argument("--settings", nargs="*", choices=[*SETTINGS], default=[*SETTINGS])
    given = parser.parse_args()
    report, num_seeds = Report("Autotune"), 1 if given.short else 3
    for name in given.works:
        work, folder = WORKS[name], given.folder.resolve()
        cells = learning.cells_of(name, work, given.settings, num_seeds)
        learning.measure(report, name, work, folder, cells, SETTINGS, read)
        table = Table("", *COLUMNS.values(), "max_staleness", title=work.title)
        best = dict.fromkeys(COLUMNS, inf)
        for setting in given.settings:
            runs = results_of(folder, (cell for cell in cells if setting in cell))
            found = {column: learning.figures(work, runs, column) for column in COLUMNS}
            changes = ["".join(f", {k} at {t:.0f} s" for t, k in run["bounds"]) for run in runs]
            path = "; ".join(setting.split()[-1] + one for one in changes)
            table.add_row(setting, *map(learning.shown, found.values()), path)
            for column in ("goal_s", "all_s"):
                mean = nan_to_num(fmean(found[column]), nan=1e9)  # one never reached it
                figure = f"{name}_{plain(setting)}_{column}"
                report.note(figure, mean)
                if setting.startswith("fixed"):
                    best[column] = min(best[column], mean)
                else:
                    how = f"{COLUMNS[column]}, over the best fixed value"
                    report.target(f"{figure}_of_best", mean / best[column], "<=", 1.05, how)
            excess, how = max(0, *(run["excess"] for run in runs)), "versions above the bound"
            report.target(f"{name}_{plain(setting)}_excess", excess, "<=", 0, how)
        report.show(table)
    report.close()


if __name__ == "__main__":
    main()
