"""The output of a running run: a live panel on a terminal, one line per step elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel as Frame
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from buffer.results import BufferStats
from controller.metrics.counters import panel_line
from controller.metrics.history import below, change_words, numbers, series
from controller.metrics.weights import median
from controller.units import format_count, format_duration, format_number_of
from controller.watch.autotune import find_move
from controller.watch.finding import MUCH, Level
from controller.watch.run_view import RunView
from controller.watch.verdict import findings, wanted_engines
from host.printable import printable

SPARKS = "▁▂▃▄▅▆▇█"
WIDE_BAR, NARROW_BAR = 14, 8
FRAME = 6
"""Columns of the frame and its padding."""
LAST_CHANGES = 3
WIDE_PANEL, NARROW_PANEL = 88, 66
"""Columns inside the frame: from the first on bars are wide, below the second sections stack."""
MAX_STALENESS_ROWS = 6
PROGRESS_LINE = "{task.description:<32} {task.elapsed:>7.1f} s"


class Panel:
    """Draws one run from start to end: `progress` while it starts, `show` while it trains.

    With `enabled` and a terminal the panel is drawn in place, otherwise each step prints a line.
    """

    def __init__(self, enabled: bool = True, console: Console | None = None) -> None:
        self._console = console or Console()
        self._is_live = enabled and self._console.is_terminal
        self._live: Live | None = None
        self._printed_step = 0

    def __enter__(self) -> Panel:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @contextmanager
    def progress(self, name: str) -> Iterator[Callable[[str], None]]:
        """A named part of the start: `with panel.progress("Redis") as say: ... say("port 6379")`.

            ✓ Redis                        0.4 s   port 6379

        An exception marks it as failed and propagates. The panel, if it is drawn, ends first:
        such parts come before and after training.
        """
        self.stop()
        progress = Progress(
            SpinnerColumn(style="cyan"),
            TextColumn(PROGRESS_LINE, markup=False),
            TextColumn("  {task.fields[detail]}", style="dim", markup=False),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        progress.add_task(name, total=None, detail="")
        (task,) = progress.tasks
        mark = Text("✗", style="bold red")
        try:
            with progress:
                yield lambda detail: progress.update(task.id, detail=detail)
            mark = Text("✓", style="bold green")
        finally:
            # Not the row of the table: the final line shows the whole detail, however long.
            line = Text.assemble(mark, f" {PROGRESS_LINE.format(task=task)}   ")
            line.append(task.fields["detail"], style="dim")
            self._console.print(line, soft_wrap=True, highlight=False)

    def show(self, view: RunView) -> None:
        """Draw the current state; call it after each change."""
        if self._is_live:
            if self._live is None:
                self._live = Live(
                    console=self._console, auto_refresh=False, vertical_overflow="crop"
                )
                self._live.start()
            self._live.update(render(view, self._console.width), refresh=True)
        elif view.step < self._printed_step:  # the steps after a checkpoint were undone
            self._printed_step = view.step
        elif view.step > self._printed_step:
            self._printed_step = view.step
            self.say(step_line(view))

    def say(self, text: str) -> None:
        """A line that stays, above the panel."""
        self._console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Leave the last state on the screen and release the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def step_line(view: RunView) -> str:
    """One step in one plain line, for logs and pipes."""
    parts = [f"step {view.step}/{view.config.trainer.num_steps}"]
    if rewards := numbers(view.steps, "reward_mean"):
        parts.append(f"reward {rewards[-1]:.2f} (first {rewards[0]:.2f})")
    if accuracies := numbers(view.evals, "accuracy"):
        since = f"first {accuracies[0]:.0%}, " if len(accuracies) > 1 else ""
        version = view.evals[-1].count("version_min")
        parts.append(f"eval {accuracies[-1]:.0%} ({since}at version {version})")
    if view.last_step is not None:
        mean, largest = (view.last_step.number(f"staleness_{x}") for x in ("mean", "max"))
        parts.append(f"staleness {mean:.1f} (max {largest:.0f})")
    if view.stats is not None:
        parts.append(f"ready {view.stats.ready}")
    if view.tokens_per_s is not None:
        parts.append(f"{format_count(view.tokens_per_s)} tokens/s")
    if view.eta_s is not None:
        parts.append(f"{format_duration(view.eta_s)} left")
    if failed := view.counters.get("rewards_failed"):
        episodes = format_number_of(int(failed), "episode")
        parts.append(f"{episodes} without full reward, logs/worker-*.log say why")
    parts += [found.words for found in findings(view) if found.level is Level.alarm]
    return " | ".join(parts)


def render(view: RunView, width: int, hint: str = "Ctrl-C stops everything") -> RenderableType:
    """The whole panel, `width` columns wide: learning and the buffer, then pace and waits.

    `hint` in the lower border says how to end the run.
    """
    parts: list[RenderableType] = [_progress(view), "", _sections(view, width - FRAME), ""]
    if view.stats is not None:
        parts.append(_law(view.stats))
        if counted := panel_line(view.counters, view.stats.tokens_dropped):
            parts.append(Text.assemble(("Rollouts", "bold cyan"), f"  {counted}"))
    for change in view.changes[-LAST_CHANGES:]:
        ago = format_duration(max(0.0, view.now - change.t))
        words = printable(f"  {change_words(change)}, {ago} ago")
        parts.append(Text.assemble(("Changed", "bold cyan"), words))
    if (auto := view.config.buffer.autotune) is not None:
        words = f"  max_staleness between {auto.min_staleness} and {auto.max_staleness}"
        # Changes that were made stand above; the run alone knows of Ray's room and of refusals.
        why = find_move(view, wanted_engines, num_free=0)
        if isinstance(why, str) and view.stats is not None:
            words += f"; it stays at {view.stats.max_staleness}: {why}"
        parts.append(Text.assemble(("Autotune", "bold cyan"), words))
    parts += _findings(view)
    return Frame(
        Group(*parts),
        title=Text.assemble((" leash  ", "bold"), (f"{view.run} ", "bold cyan")),
        title_align="left",
        subtitle=Text(f" {hint} ", style="dim"),
        subtitle_align="right",
        border_style="cyan",
        padding=(0, 2),
    )


def _findings(view: RunView) -> list[Text]:
    styles = {Level.alarm: "bold red", Level.hint: "italic"}
    found = [
        Text(printable(one.line(view.named)), style=styles[one.level]) for one in findings(view)
    ]
    return found if view.is_measured else [*found, Text("Measuring waits...", style="dim")]


def _sections(view: RunView, width: int) -> Table:
    """The four sections in two columns; with shorter bars, or stacked, on a narrow terminal."""
    bar_width = WIDE_BAR if width >= WIDE_PANEL else NARROW_BAR
    learning, buffer = _learning(view, bar_width), _buffer(view, bar_width)
    pace, waiting = _pace(view), _waiting(view, bar_width)
    body = Table.grid(expand=True, padding=(0, 2, 0, 0))
    body.add_column(ratio=1)
    if width < NARROW_PANEL:
        for section in (learning, buffer, pace, waiting):
            body.add_row(section)
    else:
        body.add_column(ratio=1)
        body.add_row(learning, buffer)
        body.add_row("", "")
        body.add_row(pace, waiting)
    return body


def _progress(view: RunView) -> Table:
    num_steps = view.config.trainer.num_steps
    time_left = "" if view.eta_s is None else f", about {format_duration(view.eta_s)} left"
    row = Table.grid(expand=True, padding=(0, 2, 0, 0))
    for style, ratio in (("bold", None), ("", 1), ("", None), ("dim", None)):
        row.add_column(style=style, ratio=ratio)
    row.add_row(
        view.phase,
        ProgressBar(total=num_steps, completed=view.step, complete_style="cyan"),
        f"step {view.step} of {num_steps}",
        f"{format_duration(view.elapsed_s)}{time_left}",
    )
    return row


def _section(title: str, rows: Sequence[tuple[str, RenderableType]]) -> Group:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", width=max(len(name) for name, _ in rows))
    grid.add_column()
    for name, value in rows:
        grid.add_row(name, value)
    return Group(Text(title, style="bold cyan"), grid)


def _learning(view: RunView, bar_width: int) -> Group:
    rows: list[tuple[str, RenderableType]] = [
        ("reward", _trend(numbers(view.steps, "reward_mean"), "{:.2f}", bar_width)),
        ("held-out", _trend(numbers(view.evals, "accuracy"), "{:.0%}", bar_width)),
    ]
    if (own := view.command_eval) is not None:
        found = [f"{name} {own.number(full):.3g}" for full, name in below(own.values, "metric/")]
        words = ", ".join(found) or own.values.get("why")
        rows.append(("program", printable(f"{words} (step {own.count('step')})")))
    if (last := view.last_step) is not None:
        mean, largest = last.number("staleness_mean"), last.number("staleness_max")
        loss = last.number("loss")
        # Only the last step of an update has one.
        update = view.steps[-view.config.trainer.gradient_accumulation_steps :]
        norm = (series(update, "grad_norm") or [math.nan])[-1]
        rows += [
            ("staleness", f"{mean:.1f} mean, {largest:.0f} at most"),
            ("answers", f"{last.number('response_length_mean'):.1f} tokens, mean"),
            ("update", f"loss {loss:+.3f}, |grad| {norm:.2f}"),
        ]
    return _section("Learning", rows)


def _buffer(view: RunView, bar_width: int) -> Group:
    stats = view.stats
    if stats is None:
        return _section("Buffer", [("", Text("not started yet", style="dim"))])
    limit = stats.limit()
    rows: list[tuple[str, RenderableType]] = [
        ("in use", _leash_bar(stats, limit, bar_width)),
        ("", Text("  ").join(Text(f"{n} {name}", style) for n, name, style in _states(stats))),
    ]
    # No group is older, unless max_staleness was lowered just now.
    oldest = max(stats.max_staleness, *stats.by_staleness, 0)
    for staleness in range(oldest + 1)[-MAX_STALENESS_ROWS:]:
        count = stats.by_staleness.get(staleness, 0)
        is_last = staleness >= stats.max_staleness > 0
        style = "green" if staleness == 0 else "dark_orange" if is_last else "yellow"
        rows.append(
            (f"staleness {staleness}", _bar(count / limit, bar_width, style, f"{count} ready"))
        )
    return _section("Buffer", rows)


def _states(stats: BufferStats) -> tuple[tuple[int, str, str], ...]:
    return (
        (stats.leased, "leased", "magenta"),
        (stats.ready, "ready", "green"),
        (stats.running, "running", "blue"),
    )


def _leash_bar(stats: BufferStats, limit: int, width: int) -> Text:
    """Leased, ready and running groups as parts of the admission limit."""
    text, used = Text(), 0
    for count, _, style in _states(stats):
        end = min(width, round(width * (used + count) / limit))
        text.append("█" * (end - len(text)), style=style)
        used += count
    text.append("·" * (width - len(text)), style="dim")
    return text.append(f" {used} of {limit} groups")


def _law(stats: BufferStats) -> Text:
    """The conservation sum of all pushed groups."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(stats.dropped.items()))
    text = Text.assemble(
        ("Groups", "bold cyan"),
        f"  {stats.pushed:,} pushed = {stats.trained:,} trained + {stats.num_dropped:,} dropped",
        f" ({reasons})" if reasons else "",
        f" + {stats.ready} ready + {stats.leased} leased",
    )
    if stats.quarantined:
        text.append(f" + {stats.quarantined} quarantined")
    if not stats.is_conserved:
        text.append("  which does NOT add up", style="bold red")
    return text


