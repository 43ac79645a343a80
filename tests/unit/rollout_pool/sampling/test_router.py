"""Which engine gets a sample, and which sample comes first."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from contextlib import contextmanager

import pytest
import uvloop

from buffer.types import SamplingParams
from rollout_pool.sampling import engine_state, engine_watch
from rollout_pool.sampling.engine_client import EngineError, EngineLoad
from rollout_pool.sampling.engine_state import BreakerState, StickySessions
from rollout_pool.sampling.engine_watch import poll_load
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sample import Priority, Sample
from tests.support.rollout import until


class NamedEngine:
    def __init__(self, name):
        self.name = name
        self.version = None

    def note_version(self, version):
        self.version = version

    async def generate_tokens(self, sample, request_id, on_arrival=None):
        raise NotImplementedError

    def stop(self, request_id):
        raise NotImplementedError


def router(count, versions=None, *, trainer=0, max_staleness=0, wait_timeout_s=5.0, **settings):
    engines = [NamedEngine(f"engine-{i}") for i in range(count)]
    router = Router(engines, wait_timeout_s, **settings)
    if versions is None:
        versions = {f"engine-{i}": 0 for i in range(count)}
    router.follow(versions, trainer, max_staleness)
    return router


def sample(size=10, **fields):
    """One of which half of `size` is expected to be held besides its prompt of one token."""
    return Sample(
        **{
            "sample_id": "s",
            "prompt": [5],
            "sampling": SamplingParams(),
            "max_new_tokens": size,
            **fields,
        }
    )


def evaluation(**fields):
    return sample(priority=Priority.evaluation, **fields)


async def place(router, *args, **fields):
    return await router.assign(sample(*args, **fields))


def tokens(router):
    """Expected tokens by engine."""
    return {name: engine.tokens for name, engine in router.engines.items()}


async def name_of(router, failed=None, **fields):
    place = await router.assign(sample(**fields), failed)
    place.release()
    return place.engine.name


def asking(router, sample, failed=None):
    return asyncio.create_task(router.assign(sample, failed))


async def turn():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_sample_goes_to_the_engine_with_the_fewest_tokens():
    two = router(2)
    places = [await place(two, size) for size in (200, 20, 40)]
    assert [p.engine.name for p in places] == ["engine-0", "engine-1", "engine-1"]
    assert tokens(two) == {"engine-0": 101, "engine-1": 11 + 21}
    for p in places:
        p.release()
        p.release()  # once is all that counts
    assert tokens(two) == {"engine-0": 0, "engine-1": 0}


async def test_expected_length_is_learnt_from_ended_samples():
    one = router(1)
    one.note_end(sample(output_ids=[1] * 30))
    await place(one, 1000, prompt=[5, 6])
    assert tokens(one) == {"engine-0": 2 + 30}
    await place(one, 1000, output_ids=[1] * 990)
    assert tokens(one) == {"engine-0": 32 + 1 + 990 + 10}


@pytest.mark.parametrize(("num_workers", "chosen"), [(2, "engine-1"), (1, "engine-0")])
async def test_load_counts_only_where_other_workers_can_have_put_it(num_workers, chosen):
    two = router(2, num_workers=num_workers)
    busy = EngineLoad(num_running=7, num_queued=1, num_tokens=800, capacity=9000, kv_usage=0.1)
    two.note_load("engine-0", busy, 0)
    assert (await place(two, 200)).engine.name == chosen


async def test_turns_of_a_session_go_to_the_engine_with_its_prefix():
    three = router(3)
    first = await name_of(three, session="a")
    await place(three, 60, engine=first)
    assert [await name_of(three, session="a", size=60) for _ in range(3)] == [first] * 3
    assert await name_of(three) != first


async def test_siblings_of_a_group_go_to_one_engine_unless_it_is_overloaded():
    three = router(3)
    first = await place(three, 20, session="g.0", group="g")
    chosen = [
        (await place(three, 20, session=f"g.{i}", group="g")).engine.name for i in range(1, 12)
    ]
    assert chosen[:7] == [first.engine.name] * 7
    assert len(set(chosen)) > 1


async def test_session_leaves_an_engine_that_is_overloaded():
    two = router(2)
    first = await name_of(two, session="a", size=20)
    for _ in range(9):
        await place(two, 20, engine=first)
    second = await name_of(two, session="a", size=20)
    assert second != first
    assert await name_of(two, session="a", size=20) == second  # its prefix is there now


async def test_session_is_forgotten_with_the_engine_that_held_it():
    two = router(2)
    assert await name_of(two, session="a") == "engine-0"
    two.follow({"engine-1": 0}, 0, 0)
    two.follow({"engine-0": 0, "engine-1": 0}, 0, 0)
    await place(two)
    assert await name_of(two, session="a") == "engine-1"


def test_sessions_used_least_recently_are_forgotten_first():
    sessions = StickySessions(max_sessions=2)
    for name in ("a", "b", "a", "c"):
        sessions.settle(name, "engine-0")
    assert [sessions.home(name) for name in ("a", "b", "c")] == ["engine-0", None, "engine-0"]


async def test_engine_that_failed_a_sample_is_used_only_if_there_is_no_other():
    two = router(2)
    assert await name_of(two, failed={"engine-0": 0.0}) == "engine-1"
    assert await name_of(two, failed={"engine-0": 0.0, "engine-1": 0.0}) == "engine-0"
    two.follow({"engine-0": 0}, 0, 0)
    assert await name_of(two, failed={"engine-0": 0.0}) == "engine-0"


async def test_engine_that_serves_nothing_or_lags_too_far_gets_no_sample():
    three = router(3, {"engine-1": 4, "engine-2": 6}, trainer=7, max_staleness=2)
    assert {await name_of(three, {"engine-2": 0.0}), await name_of(three)} == {"engine-2"}
    three.follow({"engine-1": 4, "engine-2": 6}, 7, 3)
    assert await name_of(three, {"engine-2": 0.0}) == "engine-1"


async def test_engine_that_drains_gets_no_new_samples_and_keeps_its_sessions():
    two = router(2)
    home = await name_of(two, session="a")
    other = await name_of(two, {home: 0.0})
    two.follow({home: 0, other: 0}, 0, 0, {home})
    assert {await name_of(two, session="b") for _ in range(3)} == {other}
    two.follow({home: 0, other: 0}, 0, 0, {home, other})
    waiting = asking(two, sample(session="a"))
    await turn()
    assert not waiting.done()
    two.follow({home: 0, other: 0}, 0, 0)
    assert (await waiting).engine.name == home


@pytest.mark.parametrize(
    ("trainer", "needed"), [(4, 5), (5, 0)], ids=["its own minimum", "max_staleness"]
)
async def test_sample_waits_for_a_version_that_is_new_enough(trainer, needed):
    two = router(2, {"engine-0": 4, "engine-1": 4}, trainer=trainer)
    waiting = asking(two, sample(min_version=needed))
    await turn()
    two.follow({}, trainer, 0)
    await turn()
    assert not waiting.done()
    two.follow({"engine-0": 4, "engine-1": 5}, 5, 0)
    assert (await waiting).engine.name == "engine-1"


async def test_engine_requested_by_name_is_used_though_held_at_an_old_version():
    three = router(3, {"engine-0": 9, "engine-1": 3}, trainer=9)
    assert await name_of(three, engine="engine-1", min_version=3) == "engine-1"
    assert await name_of(three, engine="engine-2") == "engine-2"  # its holder knows why
    with pytest.raises(EngineError, match=r"no engine-7 among engine-0, engine-1, engine-2"):
        await name_of(three, engine="engine-7")


async def test_engine_learns_which_version_its_requests_will_meet():
    engine = NamedEngine("engine-0")
    Router([engine], 5.0).follow({"engine-0": 6}, 7, 2)
    assert engine.version == 6


async def test_lowest_order_is_served_first_when_all_slots_are_taken():
    one = router(1, max_running_requests=2)
    taken = [await place(one), await place(one)]
    tasks = {order: asking(one, sample(order=order)) for order in (5, 3, 4)}
    await turn()
    served = []
    for _ in range(3):
        taken.pop(0).release()
        done, _ = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
        [order] = [order for order, task in tasks.items() if task in done]
        served.append(order)
        taken.append(tasks.pop(order).result())
        await turn()
    assert served == [3, 4, 5]


async def test_evaluations_come_after_rollouts_but_one_at_each_engine_always_has_a_slot():
    one = router(1, max_running_requests=2)
    rollouts = [await place(one), await place(one)]
    first = await one.assign(evaluation(order=0))
    second = asking(one, evaluation(order=0))
    third = asking(one, sample(order=9))
    await turn()
    assert not second.done() and not third.done()
    rollouts[0].release()
    rollouts[0] = await third
    await turn()
    assert not second.done()
    rollouts[0].release()  # no sample of higher priority waits
    (await second).release()
    first.release()


async def test_evaluations_have_an_eighth_of_the_limit_and_take_nothing_from_the_rollouts():
    one = router(1, max_running_requests=32)
    evaluations = [await one.assign(evaluation()) for _ in range(4)]
    rollouts = [await place(one) for _ in range(32)]
    fifth, rollout = asking(one, evaluation()), asking(one, sample())
    await turn()
    assert not fifth.done() and not rollout.done()
    evaluations[0].release()
    await fifth
    rollouts[0].release()
    await rollout


async def test_slots_are_shared_among_the_workers():
    one = router(1, max_running_requests=5, num_workers=2)
    for _ in range(3):
        await place(one)
    waiting = asking(one, sample())
    await turn()
    assert not waiting.done() and one.engines["engine-0"].limit == 3
    waiting.cancel()


async def test_slot_granted_to_a_cancelled_waiter_is_not_lost():
    one = router(1, max_running_requests=1)
    taken = await place(one)
    waiting = asking(one, sample())
    await turn()
    taken.release()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert one.engines["engine-0"].num_in_flight == 0
    await place(one)


async def test_timeout_says_why_no_engine_took_the_sample():
    one = router(1, {"engine-0": 3}, trainer=5, max_staleness=1, wait_timeout_s=0.05)
    with pytest.raises(
        TimeoutError,
        match=r"engine-0 .*buffer\.wait_timeout_s=0\.05.*'engine-0': 3.*version 5.*staleness is 1"
        r".*0 of 128 slots taken, breaker closed",
    ):
        await name_of(one)


async def test_long_line_does_not_time_out_while_it_moves(advance_clock):
    one = router(1, wait_timeout_s=60.0, max_running_requests=1)
    taken = await place(one)
    waiting = asking(one, sample(order=1))
    for _ in range(4):  # 80 s: tokens come, then others are served
        await turn()
        advance_clock(20.0)
        taken.progress()
    for _ in range(4):
        other = asking(one, sample())
        await turn()
        taken.release()
        taken = await other
        advance_clock(20.0)
        await turn()
    assert not waiting.done()
    advance_clock(60.0)
    with pytest.raises(TimeoutError):
        await waiting


async def test_progress_at_unsuitable_engines_does_not_count():
    two = router(2, {"engine-0": 3, "engine-1": 3}, trainer=3, wait_timeout_s=0.2)
    busy = await place(two)

    async def work():
        while True:
            await asyncio.sleep(0.02)
            busy.progress()

    working = asyncio.create_task(work())
    with pytest.raises(TimeoutError, match="for version 4 or later"):
        async with asyncio.timeout(60):
            await two.assign(evaluation(min_version=4))
    working.cancel()


# Engines that fail -----------------------------------------------------------------------------


async def lose(router):
    """Four samples at engine-0 fail together."""
    places = [await place(router, engine="engine-0") for _ in range(4)]
    for failing in places:
        failing.fail()
        failing.release()


async def test_engine_that_keeps_failing_gets_no_samples_until_one_on_trial_succeeds(
    monkeypatch, advance_clock
):
    monkeypatch.setattr(engine_state, "FIRST_DELAY_S", 30.0)
    two = router(2)
    await lose(two)
    assert two.engines["engine-0"].breaker.state is BreakerState.open
    assert [(await place(two)).engine.name for _ in range(4)] == ["engine-1"] * 4
    advance_clock(31.0)
    trial = await place(two)
    assert trial.engine.name == "engine-0"
    assert two.engines["engine-0"].breaker.state is BreakerState.half_open
    assert [(await place(two)).engine.name for _ in range(2)] == ["engine-1"] * 2
    trial.progress()
    assert two.engines["engine-0"].breaker.state is BreakerState.closed
    assert (await place(two)).engine.name == "engine-0"


@pytest.mark.parametrize("delay_s", [0.0002, 0.0, 0.05])  # the first is now for uvloop's clock
def test_sample_waits_for_a_recovery_under_the_loop_of_rays_actors(delay_s, monkeypatch):
    monkeypatch.setattr(engine_state, "FIRST_DELAY_S", delay_s)

    async def wait():
        one = router(1)
        first = await place(one)
        at = first.fail()
        waiting = [asking(one, sample(), {"engine-0": at}) for _ in range(2)]
        await turn()
        first.release()
        async with asyncio.timeout(60):
            await asyncio.gather(*waiting)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        errors = []
        runner.get_loop().set_exception_handler(lambda loop, context: errors.append(context))
        for _ in range(20):
            runner.run(wait())
    assert errors == []


async def test_sample_whose_only_engine_failed_it_is_served_at_once_when_others_get_tokens(
    monkeypatch,
):
    monkeypatch.setattr(engine_state, "FIRST_DELAY_S", 30.0)
    one = router(1)
    first, other = await place(one), await place(one)
    at = first.fail()
    first.release()
    waiting = asking(one, sample(), {"engine-0": at})
    await turn()
    assert not waiting.done()
    assert (await place(one)).engine.name == "engine-0"  # others may: it was one failure
    other.progress()
    other.release()
    await turn()
    assert waiting.done()


async def test_engine_that_came_back_is_tried_at_once():
    two = router(2)
    await lose(two)
    two.follow({"engine-1": 0}, 0, 0)
    two.follow({"engine-0": 0, "engine-1": 0}, 0, 0)
    assert (await place(two)).engine.name == "engine-0"


async def test_engine_that_failed_and_does_not_answer_at_all_gets_not_even_a_trial(advance_clock):
    two = router(2)
    await lose(two)
    two.note_silence("engine-0")
    advance_clock(1.0)
    assert (await place(two)).engine.name == "engine-1"
    two.note_load("engine-0", None, 0)
    assert (await place(two)).engine.name == "engine-0"


# Work ------------------------------------------------------------------------------------------


class Work:
    """The number of function calls: a measure that does not depend on the machine's load."""

    num_calls = 0

    @contextmanager
    def counted(self):
        self.num_calls = 0
        gc.disable()  # finalizers of what the tests before have left are calls too
        sys.setprofile(self._note)
        try:
            yield self
        finally:
            sys.setprofile(None)
            gc.enable()

    def _note(self, frame, event, arg):
        # C functions too, and the expressions that walk a list are calls of Python each.
        self.num_calls += event in ("call", "c_call")


