"""Limits on sessions and groups: what is refused, how, and that it is counted."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import pytest
from openai import APIStatusError, BadRequestError, RateLimitError

from configs.rollout_schema import OpenAIConfig, RolloutConfig
from rollout_pool.endpoint.agents import AgentRunner
from rollout_pool.tasks.task import Prompt
from tests.support.endpoint_scene import ADMIN_KEY, HELLO, eventually


@pytest.fixture
async def limited(make_scene):
    """A scene with these limits, which counts what they refuse in `refused`."""

    async def make(**limits):
        rollout = RolloutConfig(group_size=2, openai=OpenAIConfig(**limits))
        refused = Counter()
        scene = await make_scene(rollout=rollout, count=lambda name: refused.update([name]))
        scene.refused = refused
        return scene

    return make


def ask(client):
    return client.chat.completions.create(model="policy", messages=HELLO)


async def test_request_beyond_those_in_progress_gets_429_until_one_ends(limited):
    scene = await limited(max_requests=2)
    gate = asyncio.Event()
    scene.author.gates = {0: gate}
    session, other = scene.session(), scene.session()
    client = scene.client(session)
    running = [asyncio.create_task(ask(client)) for _ in range(2)]
    await eventually(lambda: len(scene.author.samples) == 2)
    with pytest.raises(RateLimitError) as refused:
        await ask(client)
    headers = refused.value.response.headers
    assert (headers["retry-after"], headers["x-should-retry"]) == ("1", "true")
    error = refused.value.response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "rollout.openai.max_requests=2" in error["message"]
    assert scene.refused == {"requests_refused:in_progress": 1}
    running.append(asyncio.create_task(ask(scene.client(other))))  # has its own limit
    await eventually(lambda: len(scene.author.samples) == 3)
    # The official client waits as it is told to, and then succeeds.
    patient = asyncio.create_task(ask(scene.client(session, max_retries=3)))
    await eventually(lambda: scene.refused["requests_refused:in_progress"] == 2)
    gate.set()
    await asyncio.gather(*running)
    assert (await patient).choices[0].message.content == "hello"
    assert session.num_turns == 3


@pytest.mark.parametrize(
    ("limits", "num_answers", "what"),
    [
        ({"max_answers": 3}, 3, "answers"),
        ({"max_session_tokens": 7}, 2, "tokens"),  # an answer has 6
    ],
)
async def test_agent_that_calls_the_model_for_ever_is_ended(limited, limits, num_answers, what):
    scene = await limited(**limits)
    errors = []

    async def agent(session, prompt):
        client = session.client()
        try:
            for _ in itertools.count():
                await ask(client)
        except BadRequestError as error:
            errors.append(error)
            raise

    runner = AgentRunner(agent, scene.sessions, scene.endpoint.url)
    prompt = Prompt(index=0, is_held_out=False, text="hello")
    episode = await runner.run(prompt, scene.ask())
    assert (episode.end, episode.num_turns) == ("length", num_answers)
    [error] = errors
    assert error.code == "session_limit_reached"
    assert error.response.headers["x-should-retry"] == "false"
    assert f"rollout.openai.{next(iter(limits))}" in error.message
    assert scene.refused == {f"requests_refused:{what}": 1}


async def test_limit_of_tokens_counts_answers_that_are_too_old_for_a_retry(limited, monkeypatch):
    monkeypatch.setattr("rollout_pool.endpoint.sessions.RETRY_WINDOW_S", 0.0)
    scene = await limited(max_session_tokens=7)
    session = scene.session()
    client = scene.client(session)
    await ask(client)
    await eventually(lambda: session._completions[0].ended_at is not None)
    assert session.again(b"another request") is None and not session._completions
    await ask(client)
    with pytest.raises(APIStatusError, match="12 tokens"):
        await ask(client)


async def test_groups_in_progress_are_limited_and_others_wait(limited):
    scene = await limited(max_groups=1)
    groups = scene.endpoint.groups
    first, second = groups.request(), groups.request()
    assert groups.take() is first
    assert groups.take() is None  # the worker's own groups go on
    late = await scene.http(ADMIN_KEY).post("/groups", json={"timeout_s": 0.05})
    assert late.status_code == 503 and "rollout.openai.max_groups=1" in late.text
    groups.end_all("the test is over")
    assert groups.take() is second
