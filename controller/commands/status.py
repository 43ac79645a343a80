"""`make status`: the verdict on a run and what it is doing, from any shell, also after its end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from configs.run_files import read_text
from controller.commands.tune import tune
from controller.metrics.history import Record, of_kind, read_metrics
from controller.report.panel import render
from controller.run_dir import RunDir, RunRecord
from controller.watch.finding import Finding
from controller.watch.look import as_object, observe
from controller.watch.run_view import RunView
from controller.watch.stages import RECENT_S, stages
from controller.watch.verdict import findings, findings_of_ended
from host.printable import printable


def print_status(
    run_dir: RunDir,
    as_json: bool = False,
    fix: bool = False,
    waits: bool = False,
    console: Console | None = None,
) -> None:
    """Print the verdict on a run, and the panel of a running one or the summary of one that ended.

    `as_json`: print one object instead. `fix`: run the verdict's command after a yes. `waits`: add
    the shares of all stages. Raises ValueError if the folder is not a run's or there is nothing to
    run, and ConnectionError or TimeoutError if the Redis of a running run does not answer.
    """
    if as_json and fix:
        raise ValueError("JSON=1 FIX=1: one prints an object, the other asks; choose one of them")
    console = console or Console()
    record, url = run_dir.read_record(), run_dir.read_redis_url()
    is_over = record.state != "running" or not record.is_alive
    is_gone = is_over and record.state == "running"
    records = read_metrics(run_dir.metrics)
    view = None if is_over or url is None else live_view(run_dir, record, url, records)
    history = records if is_over else []
    found = findings_of_ended(history) if view is None else findings(view)
    shares = stages(records, RECENT_S if view else math.inf) if as_json or waits else []
    if as_json:
        state = "gone" if is_gone else record.state
        whole = {**as_object(run_dir, state, view, found), "stages": shares}
        print(msgspec.json.encode(whole).decode())
        return
    if view is not None or (found and not is_gone):
        verdict = found[0].line(run_dir.named) if found else "Nothing is measured so far."
        console.print(printable(verdict), style="bold", markup=False, soft_wrap=True)
    if view is not None:
        console.print(render(view, console.width, hint=f"`{run_dir.command('stop')}` ends the run"))
    elif not is_over:
        console.print(f"{run_dir.name} is starting; its Redis is not up yet.")
    else:
        how = run_dir.gone_words if is_gone else record.state
        console.print(f"{run_dir.name}: {how}", highlight=False, soft_wrap=True)
        summary = run_dir.path / "summary.md"
        if summary.exists() and not is_gone:  # it would be that of an earlier end
            console.print(Markdown(printable(read_text(summary)).partition("\n![")[0]))
        elif history:
            steps = len(of_kind(history, "step"))
            console.print(f"It made {steps} steps; the log of each process is in {run_dir.logs}/.")
            # The first one has been printed, unless the controller is gone.
            for finding in found if is_gone else found[1:]:
                console.print(printable(finding.sentence), highlight=False, markup=False)
    if waits:
        table = Table("of", "stage", "share", "waits for", box=None, pad_edge=False)
        for one in shares:
            table.add_row(one.of, one.name, f"{one.share:.1%}", one.waits_for)
        console.print(table)
    if fix:
        _fix(run_dir, found, is_live=view is not None)


def _fix(run_dir: RunDir, found: Sequence[Finding], *, is_live: bool) -> None:
    """Run the verdict's command, if a running job takes it and a person says yes."""
    verdict = found[0] if found else None
    if verdict is None or not verdict.changes or not is_live:
        raise ValueError("FIX=1: the verdict has no command for a running job; do what it says")
    command = verdict.command(run_dir.named)
    if not verdict.is_live:
        raise ValueError(f"FIX=1: that takes a restart, which is yours to choose: {command}")
    try:
        answer = input(f"{command}\nRun it? [y/N] ")
    except EOFError:  # no terminal
        answer = ""
    if answer.strip().lower() in ("y", "yes"):
        tune(run_dir, verdict.changes)


def live_view(run_dir: RunDir, run: RunRecord, url: str, records: Iterable[Record]) -> RunView:
    """The past from `records`, those of `metrics.jsonl`; the present from Redis."""
    view = RunView(
        run=run_dir.name,
        config=run_dir.read_config(),
        started=run.started,
        named=run_dir.named,
    )
    for record in records:
        view.apply(record)
    observe(view, run_dir, run, url)
    return view