def _pace(view: RunView) -> Group:
    rows: list[tuple[str, RenderableType]] = []
    if (stats := view.stats) is not None:
        rows.append(("trainer", f"version {stats.trainer_version}"))
        rows.append(("engines", _engine_versions(stats)))
    rate = view.tokens_per_s
    rows.append(("generated", "-" if rate is None else f"{format_count(rate)} tokens/s"))
    pace = view.seconds_per_step
    rows.append(("step", "-" if pace is None else format_duration(pace)))
    if (convergence_s := median(view.weights.convergence_s)) is not None:
        rows.append(("weights", f"{format_duration(convergence_s)} to every engine"))
    if (pause_s := median(view.weights.pause_s)) is not None:
        rows.append(("engine pause", f"{format_duration(pause_s)} per commit"))
    return _section("Versions and pace", rows)


def _engine_versions(stats: BufferStats) -> Text:
    if not stats.engine_versions:
        return Text("none serves", style="red") if stats.engines_gone else Text("-")
    oldest, newest = min(stats.engine_versions.values()), max(stats.engine_versions.values())
    text = Text(f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}")
    if (lag := stats.trainer_version - oldest) > 0:
        text.append(f" ({lag} behind)", style="yellow")
    return text


def _waiting(view: RunView, bar_width: int) -> Group:
    rows: list[tuple[str, RenderableType]] = []
    for name, fraction in (
        ("trainer for rollouts", view.wait_fractions.trainer_for_rollout),
        ("trainer for weights", view.wait_fractions.trainer_for_weights),
        ("rollouts for trainer", view.wait_fractions.rollout_for_trainer),
    ):
        style = "red" if fraction >= 0.5 else "yellow" if fraction >= MUCH else "green"
        rows.append((name, _bar(fraction, bar_width, style, f"{fraction:.0%}")))
    return _section("Waits", rows)


def _bar(fraction: float, width: int, style: str, label: str) -> Text:
    filled = min(width, round(width * fraction))
    text = Text("█" * filled, style=style)
    text.append("·" * (width - filled), style="dim")
    return text.append(f" {label}", style="default")


def _trend(values: Sequence[float], form: str, width: int) -> Text:
    """The current value, its history as a sparkline, and the first value."""
    if not values:
        return Text("-")
    text = Text.assemble((form.format(values[-1]), "bold"))
    text.append(f" {sparkline(values, width)} ", style="green")
    return text.append(f"from {form.format(values[0])}", style="dim")


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` bars from 0 to the largest value; each the mean of its part of `values`."""
    top = max([*values, 1e-9])
    count = min(width, len(values))
    bars = []
    for i in range(count):
        part = values[i * len(values) // count : (i + 1) * len(values) // count]
        level = max(0.0, sum(part) / len(part)) / top
        bars.append(SPARKS[min(len(SPARKS) - 1, int(level * len(SPARKS)))])
    return "".join(bars)
