"""An evaluation gets an engine if it can, and always gives it back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controller.evaluation.held_out import evaluate
from controller.watch.supervise import RunFailed
from rollout_pool.pool import HasLeft
from rollout_pool.types import EvalReport

REPORT = EvalReport(
    version_min=4,
    version_max=4,
    accuracy=0.5,
    score_mean=0.6,
    num_prompts=8,
    seconds=1.0,
    pass_at_k={1: 0.5},
)


class Pool:
    """Three engines of which those in `willing` can be held; remembers what is asked of them."""

    def __init__(self, willing: set[str], dead: set[str], error: Exception | None = None) -> None:
        self._willing, self._dead, self._error = willing, dead, error
        self.log: list[tuple[str, object]] = []

    @property
    def engine_names(self) -> list[str]:
        return ["engine-0", "engine-1", "engine-2"]

    async def hold(self, engine: str, version: int, wait_s: float, limit_s: float) -> bool:
        assert version == 4 and 0 < wait_s < limit_s
        self.log.append(("hold", engine))
        if engine in self._dead:
            raise RunFailed(f"{engine} died")
        return engine in self._willing

    async def release(self, engine: str) -> None:
        self.log.append(("release", engine))
        if engine in self._dead:
            raise RunFailed(f"{engine} died")

    def evaluate(self, version: int, engine: str | None = None) -> tuple[str, Any]:
        return "worker-0", self._evaluate(engine)

    async def _evaluate(self, engine: str | None) -> EvalReport:
        self.log.append(("evaluate", engine))
        if engine is not None and self._error is not None:
            self._dead.add(engine)
            raise self._error
        return REPORT


async def await_result(name: str, ref: Any) -> Any:
    return await ref


@pytest.mark.parametrize(
    ("willing", "dead", "may_hold", "asked", "used"),
    [
        ({"engine-0", "engine-2"}, set(), True, ["engine-2"], "engine-2"),
        ({"engine-0"}, {"engine-2"}, True, ["engine-2", "engine-1", "engine-0"], "engine-0"),
        (set(), set(), True, ["engine-2", "engine-1", "engine-0"], None),
        (set(), set(), False, [], None),
    ],
)
async def test_first_engine_that_can_be_held_evaluates_and_is_released(
    willing: set[str], dead: set[str], may_hold: bool, asked: list[str], used: str | None
) -> None:
    pool = Pool(willing, dead)
    record = await evaluate(pool, 4, may_hold=may_hold, await_result=await_result)
    held = [("hold", engine) for engine in asked]
    assert pool.log == [*held, ("evaluate", used), *([("release", used)] if used else [])]
    assert (record["engine"], record["accuracy"], record["pass_at_1"]) == (used or "", 0.5, 0.5)


async def test_engines_that_leave_as_they_are_asked_cost_the_evaluation_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool({"engine-1"}, set())
    hold = pool.hold

    def hold_or_gone(engine: str, *how: Any) -> Any:
        if engine == "engine-2":
            raise HasLeft("engine-2 has left the run")
        return hold(engine, *how)

    def gone(engine: str) -> None:
        raise HasLeft(f"{engine} has left the run")

    monkeypatch.setattr(pool, "hold", hold_or_gone)
    monkeypatch.setattr(pool, "release", gone)
    record = await evaluate(pool, 4, may_hold=True, await_result=await_result)
    assert (record["engine"], record["accuracy"]) == ("engine-1", 0.5)


@pytest.mark.parametrize("error", [ValueError("a bad task"), RunFailed("worker-0 failed")])
async def test_failed_evaluation_raises_and_releases_the_engine(error: Exception) -> None:
    pool = Pool({"engine-2"}, set(), error)
    with pytest.raises(type(error), match=str(error)):
        await evaluate(pool, 4, may_hold=True, await_result=await_result)
    assert pool.log[-1] == ("release", "engine-2")


async def test_evaluation_that_is_cancelled_releases_the_engine() -> None:
    pool = Pool({"engine-2"}, set())

    async def never(name: str, ref: Any) -> Any:
        if name == "worker-0":
            ref.close()
            await asyncio.Event().wait()
        return await ref

    evaluating = asyncio.create_task(evaluate(pool, 4, may_hold=True, await_result=never))
    while not pool.log:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    evaluating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await evaluating
    assert ("release", "engine-2") in pool.log


async def test_only_engine_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "engine_names", ["engine-2"])
    pool = Pool({"engine-2"}, set())
    record = await evaluate(pool, 4, may_hold=True, await_result=await_result)
    assert record["engine"] == "" and pool.log == [("evaluate", None)]
