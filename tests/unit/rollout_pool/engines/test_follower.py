"""An engine that follows its receiver: real Redis, an engine and a receiver of real HTTP."""

from __future__ import annotations

import asyncio
import threading

import pytest

from buffer.probes import Probes
from buffer.run_state import EngineRoutes, RunState
from configs.choices import PauseMode
from configs.schema import WeightSyncConfig
from rollout_pool.engines import follower
from rollout_pool.engines.commit import Committer
from rollout_pool.engines.engine import TornEngine
from rollout_pool.engines.follower import MAX_FAILURES, VersionPin, WeightFollower
from rollout_pool.engines.read_back import ReadBack
from rollout_pool.engines.sglang.strategies import StagedDisk
from tests.support.rollout import make_sample, records, serves, spans, until, until_read


@pytest.fixture
def pin():
    return VersionPin()


@pytest.fixture
async def follow(client, state, receiver, pin):
    """Makes engine-0 follow the receiver; errors are at the task."""
    await state.register_receiver("receiver-0", receiver.url)
    started = []

    def start(**settings):
        config = WeightSyncConfig(**settings)
        strategy = StagedDisk(client, config.commit_timeout_s)
        following = WeightFollower(
            engine="engine-0",
            host="127.0.0.1",
            key="a-key",
            config=config,
            state=state,
            committer=Committer(client, strategy, config.pause_mode),
            responds=client.responds,
            pin=pin,
            read_back=ReadBack(client, config.commit_timeout_s),
        )
        started.append((following, asyncio.create_task(following.run())))
        return started[-1][1]

    yield start
    for following, task in started:
        task.cancel()
        await asyncio.wait({task})
        await following.forget_receiver()


def loads(fake):
    return [int(body["weight_version"]) for body in fake.bodies("/update_weights_from_disk")]


async def test_follower_commits_records_and_releases_each_version(fake, follow, state, receiver):
    follow()
    for version in (0, 1):
        receiver.offer(version)
        await serves(state, {"engine-0": version})
    paths = [body["model_path"] for body in fake.bodies("/update_weights_from_disk")]
    assert paths == ["/dev/shm/staged/0", "/dev/shm/staged/1"]
    who = "engine-0"
    assert receiver.log == [(verb, v, who) for v in (0, 1) for verb in ("hold", "let_go")]
    record = (await until_read(lambda: records(state, "commit"), lambda found: found[1:]))[1]
    assert (record["engine"], record["version"], record["strategy"]) == (who, 1, "staged_disk")
    assert 0 < record["load_s"] <= record["pause_s"] <= record["staged_to_commit_s"]
    assert 0 <= record["gate_wait_s"] <= record["staged_to_commit_s"]
    assert await state.enter_commit("engine-9", 1, ttl_s=5, timeout_s=0)  # the gate is free


async def test_engine_is_compared_with_what_the_trainer_has_left(fake, follow, state, receiver):
    logprobs = [[-1.0] * 9, [-1.5] * 19]
    await state.leave_probes(Probes(version=1, text=[5] * 20, logprobs=logprobs, most=0.1))
    follow()
    for version in (0, 1, 2):
        receiver.offer(version)
        await serves(state, {"engine-0": version})
    [body] = fake.bodies("/generate")
    assert body["input_ids"] == [[5] * 10, [5] * 20] and body["logprob_start_len"] == [0, 0]
    [record] = await records(state, "agreement")
    assert (record["engine"], record["version"], record["mean"]) == ("engine-0", 1, 0.5)
    assert "At 10 tokens they agree" in record["error"]


async def test_comparison_that_fails_costs_no_commit(fake, follow, state, receiver):
    await state.leave_probes(Probes(version=0, text=[5] * 9, logprobs=[[-1.0] * 8], most=0.1))
    fake.prompt_logprob = "no number"
    follow()
    for version in (0, 1):
        receiver.offer(version)
        await serves(state, {"engine-0": version})
    assert fake.bodies("/generate") and not await records(state, "agreement")


async def test_engine_drains_before_it_holds_the_newest(fake, client, follow, state, receiver):
    may_end = threading.Event()
    fake.says(may_end=may_end)
    follow(pause_mode=PauseMode.drain)
    receiver.offer(0)
    await serves(state, {"engine-0": 0})
    sample = make_sample()
    asking = asyncio.create_task(client.generate_tokens(sample, "running!"))
    await until(lambda: bool(sample.output_ids))
    receiver.offer(1)
    routes = await state.wait_routes_changed(EngineRoutes({"engine-0": 0}, frozenset(), {}), 60)
    assert routes == EngineRoutes({"engine-0": 0}, frozenset({"engine-0"}), {})
    assert not await state.enter_commit("engine-1", 1, ttl_s=5, timeout_s=0)
    receiver.offer(2)
    may_end.set()
    await serves(state, {"engine-0": 2})
    assert loads(fake) == [0, 2] and (1, "engine-0") not in {(v, n) for _, v, n in receiver.log}
    assert (await state.wait_routes_changed(routes, 60)).draining == frozenset()
    await asking
    assert spans(sample) == [(0, 0, 3)]
    first, second = await recorded(state, 2)
    assert first["drain_s"] == 0 < second["drain_s"]


