"""From a prompt to a group, over HTTP to fake engines, with scorers of its own."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from buffer.types import PromptRef, VersionSpan
from rollout_pool.generate import Flight, GroupGenerator, make_trajectory
from rollout_pool.generation import Generation, Sampling
from rollout_pool.prompts import TokenizedPrompt
from rollout_pool.rewards.pool import Score
from rollout_pool.router import Router
from rollout_pool.sampling import Sampler, SamplesFailed
from rollout_pool.tasks.task import Prompt


class Numbers:
    """Decodes tokens as their numbers."""

    def decode(self, token_ids, *, skip_special_tokens=False):
        return " ".join(map(str, token_ids))


class Scorer:
    """The first token is the reward; 99 fails."""

    def __init__(self):
        self.scored = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def score(self, prompt, completion):
        self.scored.append(completion)
        await self.gate.wait()
        first = float(completion.split()[0])
        return Score(reward=0.0, failure="broken") if first == 99 else Score(reward=first)


@pytest.fixture
def scorer():
    return Scorer()


@pytest.fixture
def router(client, other_client):
    router = Router([client, other_client], wait_timeout_s=20.0)
    router.follow({"engine-0": 0, "engine-1": 0}, 0, 0)
    return router


@pytest.fixture
def generator(router, scorer):
    sampler = Sampler(router, Sampling(temperature=1.0, max_new_tokens=8), max_retries=1)
    return GroupGenerator(sampler, scorer, Numbers(), group_size=4)


def flight(group_id="g"):
    prompt = Prompt(index=3, is_held_out=False, text="3?")
    return Flight(
        group_id=group_id,
        ref=PromptRef(task="numbers", index=3),
        prompt=TokenizedPrompt(prompt=prompt, tokens=[5, 6]),
    )


def sample_of(rid):
    return int(rid.split(".")[1])


def attempt_of(rid):
    return int(rid.split(".")[2])


def test_a_trajectory_is_the_prompt_and_then_the_models_own_tokens():
    generation = Generation(
        index=0,
        output_ids=(10, 11, 12, 2),
        logprobs=(-1.0, -2.0, -1.0, -3.0),
        version_spans=(
            VersionSpan(version=7, start=0, end=2),
            VersionSpan(version=8, start=2, end=4),
        ),
        finish_reason="stop",
    )
    trajectory = make_trajectory([5, 6, 7], generation, 0.5)
    assert trajectory.tokens.tolist() == [5, 6, 7, 10, 11, 12, 2]
    assert trajectory.loss_mask.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert trajectory.rollout_logprobs.tolist() == [0, 0, 0, -1, -2, -1, -3]
    assert trajectory.version_spans == (
        VersionSpan(version=7, start=3, end=5),
        VersionSpan(version=8, start=5, end=7),
    )
    assert (trajectory.prompt_length, trajectory.reward, trajectory.min_version) == (3, 0.5, 7)
    assert trajectory.tokens.dtype == np.int32 and trajectory.rollout_logprobs.dtype == np.float32


async def test_a_group_has_its_samples_in_order_each_with_its_own_reward(
    fake, generator, make_reply
):
    fake.reply = lambda rid: make_reply(
        output_ids=[10 + sample_of(rid), 2], delay_s=0.2 - 0.05 * sample_of(rid)
    )
    fake.version = "6"
    current = flight()
    group = await generator.run(current)
    assert group.group_id == "g" and group.prompt == PromptRef(task="numbers", index=3)
    assert [t.reward for t in group.trajectories] == [10, 11, 12, 13]
    assert [t.tokens.tolist() for t in group.trajectories] == [[5, 6, 10 + i, 2] for i in range(4)]
    assert (current.num_tokens, current.oldest_version, group.min_version) == (8, 6, 6)


async def test_a_sample_is_scored_while_its_siblings_still_generate(
    fake, generator, scorer, make_reply
):
    fake.reply = lambda rid: make_reply(
        output_ids=[sample_of(rid), 2], delay_s=0.0 if sample_of(rid) == 2 else 0.5
    )
    running = asyncio.create_task(generator.run(flight()))
    await asyncio.sleep(0.25)
    assert scorer.scored == ["2 2"] and not running.done()
    await running


async def test_failed_samples_are_asked_for_again_at_another_engine(
    fake, other_fake, generator, make_reply
):
    fake.reply = lambda rid: make_reply(
        output_ids=[sample_of(rid), 2],
        logprobs=[None, None] if sample_of(rid) in (1, 3) else None,
    )
    other_fake.reply = lambda rid: make_reply(output_ids=[20 + sample_of(rid), 2])
    current = flight()
    group = await generator.run(current)
    assert [t.reward for t in group.trajectories] == [0, 21, 2, 23]
    assert [body["rid"] for body in other_fake.bodies("/generate")] == [["g.1.1", "g.3.1"]]
    assert current.num_refused == 2


async def test_an_engine_that_dies_under_a_call_costs_only_what_had_not_ended(
    fake, other_fake, generator, make_reply
):
    fake.reply = lambda rid: make_reply(
        output_ids=[sample_of(rid), 2], finish_type="stop" if sample_of(rid) == 0 else None
    )
    other_fake.reply = lambda rid: make_reply(output_ids=[20 + sample_of(rid), 2])
    group = await generator.run(flight())
    assert [t.reward for t in group.trajectories] == [0, 21, 22, 23]


async def test_a_call_that_lost_its_only_engine_waits_until_that_one_is_back(
    generator, router, fake
):
    router.follow({"engine-0": 0}, 0, 0)
    fake.status = 500
    making = asyncio.create_task(generator.run(flight()))
    while not fake.calls:
        await asyncio.sleep(0.01)
    router.follow({}, 0, 0)  # it has died
    await asyncio.sleep(1.5)
    assert len(fake.bodies("/generate")) == 1 and not making.done()
    fake.status = 200
    router.follow({"engine-0": 0}, 0, 0)
    assert len((await making).trajectories) == 4


async def test_a_group_whose_samples_keep_failing_fails_with_the_reason(
    fake, other_fake, generator
):
    fake.status = other_fake.status = 500
    with pytest.raises(SamplesFailed, match=r"g: 4 of 4 samples failed 2 times .*out of order"):
        await generator.run(flight())
    assert len(fake.bodies("/generate")) == len(other_fake.bodies("/generate")) == 1


async def test_a_scorer_that_fails_costs_its_sample_the_reward_and_is_counted(
    fake, generator, make_reply
):
    fake.reply = lambda rid: make_reply(output_ids=[99 if sample_of(rid) == 1 else 7, 2])
    current = flight()
    group = await generator.run(current)
    assert [t.reward for t in group.trajectories] == [7, 0, 7, 7]
    assert current.num_unscored == 1


async def test_a_group_given_up_stops_its_samples_at_the_engine_and_its_scoring(
    fake, generator, scorer, make_reply
):
    scorer.gate.clear()
    fake.version = "9"
    fake.reply = lambda rid: make_reply(never_ends=sample_of(rid) != 0)
    current = flight()
    running = asyncio.create_task(generator.run(current))
    await asyncio.sleep(0.3)
    assert current.oldest_version == 9  # known from the first tokens on
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(fake.aborted) == ["g.1.0", "g.2.0", "g.3.0"]


async def test_groups_at_once_spread_over_the_engines(fake, other_fake, generator, make_reply):
    for engine in (fake, other_fake):
        engine.reply = lambda rid: make_reply(output_ids=[1, 2], delay_s=0.2)
    await asyncio.gather(*(generator.run(flight(f"g{i}")) for i in range(6)))
    assert len(fake.bodies("/generate")) == len(other_fake.bodies("/generate")) == 3
