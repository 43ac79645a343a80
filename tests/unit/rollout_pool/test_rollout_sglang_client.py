"""The client against a server that answers in SGLang's form."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from buffer.types import VersionSpan
from configs.choices import PauseMode
from rollout_pool.generation import (
    BadLogprobs,
    EngineError,
    FirstToken,
    Generation,
    Refused,
    SampleRequest,
    Sampling,
)
from weight_sync.types import GroupSpec, TensorSpec

SAMPLING = Sampling(temperature=0.7, max_new_tokens=8)
GROUP = GroupSpec(
    epoch=0,
    host="127.0.0.1",
    port=29500,
    name="weights-0",
    num_senders=1,
    receivers=("engine-0.0", "engine-0.1"),
    backend="gloo",
    timeout_s=5,
)


def requests(count):
    return [SampleRequest(request_id=f"g.{i}.0", tokens=[5, 6, 7]) for i in range(count)]


async def events_of(client, count=1):
    async with aclosing(client.generate(requests(count), SAMPLING)) as events:
        return [event async for event in events]


async def last_of(client):
    return (await events_of(client))[-1]


async def test_a_call_carries_all_samples_and_returns_each_with_its_logprobs(
    fake, client, make_reply
):
    fake.reply = lambda rid: make_reply(
        output_ids=[int(rid[2]) + 10, 2], logprobs=[-1.5, -0.25], finish_type="stop"
    )
    ends = [event for event in await events_of(client, 3) if isinstance(event, Generation)]
    assert {event.index: event.output_ids for event in ends} == {0: (10, 2), 1: (11, 2), 2: (12, 2)}
    assert all(event.logprobs == (-1.5, -0.25) for event in ends)
    assert all(event.finish_reason == "stop" for event in ends)
    [body] = fake.bodies("/generate")
    assert body["input_ids"] == [[5, 6, 7]] * 3
    assert body["rid"] == ["g.0.0", "g.1.0", "g.2.0"]
    assert body["return_logprob"] and body["stream"]
    assert body["sampling_params"]["temperature"] == 0.7
    assert body["sampling_params"]["max_new_tokens"] == 8


async def test_a_sample_is_told_when_it_ends_and_not_when_its_siblings_do(fake, client, make_reply):
    fake.reply = lambda rid: make_reply(delay_s=0.0 if rid == "g.1.0" else 0.4)
    async with aclosing(client.generate(requests(2), SAMPLING)) as events:
        first_end = await anext(event async for event in events if isinstance(event, Generation))
    assert first_end.index == 1


async def test_the_first_token_tells_the_oldest_version_once(fake, client):
    fake.version = "41"
    events = await events_of(client)
    assert events[0] == FirstToken(index=0, version=41)
    assert [type(event) for event in events] == [FirstToken, Generation]


async def test_version_spans_become_numbers_and_equal_neighbours_one_span(fake, client, make_reply):
    fake.reply = lambda rid: make_reply(
        output_ids=[1, 2, 3, 4, 5], versions=[("7", 0, 1), ("7", 1, 3), ("8", 3, 5)]
    )
    generation = await last_of(client)
    assert generation.version_spans == (
        VersionSpan(version=7, start=0, end=3),
        VersionSpan(version=8, start=3, end=5),
    )


@pytest.mark.parametrize("version", ["default", "", "-1", "1.0", "0x1", "\u0661"])
async def test_a_version_that_no_trainer_published_is_refused(fake, client, make_reply, version):
    fake.reply = lambda rid: make_reply(versions=[(version, 0, 3)], says_first_token=False)
    event = await last_of(client)
    assert isinstance(event, Refused) and isinstance(event.error, EngineError)
    assert "which no trainer published" in str(event.error)


@pytest.mark.parametrize("spans", [[("1", 0, 2)], [("1", 1, 3)], [("1", 0, 1), ("2", 2, 3)]])
async def test_spans_that_leave_a_token_without_a_version_are_refused(
    fake, client, make_reply, spans
):
    fake.reply = lambda rid: make_reply(versions=spans)
    event = await last_of(client)
    assert isinstance(event, Refused) and "do not cover 3 tokens" in str(event.error)


@pytest.mark.parametrize(
    "logprobs",
    [[-0.5, None, -0.5], [-0.5, float("nan"), -0.5], [-0.5, float("-inf"), -0.5], [-0.5, 0.1, 0.0]],
)
async def test_logprobs_that_cannot_be_trained_on_are_refused_for_their_sample_alone(
    fake, client, make_reply, logprobs
):
    fake.reply = lambda rid: make_reply(logprobs=logprobs if rid == "g.0.0" else None)
    events = await events_of(client, 2)
    refused = [event for event in events if isinstance(event, Refused)]
    good = [event for event in events if isinstance(event, Generation)]
    assert [event.index for event in refused] == [0]
    assert isinstance(refused[0].error, BadLogprobs)
    assert [event.index for event in good] == [1]


async def test_missing_logprobs_are_refused(fake, client, make_reply):
    fake.reply = lambda rid: make_reply(logprobs=[-0.5])
    event = await last_of(client)
    assert isinstance(event, Refused) and isinstance(event.error, BadLogprobs)


async def test_an_aborted_sample_is_refused(fake, client, make_reply):
    fake.reply = lambda rid: make_reply(finish_type="abort")
    event = await last_of(client)
    assert isinstance(event, Refused) and "gave a sample up" in str(event.error)


async def test_an_answer_that_ends_early_is_an_error_that_names_the_engine(
    fake, client, make_reply
):
    fake.reply = lambda rid: make_reply(finish_type=None)
    with pytest.raises(EngineError, match=r"engine-0 .* before 1 of its samples"):
        await events_of(client)


async def test_a_refused_call_is_an_error_with_the_engines_words(fake, client):
    fake.status = 503
    with pytest.raises(EngineError, match=r"engine-0 refused /generate \(503\).*out of order"):
        await events_of(client)


async def test_silence_longer_than_the_limit_is_an_error_but_a_long_answer_is_not(
    fake, client, make_reply
):
    fake.reply = lambda rid: make_reply(delay_s=3.0)  # the client's limit is 2 s
    with pytest.raises(EngineError, match=r"engine-0 did not answer /generate: ReadTimeout"):
        await events_of(client)
    fake.reply = lambda rid: make_reply(delay_s=0.6 * (1 + int(rid[2])))  # 4.8 s in all
    assert sum(isinstance(e, Generation) for e in await events_of(client, 8)) == 8


async def test_nobody_listening_is_an_error_that_names_the_engine(fake):
    client = fake.client("engine-9")
    fake.stop()
    with pytest.raises(EngineError, match="engine-9 did not answer /generate"):
        await events_of(client)
    await client.close()
    fake.start()


async def test_giving_up_tells_the_engine_which_samples_to_stop(fake, client, make_reply):
    fake.reply = lambda rid: make_reply(never_ends=rid != "g.0.0")
    task = asyncio.create_task(events_of(client, 3))
    while not fake.calls:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(fake.aborted) == ["g.1.0", "g.2.0"]


async def test_prefixes_are_keyed_by_the_latest_version_seen(fake):
    client = fake.client("engine-0", keys_prefix_by_version=True)
    fake.version = "12"
    await events_of(client)
    await events_of(client)
    assert [body["extra_key"] for body in fake.bodies("/generate")] == ["v0", "v12"]
    await client.close()


async def test_a_version_that_the_run_tells_of_keys_prefixes_too(fake):
    client = fake.client("engine-0", keys_prefix_by_version=True)
    client.note_version(7)
    client.note_version(6)
    await events_of(client)
    assert [body["extra_key"] for body in fake.bodies("/generate")] == ["v7"]
    await client.close()


async def test_weight_calls_carry_what_the_server_needs_and_never_a_flush(fake, client):
    tensors = [
        TensorSpec(name="a", dtype="float32", shape=(2, 3)),
        TensorSpec(name="b", dtype="bfloat16", shape=(4,)),
    ]
    update = {"flush_cache": False, "abort_all_requests": False, "weight_version": "3"}
    await client.join_broadcast(GROUP)
    await client.pause(PauseMode.retract)
    await client.begin_update()
    await client.receive(tensors, GROUP, version=3)
    await client.end_update()
    await client.update_from_disk("/dev/shm/staged", 3, timeout_s=5)
    await client.update_from_ipc({"GPU-1": "ipc://@a"}, 3, timeout_s=5)
    await client.resume()
    assert fake.calls == [
        (
            "/init_weights_update_group",
            {
                "master_address": "127.0.0.1",
                "master_port": 29500,
                "rank_offset": 1,
                "world_size": 3,
                "group_name": "weights-0",
                "backend": "gloo",
            },
        ),
        ("/pause_generation", {"mode": "retract"}),
        ("/begin_weight_update", {}),
        (
            "/update_weights_from_distributed",
            {
                "names": ["a", "b"],
                "dtypes": ["float32", "bfloat16"],
                "shapes": [[2, 3], [4]],
                "group_name": "weights-0",
                "load_format": "flattened_bucket",
                **update,
            },
        ),
        ("/end_weight_update", {}),
        (
            "/update_weights_from_disk",
            {"model_path": "/dev/shm/staged", "load_format": "safetensors", **update},
        ),
        (
            "/update_weights_from_ipc",
            {"zmq_handles": {"GPU-1": "ipc://@a"}, "flush_cache": False, "weight_version": "3"},
        ),
        ("/continue_generation", {}),
    ]
    assert await client.served_version() == 3


async def test_what_a_server_can_do_is_asked(fake, client):
    fake.offers = set()
    assert not await client.can_update_from_disk()
    assert not await client.can_update_from_ipc()
    assert not await client.wants_update_session()
    fake.offers = {
        "/update_weights_from_disk",
        "/update_weights_from_ipc",
        "/begin_weight_update",
    }
    assert await client.can_update_from_disk()
    assert await client.can_update_from_ipc()
    assert await client.wants_update_session()


async def test_a_server_under_another_name_is_not_taken_for_ours(fake, client):
    assert await client.is_ready("fake", timeout_s=2)
    with pytest.raises(EngineError, match="another server than engine-0"):
        await client.is_ready("ours", timeout_s=2)
    fake.is_ready = False
    assert not await client.is_ready("fake", timeout_s=2)
