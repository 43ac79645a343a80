"""Launches of a work, which all begin with the same model, and what their records say."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.loops.work import Work, load, settings_of, write_prompts
from configs.schema import Config
from controller.metrics.counters import wasted_fraction
from controller.metrics.history import numbers, read_metrics, training_seconds
from processes.child import Child
from rollout_pool.worker.record import FOLDER
from trainer_pool.model.scratch import build_scratch_model

LAST_REWARDS = 5
"""A reward is the mean of so many steps'; one alone differs by a tenth from the next."""
SKIPPED_STEPS = 3


def prepare(work: Work, folder: Path) -> Config:
    """Prompts, reward and `model`: what the warm start of a run makes, or random weights."""
    write_prompts(folder)
    config = load(work, folder)
    assert config.model.scratch is not None
    if config.trainer.warm_start.num_steps == 0:
        build_scratch_model(config.model.scratch, folder / "model", seed=0)
        return config
    # Updates too small to change a weight.
    still = ["trainer.num_steps=1", "trainer.learning_rate=1e-30", "rollout.eval_every=0"]
    launch(work, folder, "warm", [*settings_of(work, folder), *still])
    shutil.move(folder / "warm" / "final_model", folder / "model")
    return config


def settings_from_model(work: Work, folder: Path, seed: int) -> list[str]:
    """All steps of the work from `model` on."""
    # Sizes of a model to be built would build another one than that of `model`.
    own = [one for one in settings_of(work, folder) if not one.startswith("model.scratch.")]
    own += ["model=pretrained", f"model.path={folder}/model"]
    own += ["trainer.warm_start.num_steps=0", "rollout.eval_every=0", f"run.seed={seed}"]
    return [*own, f"trainer.checkpoint_every={work.num_steps}", "task.seed=0"]


def train(work: Work, folder: Path, seed: int, settings: Sequence[str]) -> Path:
    """The folder of the run."""
    launch(work, folder, "run", [*settings_from_model(work, folder, seed), *settings])
    return folder / "run"


def launch(work: Work, folder: Path, name: str, settings: Sequence[str]) -> None:
    shutil.rmtree(folder / name, ignore_errors=True)  # that of a benchmark which was stopped
    command = [sys.executable, "-m", "controller.main", "launch", "--experiment", work.experiment]
    command += [*settings, f"run.dir={folder}", f"run.name={name}", "run.panel=false"]
    run_to_its_end(command, folder / f"{name}.log")


def run_to_its_end(command: Sequence[str], log: Path) -> None:
    log.unlink(missing_ok=True)  # that of the round before
    child = Child(command, log)
    try:
        code = child.wait()
    finally:
        child.stop(60)
    if code:
        raise RuntimeError(f"{' '.join(command)}: {log.read_text()[-3000:]}")


def read_run(run: Path) -> dict[str, Any]:
    """The figures of a run that recorded all its groups (rollout.log_rate=1).

    By step: `seconds` since training began, `tokens` trained until then, `rewards`. Of the run: see
    COLUMNS of learning.py.
    """
    steps = read_metrics(run / "metrics.jsonl", "step")
    result = json.loads((run / "result.json").read_text())
    began = steps[-1].t - training_seconds(steps)
    seconds, rewards = [step.t - began for step in steps], numbers(steps, "reward_mean")
    trained = fmean(numbers(steps, "response_length_mean"), numbers(steps, "num_groups"))
    lengths, are_mixed = map(list, zip(*answers_of(run), strict=True))
    return {
        "seconds": seconds,
        "tokens": [*accumulate(numbers(steps, "num_tokens"))],
        "rewards": rewards,
        "step_s": step_s(seconds),
        "reward": fmean(rewards[-LAST_REWARDS:]),
        "accuracy": result["eval_after"],
        "staleness": result["staleness_mean"],
        "staleness_max": result["max_staleness_trained"],
        "waited": result["trainer_wait_share"],
        "wasted": wasted_fraction(result["rollout"], result["tokens_dropped"]),
        "length": trained / fmean(lengths),
        "mixed": fmean(are_mixed),
    }


def answers_of(run: Path) -> Iterator[tuple[int, bool]]:
    """The number of tokens of each completed answer, and whether several versions sampled them."""
    for path in (run / FOLDER).iterdir():
        for line in path.read_text().splitlines():
            for answer in json.loads(line)["trajectories"]:
                versions = {version for version, _, _ in answer["version_spans"]}
                yield sum(answer["loss_mask_runs"][1::2]), len(versions) > 1


def step_s(ends: Sequence[float]) -> float:
    """Seconds of a step, the median."""
    return median(b - a for a, b in [*pairwise(ends)][SKIPPED_STEPS:] or pairwise(ends))


def reached(goal: float | None, rewards: Sequence[float], at: Sequence[float]) -> float | None:
    """The first value of `at`, such as seconds, where the mean of the last rewards is `goal`; None:
    it never is."""
    for end in range(LAST_REWARDS, len(rewards) + 1):
        if goal is not None and fmean(rewards[end - LAST_REWARDS : end]) >= goal:
            return at[end - 1]
    return None
