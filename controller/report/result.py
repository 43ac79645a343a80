"""The result of a run for programs: the RESULT line and `result.json`."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from configs.schema import Config
from controller.metrics.history import (
    EVAL_COMMAND,
    EVAL_FAILED,
    RESUMED,
    TUNED,
    Record,
    below,
    change_words,
    of_kind,
    series,
    training_seconds,
)
from controller.metrics.weights import WeightsResult, weights_result
from controller.watch.learning import has_no_gradient, learning_alarms


@dataclass(kw_only=True, slots=True, frozen=True)
class TaskResult:
    """One task of a mixture; see the fields of RunResult."""

    groups_trained: int
    eval_before: float | None
    eval_after: float | None
    reward_first: float | None
    reward_last: float | None


@dataclass(kw_only=True, slots=True, frozen=True)
class RunResult:
    """Times in seconds, without those between an end of the run and the moment at which it went on;
    None if never measured."""

    run: str
    state: str
    """finished, stopped, failed, or running."""
    error: str | None
    experiment: str
    seed: int
    wall_s: float
    steps: int
    steps_without_gradient: int
    """Steps that did not change the weights."""
    alarms: Sequence[str]
    """Sentences on what kept the run from learning at its end."""
    eval_before: float | None
    """Accuracy on held-out prompts with the initial weights of RL."""
    eval_after: float | None
    """The last accuracy; None if the final evaluation of a finished run failed."""
    eval_version: int | None
    """The version of `eval_after`."""
    evals_failed: int
    eval_size: int
    eval_samples: int
    """Answers per prompt."""
    pass_at_k: Mapping[int, float]
    """Last evaluation, by k."""
    eval_sets: Mapping[str, tuple[float, float]]
    """Accuracy on each further held-out set: the first and the last one."""
    eval_command: Mapping[str, tuple[float, float]]
    """The first and the last number by each name that rollout.eval.command wrote."""
    reward_first: float | None
    """Mean reward of the first steps (a tenth of them, at most ten), with rollout sampling."""
    reward_last: float | None
    by_task: Mapping[str, TaskResult]
    """Tasks of a mixture; empty for a single task."""
    groups_pushed: int
    groups_trained: int
    """Consumed and acked."""
    groups_dropped: Mapping[str, int]
    """By reason."""
    groups_quarantined: int
    groups_ready: int
    groups_leased: int
    is_conserved: bool
    """pushed = trained + dropped + quarantined + ready + leased, at the end of the run."""
    max_staleness: int
    """The largest bound that was ever in force."""
    max_staleness_by_step: Mapping[int, int]
    """The bound in force from each of these steps on, according to the samples of the buffer."""
    changes: Sequence[str]
    """Live settings that were changed: what, when and by whom."""
    max_staleness_trained: int | None
    staleness_mean: float | None
    versions_published: int
    """Without version 0, the initial weights."""
    weights: WeightsResult
    """Its fields are on the top level of the RESULT line."""
    train_s: float
    """From the first step's wait for a batch to the end of the last step."""
    trainer_wait_s: float
    """Time that the trainer waited for rollouts."""
    trainer_wait_share: float | None
    """The same as a share of `train_s`."""
    tokens_generated: int
    rollout: Mapping[str, float]
    """Counters of the rollout workers, by name."""
    prompts_quarantined: int
    tokens_dropped: int
    """Trainable tokens of groups that the buffer dropped."""
    tokens_trained: int
    tokens_per_s: float | None
    """Generated tokens over `train_s`."""
    ratio_max_abs_dev: float | None
    """Largest |importance_ratio - 1| of a trained token."""
    logprob_diff_mean: float | None
    """|trainer - rollout log-probability| of tokens sampled by the version being trained."""
    logprob_diff_max: float | None
    logprobs_not_finite: Mapping[int, float]
    """Share of the engines' log-probabilities that were not finite, by version; only versions with
    any."""

    def as_json(self, indent: int | None = None) -> str:
        """One flat object; values that were not measured are null."""
        fields = asdict(self)
        fields |= fields.pop("weights")
        return json.dumps(_rounded(fields), allow_nan=False, indent=indent)


def result_line(result: RunResult) -> str:
    """`RESULT {json}`, the last line of a launch."""
    return f"RESULT {result.as_json()}"


