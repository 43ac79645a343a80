"""The checkpoint engine against the wire, other ways to move weights and its own targets.

python benchmarks/weight_sync.py            # some ten minutes
python benchmarks/weight_sync.py --short    # small sizes; the figures mean little
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

# This folder, which comes first, would hide the package `buffer` behind `buffer.py`.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Report

PARTS = ("wire", "fleet", "pause")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="every part once, quickly")
    parser.add_argument("--only", choices=PARTS, help="one part of it")
    arguments = parser.parse_args()
    report = Report("checkpoint engine")
    for part in PARTS:
        if arguments.only in (None, part):
            # Not before its turn: the many processes of WIRE then need not load transformers.
            module = import_module(f"benchmarks.weights.{part}")
            module.measure(report, is_short=arguments.short)
    report.close()


if __name__ == "__main__":
    main()
