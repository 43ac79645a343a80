"""Start-up as a person sees it: each step's name and seconds, also where several run at once.

✓ Redis server                 0.4 s
✓ trainer ranks                7.1 s   2 ranks
⠹ engines                     12.3 s   engine-0: loading weights
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

NAME_WIDTH = 32


class StartStep:
    """One step under way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.detail = ""
        self._started = time.monotonic()
        self._spinner = Spinner("dots", style="cyan")

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def say(self, detail: str) -> None:
        """Tell what the step is at, in a few words."""
        self.detail = detail

    def line(self, mark: RenderableType) -> Table:
        row = Table.grid(padding=(0, 1))
        # A minimum as well: a long detail would squeeze a column that only has a width.
        row.add_column(width=1, min_width=1)
        row.add_column(width=NAME_WIDTH, min_width=NAME_WIDTH)
        row.add_column(width=9, min_width=9, justify="right")
        row.add_column(style="dim", no_wrap=True, overflow="ellipsis")
        row.add_row(mark, self.name, f"{self.elapsed_s:.1f} s", Text(f"  {self.detail}"))
        return row

    def text(self, mark: Text) -> Text:
        figures = f" {self.name:<{NAME_WIDTH}} {self.elapsed_s:>7.1f} s   "
        return Text.assemble(mark, figures, (self.detail, "dim"))

    def spinning(self) -> Table:
        return self.line(self._spinner)


class StartSteps:
    """Draws the steps under way below those that are done; steps may begin in several threads.

    Where the output is no terminal, a step is one line when it ends. The lock guards `_active` and
    `_live`; rich's own thread only reads them.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._active: list[StartStep] = []
        self._live: Live | None = None
        self._lock = threading.Lock()

    @contextmanager
    def step(self, name: str) -> Iterator[StartStep]:
        """Name what happens inside; an exception marks the step as failed and goes on."""
        step = StartStep(name)
        self._begin(step)
        try:
            yield step
        except BaseException:
            self._end(step, Text("✗", style="bold red"))
            raise
        self._end(step, Text("✓", style="bold green"))

    def _begin(self, step: StartStep) -> None:
        with self._lock:
            self._active.append(step)
            if self._live is None and self._console.is_terminal:
                self._live = Live(
                    console=self._console,
                    transient=True,
                    refresh_per_second=8,
                    get_renderable=self._draw,
                )
                self._live.start()

    def _end(self, step: StartStep, mark: Text) -> None:
        with self._lock:
            self._active.remove(step)
            live = self._live
            if live is not None and not self._active:
                self._live = None
                live.stop()
        # Not the table: a line that stays shows its whole detail, however long.
        self._console.print(step.text(mark), soft_wrap=True, highlight=False)

    def _draw(self) -> RenderableType:
        rows = Table.grid()
        for step in tuple(self._active):
            rows.add_row(step.spinning())
        return rows
