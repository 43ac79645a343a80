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


class AwaitResult(Protocol):
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
    pool: EnginePool, version: int, *, may_hold: bool, await_result: AwaitResult
) -> dict[str, Scalar]:
    """The record of an evaluation of `version` or, where no engine could be held at it, of later
    ones too."""
    engine = await _hold(pool, version, await_result) if may_hold else None
    try:
        name, ref = pool.evaluate(version, engine)
        report = await await_result(name, ref)
    finally:
        if engine is not None:
            await _release(pool, engine, await_result)
    return {**report.record(), "engine": engine or ""}


async def evaluate_mildly(
    pool: EnginePool, version: int, *, may_hold: bool, await_result: AwaitResult
) -> tuple[str, dict[str, Scalar]]:
    """Kind and values of the record: `eval`, or `eval_failed` with the reason.

    Training does not depend on an evaluation, so one that fails ends nothing: what is wrong with a
    process that it needs is reported by its own watch. Bad input is a ValueError still.
    """
    try:
        return "eval", await evaluate(pool, version, may_hold=may_hold, await_result=await_result)
    except RuntimeError as error:
        log.warning("the evaluation of version %d failed", version, exc_info=True)
        why = str(error).partition("\n")[0]  # what follows are the last lines of a log
        return EVAL_FAILED, {"version": version, "why": why}


def should_hold(config: Config) -> bool:
    """Whether evaluations beside training are to have an engine of their own."""
    return config.rollout.eval.pinned and config.rollout.num_engines > 1


async def _hold(pool: EnginePool, version: int, await_result: AwaitResult) -> str | None:
    """An engine that now serves `version` alone."""
    for engine in reversed(pool.engine_names):
        try:
            if await await_result(engine, pool.hold(engine, version, HOLD_WAIT_S, HOLD_LIMIT_S)):
                return engine
        except asyncio.CancelledError:
            await _release(pool, engine, await_result)
            raise
        except RuntimeError as error:  # it is gone, which its own watch reports
            log.warning("no evaluation at %s: %s", engine, error)
    return None


async def _release(pool: EnginePool, engine: str, await_result: AwaitResult) -> None:
    try:
        async with asyncio.timeout(RELEASE_S):
            await await_result(engine, pool.release(engine))
    except (RuntimeError, TimeoutError) as error:
        log.warning("%s was not released: %s", engine, error)
