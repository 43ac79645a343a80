"""Prints start-up: each step's name and seconds, also if several run at once.

✓ Redis server                 0.4 s
✓ trainer ranks                7.1 s   2 ranks
⠹ engines                     12.3 s   engine-0: loading weights
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

NAME_WIDTH = 32


class StartStep:
    """A running step."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def say(self, detail: str) -> None:
        """Show the progress of the step in a few words."""
        self._progress.update(self._task, detail=detail)


class StartSteps:
    """Draws running steps below those that are done; steps may start in several threads.

    If the output is not a terminal, a step prints one line when it ends.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(style="cyan"),
            TextColumn("{task.description}", table_column=Column(width=NAME_WIDTH)),
            _Seconds(table_column=Column(width=9, justify="right")),
            TextColumn("  {task.fields[detail]}", style="dim", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._num_active = 0
        self._lock = threading.Lock()
        """Guards `_num_active`, which starts and stops the drawing."""

    @contextmanager
    def step(self, name: str) -> Iterator[StartStep]:
        """Show the block as a step; an exception marks it as failed and propagates."""
        task = self._begin(name)
        try:
            yield StartStep(self._progress, task)
        except BaseException:
            self._end(task, Text("✗", style="bold red"))
            raise
        self._end(task, Text("✓", style="bold green"))

    def _begin(self, name: str) -> TaskID:
        with self._lock:
            self._num_active += 1
            self._progress.start()
            return self._progress.add_task(name, total=None, detail="")

    def _end(self, task_id: TaskID, mark: Text) -> None:
        with self._lock:
            (task,) = (task for task in self._progress.tasks if task.id == task_id)
            self._progress.remove_task(task_id)
            self._num_active -= 1
            if not self._num_active and self._console.is_terminal:
                self._progress.stop()
        # Not the row of the table: the final line shows the whole detail, however long.
        row = f" {task.description:<{NAME_WIDTH}} {task.elapsed or 0:>7.1f} s   "
        line = Text.assemble(mark, row, (task.fields["detail"], "dim"))
        self._console.print(line, soft_wrap=True, highlight=False)


class _Seconds(TextColumn):
    def __init__(self, table_column: Column) -> None:
        super().__init__("", table_column=table_column)

    def render(self, task: Task) -> Text:
        return Text(f"{task.elapsed or 0:.1f} s")