async def crowd_at(router, count, failed):
    """So many wait, each of which failed at some engines at a time of its own."""
    waiting = []
    for number in range(count):
        times = {name: at + number * 1e-9 for name, at in failed.items()}
        waiting.append(asking(router, sample(order=number % 7), times))
    await asyncio.sleep(0)
    return waiting


async def end(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def failed_at_one_of(router, *, is_gone):
    """Engine-0 has failed, engine-1 is full; when, and a place at engine-1."""
    places = [await place(router, engine="engine-1") for _ in range(8)]
    await lose(router)
    at = time.monotonic()
    if is_gone:
        router.follow({"engine-1": 0}, 0, 0)
        await asyncio.sleep(0.6)  # its delay is over, but it serves nothing
    return at, places[0]


@pytest.mark.parametrize("is_gone", [False, True], ids=["open", "gone"])
async def test_dead_engine_with_thousands_of_samples_costs_linear_time(is_gone, monkeypatch):
    if not is_gone:
        monkeypatch.setattr(engine_state, "FIRST_DELAY_S", 60.0)
    two, work = router(2, max_running_requests=8), Work()
    at, taken = await failed_at_one_of(two, is_gone=is_gone)
    with work.counted():
        waiting = await crowd_at(two, 500, {"engine-0": at})
    assert work.num_calls < 500 * 150
    assert two.num_waiting == 500
    with work.counted():
        taken.release()
    assert work.num_calls < 250
    await turn()
    assert [task.done() for task in waiting].count(True) == 1 and waiting[0].done()
    with work.counted():
        two.follow({"engine-1": 0}, 0, 0)
    assert work.num_calls < 250
    await end(waiting)


async def test_thousands_of_timeouts_cost_linear_time():
    two, work = router(2, {}, wait_timeout_s=0.3), Work()
    waiting = await crowd_at(two, 500, {})
    with work.counted():
        await asyncio.wait(waiting)
    assert work.num_calls < 500 * 250
    assert all(isinstance(task.exception(), TimeoutError) for task in waiting)


async def test_full_engines_cost_a_sample_no_call_each():
    many, work = router(300, max_running_requests=1), Work()
    for number in range(1, 300):
        await place(many, engine=f"engine-{number}")
    (await place(many)).release()
    with work.counted():
        free = await place(many)
    assert free.engine.name == "engine-0"
    assert work.num_calls < 150


async def test_there_is_room_while_fewer_rollouts_wait_than_a_group_has():
    one = router(1, max_running_requests=1)
    assert await one.wait_room(2) == 2  # one would run and one wait
    taken = await place(one)
    lines = [asking(one, evaluation()), asking(one, evaluation()), asking(one, sample())]
    await turn()
    assert await one.wait_room(2) == 1  # one waits
    lines.append(asking(one, sample()))
    room = asyncio.create_task(one.wait_room(2))
    await turn()
    assert not room.done()
    taken.release()
    assert await asyncio.wait_for(room, 60) == 1
    await end(lines)


async def test_there_is_room_for_as_many_groups_as_would_leave_fewer_waiting_than_one_has():
    many = router(2, max_running_requests=4)
    assert [await many.wait_room(n) for n in (1, 2, 3, 8, 9)] == [9, 5, 4, 2, 2]
    await place(many, engine="engine-0")
    assert [await many.wait_room(n) for n in (2, 7)] == [5, 2]
    many.follow({"engine-1": 0}, 0, 0)  # the other serves nothing
    assert await many.wait_room(2) == 3


async def test_engine_that_one_sample_may_try_again_is_no_room():
    many = router(2, max_running_requests=4)
    breaker = many.engines["engine-1"].breaker
    for moment in (1.0, 2.0, 3.0):  # long ago: now it may be tried
        breaker.fail(moment, moment)
    assert breaker.admits(time.monotonic())
    assert await many.wait_room(2) == 3  # as without it
    breaker.succeed(time.monotonic())
    assert await many.wait_room(2) == 5


async def test_sample_that_waits_for_its_engine_blocks_no_other():
    """Both failed at the only engine, one before it got tokens again and one after."""
    one = router(1)
    earlier = (await place(one)).fail()
    (await place(one)).progress()
    later = (await place(one)).fail()
    behind = asking(one, sample(order=1), {"engine-0": later})
    ahead = asking(one, sample(order=2), {"engine-0": earlier})
    await turn()
    assert ahead.done() and not behind.done()
    await end([behind])


# Loads -----------------------------------------------------------------------------------------


async def test_poller_reports_loads_to_the_router(fake, client, other_fake, other_client):
    fake.load = {
        "num_running_reqs": 1,
        "num_waiting_reqs": 3,
        "num_total_tokens": 90,
        "max_total_num_tokens": 100,
        "token_usage": 0.97,
    }
    both = Router([client, other_client], 5.0, max_running_requests=40)
    both.follow({"engine-0": 0, "engine-1": 0}, 0, 0)
    polling = asyncio.gather(*(poll_load(both, c, every_s=0.02) for c in (client, other_client)))
    await until(lambda: both.engines["engine-0"].limit == 1)
    assert both.engines["engine-1"].limit == 40  # it has no such route, which is not a failure
    seen = fake.num_loads
    other_fake.stop()
    await until(lambda: fake.num_loads >= seen + 3)
    polling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await polling


async def test_engine_is_asked_less_often_where_there_are_many(fake, client, monkeypatch):
    one = Router([client], 5.0)
    monkeypatch.setattr(engine_watch, "ASKED_PER_S", 1e-3)
    polling = asyncio.create_task(poll_load(one, client, every_s=0.0))
    await until(lambda: fake.num_loads == 1)
    for _ in range(5):
        await client.load()
    assert fake.num_loads == 6
    polling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await polling


async def test_raised_limit_admits_the_next_sample_at_once():
    one = router(1, max_running_requests=64)
    full = EngineLoad(num_running=1, num_queued=0, num_tokens=9, capacity=10, kv_usage=0.99)
    one.note_load("engine-0", full, 0)
    assert one.engines["engine-0"].limit == 1
    await place(one)
    waiting = asking(one, sample())
    await turn()
    assert not waiting.done()
    roomy = EngineLoad(num_running=1, num_queued=0, num_tokens=9, capacity=9000, kv_usage=0.1)
    one.note_load("engine-0", roomy, 0)
    await turn()
    assert waiting.done()


async def test_limit_falls_from_what_was_in_flight_before_all_samples_were_interrupted():
    one = router(1, max_running_requests=64)
    idle = EngineLoad(num_running=0, num_queued=0, num_tokens=0, capacity=9000, kv_usage=0.0)
    places = [await place(one) for _ in range(40)]
    one.note_load("engine-0", idle, 0)
    for taken in places:
        taken.release()
    one.note_load("engine-0", idle, 0)
    one.note_load("engine-0", idle, 3)  # what they had suffered is heard of late
    assert one.engines["engine-0"].limit == 40 * 8 // 10
    one.note_load("engine-0", idle, 1)  # this is not of so many
    assert one.engines["engine-0"].limit == 1


async def test_among_many_engines_loads_are_nearly_even_and_the_last_free_one_is_found():
    many = router(200, max_running_requests=12)
    slots = {
        (group, number): await place(many, group=f"group-{group}")
        for group in range(200)
        for number in range(8)
    }
    loads = sorted(engine.num_in_flight for engine in many.engines.values())
    assert sum(loads) == 1600 and loads[-1] <= 12 and loads[10] > 0, loads
    stayed = sum(slots[g, n].engine is slots[g, 0].engine for g, n in slots)
    assert stayed > 0.8 * len(slots), stayed
    for _ in range(200 * 12 - 1600):  # also the slots that no draw would hit
        await place(many)
    assert {engine.num_in_flight for engine in many.engines.values()} == {12}
    waiting = asking(many, sample())
    await asyncio.sleep(0)
    assert many.num_waiting == 1
    slots[3, 0].release()
    assert (await waiting).engine is slots[3, 0].engine


async def test_of_many_engines_only_those_of_a_version_that_is_needed_are_taken():
    versions = {f"engine-{i}": int(i < 20) for i in range(40)}
    many = router(40, versions, trainer=1, max_staleness=1)
    for number in range(40):
        old = await place(many, group=f"g-{number}")
        old.release()
        if versions[old.engine.name] == 1:
            continue
        one = await place(many, group=f"g-{number}", min_version=1)
        assert versions[one.engine.name] == 1
        one.release()
