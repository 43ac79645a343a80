"""Seconds by file of the last tests, and what they were in older reports: `times.py NEW [OLD]`.

Each argument is a folder of the XML files that `make test` and `make test-long` write.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table


def seconds_by_file(reports: Path) -> Counter[str]:
    seconds: Counter[str] = Counter()
    for report in reports.glob("*.xml"):
        for case in ElementTree.parse(report).iter("testcase"):
            seconds[case.attrib["classname"]] += float(case.attrib["time"])  # type: ignore[assignment]
    return seconds


def main(new: str, old: str | None = None) -> None:
    now = seconds_by_file(Path(new))
    before = seconds_by_file(Path(old)) if old else Counter[str]()
    table = Table(
        "file", *(["before, s"] if old else []), "s", caption=f"{now.total():.0f} s in all"
    )
    for file, seconds in sorted((now | before).items(), key=lambda item: -item[1]):
        older = [f"{before[file]:.1f}"] if old else []
        if seconds >= 1:
            table.add_row(file, *older, f"{now[file]:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
