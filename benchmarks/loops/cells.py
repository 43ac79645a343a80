"""Cells of a table: each is measured once and its result stays in a file, so that a benchmark goes
on where it was stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Cell = tuple[str | int, ...]
"""The parts of its name, such as an algorithm, a setting and a seed."""


def plain(name: str) -> str:
    return name.replace(" + ", "_").replace(" ", "_")


def path_of(folder: Path, cell: Cell) -> Path:
    return folder / f"{'-'.join(plain(str(part)) for part in cell)}.json"


def measure_missing(
    folder: Path,
    cells: Sequence[Cell],
    measure: Callable[[Cell], Mapping[str, Any]],
    jobs: int = 1,
) -> None:
    """Calls `measure` for the cells that have no result in `folder` yet, in this order."""
    folder.mkdir(parents=True, exist_ok=True)

    def run(cell: Cell) -> None:
        path = path_of(folder, cell)
        if not path.exists():
            half = path.with_suffix(".half")  # a benchmark may be killed while it writes
            half.write_text(json.dumps(measure(cell)))
            half.rename(path)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, cells))


def results_of(folder: Path, cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """The results that exist so far, in the order of `cells`."""
    paths = (path_of(folder, cell) for cell in cells)
    return [json.loads(path.read_text()) for path in paths if path.exists()]
