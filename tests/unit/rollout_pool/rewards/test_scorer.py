"""The sum of a reward's parts, and scoring processes that are spread over several hosts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace

import psutil
import pytest
import ray

from configs.choices import RewardKind, RewardScope, TaskKind
from configs.rollout_schema import RewardConfig, TaskConfig
from rollout_pool.episodes.conversation import Message, ToolCall
from rollout_pool.episodes.episode import Episode
from rollout_pool.rewards.reward import Reward, class_of, needs_processes
from rollout_pool.rewards.scorer import EpisodeScorer, WaitMeter
from rollout_pool.rewards.scorer_actors import (
    MAX_BATCH,
    RayScorer,
    RemoteScoring,
    Results,
    ScorerActor,
)
from rollout_pool.rewards.types import PartRequest, PartScore, Setup, decode, encode, encode_request
from rollout_pool.tasks.task import Prompt
from tests.support.rollout import ended_episode, unmasked_branch, until

PROMPT = Prompt(index=3, is_held_out=False, text="?")
TASK = RewardConfig()
ENV = RewardConfig(kind=RewardKind.env)


def episode(answer: str = "7", **fields) -> Episode:
    return ended_episode("?", answer, **fields)


class Solver:
    """A task that only knows solutions."""

    name = "solver"

    def solution(self, prompt: Prompt) -> str:
        raise RuntimeError("none here")


class Pool:
    """Results by the name of the part."""

    def __init__(self, **values: float | str | None) -> None:
        self.values = values
        self.requests = []
        self.num_open = self.most_open = 0

    async def score(self, request: bytes) -> PartScore:
        asked = decode(request.decode(), PartRequest)
        self.requests.append(asked)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await asyncio.sleep(0.01)
        self.num_open -= 1
        value = self.values[asked.part]
        if isinstance(value, str):
            return PartScore(value=0.0, failure=value, waited_s=0.5)
        if isinstance(value, tuple):
            return PartScore(of_group=value, waited_s=0.5)
        if value is None:
            return PartScore(is_left_open=True, waited_s=0.5)
        return PartScore(value=value, waited_s=0.5)


@pytest.fixture
async def scorer_of():
    made = []

    def make(pool: Pool | None = None, **rewards: RewardConfig) -> EpisodeScorer:
        config = TaskConfig(rewards=rewards)
        made.append(EpisodeScorer(config, task=Solver(), pool=pool or Pool()))
        return made[-1]

    yield make
    for one in made:
        await one.close()


# Parts and their sum -----------------------------------------------------------------------------


async def test_default_reward_is_the_environments_or_else_the_tasks(scorer_of):
    scorer = scorer_of(Pool(task=0.25))
    score = await scorer.score(PROMPT, episode())
    assert (score.reward, dict(score.parts), dict(score.failures)) == (0.25, {"task": 0.25}, {})
    score = await scorer.score(PROMPT, episode(env_reward=2.0, env_parts={"moves": 4.0}))
    assert (score.reward, dict(score.parts)) == (2.0, {"moves": 4.0, "env": 2.0})


def of_roles(end: str, **fields) -> Episode:
    own = replace(unmasked_branch([1, 2]), role="a")
    return replace(episode(), branches=[own], end=end, **fields)


async def test_missing_rewards_of_roles_are_zero_in_an_episode_that_was_broken_off(scorer_of):
    by_default, by_env = scorer_of(Pool(task=0.25)), scorer_of(env=ENV)
    for scorer in (by_default, by_env):
        score = await scorer.score(PROMPT, of_roles("episode_timeout"))
        assert (dict(score.parts), score.failures) == ({"env": 0.0}, {})
        # b had not come to answer.
        score = await scorer.score(PROMPT, of_roles("length", rewards={"a": 1.0, "b": -1.0}))
        assert {role: one.reward for role, one in score.by_role.items()} == {"a": 1.0}
    assert (await by_default.score(PROMPT, of_roles("done"))).reward == 0.25
    assert "env" in (await by_env.score(PROMPT, of_roles("done"))).failures
    finished = of_roles("done", advantages={"a": 1.0})
    assert (await by_env.score(PROMPT, finished)).failures == {}


async def test_reward_is_the_weighted_sum_of_parts_scored_concurrently(scorer_of):
    function = RewardConfig(kind=RewardKind.function, function="a:b", weight=-0.5)
    pool = Pool(right=1.0, short=4.0)
    scorer = scorer_of(
        pool, right=TASK, short=function, steps=RewardConfig(kind=RewardKind.env, weight=0.1)
    )
    score = await scorer.score(PROMPT, episode(env_reward=30.0))
    assert score.reward == pytest.approx(1.0 - 2.0 + 3.0)
    assert dict(score.parts) == {"right": 1.0, "short": 4.0, "steps": 30.0}
    assert pool.most_open == 2
    transcripts = {asked.part: len(asked.episode.messages) for asked in pool.requests}
    assert transcripts == {"right": 0, "short": 2}  # only a function is sent all of it


RANK = RewardConfig(kind=RewardKind.function, function="a:b", weight=2.0, of=RewardScope.group)


async def test_part_of_a_group_is_added_to_the_scores_of_its_episodes(scorer_of):
    pool = Pool(right=1.0, rank=(0.5, None, -1.0), style=(1.0, 1.0, None))
    style = RewardConfig(kind=RewardKind.function, function="a:c", of=RewardScope.group)
    scorer = scorer_of(pool, right=TASK, rank=RANK, style=style)
    episodes = [episode(str(n)) for n in range(3)]
    scores = [await scorer.score(PROMPT, one) for one in episodes]
    assert [dict(one.parts) for one in scores] == 3 * [{"right": 1.0}]
    first, second, third = await scorer.score_group(PROMPT, episodes, scores)
    assert first.reward == 1.0 + 2.0 * 0.5 + 1.0 and first.left_open is None
    assert dict(first.parts) == {"right": 1.0, "rank": 0.5, "style": 1.0}
    assert (second.left_open, third.left_open) == ("rank", "style")
    seen = {one.part: [view.answer for view in one.episodes] for one in pool.requests}
    assert seen["rank"] == seen["style"] == ["0", "1", "2"]
    assert [len(view.messages) for view in pool.requests[-1].episodes] == [2, 2, 2]


async def test_part_of_a_group_that_fails_leaves_every_episode_unscored(scorer_of):
    scorer = scorer_of(Pool(rank="no reward within 5 s"), steps=ENV, rank=RANK)
    episodes = [episode(env_reward=1.0), episode(env_reward=2.0)]
    scores = [await scorer.score(PROMPT, one) for one in episodes]
    scores = await scorer.score_group(PROMPT, episodes, scores)
    assert [one.is_unscored for one in scores] == [True, True]
    assert {one.reasons for one in scores} == {"rank: no reward within 5 s"}
    alone = scorer_of(Pool(task=1.0), right=TASK)
    assert await alone.score_group(PROMPT, episodes, scores) is scores


@pytest.mark.parametrize("kind", [RewardKind.http, RewardKind.judge, RewardKind.teacher])
async def test_service_that_is_gone_leaves_the_episode_unscored(scorer_of, kind):
    gone = RewardConfig(kind=kind, url="http://127.0.0.1:9", model="m", max_retries=0)
    branch = unmasked_branch([1, 2])
    scorer = scorer_of(Pool(right=1.0), right=TASK, gone=gone)
    score = await scorer.score(PROMPT, episode(branches=[branch]))
    assert score.is_unscored
    assert re.match("gone: http://127.0.0.1:9.*: ConnectError", score.reasons)
    no_part = {} if kind is RewardKind.teacher else {"gone": 0.0}  # a teacher gives none
    assert (score.reward, dict(score.parts), score.columns) == (1.0, {"right": 1.0, **no_part}, ())


async def test_answer_that_breaks_its_scorer_is_scored_zero(scorer_of, caplog):
    caplog.set_level("INFO", logger="rollout_pool.rewards.scorer")
    scorer = scorer_of(Pool(right="RuntimeError: broken"), right=TASK)
    for _ in range(2):
        score = await scorer.score(PROMPT, episode())
        assert (score.reward, score.is_unscored) == (0.0, False)
    said = "prompt 3: no right: RuntimeError: broken"
    logged = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert logged == [("WARNING", said), ("INFO", said)], "one warning for a function with a bug"


async def test_part_that_does_not_judge_an_answer_leaves_the_episode_open(scorer_of):
    function = RewardConfig(kind=RewardKind.function, function="a:b")
    scorer = scorer_of(Pool(right=1.0, style=None), right=TASK, style=function)
    score = await scorer.score(PROMPT, episode())
    assert (score.left_open, score.is_unscored, dict(score.failures)) == ("style", False, {})


async def test_failed_part_counts_zero_and_is_reported(scorer_of):
    scorer = scorer_of(
        steps=ENV,
        judge=RewardConfig(
            kind=RewardKind.judge, url="http://127.0.0.1:9", model="m", prompt="{solution}"
        ),
    )
    score = await scorer.score(PROMPT, episode())
    assert (score.reward, dict(score.parts)) == (0.0, {"steps": 0.0, "judge": 0.0})
    assert dict(score.failures) == {
        "steps": "the environment gave no reward",
        "judge": "no solution for the judge: RuntimeError: none here",
    }


@pytest.mark.parametrize("kind", RewardKind)
def test_kind_of_reward_has_a_class_in_the_module_of_its_name(kind):
    config = RewardConfig(kind=kind, url="http://127.0.0.1:9", model="m", function="a:b")
    assert issubclass(class_of(config), Reward)


def test_processes_are_needed_where_the_task_or_code_scores():
    assert needs_processes(TaskConfig())
    assert needs_processes(TaskConfig(rewards={"a": ENV, "b": TASK}))
    assert not needs_processes(TaskConfig(rewards={"a": ENV}))


async def test_episodes_that_wait_together_count_once(scorer_of):
    scorer = scorer_of(Pool(task=1.0))
    scoring = [asyncio.create_task(scorer.score(PROMPT, episode())) for _ in range(10)]
    await asyncio.sleep(0)
    assert scorer.num_open == 10
    await asyncio.gather(*scoring)
    assert scorer.num_open == 0
    assert 0.5 <= scorer.waited_s < 2.5  # and not 5
    meter = WaitMeter()
    for start, end in ((0.0, 1.0), (0.5, 2.0), (1.0, 1.5), (5.0, 6.0)):
        meter.add(start, end)
    assert meter.seconds == 3.0


# What travels to a scoring process ---------------------------------------------------------------


def test_request_arrives_as_it_was_sent():
    call = ToolCall(call_id="c1", name="python", arguments={"code": "print(1)\n"})
    messages = (
        Message(role="user", content="zw\u00f6lf\n\ud83d"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="1", tool_call_id="c1", name="python"),
        Message(role="assistant", content="12"),
    )
    episode = Episode(branches=[], messages=messages, end="done", num_turns=2, env_reward=0.5)
    line = encode_request("style", PROMPT, episode, with_messages=True)
    assert b"\n" not in line
    request = decode(line.decode(), PartRequest)
    assert (request.part, request.prompt) == ("style", PROMPT)
    view = request.episode
    assert view.messages == messages
    assert (view.answer, view.num_turns, view.env_reward, view.end) == ("12", 2, 0.5, "done")
    bare = decode(
        encode_request("task", PROMPT, episode, with_messages=False).decode(), PartRequest
    )
    assert bare.episode.messages == () and bare.episode.answer == "12"


def test_setup_arrives_as_it_was_sent():
    rewards = {"tests": RewardConfig(kind=RewardKind.code_tests, weight=0.5)}
    config = TaskConfig(rewards=rewards, tools=["python"], params={"a": [1]})
    setup = Setup(config=config, data={"": "3 problems"}, timeout_s=1.5)
    assert decode(encode(setup).decode(), Setup) == setup


# Several hosts -----------------------------------------------------------------------------------


class Host:
    """Results each request with its own number; can be lost and come back."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.batches: list[list[bytes]] = []
        self.holds = asyncio.Event()
        self.holds.set()
        self.is_lost = False
        self.is_back = asyncio.Event()
        self.slow: set[bytes] = set()
        self.slow_may_end = asyncio.Event()
        self.leaves_out = 0
        self.error: Exception | None = None

    async def score(self, requests: list[bytes]) -> AsyncIterator[Results]:
        self.batches.append(requests)
        await self.holds.wait()
        if self.error is not None:
            raise self.error
        if self.is_lost:
            raise ConnectionError("lost")
        quick = [(i, r) for i, r in enumerate(requests) if r not in self.slow]
        yield [(i, PartScore(value=self.value)) for i, _ in quick[self.leaves_out :]]
        if self.slow & set(requests):
            await self.slow_may_end.wait()
            yield [
                (i, PartScore(value=self.value)) for i, r in enumerate(requests) if r in self.slow
            ]

    async def wait_ready(self, timeout_s: float) -> None:
        if self.is_lost:
            async with asyncio.timeout(timeout_s):
                await self.is_back.wait()
            self.is_lost = False


