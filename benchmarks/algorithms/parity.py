"""Compares losses, corrections, advantages, aggregations and KL estimators with those of TRL, verl
and OpenRLHF, at equal settings.

make bench-parity       # installs the three, without what they depend on, into build/parity
python -m benchmarks.algorithms.parity --rivals build/parity

The batches are random, in float64, with masks in the middle of answers, tokens of older policies
and ratios far from 1. Compared are a loss and its gradient by log-probability, or advantages; the
figure is the largest difference. Settings that differ from system to system (ddof, epsilon, clamps)
are made equal here, not in our functions; docs/algorithms.md lists what cannot be. A function of
ours that several systems or settings are compared with counts once.

Every comparison draws its own bounds, and each must be active: on some tokens, whose number is in
the table, and not on others. Off by a tenth in ours, it must show.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.table import Table

from benchmarks.algorithms.batch import OURS, TOLERANCE, Outcome, examine
from benchmarks.algorithms.openrlhf import openrlhf_comparisons
from benchmarks.algorithms.trl import trl_comparisons
from benchmarks.algorithms.verl import verl_comparisons
from benchmarks.report import Report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rivals", type=Path, help="folder in which the three are installed")
    rivals = parser.parse_args().rivals
    if rivals is None or not (rivals / "verl").is_dir():
        parser.error(
            f"--rivals={rivals}: they are not installed there; `make bench-parity` does it"
        )
    sys.path.append(str(rivals.resolve()))  # last: what is installed here comes first
    report = Report("Parity")
    systems = {
        "verl": verl_comparisons(),
        "OpenRLHF": openrlhf_comparisons(rivals.resolve()),
        "TRL": trl_comparisons(),
    }
    columns = ("system", "comparison", "functions of ours", "active", "difference")
    title = "Largest difference, and the tokens at which each bound is active"
    table = Table(*columns, title=title)
    outcomes = []
    for system, comparisons in systems.items():
        for name, comparison in comparisons.items():
            outcome = examine(f"{system} {name}", comparison)
            table.add_row(system, name, ", ".join(outcome.functions), *cells(outcome))
            outcomes.append(outcome)
    report.show(table)
    worst = max(outcome.difference for outcome in outcomes)
    problems = sum(len(outcome.problems) for outcome in outcomes)
    compared = {name for outcome in outcomes for name in outcome.functions}
    how = "of a loss, a gradient or an advantage"
    report.target("max_difference", worst, "<=", TOLERANCE, how)
    report.target("bounds_not_compared", problems, "<=", 0, "idle, or off by a tenth unnoticed")
    count = sum(len(outcome.active) for outcome in outcomes)
    report.figure("bounds", count, "of all comparisons, active on some tokens and not on others")
    report.figure("functions", len(compared), f"of our {len(OURS)} compared, each counted once")
    how = "some of one function at several settings or systems"
    report.figure("comparisons", len(outcomes), how)
    report.row("not compared", ", ".join(sorted(OURS - compared)))
    report.close()
    return int(worst > TOLERANCE or problems > 0)


def cells(outcome: Outcome) -> tuple[str, str]:
    """The columns of its bounds and of its difference."""
    counts = [f"{name.removeprefix('correction_')} {n}" for name, n in outcome.active.items()]
    bounds = f"{', '.join(counts)} of {outcome.num_values}" if counts else ""
    if outcome.problems:
        bounds += f" [red]{'; '.join(outcome.problems)}[/red]"
    figure = f"{outcome.difference:.1e}"
    return bounds, figure if outcome.difference <= TOLERANCE else f"[red]{figure}[/red]"


if __name__ == "__main__":
    sys.exit(main())
