"""Alarms of a run that stopped learning, on made-up histories."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import load_config
from controller.metrics.history import Record
from controller.report.panel import step_line
from controller.report.result import summarize
from controller.report.summary import summary_markdown
from controller.watch import learning
from controller.watch.learning import learning_alarms
from controller.watch.run_view import RunView
from tests.support.controller.records import settings_of_run, step_record
from tests.support.repository import ROOT


def history(num_steps: int = 40, **series: list[float]) -> list[Record]:
    """Steps in which each named number has the given values, one after the other."""
    return [
        step_record(step, 1000.0 + step, **{name: values[step] for name, values in series.items()})
        for step in range(num_steps)
    ]


def words(steps: list[Record]) -> list[str]:
    return [alarm.words for alarm in learning_alarms(steps)]


def test_limits_of_the_alarms_are_on_the_page() -> None:
    page = (ROOT / "docs/watching.md").read_text()
    section = page.partition("## When a run stops learning")[2].partition("\n## ")[0]
    for limit in (
        f"last {learning.WINDOW} steps",
        f"{2 * learning.WINDOW} steps |",
        f"last {learning.MIN_STEPS_WITHOUT_VARIANCE} steps",
        f"below {learning.COLLAPSED:.0%} of its best",
        f"more than {learning.MUCH_LONGER:g} times",
        f"at least {learning.MANY_TRUNCATED:.0%} of the answers",
        f"above {learning.LARGE_LOGPROB_DIFF:g} nats",
    ):
        assert limit in section, limit


def test_run_that_learns_raises_no_alarm_after_any_step() -> None:
    rising = [0.1 + step / 50 for step in range(40)]
    longer = [10.0 + step for step in range(40)]
    steps = history(reward_mean=rising, response_length_mean=longer)
    assert not any(learning_alarms(steps[:number]) for number in range(41))


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.8), (-1.0, -0.1)])
def test_collapsed_reward_is_reported_with_its_best(low: float, high: float) -> None:
    rewards = [low + (high - low) * step / 20 for step in range(20)] + [high] * 10
    fallen = [low + 0.05 * (high - low)] * 10
    assert not words(history(30, reward_mean=rewards))
    (alarm,) = words(history(40, reward_mean=rewards + fallen))
    assert alarm.startswith(f"reward collapsed from {high:.2f} to {fallen[-1]:.2f}")


LONGER = [20.0 + 2 * step for step in range(40)]
BETTER = [step / 40 for step in range(40)]
CUT_OFF = "of the answers are cut off at the limit"


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        ({"zero_variance_fraction": [0.5] * 37 + [1.0] * 3}, "all groups lack variance (3 steps)"),
        ({"zero_variance_fraction": [0.5] * 38 + [1.0] * 2}, None),
        ({"num_empty_updates": [0.0] * 39 + [1.0]}, "no gradient, weights unchanged (1 step)"),
        # The update is a later step's.
        ({"num_updates": [1.0] * 39 + [0.0], "num_tokens": [90.0] * 40}, None),
        (
            {"num_updates": [1.0] * 39 + [0.0], "num_tokens": [90.0] * 39 + [0.0]},
            "no gradient, weights unchanged (1 step)",
        ),
        ({"num_skipped_updates": [0.0] * 38 + [1.0] * 2}, "a gradient was not finite (2 steps)"),
        (
            {
                "num_skipped_updates": [0.0] * 39 + [1.0],
                "not_finite_groups": ["[]"] * 39 + ['["g-7"]'],
            },
            "a gradient was not finite (1 step, last of g-7)",
        ),
        ({"response_length_mean": LONGER}, "answers grew from 29 to 89 tokens without reward"),
        ({"response_length_mean": LONGER, "reward_mean": BETTER}, None),
        ({"truncated_fraction": [0.1] * 20 + [0.7] * 20}, f"70% {CUT_OFF} (10% at first)"),
        ({"truncated_fraction": [0.4] * 10 + [0.5] * 30}, f"50% {CUT_OFF} (40% at first)"),
        ({"truncated_fraction": [0.9] * 20 + [0.4] * 20}, None),
        (
            {"logprob_diff_mean": [0.01] * 30 + [0.5] * 10},
            "engines and trainer disagree by 0.50 nats per token",
        ),
        ({"logprob_diff_mean": [0.07] * 40, "logprob_diff_bound": [1.0] * 40}, None),
        (
            {"logprob_diff_mean": [0.07] * 40, "logprob_diff_bound": [0.1] * 40},
            "engines and trainer disagree by 0.07 nats per token",
        ),
    ],
)
def test_alarm_names_what_keeps_the_run_from_learning(
    series: dict[str, list[float]], expected: str | None
) -> None:
    assert words(history(**series)) == ([] if expected is None else [expected])


def test_run_whose_answers_are_all_cut_off_from_the_start_hears_of_the_limit() -> None:
    steps = history(10, truncated_fraction=[1.0] * 10, num_empty_updates=[1.0] * 10)
    [first] = learning_alarms(steps[:1])
    assert first.words == "no gradient, weights unchanged (1 step)"
    assert first.advice.startswith("100% of the answers are cut off at the limit, of which algorit")
    [_, later] = learning_alarms(steps)
    assert later.words == "100% of the answers are cut off at the limit (100% at first)"
    for alarm in (first, later):
        assert "rollout.max_response_tokens" in alarm.advice and "mask_truncated" in alarm.advice


def test_step_without_gradient_blames_rewards_that_are_all_equal_and_says_so() -> None:
    steps = history(
        9, num_empty_updates=[0.0] * 8 + [1.0], zero_variance_fraction=[0.2] * 8 + [1.0]
    )
    [found] = learning_alarms(steps)
    assert found.part == "rewards" and found.advice.startswith("groups with equal rewards teach")
    steps = history(9, num_empty_updates=[0.0] * 8 + [1.0], zero_variance_fraction=[0.2] * 9)
    assert [one.part for one in learning_alarms(steps)] == ["trainer"]


def test_step_line_and_summary_show_alarms(tmp_path: Path) -> None:
    steps = history(
        reward_mean=[0.6] * 20 + [0.0] * 20,
        zero_variance_fraction=[0.25] * 25 + [1.0] * 15,
        num_empty_updates=[0.0] * 25 + [1.0] * 15,
    )
    view = RunView(run="night", config=settings_of_run(40), started=990.0)
    for step in steps:
        view.apply(step)
    line = step_line(view)
    assert "no gradient, weights unchanged (15 steps) | all groups lack variance (15" in line
    assert "reward collapsed from 0.60 to 0.00" in line
    result = summarize(run="night", config=load_config([]), records=steps, wall_s=9.0)
    assert result.steps_without_gradient == 15 and len(result.alarms) == 3
    summary = summary_markdown(tmp_path, result, load_config([]))
    assert "the mean reward is 0.00: the prompts are too hard" in summary
    assert "**Reward collapsed from 0.60 to 0.00. Go back" in summary
    assert "| steps without a gradient, which changed nothing | 15 |" in summary
