"""`make compare A=... B=...`: two runs side by side, and their curves in one picture."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from configs.run_files import read_json
from controller.metrics.history import read_metrics
from controller.report.plots import draw_over_each_other
from controller.run_dir import RunDir, flat, settings_of
from host.printable import printable


def compare_runs(a: str, b: str, dir: str, as_json: bool = False, plot: Path | None = None) -> None:
    """Print the settings and the results that differ, and write the curves of both.

    Raises RunDirError if there is no such run. What a run does not have, as one of an older version
    or one that goes on, is None.
    """
    one, other = runs = [RunDir.find(dir, name) for name in (a, b)]
    file = plot or Path(dir) / f"compare-{one.name}-{other.name}.png"
    figure = draw_over_each_other([(run.name, read_metrics(run.metrics)) for run in runs])
    found = {
        "settings": differing(*(settings_of(run.path) for run in runs)),
        "results": differing(*map(_result, runs)),
    }
    if figure is not None:
        os.umask(one.umask | other.umask)  # others may not read what is drawn
        figure.savefig(file)
    if as_json:
        plotted = None if figure is None else str(file)
        print(json.dumps({"a": one.name, "b": other.name, **found, "plot": plotted}))
        return
    console = Console()
    for what, pairs in found.items():
        table = Table(f"{what} that differ", one.name, other.name, box=None, pad_edge=False)
        for name, values in pairs.items():
            cells = (name, *("-" if value is None else str(value) for value in values))
            table.add_row(*(Text(printable(cell)) for cell in cells))
        console.print(table if pairs else f"no {what} that differ")
    for run in runs:
        if not (run.path / "result.json").exists():
            print(f"{run.name} has no result.json: `{run.command('report')}` writes it")
    print("neither has trained a step" if figure is None else f"curves of both: {file}")


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The values of both under each name, in order, where they are not equal (pure)."""
    pairs = {name: (one.get(name), other.get(name)) for name in [*one, *other]}
    return {name: (a, b) for name, (a, b) in pairs.items() if a != b}


def _result(run_dir: RunDir) -> dict[str, Any]:
    try:
        found = read_json(run_dir.path / "result.json", dict[str, Any])
        # Its name is above, and dozens of counters say nothing side by side.
        return dict(flat({name: v for name, v in found.items() if name not in ("run", "rollout")}))
    except FileNotFoundError:
        return {}
