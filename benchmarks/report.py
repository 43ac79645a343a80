"""The report of a benchmark: a table of numbers and targets, and a last line for programs."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table


class Report:
    def __init__(self, title: str) -> None:
        self.result: dict[str, float] = {}
        self._console = Console()
        self._table = Table("measure", "figure", "target", "", title=title)

    def say(self, text: str) -> None:
        self._console.print(f"[dim]{text}[/dim]")

    def note(self, name: str, value: float) -> None:
        """A figure of RESULT alone."""
        self.result[name] = float(f"{value:.4g}")

    def target(self, name: str, value: float, sign: str, bound: float, how: str) -> None:
        """A figure of RESULT, with what it should be."""
        self.note(name, value)
        is_met = value >= bound if sign == ">=" else value <= bound
        verdict = "[green]met[/green]" if is_met else "[red]missed[/red]"
        self._table.add_row(f"{name}: {how}", f"{value:.3g}", f"{sign} {bound:g}", verdict)

    def figure(self, name: str, value: float, how: str) -> None:
        """A figure of RESULT without a target."""
        self.note(name, value)
        self._table.add_row(f"{name}: {how}", f"{value:.3g}", "", "")

    def row(self, measure: str, figure: str) -> None:
        self._table.add_row(measure, figure, "", "")

    def show(self, table: Table) -> None:
        """One more table, at once."""
        self._console.print(table)

    def close(self) -> None:
        """Prints it all; the last line is RESULT and its JSON."""
        self._console.print(self._table)
        print("RESULT " + json.dumps(self.result))
