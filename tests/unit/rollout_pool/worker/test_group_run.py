"""From a prompt to a group, with a model with prepared answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from buffer.results import PushResult
from buffer.types import PromptRef, SamplingParams, VersionSpan
from buffer.wire.codec import decode_group, encode_group
from configs.advantages import AdvantageConfig
from configs.rollout_schema import RolloutConfig, TaskConfig
from rollout_pool.episodes.conversation import Message
from rollout_pool.episodes.environment import Observation, SingleTurn, Step
from rollout_pool.episodes.episode import Branch, Episode
from rollout_pool.episodes.runner import EpisodeRunner
from rollout_pool.rewards.scorer import EpisodeScorer
from rollout_pool.rewards.types import Score
from rollout_pool.sampling.group_samples import GroupSamples
from rollout_pool.sampling.sample import Routes, SampleFailed
from rollout_pool.tasks.env_episodes import EnvEpisodes
from rollout_pool.tasks.registry import build_task
from rollout_pool.tasks.source import GroupEnd
from rollout_pool.tasks.task import Prompt
from rollout_pool.worker.group_run import (
    GroupFailed,
    GroupRun,
    GroupRunner,
    generate_group,
    make_trajectories,
)
from rollout_pool.worker.variance import Verdict
from tests.support.rollout import FakeCompleter, place_of, plain_chat, until
from trainer_pool.algorithms.advantages import AdvantageInputs, dr_grpo

SAMPLING = SamplingParams(temperature=0.8)


def question(prompt):
    return SingleTurn(prompt.text)


class NumberScorer:
    """The answer is the reward, and its part "half" a half of it."""

    def __init__(self):
        self.scored = []
        self.has_scored = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures = {}
        self.unscored = set()
        self.left_open = set()
        self.of_group = lambda scores: scores
        self.groups = []
        self.num_cancelled = 0

    async def score(self, prompt, episode):
        self.scored.append(episode.answer)
        self.has_scored.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        number = float(episode.answer)
        failures = self.failures.get(episode.answer, {})
        return Score(
            reward=number,
            parts={"half": number / 2},
            failures=failures,
            is_unscored=episode.answer in self.unscored,
            left_open="half" if episode.answer in self.left_open else None,
        )

    async def score_group(self, prompt, episodes, scores):
        self.groups.append([episode.answer for episode in episodes])
        return self.of_group(scores)


class Ledger(Counter):
    """A buffer and a run's state that take each group, and the worker's counters."""

    answers = ()

    async def retry_while_run_moves(self, push):
        return await push()

    async def push(self, group):
        return PushResult.stored

    async def abandon(self, group_id, why, rerun=None, ref=None):
        return True

    async def fail(self, group_id, ref, most):
        return None

    def add_answers(self, answers, ended):
        self.answers = sorted({(one.session, one.session in ended) for one in answers})

    def add(self, name, amount=1):
        self[name] += amount


@pytest.fixture
def model():
    """Each answer is the episode's place in the group, written by version 6 + that. Places in
    `gates` wait after their first token, those in `errors` fail."""

    def answer(sample):
        return model.errors.get(place_of(sample), str(place_of(sample)))

    model = FakeCompleter(answer)
    model.gates, model.errors = {}, {}
    model.version_of = lambda sample: 6 + place_of(sample)
    model.hold = lambda sample: model.gates.get(place_of(sample))
    return model


@pytest.fixture
def scorer():
    return NumberScorer()


def new_run(**samples):
    return GroupRun(
        group_id="g",
        samples=GroupSamples(group="g", **samples),
        ref=PromptRef(task="numbers", index=3),
        prompt=Prompt(index=3, is_held_out=False, text="3?"),
        episode_source=None,
    )


def give_source(run, model, env_factory):
    runner = EpisodeRunner(model, plain_chat(), TaskConfig(max_turns=4), RolloutConfig())
    run.episode_source = EnvEpisodes(runner, env_factory)


async def generate(run, model, scorer, env_factory=question):
    give_source(run, model, env_factory)
    return await generate_group(run, scorer, SAMPLING, 4)


def rewards_of(group):
    return [*group.rewards_by_player.values()]


def branch(tokens, loss_mask, finish_reason="stop", version=7, candidates=None):
    start = loss_mask.index(1)
    return Branch(
        tokens=tokens,
        loss_mask=loss_mask,
        logprobs=[-float(token) * own for token, own in zip(tokens, loss_mask, strict=True)],
        candidates=candidates or [()] * len(tokens),
        version_spans=[VersionSpan(version=version, start=start, end=len(tokens))],
        prompt_length=start,
        finish_reason=finish_reason,
    )


def episode(*branches, end="done"):
    return Episode(branches=list(branches), messages=(), end=end, num_turns=len(branches))


def test_candidates_are_a_column_as_wide_as_the_largest_set():
    sets = [(), (), [6, 4], [7, 5, 6]]
    made = branch([5, 6, 6, 7], [0, 0, 1, 1], candidates=sets)
    [trajectory] = make_trajectories(episode(made), Score(reward=0.5), 0, 1.0)
    column = trajectory.columns["candidates"]
    assert column.dtype == np.int32
    assert column.tolist() == [[-1] * 3, [-1] * 3, [6, 4, -1], [7, 5, 6]]


@pytest.mark.parametrize(("highest", "kind"), [(255, np.uint8), (256, np.uint16)])
def test_experts_are_a_column_with_0_where_they_are_not_known(highest, kind):
    parts = [Routes(0, np.array([[1, 2]], np.uint8)), Routes(2, np.array([[3, highest]], kind))]
    made = replace(branch([5, 6, 6, 7], [0, 1, 1, 1]), routes=parts)
    [trajectory] = make_trajectories(episode(made), Score(reward=0.5), 0, 1.0)
    column = trajectory.columns["routes"]
    assert column.dtype == kind
    assert column.tolist() == [[1, 2], [0, 0], [3, highest], [0, 0]]
    [without] = make_trajectories(episode(replace(made, routes=[])), Score(reward=0.5), 0, 1.0)
    assert not without.columns


def test_temperatures_are_a_column_where_one_is_not_the_usual():
    made = replace(branch([5, 6, 6, 7], [0, 1, 0, 1]), temperatures=[1.0, 0.7, 1.0, 0.7])
    [usual] = make_trajectories(episode(made), Score(reward=0.5), 0, 0.7)
    assert not usual.columns
    [own] = make_trajectories(episode(made), Score(reward=0.5), 0, 0.8)
    assert own.columns["temperature"].tolist() == np.array([1, 0.7, 1, 0.7], "<f4").tolist()


def test_episode_is_one_trajectory_with_its_reward():
    score = Score(reward=0.5, parts={"right": 1.0, "short": 0.0})
    [trajectory] = make_trajectories(episode(branch([5, 6, 7, 2], [0, 0, 1, 1])), score, 3, 1.0)
    assert trajectory.tokens.tolist() == [5, 6, 7, 2]
    assert trajectory.loss_mask.tolist() == [0, 0, 1, 1]
    assert trajectory.rollout_logprobs.tolist() == [0, 0, -7, -2]
    assert trajectory.version_spans == (VersionSpan(version=7, start=2, end=4),)
    assert (trajectory.prompt_length, trajectory.reward, trajectory.episode) == (2, 0.5, 3)
    assert trajectory.reward_parts == {"right": 1.0, "short": 0.0}
    assert (trajectory.finish_reason, trajectory.min_version) == ("stop", 7)
    assert trajectory.tokens.dtype == np.int32 and trajectory.loss_mask.dtype == np.uint8
    assert trajectory.rollout_logprobs.dtype == np.float32


def test_each_branch_is_a_trajectory_with_its_own_columns():
    branches = branch([5, 7], [0, 1], "length"), branch([6, 8, 9], [0, 1, 1])
    columns = tuple({"teacher": np.arange(n, dtype=np.float32)} for n in (2, 3))
    first, second = make_trajectories(
        episode(*branches), Score(reward=1.0, columns=columns), 1, 1.0
    )
    assert first.columns["teacher"].tolist() == [0, 1]
    assert second.columns["teacher"].tolist() == [0, 1, 2]
    assert (first.finish_reason, second.finish_reason) == ("length", "stop")
    assert {first.episode, second.episode} == {1} and first.reward == second.reward == 1.0
    with pytest.raises(ValueError, match="shorter"):
        make_trajectories(episode(*branches), Score(reward=1.0, columns=columns[:1]), 1, 1.0)


def test_episode_cut_short_says_so_in_every_trajectory():
    broken = episode(branch([5, 7], [0, 1]), branch([6, 8], [0, 1], "length"), end="env_error")
    made = make_trajectories(broken, Score(reward=0.0), 0, 1.0)
    assert [trajectory.finish_reason for trajectory in made] == ["env_error", "env_error"]


async def test_group_has_its_episodes_in_order_each_with_its_own_reward(model, scorer):
    current = new_run()
    group = await generate(current, model, scorer)
    assert group.group_id == "g" and group.prompt == PromptRef(task="numbers", index=3)
    assert group.sampling == SAMPLING
    assert [t.reward for t in group.trajectories] == [0, 1, 2, 3]
    assert [t.reward_parts for t in group.trajectories] == [{"half": i / 2} for i in range(4)]
    assert [t.episode for t in group.trajectories] == [0, 1, 2, 3]
    assert [bytes(t.tokens[:3].tolist()) for t in group.trajectories] == [
        f"3?{i}".encode() for i in range(4)
    ]
    assert (
        current.samples.spent.num_tokens,
        current.samples.spent.oldest_version,
        group.min_version,
    ) == (8, 6, 6)
    assert current.samples.running == [] and current.num_unscored == 0


async def test_all_members_start_in_the_same_turn_of_the_loop(model, scorer):
    numbers = []
    model.answer = lambda sample: numbers.append(len(model.asked)) or "0"
    await generate(new_run(order=5), model, scorer)
    assert numbers[0] == 4
    assert {sample.order for sample in model.asked} == {5}
    assert sorted(sample.sample_id for sample in model.asked) == [f"g.{i}.0" for i in range(4)]


async def test_episode_is_scored_while_its_siblings_still_generate(model, scorer):
    gate = asyncio.Event()
    model.gates = {0: gate, 1: gate, 3: gate}
    current = new_run()
    running = asyncio.create_task(generate(current, model, scorer))
    async with asyncio.timeout(60):
        await scorer.has_scored.wait()
        assert scorer.scored == ["2"]
        assert len(current.samples.running) == 3 and current.samples.spent.num_tokens == 5
        gate.set()
        await running
    assert sorted(scorer.scored) == ["0", "1", "2", "3"]


async def test_failed_member_fails_the_group_and_ends_the_others(model, scorer):
    model.gates = {0: asyncio.Event()}
    model.errors = {1: SampleFailed("g.1.0 failed 3 times; the last: out of order")}
    with pytest.raises(GroupFailed, match=r"group g of prompt 3: g.1.0 failed 3 .*out of order"):
        await generate(new_run(), model, scorer)
    assert model.cancelled == ["g.0.0"]


async def test_environment_that_cannot_be_created_or_reset_fails_its_group(model, scorer):
    def no_env(prompt):
        raise ImportError("no such library")

    with pytest.raises(GroupFailed, match=r"could not be created: ImportError: no such library"):
        await generate(new_run(), model, scorer, no_env)

    class Unborn(SingleTurn):
        async def reset(self):
            raise OSError("no disk")

    with pytest.raises(GroupFailed, match=r"before a token was sampled: env_error: .*no disk"):
        await generate(new_run(), model, scorer, lambda prompt: Unborn("x"))


class Twice(SingleTurn):
    """Asks again with a history of its own; episode 2 of the group breaks there."""

    async def step(self, completion):
        if completion.text == "2":
            raise RuntimeError("lost the thread")
        if not self._messages:
            return Step()
        self._messages = ()
        message = Message(role="user", content="again?")
        return Step(observation=Observation(messages=(message,), replaces_history=True))


async def test_branches_share_the_group_and_a_broken_episode_keeps_its_place(model, scorer):
    current = new_run()
    group = await generate(current, model, scorer, lambda prompt: Twice(prompt.text))
    assert [t.episode for t in group.trajectories] == [0, 0, 1, 1, 2, 3, 3]
    assert [t.reward for t in group.trajectories] == [0, 0, 1, 1, 2, 3, 3]
    assert [t.finish_reason for t in group.trajectories] == ["stop"] * 4 + ["env_error"] + [
        "stop"
    ] * 2
    assert current.samples.spent.num_tokens == 14


def runner_with(ledger, scorer):
    return GroupRunner(
        config=RolloutConfig(group_size=4),
        scorer=scorer,
        buffer=ledger,
        state=ledger,
        counters=ledger,
        group_log=None,
    )


async def settled(current, model, scorer, env_factory=question, stop=None):
    """The counts of a group that has ended, or was cut off as too old once `stop` holds."""
    give_source(current, model, env_factory)
    current.episode_source.ended = lambda end, why: None
    ledger = Ledger()
    runner = runner_with(ledger, scorer)
    current.work = asyncio.create_task(runner.generate_and_push(current))
    if stop is not None:
        async with asyncio.timeout(60):
            await until(stop)
        current.stopped_for = GroupEnd.too_old
        current.work.cancel()
    await asyncio.wait([current.work])
    await runner.settle(current)
    return ledger


async def test_answers_of_a_group_that_failed_are_not_counted_as_cut_off(model, scorer):
    scorer.failures, scorer.unscored = {"1": {"judge": "HTTP 503"}}, {"1"}
    counts = await settled(new_run(), model, scorer)
    assert counts["rewards_failed"] == 1 and not counts.answers


async def test_episodes_time_beside_their_requests_is_counted_by_what_they_did(model, scorer):
    counts = await settled(new_run(), model, scorer, lambda prompt: Twice(prompt.text))
    stages = {name for name in counts if name.startswith("episode_s:") and counts[name] > 0}
    ours = ("environment", "rewards", "siblings", "push")
    assert stages == {f"episode_s:{stage}" for stage in ours}


async def test_episode_between_two_turns_is_cut_off_when_its_group_is_too_old(model, scorer):
    asked = []

    class Slow(Twice):
        async def step(self, completion):
            if completion.text == "3":
                asked.append(completion)
                await asyncio.Event().wait()
            return await super().step(completion)

    current = new_run()
    counts = await settled(
        current,
        model,
        scorer,
        lambda prompt: Slow(prompt.text),
        stop=lambda: asked and len(scorer.scored) == 3,
    )
    assert counts.answers == [("g.0", True), ("g.1", True), ("g.2", True), ("g.3", False)]


async def test_branches_are_those_of_the_episodes_that_are_trained(model, scorer):
    scorer.left_open = {"0", "1"}
    counts = await settled(new_run(), model, scorer, lambda prompt: Twice(prompt.text))
    assert counts["episodes_left_out"] == 2
    # Episode 2 breaks after its first turn, episode 3 has two branches.
    assert counts["branches"] == 3
    assert counts["episodes_ended:env_error"] + counts["episodes_ended:stop"] == 2


@pytest.mark.parametrize(
    ("answer", "verdict", "mean"), [(None, Verdict.keep, 1.5), ("3", Verdict.leave_out, 3.0)]
)
async def test_variance_and_mean_reward_are_of_episodes_and_not_of_branches(
    model, scorer, answer, verdict, mean
):
    model.answer = (lambda sample: answer) if answer else model.answer
    current, ledger = new_run(), Ledger()
    give_source(current, model, lambda prompt: Twice(prompt.text))
    await GroupRunner(
        config=RolloutConfig(group_size=4, filter_zero_variance=True),
        scorer=scorer,
        buffer=ledger,
        state=ledger,
        counters=ledger,
        group_log=None,
    ).generate_and_push(current)
    assert (current.verdict, ledger["mean_rewards:numbers"]) == (verdict, mean)


async def test_unscored_episodes_are_counted(model, scorer):
    scorer.failures = {"1": {"judge": "no answer"}, "2": {"judge": "no", "tests": "timeout"}}
    current = new_run()
    await generate(current, model, scorer)
    assert current.num_unscored == 2


async def test_episode_that_no_service_could_score_fails_its_group(model, scorer):
    scorer.failures = {"1": {"judge": "http://judge: HTTP 503 (4 attempts)"}}
    scorer.unscored = {"1"}
    model.gates = {3: asyncio.Event()}
    current = new_run()
    with pytest.raises(
        GroupFailed,
        match=r"group g of prompt 3: episode 1 could not be scored: judge: .*HTTP 503 \(4 attempts",
    ):
        await generate(current, model, scorer)
    assert current.num_unscored == 1 and model.cancelled == ["g.3.0"]


async def test_group_given_up_ends_its_episodes_and_its_scoring_first(model, scorer):
    scorer.gate.clear()
    model.gates = {place: asyncio.Event() for place in (1, 2, 3)}
    current = new_run()
    running = asyncio.create_task(generate(current, model, scorer))
    async with asyncio.timeout(60):
        await scorer.has_scored.wait()
        assert current.samples.spent.oldest_version == 6  # known from the first tokens on
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert sorted(model.cancelled) == ["g.1.0", "g.2.0", "g.3.0"] and scorer.num_cancelled == 1


async def test_episode_that_no_reward_judges_is_left_out_of_its_group(model, scorer):
    scorer.left_open = {"0", "2"}
    current = new_run()
    group = await generate(current, model, scorer)
    assert rewards_of(group) == [1.0, 3.0]
    encode_group(group)  # which wants episodes without gaps
    assert {place: said[-1].content for place, said in current.messages.items()} == {0: "1", 1: "3"}
    assert (current.num_left_open, current.num_unscored) == (2, 0)
    scorer.left_open = set("0123")
    with pytest.raises(GroupFailed, match="prompt 3: a reward function returned None for each of"):
        await generate(new_run(), model, scorer)


async def test_group_is_scored_together_once_its_slowest_episode_has_ended(model, scorer):
    model.gates = {2: asyncio.Event()}
    scorer.of_group = lambda scores: [
        replace(one, reward=one.reward + 10, parts={**one.parts, "rank": 10.0}) for one in scores
    ]
    current = new_run()
    running = asyncio.create_task(generate(current, model, scorer))
    async with asyncio.timeout(60):
        await until(lambda: len(scorer.scored) == 3)
        assert scorer.groups == [] and current.group is None
        model.gates[2].set()
        group = await running
    assert scorer.groups == [["0", "1", "2", "3"]]
    assert rewards_of(group) == [10.0, 11.0, 12.0, 13.0]
    assert dict(group.trajectories[1].reward_parts) == {"half": 0.5, "rank": 10.0}


async def test_group_that_could_not_be_scored_together_fails(model, scorer):
    why = {"rank": "no reward within 5 s"}
    scorer.of_group = lambda scores: [
        replace(one, failures=why, is_unscored=True) for one in scores
    ]
    current = new_run()
    message = "group g of prompt 3: episode 0 could not be scored: rank: no reward within 5 s"
    with pytest.raises(GroupFailed, match=message):
        await generate(current, model, scorer)
    assert current.num_unscored == 1 and current.given_up_because.endswith("within 5 s")


async def test_episode_that_a_reward_of_the_group_leaves_open_is_in_no_baseline(model, scorer):
    scorer.left_open = {"0"}
    scorer.of_group = lambda scores: [
        *scores[:2],
        replace(scores[2], left_open="rank"),
        replace(scores[3], reward=5.0),
    ]
    current = new_run()
    group = await generate(current, model, scorer)
    assert rewards_of(group) == [1.0, 5.0] and current.num_left_open == 2
    inputs = AdvantageInputs(
        rewards_E=np.array(rewards_of(group)),
        groups_E=np.zeros(2, np.int64),
        num_tokens_E=np.ones(2),
        trajectories=group.trajectories,
        episodes=range(2),
    )
    # The mean of 1 and 5 is 3, and not that of four episodes.
    assert [row[0] for row in dr_grpo(inputs, AdvantageConfig(kind="dr_grpo"))] == [-2.0, 2.0]


class TwoRoles:
    """The solver answers, and unless its answer is 3 the critic; `credits` by the solver's."""

    def __init__(self, *credits):
        self.credits, self.credit = credits, None

    async def reset(self):
        return Observation.user("3?", role="solver")

    async def step(self, completion):
        if self.credit is None:
            place = int(completion.content)
            self.credit = self.credits[place]
            if place < 3:
                return Step(observation=Observation.user("Is it?", role="critic"))
        return Step(**self.credit)

    async def close(self):
        pass