async def recorded(state, version):
    """The records of commits, once they have that of this version."""
    return await until_read(
        lambda: records(state, "commit"), lambda found: version in [r["version"] for r in found]
    )


async def test_engine_whose_version_is_gone_after_a_drain_serves_on(fake, follow, state, receiver):
    follow(pause_mode=PauseMode.drain)
    receiver.offer(0)
    await serves(state, {"engine-0": 0})
    receiver.is_gone = {1}
    resumed = len(fake.bodies("/continue_generation"))
    receiver.offer(1)
    await until(lambda: len(fake.bodies("/continue_generation")) >= resumed + 2)
    receiver.offer(2)
    await serves(state, {"engine-0": 2})
    assert loads(fake) == [0, 2]
    now = await state.wait_routes_changed(EngineRoutes({}, frozenset(), {}), 60)
    assert now.draining == frozenset()


async def test_engine_that_waited_at_the_gate_skips_to_the_newest(fake, follow, state, receiver):
    assert await state.enter_commit("engine-1", 1, ttl_s=60, timeout_s=0)
    follow()
    receiver.offer(1)
    await asyncio.sleep(0.2)
    assert not fake.calls
    receiver.offer(2)
    receiver.offer(3)
    await state.leave_commit("engine-1")
    await serves(state, {"engine-0": 3})
    assert loads(fake) == [3]


async def test_silent_engine_leaves_the_gate_to_others(fake, follow, state, receiver, monkeypatch):
    monkeypatch.setattr(follower, "RESPONSE_TIMEOUT_S", 0.2)
    fake.slow["/model_info"] = 60.0
    follow()
    receiver.offer(1)
    for _ in range(20):  # all the while that it is asked again and again
        assert await state.enter_commit("engine-1", 1, ttl_s=60, timeout_s=0)
        await state.leave_commit("engine-1")
        await asyncio.sleep(0.05)
    del fake.slow["/model_info"]
    await serves(state, {"engine-0": 1})


async def test_engine_that_stalls_at_the_gate_leaves_it(fake, follow, state, receiver, monkeypatch):
    assert await state.enter_commit("engine-1", 1, ttl_s=60, timeout_s=0)
    follow()
    receiver.offer(1)
    await until(lambda: fake.num_infos)
    await asyncio.sleep(0.2)  # it waits at the gate now
    monkeypatch.setattr(follower, "RESPONSE_TIMEOUT_S", 0.2)
    fake.slow["/model_info"] = 60.0
    await state.leave_commit("engine-1")
    await until(lambda: fake.num_infos >= 3)  # inside, and once more outside
    assert await state.enter_commit("engine-1", 1, ttl_s=60, timeout_s=0)
    assert not fake.calls and receiver.log == []


async def test_receiver_that_dies_in_a_poll_is_found_again(follow, state, receiver, other_receiver):
    follow()
    receiver.offer(0)
    await serves(state, {"engine-0": 0})
    receiver.stop()
    other_receiver.offer(1)
    await state.register_receiver("receiver-0", other_receiver.url)
    await serves(state, {"engine-0": 1})


async def test_version_that_is_gone_at_the_gate_is_not_loaded(fake, follow, state, receiver):
    receiver.is_gone = {1}
    receiver.offer(1)
    follow()
    await asyncio.sleep(0.3)
    receiver.offer(2)
    await serves(state, {"engine-0": 2})
    assert loads(fake) == [2]


async def test_torn_engine_raises_and_is_not_recorded(fake, follow, state, receiver):
    fake.refused = {"/update_weights_from_disk"}
    following = follow()
    receiver.offer(5)
    with pytest.raises(TornEngine, match=r"engine-0 must be restarted.*version 5"):
        async with asyncio.timeout(60):
            await following
    assert await state.engine_versions() == {} and await records(state, "commit") == []
    assert receiver.held == set()
    assert await state.enter_commit("engine-9", 1, ttl_s=5, timeout_s=0)


