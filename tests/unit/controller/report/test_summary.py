"""How a run ended: figures by hand, the RESULT line, the summary and the plots."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from buffer.results import BufferStats
from configs.load import load_config
from controller.metrics.history import Record
from controller.report.plots import PLOTS, figures
from controller.report.result import RunResult, result_line, summarize
from controller.report.summary import summary_markdown
from controller.run_dir import EXPERIMENT_FILE
from tests.support.controller.records import STATS, buffer_record, run_records, step_record

REQUIRED = """
run wall_s steps eval_before eval_after reward_first reward_last groups_pushed groups_trained
groups_dropped groups_ready groups_leased max_staleness max_staleness_trained versions_published
engine_pause_s snapshot_s convergence_s weights_wire_bytes trainer_wait_s tokens_generated
tokens_trained
"""


def result_of(records: list[Record], stats: BufferStats = STATS) -> RunResult:
    last = buffer_record(1022.0, stats, tokens_generated=100_000.0)
    config = load_config(["run.seed=3"])
    return summarize(run="night", config=config, records=[*records, last], wall_s=170.0)


def summary_of(result: RunResult) -> str:
    return summary_markdown(Path("/nowhere"), result, load_config([]))


def test_result_agrees_with_the_records_by_hand() -> None:
    result = result_of(run_records())
    assert (result.eval_before, result.eval_after, result.eval_size) == (0.31, 0.92, 64)
    assert result.reward_first == pytest.approx(0.5 / 20), "mean of steps 0 and 1"
    assert result.reward_last == pytest.approx(18.5 / 20), "mean of steps 18 and 19"
    assert (result.groups_pushed, result.groups_trained) == (2260, 1600 + 592)
    assert (result.groups_ready, result.groups_leased, result.groups_quarantined) == (32, 16, 0)
    assert result.groups_dropped == {"stale": 20} and result.is_conserved
    assert (result.versions_published, result.tokens_trained) == (137, 70_000)
    assert result.weights.publishes_delta == 10
    assert result.trainer_wait_s == pytest.approx(20 * 0.25)
    train_s = 19 + 0.25 + 0.5
    assert result.train_s == pytest.approx(train_s)
    assert result.trainer_wait_share == pytest.approx(5 / train_s)
    assert result.tokens_per_s == pytest.approx(100_000 / train_s)
    assert result.ratio_max_abs_dev == 0.5
    assert result.logprob_diff_max == pytest.approx(2e-4)
    assert result.staleness_mean == pytest.approx(1.25)


def test_result_of_a_mixture_has_each_task() -> None:
    by_task = {
        "task/sums/groups": 60.0,
        "task/org/words/groups": 20.0,
        "task/org/words/reward": 0.25,
    }
    records = []
    for record in run_records():
        more = {"step": {**by_task, "task/sums/reward": record.t}, "eval": {"accuracy/sums": 0.5}}
        values = {**record.values, **more.get(record.kind, {})}
        records.append(replace(record, values=values))
    result = result_of(records)
    times = [record.t for record in records if record.kind == "step"]
    sums, words = result.by_task["sums"], result.by_task["org/words"]
    assert (sums.groups_trained, words.groups_trained) == (60 * len(times), 20 * len(times))
    assert (sums.reward_first, sums.reward_last) == (sum(times[:2]) / 2, sum(times[-2:]) / 2)
    assert (sums.eval_before, words.eval_after) == (0.5, None)
    assert json.loads(result_line(result)[7:])["by_task"]["org/words"]["reward_last"] == 0.25
    text = summary_of(result)
    assert "| of sums: before, after | 50%, 50% |" in text
    assert f"| of org/words: first, last, groups | 0.25, 0.25, {20 * len(times)} |" in text
    assert result_of(run_records()).by_task == {}


def test_result_has_the_first_and_the_last_numbers_of_the_user_s_program() -> None:
    own = [
        Record(t=1000.0, kind="eval_command", values={"step": 5, "metric/gsm8k": 0.25}),
        Record(t=1005.0, kind="eval_command", values={"step": 10, "metric/gsm8k": 0.5}),
        Record(t=1010.0, kind="eval_command", values={"step": 15, "result": "failed"}),
    ]
    result = result_of([*run_records(), *own])
    assert result.eval_command == {"gsm8k": (0.25, 0.5)}
    assert "| gsm8k by rollout.eval.command: first, last | 0.25, 0.5 |" in summary_of(result)


def test_result_line_is_json_with_every_field() -> None:
    line = result_line(result_of(run_records()))
    assert "\n" not in line
    word, _, text = line.partition(" ")
    assert word == "RESULT"
    fields = json.loads(text)
    assert fields.keys() >= set(REQUIRED.split()) and "weights" not in fields
    dropped = sum(fields["groups_dropped"].values())
    places = ("groups_trained", "groups_quarantined", "groups_ready", "groups_leased")
    assert fields["groups_pushed"] == sum(fields[place] for place in places) + dropped


def test_failed_evaluations_are_counted_and_a_failed_last_one_leaves_no_accuracy() -> None:
    records = run_records()
    between = Record(t=1010.0, kind="eval_failed", values={"version": 10, "why": "lost"})
    result = result_of([*records, between])
    assert (result.evals_failed, result.eval_before, result.eval_after) == (1, 0.31, 0.92)
    num_steps = load_config([]).trainer.num_steps
    last = Record(t=1030.0, kind="eval_failed", values={"version": num_steps, "why": "lost"})
    result = result_of([*records, last])
    assert (result.eval_before, result.eval_after) == (0.31, None)
    assert "| evaluations that failed | 1 |" in summary_of(result)


def test_share_of_logprobs_that_are_not_finite_is_by_version() -> None:
    seen = [({"7": 100, "8": 20}, {"7": 1}), ({"8": 30}, {}), ({"8": 50, "9": 4}, {"8": 5, "7": 1})]
    records = [
        Record(
            t=float(at),
            kind="engine",
            values={"logprobs": json.dumps(all_of), "logprobs_not_finite": json.dumps(bad)},
        )
        for at, (all_of, bad) in enumerate(seen)
    ]
    assert result_of(records).logprobs_not_finite == {7: 0.02, 8: 0.05}
    assert result_of(records[1:2]).logprobs_not_finite == {}


def test_run_without_steps_has_a_result_too() -> None:
    result = result_of([])
    fields = json.loads(result_line(result).removeprefix("RESULT "))
    assert fields["steps"] == 0
    assert fields["eval_after"] is fields["reward_first"] is fields["tokens_per_s"] is None
    assert "not measured" in summary_of(result)
    assert figures([]) == {}


def test_summary_has_the_improvement_the_plots_and_the_command(tmp_path: Path) -> None:
    records = run_records()
    result = result_of(records)
    for name in (*PLOTS, EXPERIMENT_FILE):
        (tmp_path / name).touch()
    summary = summary_markdown(tmp_path, result, load_config(["run.seed=3"]))
    assert "from 31% to 92% (+61 points) in 20 steps" in summary
    assert "| wall time | 2m 50s |\n| training time (first step to last) | 20 s |" in summary
    assert "| trainer waited for rollouts (share of training) | 5.0 s (25%) |" in summary
    assert "| engine pause per commit | 100 ms (median), 700 ms (longest) |" in summary
    assert "| receivers and engines: excluded | 1 |" in summary
    assert f"    make launch EXPERIMENT={tmp_path / EXPERIMENT_FILE}\n" in summary
    assert "task: reasoning_gym, spell_backward" in summary
    assert all(f"]({name})" in summary for name in PLOTS)
    assert "| the sum holds | yes |" in summary
    assert "**NO" in summary_of(replace(result, is_conserved=False))


def test_bounds_in_force_are_listed_after_a_change() -> None:
    records = []
    for step, bound in enumerate([2, 2, 4, 4, 1]):
        records.append(Record(t=step, kind="buffer", values={"max_staleness": bound}))
        records.append(step_record(step, 1000.0 + step))
    stats = replace(STATS, max_staleness=1, max_staleness_largest=4, max_staleness_trained=4)
    result = result_of(records, stats)
    assert (result.max_staleness, result.max_staleness_trained) == (4, 4)
    assert result.max_staleness_by_step == {1: 2, 3: 4, 5: 1}
    summary = summary_of(result)
    assert "| largest staleness trained, and the largest bound in force | 4 of 4 |" in summary
    assert "| the bound over the run | 2 from step 1, 4 from step 3, 1 from step 5 |" in summary


def test_changes_of_live_settings_are_listed_with_who_made_them() -> None:
    values = {"setting": "rollout.group_size", "before": "8", "after": "16", "who": "ann@host"}
    records = [step_record(0, 1000.0), Record(t=1001.0, kind="tuned", values=values)]
    result = result_of([*records, step_record(1, 1002.0)])
    assert result.changes == ["after step 1: rollout.group_size 8 -> 16, by ann@host"]
    assert f"| changed | {result.changes[0]} |" in summary_of(result)


def test_plots_without_data_are_left_out() -> None:
    assert figures(run_records()).keys() == PLOTS.keys()
    steps = [record for record in run_records() if record.kind == "step"]
    assert figures(steps).keys() == PLOTS.keys() - {"buffer.png", "weights.png"}
