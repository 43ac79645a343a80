"""Rollouts with a heavy tail, scheduled four ways at a real engine, and what the pool itself costs.

    python benchmarks/rollout.py [--short] [--only strategies|efficiency|stub|rewards]

The last line is RESULT and a JSON object. Each ratio's two sides ran in this one process, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import Report
from benchmarks.rollout_efficiency import measure_efficiency, measure_rewards, measure_stub
from benchmarks.rollout_strategies import measure_strategies
from benchmarks.rollout_work import SHORT, WorkSize

PARTS = ("strategies", "efficiency", "stub", "rewards")


async def measure(size: WorkSize, parts: list[str], report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="leash-bench-") as name:
        folder = Path(name)
        if "strategies" in parts:
            await measure_strategies(size, folder / "strategies", report)
        if "efficiency" in parts:
            await measure_efficiency(size, folder / "efficiency", report)
        if "stub" in parts:
            await measure_stub(size, folder / "stub", report)
        if "rewards" in parts:
            await measure_rewards(size, folder / "rewards", report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--only", action="append", choices=PARTS, help="this part alone")
    arguments = parser.parse_args()
    report = Report("rollouts")
    size = SHORT if arguments.short else WorkSize()
    asyncio.run(measure(size, arguments.only or list(PARTS), report))
    report.close()


if __name__ == "__main__":
    main()
