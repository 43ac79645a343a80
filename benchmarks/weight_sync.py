"""The checkpoint engine against the wire, other ways to move weights and its own targets.

python benchmarks/weight_sync.py                       # the wire to a receiver, engines under load
python benchmarks/weight_sync.py --full                # two receivers as well, and pauses by mode
python benchmarks/weight_sync.py --only pause_500M     # a part that runs only by its name
python benchmarks/weight_sync.py --short               # small sizes; the figures mean little
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
LARGE = "pause_500M"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="every part once, quickly")
    parser.add_argument("--only", choices=(*PARTS, LARGE), help="one part of it")
    parser.add_argument("--full", action="store_true", help="all parts, at all sizes")
    arguments = parser.parse_args()
    report = Report("checkpoint engine")
    usual = PARTS if arguments.full or arguments.short else PARTS[:2]
    for part in [arguments.only] if arguments.only else usual:
        # Not before its turn: the many processes of WIRE then need not load transformers.
        name, _, size = part.partition("_")
        module = import_module(f"benchmarks.weights.{name}")
        given: dict[str, object] = {"size": size} if size else {}
        if name == "wire":
            given = {"is_full": arguments.full}
        module.measure(report, is_short=arguments.short, **given)
    report.close()


if __name__ == "__main__":
    main()
