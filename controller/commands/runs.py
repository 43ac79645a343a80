"""`make runs`: all runs of a folder, the newest first, each with its verdict and last figures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import msgspec
from rich.console import Console

from controller.commands.status import live_view
from controller.metrics.history import Record, of_kind, read_metrics, series, training_seconds
from controller.run_dir import RunDir, settings_of
from controller.units import format_count
from controller.watch.verdict import findings, findings_of_ended
from host.printable import printable


@dataclass(kw_only=True, slots=True, frozen=True)
class Row:
    """One run. What is not known, as of a run of an older version, is None."""

    run: str
    state: str
    """running, finished, failed, stopped, gone (its controller was killed), or unreadable."""
    started: float | None = None
    step: int | None = None
    num_steps: int | None = None
    reward: float | None = None
    accuracy: float | None = None
    tokens_per_s: float | None = None
    verdict: str = ""
    """The first line of `make status`, or why the run failed."""


def list_runs(dir: str, as_json: bool = False) -> None:
    """Print each run of the folder, also one whose files are missing or damaged."""
    rows = sorted(map(row_of, RunDir.below(dir)), key=lambda row: -(row.started or 0.0))
    if as_json:
        print(msgspec.json.encode(rows).decode())
        return
    for line in lines(rows) if rows else [f"no run below {dir}/ yet: start one with `make launch`"]:
        Console().print(printable(line), highlight=False, markup=False, soft_wrap=True)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Two lines a run: its figures, and its verdict (pure)."""
    widths = [max(map(len, column)) for column in zip(*map(_cells, rows), strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(_cells(row), widths, strict=True)]
        yield "  ".join(cells).rstrip()
        if row.verdict:
            yield f"    {row.verdict}"


def _cells(row: Row) -> tuple[str, ...]:
    started = ""
    with contextlib.suppress(ValueError, OverflowError, OSError):  # a damaged run.json
        if row.started is not None:
            started = f"{datetime.fromtimestamp(row.started):%Y-%m-%d %H:%M}"
    of = "" if row.num_steps is None else f" of {row.num_steps}"
    return (
        *(row.run, row.state, started),
        "" if row.step is None else f"step {row.step}{of}",
        "" if row.reward is None else f"reward {row.reward:.3g}",
        "" if row.accuracy is None else f"accuracy {row.accuracy:.3g}",
        "" if row.tokens_per_s is None else f"{format_count(row.tokens_per_s)} tokens/s",
    )


def row_of(run_dir: RunDir) -> Row:
    row = Row(run=run_dir.name, state="unreadable")
    try:
        record, url = run_dir.read_record(), run_dir.read_redis_url()
        is_gone = record.state == "running" and not record.is_alive
        row = replace(row, state="gone" if is_gone else record.state, started=record.started)
        records = read_metrics(run_dir.metrics)
        row = _with_figures(row, run_dir, records)
        if is_gone or record.error:
            row = replace(row, verdict=record.error or run_dir.gone_words)
        elif record.is_running and url is not None:
            found = findings(live_view(run_dir, record, url, records))
            row = replace(row, verdict=found[0].sentence if found else "")
    except (ValueError, RuntimeError, OSError) as error:  # the others are to be seen
        row = replace(row, verdict=str(error))
    return replace(row, verdict=row.verdict.partition("\n")[0])


def _with_figures(row: Row, run_dir: RunDir, records: Sequence[Record]) -> Row:
    steps = of_kind(records, "step")
    seconds, found = training_seconds(steps), findings_of_ended(records)
    tokens = _last(of_kind(records, "buffer"), "tokens_generated")
    num_steps = settings_of(run_dir.path).get("trainer.num_steps")
    return replace(
        row,
        step=steps[-1].count("step") if steps else 0,
        num_steps=num_steps if isinstance(num_steps, int) else None,
        reward=_last(steps, "reward_mean"),
        accuracy=_last(of_kind(records, "eval"), "accuracy"),
        tokens_per_s=tokens / seconds if tokens and seconds else None,
        verdict=found[0].sentence if found else "",
    )


def _last(records: Sequence[Record], name: str) -> float | None:
    return next(iter(series(records[-1:], name)), None)
