"""The state of a run in Redis besides its groups."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from buffer.redis.keys import Keys
from buffer.redis.scripts import Scripts
from buffer.run_state import STREAM_START, EngineRoutes, RunState
from tests.support.buffer.blocked import still_waits
from tests.support.buffer.groups import lease_batch, make_group


@pytest.fixture
async def state(redis: Any, run_name: str, buffer_factory: Any) -> AsyncIterator[RunState]:
    await buffer_factory()
    opened = RunState(redis, run_name)
    yield opened
    await opened.close()


async def test_commits_are_kept_by_engine(state: RunState) -> None:
    assert await state.engine_versions() == {}
    await state.record_commits({})
    await state.record_commits({"a": 1, "b": 1})
    await state.record_commits({"b": 2})
    assert await state.engine_versions() == {"a": 1, "b": 2}


async def test_receivers_and_what_they_staged_are_kept(state: RunState) -> None:
    for _ in range(2):  # a call that is sent again changes nothing
        await state.register_receiver("receiver-0", "http://a:1")
        await state.record_staged("receiver-0", 4)
    await state.register_receiver("receiver-1", "http://b:1")
    assert await state.receivers() == {"receiver-0": "http://a:1", "receiver-1": "http://b:1"}
    assert await state.staged_versions() == {"receiver-0": 4}
    await state.register_receiver("receiver-0", "http://a:2")  # a new process
    assert await state.staged_versions() == {}
    for _ in range(2):
        await state.forget_receiver("receiver-1")
    await state.record_staged("receiver-1", 5)  # the news of one that is gone came late
    assert await state.receivers() == {"receiver-0": "http://a:2"}
    assert await state.staged_versions() == {}


async def test_published_version_only_grows(state: RunState) -> None:
    assert await state.available_version() is None
    for version, newest in ((0, 0), (2, 2), (2, 2), (1, 2), (10, 10), (9, 10)):
        await state.mark_available(version)
        assert await state.available_version() == newest


async def test_served_version_is_kept_on_every_shard(
    redis: Any, run_name: str, buffer_factory: Any
) -> None:
    await buffer_factory(shards=2)
    state = RunState(redis, run_name, shards=2)
    await state.record_commits({"e0": 3})
    for shard in range(2):
        keys = Keys(run_name, shard)
        assert await redis.hgetall(keys("engine_versions")) == {b"e0": b"3"}
    for _ in range(2):
        await state.forget_engine("e0")
    assert await state.engine_versions() == {}
    assert not await redis.exists(Keys(run_name, 1)("engine_versions"))


async def test_wait_engines_at_waits_for_all_live_engines(state: RunState) -> None:
    with pytest.raises(TimeoutError, match=r"no engine served version 0 within 0\.02 s"):
        await state.wait_engines_at(0, 0.02)
    await state.record_commits({"e0": 1, "e1": 2, "e2": 0})
    with pytest.raises(TimeoutError, match=r"within 0 s: e0 \(version 1\), e2 \(version 0\)$"):
        await state.wait_engines_at(2, 0)
    waiting = asyncio.create_task(state.wait_engines_at(2, 300))
    await state.record_commits({"e0": 3})
    await still_waits(waiting)
    await state.forget_engine("e2")  # a lost engine delays no other
    assert await asyncio.wait_for(waiting, 60) == {"e0": 3, "e1": 2}


async def test_change_of_the_engines_wakes_who_waits_for_it(state: RunState) -> None:
    async with asyncio.timeout(60):
        assert await state.wait_engines_changed({"e0": 1}, 300) == {}
    assert await state.wait_engines_changed({}, 0.02) == {}
    waiting = asyncio.create_task(state.wait_engines_changed({}, 300))
    await asyncio.sleep(0.05)
    await state.record_commits({"e0": 0})
    assert await asyncio.wait_for(waiting, 60) == {"e0": 0}
    waiting = asyncio.create_task(state.wait_engines_changed({"e0": 0}, 300))
    await asyncio.sleep(0.05)
    await state.forget_engine("e0")
    assert await asyncio.wait_for(waiting, 60) == {}


async def test_engine_that_drains_still_serves_its_version(state: RunState) -> None:
    await state.drain_engine("e0")  # which serves nothing yet
    await state.record_commits({"e0": 1, "e1": 1})
    seen = await state.wait_routes_changed(EngineRoutes({}, frozenset(), {}), 60)
    assert seen == EngineRoutes({"e0": 1, "e1": 1}, frozenset(), {})
    for end in (state.record_commits({"e0": 1}), state.forget_engine("e0")):
        waiting = asyncio.create_task(state.wait_routes_changed(seen, 300))
        await still_waits(waiting)
        await state.drain_engine("e0")
        assert (await asyncio.wait_for(waiting, 60)).draining == {"e0"}
        assert await state.engine_versions() == {"e0": 1, "e1": 1}
        with pytest.raises(TimeoutError, match=r"e0 \(version 1\), e1 \(version 1\)$"):
            await state.wait_engines_at(2, 0)
        await end
        assert (await state.wait_routes_changed(seen, 0)).draining == frozenset()


async def test_other_weights_names_the_first_engine_of_a_version_that_holds_others(
    state: RunState,
) -> None:
    assert await state.other_weights(4, "e0", "a") == ""
    assert await state.other_weights(4, "e1", "a") == ""
    assert await state.other_weights(4, "e2", "b") == "e0"
    assert await state.other_weights(3, "e2", "b") == ""  # too late: nothing is known any more
    assert await state.other_weights(5, "e2", "b") == ""
    assert await state.other_weights(5, "e0", "a") == "e2"


async def test_enter_commit_bounds_the_number_of_paused_engines(state: RunState) -> None:
    assert await state.enter_commit("e0", 2, 60, 0)
    assert await state.enter_commit("e1", 2, 60, 0)
    assert not await state.enter_commit("e2", 2, 60, 0.02)
    assert await state.enter_commit("e0", 2, 60, 0)  # again: it holds its place
    waiting = asyncio.create_task(state.enter_commit("e2", 2, 60, 300))
    await still_waits(waiting)
    for _ in range(2):
        await state.leave_commit("e1")
    assert await asyncio.wait_for(waiting, 60)
    assert not await state.enter_commit("e1", 2, 60, 0)


async def test_engine_that_dies_in_a_commit_holds_up_the_others_for_its_time(
    state: RunState,
) -> None:
    assert await state.enter_commit("dead", 1, 0.3, 0)
    before = time.monotonic()
    async with asyncio.timeout(60):
        assert await state.enter_commit("e1", 1, 60, 300)  # not woken: the place expired
    assert time.monotonic() - before > 0.2
    await state.leave_commit("dead")  # it was not dead but slow: the place is another's by now
    assert not await state.enter_commit("e2", 1, 60, 0)


async def test_engine_that_is_forgotten_leaves_its_place(state: RunState) -> None:
    assert await state.enter_commit("e0", 1, 60, 0)
    waiting = asyncio.create_task(state.enter_commit("e1", 1, 60, 300))
    await asyncio.sleep(0.05)
    await state.forget_engine("e0")  # which never served anything
    assert await asyncio.wait_for(waiting, 60)


async def test_without_any_engine_nothing_is_admitted(
    redis: Any, run_name: str, buffer_factory: Any
) -> None:
    buffer = await buffer_factory(groups_per_step=2, max_staleness=1)
    state = RunState(redis, run_name)
    await buffer.admit("before-the-first-engine", 0)
    await state.forget_engine("never-was")
    await state.record_commits({"e0": 0, "e1": 0})
    await buffer.announce_version(1)
    await buffer.admit("of-two", 0)
    with pytest.raises(TimeoutError):
        await buffer.admit("too-many", 0)
    await state.record_commits({"e1": 1})
    waiting = asyncio.create_task(buffer.admit("when-the-slow-one-is-gone", 300))
    await still_waits(waiting)
    await state.forget_engine("e0")
    await asyncio.wait_for(waiting, 60)
    await state.forget_engine("e1")
    assert (await buffer.stats()).engines_gone
    with pytest.raises(TimeoutError):
        await buffer.admit("unknown", 0)
    waiting = asyncio.create_task(buffer.admit("when-one-is-back", 300))
    await still_waits(waiting)
    await state.record_commits({"e1": 1})
    await asyncio.wait_for(waiting, 60)
    assert not (await buffer.stats()).engines_gone


async def test_waits_and_counters_add_up(state: RunState) -> None:
    await state.add_wait("trainer", "rollout", 1.5)
    await state.add_wait("trainer", "rollout", 0.25)
    await state.add_wait("rollout", "admission", 1e-7)
    assert await state.waits() == {("trainer", "rollout"): 1.75, ("rollout", "admission"): 1e-7}
    await state.count("tokens_generated", 100)
    await state.count("tokens_generated", 20)
    await state.count("prompts_skipped")
    assert await state.counters() == {"tokens_generated": 120, "prompts_skipped": 1}
    await state.count_all({"prompts_skipped": 2, "turns": 4})
    await state.count_all({})
    assert await state.counters() == {"tokens_generated": 120, "prompts_skipped": 3, "turns": 4}


async def test_repeated_addition_counts_once(state: RunState, redis: Any, run_name: str) -> None:
    scripts = Scripts(redis, Keys(run_name))
    for _ in range(3):
        await scripts.run(
            "run_state/add_numbers", int, token="t", name="counters", amounts={"n": "5"}
        )
        await scripts.run(
            "run_state/append_metrics", str, token="u", kind="step", record='{"n": 1}', length=10
        )
    assert await state.counters() == {"n": 5}
    assert len(await state.read_metrics(STREAM_START, 0)) == 1


async def test_metrics_are_read_in_order_from_where_one_stopped(state: RunState) -> None:
    assert await state.read_metrics(STREAM_START, 0) == []
    await state.append_metrics({"step": 0, "loss": 0.5, "note": "é"}, "step")
    await state.append_metrics({"accuracy": 0.25}, "eval")
    first, second = await state.read_metrics(STREAM_START, 0)
    assert (first.kind, first.record) == ("step", {"step": 0, "loss": 0.5, "note": "é"})
    assert (second.kind, second.record) == ("eval", {"accuracy": 0.25})
    assert await state.read_metrics(first.id, 0) == [second]
    assert await state.read_metrics(second.id, 0.02) == []


async def test_reader_of_metrics_is_woken_by_the_next_entry(state: RunState) -> None:
    reading = asyncio.create_task(state.read_metrics(STREAM_START, 300))
    await asyncio.sleep(0.05)
    await state.append_metrics({"step": 1}, "step")
    assert [e.record for e in await asyncio.wait_for(reading, 60)] == [{"step": 1}]


async def test_version_is_waited_for_without_polling(state: RunState, buffer_factory: Any) -> None:
    buffer = await buffer_factory()
    assert await state.wait_version_above(-1, 0) == 0
    with pytest.raises(TimeoutError, match=r"no version above 0 within 0\.02 s"):
        await state.wait_version_above(0, 0.02)
    waiting = asyncio.create_task(state.wait_version_above(1, 300))
    await buffer.announce_version(1)
    await still_waits(waiting)
    await buffer.announce_version(3)
    assert await asyncio.wait_for(waiting, 60) == 3
    assert await state.trainer_version() == 3


async def test_changed_settings_wake_who_waits_for_them_and_reach_every_shard(
    redis: Any, run_name: str, buffer_factory: Any
) -> None:
    buffer = await buffer_factory(shards=2, max_staleness=1)
    state = RunState(redis, run_name, shards=2)
    names = ("max_staleness", "oversampling", "tail")
    seen = {"max_staleness": "1", "oversampling": "1.0"}
    assert await state.live_settings(names) == seen
    assert await state.wait_settings_changed(names, seen, timeout_s=0.05) == seen
    waiting = asyncio.create_task(state.wait_settings_changed(names, seen, timeout_s=300))
    await asyncio.sleep(0.05)
    await buffer.change_settings({"oversampling": "2.0", "tail": "postpone"})
    now = {**seen, "oversampling": "2.0", "tail": "postpone"}
    assert await asyncio.wait_for(waiting, 60) == now
    assert [(await shard.stats()).oversampling for shard in buffer.shards] == [2.0, 2.0]


async def test_phase_is_kept(state: RunState) -> None:
    assert await state.phase() == ""
    await state.set_phase("training")
    assert await state.phase() == "training"


async def test_engines_are_known_by_their_urls_until_they_leave_the_run(state: RunState) -> None:
    seen = await state.wait_routes_changed(EngineRoutes({}, frozenset(), {}), 0)
    waiting = asyncio.create_task(state.wait_routes_changed(seen, 300))
    await asyncio.sleep(0.05)
    await state.register_engine("e0", "http://10.0.0.1:1")
    assert (await asyncio.wait_for(waiting, 60)).urls == {"e0": "http://10.0.0.1:1"}
    await state.record_commits({"e0": 1})
    await state.forget_engine("e0")  # it is lost, and may come back
    assert (await state.wait_routes_changed(seen, 60)).urls == {"e0": "http://10.0.0.1:1"}
    await state.record_commits({"e0": 1})
    await state.remove_engine("e0")
    assert await state.wait_routes_changed(EngineRoutes({"e0": 1}, frozenset(), {}), 0) == seen


class Clerk:
    """A wait that times out so many times; between the calls something happens."""

    def __init__(self, num_timeouts: int, happens: Callable[[int], Awaitable[object]]) -> None:
        self.num_calls, self._num_timeouts, self._happens = 0, num_timeouts, happens

    async def wait(self) -> str:
        self.num_calls += 1
        if self.num_calls > self._num_timeouts:
            return "got it"
        await self._happens(self.num_calls)
        raise TimeoutError("nothing came within 600 s")


async def test_wait_goes_on_for_as_long_as_tokens_versions_or_leases_move(
    state: RunState, buffer_factory: Any
) -> None:
    buffer = await buffer_factory()

    async def push(number: int) -> None:
        await buffer.push(make_group(f"g{number}", 0))

    async def lease(number: int) -> None:
        await lease_batch(buffer, 1, version=1, min_groups=1)

    moves = {
        1: lambda _: state.count("tokens_arrived", 7),
        2: push,
        3: lambda _: buffer.announce_version(1),
        4: lease,
    }
    clerk = Clerk(4, lambda number: moves[number](number))
    assert await state.retry_while_run_moves(clerk.wait) == "got it"
    assert clerk.num_calls == 5


async def test_wait_outlasts_a_pause(state: RunState, buffer_factory: Any) -> None:
    buffer = await buffer_factory()

    async def set_paused(number: int) -> None:
        paused = {1: "True", 4: "False"}.get(number)
        if paused is not None:
            await buffer.change_settings({"paused": paused})

    # That of the fifth call ended soon after the pause: it may have begun in it.
    clerk = Clerk(9, set_paused)
    with pytest.raises(TimeoutError, match="nothing came within 600 s"):
        await state.retry_while_run_moves(clerk.wait)
    assert clerk.num_calls == 5
    assert not await state.is_paused()


async def test_wait_ends_when_nothing_in_the_run_has_moved(state: RunState) -> None:
    clerk = Clerk(9, lambda number: state.count("tokens_arrived", 1 if number < 3 else 0))
    with pytest.raises(TimeoutError, match="nothing came within 600 s"):
        await state.retry_while_run_moves(clerk.wait)
    assert clerk.num_calls == 3
