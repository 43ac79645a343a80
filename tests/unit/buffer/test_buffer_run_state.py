"""What else a run keeps in Redis, and the blocking faces."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from buffer.blocking import BlockingReplayBuffer, BlockingRunState
from buffer.connection import BufferConnectionError, connect
from buffer.keys import Keys
from buffer.lease import PushResult
from buffer.lua import Scripts
from buffer.run_state import STREAM_START, RunState
from buffer.wakeups import BufferClosedError
from configs.schema import BufferConfig


@pytest.fixture
async def state(redis_url: str, run_name: str, buffer_factory: Any) -> AsyncIterator[RunState]:
    await buffer_factory()
    opened = RunState(await connect(redis_url), run_name)
    yield opened
    await opened.close()


async def test_commits_are_kept_by_engine(state: RunState) -> None:
    assert await state.engine_versions() == {}
    await state.record_commits({})
    await state.record_commits({"a": 1, "b": 1})
    await state.record_commits({"b": 2})
    assert await state.engine_versions() == {"a": 1, "b": 2}


async def test_waits_and_counters_add_up(state: RunState) -> None:
    await state.add_wait("trainer", "rollout", 1.5)
    await state.add_wait("trainer", "rollout", 0.25)
    await state.add_wait("rollout", "admission", 1e-7)
    assert await state.waits() == {("trainer", "rollout"): 1.75, ("rollout", "admission"): 1e-7}
    await state.count("tokens_generated", 100)
    await state.count("tokens_generated", 20)
    await state.count("prompts_skipped")
    assert await state.counters() == {"tokens_generated": 120, "prompts_skipped": 1}


async def test_an_addition_that_is_sent_again_counts_once(
    state: RunState, redis_url: str, run_name: str
) -> None:
    redis = await connect(redis_url)
    scripts = Scripts(redis, Keys(run_name))
    for _ in range(3):
        await scripts.run("add", "one-token", "counters", "n", "5")
        await scripts.run("append", "another-token", "step", '{"n": 1}', 10)
    assert await state.counters() == {"n": 5}
    assert len(await state.read_metrics(STREAM_START, 0)) == 1
    await redis.aclose()


async def test_metrics_are_read_in_order_from_where_one_stopped(state: RunState) -> None:
    assert await state.read_metrics(STREAM_START, 0) == []
    await state.append_metrics({"step": 0, "loss": 0.5, "note": "é"}, "step")
    await state.append_metrics({"accuracy": 0.25}, "eval")
    first, second = await state.read_metrics(STREAM_START, 0)
    assert (first.kind, first.record) == ("step", {"step": 0, "loss": 0.5, "note": "é"})
    assert (second.kind, second.record) == ("eval", {"accuracy": 0.25})
    assert await state.read_metrics(first.id, 0) == [second]
    assert await state.read_metrics(second.id, 0.02) == []


async def test_a_reader_of_metrics_is_woken_by_the_next_entry(state: RunState) -> None:
    reading = asyncio.create_task(state.read_metrics(STREAM_START, 10))
    await asyncio.sleep(0.05)
    await state.append_metrics({"step": 1}, "step")
    assert [e.record for e in await asyncio.wait_for(reading, 1)] == [{"step": 1}]


async def test_a_version_is_waited_for_without_polling(
    state: RunState, buffer_factory: Any
) -> None:
    buffer = await buffer_factory()
    assert await state.wait_version_above(-1, 0) == 0
    with pytest.raises(TimeoutError, match=r"no version above 0 within 0\.02 s"):
        await state.wait_version_above(0, 0.02)
    waiting = asyncio.create_task(state.wait_version_above(1, 10))
    await buffer.publish_version(1)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await buffer.publish_version(3)
    assert await asyncio.wait_for(waiting, 1) == 3
    assert await state.trainer_version() == 3


async def test_positions_heartbeats_and_phase_are_kept(state: RunState) -> None:
    assert await state.phase() == ""
    await state.set_phase("training")
    assert await state.phase() == "training"
    await state.set_task_position(0, 17)
    await state.set_task_position(1, 4)
    assert await state.task_positions() == {0: 17, 1: 4}
    await state.heartbeat("worker-0", {"in_flight": 3})
    beat = (await state.heartbeats())["worker-0"]
    assert beat["in_flight"] == 3 and abs(float(beat["at"]) - time.time()) < 5


# Blocking faces -------------------------------------------------------------------------------


@pytest.fixture
def blocking(redis_url: str, run_name: str) -> Iterator[BlockingReplayBuffer]:
    buffer = BlockingReplayBuffer(redis_url, run_name, BufferConfig(lease_timeout_s=60))
    buffer.open(BufferConfig(), 2)
    yield buffer
    buffer.close()


def test_ranks_in_threads_share_a_batch(blocking: BlockingReplayBuffer, make_group: Any) -> None:
    leases = []

    def rank(share: int) -> None:
        leases.append(
            blocking.lease(step=0, version=0, num_groups=2, share=share, num_shares=2, timeout_s=10)
        )

    threads = [threading.Thread(target=rank, args=(share,)) for share in range(2)]
    for thread in threads:
        thread.start()
    assert [blocking.push(make_group(name)) for name in "ab"] == [PushResult.stored] * 2
    for thread in threads:
        thread.join(timeout=5)
    assert sorted(g.group_id for lease in leases for g in lease.groups) == ["a", "b"]
    assert blocking.validate(leases[0], 0) == {"a", "b"}
    assert blocking.consume(leases[0], leases[0].group_ids) == 2
    assert blocking.ack(0) == 2
    assert blocking.stats().is_conserved


def test_close_from_another_thread_ends_a_wait(blocking: BlockingReplayBuffer) -> None:
    errors: list[Exception] = []

    def wait() -> None:
        try:
            blocking.lease(step=0, version=0, num_groups=1, share=0, num_shares=1, timeout_s=60)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    blocking.close()
    thread.join(timeout=2)
    assert [type(error) for error in errors] == [BufferClosedError]
    with pytest.raises(BufferClosedError, match="before this call"):
        blocking.stats()
    blocking.close()


def test_the_blocking_run_state_has_the_same_verbs(
    blocking: BlockingReplayBuffer, redis_url: str, run_name: str
) -> None:
    state = BlockingRunState(redis_url, run_name, BufferConfig())
    state.record_commits({"engine": 0})
    state.add_wait("trainer", "rollout", 2)
    state.count("tokens_generated", 3)
    state.append_metrics({"step": 0}, "step")
    state.set_task_position(0, 1)
    state.heartbeat("trainer-0", {})
    state.set_phase("training")
    blocking.publish_version(1)
    assert state.engine_versions() == {"engine": 0}
    assert state.waits() == {("trainer", "rollout"): 2}
    assert state.counters() == {"tokens_generated": 3}
    assert [entry.kind for entry in state.read_metrics(STREAM_START, 0)] == ["step"]
    assert state.task_positions() == {0: 1}
    assert list(state.heartbeats()) == ["trainer-0"]
    assert state.phase() == "training"
    assert state.wait_version_above(0, 1) == state.trainer_version() == 1
    state.close()


def test_both_faces_have_the_same_verbs() -> None:
    from buffer.replay_buffer import ReplayBuffer

    for blocking_face, face in (
        (BlockingReplayBuffer, ReplayBuffer),
        (BlockingRunState, RunState),
    ):
        verbs = {name for name in vars(face) if not name.startswith("_")}
        blocking_verbs = {name for name in vars(blocking_face) if not name.startswith("_")}
        # What a coroutine does by `connect` and `keep_renewed`, a thread does by making the object
        # and in a block.
        assert verbs - {"connect", "keep_renewed"} == blocking_verbs - {"renewing"}


def test_a_server_that_is_away_is_told_without_leaving_a_thread() -> None:
    before = threading.active_count()
    with pytest.raises(BufferConnectionError, match=r"127\.0\.0\.1:1"):
        BlockingRunState("redis://127.0.0.1:1/0", "run", BufferConfig())
    assert threading.active_count() == before
