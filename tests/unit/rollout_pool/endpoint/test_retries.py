"""Disconnects and retries: each answer is sampled once."""

from __future__ import annotations

import asyncio

import openai
import pytest

from rollout_pool.episodes.episode import EpisodeFailed
from rollout_pool.sampling.sample import SampleFailed
from tests.support.endpoint_scene import chat, check_session, eventually, said_in

USER = {"role": "user", "content": "hello"}
AGAIN = {"x-stainless-retry-count": "1"}


def asks(client, **more):
    return asyncio.create_task(chat(client, [USER], **more))


async def test_retry_joins_the_answer_in_progress(make_scene):
    scene = await make_scene(grace_s=60.0)
    gate = asyncio.Event()
    scene.author.gates = {2: gate}
    session = scene.session()
    asked = asks(scene.client(session, timeout=2.0, max_retries=5))
    asyncio.get_running_loop().call_later(3.0, gate.set)
    assert (await asked).choices[0].message.content == "hello"
    assert len(scene.author.samples) == 1 and session.num_turns == 1
    check_session(session, [scene.author.ended[0][1]])


async def test_retried_stream_is_sent_from_its_beginning(make_scene):
    scene = await make_scene(grace_s=60.0)
    scene.author.says, scene.author.piece, scene.author.gates = iter(["hello"]), 1, {}
    scene.author.gates = {3: (gate := asyncio.Event())}
    session = scene.session()
    client = scene.client(session)
    lost = await asks(client, stream=True)
    async for chunk in lost:
        if chunk.choices[0].delta.content:
            break
    await lost.close()
    again = await asks(client, stream=True, extra_headers=AGAIN)
    gate.set()
    text, _, reason, _ = await said_in(again)
    assert (text, reason) == ("hello", "stop")
    late = await said_in(await asks(client, stream=True, extra_headers=AGAIN))
    assert late[0] == "hello"
    assert len(scene.author.samples) == 1 and session.num_turns == 1


async def test_identical_request_that_is_no_retry_is_sampled_again(scene):
    scene.author.says = iter(["one", "two", "three"])
    session = scene.session()
    client = scene.client(session)
    texts = [(await asks(client)).choices[0].message.content for _ in range(2)]
    assert texts == ["one", "two"]
    other = await chat(client, [USER, USER], extra_headers=AGAIN)
    assert other.choices[0].message.content == "three"


async def test_retry_of_two_like_requests_gets_the_one_that_was_missed(make_scene):
    scene = await make_scene(grace_s=60.0)
    gate = asyncio.Event()
    scene.author.says, scene.author.gates = iter(["one", "two"]), {1: gate}
    session = scene.session()
    client = scene.client(session)
    missed, kept = asks(client), None
    await eventually(lambda: len(scene.author.samples) == 1)
    kept = asks(client)
    await eventually(lambda: len(scene.author.samples) == 2)
    missed.cancel()
    await asyncio.wait([missed])
    await eventually(lambda: [a.num_readers for a in session._completions] == [0, 1])
    again = asks(client, extra_headers=AGAIN)
    await eventually(lambda: [a.num_readers for a in session._completions] == [1, 1])
    gate.set()
    texts = [(await task).choices[0].message.content for task in (again, kept)]
    assert texts == ["one", "two"] and session.num_turns == 2


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_answer_without_a_retry_is_cancelled_and_is_no_turn(scene, is_streamed):
    gate = asyncio.Event()
    scene.author.gates = {3: gate}
    session = scene.session()
    client = scene.client(session)
    asked = asks(client, stream=is_streamed)
    if is_streamed:
        stream = await asked
        await stream.close()
    else:
        await eventually(lambda: scene.author.samples and scene.author.samples[0].output_ids)
        asked.cancel()
        await asyncio.wait([asked])
    [sample] = scene.author.samples
    await eventually(lambda: sample.finish_reason == "dropped")
    assert scene.author.cancelled == [sample]
    assert sample.num_wasted == 3 and sample.output_ids == [] and sample.oldest_version is None
    with pytest.raises(EpisodeFailed, match="got no token"):
        session.episode(end="done", outcome=None)
    gate.set()
    await asks(client)
    assert session.episode(end="done", outcome=None).num_turns == 1


async def test_answer_that_ended_without_its_client_waits_for_a_retry(make_scene):
    scene = await make_scene(grace_s=60.0)
    gate = asyncio.Event()
    scene.author.gates = {3: gate}
    session = scene.session()
    client = scene.client(session)
    asked = asks(client)
    await eventually(lambda: scene.author.samples)
    asked.cancel()
    await asyncio.wait([asked])
    await eventually(lambda: session._completions[0].num_readers == 0)
    gate.set()
    await eventually(lambda: scene.author.ended)
    assert session.num_turns == 0  # no client has seen it yet
    answer = await asks(client, extra_headers=AGAIN)
    assert answer.choices[0].message.content == "hello"
    assert session.num_turns == 1 and len(scene.author.samples) == 1


async def test_failed_answer_is_reported_once_and_sampled_again_by_the_next_request(scene):
    scene.author.says = iter([SampleFailed("three engines died"), "hello", TimeoutError("none")])
    session = scene.session()
    client = scene.client(session, max_retries=5)
    with pytest.raises(openai.InternalServerError, match="three engines died"):
        await asks(client)
    assert len(scene.author.samples) == 1  # the response said should_retry=False
    assert (await asks(client, extra_headers=AGAIN)).choices[0].message.content == "hello"
    with pytest.raises(openai.APIError, match="no engine gave a completion"):
        await said_in(await asks(client, stream=True))


async def test_closed_session_ends_its_requests_and_refuses_others(scene):
    gate = asyncio.Event()
    scene.author.gates = {3: gate}
    session = scene.session()
    client = scene.client(session)
    asked, streamed = asks(client), asks(client, stream=True)
    await eventually(lambda: len(scene.author.samples) == 2)
    stream = await streamed
    await scene.sessions.close(session, "the group is too old")
    with pytest.raises(openai.APIStatusError, match="given up") as refused:
        await asked
    assert refused.value.status_code == 410
    with pytest.raises(openai.APIError, match="given up"):
        await said_in(stream)
    with pytest.raises(openai.APIStatusError, match="is over: the group is too old"):
        await asks(client)
    assert len(scene.author.cancelled) == 2
