"""A run's records of its steps in `metrics.jsonl`, and the times of a step."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from buffer.run_state import RunState
from host.loop_thread import LoopThread
from trainer_pool.metrics import StepStats
from trainer_pool.types import TrainerSpec


@dataclass(kw_only=True, slots=True)
class StepTimes:
    """The times of one step on this rank."""

    lease_wait_s: float = 0.0
    step_s: float = 0.0
    snapshot_s: float = 0.0
    snapshot_wait_s: float = 0.0
    checkpoint_s: float = 0.0
    checkpoint_wait_s: float = 0.0
    """The part of `checkpoint_s` in which the previous checkpoint was still being written."""
    memory_copy_s: float = 0.0
    memory_copy_error: str | None = None


class Clock:
    """Measures seconds between calls of `lap`."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds


class StepRecords:
    """Appends records to the run's metrics, which only rank 0 does.

    Example:

        clock, times = Clock(), StepTimes()
        ...                                        # a step
        times.step_s = clock.lap()
        records.add_step(12, 11, stats, times)     # step 12 trained version 11
    """

    def __init__(self, spec: TrainerSpec, loop: LoopThread, run_state: RunState) -> None:
        self._spec = spec
        self._loop = loop
        self._run_state = run_state

    def add_step(self, step: int, version: int, stats: StepStats, times: StepTimes) -> None:
        """Record completed step `step`, which trained `version`."""
        waits = {
            "rollout": times.lease_wait_s,
            "weight_sync": times.snapshot_wait_s + times.snapshot_s,
        }
        for waited_on, seconds in waits.items():
            self._loop.run(self._run_state.add_wait("trainer", waited_on, seconds))
        record: dict[str, float | int | str] = {
            "step": step,
            "version": version,
            **stats.record(),
            "logprob_diff_bound": self._spec.max_logprob_diff,
            **asdict(times),
        }
        if self._spec.config.memory_copy_every is None:
            del record["memory_copy_s"]
        if times.memory_copy_error is None:
            del record["memory_copy_error"]
        self._loop.run(self._run_state.append_metrics(record, kind="step"))
