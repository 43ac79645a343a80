"""Counters of the workers as rows, a line and metrics."""

from __future__ import annotations

from controller.metrics.counters import panel_line, summary_rows, wasted_fraction
from controller.metrics.prometheus_metrics import counter_families

COUNTERS = {
    "tokens_generated": 2000.0,
    "tokens_wasted": 50.0,
    "completed:<=1k": 4.0,
    "completed_s:<=1k": 10.0,
    "completed:<=256": 1.0,
    "completed_s:<=256": 0.5,
    "given_up:>64k": 2.0,
    "given_up_s:>64k": 90.0,
    "groups_postponed": 3.0,
    "groups_stopped": 5.0,
    "episodes_ended:max_turns": 7.0,
    "prompt_tokens:engine-0": 300.0,
    "prompt_tokens:engine-1": 100.0,
    "prefilled_tokens:engine-0": 50.0,
    "queue_within:0.1": 198.0,
    "queue_within:3": 1.0,
    "queue_within:inf": 1.0,
    "queue_s:engine-0": 30.0,
    "queue_s:engine-1": 10.0,
    "preemptions:engine-1": 2.0,
    "turns": 21.0,
    "branches": 7.0,
}


def test_summary_lists_only_nonzero_counters_and_lengths_shortest_first() -> None:
    assert list(summary_rows(COUNTERS, 0)) == [
        ("tokens that never reached the trainer: failed, stopped or too old", "2.5%"),
        ("prompt tokens found in the prefix cache", "87.5%"),
        ("wait of a request for a slot at an engine", "200 ms on average, 99% within 100 ms"),
        ("requests that lost their KV cache for lack of memory", "2"),
        ("turns per episode", "3.00"),
        ("branches per episode", "1.00"),
        ("groups whose longest sample had <=256 tokens", "1 completed, 500 ms each; 0 given up"),
        ("groups whose longest sample had <=1k tokens", "4 completed, 2.5 s each; 0 given up"),
        ("groups whose longest sample had >64k tokens", "0 completed; 2 given up"),
        ("groups stopped in favour of others", "3"),
        ("groups that the end of the run or of their worker cut short", "5"),
    ]
    assert not list(summary_rows({}, 0)) and wasted_fraction({}, 0) is None


def test_summary_says_what_filtering_threw_away() -> None:
    rows = dict(summary_rows({"tokens_generated": 4000.0, "tokens_filtered": 3000.0}, 0))
    assert rows["tokens that never reached the trainer: failed, stopped or too old"] == "0.0%"
    assert rows["tokens that were filtered out, of groups with equal rewards"] == "75.0%"


def test_tokens_that_the_buffer_dropped_are_wasted_too() -> None:
    assert wasted_fraction(COUNTERS, 150) == 0.1
    assert wasted_fraction(COUNTERS, 9999) == 1.0  # the buffer tells its counts first
    assert "10.0% of tokens wasted" in panel_line(COUNTERS, 150)


def test_panel_line_is_empty_without_notable_counters() -> None:
    assert panel_line({"tokens_generated": 100.0, "completed:<=256": 9.0}, 0) == ""
    assert panel_line(COUNTERS, 0) == "2.5% of tokens wasted, 3 postponed"


def test_epochs_of_the_workers_are_a_row_and_stand_in_the_line() -> None:
    for counters, words in (
        ({"epochs_begun:0": 3.0}, "3"),
        ({"epochs_begun:0": 3.0, "epochs_begun:10": 2.0, "epochs_begun:2": 2.0}, "2 to 3"),
        (
            {"epochs_begun:0/words": 1.0, "epochs_begun:0/sums": 9.0, "epochs_begun:1/sums": 10.0},
            "sums 9 to 10, words 1",
        ),
    ):
        assert dict(summary_rows(counters, 0)) == {"epoch of the task's problems": words}
        assert panel_line(counters, 0) == f"epoch {words}"


def test_every_counter_is_a_metric() -> None:
    samples = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in counter_families("night", COUNTERS)
        for sample in family.samples
    }
    assert samples["rollout_tokens_wasted_total", ("night",)] == 50
    assert samples["rollout_workers_restarted_total", ("night",)] == 0
    assert samples["rollout_groups_completed_total", ("night", "<=1k")] == 4
    assert samples["rollout_groups_given_up_total", ("night", ">64k")] == 2
    assert samples["rollout_prompt_tokens_total", ("night", "engine-1")] == 100
    assert samples["rollout_episodes_total", ("night", "max_turns")] == 7
    assert samples["rollout_preemptions_total", ("night", "engine-1")] == 2
    assert samples["rollout_turns_total", ("night",)] == 21
    name = "rollout_request_queue_seconds"
    assert samples[f"{name}_sum", ("night",)] == 40 and samples[f"{name}_count", ("night",)] == 200
    for bound, number in (("0.1", 198), ("3.0", 199), ("+Inf", 200)):
        assert samples[f"{name}_bucket", ("night", bound)] == number
    assert samples["rollout_request_first_token_seconds_count", ("night",)] == 0
