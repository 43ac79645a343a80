"""`make buffer-dump` and `make buffer-load`: write a run's groups to a file and read them back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from buffer.dump.export import DumpReport, dump_buffer
from buffer.dump.file import read_header
from buffer.dump.load import LoadReport, load_buffer
from controller.buffer_access import (
    ANSWER_TIMEOUT_S,
    BufferAddress,
    buffer_address,
    opened,
    raw_client,
)
from controller.run_dir import RunDir
from controller.units import format_bytes, format_number_of
from host.printable import printable

MAX_NAMED = 5
"""Unreadable groups that are listed by name."""


def dump_to_file(run_dir: RunDir, file: Path, url: str | None = None) -> None:
    """Raises ValueError if the file exists, OSError if it cannot be written."""
    if file.exists():
        raise ValueError(f"FILE={file}: exists already; choose another name, or remove it")
    with buffer_address(run_dir, url) as address:
        report = asyncio.run(_dump(address, file))
    gone = f"; {report.gone} were trained or dropped meanwhile" if report.gone else ""
    print(
        f"{run_dir.name}: {_counted(report.groups)} to {file} ({format_bytes(report.bytes)}){gone}"
    )


async def _dump(address: BufferAddress, file: Path) -> DumpReport:
    async with raw_client(address) as redis:
        return await dump_buffer(redis, address.run, file)


def load_from_file(run_dir: RunDir, file: Path, url: str | None = None) -> None:
    """Push the groups that were ready or leased, once the whole file has been checked.

    Raises ValueError if the file is not a dump or damaged, OSError if it cannot be read.
    """
    header = read_header(file)
    with buffer_address(run_dir, url) as address:
        is_running = run_dir.read_record().is_running
        report, is_durable = asyncio.run(_load(address, file, is_running))
    print(f"{run_dir.name}: {_counted(report.pushed)}, from {file} (a dump of {header.run})")
    if report.skipped:
        print(f"skipped because of their state: {_counted(report.skipped)}")
    for group_id, problem in list(report.unreadable.items())[:MAX_NAMED]:
        print(printable(f"cannot be read: {group_id}: {problem}"))
    if len(report.unreadable) > MAX_NAMED:
        print(f"cannot be read: {len(report.unreadable) - MAX_NAMED} more")
    if not is_durable:
        print("Redis has not confirmed yet that all of it is on disk")


async def _load(address: BufferAddress, file: Path, is_running: bool) -> tuple[LoadReport, bool]:
    if not is_running:  # nothing frees room there: a full buffer must fail soon
        settings = replace(address.settings, wait_timeout_s=ANSWER_TIMEOUT_S)
        address = replace(address, settings=settings)
    async with opened(address) as buffer:
        report = await load_buffer(buffer, file)
        return report, await buffer.flush(ANSWER_TIMEOUT_S)


def _counted(groups: Mapping[str, int]) -> str:
    """{"ready": 3, "leased": 1} -> "3 groups ready, 1 leased"."""
    if not groups:
        return "no group"
    (first, number), *rest = groups.items()
    parts = [f"{format_number_of(number, 'group')} {first}"]
    return ", ".join(parts + [f"{number} {name}" for name, number in rest])
