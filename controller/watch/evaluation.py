"""One evaluation, at an engine that is lent to it where there are several.

hold an engine at the version ── evaluate there ── release, whatever happened
  └─ none could be had in time: at any engine, by that version or later ones
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Protocol

from configs.schema import Config
from controller.metrics.records import EVAL_FAILED, Scalar
from processes.pending import Pending, T
from rollout_pool.types import EvalReport

log = logging.getLogger(__name__)

HOLD_WAIT_S = 60.0
"""For an engine to come to the version; then another one is asked."""
HOLD_LIMIT_S = 900.0
"""A longer evaluation ends with newer versions, which its report says."""

RELEASE_S = 30.0
"""For an engine's process to hear of it; it would end the hold by itself some time."""


class Told(Protocol):
    def __call__(self, name: str, ref: Pending[T], /) -> Awaitable[T]:
        """The result of a process, by its name; what it raises names the process."""
        ...


class EnginePool(Protocol):
    """What is used of the rollout pool."""

    @property
    def engine_names(self) -> list[str]: ...

    def hold(self, engine: str, version: int, wait_s: float, limit_s: float) -> Pending[bool]: ...

    def release(self, engine: str) -> Pending[None]: ...

    def evaluate(
        self, version: int, engine: str | None = None
    ) -> tuple[str, Pending[EvalReport]]: ...


async def evaluate(
    pool: EnginePool, version: int, *, may_hold: bool, told: Told
) -> dict[str, Scalar]:
    """The record of an evaluation of `version` or, where no engine could be held at it, of later
    ones too."""
    engine = await _hold(pool, version, told) if may_hold else None
    try:
        name, ref = pool.evaluate(version, engine)
        report = await told(name, ref)
    finally:
        if engine is not None:
            await _release(pool, engine, told)
    return {**report.record(), "engine": engine or ""}


async def evaluate_mildly(
    pool: EnginePool, version: int, *, may_hold: bool, told: Told
) -> tuple[str, dict[str, Scalar]]:
    """Kind and values of the record: `eval`, or `eval_failed` with the reason.

    Training does not depend on an evaluation, so one that fails ends nothing: what is wrong with a
    process that it needs is told by whoever watches that process. Bad input is a ValueError still.
    """
    try:
        return "eval", await evaluate(pool, version, may_hold=may_hold, told=told)
    except RuntimeError as error:
        log.warning("the evaluation of version %d failed", version, exc_info=True)
        why = str(error).partition("\n")[0]  # what follows are the last lines of a log
        return EVAL_FAILED, {"version": version, "why": why}


def should_hold(config: Config) -> bool:
    """Whether evaluations beside training are to have an engine of their own."""
    return config.rollout.eval.pinned and config.rollout.num_engines > 1


async def _hold(pool: EnginePool, version: int, told: Told) -> str | None:
    """An engine that now serves `version` alone."""
    for engine in reversed(pool.engine_names):
        try:
            if await told(engine, pool.hold(engine, version, HOLD_WAIT_S, HOLD_LIMIT_S)):
                return engine
        except asyncio.CancelledError:
            await _release(pool, engine, told)
            raise
        except RuntimeError as error:  # it is gone, which is somebody else's to tell
            log.warning("no evaluation at %s: %s", engine, error)
    return None


async def _release(pool: EnginePool, engine: str, told: Told) -> None:
    try:
        async with asyncio.timeout(RELEASE_S):
            await told(engine, pool.release(engine))
    except (RuntimeError, TimeoutError) as error:
        log.warning("%s was not released: %s", engine, error)
