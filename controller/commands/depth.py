"""`make depth`: what the buffer holds, in one line, once or repeatedly."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from buffer.admission import engine_lag
from buffer.results import BufferStats
from controller.buffer_access import (
    ANSWER_TIMEOUT_S,
    BufferAddress,
    answer,
    ask,
    buffer_address,
    opened,
)
from controller.run_dir import RunDir
from controller.units import format_bytes, format_count, format_duration
from controller.watch.remarks import bytes_in_use

REDRAW_S = 0.5
LINE_EVERY_S = 2.0


def print_depth(
    run_dir: RunDir,
    url: str | None = None,
    watch: bool = False,
    as_json: bool = False,
    console: Console | None = None,
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> None:
    """Print one line; with `watch` redraw it until Ctrl-C or the end of the run. `as_json`: it is
    an object, a new one each time.

    Raises RunDirError, ConnectionError or TimeoutError if there is no buffer to read.
    """
    console = console or Console(force_terminal=False if as_json else None)
    line_of = _as_json if as_json else depth_line
    with buffer_address(run_dir, url) as address:
        if watch:
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(_watch(run_dir, address, console, line_of, timeout_s))
            if not as_json:
                _say(console, f"{run_dir.name} is over ({run_dir.read_record().state})")
        else:
            _say(console, line_of(address.run, ask(address, lambda buffer: buffer.stats())))


def _as_json(run: str, stats: BufferStats) -> str:
    return msgspec.json.encode({"run": run, **msgspec.to_builtins(stats)}).decode()


async def _watch(
    run_dir: RunDir,
    address: BufferAddress,
    console: Console,
    line_of: Callable[[str, BufferStats], str],
    timeout_s: float,
) -> None:
    async with opened(address) as buffer:
        with _drawing(console) as draw:
            while True:
                try:
                    stats = await answer(address, buffer.stats(), timeout_s)
                    draw(line_of(address.run, stats))
                except ConnectionError:
                    if run_dir.read_record().is_running:
                        raise
                if not run_dir.read_record().is_running:
                    break
                # A refresh rate: there is no event for every change.
                await asyncio.sleep(REDRAW_S if console.is_terminal else LINE_EVERY_S)


@contextlib.contextmanager
def _drawing(console: Console) -> Iterator[Callable[[str], None]]:
    """A function that shows a line: replacing the last one on a terminal, below it elsewhere."""
    if not console.is_terminal:
        yield lambda line: _say(console, line)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda line: live.update(Text(line), refresh=True)


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def depth_line(run: str, stats: BufferStats) -> str:
    """The buffer at one moment, in one line (pure)."""
    lag = engine_lag(stats.trainer_version, stats.engine_versions.values(), stats.max_staleness)
    limit = 0 if stats.engines_gone else stats.limit(lag)
    in_use = stats.running + stats.ready + stats.leased
    by_staleness = sorted(stats.by_staleness.items())
    parts = [
        run,
        f"ready {stats.ready}{_listed(by_staleness, 'staleness ')}",
        f"leased {stats.leased}",
        f"running {stats.running}",
        f"in use {in_use} of {limit}{' (no engine serves)' if stats.engines_gone else ''}",
        f"consumed {stats.consumed}",
        _size(stats),
        f"dropped {stats.num_dropped}{_listed(stats.dropped.items())}",
        f"quarantined {stats.quarantined}",
        _blocked(stats),
    ]
    return " | ".join(parts)


def _size(stats: BufferStats) -> str:
    """Bytes and capacity; capacity counts what is ready or leased."""
    text = format_bytes(stats.bytes)
    if stats.capacity_bytes is not None:
        used, capacity = bytes_in_use(stats), stats.capacity_bytes
        text += f" | capacity {format_bytes(used)} of {format_bytes(capacity)}"
    if stats.capacity_groups is not None:
        text += f" | capacity {stats.ready + stats.leased} of {stats.capacity_groups} groups"
    if stats.oldest_ready_age_s is not None:
        text += f" | oldest {format_duration(stats.oldest_ready_age_s)}"
    return text


def _listed(counts: Iterable[tuple[object, int]], title: str = "") -> str:
    parts = [f"{name}: {number}" for name, number in counts]
    return f" ({title}{', '.join(parts)})" if parts else ""


def _blocked(stats: BufferStats) -> str:
    if not stats.push_blocked:
        return "blocked pushes 0"
    waited = format_duration(stats.push_blocked_s)
    return f"blocked pushes {format_count(stats.push_blocked)} ({waited})"
