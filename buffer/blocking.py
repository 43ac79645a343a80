"""The buffer and the run's state for threads that must not be coroutines, such as trainer ranks.

Each object runs the asynchronous one in an event loop and a thread of its own. Its methods promise
and raise what those of the same name do; any thread may call them, and `close` ends all waits.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any, TypeVar

from buffer.redis.wakeups import BufferClosedError
from buffer.replay_buffer import ReplayBuffer
from buffer.results import (
    Admission,
    BufferStats,
    GroupEvent,
    Lease,
    PushResult,
    QuarantinedGroup,
    Reconciled,
)
from buffer.run_state import MetricsEntry, Record, RunState
from buffer.types import PromptRef, TrajectoryGroup
from configs.schema import BufferConfig

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the loop and waits for its result."""
        if self._loop.is_closed():
            coroutine.close()
            raise BufferClosedError("the buffer was closed before this call")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise BufferClosedError("the buffer was closed during this call") from None
        except BaseException:  # Ctrl-C in the waiting thread must not leave the coroutine behind
            future.cancel()
            raise

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine in the loop until it ends, its future is cancelled, or `stop`."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Cancels what still runs, then ends the loop and its thread."""
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class BlockingReplayBuffer:
    """`ReplayBuffer` with blocking methods."""

    def __init__(self, url: str, run: str, settings: BufferConfig) -> None:
        """Connects. Raises BufferConnectionError."""
        self._thread = LoopThread("replay-buffer")
        try:
            self._buffer = self._thread.run(ReplayBuffer.connect(url, run, settings))
        except BaseException:
            self._thread.stop()
            raise

    def open(self, settings: BufferConfig, groups_per_step: int, oversampling: float = 1.0) -> None:
        self._thread.run(self._buffer.open(settings, groups_per_step, oversampling))

    def admit(self, group_id: str, timeout_s: float) -> Admission:
        return self._thread.run(self._buffer.admit(group_id, timeout_s))

    def begin(self, group_id: str, prompt: PromptRef, worker: int, position: int) -> bool:
        return self._thread.run(self._buffer.begin(group_id, prompt, worker, position))

    def fail(self, group_id: str, prompt: PromptRef, max_failures: int) -> int:
        return self._thread.run(self._buffer.fail(group_id, prompt, max_failures))

    def reclaim(self, worker: int) -> int:
        return self._thread.run(self._buffer.reclaim(worker))

    def renew_credits(self, group_ids: Collection[str]) -> int:
        return self._thread.run(self._buffer.renew_credits(group_ids))

    def abandon(self, group_id: str, reason: str, requeue: PromptRef | None = None) -> None:
        self._thread.run(self._buffer.abandon(group_id, reason, requeue))

    def push(self, group: TrajectoryGroup, timeout_s: float | None = None) -> PushResult:
        return self._thread.run(self._buffer.push(group, timeout_s))

    def flush(self, timeout_s: float) -> bool:
        return self._thread.run(self._buffer.flush(timeout_s))

    def take_retry(self, group_id: str | None = None) -> PromptRef | None:
        return self._thread.run(self._buffer.take_retry(group_id))

    def lease(
        self,
        *,
        step: int,
        version: int,
        num_groups: int,
        share: int,
        num_shares: int,
        timeout_s: float,
    ) -> Lease:
        return self._thread.run(
            self._buffer.lease(
                step=step,
                version=version,
                num_groups=num_groups,
                share=share,
                num_shares=num_shares,
                timeout_s=timeout_s,
            )
        )

    def validate(self, lease: Lease, version: int) -> frozenset[str]:
        return self._thread.run(self._buffer.validate(lease, version))

    def renew(self, lease: Lease) -> int:
        return self._thread.run(self._buffer.renew(lease))

    @contextmanager
    def renewing(self, lease: Lease) -> Iterator[None]:
        """Renews the lease, from this object's own thread, for as long as the block lasts."""
        renewal = self._thread.start(self._buffer.keep_renewed(lease))
        try:
            yield
        finally:
            renewal.cancel()

    def consume(self, lease: Lease, group_ids: Collection[str]) -> int:
        return self._thread.run(self._buffer.consume(lease, group_ids))

    def ack(self, upto_step: int, lineage: str | None = None) -> int:
        return self._thread.run(self._buffer.ack(upto_step, lineage))

    def nack(self, lease: Lease, reason: str) -> int:
        return self._thread.run(self._buffer.nack(lease, reason))

    def publish_version(self, version: int) -> None:
        self._thread.run(self._buffer.publish_version(version))

    def reconcile(
        self,
        lineage: str,
        *,
        step: int,
        version: int,
        resume_version: int,
        consumed_group_ids: Collection[str] = (),
    ) -> Reconciled:
        return self._thread.run(
            self._buffer.reconcile(
                lineage,
                step=step,
                version=version,
                resume_version=resume_version,
                consumed_group_ids=consumed_group_ids,
            )
        )

    def sweep(self) -> int:
        return self._thread.run(self._buffer.sweep())

    def quarantined(self) -> list[QuarantinedGroup]:
        return self._thread.run(self._buffer.quarantined())

    def release(self, group_id: str) -> bool:
        return self._thread.run(self._buffer.release(group_id))

    def discard(self, group_id: str) -> bool:
        return self._thread.run(self._buffer.discard(group_id))

    def stats(self) -> BufferStats:
        return self._thread.run(self._buffer.stats())

    def staleness_histogram(self) -> Mapping[int, int]:
        return self._thread.run(self._buffer.staleness_histogram())

    def check_invariants(self) -> list[str]:
        return self._thread.run(self._buffer.check_invariants())

    def events(self, group_id: str) -> list[GroupEvent]:
        return self._thread.run(self._buffer.events(group_id))

    def set_max_staleness(self, value: int) -> None:
        self._thread.run(self._buffer.set_max_staleness(value))

    def get_max_staleness(self) -> int:
        return self._thread.run(self._buffer.get_max_staleness())

    def close(self) -> None:
        """Ends every wait with BufferClosedError, then the connections and the thread."""
        try:
            self._thread.run(self._buffer.close())
        except BufferClosedError:
            return
        self._thread.stop()