@pytest.fixture
async def spread():
    made = []

    async def make(*hosts: Host) -> RemoteScoring:
        made.append(RemoteScoring(hosts))
        await made[-1].start()
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def test_requests_of_one_turn_go_out_as_one_call(spread):
    host = Host(1.0)
    pool = await spread(host)
    scores = await asyncio.gather(*(pool.score(b"%d" % i) for i in range(MAX_BATCH + 10)))
    assert [score.value for score in scores] == [1.0] * (MAX_BATCH + 10)
    assert [len(batch) for batch in host.batches] == [MAX_BATCH, 10]


async def test_host_with_the_fewest_open_requests_is_chosen(spread):
    busy, idle = Host(1.0), Host(2.0)
    pool = await spread(busy, idle)
    busy.holds.clear()
    first = asyncio.create_task(pool.score(b"a"))
    await until(lambda: bool(busy.batches))
    for _ in range(3):
        assert (await pool.score(b"b")).value == 2.0
    busy.holds.set()
    assert (await first).value == 1.0


async def test_slow_answer_does_not_delay_the_others_of_its_call(spread):
    host = Host(1.0)
    host.slow = {b"slow"}
    pool = await spread(host)
    slow = asyncio.create_task(pool.score(b"slow"))
    async with asyncio.timeout(60):
        await pool.score(b"quick")
    assert not slow.done()
    host.slow_may_end.set()
    assert (await slow).value == 1.0
    assert len(host.batches) == 1