async def roles_of(model, *credits):
    config = TaskConfig()
    scorer = EpisodeScorer(config, task=build_task(config), pool=None)
    current = new_run()
    group = await generate(current, model, scorer, lambda prompt: TwoRoles(*credits))
    group = decode_group(encode_group(group))
    of_role = {role: {} for role in group.roles}
    for one in group.trajectories:
        given = one.columns.get("advantage", [None])[0]
        of_role[one.role][one.episode] = one.reward if given is None else (one.reward, given)
    return of_role, group, current


async def test_each_role_has_its_own_reward_and_one_that_is_not_judged_is_left_out(model):
    found, group, current = await roles_of(
        model,
        {"rewards": {"solver": None, "critic": None}},
        {"rewards": {"solver": 1.0, "critic": 0.5}},
        {"rewards": {"solver": 0.0, "critic": None}},
        {"rewards": {"solver": 0.25}},
    )
    assert found == {"solver": {0: 1.0, 1: 0.0, 2: 0.25}, "critic": {0: 0.5}}
    parts = {"env": 0.5, "env/solver": 1.0, "env/critic": 0.5}
    assert [dict(one.reward_parts) for one in group.trajectories[:2]] == [
        {**parts, "env": 1.0},
        parts,
    ]
    assert current.num_left_open == 1 and current.messages == {}


