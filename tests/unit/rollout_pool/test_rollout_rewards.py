"""Scoring in real processes, some of which misbehave."""

from __future__ import annotations

import asyncio
import os
import time

import psutil
import pytest

from configs.rollout_schema import TaskConfig
from rollout_pool.rewards.pool import RewardPool
from rollout_pool.tasks.task import Prompt

PROMPT = Prompt(index=4, is_held_out=False, text="4 + 4 =")

MISBEHAVING = """
import os, time

class Task:
    name = "misbehaving"

    def score(self, prompt, completion):
        if completion == "hang":
            while True:
                time.sleep(0.01)
        if completion == "crash":
            os._exit(7)
        if completion == "raise":
            raise RuntimeError("no such thing")
        if completion == "print":
            print('{"reward": 99}')
        if completion == "nan":
            return float("nan")
        if completion == "slow":
            time.sleep(0.3)
        return prompt.index / 10

def build(config):
    if config.name == "bad":
        raise ValueError("task.name='bad': no such task")
    return Task()
"""


@pytest.fixture
def make_pool(tmp_path):
    scorer = tmp_path / "misbehaving.py"
    scorer.write_text(MISBEHAVING)

    def make(num_processes=1, timeout_s=1.0, name="good"):
        return RewardPool(
            TaskConfig(name=name),
            num_processes=num_processes,
            timeout_s=timeout_s,
            log_path=tmp_path / "rewards.log",
            factory=f"{scorer}:build",
        )

    return make


@pytest.fixture
async def pool(make_pool):
    pool = make_pool()
    await pool.start()
    yield pool
    await pool.close()


def children():
    return [
        process
        for process in psutil.Process().children()
        if "rollout_pool.rewards.process" in process.cmdline()
    ]


async def test_the_real_task_scores_by_the_number_of_the_prompt(tmp_path):
    config = TaskConfig(
        params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        prompt_pattern=": (.*=)$",
        eval_size=10,
    )
    pool = RewardPool(config, num_processes=1, timeout_s=30, log_path=tmp_path / "rewards.log")
    await pool.start()
    from rollout_pool.tasks.task import build_task

    task = build_task(config)
    for prompt in [task.example(7), task.eval_prompts()[3]]:
        right, wrong = await asyncio.gather(
            pool.score(prompt, task.solution(prompt)), pool.score(prompt, "1234")
        )
        assert (right.reward, right.failure) == (1.0, None)
        assert wrong.reward < 0.5 and wrong.failure is None
    await pool.close()


async def test_a_hanging_scorer_costs_its_own_sample_alone(pool):
    hanging, next_one = await asyncio.gather(pool.score(PROMPT, "hang"), pool.score(PROMPT, "ok"))
    assert (hanging.reward, hanging.failure) == (0.0, "no reward within 1 s")
    assert (next_one.reward, next_one.failure) == (0.4, None)
    assert pool.num_restarts == 1


async def test_a_crashing_scorer_costs_its_own_sample_alone(pool):
    crashing, next_one = await asyncio.gather(pool.score(PROMPT, "crash"), pool.score(PROMPT, "ok"))
    assert (crashing.reward, crashing.failure) == (0.0, "the scoring process died")
    assert next_one.reward == 0.4
    assert pool.num_restarts == 1


async def test_a_scorer_killed_from_outside_while_idle_is_replaced(pool):
    [child] = children()
    child.kill()
    await asyncio.sleep(0.1)
    score = await pool.score(PROMPT, "ok")
    assert score.reward == 0.4


@pytest.mark.parametrize(
    ("completion", "failure"),
    [("raise", "RuntimeError: no such thing"), ("nan", "the reward is nan")],
)
async def test_an_error_in_a_scorer_is_told_and_its_process_lives_on(pool, completion, failure):
    [child] = children()
    score = await pool.score(PROMPT, completion)
    assert (score.reward, score.failure) == (0.0, failure)
    assert children() == [child] and pool.num_restarts == 0


async def test_what_a_scorer_prints_is_not_taken_for_its_reward(pool):
    assert (await pool.score(PROMPT, "print")).reward == 0.4


async def test_two_processes_score_at_the_same_time(make_pool):
    pool = make_pool(num_processes=2, timeout_s=5)
    await pool.start()
    started = time.perf_counter()
    await asyncio.gather(*(pool.score(PROMPT, "slow") for _ in range(4)))
    assert time.perf_counter() - started < 1.0  # 4 x 0.3 s, two at a time
    await pool.close()


async def test_a_caller_that_gives_up_does_not_cost_a_process(pool):
    [child] = children()
    asking = asyncio.create_task(pool.score(PROMPT, "slow"))
    await asyncio.sleep(0.1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await pool.score(PROMPT, "ok")).reward == 0.4
    assert children() == [child] and pool.num_restarts == 0


async def test_close_leaves_no_process_not_even_a_hanging_one(make_pool):
    pool = make_pool(num_processes=2, timeout_s=60)
    await pool.start()
    asking = asyncio.create_task(pool.score(PROMPT, "hang"))
    await asyncio.sleep(0.2)
    await pool.close()
    assert not children()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_task_that_refuses_its_config_is_bad_input(make_pool):
    with pytest.raises(ValueError, match=r"task.name='bad': no such task"):
        await make_pool(name="bad").start()
    assert not children()


async def test_a_factory_that_does_not_exist_is_bad_input(tmp_path):
    for factory in ("no_such_module:build", f"{tmp_path}/none.py:build", f"{os.__name__}:build"):
        pool = RewardPool(
            TaskConfig(),
            num_processes=1,
            timeout_s=1,
            log_path=tmp_path / "rewards.log",
            factory=factory,
        )
        with pytest.raises(ValueError, match=r"task factory .*"):
            await pool.start()
