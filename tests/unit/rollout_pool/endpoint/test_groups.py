"""External programs request groups, run their episodes, and post the rewards."""

from __future__ import annotations

import asyncio
import json
import stat

import pytest
from openai import APIStatusError

from configs.rollout_schema import OpenAIConfig, RolloutConfig, TaskConfig
from rollout_pool.endpoint.groups import MAX_WAITING
from rollout_pool.endpoint.sessions import SessionLost
from rollout_pool.episodes.episode import EpisodeRequest
from rollout_pool.tasks.task import Prompt
from tests.support.endpoint_scene import ADMIN_KEY, MODEL, check_branch, eventually

PROMPT = Prompt(index=3, is_held_out=False, text="hello")


async def next_group(scene):
    """As a worker with a credit takes it."""
    taken = []
    await eventually(lambda: taken.append(scene.endpoint.groups.take()) or taken[-1] is not None)
    return taken[-1]


async def serve(scene, group_id="0-1-abc", size=2):
    """Runs the next group's episodes, as a worker does."""
    taken = await next_group(scene)
    requests = [
        EpisodeRequest(session=f"{group_id}.{place}", sampling=scene.sampling, group_size=size)
        for place in range(size)
    ]
    return await asyncio.gather(
        *(taken.run(PROMPT, request) for request in requests), return_exceptions=True
    )


