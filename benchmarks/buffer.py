"""The replay buffer against a Ray actor queue, bare Redis and its own targets; ends with RESULT.

    python -m benchmarks.buffer            # about ten minutes
    python -m benchmarks.buffer --short    # every part within seconds; the figures mean little

What is compared runs in turn, in the same minutes on the same machine, so ratios can be trusted
more than rates. Each round is one warm team of processes: 2 producers and 2 consumers.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.replay_buffer.depth import measure_depth
from benchmarks.replay_buffer.memory import measure_memory
from benchmarks.replay_buffer.rates import measure_rates
from benchmarks.replay_buffer.stage import SHORT, Sizes, Stage
from benchmarks.replay_buffer.waiting import measure_waiting
from benchmarks.report import Report

PARTS = {
    "waiting": measure_waiting,
    "memory": measure_memory,
    "rates": measure_rates,
    "depth": measure_depth,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="every part once, quickly")
    parser.add_argument("--depth", type=int, help="groups in the deep buffer (default 1,000,000)")
    parser.add_argument("--url", help="measure this server; default: start one")
    parser.add_argument("--only", choices=PARTS, help="one part of it")
    arguments = parser.parse_args()
    sizes = SHORT if arguments.short else Sizes()
    if arguments.depth is not None:
        sizes = replace(sizes, depth=arguments.depth)
    report = Report("replay buffer")
    with tempfile.TemporaryDirectory(prefix="leash-bench-") as folder:
        stage = Stage(arguments.url, Path(folder))
        try:
            for name, measure in PARTS.items():
                if arguments.only in (None, name):
                    measure(report, stage, sizes)
        finally:
            stage.close()
    report.close()


if __name__ == "__main__":
    main()
