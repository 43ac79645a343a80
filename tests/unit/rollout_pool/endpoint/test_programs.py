"""External programs beside a real worker on a real Redis: they idle, die and ask how it ended."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from buffer.redis.connection import connect
from buffer.run_state import RunState
from configs.rollout_schema import OpenAIConfig, RolloutConfig, TaskConfig
from configs.schema import BufferConfig
from rollout_pool.endpoint.groups import ExternalGroup
from rollout_pool.endpoint.sessions import NUM_REMEMBERED
from rollout_pool.episodes.environment import SingleTurn
from rollout_pool.episodes.runner import EpisodeRunner
from rollout_pool.rewards.types import Score
from rollout_pool.tasks.env_episodes import EnvEpisodes
from rollout_pool.tasks.source import GroupEnd
from rollout_pool.tasks.task import Prompt, TaskStream
from rollout_pool.worker.counters import Counters
from rollout_pool.worker.loop import RolloutWorker
from rollout_pool.worker.prompt_filter import PromptFilter
from tests.support.endpoint_scene import ADMIN_KEY, eventually
from tests.support.rollout import FakeCompleter, plain_chat, rollout_spec, until, until_read

GROUPS_PER_STEP = 2
DISCONNECT_S = 60.0
"""Far less than any of the timeouts that would find a dead program too."""
PROGRAM = """
import http.client, json, sys, threading, time
host, port, admin_key = sys.argv[1:]
held = http.client.HTTPConnection(host, int(port))
asked = json.dumps({"stream": True})
held.request("POST", "/groups", asked, {"Authorization": "Bearer " + admin_key})
event = held.getresponse().readline().decode()
print(event.removeprefix("data: "), end="", flush=True)
session = json.loads(event.removeprefix("data: "))["sessions"][0]
asking = http.client.HTTPConnection(host, int(port))
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hello"}]})
headers = {"Authorization": "Bearer " + session["api_key"]}
asking.request("POST", "/v1/chat/completions", body, headers)
asking.getresponse()  # does not come
"""


class Numbers:
    name = "numbers"

    def example(self, index):
        return Prompt(index=index, is_held_out=False, text=str(index))

    def eval_prompts(self):
        return []

    def is_held_out(self, prompt):
        return False

    def environment(self, prompt):
        return SingleTurn(prompt.text)


class RewardOfTheProgram:
    async def score(self, prompt, episode):
        return Score(reward=episode.env_reward or 0.0, failures={})

    async def score_group(self, prompt, episodes, scores):
        return scores


@pytest.fixture
async def state(redis_url, run_name):
    state = RunState(await connect(redis_url), run_name)
    yield state
    await state.close()


@pytest.fixture
async def make_run(make_scene, state, redis_url, run_name, buffer_factory, tmp_path):
    """A worker and its endpoint; the worker starts with `start`, and its own groups end only once
    `go` is set."""
    running = []

    async def make(
        max_staleness=0, filter_zero_variance=False, keep_alive_s=15.0, room=None, **limits
    ):
        config = RolloutConfig(
            group_size=2,
            filter_zero_variance=filter_zero_variance,
            max_prompt_tokens=2000,
            max_response_tokens=2000,
            openai=OpenAIConfig(**limits),
        )
        counters = Counters(state)
        buffer = await buffer_factory(GROUPS_PER_STEP, max_staleness=max_staleness)
        scene = await make_scene(
            rollout=config,
            count=counters.add,
            keep_alive_s=keep_alive_s,
            group_state=buffer.group_state,
        )
        scene.buffer = CountingBuffer(buffer)
        scene.author.version = 0
        await state.record_commits({"engine-0": 0})
        own = FakeCompleter(lambda sample: "own")
        scene.go = asyncio.Event()
        own.hold = lambda sample: scene.go
        task, task_config, chat = Numbers(), TaskConfig(), plain_chat()
        worker = RolloutWorker(
            index=0,
            spec=rollout_spec(
                config=config,
                task=task_config,
                buffer=BufferConfig(),
                redis_url=redis_url,
                run=run_name,
                run_dir=str(tmp_path),
            ),
            task=task,
            stream=TaskStream(task, 0, 1, 0),
            prompt_filter=PromptFilter(chat, task_config, config),
            scorer=RewardOfTheProgram(),
            episode_source=EnvEpisodes(
                EpisodeRunner(own, chat, task_config, config), task.environment
            ),
            external_groups=scene.endpoint.groups,
            evaluator=None,
            buffer=scene.buffer,
            state=state,
            services=[asyncio.get_running_loop().create_future()],
            completer=scene.author,
            wait_room=room or (lambda num_samples: asyncio.sleep(0, 1)),
            counters=counters,
        )

        def start():
            running.append((worker, asyncio.create_task(worker.run())))

        async def stop():
            worker.stop()
            return await running[-1][1]

        scene.worker, scene.start, scene.stop = worker, start, stop
        return scene

    yield make
    for worker, task in running:
        worker.stop()
        await asyncio.wait([task], timeout=60)


class CountingBuffer:
    """The run's buffer; counts the worker's looks at its state."""

    def __init__(self, wrapped):
        self.wrapped = wrapped
        self.num_looks = 0

    def __getattr__(self, name):
        self.num_looks += name == "stats"
        return getattr(self.wrapped, name)


async def waiting(scene, number):
    await eventually(lambda: len(scene.endpoint.groups._waiting) == number)


async def request_group(scene, num_before):
    """A request that waits behind `num_before` others."""
    asking = asyncio.create_task(scene.http(ADMIN_KEY).post("/groups", json={}))
    await waiting(scene, num_before + 1)
    return asking


async def play(scene, group):
    for reward, member in enumerate(group["sessions"]):
        await scene.say_hello(member)
        report = (await scene.post_reward(member, reward=reward)).json()["group"]
        assert report["group_id"] == group["group_id"] and report["num_rewarded"] == reward + 1
        assert report["state"] == ("open" if reward == 0 else "scoring")


async def status(scene, group):
    answer = await scene.http(ADMIN_KEY).get(f"/groups/{group['group_id']}")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def ended(scene, group, state):
    return await until_read(lambda: status(scene, group), lambda report: report["state"] == state)


async def consume(buffer, step):
    lease = await buffer.lease(
        step=step, version=0, num_groups=2, share=0, num_shares=1, timeout_s=60
    )
    assert await buffer.consume(lease, lease.group_ids) == 2
    return lease


async def test_idle_program_yields_to_a_busy_one_and_a_waiting_request_is_not_idle(make_run, state):
    scene = await make_run(idle_timeout_s=3.0)
    gate = asyncio.Event()
    scene.author.gates = {0: gate}
    idle, slow, busy = [await request_group(scene, place) for place in range(3)]
    scene.start()
    idle, slow = (await idle).json(), (await slow).json()
    saying = [asyncio.create_task(scene.say_hello(member)) for member in slow["sessions"]]
    busy = (await busy).json()  # once the idle one has made way: there are two credits
    saying += [asyncio.create_task(scene.say_hello(member)) for member in busy["sessions"]]
    report = await ended(scene, idle, "idle")
    assert "rollout.openai.idle_timeout_s" in report["reason"] and report["num_rewarded"] == 0
    late = await scene.post_reward(idle["sessions"][0], reward=1)
    assert late.status_code == 410 and "groups needed its credit" in late.text
    assert busy["prompt"]["index"] == idle["prompt"]["index"]  # the prompt runs again
    assert (await status(scene, slow))["state"] == "open"  # its requests are in progress
    gate.set()
    await asyncio.gather(*saying)
    for group in (slow, busy):
        for reward, member in enumerate(group["sessions"]):
            await scene.post_reward(member, reward=reward)
    lease = await consume(scene.buffer, 0)
    assert {group.group_id for group in lease.groups} == {busy["group_id"], slow["group_id"]}
    assert {group.prompt.index for group in lease.groups} == {0, 1}
    fates = [(await status(scene, group))["in_buffer"] for group in (idle, slow, busy)]
    assert fates == [None, "consumed", "consumed"]
    stats = await scene.buffer.stats()
    assert stats.abandoned_by_reason == {"idle": 1} and stats.is_conserved
    await scene.stop()
    counters = await state.counters()
    assert (counters["external_ended:idle"], counters["external_ended:pushed"]) == (1, 2)


async def test_idle_group_stays_while_its_worker_waits_for_room_and_not_for_a_credit(make_run):
    asked, room = [], asyncio.Event()

    async def wait_room(num_samples):
        asked.append(num_samples)
        if len(asked) > 2:  # there are two credits
            await room.wait()
        return 1

    scene = await make_run(idle_timeout_s=1.0, room=wait_room)
    asking = await request_group(scene, 0)
    scene.start()
    group = (await asking).json()
    (run,) = [run for run in scene.worker._runs.values() if run.group_id == group["group_id"]]
    # It would be given up at the second look after the limit.
    await until(lambda: len(asked) == 3 and run.samples.activity.idle_s > 4.0)
    assert (await status(scene, group))["state"] == "open"
    room.set()
    await ended(scene, group, "idle")


async def test_idle_group_stays_while_a_batch_is_ready(make_run):
    scene = await make_run(max_staleness=1, idle_timeout_s=3.0)
    asked = await request_group(scene, 0)
    scene.go.set()
    scene.start()
    group = (await asked).json()
    await until(lambda: is_ready(scene.buffer, 3))  # with the idle one all four credits
    scene.go.clear()
    looks = scene.buffer.num_looks
    await until(lambda: scene.buffer.num_looks >= looks + 2)
    assert (await status(scene, group))["state"] == "open"
    await consume(scene.buffer, 0)
    await ended(scene, group, "idle")  # nothing is left for the next step


async def is_ready(buffer, number):
    return (await buffer.wrapped.stats()).ready == number


async def test_dead_program_loses_its_sessions_at_once_and_its_prompt_is_rerun(make_run, tmp_path):
    scene = await make_run()
    gate = asyncio.Event()
    scene.author.gates = {0: gate}
    (tmp_path / "program.py").write_text(PROGRAM)
    host, _, port = scene.endpoint.url.removeprefix("http://").rpartition(":")
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, str(tmp_path / "program.py"), host, port, ADMIN_KEY),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        await waiting(scene, 1)
        second, third = [await request_group(scene, place) for place in (1, 2)]
        scene.start()
        async with asyncio.timeout(60):
            group = json.loads(await program.stdout.readline())
            second = (await second).json()
        await eventually(lambda: len(scene.author.samples) == 1)
        assert len(scene.sessions) == 4 and not third.done()
    finally:
        program.kill()
        await program.wait()
    async with asyncio.timeout(DISCONNECT_S):
        third = (await third).json()  # has the credit and the prompt of the dead one
    assert third["prompt"]["index"] == group["prompt"]["index"] == 0
    assert len(scene.author.cancelled) == 1
    report = await status(scene, group)
    assert report["state"] == "given_up" and "the program that requested" in report["reason"]
    for member in group["sessions"]:
        late = await scene.post_reward(member, reward=1)
        assert late.status_code == 410 and "requested the group left" in late.text
    gate.set()
    for one in (second, third):
        await play(scene, one)
    lease = await consume(scene.buffer, 0)
    assert {one.prompt.index for one in lease.groups} == {0, 1}
    stats = await scene.buffer.stats()
    assert stats.abandoned_by_reason == {"outside": 1} and stats.is_conserved
    assert stats.prompts_quarantined == 0


async def test_stream_of_a_group_says_how_it_ended(make_run):
    scene = await make_run(keep_alive_s=0.05)

    async def run_it():
        stream = scene.http(ADMIN_KEY).stream("POST", "/groups", json={"stream": True})
        async with stream as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = answer.aiter_lines()
            group = json.loads((await anext(lines)).removeprefix("data: "))
            await until(lambda: is_comment(lines))
            await play(scene, group)
            [report] = [line async for line in lines if line.startswith("data: ")]
            return group, json.loads(report.removeprefix("data: "))

    running = asyncio.create_task(run_it())
    await waiting(scene, 1)
    scene.start()
    group, report = await running
    counts = {"num_sessions": 2, "num_rewarded": 2}
    assert report == {"group_id": group["group_id"], "state": "pushed", "reason": None, **counts}
    assert await status(scene, group) == {**report, "in_buffer": "ready"}


async def is_comment(lines):
    return (await anext(lines)).startswith(": ")


async def test_filtered_and_stopped_groups_say_why(make_run):
    scene = await make_run(filter_zero_variance=True)
    filtered, stopped = [await request_group(scene, place) for place in range(2)]
    scene.start()
    filtered, stopped = (await filtered).json(), (await stopped).json()
    for member in filtered["sessions"]:
        await scene.say_hello(member)
        await scene.post_reward(member, reward=1)
    report = await ended(scene, filtered, "filtered")
    assert "rewards are all equal" in report["reason"]
    await scene.stop()
    report = await status(scene, stopped)
    assert (report["state"], report["reason"]) == ("stopped", "the run is ending")
    assert (await scene.http().get("/groups/strange")).status_code == 401
    assert (await scene.http(stopped["sessions"][0]["api_key"]).get("/groups/a")).status_code == 401
    assert (await scene.http(ADMIN_KEY).get("/groups/strange")).status_code == 404


async def test_only_the_last_groups_that_ended_are_remembered(make_scene):
    scene = await make_scene()
    groups = scene.endpoint.groups
    for number in range(NUM_REMEMBERED + 10):
        group = ExternalGroup(scene.sessions, groups)
        group.group_id = f"group-{number}"
        groups.note_start(group)
        if number != 3:
            group.ended(GroupEnd.pushed, None)
    assert groups.find("group-3") is not None  # is in progress
    assert groups.find("group-10") is None and groups.find("group-11") is not None
    assert len(groups._known) == NUM_REMEMBERED