class BlockingRunState:
    """`RunState` with blocking methods."""

    def __init__(self, url: str, run: str, settings: BufferConfig) -> None:
        """Connects. Raises BufferConnectionError."""
        self._thread = LoopThread("run-state")
        try:
            self._state = self._thread.run(RunState.connect(url, run, settings))
        except BaseException:
            self._thread.stop()
            raise

    def register_receiver(self, name: str, url: str) -> None:
        self._thread.run(self._state.register_receiver(name, url))

    def forget_receiver(self, name: str) -> None:
        self._thread.run(self._state.forget_receiver(name))

    def receivers(self) -> dict[str, str]:
        return self._thread.run(self._state.receivers())

    def record_staged(self, receiver: str, version: int) -> None:
        self._thread.run(self._state.record_staged(receiver, version))

    def staged_versions(self) -> dict[str, int]:
        return self._thread.run(self._state.staged_versions())

    def publish_weights(self, version: int) -> None:
        self._thread.run(self._state.publish_weights(version))

    def published_weights(self) -> int | None:
        return self._thread.run(self._state.published_weights())

    def record_commits(self, served_versions: Mapping[str, int]) -> None:
        self._thread.run(self._state.record_commits(served_versions))

    def record_commit(self, engine: str, version: int, record: Record) -> None:
        self._thread.run(self._state.record_commit(engine, version, record))

    def commits(self) -> dict[str, dict[str, float | int | str]]:
        return self._thread.run(self._state.commits())

    def forget_engine(self, engine: str) -> None:
        self._thread.run(self._state.forget_engine(engine))

    def engine_versions(self) -> dict[str, int]:
        return self._thread.run(self._state.engine_versions())

    def wait_engines_at(self, version: int, timeout_s: float) -> dict[str, int]:
        return self._thread.run(self._state.wait_engines_at(version, timeout_s))

    def wait_engines_changed(self, seen: Mapping[str, int], timeout_s: float) -> dict[str, int]:
        return self._thread.run(self._state.wait_engines_changed(seen, timeout_s))

    def enter_commit(self, engine: str, limit: int, ttl_s: float, timeout_s: float) -> bool:
        return self._thread.run(self._state.enter_commit(engine, limit, ttl_s, timeout_s))

    def leave_commit(self, engine: str) -> None:
        self._thread.run(self._state.leave_commit(engine))

    def trainer_version(self) -> int:
        return self._thread.run(self._state.trainer_version())

    def wait_version_above(self, version: int, timeout_s: float) -> int:
        return self._thread.run(self._state.wait_version_above(version, timeout_s))

    def add_wait(self, waiter: str, waited_on: str, seconds: float) -> None:
        self._thread.run(self._state.add_wait(waiter, waited_on, seconds))

    def waits(self) -> dict[tuple[str, str], float]:
        return self._thread.run(self._state.waits())

    def count(self, name: str, amount: float = 1) -> None:
        self._thread.run(self._state.count(name, amount))

    def counters(self) -> dict[str, float]:
        return self._thread.run(self._state.counters())

    def append_metrics(self, record: Record, kind: str) -> None:
        self._thread.run(self._state.append_metrics(record, kind))

    def read_metrics(self, after_id: str, block_s: float) -> list[MetricsEntry]:
        return self._thread.run(self._state.read_metrics(after_id, block_s))

    def task_positions(self) -> dict[int, int]:
        return self._thread.run(self._state.task_positions())

    def heartbeat(self, process: str, fields: Record) -> None:
        self._thread.run(self._state.heartbeat(process, fields))

    def heartbeats(self) -> dict[str, dict[str, float | int | str]]:
        return self._thread.run(self._state.heartbeats())

    def set_phase(self, phase: str) -> None:
        self._thread.run(self._state.set_phase(phase))

    def phase(self) -> str:
        return self._thread.run(self._state.phase())

    def close(self) -> None:
        """Ends every wait with BufferClosedError, then the connections and the thread."""
        try:
            self._thread.run(self._state.close())
        except BufferClosedError:
            return
        self._thread.stop()
