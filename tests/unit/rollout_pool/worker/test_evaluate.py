"""Evaluation: real episodes over a completer with prepared answers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest

from buffer.types import SamplingParams
from configs.choices import OnLongPrompt
from configs.rollout_schema import EvalConfig, EvalSet, RolloutConfig, TaskConfig
from rollout_pool.episodes.environment import SingleTurn
from rollout_pool.episodes.runner import EpisodeRunner
from rollout_pool.rewards.types import Score
from rollout_pool.sampling.sample import Priority, SampleFailed
from rollout_pool.tasks.env_episodes import EnvEpisodes
from rollout_pool.tasks.task import Prompt
from rollout_pool.worker.evaluate import EvaluationFailed, evaluator_of, pass_at_k, sample_sizes
from rollout_pool.worker.prompt_filter import PromptFilter
from tests.support.rollout import FakeCompleter, plain_chat


class Questions:
    """A task of `number` held-out questions, "q0?", "q1?", ...; or a mixture of two such tasks."""

    name = "questions"

    def __init__(self, number, mixes=False):
        self._prompts = [
            Prompt(index=i, is_held_out=True, text=f"q{i}?", task=("even", "odd")[i % 2] * mixes)
            for i in range(number)
        ]

    def eval_prompts(self):
        return self._prompts

    def environment(self, prompt):
        return SingleTurn(prompt.text)


class Yes:
    """1 for the answer "yes"."""

    async def score(self, prompt, episode):
        is_unscored = episode.answer == "maybe"
        failures = {"judge": "away"} if is_unscored else {}
        if episode.answer == "broken":
            failures = {"tests": "died"}
        worth = {"yes": 1.0, "half": 0.5, "nearly": 0.99}.get(episode.answer, 0.0)
        left_open = "judge" if episode.answer == "open" else None
        return Score(reward=worth, failures=failures, is_unscored=is_unscored, left_open=left_open)


Answer = Callable[[object], "str | Exception"]


def asked(sample) -> int:
    """The number of the question."""
    return int("".join(chr(token) for token in sample.prompt[1:-1]))


@pytest.fixture
def make():
    def make(
        answer: Answer, num_prompts=4, *, max_prompt_tokens=100, mixes=False, sets=None, **config
    ):
        task = TaskConfig(eval_sets=sets or {})
        rollout = RolloutConfig(
            eval=EvalConfig(**config),
            max_prompt_tokens=max_prompt_tokens,
            on_long_prompt=OnLongPrompt.skip,
        )
        chat = plain_chat()
        oracle, prompt_filter = FakeCompleter(answer), PromptFilter(chat, task, rollout)
        oracle.version = 3
        evaluator = evaluator_of(
            task,
            rollout.eval,
            [p for p in Questions(num_prompts, mixes).eval_prompts() if prompt_filter.accepts(p)],
            episode_source=EnvEpisodes(
                EpisodeRunner(oracle, chat, task, rollout), Questions(num_prompts).environment
            ),
            scorer=Yes(),
        )
        return evaluator, oracle

    return make


async def test_accuracy_of_each_task_of_a_mixture_is_reported(make) -> None:
    evaluator, _ = make(lambda sample: "yes" if asked(sample) in (0, 1, 2) else "no", mixes=True)
    report = await evaluator.run(3)
    assert (report.accuracy, report.accuracy_of) == (0.75, {"even": 1.0, "odd": 0.5})
    assert report.record()["accuracy/odd"] == 0.5


async def test_further_sets_are_sampled_and_reported_by_themselves(make) -> None:
    """The prompts 1 and 3 are a set of their own, each with four answers at temperature 0.8."""

    def answer(sample):
        number = int(sample.session.split(".")[2])
        return "half" if asked(sample) == 1 and number < 2 else ("no", "no", "yes", "no")[number]

    sets = {"odd": EvalSet(num_samples=4, temperature=0.8, full_score=0.5)}
    evaluator, oracle = make(answer, mixes=True, sets=sets, top_p=0.9)
    report = await evaluator.run(3)
    sampled = [(asked(sample) % 2, sample.sampling.temperature) for sample in oracle.asked]
    assert sorted(sampled) == [*2 * [(0, 0.0)], *8 * [(1, 0.8)]]
    assert {sample.sampling.top_p for sample in oracle.asked} == {0.9}
    assert len({sample.sample_id for sample in oracle.asked}) == 10
    record = report.record()
    # Of the four answers to 1 three are worth 0.5 or more, of those to 3 one is.
    assert (record["accuracy"], record["num_prompts"], record["pass_at_1"]) == (0, 2, 0)
    assert (record["accuracy/odd"], record["score_mean/odd"]) == (4 / 8, 3 / 8)
    assert record["num_prompts/odd"] == 2 and record["num_samples/odd"] == 4
    assert record["pass_at_1/odd"] == 1 / 2 and record["pass_at_4/odd"] == 1.0
    assert record["pass_at_2/odd"] == pytest.approx((1 + 1 / 2) / 2)
    assert {name for name in record if "/" in name} == {
        *(f"{name}_at_{k}/odd" for name in ("mean", "pass") for k in (1, 2, 4)),
        *("accuracy/odd", "score_mean/odd", "num_failed/odd", "num_unscored/odd"),
        *("num_prompts/odd", "num_samples/odd", "version_min/odd", "version_max/odd"),
    }


async def test_versions_of_a_set_are_not_those_of_the_others(make) -> None:
    evaluator, oracle = make(lambda sample: "yes", mixes=True, sets={"odd": EvalSet()})
    oracle.version_of = lambda sample: 5 if asked(sample) % 2 else 3
    record = (await evaluator.run(3)).record()
    assert (record["version_min"], record["version_max"]) == (3, 3)
    assert (record["version_min/odd"], record["version_max/odd"]) == (5, 5)


async def test_set_that_fails_costs_only_its_own_report(make) -> None:
    def answer(sample):
        return SampleFailed("no") if asked(sample) % 2 else "yes"

    evaluator, _ = make(answer, mixes=True, sets={"odd": EvalSet()})
    record = (await evaluator.run(3)).record()
    assert (record["accuracy"], record["num_prompts"]) == (1.0, 2)
    assert str(record["failed/odd"]).startswith("2 of 2 held-out prompts got no answer")
    assert [name for name in record if "/" in name] == ["failed/odd"]
    with pytest.raises(ValueError, match="every held-out prompt is longer and was skipped"):
        make(answer, 3, sets={"even": EvalSet()})


async def test_every_prompt_is_answered_greedily_after_the_rollouts_own_samples(make) -> None:
    evaluator, oracle = make(lambda sample: "yes" if asked(sample) == 2 else "no")
    report = await evaluator.run(3)
    assert (report.accuracy, report.score_mean, report.num_prompts) == (0.25, 0.25, 4)
    assert (report.version_min, report.version_max) == (3, 3)
    assert report.pass_at_k == report.mean_at_k == {1: 0.25}
    assert report.accuracy_of == {}
    assert sorted(asked(sample) for sample in oracle.asked) == [0, 1, 2, 3]
    for sample in oracle.asked:
        assert sample.sampling == SamplingParams(temperature=0.0)
        assert sample.priority is Priority.evaluation
        assert (sample.min_version, sample.engine) == (3, None)


async def test_several_answers_give_pass_at_k_and_mean_at_k(make) -> None:
    # Right answers of the prompts, in their order: 0, 1, 2, 4 of four.
    def answer(sample):
        number = int(sample.session.split(".")[2])
        return "yes" if number < (0, 1, 2, 4)[asked(sample)] else "no"

    evaluator, oracle = make(answer, num_samples=4, temperature=0.8, top_p=0.9, top_k=5)
    report = await evaluator.run(0)
    assert len(oracle.asked) == 16
    assert len({sample.sample_id for sample in oracle.asked}) == 16
    assert oracle.asked[0].sampling == SamplingParams(temperature=0.8, top_p=0.9, top_k=5)
    assert report.accuracy == 7 / 16
    assert report.mean_at_k == {1: 3 / 4, 2: (0 + 0.5 + 1 + 1) / 4, 4: 7 / 16}
    # Of two: 0, then 1 - C(3,2)/C(4,2) = 1/2, then 1 - C(2,2)/C(4,2) = 5/6, then 1.
    assert report.pass_at_k == pytest.approx({1: 7 / 16, 2: (0 + 1 / 2 + 5 / 6 + 1) / 4, 4: 3 / 4})
    record = report.record()
    assert (record["accuracy"], record["pass_at_4"], record["num_samples"]) == (7 / 16, 0.75, 4)
    assert record["mean_at_2"] == 0.625


@pytest.mark.parametrize("num_samples", [1, 2, 5])
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(num_samples: int) -> None:
    for num_right in range(num_samples + 1):
        answers = [i < num_right for i in range(num_samples)]
        for k in range(1, num_samples + 1):
            choices = [any(some) for some in combinations(answers, k)]
            expected = sum(choices) / len(choices)
            assert pass_at_k(num_samples, num_right, k) == pytest.approx(expected)


def test_sample_sizes_are_the_powers_of_two_and_all() -> None:
    assert sample_sizes(1) == [1]
    assert sample_sizes(4) == [1, 2, 4]
    assert sample_sizes(6) == [1, 2, 4, 6]


@pytest.mark.parametrize(
    ("num_failed", "num_prompts", "is_error"),
    [(1, 21, False), (1, 20, False), (1, 2, False), (1, 1, True), (2, 40, True)],
)
async def test_failed_prompts_are_counted_and_an_error_from_a_twentieth_on(
    make, num_failed: int, num_prompts: int, is_error: bool
) -> None:
    """One of several is never an error."""
    errors = SampleFailed("no engine"), TimeoutError("none in time")
    evaluator, _ = make(lambda s: errors[asked(s)] if asked(s) < num_failed else "yes", num_prompts)
    if is_error:
        with pytest.raises(EvaluationFailed, match=f"{num_failed} of {num_prompts} held-out"):
            await evaluator.run(3)
        return
    report = await evaluator.run(3)
    assert (report.num_prompts, report.num_failed) == (num_prompts - num_failed, num_failed)
    assert report.accuracy == 1.0


async def test_answers_that_could_not_be_scored_are_left_out_and_counted(make) -> None:
    said = ["yes", "maybe", "no", "broken", "open"]
    evaluator, _ = make(lambda sample: said[asked(sample)], 5)
    report = await evaluator.run(3)
    assert (report.num_unscored, report.num_prompts) == (2, 5)
    assert report.accuracy == report.score_mean == pytest.approx(1 / 3)
    assert report.pass_at_k == report.mean_at_k == {1: pytest.approx(1 / 3)}


async def test_sample_sizes_depend_on_the_scored_answers(make) -> None:
    # Prompt 0: one of its two answers is unscored, the other is right; prompt 1: one of two.
    said = {(0, 0): "maybe", (0, 1): "yes", (1, 0): "no", (1, 1): "yes"}
    evaluator, _ = make(
        lambda sample: said[asked(sample), int(sample.session.split(".")[2])],
        2,
        num_samples=2,
        temperature=1.0,
    )
    report = await evaluator.run(3)
    assert (report.num_unscored, report.accuracy) == (1, pytest.approx(2 / 3))
    assert report.pass_at_k == {1: 0.75, 2: 1.0} and report.mean_at_k == {1: 0.5, 2: 0.5}


@pytest.mark.parametrize(("said", "why"), [("maybe", "judge: away"), ("open", "judge did not")])
async def test_evaluation_without_a_single_score_is_an_error(make, said: str, why: str) -> None:
    evaluator, _ = make(lambda sample: said)
    with pytest.raises(EvaluationFailed, match=rf"no answer could be scored; .* {why}"):
        await evaluator.run(3)


@pytest.mark.parametrize(
    ("full_score", "accuracy"),
    [(1.001, 0.0), (1.0 + 1e-9, 0.25), (1.0, 0.25), (0.99, 0.5), (0.5, 0.75)],
)
async def test_full_score_is_a_setting_and_may_be_missed_by_a_rounding_error(
    make, full_score: float, accuracy: float
) -> None:
    said = ["yes", "nearly", "half", "no"]
    evaluator, _ = make(lambda sample: said[asked(sample)], full_score=full_score)
    report = await evaluator.run(3)
    assert report.accuracy == report.pass_at_k[1] == accuracy


async def test_version_older_than_requested_is_an_error(make) -> None:
    evaluator, oracle = make(lambda sample: "yes")
    with pytest.raises(RuntimeError, match="version 3 was served in an evaluation of version 4"):
        await evaluator.run(4)
    assert len(oracle.asked) == 4


async def test_held_engine_serves_the_whole_evaluation(make) -> None:
    evaluator, oracle = make(lambda sample: "yes")
    report = await evaluator.run(3, "engine-1")
    assert {sample.engine for sample in oracle.asked} == {"engine-1"}
    assert (report.version_min, report.version_max, report.num_prompts) == (3, 3, 4)


async def test_requests_of_a_failed_held_engine_go_elsewhere(make) -> None:
    def answer(sample):
        is_lost = sample.engine is not None and asked(sample) > 0
        return SampleFailed("engine-1 died") if is_lost else "yes"

    evaluator, oracle = make(answer, 300)
    report = await evaluator.run(3, "engine-1")
    assert (report.num_prompts, report.num_failed, report.accuracy) == (300, 0, 1.0)
    assert len({sample.sample_id for sample in oracle.asked}) == len(oracle.asked)
    # Those that had not begun yet did not try it any more.
    assert sum(sample.engine is not None for sample in oracle.asked) <= 128


async def test_held_engine_restarted_at_an_older_version_is_left(make) -> None:
    evaluator, oracle = make(lambda sample: "yes")
    oracle.version_of = lambda sample: 0 if sample.engine else 4
    report = await evaluator.run(3, "engine-1")
    assert (report.version_min, report.version_max, report.num_prompts) == (4, 4, 4)


async def test_prompts_that_are_too_long_are_left_out_and_all_of_them_are_refused(make) -> None:
    evaluator, _ = make(lambda sample: "yes", 12, max_prompt_tokens=3)
    assert (await evaluator.run(3)).num_prompts == 10  # "q10?" has four letters
    with pytest.raises(ValueError, match=r"rollout\.max_prompt_tokens"):
        make(lambda sample: "yes", max_prompt_tokens=2)
