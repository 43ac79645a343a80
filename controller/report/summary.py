"""How a run ended: the RESULT line for machines, `summary.md` for people."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from buffer.results import BufferStats
from configs.schema import Config
from controller.metrics.counters import summary_rows
from controller.metrics.records import EVAL_FAILED, Record
from controller.metrics.weights import weights_result
from controller.report.plots import PLOTS
from controller.report.repeat import repeat_command, task_label
from controller.report.state import BufferTotals
from controller.report.timeline import LAST_TIMELINE
from controller.units import format_bytes, format_count, format_duration
from controller.watch.learning import has_no_gradient, learning_alarms

PICTURES = {**PLOTS, LAST_TIMELINE: "The last version's way to the engines"}
_QUIET_EVENTS = {"epoch", "joined"}
"""Every run has these; nobody needs to know."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RunResult:
    """What a run achieved and what it cost. Times in seconds; None: never measured."""

    run: str
    state: str
    """finished, stopped, failed, or running."""
    error: str | None
    """What it failed of."""
    experiment: str
    seed: int
    wall_s: float
    steps: int
    steps_without_gradient: int
    """They changed nothing."""
    alarms: Sequence[str]
    """What kept the run from learning at its end, in words."""
    eval_before: float | None
    """Accuracy on held-out prompts, with the weights that RL began from."""
    eval_after: float | None
    """None if that evaluation failed. Of a run that did not finish: the last one made in training.
    """
    eval_version: int | None
    """The version that `eval_after` is of."""
    evals_failed: int
    eval_size: int
    eval_samples: int
    """Answers of each prompt."""
    pass_at_k: Mapping[int, float]
    """Of the last evaluation, by k."""
    reward_first: float | None
    """Mean reward of the first steps (a tenth of them, at most ten), sampled at temperature."""
    reward_last: float | None
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
    """The largest that was ever in force."""
    max_staleness_by_step: Mapping[int, int]
    """The bound in force from each of these steps on, as the samples of the buffer saw it."""
    max_staleness_trained: int | None
    staleness_mean: float | None
    versions_published: int
    """Made by training; the initial weights are version 0 and do not count."""
    versions_skipped: int
    """Overtaken by a newer one before they were sent."""
    engine_pause_s: Mapping[str, float | None]
    """`p50` and `max` of one engine's standstill for one commit."""
    snapshot_s: Mapping[str, float | None]
    """The same of the trainer's standstill for a publish, of its slowest rank."""
    convergence_s: Mapping[str, float | None]
    """The same from the snapshot until every live engine served the version or a later one."""
    train_s: float
    """Of the wall time, from the first step's wait for a batch to the last step's end."""
    trainer_wait_s: float
    """What the trainer waited for rollouts."""
    trainer_wait_share: float | None
    """The same as a part of `train_s`."""
    tokens_generated: int
    rollout: Mapping[str, float]
    """What the rollout workers counted, by name."""
    prompts_quarantined: int
    tokens_dropped: int
    """Trainable tokens of groups that the buffer dropped."""
    tokens_trained: int
    tokens_per_s: float | None
    """Generated, over `train_s`."""
    ratio_max_abs_dev: float | None
    """Largest |importance_ratio - 1| of a trained token."""
    logprob_diff_mean: float | None
    """|trainer - rollout log-probability| of tokens sampled by the version being trained."""
    logprob_diff_max: float | None
    publish_bytes: int | None
    """Of one version, whole."""
    weights_wire_bytes: int
    """That left the trainer over the run, version 0 among them."""
    publishes_delta: int
    """Publishes that sent only what had changed."""
    delta_density: float | None
    """Mean share of the elements that these held."""
    weights_events: Mapping[str, int]
    """What happened to receivers and engines, by kind."""


def result_line(result: RunResult) -> str:
    """`RESULT {json}`: the last line of a launch."""
    return "RESULT " + json.dumps(_rounded(asdict(result)), allow_nan=False)


