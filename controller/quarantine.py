"""`make quarantine`: the groups that are kept but not trained, and how they leave it."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from controller.buffer_access import ask, buffer_address
from controller.run_dir import RunDir, RunDirError
from controller.units import format_count, format_duration


def list_quarantine(
    run_dir: RunDir, url: str | None = None, console: Console | None = None
) -> None:
    """A line a group, the latest last."""
    console = console or Console()
    with buffer_address(run_dir, url) as address:
        groups = ask(address, lambda buffer: buffer.quarantined())
    if not groups:
        console.print(f"{run_dir.name}: no group is in quarantine", highlight=False, markup=False)
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("group", "since", "reason", "leases", "tokens"):
        table.add_column(column, overflow="fold")
    for group in groups:
        table.add_row(
            group.group_id,
            f"{format_duration(max(0.0, time.time() - group.at))} ago",
            group.reason,
            str(group.attempts),
            format_count(group.num_tokens),
        )
    console.print(table)
    console.print(
        "`make quarantine RELEASE=ID` lets one be trained again, DISCARD=ID drops it.",
        style="dim",
        highlight=False,
    )


def release_group(run_dir: RunDir, group_id: str, url: str | None = None) -> None:
    """Back to ready, its leases forgotten. Raises RunDirError if it is not in quarantine."""
    with buffer_address(run_dir, url) as address:
        was_there = ask(address, lambda buffer: buffer.release(group_id))
    _require(was_there, run_dir, group_id)
    print(f"{run_dir.name}: {group_id} is ready to be trained again")


def discard_group(run_dir: RunDir, group_id: str, url: str | None = None) -> None:
    """Dropped, with its payload. Raises RunDirError if it is not in quarantine."""
    with buffer_address(run_dir, url) as address:
        was_there = ask(address, lambda buffer: buffer.discard(group_id))
    _require(was_there, run_dir, group_id)
    print(f"{run_dir.name}: {group_id} is dropped for good")


def _require(was_there: bool, run_dir: RunDir, group_id: str) -> None:
    if not was_there:
        raise RunDirError(
            f"{group_id}: no such group is in quarantine at {run_dir.name}; `make quarantine` "
            "lists those that are"
        )
