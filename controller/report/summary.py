"""The summary of a run: `summary.md` with its plots, and `result.json`.

Written at every end of a run: after the last step, a signal or a failure, and when `make stop` ends
what a killed controller left. `make report` writes them again from the files in the run's folder.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from configs.choices import TaskKind
from configs.rollout_schema import TaskConfig
from configs.schema import Config
from controller.metrics.counters import summary_rows
from controller.metrics.history import Record, read_metrics
from controller.report.card import write_card
from controller.report.result import RunResult, result_line, summarize
from controller.run_dir import EXPERIMENT_FILE, RunDir
from controller.units import format_bytes, format_count, format_duration
from trainer_pool.types import FINAL_MODEL

_QUIET_EVENTS = {"epoch", "joined"}
"""Every run has these."""


def draw_plots(run_dir: RunDir) -> list[Record]:
    """Write the plots of what the run has recorded so far, which this returns."""
    # matplotlib takes a second of a core to import, which a launch has better use for.
    from controller.report.plots import figures
    from controller.report.timeline import LAST_TIMELINE, find_timeline, write_timeline

    records = read_metrics(run_dir.metrics)
    for name, figure in figures(records).items():
        figure.savefig(run_dir.path / name)
    if (timeline := find_timeline(records)) is not None:
        write_timeline(timeline, run_dir.path / LAST_TIMELINE)
    return records


def report_end(
    run_dir: RunDir, say: Callable[[str], None], drawing: Future[list[Record]] | None = None
) -> None:
    """Write the report of a run that has ended; print the result, or say how the run can go on.

    `drawing`: the `draw_plots` of all its records, if that has begun.
    """
    try:
        records = draw_plots(run_dir) if drawing is None else drawing.result()
        result = write_summary(run_dir, records)
    except Exception as error:  # a failing report must not hide how the run ended
        say(f"no summary: {error}; `{run_dir.command('report')}` tries again")
    else:
        if result.state == "finished":
            model = run_dir.path / FINAL_MODEL
            trained = f"; the trained model: {model}" if model.is_dir() else ""
            say(f"{_headline(result)} The summary: {run_dir.path / 'summary.md'}{trained}")
            print(result_line(result))
            return
        say(f"{run_dir.path / 'summary.md'} says how far the run got")
    if (command := run_dir.resume_command) is not None:
        say(f"{command} continues it")


def write_summary(run_dir: RunDir, records: Sequence[Record]) -> RunResult:
    """Write `summary.md`, `result.json` and the final model's card; the summary includes the plots
    that exist."""
    config = run_dir.read_config()
    record = run_dir.read_record()
    state, error = record.state, record.error
    if state == "running" and not record.is_alive:
        state, error = "failed", run_dir.gone_words
    until = records[-1].t if records else record.ended or record.started
    result = summarize(
        run=run_dir.name,
        config=config,
        records=records,
        wall_s=until - record.started,
        state=state,
        error=error,
    )
    (run_dir.path / "result.json").write_text(result.as_json(indent=1) + "\n")
    (run_dir.path / "summary.md").write_text(summary_markdown(run_dir.path, result, config))
    model = run_dir.path / FINAL_MODEL
    # That of an earlier end may be there, of a run that went on and wrote none again.
    since = record.resumed or record.started
    if state != "running" and model.is_dir() and model.stat().st_mtime >= since:
        write_card(model, run_dir, config, result)
    return result


def print_report(run_dir: RunDir) -> None:
    """`make report`: write the report.

    Raises ValueError if the run's settings or its records cannot be read.
    """
    result = write_summary(run_dir, draw_plots(run_dir))
    print(f"{run_dir.name} ({result.state}): wrote {run_dir.path / 'summary.md'}")


def summary_markdown(folder: Path, result: RunResult, config: Config) -> str:
    """The page, with the plots that exist in `folder`."""
    generation = list(summary_rows(result.rollout, result.tokens_dropped))
    if result.prompts_quarantined:
        generation.append(("prompts in quarantine", f"{result.prompts_quarantined:,}"))
    title = f"# {result.run}\n\n{_headline(result)}\n"
    title += "".join(f"\n**{alarm}**\n" for alarm in result.alarms)
    sections: list[tuple[str, Iterable[tuple[str, str]]]] = [
        ("Learning", _learning_rows(result)),
        ("Groups", _group_rows(result)),
        ("Cost", _cost_rows(result)),
        ("Generation", generation),
        ("Weights", _weights_rows(result)),
        ("Agreement of engines and trainer", _agreement_rows(result)),
    ]
    tables = "".join(
        f"\n| {name} | |\n|---|---:|\n" + "".join(f"| {what} | {value} |\n" for what, value in rows)
        for name, rows in sections
    )
    from controller.report.plots import PLOTS
    from controller.report.timeline import LAST_TIMELINE

    pictures = {name: title for name, (title, _) in PLOTS.items()}
    pictures[LAST_TIMELINE] = "How the last version reached the engines"
    plots = "".join(
        f"\n![{caption}]({name})\n"
        for name, caption in pictures.items()
        if (folder / name).exists()
    )
    return title + tables + plots + _again(folder, config)


def _again(folder: Path, config: Config) -> str:
    model = config.model.path or "built from scratch"
    experiment = folder / EXPERIMENT_FILE
    how = ""
    if experiment.is_file():
        if experiment.is_relative_to(Path.cwd()):
            experiment = experiment.relative_to(Path.cwd())
        how = f"    make launch EXPERIMENT={shlex.quote(str(experiment))}\n\n"
    return (
        f"\n## Repeat this run\n\n{how}"
        f"Model: {model}; task: {task_label(config.task)}. Every setting is in `config.yaml`, the "
        "history in `metrics.jsonl`, the output of each process in `logs/`.\n"
    )


def _headline(result: RunResult) -> str:
    took = f"{result.steps} steps in {format_duration(result.wall_s)}"
    mark = "" if result.state == "finished" else f"**{result.state.capitalize()}** after {took}. "
    error = (result.error or "").partition("\n")[0]  # the lines of a log may follow
    why = f"{error.rstrip('.:;')}. " if error else ""
    if result.eval_before is None or result.eval_after is None:
        return f"{mark}{why}".strip() or f"{took}."
    points = (result.eval_after - result.eval_before) * 100
    until = f"by version {result.eval_version}" if mark else f"in {took}"
    return (
        f"{mark}{why}Held-out accuracy went from {result.eval_before:.0%} to "
        f"{result.eval_after:.0%} ({points:+.0f} points) {until}."
    )


def _learning_rows(result: RunResult) -> Iterator[tuple[str, str]]:
    how = f"{result.eval_samples} answers to each of " if result.eval_samples > 1 else ""
    before = f"held-out accuracy before ({how}{result.eval_size} prompts)"
    yield before, _percent(result.eval_before)
    is_whole = result.state == "finished" or result.eval_version is None
    when = "after" if is_whole else f"of version {result.eval_version}, the last one measured"
    yield f"held-out accuracy {when}", _percent(result.eval_after)
    for task, of in result.by_task.items():
        yield f"of {task}: before, after", f"{_percent(of.eval_before)}, {_percent(of.eval_after)}"
    for name, both in result.eval_sets.items():
        yield f"on {name}: first, last", ", ".join(map(_percent, both))
    for name, ends in result.eval_command.items():
        yield f"{name} by rollout.eval.command: first, last", ", ".join(map(_number, ends))
    if result.evals_failed:
        yield "evaluations that failed", f"{result.evals_failed:,}"
    for k, share in sorted(result.pass_at_k.items()):
        if k > 1:
            yield f"pass@{k} after", _percent(share)
    yield "mean reward of the first steps", _number(result.reward_first)
    yield "mean reward of the last steps", _number(result.reward_last)
    for task, of in result.by_task.items():
        rewards = f"{_number(of.reward_first)}, {_number(of.reward_last)}"
        yield f"of {task}: first, last, groups", f"{rewards}, {of.groups_trained:,}"
    if number := result.steps_without_gradient:
        yield "steps without a gradient, which changed nothing", f"{number:,}"


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
    trained = "none" if result.max_staleness_trained is None else result.max_staleness_trained
    words = "largest staleness trained, and the largest bound in force"
    yield words, f"{trained} of {result.max_staleness}"
    if len(result.max_staleness_by_step) > 1:
        changes = (f"{k} from step {step}" for step, k in result.max_staleness_by_step.items())
        yield "the bound over the run", ", ".join(changes)
    for change in result.changes:
        yield "changed", change


def _cost_rows(result: RunResult) -> Iterator[tuple[str, str]]:
    yield "wall time", format_duration(result.wall_s)
    yield "training time (first step to last)", format_duration(result.train_s)
    yield "tokens generated", format_count(result.tokens_generated)
    yield "tokens trained", format_count(result.tokens_trained)
    yield "tokens generated per second of training", _number(result.tokens_per_s)
    waited = f"{format_duration(result.trainer_wait_s)} ({_percent(result.trainer_wait_share)})"
    yield "trainer waited for rollouts (share of training)", waited


def _weights_rows(result: RunResult) -> Iterator[tuple[str, str]]:
    weights = result.weights
    yield "versions published", f"{result.versions_published:,}"
    if weights.versions_skipped:
        yield "versions replaced before they were sent", f"{weights.versions_skipped:,}"
    if weights.publish_bytes is not None:
        yield "size of a version", format_bytes(weights.publish_bytes)
        yield "bytes sent by the trainer", format_bytes(weights.weights_wire_bytes)
    if weights.publishes_delta:
        yield "publishes that sent only changes", f"{weights.publishes_delta:,}"
        yield "share of the elements in these, mean", _percent(weights.delta_density)
    yield "trainer pause per publish", _spread(weights.snapshot_s)
    yield "from there until every engine served the version", _spread(weights.convergence_s)
    yield "engine pause per commit", _spread(weights.engine_pause_s)
    for event, count in weights.weights_events.items():
        if event not in _QUIET_EVENTS:
            yield f"receivers and engines: {event.replace('_', ' ')}", f"{count:,}"


def _agreement_rows(result: RunResult) -> Iterator[tuple[str, str]]:
    words = "log-probabilities, engine against trainer: mean difference"
    yield words, _tiny(result.logprob_diff_mean)
    yield "largest difference", _tiny(result.logprob_diff_max)
    yield "largest deviation of an importance ratio from 1", _tiny(result.ratio_max_abs_dev)
    if shares := result.logprobs_not_finite:
        worst = max(shares, key=lambda version: shares[version])
        words = "log-probabilities of the engines that were not finite (refused)"
        at_most = f"at most {_percent(shares[worst])}, of version {worst}"
        yield f"{words}, {len(shares):,} versions", at_most


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


def task_label(config: TaskConfig) -> str:
    """Kind of a task, and its name among others of the kind."""
    if config.kind is TaskKind.mixture:
        return f"mixture of {', '.join(config.tasks)}"
    if config.kind is TaskKind.custom:
        return f"custom, {config.factory}"
    if config.path is not None:
        return f"{config.kind.name}, {Path(config.path).name}"
    is_listed = config.kind is TaskKind.questions and not config.is_from_hub
    if is_listed or config.kind is TaskKind.alphabet_sort:
        return config.kind.name
    return f"{config.kind.name}, {config.name}"
