"""`make status`: what a run is doing and its bottleneck, from any shell, also after its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from rich.console import Console
from rich.markdown import Markdown

from buffer.results import BufferStats
from configs.run_files import read_text
from controller.buffer_access import BufferAddress, opened, opened_state
from controller.metrics.history import Record, Waits, of_kind, read_metrics
from controller.metrics.weights import WeightsView
from controller.report.panel import render
from controller.report.result import training_seconds
from controller.report.run_view import RunView
from controller.run_dir import RunDir
from controller.watch.bottleneck import bottleneck_sentence, wait_fractions
from controller.watch.learning import learning_alarms
from host.printable import printable

CONNECT_TIMEOUT_S = 10.0


def print_status(run_dir: RunDir, console: Console | None = None) -> None:
    """Print the panel of a running run, or the summary and the bottleneck of one that ended.

    Raises ValueError if the folder is not a run's, and ConnectionError or TimeoutError if the Redis
    of a running run does not answer.
    """
    console = console or Console()
    record, url = run_dir.read_record(), run_dir.read_redis_url()
    if record.state != "running":
        console.print(f"{run_dir.name}: {record.state}", style="bold")
        _print_history(run_dir, console)
    elif not record.is_alive:
        console.print(f"{run_dir.name}: {run_dir.gone_words}", highlight=False, soft_wrap=True)
        _print_history(run_dir, console)
    elif url is None:
        console.print(f"{run_dir.name} is starting; its Redis is not up yet.")
    else:
        view = _live_view(run_dir, record.started, url)
        console.print(render(view, console.width, hint=f"`{run_dir.command('stop')}` ends the run"))


def _live_view(run_dir: RunDir, started: float, url: str) -> RunView:
    """The past from `metrics.jsonl`, the present from Redis."""
    config = run_dir.read_config()
    view = RunView.of_run(run_dir.name, config, started)
    for record in read_metrics(run_dir.metrics):
        view.apply(record)
    address = BufferAddress(url=url, run=run_dir.name, settings=config.buffer)
    try:
        stats, waits, counters = asyncio.run(_sample(address))
    except (ConnectionError, TimeoutError):
        if config.buffer.url is not None:
            raise
        raise ConnectionError(
            f"the Redis of {run_dir.name} does not answer: it is stopped, busy, or being started "
            f"again; {run_dir.log_of('redis')} may say why"
        ) from None
    view.observe(time.time(), stats, waits, counters)
    return view


async def _sample(address: BufferAddress) -> tuple[BufferStats, Waits, Mapping[str, float]]:
    async with (
        asyncio.timeout(CONNECT_TIMEOUT_S),
        opened(address) as buffer,
        opened_state(address) as state,
    ):
        return await buffer.stats(), await state.waits(), await state.counters()


def _print_history(run_dir: RunDir, console: Console) -> None:
    """Summary if there is one, and the bottleneck over the whole run."""
    records = read_metrics(run_dir.metrics)
    summary = run_dir.path / "summary.md"
    if summary.exists():
        console.print(Markdown(printable(read_text(summary)).partition("\n![")[0]))
    elif records:
        steps = of_kind(records, "step")
        console.print(f"It made {len(steps)} steps; the log of each process is in {run_dir.logs}/.")
        for alarm in learning_alarms(steps):
            console.print(alarm.sentence, style="bold red", highlight=False, markup=False)
    if sentence := _bottleneck(records):
        console.print(printable(sentence), style="italic", markup=False)


def _bottleneck(records: list[Record]) -> str | None:
    steps, samples = of_kind(records, "step"), of_kind(records, "buffer")
    if not samples or len(steps) < 2:
        return None
    seconds, last = training_seconds(steps), samples[-1]
    view = WeightsView()
    for record in records:
        view.apply(record)
    # An engine that was late at the end says nothing about the whole run.
    num_publishes = sum(step.number("snapshot_s") > 0 for step in steps)
    pace = view.pace(seconds / max(1, num_publishes), trainer_version=0, engine_versions={})
    fractions = wait_fractions(last.waits, seconds)
    return bottleneck_sentence(fractions, int(last.number("max_staleness")), "of the run", pace)
