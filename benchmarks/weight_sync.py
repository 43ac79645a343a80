"""The checkpoint engine against the wire, other ways to move weights and its own targets.

python -m benchmarks.weight_sync                       # the wire to a receiver, engines under load
python -m benchmarks.weight_sync --full                # two receivers as well, and pauses by mode
python -m benchmarks.weight_sync --only pause_500M     # a part that runs only by its name
python -m benchmarks.weight_sync --only chains         # the same, over two links; needs root
python -m benchmarks.weight_sync --short               # small sizes; the figures mean little
"""

from __future__ import annotations

import argparse
from importlib import import_module

from benchmarks.report import Report

PARTS = ("wire", "fleet", "pause")
BY_NAME = ("pause_500M", "chains")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="every part once, quickly")
    parser.add_argument("--only", choices=(*PARTS, *BY_NAME), help="one part of it")
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
