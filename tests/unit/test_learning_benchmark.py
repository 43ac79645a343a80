"""The benchmark of schedules without launches: their settings, and what it makes of runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.loops import autotune, launches
from benchmarks.loops.cells import path_of
from benchmarks.loops.policies import BASELINE, POLICIES
from benchmarks.loops.work import CALCULATOR, QUICKSTART, WORKS, settings_of, write_prompts
from configs.load import load_config
from controller.metrics.history import Record
from host.user_code import load_callable
from tests.support.repository import ROOT


@pytest.mark.parametrize("policy", POLICIES)
def test_settings_of_a_policy_are_accepted_by_each_work(policy: str) -> None:
    for work in (QUICKSTART, CALCULATOR):
        load_config([*work.settings, *POLICIES[policy], "rollout.eval_every=0"], work.experiment)


@pytest.mark.parametrize("name", WORKS)
def test_settings_of_a_work_are_accepted_with_the_model_that_it_begins_with(
    name: str, tmp_path: Path
) -> None:
    load_config(launches.settings_from_model(WORKS[name], tmp_path, 0), WORKS[name].experiment)


@pytest.mark.parametrize("name", autotune.WORKS)
def test_settings_beside_autotune_are_accepted_by_each_work(name: str, tmp_path: Path) -> None:
    write_prompts(tmp_path)
    for settings in autotune.SETTINGS.values():
        work = autotune.WORKS[name]
        load_config([*settings_of(work, tmp_path), *settings], work.experiment)


def test_answers_of_spans_are_long_for_a_few_and_their_reward_is_by_place(tmp_path: Path) -> None:
    write_prompts(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    lengths = sorted(len(row["answer"]) for row in rows)
    assert lengths[0] <= 2 and 9 <= lengths[5000] <= 11 and 50 <= lengths[-100] <= lengths[-1] == 60
    score = load_callable(f"{tmp_path}/rewards.py:spans", "task.rewards")
    scores = [score(SimpleNamespace(text=r["question"]), SimpleNamespace(**r)) for r in rows]
    assert 3500 < scores.count(1.0) < 5500, "the others are backward"
    prompt = SimpleNamespace(text="8-c=")
    assert score(prompt, SimpleNamespace(answer="89ab")) == 0.8
    assert score(prompt, SimpleNamespace(answer="89abcdefgh")) == 0.5


def test_step_exceeds_the_bound_if_it_is_older_than_each_that_was_in_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def records(*staleness: int) -> list[Record]:
        changes = {12.5: 1, 14.0: 6}
        return [
            Record(t=0.0, kind="buffer", values={"max_staleness": 3}),
            *(Record(t=t, kind="tuned", values={"after": str(k)}) for t, k in changes.items()),
            *(
                Record(t=11.0 + step, kind="step", values={"step": step, "staleness_max": k})
                for step, k in enumerate(staleness)
            ),
        ]

    found = {"seconds": [1.0, 2.0, 3.0, 4.0, 5.0]}
    monkeypatch.setattr(launches, "read_run", lambda run: found)
    monkeypatch.setattr(autotune, "read_metrics", lambda path: records(3, 3, 6, 6, 6))
    read = autotune.read(Path("run"))
    assert read["excess"] == 0 and read["bounds"] == [(2.5, 1), (4.0, 6)]
    for ages, excess in (((4, 0, 0, 0, 0), 1), ((0, 0, 7, 0, 0), 1), ((0, 0, 0, 0, 9), 3)):
        monkeypatch.setattr(autotune, "read_metrics", lambda path, ages=ages: records(*ages))
        assert autotune.read(Path("run"))["excess"] == excess


def test_page_names_all_settings_of_each_policy_of_others() -> None:
    lines = (ROOT / "docs" / "performance.md").read_text().splitlines()
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    for policy, settings in POLICIES.items():
        if not policy.startswith("ours"):
            assert [one for one in settings if f"`{one}`" not in rows[policy]] == [], policy


def run_of(step_s: float, rewards: list[float]) -> dict[str, Any]:
    number = len(rewards)
    return {
        "seconds": [step_s * (step + 1) for step in range(number)],
        "tokens": [100.0 * (step + 1) for step in range(number)],
        "rewards": rewards,
        "step_s": step_s,
        "reward": rewards[-1],
        "accuracy": None,
        **dict.fromkeys(("staleness", "staleness_max", "waited", "wasted", "mixed"), 0.0),
        "length": 1.0,
    }


@pytest.mark.slow
def test_learning_goes_on_from_kept_runs_to_its_figures_and_plot(tmp_path: Path) -> None:
    """All its cells are there, so nothing is launched."""
    climbs = [0.1] * 4 + [0.9] * 6  # the mean of five is 0.9 from the ninth step on
    kept = {
        (BASELINE, 0): run_of(2.0, climbs),
        (BASELINE, 1): run_of(4.0, climbs),
        ("ours 2", 0): run_of(1.0, climbs),
        ("ours 2", 1): run_of(1.0, [0.1] * 10),  # never gets there
    }
    for (policy, seed), run in kept.items():
        path_of(tmp_path, ("quickstart", 10, policy, seed)).write_text(json.dumps(run))
    words = ["--steps", "10", "--seeds", "2", "--folder", str(tmp_path)]
    words += ["--policies", BASELINE, "ours 2"]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.loops.learning", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert result["quickstart_synchronous_goal_s"] == (2 * 9 + 4 * 9) / 2
    assert result["quickstart_synchronous_goal_tokens"] == 900
    assert "quickstart_ours_2_goal_s" not in result and "quickstart_speedup" not in result
    assert result["quickstart_lost"] == pytest.approx(0.4)
    assert "quickstart_ours_2_accuracy" not in result
    assert (tmp_path / "quickstart.png").stat().st_size > 10_000
