"""Compares losses, corrections, advantages, aggregations and KL estimators with those of TRL, verl
and OpenRLHF, at equal settings.

make bench-parity       # installs the three, without what they depend on, into build/parity
python benchmarks/parity.py --rivals build/parity

The batches are random, in float64, with masks in the middle of answers, tokens of older policies
and large ratios. Compared are a loss and its gradient by log-probability, or advantages; the figure
is the largest difference. Settings that differ from system to system (ddof, epsilon, clamps) are
made equal here, not in our functions; docs/algorithms.md lists what cannot be. A function of ours
that several systems or settings are compared with counts once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# This folder, which comes first, would hide the package `buffer` behind `buffer.py`.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.table import Table

from benchmarks.algorithms.batch import OURS, difference
from benchmarks.algorithms.openrlhf import openrlhf_pairs
from benchmarks.algorithms.trl import trl_pairs
from benchmarks.algorithms.verl import verl_pairs
from benchmarks.report import Report

BOUND = 1e-5


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
    worst, count, compared = 0.0, 0, set[str]()
    table = Table(title="Largest difference")
    for column in ("system", "comparison", "functions of ours", "difference"):
        table.add_column(column)
    systems = {
        "verl": verl_pairs(),
        "OpenRLHF": openrlhf_pairs(rivals.resolve()),
        "TRL": trl_pairs(),
    }
    for system, pairs in systems.items():
        for name, pair in pairs.items():
            found, names = difference(pair)
            figure = f"{found:.1e}" if found <= BOUND else f"[red]{found:.1e}[/red]"
            table.add_row(system, name, ", ".join(names), figure)
            worst, count = max(worst, found), count + 1
            compared.update(names)
    report.show(table)
    report.target("max_difference", worst, "<=", BOUND, "of a loss, a gradient or an advantage")
    report.figure("functions", len(compared), f"of our {len(OURS)} compared, each counted once")
    report.figure("comparisons", count, "some of one function at several settings or systems")
    report.row("not compared", ", ".join(sorted(OURS - compared)))
    report.close()
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
