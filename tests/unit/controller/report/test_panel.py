"""The view of a run, the panel drawn from it, and the lines where there is no terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from configs.load import load_config
from controller.metrics.history import Record, buffer_values
from controller.metrics.weights import WeightsView
from controller.report.panel import Panel, render, sparkline, step_line
from controller.watch.autotune import Move, find_move
from controller.watch.finding import Level
from controller.watch.remarks import buffer_findings, engine_findings
from controller.watch.run_view import RunView
from controller.watch.verdict import wanted_engines
from tests.support.controller.records import (
    STATS,
    eval_record,
    event_record,
    settings_of_run,
    step_record,
    weights_records,
)


def trained_view(num_steps: int = 20) -> RunView:
    view = RunView(run="night", config=settings_of_run(40), started=990.0)
    view.apply(Record(t=1000.0, kind="phase", values={"phase": "training"}))
    view.apply(eval_record(0, 1000.0, 0.31))
    for step in range(num_steps):
        t = 1000.0 + step / 2
        view.apply(step_record(step, t, reward=0.3 + step / 40))
        waits = {("trainer", "rollout"): step * 0.3, ("rollout", "trainer"): step * 0.02}
        view.observe(
            t, replace(STATS, trainer_version=step), waits, {"tokens_generated": step * 500}
        )
        for record in weights_records(step, t - 1.0):
            view.apply(record)
    view.apply(eval_record(20, 1010.0, 0.74))
    return view


def text_of(view: RunView, width: int = 100) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(render(view, width))
    return capture.get()


def test_view_knows_pace_and_time_left() -> None:
    view = trained_view()
    assert view.step == 20
    assert view.seconds_per_step == pytest.approx(0.5)
    assert view.eta_s == pytest.approx(10.0)
    assert view.tokens_per_s == pytest.approx(1000.0)
    assert view.elapsed_s == pytest.approx(20.0)
    assert view.wait_fractions.trainer_for_rollout == pytest.approx(0.6)


def test_failed_evaluation_is_shown_until_the_next_one() -> None:
    view = trained_view()
    failed = {"version": 25, "why": "worker-0 failed: no engine"}
    view.apply(Record(t=1011.0, kind="eval_failed", values=failed))
    message = "The evaluation of version 25 failed"
    assert message in text_of(view) and "no engine" in text_of(view)
    view.apply(eval_record(30, 1012.0, 0.8))
    assert message not in text_of(view)


def test_numbers_of_the_user_s_program_are_shown_until_it_fails() -> None:
    view = trained_view()
    numbers = {"step": 20, "metric/gsm8k": 0.625, "metric/mmlu": 41}
    view.apply(Record(t=1011.0, kind="eval_command", values=numbers))
    assert "gsm8k 0.625, mmlu 41 (step 20)" in text_of(view)
    view.apply(Record(t=1012.0, kind="eval_command", values={"step": 30, "why": "exit code 1"}))
    assert "gsm8k" not in text_of(view) and "exit code 1 (step 30)" in text_of(view)


def test_panel_shows_progress_buffer_and_waits() -> None:
    text = text_of(trained_view())
    words = "night|training|step 20 of 40|about 10 s left|from 0.30|74%|from 31%|9 ready|15 ready"
    words += "|1k tokens/s|900 ms to every engine|100 ms per commit|Rollouts are the bottleneck"
    words += "|2,260 pushed = 2,192 trained + 20 dropped (20 stale) + 32 ready + 16 leased"
    assert [shown for shown in words.split("|") if shown not in text] == []
    assert "add up" not in text


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"pushed": 2261}, ["does NOT add up"]),
        ({}, ["versions 136 to 137 (1 behind)"]),
        ({"max_staleness": 0}, ["staleness 2"]),
        (
            {"pushed": 2263, "quarantined": 3},
            [
                "+ 3 quarantined",
                "3 groups are in quarantine, kept but not trained. `make quarantine` says why.",
            ],
        ),
        (
            {"engine_versions": {"engine-0": 134}},
            [
                "engine-0 is 3 versions behind. Admission follows the slowest engine.",
                "engine-1 is lost. It restarts, or waits for room; logs/engine-1.log may say why.",
            ],
        ),
        (
            {"engine_versions": {}, "engines_gone": True},
            ["none serves", "No engine serves. Nothing is admitted until one is back;"],
        ),
    ],
)
def test_state_of_the_buffer_and_the_engines_is_shown(
    changes: dict[str, Any], shown: list[str]
) -> None:
    view = trained_view()
    view.apply(event_record("engine_lost", "engine-1"))
    view.observe(1020.0, replace(STATS, **changes), {}, {})
    text = text_of(view, width=140)
    assert all(words in text for words in shown), text
    assert ("add up" in text) == (changes == {"pushed": 2261})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"capacity_groups": 48}, "is full: 48 groups, buffer.capacity_groups=48. The trainer"),
        ({"capacity_bytes": 20_000}, "is full: 19.5 KiB, buffer.capacity_bytes=20000. The trainer"),
        (
            {"capacity_groups": 48, "push_blocked": 2, "push_blocked_s": 75.0},
            "buffer.capacity_groups=48 (2 pushes waited 1m 15s so far). The trainer is behind",
        ),
        (
            {"capacity_groups": 48, "push_blocked": 1, "push_blocked_s": 2.5},
            "buffer.capacity_groups=48 (1 push waited 2.5 s so far).",
        ),
        ({"capacity_groups": 49, "push_blocked": 1, "push_blocked_s": 2.5}, ""),
        ({"capacity_groups": 49, "capacity_bytes": 20_001}, ""),
    ],
)
def test_pushes_that_wait_for_capacity_are_a_remark(
    change: dict[str, float], expected: str
) -> None:
    found = buffer_findings(replace(STATS, **change), 0.0, "")  # type: ignore[arg-type]
    assert len(found) == bool(expected) and expected in "".join(one.sentence for one in found)


def test_engine_that_gets_few_versions_is_no_remark_for_those_that_it_skips() -> None:
    late = replace(STATS, trainer_version=STATS.trainer_version + 2)
    (found,) = engine_findings(late, WeightsView())
    assert "3 versions behind" in found.sentence
    assert engine_findings(late, WeightsView(publish_every=3)) == []


@pytest.mark.parametrize(
    ("usual_s", "late_s", "level"),
    [(0.3, 0.3, Level.hint), (0.3, 5.0, Level.alarm), (2.0, 0.0, Level.alarm)],
)
def test_engine_too_far_behind_is_an_alarm_once_that_lasts(
    usual_s: float, late_s: float, level: Level
) -> None:
    far = replace(STATS, engine_versions={"engine-0": STATS.trainer_version - 3})
    (found,) = engine_findings(far, WeightsView(), usual_s, late_s)
    assert found.level is level


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_panel_fits_every_width(width: int) -> None:
    assert {len(line) for line in text_of(trained_view(), width).splitlines()} == {width}


def test_panel_says_why_autotune_leaves_things_as_they_are() -> None:
    view = trained_view()
    view.config = load_config(["buffer.autotune={max_staleness: 2}", "rollout.num_engines=3"])
    shown = " ".join(text_of(view, 300).split())
    assert "max_staleness between 1 and 2; it stays at 2: 2 of 3 engines serve" in shown
    view.config.rollout.num_engines = 2
    assert "it stays at 2: the trainer waited" in " ".join(text_of(view, 300).split())


def test_panel_shows_no_move_of_autotune_that_may_never_be_made() -> None:
    view = trained_view()
    auto = "buffer.autotune={steps: 5, max_staleness: 2, max_engines: 4}"
    view.config, view.phase = load_config([auto, "rollout.num_engines=2"]), "training"
    view.stats = replace(STATS, running=48, ready=0, leased=0)
    for t in range(1, 13):
        view.apply(step_record(20 + t, view.now + 1, lease_wait_s=0.6, ess=0.9))
        view.waits.add(view.now, {("trainer", "rollout"): 0.6 * t})
    assert isinstance(find_move(view, wanted_engines), Move)
    told = " ".join(text_of(view, 300).split())
    assert "rollout.num_engines 2 ->" not in told and "it stays at 2: the trainer waited" in told
    view.config = load_config(
        ["buffer.autotune={steps: 5, max_staleness: 4}", "rollout.num_engines=2"]
    )
    assert isinstance(find_move(view, wanted_engines), Move)
    assert "max_staleness between 1 and 4 " in " ".join(text_of(view, 300).split()), "once refused"


def test_panel_can_be_drawn_before_anything_is_known() -> None:
    text = text_of(RunView(run="night", config=settings_of_run(40), started=0.0))
    assert "step 0 of 40" in text
    assert "not started yet" in text


@pytest.mark.parametrize("is_terminal", [False, True])
def test_panel_without_a_terminal_or_disabled_prints_one_line_per_step(is_terminal: bool) -> None:
    out = io.StringIO()
    view = trained_view()
    console = Console(file=out, width=100, force_terminal=is_terminal)
    with Panel(enabled=not is_terminal, console=console) as panel:
        panel.show(view)
        panel.show(view)
        view.apply(step_record(20, 1011.0))
        panel.show(view)
        view.apply(Record(t=1012.0, kind="resumed", values={"step": 19}))
        panel.show(view)
        view.apply(step_record(19, 1013.0))
        panel.show(view)
    lines = out.getvalue().splitlines()
    steps = ["step 20/40", "step 21/40", "step 20/40"]
    assert [line.split(" | ")[0] for line in lines] == steps


def test_rates_of_a_run_that_goes_on_leave_out_the_time_between() -> None:
    view = RunView(run="night", config=settings_of_run(40), started=0.0)
    for t, tokens in ((0.0, 0), (10.0, 1000), (500.0, 1000), (510.0, 2000)):
        if t == 500.0:
            view.apply(Record(t=499.0, kind="resumed", values={"step": 19}))
        waits = {"wait_s.trainer.rollout": t / 2}
        view.apply(Record(t=t, kind="buffer", values={"count.tokens_generated": tokens, **waits}))
    assert view.tokens_per_s == 100
    assert view.wait_fractions.trainer_for_rollout == 0.5


def test_step_line_says_the_essentials() -> None:
    assert step_line(trained_view()) == (
        "step 20/40 | reward 0.77 (first 0.30) | eval 74% (first 31%, at version 20) | "
        "staleness 1.2 (max 2) | ready 32 | 1k tokens/s | 10 s left"
    )
    view = trained_view()
    del view.evals[1:]
    assert "| eval 31% (at version 0) |" in step_line(view)
    view.counters = {"rewards_failed": 3.0}
    assert step_line(view).endswith("| 3 episodes without full reward, logs/worker-*.log say why")


def test_step_of_the_start_prints_one_line_with_its_detail_or_its_failure() -> None:
    out = io.StringIO()
    panel = Panel(console=Console(file=out, width=100))
    with panel.progress("Redis server") as say:
        say("port 1234")
    with pytest.raises(RuntimeError, match="no room"), panel.progress("engines"):
        raise RuntimeError("no room")
    done, failed = out.getvalue().splitlines()
    assert done.startswith("✓ Redis server") and done.endswith("0.0 s   port 1234")
    assert failed.startswith("✗ engines")


def test_panel_on_a_terminal_is_drawn_in_place_and_restores_the_cursor() -> None:
    out = io.StringIO()
    with Panel(console=Console(file=out, width=100, height=50, force_terminal=True)) as panel:
        with panel.progress("Redis server"):
            pass
        panel.show(trained_view())
        panel.say("a line above it")
    text = out.getvalue()
    assert "a line above it" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"


def test_commands_on_the_panel_name_the_run() -> None:
    view = trained_view()
    view.named = " RUN=night"
    assert "Try `make scale ROLLOUT=4 RUN=night`" in " ".join(text_of(view, 300).split())


def test_sparkline_keeps_the_shape_at_any_width() -> None:
    assert sparkline([0.0, 0.5, 1.0], width=8) == "▁▅█"
    assert sparkline([0.0] * 50 + [1.0] * 50, width=4) == "▁▁██"
    assert sparkline([0.0, 0.0], width=4) == "▁▁"


def test_buffer_record_keeps_the_waits() -> None:
    waits = {("trainer", "rollout"): 3.5, ("rollout", "trainer"): 1.0}
    values = buffer_values(STATS, waits, {"tokens_generated": 7})
    assert Record(t=0.0, kind="buffer", values=values).waits == waits
    assert values["limit"] == 48
    assert values["engine_lag"] == 1