async def test_finished_advantages_are_a_column_of_their_roles_trajectories(model):
    found, group, _ = await roles_of(
        model,
        {"advantages": {"solver": 1.5, "critic": -0.5}, "reward": 1.0},
        {"advantages": {"solver": 0.0, "critic": 0.25}, "reward": 0.5},
        {"advantages": {"solver": 0.0, "critic": 0.0}, "reward": 0.0},
        {"advantages": {"solver": -2.0}, "reward": 0.0},
    )
    assert found["solver"] == {0: (1.0, 1.5), 1: (0.5, 0.0), 2: (0.0, 0.0), 3: (0.0, -2.0)}
    assert found["critic"] == {0: (1.0, -0.5), 1: (0.5, 0.25), 2: (0.0, 0.0)} and group.teaches


@pytest.mark.parametrize(
    ("credit", "message"),
    [
        (
            {"rewards": {"solver": 1.0, "critc": 0.0}},
            r"critc.*the roles that answered are",
        ),
        ({"rewards": {"solver": 1.0}}, r"rewards=\{'solver': 1.0\}: the roles that answered"),
        ({"advantages": {"critic": 1.0}}, r"advantages=.*name each of them"),
        ({"rewards": {"solver": 1.0}, "reward": 1.0}, "gave reward and rewards; give one"),
        ({"rewards": {"a": 1.0}, "advantages": {"a": 1.0}}, "gave rewards and advantages; give"),
    ],
)
async def test_credit_that_does_not_fit_the_roles_fails_the_group(model, credit, message):
    with pytest.raises(GroupFailed, match=message):
        await roles_of(model, *4 * [credit])