def summarize(
    *,
    run: str,
    config: Config,
    records: Sequence[Record],
    wall_s: float,
    state: str = "finished",
    error: str | None = None,
) -> RunResult:
    """The result of a run from its metrics (pure)."""
    steps, evals, failed = (of_kind(records, kind) for kind in ("step", "eval", EVAL_FAILED))
    by_command = of_kind(records, EVAL_COMMAND)
    last_version = steps[-1].count("version") if steps else 0
    is_last_missing = (
        state == "finished" and bool(failed) and failed[-1].count("version") > last_version
    )
    has_after = bool(evals) and not is_last_missing and (state == "finished" or len(evals) > 1)
    after = evals[-1] if has_after else None
    reward_first, reward_last = _first_and_last(series(steps, "reward_mean"))
    wait_s = sum(series(steps, "lease_wait_s"))
    away_s = sum(series(of_kind(records, RESUMED), "away_s"))
    train_s = max(0.0, training_seconds(steps) - away_s)
    nothing = Record(t=0.0, kind="buffer", values={"max_staleness": config.buffer.max_staleness})
    last, known = (of_kind(records, "buffer") or [nothing])[-1], after or nothing
    placed = sum(map(last.count, ("trained", "quarantined", "ready", "leased")))
    return RunResult(
        run=run,
        state=state,
        error=error,
        experiment=config.experiment,
        seed=config.run.seed,
        wall_s=max(0.0, wall_s - away_s),
        # Of the last step before a kill there may be a checkpoint and no record.
        steps=steps[-1].count("step") if steps else 0,
        steps_without_gradient=sum(map(has_no_gradient, steps)),
        alarms=[alarm.sentence for alarm in learning_alarms(steps)],
        eval_before=evals[0].number("accuracy") if evals else None,
        eval_after=after.number("accuracy") if after is not None else None,
        eval_version=after.count("version_min") if after is not None else None,
        evals_failed=len(failed),
        eval_size=evals[-1].count("num_prompts") if evals else 0,
        eval_samples=config.rollout.eval.num_samples,
        pass_at_k=_pass_at_k(known),
        eval_sets=_ends(evals, (f"accuracy/{name}" for name in config.task.eval_sets)),
        eval_command=_ends(by_command, (n for one in by_command for n in one.values if "/" in n)),
        reward_first=reward_first,
        reward_last=reward_last,
        by_task=_by_task(steps, evals),
        groups_pushed=last.count("pushed"),
        groups_trained=last.count("trained"),
        groups_dropped=last.dropped,
        groups_quarantined=last.count("quarantined"),
        groups_ready=last.count("ready"),
        groups_leased=last.count("leased"),
        is_conserved=last.count("pushed") == placed + sum(last.dropped.values()),
        max_staleness=max(last.count("max_staleness"), last.count("max_staleness_largest")),
        max_staleness_by_step=_staleness_bounds(records),
        changes=list(_changes(records)),
        max_staleness_trained=(
            last.count("max_staleness_trained") if "max_staleness_trained" in last.values else None
        ),
        staleness_mean=_mean(series(steps, "staleness_mean")),
        versions_published=last.count("trainer_version"),
        weights=weights_result(records),
        train_s=train_s,
        trainer_wait_s=wait_s,
        trainer_wait_share=wait_s / train_s if train_s else None,
        tokens_generated=last.count("tokens_generated"),
        rollout=last.counters,
        prompts_quarantined=last.count("prompts_quarantined"),
        tokens_dropped=last.count("tokens_dropped"),
        tokens_trained=last.count("tokens_trained"),
        tokens_per_s=last.count("tokens_generated") / train_s if train_s else None,
        ratio_max_abs_dev=max(series(steps, "ratio_max_abs_dev"), default=None),
        logprob_diff_mean=_mean(series(steps, "logprob_diff_mean")),
        logprob_diff_max=max(series(steps, "logprob_diff_max"), default=None),
        logprobs_not_finite=_not_finite_shares(records),
    )


def _by_task(steps: Sequence[Record], evals: Sequence[Record]) -> dict[str, TaskResult]:
    counts = [name for step in steps for name in step.values if name.startswith("task/")]
    tasks = {n[len("task/") : -len("/groups")] for n in counts if n.endswith("/groups")}
    found = {}
    for task in sorted(tasks) if len(tasks) > 1 else ():
        accuracy = series(evals, f"accuracy/{task}")
        rewards = series(steps, f"task/{task}/reward")
        reward_first, reward_last = _first_and_last(rewards)
        found[task] = TaskResult(
            groups_trained=int(sum(series(steps, f"task/{task}/groups"))),
            eval_before=accuracy[0] if accuracy else None,
            eval_after=accuracy[-1] if accuracy else None,
            reward_first=reward_first,
            reward_last=reward_last,
        )
    return found


def _pass_at_k(evaluated: Record) -> dict[int, float]:
    """Without those of further sets."""
    found = below(evaluated.values, "pass_at_")
    return {int(k): evaluated.number(name) for name, k in found if k.isdecimal()}


def _ends(records: Sequence[Record], names: Iterable[str]) -> dict[str, tuple[float, float]]:
    found = {name.partition("/")[2]: series(records, name) for name in dict.fromkeys(names)}
    return {name: (values[0], values[-1]) for name, values in found.items() if values}


def _first_and_last(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """Means of the first and the last tenth of the steps, at most ten."""
    ends = max(1, min(10, len(rewards) // 10))
    return _mean(rewards[:ends]), _mean(rewards[-ends:])


def _staleness_bounds(records: Sequence[Record]) -> dict[int, int]:
    bounds: dict[int, int] = {}
    step, last = 1, math.nan
    for record in records:
        if record.kind == "step":
            step += 1
        elif record.kind == "buffer" and math.isfinite(bound := record.number("max_staleness")):
            if bound != last:
                bounds[step] = int(bound)
            last = bound
    return bounds


def _changes(records: Sequence[Record]) -> Iterator[str]:
    step = 0
    for record in records:
        if record.kind == "step":
            step = record.count("step")
        elif record.kind == TUNED:
            yield f"after step {step}: {change_words(record)}"


def _not_finite_shares(records: Sequence[Record]) -> dict[int, float]:
    all_of, bad = Counter[int](), Counter[int]()
    for record in of_kind(records, "engine"):
        all_of.update(record.histogram("logprobs"))
        bad.update(record.histogram("logprobs_not_finite"))
    return {version: bad[version] / max(all_of[version], bad[version]) for version in sorted(bad)}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _rounded(value: object) -> object:
    """Floats rounded to six digits; NaN becomes null."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [*map(_rounded, value)]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
