"""The checkpoint engine against the wire, other ways to move weights and its own targets.

python benchmarks/weight_sync.py            # some ten minutes
python benchmarks/weight_sync.py --short    # small sizes; the figures mean little
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
# Run as a file, this folder would come first and hide the package `buffer` behind `buffer.py`.
sys.path[:] = [str(_HERE.parent), *(p for p in sys.path if Path(p or ".").resolve() != _HERE)]

from benchmarks.report import Report  # noqa: E402
from benchmarks.weights_fleet import measure_fleet  # noqa: E402
from benchmarks.weights_wire import measure_wire  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="every part once, quickly")
    parser.add_argument("--only", choices=["wire", "fleet"], help="one part of it")
    arguments = parser.parse_args()
    report = Report("checkpoint engine")
    if arguments.only != "fleet":
        measure_wire(report, is_short=arguments.short)
    if arguments.only != "wire":
        measure_fleet(report, is_short=arguments.short)
    report.close()


if __name__ == "__main__":
    main()
