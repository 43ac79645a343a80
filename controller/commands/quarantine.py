"""`make quarantine`: list, release or discard quarantined groups and prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console

from buffer.connect import Buffer
from buffer.results import QuarantinedGroup, QuarantinedPrompt
from controller.buffer_access import ask, buffer_address
from controller.run_dir import RunDir, RunDirError
from controller.units import format_count, format_duration
from host.printable import table_of


def quarantine(
    run_dir: RunDir, *, release: str | None, discard: str | None, url: str | None
) -> None:
    """List the quarantine, or take the named group or prompt out of it.

    A released group becomes ready again with its lease count reset; a released prompt runs again
    with its failures reset. A discarded group is dropped with its payload; a discarded prompt is
    forgotten. Raises RunDirError if it is not in quarantine.
    """
    name = discard if release is None else release
    with buffer_address(run_dir, url) as address:
        if name is None:
            groups = ask(address, lambda buffer: buffer.quarantined())
            prompts = ask(address, lambda buffer: buffer.quarantined_prompts())
            _list(run_dir.name, groups, prompts)
            return
        was_there = ask(address, lambda buffer: _take_out(buffer, name, release is not None))
    if not was_there:
        raise RunDirError(
            f"{name}: no such group or prompt in the quarantine of {run_dir.name}; `make "
            "quarantine` lists them"
        )
    what = "is dropped for good"
    if release is not None:
        is_group = _prompt_of(name) is None
        what = "is ready to be trained again" if is_group else "is queued to run again"
    print(f"{run_dir.name}: {name} {what}")


async def _take_out(buffer: Buffer, name: str, is_release: bool) -> bool:
    prompt = _prompt_of(name)
    if prompt is None:
        return await (buffer.release(name) if is_release else buffer.discard(name))
    return await (buffer.release_prompt if is_release else buffer.discard_prompt)(*prompt)


def _prompt_of(name: str) -> tuple[str, int] | None:
    """Task and index if it is a prompt's name, else None."""
    task, colon, index = name.rpartition(":")
    return (task, int(index)) if colon and index.isdecimal() else None


def _list(
    run: str, groups: Sequence[QuarantinedGroup], prompts: Sequence[QuarantinedPrompt]
) -> None:
    """One line per group and prompt, the latest last."""
    console = Console(highlight=False)
    if not groups and not prompts:
        console.print(f"{run}: the quarantine is empty", markup=False)
        return
    of_groups = [
        {
            "group": one.group_id,
            "since": _since(one.at),
            "reason": one.reason,
            "leases": str(one.attempts),
            "tokens": format_count(one.num_tokens),
        }
        for one in groups
    ]
    of_prompts = [
        {
            "prompt": f"{one.task}:{one.index}",  # no group id contains a colon
            "since": _since(one.at),
            "reason": one.reason,
            "times": str(one.times),
        }
        for one in prompts
    ]
    for rows in filter(None, (of_groups, of_prompts)):
        console.print(table_of(rows))
    console.print(
        "`make quarantine RELEASE=ID` lets a group be trained or a prompt run again; DISCARD=ID "
        "drops it.",
        style="dim",
    )


def _since(at: float) -> str:
    return f"{format_duration(max(0.0, time.time() - at))} ago"