async def test_requests_of_a_lost_host_go_elsewhere(spread):
    lost, other = Host(1.0), Host(2.0)
    pool = await spread(lost, other)
    lost.is_lost = True
    scores = await asyncio.gather(*(pool.score(b"%d" % i) for i in range(10)))
    assert {score.value for score in scores} == {2.0}
    assert pool.num_lost == 1
    assert (await pool.score(b"next")).value == 2.0 and len(lost.batches) == 1  # left out
    lost.is_back.set()
    await until(lambda: not lost.is_lost)
    scores = await asyncio.gather(*(pool.score(b"%d" % i) for i in range(10)))
    assert {score.value for score in scores} == {1.0, 2.0}


async def test_error_in_the_code_of_a_host_is_raised_as_it_is(spread):
    broken, other = Host(1.0), Host(2.0)
    pool = await spread(broken, other)
    broken.error = TypeError("a request of this kind is new to it")
    with pytest.raises(TypeError, match="new to it"):
        await pool.score(b"a")
    assert pool.num_lost == 0


async def test_requests_wait_for_a_host_to_return_when_all_are_lost(spread):
    host = Host(1.0)
    pool = await spread(host)
    host.is_lost = True
    asking = asyncio.create_task(pool.score(b"a"))
    await asyncio.sleep(0.05)
    assert not asking.done()
    host.is_back.set()
    assert (await asking).value == 1.0


