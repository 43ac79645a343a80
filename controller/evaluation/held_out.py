"""One evaluation, on a reserved engine if there are several.

hold an engine at the version, or at the later one that it serves ── evaluate there ── release it
  └─ none available in time: on all engines, with that version or later ones
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from configs.run_files import Scalar
from processes.pending import Pending
from rollout_pool.pool import RolloutPool

log = logging.getLogger(__name__)

HOLD_WAIT_S = 60.0
"""Longest wait for an engine to reach the version; then the next one is tried."""
HOLD_LIMIT_S = 900.0
"""A longer evaluation ends with newer versions, as its report says."""
RELEASE_S = 30.0
"""Longest call that releases an engine; the hold also ends by itself, after HOLD_LIMIT_S."""

AwaitResult = Callable[[str, Pending[Any]], Awaitable[Any]]
"""Returns the result of the process with this name; an error of its names the process."""


async def evaluate(
    pool: RolloutPool, version: int, *, may_hold: bool, await_result: AwaitResult
) -> dict[str, Scalar]:
    """Evaluate `version`, or later ones too if no engine could be held; returns the record."""
    engine = await _hold(pool, version, await_result) if may_hold else None
    try:
        name, ref = pool.evaluate(version, engine)
        report = await await_result(name, ref)
    finally:
        if engine is not None:
            await _release(pool, engine, await_result)
    return {**report.record(), "engine": engine or ""}


async def _hold(pool: RolloutPool, version: int, await_result: AwaitResult) -> str | None:
    """An engine that now stays at `version` or at a later one; None if there is none, or only one.

    The last one first: of engines that commit in turn it most likely still has `version`.
    """
    names = pool.engine_names
    for engine in reversed(names if len(names) > 1 else []):
        try:
            if await await_result(engine, pool.hold(engine, version, HOLD_WAIT_S, HOLD_LIMIT_S)):
                return engine
        except asyncio.CancelledError:
            await _release(pool, engine, await_result)
            raise
        except RuntimeError as error:  # it died, which its own watch reports
            log.warning("no evaluation at %s: %s", engine, error)
    return None


async def _release(pool: RolloutPool, engine: str, await_result: AwaitResult) -> None:
    try:
        async with asyncio.timeout(RELEASE_S):
            await await_result(engine, pool.release(engine))
    except (RuntimeError, TimeoutError) as error:
        log.warning("%s was not released: %s", engine, error)
