"""Samples completed through failures, refusals and interruptions, over real HTTP."""

from __future__ import annotations

import asyncio

import pytest

from rollout_pool.sampling import engine_state
from rollout_pool.sampling.router import Router
from rollout_pool.sampling.sample import Interrupted, SampleFailed
from rollout_pool.sampling.sampler import Sampler
from tests.support.rollout import make_sample, spans, until


@pytest.fixture
def router(client, other_client):
    router = Router([client, other_client], wait_timeout_s=60.0)
    router.follow({"engine-0": 0, "engine-1": 0}, 0, 0)
    return router


@pytest.fixture
def sampler(router):
    return Sampler(router, max_retries=1)


def rids(fake):
    return [rid for body in fake.bodies("/generate") for rid in body["rid"]]


async def test_owner_is_called_at_each_arrival_and_the_end(fake, other_fake, sampler):
    fake.version = "41"
    fake.says(output_ids=[1, 2, 3, 4], parts=[1, 2])
    seen, arrived = [], []

    def note(s):
        seen.append((len(s.output_ids), s.finish_reason))
        arrived.append(sampler.counted["tokens_arrived"])

    sample = make_sample(on_tokens=note)
    await sampler.complete(sample)
    assert seen == [(1, None), (3, None), (4, "stop")]
    assert arrived == [1, 3, 4], "they are counted before it has ended"
    assert (sample.num_attempts, sample.num_failures, sample.num_wasted) == (1, 0, 0)
    assert spans(sample) == [(41, 0, 4)]
    await sampler.complete(sample)  # it has ended: nothing is asked
    assert rids(fake) == ["g.0.1!"] and rids(other_fake) == []


async def test_sample_whose_engine_dies_continues_elsewhere(fake, other_fake, sampler, router):
    fake.version, other_fake.version = "3", "4"
    router.follow({"engine-0": 3, "engine-1": 4}, 4, 1)
    fake.says(
        output_ids=[10, 11, 12, 13, 14],
        logprobs=[-0.1, -0.2, -0.3, -0.4, -0.5],
        parts=[1, 2],
        labels=["3", "3"],
        breaks=True,
    )
    other_fake.says(output_ids=[23, 24, 2], logprobs=[-1.0, -2.0, -3.0])
    sample = make_sample()
    await sampler.complete(sample)
    assert sample.output_ids == [10, 11, 12, 23, 24, 2]
    assert sample.logprobs == [-0.1, -0.2, -0.3, -1.0, -2.0, -3.0]
    assert spans(sample) == [(3, 0, 3), (4, 3, 6)]
    [body] = other_fake.bodies("/generate")
    assert body["input_ids"] == [[5, 6, 7, 10, 11, 12]]
    assert body["sampling_params"][0]["max_new_tokens"] == 5
    assert (sample.num_attempts, sample.num_failures, sample.num_refused) == (2, 1, 0)
    counted = sampler.counted
    assert counted["requests:engine-0"] == counted["requests:engine-1"] == 1
    assert counted["tokens_arrived"] == 6
    for what in ("queue", "first_token"):
        assert sum(n for name, n in counted.items() if name.startswith(f"{what}_within:")) == 2
    assert counted["first_token_s:engine-0"] > 0 and counted["first_token_s:engine-1"] > 0
    assert counted["decode_s:engine-0"] > 0 and counted["decode_s:engine-1"] > 0
    assert sample.num_wasted == 5  # at most as many as were left to it
    assert [engine.num_in_flight for engine in router.engines.values()] == [0, 0]


async def test_sample_refused_for_its_logprobs_goes_elsewhere_and_counts(fake, other_fake, sampler):
    fake.says(logprobs=[None, None, None])
    other_fake.says(output_ids=[20, 2])
    sample = make_sample()
    await sampler.complete(sample)
    assert sample.output_ids == [20, 2]
    assert (sample.num_refused, sample.num_failures) == (1, 1)
    await until(lambda: sample.num_wasted == 3)  # of the last two it hears when it is elsewhere


async def test_sample_that_fails_at_last_says_why_and_keeps_its_tokens(fake, other_fake, sampler):
    fake.says(parts=[1], breaks=True)
    other_fake.status = 500
    sample = make_sample()
    with pytest.raises(
        SampleFailed, match=r"g\.0 failed 2 times \(rollout\.max_request_retries=1\).*out of order"
    ):
        await sampler.complete(sample)
    assert sample.output_ids == [11] and sample.finish_reason is None
    other_fake.status = 200
    await sampler.complete(sample)  # with fresh attempts
    assert sample.finish_reason == "stop" and sample.output_ids[0] == 11