async def test_commit_that_takes_too_long_is_a_torn_engine(fake, follow, receiver):
    fake.slow["/update_weights_from_disk"] = 60.0
    following = follow(commit_timeout_s=2.5)
    receiver.offer(5)
    # Where the loop stood still, the request's own time is over in the same turn.
    either = (
        r"did not commit version 5 .*timeout_s=2\.5|the commit of version 5 failed: .*TimeoutError"
    )
    with pytest.raises(TornEngine, match=either):
        async with asyncio.timeout(60):
            await following


async def test_commit_that_did_not_begin_is_tried_again_a_few_times(fake, follow, state, receiver):
    fake.num_refusals["/pause_generation"] = MAX_FAILURES - 1
    following = follow()
    receiver.offer(0)
    await serves(state, {"engine-0": 0})
    fake.refused = {"/pause_generation"}
    receiver.offer(1)
    with pytest.raises(TornEngine, match=f"{MAX_FAILURES} commits in a row failed"):
        async with asyncio.timeout(60):
            await following
    assert loads(fake) == [0]


@pytest.mark.parametrize("is_polling", [True, False])
async def test_engine_that_is_released_without_a_newer_version_is_counted_again(
    fake, follow, state, receiver, pin, monkeypatch, is_polling
):
    monkeypatch.setattr(follower, "LONG_POLL_S", 600.0)  # no end of a poll helps
    may_compare, probes = asyncio.Event(), RunState.probes

    async def probes_later(self, version):
        await may_compare.wait()
        return await probes(self, version)

    monkeypatch.setattr(RunState, "probes", probes_later)
    follow()
    receiver.offer(1)
    await serves(state, {"engine-0": 1})
    if is_polling:
        may_compare.set()
        await until(lambda: receiver.polled_above == 1)
    assert await pin.want(1, 60.0)  # while it asks its receiver for more, or just before
    await state.forget_engine("engine-0")
    pin.release()
    may_compare.set()
    await serves(state, {"engine-0": 1})
    assert loads(fake) == [1]
    receiver.offer(2)
    await serves(state, {"engine-0": 2})


async def test_engine_at_the_gate_does_not_pass_its_pin(fake, follow, state, receiver, pin):
    follow()
    receiver.offer(1)
    await serves(state, {"engine-0": 1})
    assert await state.enter_commit("engine-1", 1, ttl_s=60, timeout_s=0)
    receiver.offer(2)
    await asyncio.sleep(0.2)  # it waits at the gate with 2
    assert await pin.want(1, 60.0)
    await state.leave_commit("engine-1")
    await asyncio.sleep(0.3)
    assert loads(fake) == [1] and receiver.held == set()
    pin.release()
    await serves(state, {"engine-0": 2})


async def test_hold_ends_though_the_follower_is_cancelled_as_it_gets_it(follow, receiver):
    receiver.hold_s = 30.0
    task = follow()
    receiver.offer(1)

    await until(lambda: receiver.held == {(1, "engine-0")})
    task.cancel()
    await asyncio.wait({task})
    assert receiver.held == set()


async def test_follower_takes_versions_from_the_receiver_at_its_address(follow, state, receiver):
    await state.register_receiver("receiver-00", "http://127.0.0.9:1")  # another machine's
    receiver.offer(1)
    follow()
    await serves(state, {"engine-0": 1})


async def test_engine_is_read_at_first_and_every_16th_time(fake, follow, state, receiver, tmp_path):
    fake.held = lambda version: {"norm.weight": f"of {version}"}
    read, following = [], follow()
    for version in (3, 4, 5, 15, 17, 31, 32):
        receiver.offer_weights(tmp_path, version, {"norm.weight": version})
        await serves(state, {"engine-0": version})
        await recorded(state, version)
        read.append(len(fake.bodies("/weights_checker")))
    assert read[2:4] == [2, 2] and read[5] == 3
    await until(lambda: len(fake.bodies("/weights_checker")) == 4)
    assert not following.done()


async def test_engine_that_cannot_be_read_back_serves_on(fake, follow, state, receiver, tmp_path):
    fake.refused = {"/weights_checker"}
    following = follow()
    for version in (1, 2):
        receiver.offer_weights(tmp_path, version, {"norm.weight": version})
        await serves(state, {"engine-0": version})
    receiver.offer(3)  # without a manifest
    await serves(state, {"engine-0": 3})
    assert not following.done() and await records(state, "weights_event") == []


async def test_engines_with_different_weights_are_reported(fake, follow, state, receiver, tmp_path):
    fake.held = lambda version: {"norm.weight": f"of {version}"}
    assert await state.other_weights(3, "engine-1", "of another one") == ""
    follow()
    receiver.offer_weights(tmp_path, 3, {"norm.weight": 3})
    [event] = await until_read(lambda: records(state, "weights_event"))
    assert (event["event"], event["who"]) == ("engines_differ", "engine-0")
    assert event["detail"] == "holds other weights than engine-1 at version 3"
