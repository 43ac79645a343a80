"""Rollouts with a heavy tail at a real engine and an emulated GPU, prefixes, and the pool's cost.

    python -m benchmarks.rollout [--short] [--only PART]

The last line is RESULT and a JSON object. Each ratio's two sides ran in this one process, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from benchmarks.report import Report
from benchmarks.rollouts.cost import measure_cost
from benchmarks.rollouts.efficiency import measure_efficiency, measure_rewards, measure_stub
from benchmarks.rollouts.fleet import measure_fleet
from benchmarks.rollouts.gpu import measure_gpu, measure_training
from benchmarks.rollouts.prefix import measure_prefixes
from benchmarks.rollouts.scale import measure_scale
from benchmarks.rollouts.scene import build_model, engine_at
from benchmarks.rollouts.strategies import measure_strategies
from benchmarks.rollouts.work import SHORT, WorkSize
from benchmarks.rollouts.works import measure_rules, measure_works

AT_AN_ENGINE = {"strategies": measure_strategies, "efficiency": measure_efficiency}
ALONE = {
    "gpu": measure_gpu,
    "training": measure_training,
    "prefix": measure_prefixes,
    "stub": measure_stub,
    "cost": measure_cost,
    "fleet": measure_fleet,
    "scale": measure_scale,
    "rewards": measure_rewards,
}
BY_NAME = {"works": measure_works, "rules": measure_rules}
"""Run only if they are named."""


async def measure(size: WorkSize, only: list[str], report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="leash-bench-") as name:
        folder = Path(name)
        build_model(size, folder)
        chosen = [part for part in AT_AN_ENGINE if part in only]
        if chosen:
            async with engine_at(folder, size) as engine:
                for part in chosen:
                    await AT_AN_ENGINE[part](size, folder, engine, report)
        for part, run in (ALONE | BY_NAME).items():
            if part in only:
                await run(size, folder, report)


def main() -> None:
    parts = [*AT_AN_ENGINE, *ALONE]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="small sizes, to see that it works")
    parser.add_argument(
        "--only", action="append", choices=[*parts, *BY_NAME], help="this part alone"
    )
    arguments = parser.parse_args()
    report = Report("rollouts")
    size = SHORT if arguments.short else WorkSize()
    asyncio.run(measure(size, arguments.only or parts, report))
    report.close()


if __name__ == "__main__":
    main()
