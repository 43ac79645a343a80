"""`make quarantine`: groups that are kept but not trained, prompts that are not run any more, and
how they leave it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from buffer.replay_buffer import ReplayBuffer
from buffer.results import QuarantinedGroup, QuarantinedPrompt
from configs.printable import printable
from controller.buffer_access import ask, buffer_address
from controller.run_dir import RunDir, RunDirError
from controller.units import format_count, format_duration


def list_quarantine(
    run_dir: RunDir, url: str | None = None, console: Console | None = None
) -> None:
    """A line a group and a line a prompt, the latest last."""
    console = console or Console()
    with buffer_address(run_dir, url) as address:
        groups, prompts = ask(address, _both)
    if not groups and not prompts:
        console.print(
            f"{run_dir.name}: no group and no prompt is in quarantine",
            highlight=False,
            markup=False,
        )
        return
    if groups:
        console.print(_group_table(groups))
    if groups and prompts:
        console.print()
    if prompts:
        console.print(_prompt_table(prompts))
    console.print(
        "`make quarantine RELEASE=ID` lets a group be trained or a prompt be run again, DISCARD=ID "
        "drops it.",
        style="dim",
        highlight=False,
    )


async def _both(buffer: ReplayBuffer) -> tuple[list[QuarantinedGroup], list[QuarantinedPrompt]]:
    return await buffer.quarantined(), await buffer.prompt_quarantine.prompts()


def _group_table(groups: Sequence[QuarantinedGroup]) -> Table:
    table = _table("group", "since", "reason", "leases", "tokens")
    for group in groups:
        table.add_row(
            _cell(group.group_id),
            _since(group.at),
            _cell(group.reason),
            str(group.attempts),
            format_count(group.num_tokens),
        )
    return table


def _prompt_table(prompts: Sequence[QuarantinedPrompt]) -> Table:
    table = _table("prompt", "since", "reason", "times")
    for prompt in prompts:
        name = prompt_name(prompt.task, prompt.index)
        table.add_row(_cell(name), _since(prompt.at), _cell(prompt.reason), str(prompt.times))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _cell(text: str) -> Text:
    """As it is, for a name may look like markup."""
    return Text(printable(text), overflow="fold")


def _since(at: float) -> str:
    return f"{format_duration(max(0.0, time.time() - at))} ago"


def prompt_name(task: str, index: int) -> str:
    """How a prompt is called on the command line; no group's id holds a colon."""
    return f"{task}:{index}"


def release_group(run_dir: RunDir, name: str, url: str | None = None) -> None:
    """A group goes back to ready, its leases forgotten; a prompt runs again with a clean record.

    Raises RunDirError if it is not in quarantine.
    """
    prompt = _prompt_of(name)
    with buffer_address(run_dir, url) as address:
        if prompt is None:
            was_there = ask(address, lambda buffer: buffer.release(name))
        else:
            was_there = ask(address, lambda buffer: buffer.prompt_quarantine.release(*prompt))
    _require(was_there, run_dir, name)
    what = "is ready to be trained again" if prompt is None else "is in line to be run again"
    print(f"{run_dir.name}: {name} {what}")


def discard_group(run_dir: RunDir, name: str, url: str | None = None) -> None:
    """A group is dropped with its payload, a prompt is forgotten.

    Raises RunDirError if it is not in quarantine.
    """
    prompt = _prompt_of(name)
    with buffer_address(run_dir, url) as address:
        if prompt is None:
            was_there = ask(address, lambda buffer: buffer.discard(name))
        else:
            was_there = ask(address, lambda buffer: buffer.prompt_quarantine.discard(*prompt))
    _require(was_there, run_dir, name)
    print(f"{run_dir.name}: {name} is dropped for good")


def _prompt_of(name: str) -> tuple[str, int] | None:
    """Task and index, if it is a prompt's name."""
    task, colon, index = name.rpartition(":")
    return (task, int(index)) if colon and index.isdecimal() else None


def _require(was_there: bool, run_dir: RunDir, name: str) -> None:
    if not was_there:
        raise RunDirError(
            f"{name}: no such group or prompt is in quarantine at {run_dir.name}; `make "
            "quarantine` lists those that are"
        )