async def test_sample_that_lost_its_only_engine_waits_for_it(
    advance_clock, fake, sampler, router, monkeypatch
):
    monkeypatch.setattr(engine_state, "FIRST_DELAY_S", 20.0)
    router.follow({"engine-0": 0}, 0, 0)
    fake.status = 500
    sample = make_sample()
    completing = asyncio.create_task(sampler.complete(sample))
    await until(lambda: fake.calls)
    router.follow({}, 0, 0)  # it has died
    await until(lambda: router.num_waiting)
    advance_clock(21.0)
    await asyncio.sleep(0.1)
    assert len(fake.bodies("/generate")) == 1 and not completing.done()
    fake.status = 200
    router.follow({"engine-0": 0}, 0, 0)
    await completing
    assert sample.finish_reason == "stop"


async def test_interrupted_sample_has_tokens_of_exact_versions_and_continues(fake, sampler, router):
    router.follow({"engine-0": 0}, 0, 0)
    fake.says(
        output_ids=[1, 2, 3],
        parts=[1],
        never_ends=lambda rid: rid.endswith(".1!"),
        at_abort=[8, 9],
        versions=[("0", 0, 2), ("1", 2, 3)],
    )
    sample = make_sample()
    completing = asyncio.create_task(sampler.complete(sample))
    await until(lambda: sample.output_ids)
    sampler.interrupt(sample)
    with pytest.raises(Interrupted):
        await completing
    assert sample.output_ids == [1, 8, 9] and spans(sample) == [(0, 0, 2), (1, 2, 3)]
    assert (sample.finish_reason, sample.num_failures, sample.num_wasted) == (None, 0, 0)
    sampler.interrupt(sample)  # nothing is under way
    await sampler.complete(sample)
    assert sample.output_ids == [1, 8, 9, 1, 2, 3]
    assert spans(sample) == [(0, 0, 2), (1, 2, 3), (0, 3, 5), (1, 5, 6)]
    assert rids(fake) == ["g.0.1!", "g.0.2!"]


async def test_time_in_the_line_and_time_to_the_first_token_are_told_apart(client, fake):
    fake.says(says_first_token=False, delay_s=0.15)
    router = Router([client], wait_timeout_s=60.0, max_running_requests=1)
    sampler = Sampler(router, max_retries=1)
    completing = asyncio.create_task(sampler.complete(make_sample()))
    await until(lambda: router.num_waiting == 1)
    await asyncio.sleep(0.35)
    router.follow({"engine-0": 0}, 0, 0)  # before that it serves nothing
    await completing
    assert sampler.counted["queue_s:engine-0"] >= 0.35
    assert sampler.counted["first_token_s:engine-0"] >= 0.15
    assert not any(sampler.counted[f"queue_within:{bound}"] for bound in ("0.01", "0.1", "0.3"))
    assert not any(sampler.counted[f"first_token_within:{bound}"] for bound in ("0.01", "0.1"))


async def test_sample_that_waits_for_room_is_interrupted_at_once(client, fake):
    router = Router([client], 60.0, max_running_requests=1)
    router.follow({"engine-0": 0}, 0, 0)
    sampler = Sampler(router, max_retries=1)
    fake.says(never_ends=True)
    running, waiting = make_sample(0), make_sample(1)
    tasks = [asyncio.create_task(sampler.complete(sample)) for sample in (running, waiting)]
    await until(lambda: running.output_ids)
    sampler.interrupt(waiting)
    with pytest.raises(Interrupted):
        await tasks[1]
    assert waiting.num_attempts == router.num_waiting == 0 and not tasks[0].done()
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_sample_that_ends_as_it_is_interrupted_has_ended(fake, sampler):
    fake.num_lost_aborts = 99
    fake.says(delay_s=0.2)
    sample = make_sample()
    completing = asyncio.create_task(sampler.complete(sample))
    await until(lambda: sample.output_ids)
    sampler.interrupt(sample)
    await completing
    assert sample.finish_reason == "stop"


async def test_sample_that_has_reached_its_limit_ends_without_a_request(fake, other_fake, sampler):
    fake.says(output_ids=[1, 2, 3], parts=[1, 2], breaks=True)
    seen = []
    sample = make_sample(max_new_tokens=3, on_tokens=lambda s: seen.append(s.finish_reason))
    await sampler.complete(sample)
    assert (sample.output_ids, sample.finish_reason) == ([1, 2, 3], "length")
    assert seen == [None, None, "length"]
    assert rids(other_fake) == []


async def test_cancelled_sample_is_stopped_at_its_engine_and_leaves_its_slot(fake, sampler, router):
    fake.says(never_ends=True)
    sample = make_sample()
    completing = asyncio.create_task(sampler.complete(sample))
    await until(lambda: sample.output_ids)
    completing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await completing
    assert fake.aborted == ["g.0.1!"]
    assert [engine.num_in_flight for engine in router.engines.values()] == [0, 0]