async def test_request_that_meets_two_losses_has_no_score(spread):
    hosts = [Host(1.0), Host(2.0), Host(3.0)]
    pool = await spread(*hosts)
    for host in hosts:
        host.is_lost = True
    score = await pool.score(b"a")
    assert score.failure == "the scoring actor died" and score.is_unscored
    for host in hosts:
        host.is_back.set()


async def test_answer_that_a_host_omits_is_requested_again(spread):
    careless, other = Host(1.0), Host(2.0)
    careless.leaves_out = 1
    pool = await spread(careless, other)
    assert (await pool.score(b"a")).value == 2.0


# Ray ---------------------------------------------------------------------------------------------

TASK_FILE = """
import os
import time
from pathlib import Path

HERE = Path(__file__).parent

class Task:
    name = "lengths"
    example = eval_prompts = is_held_out = environment = demonstration = None

    def score(self, prompt, completion):
        if completion == "slow":
            (HERE / f"slow-{os.getpid()}").touch()
            while not (HERE / "go").exists():
                time.sleep(0.01)
        return float(len(completion))

def build(config):
    if config.name == "bad":
        raise ValueError("task.name='bad': no such task")
    return Task()
"""


@pytest.fixture(scope="module")
def cluster():
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
async def actors(cluster, tmp_path):
    (tmp_path / "lengths.py").write_text(TASK_FILE)
    made = []

    def make(number=1, name="good"):
        actor = ray.remote(ScorerActor).options(num_cpus=0, max_restarts=-1)
        for _ in range(number):
            path = f"{tmp_path}/rewards-{len(made)}.log"
            factory = f"{tmp_path}/lengths.py:build"
            config = TaskConfig(kind=TaskKind.custom, name=name, factory=factory)
            made.append(actor.remote(config, 1, 30.0, path))
        return made

    yield make
    for handle in made:
        ray.kill(handle)


def line(answer: str) -> bytes:
    return encode_request("task", PROMPT, episode(answer), with_messages=False)


async def test_actors_score_and_survive_the_kill_of_one(actors, spread, tmp_path):
    handles = actors(2)
    pool = await spread(*(RayScorer(handle) for handle in handles))
    scores = await asyncio.gather(*(pool.score(line("x" * i)) for i in range(1, 30)))
    assert [score.value for score in scores] == [float(i) for i in range(1, 30)]
    asking = [asyncio.create_task(pool.score(line("slow"))) for _ in range(2)]
    await until(lambda: len(list(tmp_path.glob("slow-*"))) == 2)
    psutil.Process(await handles[0].pid.remote()).kill()
    (tmp_path / "go").touch()
    assert [(await one).value for one in asking] == [4.0, 4.0]
    assert pool.num_lost == 1
    async with asyncio.timeout(180):
        await RayScorer(handles[0]).wait_ready(180)  # Ray has started it anew
    assert (await pool.score(line("abc"))).value == 3.0


async def test_actor_whose_task_refuses_its_config_is_bad_input(actors):
    [handle] = actors(name="bad")
    with pytest.raises(ValueError, match=r"task\.name='bad': no such task"):
        await RayScorer(handle).wait_ready(180)
