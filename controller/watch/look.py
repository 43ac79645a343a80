"""A look at a run from outside its controller: a sample of its Redis, its state as one object."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import disk_usage
from typing import Any

import msgspec

from buffer.connect import Buffer
from buffer.run_state import RunState
from configs.run_files import Scalar
from controller.buffer_access import BufferAddress, opened, opened_state
from controller.metrics.history import buffer_values
from controller.run_dir import RunDir, RunRecord
from controller.watch.faults import Room
from controller.watch.finding import Finding
from controller.watch.run_view import RunView

CONNECT_TIMEOUT_S = 10.0


def observe(view: RunView, run_dir: RunDir, run: RunRecord, url: str) -> None:
    """Add a sample of the run's Redis to the view. Raises ConnectionError or TimeoutError."""
    view.note_resumed(run.resumed or 0.0)
    view.stopped_controller = run.pid if run.stands_still else None
    address = BufferAddress(url=url, run=run_dir.name, settings=view.config.buffer)
    try:
        asyncio.run(_look(view, address, run_dir.path))
    except (ConnectionError, TimeoutError):
        if view.config.buffer.url is not None:
            raise
        raise ConnectionError(
            f"the Redis of {run_dir.name} does not answer: it is stopped, busy, or being started "
            f"again; {run_dir.log_of('redis')} may say why"
        ) from None


async def _look(view: RunView, address: BufferAddress, folder: Path) -> None:
    async with (
        asyncio.timeout(CONNECT_TIMEOUT_S),
        opened(address) as buffer,
        opened_state(address) as state,
    ):
        await take_sample(view, buffer, state, folder)


async def take_sample(
    view: RunView, buffer: Buffer, state: RunState, folder: Path
) -> Mapping[str, Scalar]:
    """Add a sample of Redis to the view; returns it as a `buffer` record has it. `folder`: of the
    run."""
    stats, waits, counters = await buffer.stats(), await state.waits(), await state.counters()
    used, limit = await state.memory()
    room = Room(memory_used=used, memory_limit=limit, disk_free=disk_usage(folder).free)
    view.observe(time.time(), stats, waits, counters, room)
    return buffer_values(stats, waits, counters)


def as_object(
    run_dir: RunDir, state: str, view: RunView | None, found: Sequence[Finding]
) -> dict[str, Any]:
    """The state of a run, its verdict and all findings, of simple types and dataclasses."""
    run = run_dir.named
    listed = [
        {**msgspec.to_builtins(one), "sentence": one.sentence, "command": one.command(run)}
        for one in found
    ]
    whole: dict[str, Any] = {
        "run": run_dir.name,
        "state": state,
        "verdict": listed[0] if listed else None,
    }
    if view is not None:
        lengths = view.lengths
        whole |= {
            "phase": view.phase,
            "step": view.step,
            "num_steps": view.config.trainer.num_steps,
            "eta_s": view.eta_s,
            "tokens_per_s": view.tokens_per_s,
            "waits": view.wait_fractions,
            "lengths": None if lengths is None else lengths.values(),
            "paused": view.stats is not None and view.stats.paused,
            "changes": [{"t": one.t, **one.values} for one in view.changes],
            "last_step": None if view.last_step is None else view.last_step.values,
            "eval_command": None if view.command_eval is None else view.command_eval.values,
        }
    return {**whole, "findings": listed}