def write_summary(run_dir: Path, result: RunResult, config: Config) -> None:
    """`result.json` and `summary.md` in the run's folder; the plots are named if they are there."""
    text = json.dumps(_rounded(asdict(result)), allow_nan=False, indent=1)
    (run_dir / "result.json").write_text(text + "\n")
    (run_dir / "summary.md").write_text(_summary_markdown(run_dir, result, config))


def summarize(
    *,
    run: str,
    config: Config,
    records: Sequence[Record],
    stats: BufferStats | BufferTotals,
    counters: Mapping[str, float],
    wall_s: float,
    state: str = "finished",
    error: str | None = None,
) -> RunResult:
    """The result of a run from its metrics and the buffer's last numbers (pure)."""
    steps = [r for r in records if r.kind == "step"]
    evals = [r for r in records if r.kind == "eval"]
    failed = [r for r in records if r.kind == EVAL_FAILED]
    is_last_missing = bool(failed) and failed[-1].number("version") >= config.trainer.num_steps
    has_after = bool(evals) and not is_last_missing and (state == "finished" or len(evals) > 1)
    after = evals[-1] if has_after else None
    rewards = _series(steps, "reward_mean")
    ends = max(1, min(10, len(rewards) // 10))
    weights = weights_result(records)
    wait_s = sum(_series(steps, "lease_wait_s"))
    train_s = training_seconds(steps)
    tokens_generated = int(counters.get("tokens_generated", 0))
    return RunResult(
        run=run,
        state=state,
        error=error,
        experiment=config.experiment,
        seed=config.run.seed,
        wall_s=wall_s,
        steps=len(steps),
        steps_without_gradient=sum(map(has_no_gradient, steps)),
        alarms=[alarm.sentence for alarm in learning_alarms(steps)],
        eval_before=evals[0].number("accuracy") if evals else None,
        eval_after=after.number("accuracy") if after is not None else None,
        eval_version=int(after.number("version_min")) if after is not None else None,
        evals_failed=len(failed),
        eval_size=int(evals[-1].number("num_prompts")) if evals else 0,
        eval_samples=config.rollout.eval.num_samples,
        pass_at_k=_pass_at_k(after) if after is not None else {},
        reward_first=_mean(rewards[:ends]),
        reward_last=_mean(rewards[-ends:]),
        groups_pushed=stats.pushed,
        groups_trained=stats.trained,
        groups_dropped=dict(stats.dropped),
        groups_quarantined=stats.quarantined,
        groups_ready=stats.ready,
        groups_leased=stats.leased,
        is_conserved=stats.is_conserved,
        max_staleness=max(stats.max_staleness, stats.max_staleness_largest),
        max_staleness_by_step=_staleness_bounds(records),
        max_staleness_trained=stats.max_staleness_trained,
        staleness_mean=_mean(_series(steps, "staleness_mean")),
        versions_published=stats.trainer_version,
        versions_skipped=weights.num_skipped,
        engine_pause_s=weights.engine_pause_s,
        snapshot_s=weights.snapshot_s,
        convergence_s=weights.convergence_s,
        train_s=train_s,
        trainer_wait_s=wait_s,
        trainer_wait_share=wait_s / train_s if train_s else None,
        tokens_generated=tokens_generated,
        rollout=dict(counters),
        prompts_quarantined=stats.prompts_quarantined,
        tokens_dropped=stats.tokens_dropped,
        tokens_trained=stats.tokens_trained,
        tokens_per_s=tokens_generated / train_s if train_s else None,
        ratio_max_abs_dev=max(_series(steps, "ratio_max_abs_dev"), default=None),
        logprob_diff_mean=_mean(_series(steps, "logprob_diff_mean")),
        logprob_diff_max=max(_series(steps, "logprob_diff_max"), default=None),
        publish_bytes=weights.bytes,
        weights_wire_bytes=weights.wire_bytes,
        publishes_delta=weights.num_deltas,
        delta_density=weights.density,
        weights_events=weights.events,
    )


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


def training_seconds(steps: Sequence[Record]) -> float:
    """From the first batch's lease to the last step's end."""
    if not steps:
        return 0.0
    first = [steps[0].number(name) for name in ("lease_wait_s", "step_s")]
    return steps[-1].t - steps[0].t + sum(x for x in first if math.isfinite(x))


def _pass_at_k(evaluation: Record) -> dict[int, float]:
    name = "pass_at_"
    values = {k: evaluation.number(k) for k in evaluation.values if k.startswith(name)}
    return {int(k.removeprefix(name)): value for k, value in sorted(values.items())}


def _series(records: Sequence[Record], name: str) -> list[float]:
    return [x for r in records if math.isfinite(x := r.number(name))]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _rounded(value: object) -> object:
    """Six digits are more than any of these numbers is good for; NaN becomes null."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _summary_markdown(run_dir: Path, result: RunResult, config: Config) -> str:
    title = f"# {result.run}\n\n{_headline(result)}\n"
    title += "".join(f"\n**{alarm}**\n" for alarm in result.alarms)
    sections = [
        ("What it learned", _learning_rows(result)),
        ("Where the groups went", _group_rows(result)),
        ("What it cost", _cost_rows(result)),
        ("How generation went", _rollout_rows(result)),
        ("How the weights travelled", _weights_rows(result)),
        ("Whether the numbers agree", _agreement_rows(result)),
    ]
    tables = "".join(f"\n## {name}\n\n{_table(rows)}" for name, rows in sections)
    plots = "".join(
        f"\n![{caption}]({name})\n"
        for name, caption in PICTURES.items()
        if (run_dir / name).exists()
    )
    return title + tables + plots + _again(config)


def _again(config: Config) -> str:
    model = config.model.path or "built from scratch"
    command = repeat_command(config)
    how = (
        "No command makes these settings from a file of `configs/experiment/`: they are in "
        "`config.yaml`."
        if command is None
        else "\n".join(f"    {line}" for line in command.split("\n"))
    )
    return (
        f"\n## The same again\n\n{how}\n\n"
        f"Model: {model}; task: {task_label(config.task)}. Every setting is in `config.yaml`, the "
        "history in `metrics.jsonl`, what each process said in `logs/`.\n"
    )


def _headline(result: RunResult) -> str:
    took = f"{result.steps} steps in {format_duration(result.wall_s)}"
    mark = "" if result.state == "finished" else f"**{result.state.capitalize()}** after {took}. "
    why = f"{_first_line(result.error)}. " if result.error else ""
    if result.eval_before is None or result.eval_after is None:
        return f"{mark}{why}".strip() or f"{took}."
    points = (result.eval_after - result.eval_before) * 100
    until = f"by version {result.eval_version}" if mark else f"in {took}"
    return (
        f"{mark}{why}Held-out accuracy went from {result.eval_before:.0%} to "
        f"{result.eval_after:.0%} ({points:+.0f} points) {until}."
    )


def _first_line(text: str) -> str:
    """Without the lines of a log that follow."""
    return text.partition("\n")[0].rstrip(".:;")


def _learning_rows(result: RunResult) -> Iterator[tuple[str, str]]:
    how = f"{result.eval_samples} answers to each of " if result.eval_samples > 1 else ""
    yield (
        f"held-out accuracy before ({how}{result.eval_size} prompts)",
        _percent(result.eval_before),
    )
    is_whole = result.state == "finished" or result.eval_version is None
    when = "after" if is_whole else f"of version {result.eval_version}, the last one measured"
    yield f"held-out accuracy {when}", _percent(result.eval_after)
    if result.evals_failed:
        yield "evaluations that failed", f"{result.evals_failed:,}"
    for k, share in sorted(result.pass_at_k.items()):
        if k > 1:
            yield f"pass@{k} after", _percent(share)
    yield "mean reward of the first steps", _number(result.reward_first)
    yield "mean reward of the last steps", _number(result.reward_last)
    if result.steps_without_gradient:
        yield (
            "steps without any gradient, which changed nothing",
            f"{result.steps_without_gradient:,}",
        )


def _group_rows(result: RunResult) -> Iterator[tuple[str, str]]:
    yield "pushed", f"{result.groups_pushed:,}"
    yield "= trained", f"{result.groups_trained:,}"
    for reason, count in sorted(result.groups_dropped.items()):
        yield f"+ dropped: {reason}", f"{count:,}"
    if not result.groups_dropped:
        yield "+ dropped", "0"
    if result.groups_quarantined:
        yield "+ quarantined", f"{result.groups_quarantined:,}"
    yield "+ ready at the end", f"{result.groups_ready:,}"
    yield "+ leased at the end", f"{result.groups_leased:,}"
    yield "the sum holds", "yes" if result.is_conserved else "**NO: please report this**"
    trained = result.max_staleness_trained
    yield (
        "largest staleness trained, of the largest bound in force",
        f"{'none' if trained is None else trained} of {result.max_staleness}",
    )
    if len(result.max_staleness_by_step) > 1:
        changes = (f"{k} from step {step}" for step, k in result.max_staleness_by_step.items())
        yield "the bound over the run", ", ".join(changes)


def _cost_rows(result: RunResult) -> Iterator[tuple[str, str]]:
    yield "wall time", format_duration(result.wall_s)
    yield "of it, training (first step to last)", format_duration(result.train_s)
    yield "tokens generated", format_count(result.tokens_generated)
    yield "tokens trained", format_count(result.tokens_trained)
    yield "tokens generated a second of training", _number(result.tokens_per_s)
    yield (
        "trainer waited for rollouts (share of training)",
        f"{format_duration(result.trainer_wait_s)} ({_percent(result.trainer_wait_share)})",
    )


def _rollout_rows(result: RunResult) -> Iterator[tuple[str, str]]:
    yield from summary_rows(result.rollout, result.tokens_dropped)
    if result.prompts_quarantined:
        yield "prompts in quarantine", f"{result.prompts_quarantined:,}"


def _weights_rows(result: RunResult) -> Iterator[tuple[str, str]]:
    yield "versions published", f"{result.versions_published:,}"
    if result.versions_skipped:
        yield "of these, overtaken before they were sent", f"{result.versions_skipped:,}"
    if result.publish_bytes is not None:
        yield "bytes of a version", format_bytes(result.publish_bytes)
        yield "bytes that left the trainer", format_bytes(result.weights_wire_bytes)
    if result.publishes_delta:
        yield "publishes that sent only what had changed", f"{result.publishes_delta:,}"
        yield "share of the elements in these, mean", _percent(result.delta_density)
    yield "the trainer stood still for a publish", _spread(result.snapshot_s)
    yield "from there until every engine served it", _spread(result.convergence_s)
    yield "an engine stood still for a commit", _spread(result.engine_pause_s)
    for event, count in result.weights_events.items():
        if event not in _QUIET_EVENTS:
            yield f"receivers and engines: {event.replace('_', ' ')}", f"{count:,}"


def _agreement_rows(result: RunResult) -> Iterator[tuple[str, str]]:
    yield (
        "log-probabilities, engine against trainer: mean difference",
        _tiny(result.logprob_diff_mean),
    )
    yield "the largest difference", _tiny(result.logprob_diff_max)
    yield "largest deviation of an importance ratio from 1", _tiny(result.ratio_max_abs_dev)


def _table(rows: Iterator[tuple[str, str]]) -> str:
    return "| | |\n|---|---:|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows)


def _spread(seconds: Mapping[str, float | None]) -> str:
    median, longest = seconds["p50"], seconds["max"]
    if median is None or longest is None:
        return "not measured"
    return f"{format_duration(median)} (median), {format_duration(longest)} (longest)"


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{share:.0%}"


def _number(value: float | None) -> str:
    return "not measured" if value is None else format_count(value)


def _tiny(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2g}"