async def open_group(scene, **body):
    serving = asyncio.create_task(serve(scene))
    answer = await scene.http(ADMIN_KEY).post("/groups", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json(), serving


async def test_external_group_is_complete_when_all_rewards_are_posted(scene):
    group, serving = await open_group(scene)
    assert group["group_id"] == "0-1-abc"
    assert group["prompt"]["text"] == "hello" and group["prompt"]["index"] == 3
    assert group["prompt"]["messages"] == [{"role": "user", "content": "hello"}]
    first, second = group["sessions"]
    assert first["api_key"] != second["api_key"] and first["model"] == MODEL
    for member in (first, second):
        await scene.say_hello(member)
    assert (await scene.post_reward(first, reward=1, parts={"style": 0.5})).status_code == 200
    await eventually(lambda: len(scene.sessions) == 1)
    assert not serving.done()
    assert (await scene.post_reward(second, ADMIN_KEY, reward=0.25)).status_code == 200
    one, two = await serving
    assert (one.end, one.env_reward, one.env_parts) == ("done", 1.0, {"style": 0.5})
    assert (two.env_reward, two.num_turns) == (0.25, 1)
    check_branch(two.branches[0], [scene.author.ended[1][1]])


async def test_program_posts_rewards_by_role(scene):
    group, serving = await open_group(scene)
    credits = ({"rewards": {"a": 1, "b": None}}, {"advantages": {"a": -1}})
    for member, credit in zip(group["sessions"], credits, strict=True):
        for role in next(iter(credit.values())):
            await scene.say_hello({**member, "api_key": f"{member['api_key']}.{role}"})
        wrong = {what: {**by_role, "c": 1} for what, by_role in credit.items()}
        refused = await scene.post_reward(member, **wrong)
        said = refused.json()["error"]
        assert (refused.status_code, said["param"]) == (400, next(iter(credit)))
        assert "the roles that answered are ['a'" in said["message"]
        many = await scene.post_reward(member, rewards={f"r{i}": 0 for i in range(101)})
        assert many.status_code == 400 and "at most 100 parts" in many.text
        assert (await scene.post_reward(member, **credit)).status_code == 200
    one, two = await serving
    assert one.rewards == {"a": 1.0, "b": None} and two.advantages == {"a": -1.0}
    assert [branch.role for branch in one.branches] == ["a", "b"]


async def test_external_group_has_the_size_with_which_its_worker_begins_it(scene):
    serving = asyncio.create_task(serve(scene, size=3))  # it was 2 at the launch
    group = (await scene.http(ADMIN_KEY).post("/groups", json={})).json()
    assert len(group["sessions"]) == 3
    for member in group["sessions"]:
        await scene.say_hello(member)
        await scene.post_reward(member, reward=1)
    assert [one.env_reward for one in await serving] == [1.0] * 3


async def test_reward_may_be_posted_again_but_not_changed(scene):
    group, serving = await open_group(scene)
    first, second = group["sessions"]
    await scene.say_hello(first)
    for key in (None, None, ADMIN_KEY):
        assert (await scene.post_reward(first, key, reward=1)).status_code == 200
        await eventually(lambda: len(scene.sessions) == 1)
    for key in (None, ADMIN_KEY):
        changed = await scene.post_reward(first, key, reward=0)
        assert changed.status_code == 410 and "posted" in changed.json()["error"]["message"]
    unasked = await scene.post_reward(second, reward=1)
    assert unasked.status_code == 409 and "gave no token" in unasked.json()["error"]["message"]
    strange = await scene.post_reward({"id": "nobody"}, ADMIN_KEY, reward=1)
    assert strange.status_code == 404
    for outcome in ({}, {"reward": "1"}, {"reward": 1, "parts": [1]}, {"reward": 1, "more": 2}):
        assert (await scene.post_reward(second, **outcome)).status_code == 400, outcome
    await scene.endpoint.close()
    serving.cancel()
    await asyncio.wait([serving])


async def test_idle_session_is_given_up(make_scene):
    scene = await make_scene(
        rollout=RolloutConfig(group_size=2, openai=OpenAIConfig(session_timeout_s=5.0))
    )
    gate = asyncio.Event()
    scene.author.gates = {2: gate}
    group, serving = await open_group(scene)
    asked = asyncio.create_task(scene.say_hello(group["sessions"][0]))
    await eventually(lambda: len(scene.sessions) == 1)  # the other one; this one is not idle
    assert not serving.done() and not asked.done()
    gate.set()
    await asked
    for lost in await serving:
        assert isinstance(lost, SessionLost) and "session_timeout_s" in str(lost)
    for member in group["sessions"]:  # the one that ended it, and the other
        gone = await scene.post_reward(member, reward=1)
        message = gone.json()["error"]["message"]
        assert gone.status_code == 410 and "given up: no request came in session" in message


async def test_active_session_still_ends_at_its_timeout(make_scene):
    scene = await make_scene(
        task=TaskConfig(chat_template=True, turn_timeout_s=2.5, episode_timeout_s=3.0)
    )
    group, serving = await open_group(scene)

    async def keep_asking():
        while True:
            await scene.say_hello(group["sessions"][0])

    asking = asyncio.create_task(keep_asking())
    async with asyncio.timeout(60):
        for lost in await serving:
            assert isinstance(lost, SessionLost) and "task.episode_timeout_s" in str(lost)
    with pytest.raises(APIStatusError) as over:
        await asking
    assert over.value.status_code == 410


async def test_requests_in_progress_get_the_reason_when_their_group_is_given_up(scene):
    gate = asyncio.Event()
    scene.author.gates = {2: gate}
    asking = asyncio.create_task(scene.http(ADMIN_KEY).post("/groups", json={}))
    taken = await next_group(scene)
    requests = [EpisodeRequest(session=f"0-1-abc.{n}", sampling=scene.sampling) for n in range(2)]
    members = [asyncio.create_task(taken.run(PROMPT, request)) for request in requests]
    group = (await asking).json()
    saying = [asyncio.create_task(scene.say_hello(one)) for one in group["sessions"]]
    await eventually(lambda: len(scene.author.samples) == 2)
    taken.give_up("its oldest token is too old")
    taken.give_up("a later reason")
    for member in members:
        member.cancel()
    await asyncio.wait(members)
    for said in await asyncio.gather(*saying, return_exceptions=True):
        assert isinstance(said, APIStatusError) and said.status_code == 410
        assert "given up: its oldest token is too old" in said.message
    late = await scene.post_reward(group["sessions"][0], reward=1)
    assert late.status_code == 410 and "token is too old" in late.json()["error"]["message"]


async def test_answer_that_ends_as_its_session_does_is_410(scene):
    gate = asyncio.Event()
    scene.author.gates = {0: gate}  # no token is written before the callback is attached
    group, serving = await open_group(scene)
    [session, _] = scene.sessions._open.values()
    asked = asyncio.create_task(scene.say_hello(group["sessions"][0]))
    await eventually(lambda: session._completions)
    [answer] = session._completions
    # Runs in the same turn of the event loop as the end, before the request handler goes on.
    answer.task.add_done_callback(lambda _: answer.drop())
    gate.set()
    with pytest.raises(APIStatusError) as refused:
        await asked
    assert refused.value.status_code == 410 and session.num_turns == 0
    serving.cancel()
    await asyncio.wait([serving])


async def test_waiting_group_request_gets_the_reason_when_refused(scene):
    answer = await scene.http(ADMIN_KEY).post("/groups", json={"timeout_s": 0.1})
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_credit"
    asking = asyncio.create_task(scene.http(ADMIN_KEY).post("/groups", json={}))
    taken = await next_group(scene)  # not the one that was withdrawn
    taken.give_up("the prompts are used up")
    answer = await asking
    assert answer.status_code == 503 and "used up" in answer.json()["error"]["message"]


async def test_waiting_group_requests_are_limited_without_those_that_left(scene):
    groups = scene.endpoint.groups
    requested = [groups.request() for _ in range(MAX_WAITING)]
    refused = await scene.http(ADMIN_KEY).post("/groups", json={})
    assert refused.status_code == 429 and refused.headers["x-should-retry"] == "true"
    assert refused.headers["retry-after"] == "10"
    requested[0].withdraw()
    late = groups.request()
    assert groups.take() is requested[1]
    for one in requested:
        one.withdraw()
    assert groups.take() is late and groups.take() is None


async def test_group_request_is_refused_at_once_where_an_agent_runs_all_groups(scene):
    scene.endpoint.groups.none_because = "task.agent='a.py:b': its agent runs all groups"
    answer = await scene.http(ADMIN_KEY).post("/groups", json={})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (409, "no_groups")
    assert error["message"].startswith("task.agent='a.py:b': its agent")


async def test_waiting_group_requests_are_refused_at_the_end_of_the_run(scene):
    asking = asyncio.create_task(scene.http(ADMIN_KEY).post("/groups", json={}))
    await eventually(lambda: scene.endpoint.groups._waiting)
    scene.endpoint.groups.close()
    late = await scene.http(ADMIN_KEY).post("/groups", json={})
    for answer in (await asking, late):
        assert answer.status_code == 503 and "ending" in answer.json()["error"]["message"]


async def test_group_has_the_system_prompt_and_address_file_is_private(make_scene, tmp_path):
    scene = await make_scene(task=TaskConfig(chat_template=True, system_prompt="Be brief."))
    group, serving = await open_group(scene)
    assert group["prompt"]["messages"][0] == {"role": "system", "content": "Be brief."}
    path = tmp_path / "endpoints" / "0.json"
    scene.endpoint.write_address(path)
    scene.endpoint.write_address(path)
    assert json.loads(path.read_text()) == {"url": scene.endpoint.url, "admin_key": ADMIN_KEY}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in path.parent.iterdir()] == ["0.json"]
    serving.cancel()
    await asyncio.wait([serving])


async def test_taken_address_is_reported_with_its_setting(scene, make_scene):
    port = int(scene.endpoint.url.rpartition(":")[2])
    other = await make_scene()
    other.endpoint._port = port
    with pytest.raises(ValueError, match=rf"rollout\.openai\.port={port}"):
        await other.endpoint.start()


async def test_server_that_ends_by_itself_is_an_error_of_the_worker(make_scene, monkeypatch):
    async def serve(server, sockets):
        sockets[0].close()

    monkeypatch.setattr("rollout_pool.endpoint.app._Server.serve", serve)
    other = await make_scene()
    await other.endpoint.start()
    with pytest.raises(RuntimeError, match=f"the endpoint at {other.endpoint.url} has ended"):
        await other.endpoint.serving
